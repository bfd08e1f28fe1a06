#include "nn/mlp.h"

#include "core/recompute.h"

namespace tessera::nn {
namespace {

const MlpConfig& checked(const char* name, const MlpConfig& config) {
  TESSERA_CHECK_AS(ConfigError, config.width > 0 && config.ffn_width > 0,
                   "{}: width and ffn_width must be positive, got {} and {}", name, config.width,
                   config.ffn_width);
  return config;
}

}  // namespace

Mlp::Mlp(const MlpConfig& config)
    : gelu_(checked("Mlp", config).gelu),
      up_(this, "up", config.width, config.ffn_width,
          LinearOptions{.bias = config.bias, .init = config.init}),
      down_(this, "down", config.ffn_width, config.width,
            LinearOptions{.bias = config.bias, .init = config.out_init}) {}

Tensor Mlp::forward(const Tensor& x) {
  if (!recompute_) return down_(up_(x, gelu_));
  return recompute_output(
      [kind = gelu_](const std::vector<Tensor>& in) { return std::vector{gelu(in[0], kind)}; },
      [this](const std::vector<Tensor>& in) { return down_(in[0]); }, {up_(x)});
}

Tensor Mlp::forward(const Tensor& x, const Tensor& residual) {
  if (!recompute_) return down_(up_(x, gelu_), residual);
  return recompute_output(
      [kind = gelu_](const std::vector<Tensor>& in) { return std::vector{gelu(in[0], kind)}; },
      [&](const std::vector<Tensor>& in) { return down_(in[0], residual); }, {up_(x)});
}

std::string Mlp::kind() const {
  return fmt::format("Mlp(gelu {})", gelu_ == Gelu::kTanh ? "tanh" : "exact");
}

SwiGlu::SwiGlu(const MlpConfig& config)
    : ffn_width_(checked("SwiGlu", config).ffn_width),
      gate_up_(this, "gate_up", config.width, 2 * config.ffn_width,
               LinearOptions{.bias = config.bias, .init = config.init}),
      down_(this, "down", config.ffn_width, config.width,
            LinearOptions{.bias = config.bias, .init = config.out_init}) {}

Tensor SwiGlu::activation(const Tensor& gate_up) const {
  const int64_t sizes[] = {ffn_width_, ffn_width_};
  const std::vector<Tensor> parts = split(gate_up, sizes);
  return swiglu(parts[0], parts[1]);
}

Tensor SwiGlu::forward(const Tensor& x) {
  if (!recompute_) return down_(activation(gate_up_(x)));
  return recompute_output(
      [this](const std::vector<Tensor>& in) { return std::vector{activation(in[0])}; },
      [this](const std::vector<Tensor>& in) { return down_(in[0]); }, {gate_up_(x)});
}

Tensor SwiGlu::forward(const Tensor& x, const Tensor& residual) {
  if (!recompute_) return down_(activation(gate_up_(x)), residual);
  return recompute_output(
      [this](const std::vector<Tensor>& in) { return std::vector{activation(in[0])}; },
      [&](const std::vector<Tensor>& in) { return down_(in[0], residual); }, {gate_up_(x)});
}

std::string SwiGlu::kind() const {
  return "SwiGlu";
}

}  // namespace tessera::nn
