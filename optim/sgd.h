#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

/// Options of `Sgd`.
struct SgdOptions {
  double lr = 1e-2;  ///< of `step()`; a schedule passes its own
  double momentum = 0;
  bool nesterov = false;
  double weight_decay = 0;  ///< where the segment decays
  /// Set: low-precision copies are rounded stochastically, with this seed
  /// (`FlatUpdate::rounding_step`).
  std::optional<uint64_t> rounding_seed = std::nullopt;
};

/// Gradient descent with momentum, PyTorch's formula; decay is part of the gradient:
///   g += weight_decay p;   b = momentum b + g;   p -= lr b   (nesterov: lr (g + momentum b))
/// States   "momentum_buffer" (b): 4 bytes per element, none without momentum
/// Errors   ConfigError if an option is out of range
class Sgd final : public Optimizer {
 public:
  explicit Sgd(std::vector<FlatShard> shards, const SgdOptions& options = {});
  std::vector<NamedState> state() const override;
  const SgdOptions& options() const { return options_; }

 private:
  void update_shard(const FlatUpdate& update, std::span<const Tensor> states) override;

  SgdOptions options_;
  NamedState momentum_buffer_;  // without tensors if there is no momentum
};

}  // namespace tessera::optim
