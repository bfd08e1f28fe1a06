#include "dist/comm/watchdog.h"

#include <atomic>
#include <thread>

#include "dist/comm/local.h"
#include "dist/comm/mesh.h"
#include "test/dist/comm/cases.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::dist;
using namespace tessera::dist::testing;
using tessera::testing::error_of;

TEST_CASE("watchdog: a record says what, why and how much", "[comm]") {
  CollectiveRecord record;
  record.op = "all_gather";
  record.nbytes = 4096;
  record.sequence = 41;
  REQUIRE(record.to_string() == "all_gather (4096 bytes, sequence 41)");
  record.phase = "forward";
  record.unit = "block3";
  record.step = 12;
  REQUIRE(record.to_string() == "all_gather of block3 (forward, step 12, 4096 bytes, sequence 41)");
}

TEST_CASE("watchdog: a log keeps the last 16 collectives in order", "[comm]") {
  CollectiveLog log(CommGroup::world(0, 1), std::make_shared<std::atomic<bool>>(false));
  for (int i = 0; i < 20; ++i) {
    const CollectiveScope scope(log, "all_gather", {"forward", "block0", i}, i);
  }
  log.begin("reduce_scatter", {}, 7);
  const auto records = log.records();
  REQUIRE(records.size() == CollectiveLog::kNumKept);
  for (size_t i = 0; i + 1 < records.size(); ++i) {
    REQUIRE(records[i].sequence == static_cast<int64_t>(i) + 5);
    REQUIRE(records[i].step == records[i].sequence);
    REQUIRE(records[i].end_ns >= records[i].begin_ns);
  }
  REQUIRE(records.back().op == "reduce_scatter");
  REQUIRE(records.back().end_ns == 0);
}

