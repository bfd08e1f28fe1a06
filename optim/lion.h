#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

/// Options of `Lion`.
struct LionOptions {
  double lr = 1e-4;  ///< of `step()`; a schedule passes its own
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0;  ///< where the segment decays
  /// Set: low-precision copies are rounded stochastically, with this seed
  /// (`FlatUpdate::rounding_step`).
  std::optional<uint64_t> rounding_seed = std::nullopt;
};

/// Lion (Chen et al. 2023, arXiv:2302.06675), sign descent along an interpolated momentum:
///   p -= lr weight_decay p;   p -= lr sign(beta1 m + (1 - beta1) g);   m = beta2 m + (1 - beta2) g
/// with sign(0) = 0. Each element moves by lr: rates are 3 to 10 times lower than AdamW's, decays as
/// much higher.
/// States   "exp_avg" (m): 4 bytes per element
/// Errors   ConfigError if an option is out of range
class Lion final : public Optimizer {
 public:
  explicit Lion(std::vector<FlatShard> shards, const LionOptions& options = {});
  std::vector<NamedState> state() const override { return {exp_avg_}; }
  const LionOptions& options() const { return options_; }

 private:
  void update_shard(const FlatUpdate& update, std::span<const Tensor> states) override;

  LionOptions options_;
  NamedState exp_avg_;
};

}  // namespace tessera::optim
