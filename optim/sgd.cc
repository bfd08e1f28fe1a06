#include "optim/sgd.h"

namespace tessera::optim {

Sgd::Sgd(std::vector<FlatShard> shards, const SgdOptions& options)
    : Optimizer(std::move(shards), static_cast<float>(options.lr), options.rounding_seed),
      options_(options) {
  TESSERA_CHECK_AS(ConfigError, options.momentum >= 0, "Sgd: momentum must be at least 0, got {}",
                   options.momentum);
  TESSERA_CHECK_AS(ConfigError, options.weight_decay >= 0,
                   "Sgd: weight_decay must be at least 0, got {}", options.weight_decay);
  TESSERA_CHECK_AS(ConfigError, !options.nesterov || options.momentum > 0,
                   "Sgd: nesterov needs a momentum above 0");
  if (options.momentum > 0) momentum_buffer_ = make_state("momentum_buffer");
}

std::vector<NamedState> Sgd::state() const {
  if (options_.momentum == 0) return {};
  return {momentum_buffer_};
}

void Sgd::update_shard(const FlatUpdate& update, std::span<const Tensor> states) {
  FlatUpdate flat = update;
  flat.weight_decay = static_cast<float>(options_.weight_decay);
  SgdUpdate sgd{.momentum_buffer = {},
                .momentum = static_cast<float>(options_.momentum),
                .nesterov = options_.nesterov};
  if (options_.momentum > 0) sgd.momentum_buffer = states[0];
  sgd_step(flat, sgd);
}

}  // namespace tessera::optim
