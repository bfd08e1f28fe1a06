#pragma once

#include "nn/linear.h"

namespace tessera::nn {

/// Sizes of an MLP.
struct MlpConfig {
  int64_t width = 0;
  int64_t ffn_width = 0;
  bool bias = true;
  Gelu gelu = Gelu::kTanh;            ///< Mlp only
  std::optional<Init> init = {};      ///< of the first projection; default as in Linear
  std::optional<Init> out_init = {};  ///< of the second projection; default as in Linear
};

/// What MLPs have in common: down(activation(up(x))).
/// Shapes   x [..., C] -> [..., C]
class MlpBase : public Module {
 public:
  Tensor forward(const Tensor& x);
  /// residual + forward(x), the addition fused.
  Tensor forward(const Tensor& x, const Tensor& residual);
  /// Computes the activation again in backward instead of keeping it.
  void set_recompute(bool recompute) { recompute_ = recompute; }
  /// Computes for up to `num_tokens` rows at a time, forward and backward, and keeps nothing but x:
  /// what is ffn_width wide is memory of a tile. See `recompute_rows` for the bits. 0: of all rows.
  void set_tile(int64_t num_tokens);

 protected:
  MlpBase() = default;
  /// [..., C] -> what the activation reads.
  virtual Tensor widen(const Tensor& x) = 0;
  /// The activation of what the first projection gives.
  virtual Tensor activate(const Tensor& wide) const = 0;
  /// activate(widen(x)).
  virtual Tensor widen_and_activate(const Tensor& x) { return activate(widen(x)); }
  virtual const Child<Linear>& down() const = 0;

 private:
  Tensor whole(const Tensor& x, const Tensor& residual);

  bool recompute_ = false;
  int64_t tile_ = 0;
};

/// down(gelu(up(x))).
class Mlp : public MlpBase {
 public:
  explicit Mlp(const MlpConfig& config);

  std::string kind() const override;

 protected:
  Tensor widen(const Tensor& x) override { return up_(x); }
  Tensor activate(const Tensor& wide) const override { return tessera::gelu(wide, gelu_); }
  Tensor widen_and_activate(const Tensor& x) override { return up_(x, gelu_); }
  const Child<Linear>& down() const override { return down_; }

 private:
  Gelu gelu_;
  Child<Linear> up_, down_;
};

/// down(silu(gate(x)) * up(x)) (Shazeer 2020); the gate's rows come first in gate_up.weight.
class SwiGlu : public MlpBase {
 public:
  explicit SwiGlu(const MlpConfig& config);

  std::string kind() const override;

 protected:
  Tensor widen(const Tensor& x) override { return gate_up_(x); }
  Tensor activate(const Tensor& wide) const override;
  const Child<Linear>& down() const override { return down_; }

 private:
  int64_t ffn_width_;
  Child<Linear> gate_up_, down_;
};

}  // namespace tessera::nn
