#include "nn/norm.h"

namespace tessera::nn {

LayerNorm::LayerNorm(int64_t width, float eps, bool bias)
    : weight_(register_parameter("weight", {width}, Init::ones(), {.is_norm = true})), eps_(eps) {
  if (bias) bias_ = &register_parameter("bias", {width}, Init::zeros(), {.is_norm = true});
}

Tensor LayerNorm::forward(const Tensor& x) {
  return layer_norm(x, weight_, bias(), eps_);
}

ResidualNorm LayerNorm::forward(const Tensor& x, const Tensor& residual) {
  return add_layer_norm(x, residual, weight_, bias(), eps_);
}

std::string LayerNorm::kind() const {
  return fmt::format("LayerNorm({}, eps {}{})", weight_.dim(0), eps_,
                     bias_ == nullptr ? ", no bias" : "");
}

RmsNorm::RmsNorm(int64_t width, float eps)
    : weight_(register_parameter("weight", {width}, Init::ones(), {.is_norm = true})), eps_(eps) {}

Tensor RmsNorm::forward(const Tensor& x) {
  return rms_norm(x, weight_, eps_);
}

ResidualNorm RmsNorm::forward(const Tensor& x, const Tensor& residual) {
  return add_rms_norm(x, residual, weight_, eps_);
}

std::string RmsNorm::kind() const {
  return fmt::format("RmsNorm({}, eps {})", weight_.dim(0), eps_);
}

}  // namespace tessera::nn
