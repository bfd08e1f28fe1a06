#include "optim/lion.h"

namespace tessera::optim {

Lion::Lion(std::vector<FlatShard> shards, const LionOptions& options)
    : Optimizer(std::move(shards), options.lr, options.weight_decay, options.rounding_seed),
      options_(options) {
  check_decay_rate("Lion", "beta1", options.beta1);
  check_decay_rate("Lion", "beta2", options.beta2);
  check_not_negative("Lion", "weight_decay", options.weight_decay);
  exp_avg_ = make_state("exp_avg");
}

void Lion::update_shard(const FlatUpdate& update, std::span<const Tensor> states) {
  lion_step(update, {.exp_avg = states[0], .beta1 = options_.beta1, .beta2 = options_.beta2});
}

}  // namespace tessera::optim
