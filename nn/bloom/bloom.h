#pragma once

#include "nn/family.h"
#include "nn/transformer.h"

// BLOOM (Le Scao et al. 2022): LayerNorm before each sublayer, GELU, linear attention biases
// (ALiBi) instead of positions, and a norm of the embeddings.
//
// B batch, T time, C model width

namespace tessera::nn {

/// Sizes of BLOOM; the defaults are those of bloom-7b1.
struct BloomConfig {
  int64_t vocab_size = 250880;
  int64_t context_length = 2048;  ///< the longest row; the model itself has no limit
  int64_t num_layers = 30;
  int64_t num_heads = 32;
  int64_t width = 4096;
  bool tied = true;    ///< the head uses the token embedding's weight
  double dropout = 0;  ///< at the end of each sublayer
  float norm_eps = 1e-5f;
  /// Matrices and embeddings start normal with this deviation, the projections that end a sublayer
  /// with it / sqrt(2 * num_layers), biases at zero, norms at one.
  double init_stddev = 0.02;
};
/// The family that the configuration is of (nn/family.h).
const Family& family_of(const BloomConfig& config);

/// A block of BLOOM: norms before attention, which has ALiBi, and MLP.
class BloomBlock final : public PreNormBlock<LayerNorm, Mlp> {
 public:
  explicit BloomBlock(const BloomConfig& config);
};

/// Names: embed.weight embed_norm.* blocks.N.{norm1,attn.qkv,attn.out,norm2,mlp.up,mlp.down}.*
/// norm.* head.weight (tied: the same parameter as embed.weight).
class Bloom : public LanguageModel {
 public:
  /// ConfigError if sizes are not positive or the heads do not divide the width.
  explicit Bloom(const BloomConfig& config);

  Tensor forward(const Tensor& ids_BT, const ForwardOptions& options = {}) override;
  const ModelShape& shape() const override { return shape_; }
  std::unique_ptr<FamilyConfig> family_config() const override;
  const BloomConfig& config() const { return config_; }

 protected:
  const Child<LmHead>& head() const override { return head_; }

 private:
  BloomConfig config_;
  ModelShape shape_;
  Child<Embedding> embed_;
  Child<LayerNorm> embed_norm_;
  ChildList<BloomBlock> blocks_;
  Child<LayerNorm> norm_;
  Child<LmHead> head_;
};

}  // namespace tessera::nn
