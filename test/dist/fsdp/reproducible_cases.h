#pragma once

#include <string>
#include <vector>

#include "nn/gpt2/gpt2.h"
#include "test/dist/fsdp/harness.h"

// Runs that have the same bits on any power of two of ranks: 8 micro-batches of one sample a step.

namespace tessera::testing {

inline constexpr int kNumLeaves = 8;

struct ReproducibleCase {
  std::string name;
  FsdpRun run;

  FsdpRun run_on(int num_ranks) const {
    FsdpRun on = run;
    on.num_micro_batches = run.num_micro_batches / num_ranks;
    if (num_ranks == 3) {  // an error whatever the rest
      on.num_micro_batches = 1;
      on.samples_per_step = 9;
    }
    // Groups of 1, 1, 2 and 4: replicas alone, and both.
    if (on.fsdp.strategy >= dist::Strategy::kHybridShard) {
      on.fsdp.shard_size = num_ranks % 2 == 0 ? num_ranks / 2 : num_ranks;
    }
    return on;
  }
};

/// full_shard and hybrid_shard, f32 and bf16 with a rounding on the way, dropout and recompute.
inline std::vector<ReproducibleCase> reproducible_cases() {
  std::vector<ReproducibleCase> cases;
  for (const dist::Strategy strategy : {dist::Strategy::kFullShard, dist::Strategy::kHybridShard}) {
    for (const bool is_mixed : {false, true}) {
      ReproducibleCase c;
      c.name = fmt::format("{} {}", name_of(strategy), is_mixed ? "bf16" : "f32");
      FsdpRun& run = c.run;
      run.fsdp.strategy = strategy;
      run.fsdp.reproducible = true;
      if (is_mixed) {
        run.fsdp.precision.param_dtype = kBF16;
        run.fsdp.precision.reduce_dtype = kF32;
        run.fsdp.precision.wire_dtype = kBF16;
        run.fsdp.precision.norm_fp32 = true;
      }
      run.make_model = [] {
        nn::Gpt2Config m;
        m.vocab_size = FsdpRun::tiny_llama().vocab_size;
        m.context_length = 16;
        m.num_layers = 2;
        m.num_heads = 2;
        m.width = 24;
        m.dropout = 0.1;
        m.init_stddev = 0.1;
        return std::make_unique<nn::Gpt2>(m);
      };
      run.recompute.kind = nn::RecomputePolicy::Kind::kFull;
      run.num_steps = 10;
      run.num_micro_batches = run.samples_per_step = kNumLeaves;
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

}  // namespace tessera::testing
