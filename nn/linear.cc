#include "nn/linear.h"

#include <cmath>

#include "core/autograd.h"
#include "core/recompute.h"
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

Lora& Linear::add_lora(std::vector<LoraPart> parts, const LoraOptions& options) {
  Lora& lora =
      lora_.emplace(this, "lora", num_inputs(), weight_.dtype(), std::move(parts), options);
  lora.train(is_training());
  return lora;
}

bool Linear::is_adapted() const {
  if (!lora_ || !LoraOff::is_active()) return static_cast<bool>(lora_);
  // Backward would run a part of it again, then maybe with adapters.
  TESSERA_CHECK(!grad_mode() && !is_checkpointing(),
                "LoraOff: a forward of {} that is recorded, expected NoGrad", kind());
  return false;
}

Tensor Linear::forward(const Tensor& x) {
  const Tensor y = linear(x, weight_, bias());
  return is_adapted() ? lora_(y, x) : y;
}

Tensor Linear::forward(const Tensor& x, Gelu gelu) {
  if (is_adapted()) return tessera::gelu(forward(x), gelu);
  return linear_gelu(x, weight_, bias(), gelu);
}

Tensor Linear::forward(const Tensor& x, const Tensor& residual) {
  const Tensor y = linear_residual(x, weight_, bias(), residual);
  return is_adapted() ? lora_(y, x) : y;
}

std::string Linear::kind() const {
  return fmt::format("Linear({} -> {}{})", num_inputs(), num_outputs(),
                     bias_ == nullptr ? ", no bias" : "");
}

}  // namespace tessera::nn
