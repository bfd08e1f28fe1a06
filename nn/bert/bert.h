#pragma once

#include "nn/classifier.h"
#include "nn/family.h"
#include "nn/transformer.h"

// BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019): encoders. Attention in both directions,
// learned positions, types of tokens, LayerNorm after each sublayer, GELU; a head that predicts
// masked tokens, or a pooler.
//
// B batch, T time, C model width, V vocabulary

namespace tessera::nn {

/// Sizes of BERT and RoBERTa; the defaults are those of bert-base-uncased.
struct BertConfig {
  int64_t vocab_size = 30522;
  int64_t context_length = 512;
  int64_t num_layers = 12;
  int64_t num_heads = 12;
  int64_t width = 768;
  int64_t ffn_width = 0;  ///< 0: 4 * width
  int64_t num_types = 2;  ///< of tokens (segments)
  /// Rows of the position table before that of position 0: RoBERTa has 2.
  int64_t position_offset = 0;
  /// Masked tokens are predicted; else the model has hidden states only.
  bool mlm_head = true;
  bool pooler = false;  ///< tanh(linear(hidden states of the first token)); not beside mlm_head
  /// Sequences are classified, in place of predicting tokens (FamilyConfig::set_classifier).
  bool classifies = false;
  bool tied = true;    ///< the head uses the token embedding's weight
  double dropout = 0;  ///< after the embeddings and at the end of each sublayer
  float norm_eps = 1e-12f;
  Gelu gelu = Gelu::kExact;
  /// Matrices and embeddings start normal with this deviation, biases at zero, norms at one.
  double init_stddev = 0.02;

  /// No head that predicts tokens; the states of the first token go through the pooler.
  void drop_head(Pooling pooling) {
    classifies = true, mlm_head = false, pooler = pooling == Pooling::kCls;
  }
};
/// The family that the configuration is of (nn/family.h).
const Family& family_of(const BertConfig& config);

/// A block of BERT: norms after attention and MLP.
class BertBlock final : public PostNormBlock<LayerNorm, Mlp> {
 public:
  explicit BertBlock(const BertConfig& config);
};

/// What the head that predicts masked tokens does before its product with the vocabulary:
/// norm(gelu(linear(x))).
/// Shapes   x [B, T, C] -> [B, T, C]
class MlmTransform final : public Module {
 public:
  explicit MlmTransform(const BertConfig& config);
  Tensor forward(const Tensor& x_BTC);

 private:
  Gelu gelu_;
  Child<Linear> linear_;
  Child<LayerNorm> norm_;
};

/// Names: embed.weight position.weight type.weight embed_norm.* blocks.N.{attn.qkv,attn.out,norm1,
/// mlp.up,mlp.down,norm2}.* pooler.* transform.{linear,norm}.* head.{weight,bias.value} (weight tied: the
/// same parameter as embed.weight).
class Bert : public LanguageModel {
 public:
  /// ConfigError if sizes are not positive, the heads do not divide the width, or there is both a
  /// head and a pooler.
  explicit Bert(const BertConfig& config);

  /// The hidden states of the last block.
  Tensor forward(const Tensor& ids_BT, const ForwardOptions& options = {}) override;
  /// The pooler's output: [B, T, C] -> [B, C]. Error without a pooler.
  Tensor pooled(const Tensor& hidden_BTC);
  const ModelShape& shape() const override { return shape_; }
  std::unique_ptr<FamilyConfig> family_config() const override;
  const BertConfig& config() const { return config_; }

 protected:
  /// ConfigError without a head.
  const Child<LmHead>& head() const override;
  Tensor head_input(const Tensor& hidden_BTC) override;
  /// Through the pooler, if there is one.
  Tensor classifier_input(const Tensor& pooled_BC) override;

 private:
  BertConfig config_;
  ModelShape shape_;
  Child<Embedding> embed_, position_, type_;
  Child<LayerNorm> embed_norm_;
  Child<Dropout> dropout_;
  ChildList<BertBlock> blocks_;
  Child<Linear> pooler_;
  Child<MlmTransform> transform_;
  Child<LmHead> head_;
};

}  // namespace tessera::nn
