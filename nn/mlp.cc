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

void MlpBase::set_tile(int64_t num_tokens) {
  TESSERA_CHECK_AS(ConfigError, num_tokens >= 0, "{}: a tile must not be negative, got {}", kind(),
                   num_tokens);
  tile_ = num_tokens;
}

Tensor MlpBase::forward(const Tensor& x) {
  return forward(x, {});
}

Tensor MlpBase::forward(const Tensor& x, const Tensor& residual) {
  if (tile_ == 0) return whole(x, residual);
  const auto rows = [this](const Tensor& x_RC, const Tensor& residual_RC) {
    return whole(x_RC, residual_RC);
  };
  const auto parameters = [this] {
    std::vector<Tensor> leaves;
    for (const NamedParameter& p : named_parameters()) leaves.push_back(p.parameter->tensor);
    return leaves;
  };
  return recompute_rows(rows, x, residual, tile_, parameters);
}

Tensor MlpBase::whole(const Tensor& x, const Tensor& residual) {
  const auto narrow = [&](const Tensor& active) {
    return residual.is_defined() ? down()(active, residual) : down()(active);
  };
  if (!recompute_ || tile_ > 0) return narrow(widen_and_activate(x));
  return recompute_output(
      [this](const std::vector<Tensor>& in) { return std::vector{activate(in[0])}; },
      [&](const std::vector<Tensor>& in) { return narrow(in[0]); }, {widen(x)});
}

Mlp::Mlp(const MlpConfig& config)
    : gelu_(checked("Mlp", config).gelu),
      up_(this, "up", config.width, config.ffn_width,
          LinearOptions{.bias = config.bias, .init = config.init}),
      down_(this, "down", config.ffn_width, config.width,
            LinearOptions{.bias = config.bias, .init = config.out_init}) {}

std::string Mlp::kind() const {
  return fmt::format("Mlp(gelu {})", gelu_ == Gelu::kTanh ? "tanh" : "exact");
}

SwiGlu::SwiGlu(const MlpConfig& config)
    : ffn_width_(checked("SwiGlu", config).ffn_width),
      gate_up_(this, "gate_up", config.width, 2 * config.ffn_width,
               LinearOptions{.bias = config.bias, .init = config.init}),
      down_(this, "down", config.ffn_width, config.width,
            LinearOptions{.bias = config.bias, .init = config.out_init}) {}

Tensor SwiGlu::activate(const Tensor& wide) const {
  const int64_t sizes[] = {ffn_width_, ffn_width_};
  const std::vector<Tensor> parts = split(wide, sizes);
  return swiglu(parts[0], parts[1]);
}

std::string SwiGlu::kind() const {
  return "SwiGlu";
}

}  // namespace tessera::nn
