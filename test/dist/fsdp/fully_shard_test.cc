#include "dist/fsdp/fully_shard.h"

#include "test/dist/fsdp/harness.h"
#include "test/testing.h"

namespace tessera {
namespace {

using dist::GradSync;
using dist::Strategy;
using testing::check_near;
using testing::check_same;
using testing::FsdpResult;
using testing::FsdpRun;
using testing::kStrategies;
using testing::run_fsdp_on_threads;

TEST_CASE("fsdp: every strategy gives the same bits at one world size", "[fsdp]") {
  for (const int world : {1, 2, 4}) {
    FsdpRun run;
    run.fsdp.strategy = Strategy::kNoShard;
    const FsdpResult expected = run_fsdp_on_threads(world, run);
    for (const Strategy strategy : kStrategies) {
      for (const int prefetch : {0, 1, 2}) {
        run.fsdp = {};
        run.fsdp.strategy = strategy;
        run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
        if (strategy >= Strategy::kHybridShard) run.fsdp.shard_size = world == 4 ? 2 : world;
        check_same(run_fsdp_on_threads(world, run), expected,
                   fmt::format("{} world {} prefetch {}", name_of(strategy), world, prefetch));
      }
    }
  }
}

TEST_CASE("fsdp: ranks, micro-batches and ragged data give what one rank does", "[fsdp]") {
  for (const bool ragged : {false, true}) {
    FsdpRun run;
    run.ragged = ragged;
    run.fsdp.strategy = Strategy::kNoShard;
    const FsdpResult expected = run_fsdp_on_threads(1, run);
    for (const Strategy strategy : kStrategies) {
      for (const int world : {1, 2, 4}) {
        for (const int micro_batches : {1, 2}) {
          run.fsdp = {};
          run.fsdp.strategy = strategy;
          if (strategy >= Strategy::kHybridShard) run.fsdp.shard_size = world == 4 ? 2 : 1;
          run.num_micro_batches = micro_batches;
          run.with_eval = true;
          check_near(run_fsdp_on_threads(world, run), expected, 1e-5,
                     fmt::format("{} world {} micro-batches {} ragged {}", name_of(strategy), world,
                                 micro_batches, ragged));
        }
      }
    }
  }
}

TEST_CASE("fsdp: 20 steps on 1 to 4 ranks stay with one rank that shards nothing", "[fsdp]") {
  FsdpRun run;
  run.num_steps = 20;
  run.samples_per_step = 12;
  // AdamW turns rounding of a gradient near zero into steps of lr: a larger one measures that.
  run.lr = 1e-3f;
  run.fsdp.strategy = Strategy::kNoShard;
  const FsdpResult expected = run_fsdp_on_threads(1, run);
  run.fsdp.strategy = Strategy::kFullShard;
  for (const int world : {1, 2, 3, 4}) {
    const std::string what = fmt::format("full_shard world {}", world);
    const FsdpResult actual = run_fsdp_on_threads(world, run);
    check_near(actual, expected, 1e-5, what);
    check_same(run_fsdp_on_threads(world, run), actual, what + ", a second run");
  }
}

}  // namespace
}  // namespace tessera
