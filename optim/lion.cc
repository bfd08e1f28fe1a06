#include "optim/lion.h"

namespace tessera::optim {

Lion::Lion(std::vector<FlatShard> shards, const LionOptions& options)
    : Optimizer(std::move(shards), static_cast<float>(options.lr), options.rounding_seed),
      options_(options) {
  const auto check = [](bool is_right, const char* name, const char* range, double value) {
    TESSERA_CHECK_AS(ConfigError, is_right, "Lion: {} must be {}, got {}", name, range, value);
  };
  check(options.beta1 >= 0 && options.beta1 < 1, "beta1", "in [0, 1)", options.beta1);
  check(options.beta2 >= 0 && options.beta2 < 1, "beta2", "in [0, 1)", options.beta2);
  check(options.weight_decay >= 0, "weight_decay", "at least 0", options.weight_decay);
  exp_avg_ = make_state("exp_avg");
}

void Lion::update_shard(const FlatUpdate& update, std::span<const Tensor> states) {
  FlatUpdate flat = update;
  flat.weight_decay = static_cast<float>(options_.weight_decay);
  lion_step(flat, {.exp_avg = states[0], .beta1 = options_.beta1, .beta2 = options_.beta2});
}

}  // namespace tessera::optim
