#pragma once

#include "kernels/elementwise/elementwise.h"
#include "nn/lora.h"
#include "nn/module.h"

namespace tessera::nn {

/// Options of a Linear.
struct LinearOptions {
  bool bias = true;
  /// Of the weight; the bias is then zero. Default: both uniform in +-1 / sqrt(num_inputs).
  std::optional<Init> init = {};
};

/// y = x w^T + bias over the last dimension, and what adapters add (lora.h).
/// Shapes   x [..., in], weight [out, in], bias [out] -> y [..., out]
class Linear : public Module {
 public:
  Linear(int64_t num_inputs, int64_t num_outputs, const LinearOptions& options = {});

  Tensor forward(const Tensor& x);
  /// gelu(forward(x)), the activation fused.
  Tensor forward(const Tensor& x, Gelu gelu);
  /// residual + forward(x), the addition fused.
  Tensor forward(const Tensor& x, const Tensor& residual);

  /// Adapters of some of its rows; once. See `nn::add_lora`, which freezes the rest as well.
  Lora& add_lora(std::vector<LoraPart> parts, const LoraOptions& options);
  const Lora* lora() const { return lora_.get(); }  ///< null without any

  std::string kind() const override;
  const Tensor& weight() const { return weight_; }
  int64_t num_inputs() const { return weight_.dim(1); }
  int64_t num_outputs() const { return weight_.dim(0); }

 private:
  Tensor bias() const { return bias_ != nullptr ? *bias_ : Tensor{}; }
  /// With adapters, which are not switched off.
  bool is_adapted() const;

  Tensor& weight_;
  Tensor* bias_ = nullptr;
  Child<Lora> lora_;
};

}  // namespace tessera::nn
