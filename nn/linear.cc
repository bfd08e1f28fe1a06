#include "nn/linear.h"

#include <cmath>

#include "kernels/matmul/matmul.h"

namespace tessera::nn {
namespace {

Init default_init(int64_t num_inputs) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(num_inputs));
  return Init::uniform(-bound, bound);
}

}  // namespace

Linear::Linear(int64_t num_inputs, int64_t num_outputs, const LinearOptions& options)
    : weight_(register_parameter("weight", {num_outputs, num_inputs},
                                 options.init.value_or(default_init(num_inputs)))) {
  if (options.bias) {
    const Init init = options.init ? Init::zeros() : default_init(num_inputs);
    bias_ = &register_parameter("bias", {num_outputs}, init);
  }
}

Tensor Linear::forward(const Tensor& x) {
  return linear(x, weight_, bias());
}

Tensor Linear::forward(const Tensor& x, Gelu gelu) {
  return linear_gelu(x, weight_, bias(), gelu);
}

Tensor Linear::forward(const Tensor& x, const Tensor& residual) {
  return linear_residual(x, weight_, bias(), residual);
}

std::string Linear::kind() const {
  return fmt::format("Linear({} -> {}{})", num_inputs(), num_outputs(),
                     bias_ == nullptr ? ", no bias" : "");
}

}  // namespace tessera::nn
