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
            nn::RecomputePolicy{Kind::kSelective, 1}}) {
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
