// No race, whatever the timing: the happens-before checker passes every schedule and reports each
// wait that is taken away; delays on any stream do not change a bit.

#include "core/profiler.h"
#include "test/dist/fsdp/combos.h"
#include "test/dist/fsdp/observer.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using dist::WaitPoint;

/// The run with its streams disturbed.
FsdpRun tapped(FsdpRun run, const StreamTap::Options& options) {
  run.on_ready = [options](dist::Fsdp& fsdp, dist::World& world) {
    StreamTap::Options own = options;
    own.seed = options.seed * 131 + static_cast<uint64_t>(world.rank());
    StreamTap::install(fsdp, own);
  };
  return run;
}

TEST_CASE("fsdp race: 100 seeds of random delays on each stream give the same bits", "[fsdp]") {
  const std::vector<Combo> combos = every_combo();
  std::map<std::pair<int, bool>, FsdpResult> expected;  // by micro-batches and precision
  std::mt19937_64 random(7);
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const Combo combo = combos[random() % combos.size()];
    const bool is_bf16 = random() % 2 == 1;
    const int num_micro_batches = 1 + static_cast<int>(random() % 2);
    FsdpRun run = make_run(combo, 4, is_bf16 ? Precision::kMixed : Precision::kF32);
    run.num_micro_batches = num_micro_batches;
    // Like for like: sums of micro-batches in one order.
    run.fsdp.sync_every_micro_batch = dist::GradSync::kLast;
    FsdpResult& same = expected[{num_micro_batches, is_bf16}];
    if (same.losses.empty()) same = run_fsdp_on_threads(4, run);
    run = tapped(run, {.delayed_share = 0.05, .max_delay_us = 300, .seed = seed});
    run.local.max_random_delay_us = 200;
    run.local.delay_seed = seed;
    check_same(run_fsdp_on_threads(4, run), same,
               fmt::format("seed {}: {}, {} micro-batches, bf16 {}", seed, combo.to_string(),
                           num_micro_batches, is_bf16));
  }
}

TEST_CASE("fsdp race: a slow outer reduction gives the bits of streams one after the other",
          "[fsdp]") {
  for (const dist::Strategy strategy :
       {dist::Strategy::kHybridShard, dist::Strategy::kHybridShardZero2}) {
    for (const auto sync : {dist::GradSync::kShard, dist::GradSync::kEveryMicroBatch}) {
      FsdpRun run;
      run.model.num_layers = 8;
      run.num_micro_batches = 2;
      run.fsdp.strategy = strategy;
      run.fsdp.shard_size = 2;
      run.fsdp.sync_every_micro_batch = sync;
      const FsdpResult serial = run_fsdp_on_threads(4, tapped(run, {.serializes = true}));
      const FsdpResult slow = run_fsdp_on_threads(
          4, tapped(run, {.delayed_share = 1, .max_delay_us = 3000, .only_stream = "all_reduce"}));
      check_same(slow, serial, fmt::format("{}, sync {}", name_of(strategy), dist::name_of(sync)));
    }
  }
}

TEST_CASE("fsdp race: each wait is needed: without it the checker reports a conflict", "[fsdp]") {
  std::vector<FsdpRun> runs;
  for (const Combo& combo : pair_covering_combos()) {
    FsdpRun run = make_run(combo, 4, Precision::kMixed);
    run.num_micro_batches = 2;
    run.num_steps = 2;
    runs.push_back(run);
    if (combo.strategy() == dist::Strategy::kFullShard && combo.offload() == dist::Offload::kNone) {
      FsdpRun in_parts = run;
      in_parts.fsdp.reshard_after_forward = 2;
      in_parts.fsdp.prefetch_forward = in_parts.fsdp.prefetch_backward = 2;  // slots free for long
      runs.push_back(in_parts);
    }
    run.twice = true;
    runs.push_back(run);
    if (combo.strategy() < dist::Strategy::kHybridShard) continue;
    run.fsdp.sync_every_micro_batch = dist::GradSync::kEveryMicroBatch;
    runs.push_back(run);
  }
  for (int point = 0; point < static_cast<int>(WaitPoint::kCount); ++point) {
    bool is_reported = false;
    for (FsdpRun run : runs) {
      run.on_ready = [point](dist::Fsdp& fsdp, dist::World&) {
        parts_of(fsdp).lanes.wait.hidden = static_cast<WaitPoint>(point);
      };
      try {
        run_fsdp_on_threads(4, run);
      } catch (const InternalError& error) {
        is_reported = std::string(error.what()).find("order check") != std::string::npos;
      }
      if (is_reported) break;
    }
    INFO("wait point " << point);
    CHECK(is_reported == (point != static_cast<int>(WaitPoint::kNone)));
  }
}

