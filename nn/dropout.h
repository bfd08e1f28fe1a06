#pragma once

#include "nn/module.h"

namespace tessera::nn {

/// Zeroes elements with probability p while training and scales the others by 1 / (1 - p); the
/// identity in evaluation. See `dropout` for the random numbers.
class Dropout : public Module {
 public:
  explicit Dropout(double p);

  Tensor forward(const Tensor& x);
  /// It changes its input: p > 0 and training.
  bool is_active() const { return p_ > 0 && is_training(); }

  std::string kind() const override { return fmt::format("Dropout({})", p_); }

 private:
  double p_;
};

}  // namespace tessera::nn
