#pragma once

#include <fmt/format.h>

#include <functional>
#include <string>
#include <vector>

#include "core/runtime/allocator.h"
#include "test/dist/fsdp/combos.h"
#include "test/testing.h"

// Whether what FSDP says of its memory is what the allocator sees, for thread ranks and MPI ranks.

namespace tessera::testing {

/// "" or how a rank's allocator differs from `Fsdp::memory` after a few steps, now and at the peak.
inline std::string memory_problem(dist::World& world, FsdpRun run) {
  std::string problem;
  run.num_steps = 3;
  const auto compare = [&](dist::Fsdp& fsdp, const auto& actual, const char* when) {
    const dist::MemoryPlan plan = fsdp.memory();
    for (const MemoryClass c :
         {MemoryClass::kParameters, MemoryClass::kGradients, MemoryClass::kGathered}) {
      const int64_t said = plan.nbytes_of(c), seen = actual[static_cast<size_t>(c)];
      if (said == seen) continue;
      problem += fmt::format("{}, {}: {} bytes said, {} seen\n{}", tessera::name_of(c), when, said,
                             seen, plan.to_string());
    }
  };
  run.on_step = [&](int step, dist::Fsdp& fsdp, dist::World&) {
    current_stream().synchronize();
    Allocator& allocator = *Context::current()->allocator();
    if (step == 1) allocator.reset_peak();
    if (step < 2) return;
    compare(fsdp, allocator.stats().allocated_by_class, "now");
    compare(fsdp, allocator.stats().peak_by_class, "at the peak");
  };
  // What is said before the first step holds from then on.
  dist::MemoryPlan before;
  run.on_ready = [&](dist::Fsdp& fsdp, dist::World&) { before = fsdp.memory(); };
  run.after_step = [&](int step, const dist::TrainingState& state, dist::World&) {
    if (step != 2 || world.world_size() == 1 || run.fsdp.reproducible) return;
    for (const MemoryClass c :
         {MemoryClass::kParameters, MemoryClass::kGradients, MemoryClass::kGathered}) {
      const int64_t first = before.nbytes_of(c), last = state.fsdp->memory().nbytes_of(c);
      if (first != last) {
        problem +=
            fmt::format("{}: {} bytes said first, {} last\n", tessera::name_of(c), first, last);
      }
    }
  };
  run_fsdp(world, run);
  return problem;
}

/// Runs of every strategy that differ in what they keep.
inline std::vector<std::pair<std::string, FsdpRun>> memory_cases(int world_size) {
  std::vector<std::pair<std::string, FsdpRun>> cases;
  for (const dist::Strategy strategy : kAllStrategies) {
    const bool is_hybrid = strategy >= dist::Strategy::kHybridShard;
    const auto add = [&](const std::string& what, const std::function<void(FsdpRun&)>& change) {
      FsdpRun run;
      run.samples_per_step = 2 * world_size;
      run.fsdp.strategy = strategy;
      if (is_hybrid) run.fsdp.shard_size = hybrid_shard_size(world_size);
      change(run);
      cases.emplace_back(fmt::format("{}, {}", name_of(strategy), what), std::move(run));
    };
    for (const Precision precision : {Precision::kF32, Precision::kMixed, Precision::kBF16}) {
      add(fmt::format("precision {}", static_cast<int>(precision)),
          [&](FsdpRun& run) { set_precision(run, precision); });
    }
    add("a bf16 wire", [](FsdpRun& run) { run.fsdp.precision.wire_dtype = kBF16; });
    add("prefetch 3, norms in f32", [](FsdpRun& run) {
      run.fsdp.prefetch_forward = 3;
      run.fsdp.precision.param_dtype = kBF16;
      run.fsdp.precision.norm_fp32 = true;
    });
    add("sync = false", [](FsdpRun& run) {
      run.fsdp.sync_every_micro_batch = dist::GradSync::kLast;
      run.num_micro_batches = 2;
    });
    if (strategy != dist::Strategy::kShardOptim) {
      add("sync = true", [](FsdpRun& run) {
        run.fsdp.sync_every_micro_batch = dist::GradSync::kEveryMicroBatch;
        run.num_micro_batches = 2;
      });
    }
    for (const dist::Offload offload :
         {dist::Offload::kOptimizer, dist::Offload::kParamsAndOptimizer}) {
      add(fmt::format("offload {}", dist::name_of(offload)), [&](FsdpRun& run) {
        run.fsdp.offload = offload;
        run.fsdp.precision.param_dtype = kBF16;
      });
    }
  }
  return cases;
}

/// Every case on 1, 2 and 4 ranks, after `change`, has the memory that is said of it.
inline void check_memory_cases(const std::function<void(FsdpRun&)>& change = {}) {
  for (const int world_size : {1, 2, 4}) {
    for (auto [what, run] : memory_cases(world_size)) {
      if (change) change(run);
      std::vector<std::string> problems(static_cast<size_t>(world_size));
      dist::LocalOptions local;
      local.context.poison = false;
      dist::run_ranks(world_size, local, [&, r = &run](dist::World& world) {
        problems[static_cast<size_t>(world.rank())] = memory_problem(world, *r);
      });
      INFO(fmt::format("{} ranks, {}", world_size, what));
      for (const std::string& problem : problems) CHECK(problem == "");
    }
  }
}

}  // namespace tessera::testing
