#pragma once

#include <optional>

#include "core/autograd.h"
#include "core/host_checkpoints.h"
#include "core/recompute.h"
#include "kernels/pointwise/pointwise.h"
#include "nn/attention.h"
#include "nn/dropout.h"
#include "nn/mlp.h"

// What the blocks of all transformers have in common: attention and an MLP around residuals, and
// what of them runs again in backward.
//
// B batch, T time, C model width

namespace tessera::nn {

/// What a block computes again in backward instead of keeping it.
enum class Recompute : unsigned char {
  kNothing,
  kCheap,  ///< outputs of norms and activations; those of attention and matrix products are kept
  kBlock,  ///< all of it but its input
};

/// What of a block runs again in backward.
struct BlockRecompute {
  Recompute what = Recompute::kNothing;
  /// kBlock: where the block's input is until backward; null: on the device.
  std::shared_ptr<HostCheckpoints> host = {};
  /// Tokens for which the MLP computes at a time, see `Mlp::set_tile`; 0: all.
  int64_t mlp_tile = 0;
};

/// Base of the blocks: recompute is set from outside and needs nothing of a model.
/// Shapes   x [B, T, C] -> [B, T, C]
class Block : public Module {
 public:
  Tensor forward(const Tensor& x_BTC, const AttentionInput& input = {});
  /// Before the first forward.
  virtual void set_recompute(const BlockRecompute& recompute) { recompute_ = recompute; }

 protected:
  /// The block itself: [B, T, C] -> [B, T, C].
  virtual Tensor body(const Tensor& x_BTC, const AttentionInput& input) = 0;
  /// The same bits, without keeping outputs of norms and activations.
  virtual Tensor selective_body(const Tensor& x_BTC, const AttentionInput& input) = 0;

 private:
  BlockRecompute recompute_;
};

/// The parts of the blocks below. `Norm` is LayerNorm or RmsNorm, `MlpType` Mlp or SwiGlu.
template <class Norm, class MlpType>
class AttentionMlpBlock : public Block {
 public:
  void set_recompute(const BlockRecompute& recompute) override {
    Block::set_recompute(recompute);
    mlp_->set_recompute(recompute.what == Recompute::kCheap);
    mlp_->set_tile(recompute.mlp_tile);
  }

 protected:
  /// Without `dropout`, none at all. `norm` are the arguments of a norm after its width.
  template <class... NormArgs>
  AttentionMlpBlock(const AttentionConfig& attention, const MlpConfig& mlp,
                    std::optional<double> dropout, NormArgs... norm)
      : norm1_(this, "norm1", attention.width, norm...),
        attn_(this, "attn", attention),
        norm2_(this, "norm2", attention.width, norm...),
        mlp_(this, "mlp", mlp) {
    if (dropout) dropout_.emplace(this, "dropout", *dropout);
  }

  bool drops() const { return dropout_ && dropout_->is_active(); }
  /// attention(x), dropped out.
  Tensor attend(const Tensor& x_BTC, const AttentionInput& input) {
    const Tensor a_BTC = attn_(x_BTC, input);
    return drops() ? dropout_(a_BTC) : a_BTC;
  }
  /// residual + mlp(x), the latter dropped out.
  Tensor add_mlp(const Tensor& x_BTC, const Tensor& residual_BTC) {
    if (drops()) return add(residual_BTC, dropout_(mlp_(x_BTC)));
    return mlp_(x_BTC, residual_BTC);
  }

  Child<Norm> norm1_;
  Child<Attention> attn_;
  Child<Norm> norm2_;
  Child<MlpType> mlp_;
  Child<Dropout> dropout_;
};

/// x + attention(norm1(x)), then the same with the MLP and norm2.
template <class Norm, class MlpType>
class PreNormBlock : public AttentionMlpBlock<Norm, MlpType> {
 protected:
  using AttentionMlpBlock<Norm, MlpType>::AttentionMlpBlock;

  Tensor body(const Tensor& x_BTC, const AttentionInput& input) override {
    const ResidualNorm mid = this->norm2_(this->attend(this->norm1_(x_BTC), input), x_BTC);
    return this->add_mlp(mid.y, mid.sum);
  }

  Tensor selective_body(const Tensor& x_BTC, const AttentionInput& input) override {
    const Tensor a_BTC = recompute_output(
        [this](const std::vector<Tensor>& in) { return std::vector{this->norm1_(in[0])}; },
        [&](const std::vector<Tensor>& in) { return this->attend(in[0], input); }, {x_BTC});
    return recompute_output(
        [this](const std::vector<Tensor>& in) {
          const ResidualNorm mid = this->norm2_(in[0], in[1]);
          return std::vector{mid.y, mid.sum};
        },
        [this](const std::vector<Tensor>& in) { return this->add_mlp(in[0], in[1]); },
        {a_BTC, x_BTC});
  }
};

/// norm1(x + attention(x)), then the same with the MLP and norm2: the order of the first
/// transformer (Vaswani et al. 2017) and of encoders.
template <class Norm, class MlpType>
class PostNormBlock : public AttentionMlpBlock<Norm, MlpType> {
 protected:
  using AttentionMlpBlock<Norm, MlpType>::AttentionMlpBlock;

  Tensor body(const Tensor& x_BTC, const AttentionInput& input) override {
    const Tensor mid_BTC = this->norm1_(this->attend(x_BTC, input), x_BTC).y;
    return this->norm2_(this->add_mlp(mid_BTC, mid_BTC));
  }

  Tensor selective_body(const Tensor& x_BTC, const AttentionInput& input) override {
    return recompute_output(
        [this](const std::vector<Tensor>& in) { return std::vector{this->norm1_(in[0], in[1]).y}; },
        [this](const std::vector<Tensor>& in) { return this->norm2_(this->add_mlp(in[0], in[0])); },
        {this->attend(x_BTC, input), x_BTC});
  }
};

}  // namespace tessera::nn
