#include "optim/sgd.h"

namespace tessera::optim {

Sgd::Sgd(std::vector<FlatShard> shards, const SgdOptions& options)
    : Optimizer(std::move(shards), options.lr, options.weight_decay, options.rounding_seed),
      options_(options) {
  check_not_negative("Sgd", "momentum", options.momentum);
  check_not_negative("Sgd", "weight_decay", options.weight_decay);
  TESSERA_CHECK_AS(ConfigError, !options.nesterov || options.momentum > 0,
                   "Sgd: nesterov needs a momentum above 0");
  if (options.momentum > 0) momentum_buffer_ = make_state("momentum_buffer");
}

std::vector<NamedState> Sgd::state() const {
  if (options_.momentum == 0) return {};
  return {momentum_buffer_};
}

void Sgd::update_shard(const FlatUpdate& update, std::span<const Tensor> states) {
  SgdUpdate sgd{.momentum_buffer = {},
                .momentum = static_cast<float>(options_.momentum),
                .nesterov = options_.nesterov};
  if (options_.momentum > 0) sgd.momentum_buffer = states[0];
  sgd_step(update, sgd);
}

}  // namespace tessera::optim
