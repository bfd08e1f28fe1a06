#pragma once

#include "nn/linear.h"

namespace tessera::nn {

struct MlpConfig {
  int64_t width = 0;
  int64_t ffn_width = 0;
  bool bias = true;
  Gelu gelu = Gelu::kTanh;            ///< Mlp only
  std::optional<Init> init = {};      ///< of the first projection; default as in Linear
  std::optional<Init> out_init = {};  ///< of the second projection; default as in Linear
};

/// down(gelu(up(x))).
/// Shapes   x [..., C] -> [..., C]
class Mlp : public Module {
 public:
  explicit Mlp(const MlpConfig& config);

  Tensor forward(const Tensor& x);
  /// residual + forward(x), the addition fused.
  Tensor forward(const Tensor& x, const Tensor& residual);
  /// Computes the activation again in backward instead of keeping it.
  void set_recompute(bool recompute) { recompute_ = recompute; }

  std::string kind() const override;

 private:
  Gelu gelu_;
  Child<Linear> up_, down_;
  bool recompute_ = false;
};

/// down(silu(gate(x)) * up(x)) (Shazeer 2020); the gate's rows come first in gate_up.weight.
/// Shapes   x [..., C] -> [..., C]
class SwiGlu : public Module {
 public:
  explicit SwiGlu(const MlpConfig& config);

  Tensor forward(const Tensor& x);
  /// residual + forward(x), the addition fused.
  Tensor forward(const Tensor& x, const Tensor& residual);
  /// Computes the activation again in backward instead of keeping it.
  void set_recompute(bool recompute) { recompute_ = recompute; }

  std::string kind() const override;

 private:
  Tensor activation(const Tensor& gate_up) const;

  int64_t ffn_width_;
  Child<Linear> gate_up_, down_;
  bool recompute_ = false;
};

}  // namespace tessera::nn