bool is_waiting(const TraceEvent& e) {
  return std::string_view(e.name) == "wait";
}

/// Time in which both streams are busy, nanoseconds.
int64_t overlap_ns(const std::vector<TraceEvent>& events, const Stream& a, const Stream& b) {
  int64_t sum = 0;
  for (const TraceEvent& x : events) {
    if (x.stream_id != a.id() || is_waiting(x)) continue;
    for (const TraceEvent& y : events) {
      if (y.stream_id != b.id() || is_waiting(y)) continue;
      sum += std::max<int64_t>(0, std::min(x.end_ns, y.end_ns) - std::max(x.begin_ns, y.begin_ns));
    }
  }
  return sum;
}

int64_t busy_ns(const std::vector<TraceEvent>& events, const Stream& stream) {
  int64_t sum = 0;
  for (const TraceEvent& e : events) {
    if (e.stream_id == stream.id() && !is_waiting(e)) sum += e.end_ns - e.begin_ns;
  }
  return sum;
}

TEST_CASE("fsdp race: gathers and reduces overlap in backward with two communicators", "[fsdp]") {
  for (const int communicators : {1, 2}) {
    FsdpRun run;
    run.num_steps = 2;
    run.model.num_layers = 6;
    run.fsdp.communicators = communicators;
    run.local.latency_us = 3000;
    Stream gathers, reduces;
    run.on_ready = [&](dist::Fsdp& fsdp, dist::World& world) {
      if (world.rank() != 0) return;
      gathers = parts_of(fsdp).lanes.all_gather;
      reduces = parts_of(fsdp).lanes.reduce_scatter;
      profiler::start();
    };
    run_fsdp_on_threads(2, run);
    profiler::stop();
    if (communicators == 1) {
      CHECK(gathers == reduces);
      continue;
    }
    const int64_t overlap = overlap_ns(profiler::events(), gathers, reduces);
    INFO(overlap << " ns");
    // Backward gathers five blocks and reduces eight units a step, at 3 ms each.
    CHECK(overlap > 10'000'000);
  }
}

/// Of the time in which the host copies of a run are busy, the share in which compute is too: the
/// smaller one of both directions.
double share_of_copies_beside_compute(FsdpRun run) {
  Stream compute, h2d, d2h;
  const auto tap = run.on_ready;
  run.on_ready = [&](dist::Fsdp& fsdp, dist::World& world) {
    tap(fsdp, world);
    if (world.rank() != 0) return;
    const dist::Lanes& lanes = parts_of(fsdp).lanes;
    compute = lanes.compute, h2d = lanes.offloader->h2d(), d2h = lanes.offloader->d2h();
    profiler::start();
  };
  run_fsdp_on_threads(2, run);
  profiler::stop();
  const std::vector<TraceEvent> events = profiler::events();
  double share = 1;
  for (const Stream& copies : {h2d, d2h}) {
    share = std::min(share, static_cast<double>(overlap_ns(events, compute, copies)) /
                                static_cast<double>(busy_ns(events, copies)));
  }
  return share;
}

TEST_CASE("fsdp race: copies to and from the host overlap with compute", "[fsdp]") {
  FsdpRun run;
  run.num_steps = 2;
  run.model.num_layers = 6;
  run.fsdp.offload = dist::Offload::kParamsAndOptimizer;
  run.fsdp.offload_window = 1024;
  // Kernels and copies that take long enough to be seen, as tasks in front of each.
  run = tapped(run, {.delayed_share = 1, .max_delay_us = 500});
  // Streams whose work is in one order never overlap; those that may, do unless the machine is so
  // busy that one thread runs at a time.
  double share = 0;
  for (int i = 0; i < 5 && share <= 0.25; ++i) {
    share = std::max(share, share_of_copies_beside_compute(run));
  }
  CHECK(share > 0.25);
}

}  // namespace
}  // namespace tessera::testing
