#include <thread>

#include "dist/comm/local.h"
#include "dist/comm/watchdog.h"
#include "test/dist/comm_cases.h"
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
  CollectiveLog log(0, std::make_shared<std::atomic<bool>>(false));
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

TEST_CASE("watchdog: a collective that one rank does not join ends all ranks in time", "[comm]") {
  LocalOptions options;
  options.timeout = std::chrono::milliseconds(300);
  const auto begin = std::chrono::steady_clock::now();
  std::string message;
  try {
    run_ranks(3, options, [](World& world) {
      const auto comm = world.make_comm();
      const Stream stream = Context::current()->make_stream("comm");
      std::vector<float> full(24), shard(8);
      for (int step = 0; step < 2; ++step) {
        if (step == 1 && world.rank() == 1) break;
        comm->all_gather(stream, full.data(), shard.data(), 8, kF32, {"backward", "block7", step});
      }
      stream.synchronize();
      world.control().barrier();
    });
  } catch (const CommError& error) {
    message = error.what();
    REQUIRE(error.exit_status() == 6);
  }
  // Ranks 0 and 2 wait in the gather, rank 1 in the barrier: any may be the first that is late.
  CAPTURE(message);
  REQUIRE(message.find("has not finished in 0.3 s") != std::string::npos);
  const bool names_gather =
      message.find("all_gather of block7 (backward, step 1, 32 bytes, sequence 1)") !=
      std::string::npos;
  REQUIRE((names_gather || message.find("rank 1: barrier (1 bytes") != std::string::npos));
  REQUIRE(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
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
    world.set_timeout(std::chrono::milliseconds(0));  // never
    if (world.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(700));
    world.control().barrier();
  }));
}

TEST_CASE("watchdog: time in which the process was stopped is forgiven", "[comm]") {
  CollectiveLog log(0, std::make_shared<std::atomic<bool>>(false));
  log.forgive(5);  // nothing in flight
  log.begin("all_gather", {}, 1);
  const int64_t begin_ns = log.records().back().begin_ns;
  log.forgive(1000);
  REQUIRE(log.records().back().begin_ns == begin_ns + 1000);
  log.end();
  log.forgive(1000);
  REQUIRE(log.records().back().begin_ns == begin_ns + 1000);
}
