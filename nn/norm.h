#pragma once

#include "kernels/norm/norm.h"
#include "nn/module.h"

namespace tessera {

/// Lets module hooks see the tensors of a ResidualNorm.
template <class F>
void for_each_tensor(ResidualNorm& result, F&& f) {
  f(result.y);
  f(result.sum);
}

}  // namespace tessera

namespace tessera::nn {

/// Layer normalization over the last dimension; see `layer_norm`.
class LayerNorm : public Module {
 public:
  explicit LayerNorm(int64_t width, float eps = 1e-5f, bool bias = true);

  Tensor forward(const Tensor& x);
  /// Of x + residual; also gives the sum.
  ResidualNorm forward(const Tensor& x, const Tensor& residual);

  std::string kind() const override;

 private:
  Tensor bias() const { return bias_ != nullptr ? *bias_ : Tensor{}; }

  Tensor& weight_;
  Tensor* bias_ = nullptr;
  float eps_;
};

/// Root mean square normalization over the last dimension; see `rms_norm`.
class RmsNorm : public Module {
 public:
  explicit RmsNorm(int64_t width, float eps = 1e-5f);

  Tensor forward(const Tensor& x);
  /// Of x + residual; also gives the sum.
  ResidualNorm forward(const Tensor& x, const Tensor& residual);

  std::string kind() const override;

 private:
  Tensor& weight_;
  float eps_;
};

}  // namespace tessera::nn
