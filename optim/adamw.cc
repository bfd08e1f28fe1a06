#include "optim/adamw.h"

namespace tessera::optim {

AdamW::AdamW(std::vector<FlatShard> shards, const AdamWOptions& options)
    : Optimizer(std::move(shards), options.lr, options.weight_decay, options.rounding_seed),
      options_(options) {
  check_decay_rate("AdamW", "beta1", options.beta1);
  check_decay_rate("AdamW", "beta2", options.beta2);
  check_not_negative("AdamW", "eps", options.eps);
  check_not_negative("AdamW", "weight_decay", options.weight_decay);
  exp_avg_ = make_state("exp_avg");
  exp_avg_sq_ = make_state("exp_avg_sq");
}

void AdamW::update_shard(const FlatUpdate& update, std::span<const Tensor> states) {
  adamw_step(update, {.exp_avg = states[0],
                      .exp_avg_sq = states[1],
                      .step = step_count(),
                      .beta1 = options_.beta1,
                      .beta2 = options_.beta2,
                      .eps = options_.eps});
}

}  // namespace tessera::optim