namespace {

/// The error of a run of `world_size` ranks whose rank `missing` comes to nothing once `prepare` is
/// through, while the others go on with `body`, which throws.
std::string message_without(int world_size, int missing, const LocalOptions& options,
                            const std::function<std::shared_ptr<Comm>(World&)>& prepare,
                            const std::function<void(Comm&, const Stream&)>& body) {
  std::atomic<int> num_ended{0};
  std::string message;
  try {
    run_ranks(world_size, options, [&](World& world) {
      const auto comm = prepare(world);
      const Stream stream = Context::current()->make_stream("comm");
      if (world.rank() == missing) {
        while (num_ended == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        return;
      }
      try {
        body(*comm, stream);
        stream.synchronize();
      } catch (const CommError&) {
        num_ended++;
        throw;
      }
    });
  } catch (const CommError& error) {
    message = error.what();
    CHECK(error.exit_status() == 6);
  }
  return message;
}

LocalOptions with_timeout(int ms) {
  LocalOptions options;
  options.timeout = std::chrono::milliseconds(ms);
  return options;
}

}  // namespace

TEST_CASE("watchdog: the rank that has not entered a collective is named", "[comm]") {
  const std::string message = message_without(
      3, 1, with_timeout(300),
      [](World& world) { return std::shared_ptr<Comm>(world.make_comm()); },
      [](Comm& comm, const Stream& stream) {
        std::vector<float> full(24), shard(8);
        comm.all_gather(stream, full.data(), shard.data(), 8, kF32, {"backward", "block7", 1});
        stream.synchronize();
      });
  CAPTURE(message);
  CHECK((message.starts_with("rank 0: ") || message.starts_with("rank 2: ")));
  CHECK(
      message.ends_with("all_gather of block7 (backward, step 1, 32 bytes, sequence 0) has not "
                        "finished in 0.3 s; rank 1 has not entered it"));
}

TEST_CASE("watchdog: ranks of a shard group are called by their ranks in the world", "[comm]") {
  const auto prepare = [](World& world) {
    const auto all = world.make_comm();
    return std::shared_ptr<Comm>(Mesh::make(4, world.rank(), 2).split_shard(*all));
  };
  const std::string message =
      message_without(4, 3, with_timeout(300), prepare, [](Comm& comm, const Stream& stream) {
        std::vector<float> full(16), shard(8);
        comm.all_gather(stream, full.data(), shard.data(), 8, kF32, {"forward", "block2", 0});
        stream.synchronize();
      });
  CHECK(message ==
        "rank 2: all_gather of block2 (forward, step 0, 32 bytes, sequence 0) has not "
        "finished in 0.3 s; rank 3 has not entered it");
  // Also where the ranks of a group disagree.
  const std::string other = error_of([&] {
    run_ranks(4, [&](World& world) {
      const auto comm = prepare(world);
      const Stream stream = Context::current()->make_stream("comm");
      std::vector<float> full(16), shard(8);
      if (world.rank() == 3) {
        comm->reduce_scatter(stream, shard.data(), full.data(), 8, kF32, kF32, false, nullptr);
      } else {
        comm->all_gather(stream, full.data(), shard.data(), 8, kF32);
      }
      stream.synchronize();
    });
  });
  CHECK(other.find("the ranks disagree: rank 2 calls all_gather (32 bytes), rank 3 calls "
                   "reduce_scatter (32 bytes)") != std::string::npos);
}

TEST_CASE("watchdog: lists of ranks are short and say how many they leave out", "[comm]") {
  CHECK(format_ranks({}) == "no rank");
  CHECK(format_ranks({5, 5}) == "rank 5");
  CHECK(format_ranks({3, 1, 0}) == "ranks 0, 1, 3");
  CHECK(format_ranks({4, 0, 2, 1, 7}) == "ranks 0-2, 4, 7");
  std::vector<int> even, all;
  for (int r = 0; r < 1000; ++r) (r % 2 == 0 ? even : all).push_back(r);
  CHECK(format_ranks(even) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 492 more");
  all.insert(all.end(), even.begin(), even.end());
  CHECK(format_ranks(all) == "ranks 0-999");
  CollectiveRecord record;
  record.op = "all_gather";
  record.unit = std::string(100000, 'u');
  CHECK(record.to_string().size() < 300);
}

TEST_CASE("watchdog: where a rank is travels as text", "[comm]") {
  RankView view;
  view.rank = 3;
  view.where = "in all_gather of two\nlines (4 bytes, sequence 1)";
  view.last = "barrier (1 bytes, sequence 0)";
  view.seconds_since = 1.5;
  view.counts[0xfedcba9876543210u] = {7, 9};
  view.counts[1] = {1, 0};
  const RankView read = RankView::from_text(view.to_text());
  CHECK(read.rank == 3);
  CHECK(read.where == "in all_gather of two lines (4 bytes, sequence 1)");
  CHECK(read.last == view.last);
  CHECK(read.seconds_since == 1.5);
  REQUIRE(read.counts.size() == 2);
  CHECK(read.counts.at(0xfedcba9876543210u).num_begun == 7);
  CHECK(read.counts.at(0xfedcba9876543210u).num_calls == 9);
  view.last = "";  // nothing has ended yet
  CHECK(RankView::from_text(view.to_text()).last.empty());
  CHECK(RankView::from_text(view.to_text()).counts.size() == 2);
  CHECK(RankView::from_text("").counts.empty());
}

TEST_CASE("watchdog: nothing that is watched holds up the report", "[comm]") {
  struct Blocked final : CollectivePoller {
    std::atomic<bool> is_inside{false}, is_released{false};
    void poll() override {
      is_inside = true;
      while (!is_released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  const auto poller = std::make_shared<Blocked>();
  std::atomic<bool> is_reported{false}, is_action_released{false};
  std::string reason;
  Watchdog watchdog(std::chrono::milliseconds(100), [&](const std::string& r) {
    reason = r;
    is_reported = true;
  });
  watchdog.add_poller(poller);
  // What the process does before it ends may hang too, on a disk that is gone.
  watchdog.set_on_end([&](const std::string&) {
    while (!is_action_released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  while (!poller->is_inside) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto log = watchdog.make_log(CommGroup::world(0, 2));
  log->enter_call("all_gather", {"forward", "block3", 7}, 64);
  while (!is_reported) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(reason ==
        "rank 0: the call of all_gather of block3 (forward, step 7, 64 bytes, sequence 0) "
        "has not finished in 0.1 s; rank 1 does not answer: stopped or gone");
  poller->is_released = is_action_released = true;
}

TEST_CASE("watchdog: quiet while everything ends in time, however long the run", "[comm]") {
  LocalOptions options;
  options.timeout = std::chrono::milliseconds(400);
  REQUIRE_NOTHROW(run_ranks(2, options, [](World& world) {
    const auto comm = world.make_comm();
    const Stream stream = Context::current()->make_stream("comm");
    float x = 1;
    for (int i = 0; i < 5; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      comm->all_reduce(stream, &x, 1, kF32, nullptr);
    }
    stream.synchronize();
    expect(x == 32, "sum is {}", x);
    world.watchdog().set_timeout(std::chrono::milliseconds(0));  // never
    if (world.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(700));
    world.control().barrier();
  }));
}

TEST_CASE("watchdog: time in which the process was stopped is forgiven", "[comm]") {
  CollectiveLog log(CommGroup::world(0, 1), std::make_shared<std::atomic<bool>>(false));
  log.forgive(5);  // nothing in flight
  log.begin("all_gather", {}, 1);
  const int64_t begin_ns = log.records().back().begin_ns;
  log.forgive(1000);
  REQUIRE(log.records().back().begin_ns == begin_ns + 1000);
  log.end();
  log.forgive(1000);
  REQUIRE(log.records().back().begin_ns == begin_ns + 1000);
}
