// Started by mpirun (test/mpirun.sh) with 1 to 4 ranks: FSDP over MPI has the bits of thread ranks.

#include "dist/comm/local.h"
#include "test/dist/fsdp_harness.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

dist::World& world() {
  static dist::World instance = [] {
    dist::World made = dist::World::init(0, nullptr);
    made.set_timeout(std::chrono::seconds(120));
    Context::set_process_context(
        std::make_shared<Context>(ContextOptions{.num_threads = 1, .poison = true}));
    return made;
  }();
  return instance;
}

TEST_CASE("fsdp over MPI: the bits of thread ranks, 20 steps", "[fsdp]") {
  FsdpRun run;
  run.num_steps = 20;
  run.samples_per_step = 12;
  for (const dist::Strategy strategy : {dist::Strategy::kFullShard, dist::Strategy::kShardGradOp,
                                        dist::Strategy::kShardOptim, dist::Strategy::kNoShard}) {
    run.fsdp.strategy = strategy;
    const FsdpResult actual = run_fsdp(world(), run);
    const FsdpResult again = run_fsdp(world(), run);
    check_same(again, actual, "a second run");
    FsdpResult expected;
    if (world().rank() == 0) expected = run_fsdp_on_threads(world().world_size(), run);
    world().control().barrier();
    if (world().rank() == 0) check_same(actual, expected, std::string(name_of(strategy)));
  }
}

}  // namespace
}  // namespace tessera::testing
