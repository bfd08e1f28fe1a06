#include "optim/adamw_8bit.h"

#include "kernels/optimizer/dynamic_map.h"

namespace tessera::optim {

AdamW8bit::AdamW8bit(std::vector<FlatShard> shards, const AdamWOptions& options)
    : Optimizer(std::move(shards), options.lr, options.weight_decay, options.rounding_seed),
      options_(options) {
  constexpr const char* kName = "AdamW8bit";
  check_decay_rate(kName, "beta1", options.beta1);
  check_decay_rate(kName, "beta2", options.beta2);
  check_not_negative(kName, "eps", options.eps);
  check_not_negative(kName, "weight_decay", options.weight_decay);
  check_state_blocks(kName);
  states_[0] = make_state("exp_avg", kU8);
  states_[1] = make_state("exp_avg_sq", kU8);
  states_[2] = make_state("exp_avg_absmax", kF32, kernels::kStateBlock);
  states_[3] = make_state("exp_avg_sq_absmax", kF32, kernels::kStateBlock);
  const MemoryScope scope(MemoryClass::kOptimizer);
  const std::vector<float> maps = kernels::dynamic_maps();
  maps_ = from_values(std::span<const float>(maps), {std::ssize(maps)}, kF32);
}

void AdamW8bit::update_shard(const FlatUpdate& update, std::span<const Tensor> states) {
  adamw_8bit_step(update, {.exp_avg = states[0],
                           .exp_avg_sq = states[1],
                           .exp_avg_absmax = states[2],
                           .exp_avg_sq_absmax = states[3],
                           .maps = maps_,
                           .step = step_count(),
                           .beta1 = options_.beta1,
                           .beta2 = options_.beta2,
                           .eps = options_.eps});
}

}  // namespace tessera::optim
