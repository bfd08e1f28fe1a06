#pragma once

#include "nn/gpt2.h"

// BLOOM (Le Scao et al. 2022): GPT-2's blocks with linear attention biases (ALiBi) instead of
// positions, and a norm of the embeddings.
//
// B batch, T time, C model width

namespace tessera::nn {

struct BloomConfig {
  int64_t vocab_size = 250880;
  int64_t context_length = 2048;  ///< the longest row; the model itself has no limit
  int64_t num_layers = 30;
  int64_t num_heads = 32;
  int64_t width = 4096;
  bool tied = true;    ///< the head uses the token embedding's weight
  double dropout = 0;  ///< at the end of each sublayer
  float norm_eps = 1e-5f;
  /// As in Gpt2Config.
  double init_stddev = 0.02;
};

/// Names: embed.weight embed_norm.* blocks.N.{norm1,attn.qkv,attn.out,norm2,mlp.up,mlp.down}.*
/// norm.* head.weight (tied: the same parameter as embed.weight).
class Bloom : public LanguageModel {
 public:
  /// ConfigError if sizes are not positive or the heads do not divide the width.
  explicit Bloom(const BloomConfig& config);

  Tensor forward(const Tensor& ids_BT, const ForwardOptions& options = {}) override;
  const ModelShape& shape() const override { return shape_; }
  void set_recompute(const RecomputePolicy& policy) override;
  const BloomConfig& config() const { return config_; }

 protected:
  const Child<LmHead>& head() const override { return head_; }

 private:
  BloomConfig config_;
  ModelShape shape_;
  Child<Embedding> embed_;
  Child<LayerNorm> embed_norm_;
  ChildList<Gpt2Block> blocks_;
  Child<LayerNorm> norm_;
  Child<LmHead> head_;
};

}  // namespace tessera::nn
