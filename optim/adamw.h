#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

/// Options of `AdamW`.
struct AdamWOptions {
  double lr = 1e-3;  ///< of `step()`; a schedule passes its own
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;  ///< where the segment decays
  /// Set: low-precision copies are rounded stochastically, with this seed
  /// (`FlatUpdate::rounding_step`).
  std::optional<uint64_t> rounding_seed = std::nullopt;
};

/// AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with PyTorch's formula:
///   p -= lr weight_decay p;   m += (1 - beta1) (g - m);   v = beta2 v + (1 - beta2) g^2
///   p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)
/// States   "exp_avg" (m) and "exp_avg_sq" (v): 8 bytes per element
/// Errors   ConfigError if an option is out of range
class AdamW final : public Optimizer {
 public:
  explicit AdamW(std::vector<FlatShard> shards, const AdamWOptions& options = {});
  std::vector<NamedState> state() const override { return {exp_avg_, exp_avg_sq_}; }
  const AdamWOptions& options() const { return options_; }

 private:
  void update_shard(const FlatUpdate& update, std::span<const Tensor> states) override;

  AdamWOptions options_;
  NamedState exp_avg_, exp_avg_sq_;
};

}  // namespace tessera::optim
