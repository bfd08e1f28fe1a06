// Recompute policies under FSDP: the same bits as without, and how often a unit is gathered.

#include "dist/comm/local.h"
#include "test/dist/fsdp/harness.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using Kind = nn::RecomputePolicy::Kind;

int count(const std::string& program, const std::string& line) {
  int n = 0;
  for (size_t at = 0; (at = program.find(line + "\n", at)) != std::string::npos; ++at) ++n;
  return n;
}

TEST_CASE("fsdp: every recompute policy gives the same bits", "[fsdp][recompute]") {
  for (const int world : {1, 3}) {
    for (const DType dtype : {kF32, kBF16}) {
      FsdpRun run;
      run.samples_per_step = 6;
      run.num_micro_batches = 2;
      run.model.qk_norm = true;
      run.fsdp.precision.param_dtype = dtype;
      const FsdpResult expected = run_fsdp_on_threads(world, run);
      for (const nn::RecomputePolicy& policy :
           {nn::RecomputePolicy{Kind::kFull, 1}, nn::RecomputePolicy{Kind::kEveryN, 2},
            nn::RecomputePolicy{Kind::kSelective, 1}, nn::RecomputePolicy{Kind::kFull, 1, true},
            nn::RecomputePolicy{Kind::kEveryN, 2, true}}) {
        for (const int prefetch : {0, 2}) {
          run.recompute = policy;
          run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
          check_same(run_fsdp_on_threads(world, run), expected,
                     std::to_string(world) + " ranks, policy " +
                         std::to_string(static_cast<int>(policy.kind)) + ", prefetch " +
                         std::to_string(prefetch));
        }
      }
    }
  }
}

TEST_CASE("fsdp: an MLP in tiles gives the same bits under every strategy and policy",
          "[fsdp][recompute]") {
  for (const DType dtype : {kF32, kBF16}) {
    FsdpRun run;
    run.num_micro_batches = 2;
    run.fsdp.sync_every_micro_batch = dist::GradSync::kEveryMicroBatch;
    run.fsdp.precision.param_dtype = dtype;
    const FsdpResult whole = run_fsdp_on_threads(4, run);
    run.recompute.mlp_tile = 5;  // of 16 rows
    const FsdpResult expected = run_fsdp_on_threads(4, run);
    CHECK(expected.losses[0] == whole.losses[0]);
    if (dtype == kF32) CHECK(expected.gradients != whole.gradients);  // sums in another order
    check_near(expected, whole, dtype == kF32 ? 1e-5 : 3e-2, "in tiles");
    int variant = 0;
    for (const dist::Strategy strategy : kStrategies) {
      if (strategy == dist::Strategy::kShardOptim) continue;  // it adds up micro-batches otherwise
      for (const Kind kind : {Kind::kNone, Kind::kFull, Kind::kSelective}) {
        run.recompute.kind = kind;
        run.recompute.offload = kind == Kind::kFull;
        run.fsdp.strategy = strategy;
        run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = ++variant % 3;
        run.fsdp.offload =
            variant % 2 == 0 ? dist::Offload::kNone : dist::Offload::kParamsAndOptimizer;
        if (strategy >= dist::Strategy::kHybridShard) run.fsdp.shard_size = 2;
        check_same(run_fsdp_on_threads(4, run), expected,
                   fmt::format("{}, {}, policy {}", dtype, name_of(strategy), name_of(kind)));
      }
    }
  }
}

TEST_CASE("fsdp: gradients in bf16 are rounded once, whatever the tiles", "[fsdp][recompute]") {
  FsdpRun run;
  run.num_steps = 1;
  run.fsdp.precision.param_dtype = kBF16;
  run.fsdp.precision.reduce_dtype = kBF16;
  const FsdpResult whole = run_fsdp_on_threads(1, run);
  run.recompute.mlp_tile = 1;
  const FsdpResult tiled = run_fsdp_on_threads(1, run);
  // Half an ulp on either side: sums of 128 roundings would be several times as far away.
  check_near(tiled, whole, 0x1p-8, "in tiles");
}

TEST_CASE("unit: gathered exactly twice a step under every recompute policy", "[fsdp][recompute]") {
  for (const Kind kind : {Kind::kNone, Kind::kFull, Kind::kEveryN, Kind::kSelective}) {
    FsdpRun run;
    run.recompute = {kind, 2};
    const std::string program = run_fsdp_on_threads(2, run).program;
    CAPTURE(program);
    for (const char* unit : {"blocks.0", "blocks.1"}) {
      CHECK(count(program, std::string("gather_forward ") + unit) == 1);
      CHECK(count(program, std::string("gather_backward ") + unit) == 1);
      CHECK(count(program, std::string("reduce ") + unit) == 1);
    }
  }
}

}  // namespace
}  // namespace tessera::testing
