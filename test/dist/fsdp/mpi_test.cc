// Started by mpirun (test/mpirun.sh) with 1 to 4 ranks: FSDP over MPI has the bits of thread ranks.

#include "dist/comm/local.h"
#include "dist/comm/watchdog.h"
#include "dist/fsdp/exchange.h"
#include "dist/fsdp/parts.h"
#include "test/dist/fsdp/combos.h"
#include "test/dist/fsdp/harness.h"
#include "test/dist/fsdp/memory_cases.h"
#include "test/dist/fsdp/reproducible_cases.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

dist::World& world() {
  static dist::World instance = [] {
    dist::World made = dist::World::init(0, nullptr);
    made.watchdog().set_timeout(std::chrono::seconds(120));
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

TEST_CASE("fsdp over MPI: every pair of settings has the same bits", "[fsdp]") {
  const int num_ranks = world().world_size();
  if (num_ranks != 2 && num_ranks != 4) return;
  for (const Precision precision : {Precision::kF32, Precision::kMixed}) {
    const auto run_of = [&](const Combo& combo) {
      FsdpRun run = make_run(combo, num_ranks, precision);
      run.num_steps = 10;
      return run;
    };
    const FsdpResult expected = run_fsdp(world(), run_of({{3, 0, 0, 0, 0}}));
    for (const Combo& combo : pair_covering_combos()) {
      check_same(run_fsdp(world(), run_of(combo)), expected,
                 fmt::format("{}, precision {}", combo.to_string(), static_cast<int>(precision)));
    }
  }
}

TEST_CASE("fsdp over MPI: memory is what is said of it, with and without shared memory", "[fsdp]") {
  for (const auto& [what, run] : memory_cases(world().world_size())) {
    INFO(what);
    CHECK(memory_problem(world(), run) == "");
  }
}

TEST_CASE("fsdp over MPI: the scratch of an optimizer's exchange grows with what is summed",
          "[fsdp]") {
  if (world().world_size() == 1) return;
  FsdpRun run;
  run.num_steps = 1;
  run.samples_per_step = 12;  // of 2, 3 and 4 ranks
  run.on_ready = [](dist::Fsdp& fsdp, dist::World& ranks) {
    dist::Lanes& lanes = parts_of(fsdp).lanes;
    dist::Exchange exchange(lanes);
    const auto optimizer_nbytes = [] {
      const AllocatorStats stats = Context::current()->allocator()->stats();
      return stats.allocated_by_class[static_cast<size_t>(MemoryClass::kOptimizer)];
    };
    const int64_t before = optimizer_nbytes();
    for (const int64_t numel : {256, 65536, 1024}) {
      const Tensor whole = full({numel * ranks.world_size()}, ranks.rank() + 1, kF32);
      const Tensor shard = zeros({numel});
      current_stream().wait(exchange.scatter_sum(shard, whole));
      const int64_t num_ranks = ranks.world_size();
      const double expected = static_cast<double>(num_ranks * (num_ranks + 1)) / 2;
      CHECK(shard.to_vector() == std::vector<double>(static_cast<size_t>(numel), expected));
      const int64_t staged =
          lanes.reducing_comm().reduce_scatter_staging_nbytes(std::max<int64_t>(numel, 256), kF32);
      CHECK(optimizer_nbytes() - before >= staged);
    }
  };
  run_fsdp(world(), run);
}

TEST_CASE("fsdp over MPI: reproducible mode has the bits of one rank", "[fsdp]") {
  const int num_ranks = world().world_size();
  for (const ReproducibleCase& c : reproducible_cases()) {
    if (num_ranks == 3) {
      const std::string message = error_of([&] { run_fsdp(world(), c.run_on(num_ranks)); });
      CHECK(message.find("FsdpOptions::reproducible: 3 ranks, expected a power of two") == 0);
      continue;
    }
    const FsdpResult actual = run_fsdp(world(), c.run_on(num_ranks));
    FsdpResult expected;
    if (world().rank() == 0) expected = run_fsdp_on_threads(1, c.run_on(1));
    world().control().barrier();
    if (world().rank() == 0) check_same(actual, expected, c.name);
  }
}

}  // namespace
}  // namespace tessera::testing
