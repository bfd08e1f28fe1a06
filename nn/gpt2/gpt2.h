#pragma once

#include "nn/family.h"
#include "nn/transformer.h"

// GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each sublayer, GELU.
//
// B batch, T time, C model width

namespace tessera::nn {

/// Sizes of GPT-2; the defaults are those of GPT-2 124M.
struct Gpt2Config {
  int64_t vocab_size = 50257;
  int64_t context_length = 1024;
  int64_t num_layers = 12;
  int64_t num_heads = 12;
  int64_t width = 768;
  int64_t ffn_width = 0;  ///< 0: 4 * width
  bool bias = true;       ///< of the projections and the norms
  bool tied = true;       ///< the head uses the token embedding's weight
  double dropout = 0;     ///< after the embeddings and at the end of each sublayer
  float norm_eps = 1e-5f;
  Gelu gelu = Gelu::kTanh;
  /// Matrices and embeddings start normal with this deviation, the projections that end a sublayer
  /// with it / sqrt(2 * num_layers), biases at zero, norms at one.
  double init_stddev = 0.02;
};
/// The family that the configuration is of (nn/family.h).
const Family& family_of(const Gpt2Config& config);

/// A block of GPT-2: norms before attention and MLP.
class Gpt2Block final : public PreNormBlock<LayerNorm, Mlp> {
 public:
  explicit Gpt2Block(const Gpt2Config& config);
};

/// Names: embed.weight position.weight blocks.N.{norm1,attn.qkv,attn.out,norm2,mlp.up,mlp.down}.*
/// norm.* head.weight (tied: the same parameter as embed.weight).
class Gpt2 : public LanguageModel {
 public:
  /// ConfigError if sizes are not positive or the heads do not divide the width.
  explicit Gpt2(const Gpt2Config& config);

  Tensor forward(const Tensor& ids_BT, const ForwardOptions& options = {}) override;
  const ModelShape& shape() const override { return shape_; }
  std::unique_ptr<FamilyConfig> family_config() const override;
  const Gpt2Config& config() const { return config_; }

 protected:
  const Child<LmHead>& head() const override { return head_; }

 private:
  Gpt2Config config_;
  ModelShape shape_;
  Child<Embedding> embed_, position_;
  Child<Dropout> dropout_;
  ChildList<Gpt2Block> blocks_;
  Child<LayerNorm> norm_;
  Child<LmHead> head_;
};

}  // namespace tessera::nn
