#include "nn/bert/bert.h"

#include "kernels/pointwise/pointwise.h"

namespace tessera::nn {
namespace {

AttentionConfig attention_config(const BertConfig& c) {
  AttentionConfig a;
  a.width = c.width;
  a.num_heads = c.num_heads;
  a.qkv_bias = a.out_bias = true;
  a.causal = false;
  a.init = a.out_init = Init::normal(0, c.init_stddev);
  return a;
}

MlpConfig mlp_config(const BertConfig& c) {
  MlpConfig m;
  m.width = c.width;
  m.ffn_width = c.ffn_width == 0 ? 4 * c.width : c.ffn_width;
  m.gelu = c.gelu;
  m.init = m.out_init = Init::normal(0, c.init_stddev);
  return m;
}

LinearOptions linear_options(const BertConfig& c) {
  return {.bias = true, .init = Init::normal(0, c.init_stddev)};
}

ModelShape checked_shape(const BertConfig& c) {
  ModelShape s = shape_of("Bert", c);
  s.is_causal = false;
  TESSERA_CHECK_AS(ConfigError, c.num_types > 0, "Bert: num_types must be positive, got {}",
                   c.num_types);
  TESSERA_CHECK_AS(ConfigError, c.position_offset >= 0,
                   "Bert: position_offset must not be negative, got {}", c.position_offset);
  TESSERA_CHECK_AS(ConfigError, !(c.mlm_head && c.pooler),
                   "Bert: mlm_head and pooler together, expected one of them at most");
  return s;
}

}  // namespace

BertBlock::BertBlock(const BertConfig& c)
    : PostNormBlock(attention_config(c), mlp_config(c), c.dropout, c.norm_eps) {}

MlmTransform::MlmTransform(const BertConfig& c)
    : gelu_(c.gelu),
      linear_(this, "linear", c.width, c.width, linear_options(c)),
      norm_(this, "norm", c.width, c.norm_eps) {}

Tensor MlmTransform::forward(const Tensor& x_BTC) {
  return norm_(linear_(x_BTC, gelu_));
}

Bert::Bert(const BertConfig& config)
    : config_(config),
      shape_(checked_shape(config)),
      embed_(this, "embed", config.vocab_size, config.width, Init::normal(0, config.init_stddev)),
      position_(this, "position", config.context_length + config.position_offset, config.width,
                Init::normal(0, config.init_stddev)),
      type_(this, "type", config.num_types, config.width, Init::normal(0, config.init_stddev)),
      embed_norm_(this, "embed_norm", config.width, config.norm_eps),
      dropout_(this, "dropout", config.dropout),
      blocks_(this, "blocks") {
  for (int64_t layer = 0; layer < config.num_layers; ++layer) blocks_.emplace_back(config);
  if (config.pooler) {
    pooler_.emplace(this, "pooler", config.width, config.width, linear_options(config));
  }
  if (!config.mlm_head) return;
  transform_.emplace(this, "transform", config);
  emplace_head(head_, config.tied, *embed_, Init::normal(0, config.init_stddev), /*softcap=*/0,
               /*bias=*/true);
}

Tensor Bert::forward(const Tensor& ids_BT, const ForwardOptions& options) {
  check_forward(ids_BT, options);
  TESSERA_CHECK(options.cache == nullptr,
                "Bert: a cache, which attention in both directions cannot use");
  TESSERA_CHECK(!options.positions.is_defined() || config_.position_offset == 0,
                "Bert: positions of the caller's beside position_offset {}, expected 0",
                config_.position_offset);
  const Tensor positions = options.positions.is_defined()
                               ? options.positions
                               : position_range(config_.position_offset, ids_BT.dim(1));
  const Tensor types =
      options.token_types.is_defined() ? options.token_types : zeros({ids_BT.dim(1)}, kI32);
  const Tensor x_BTC = add(add(embed_(ids_BT), type_(types)), position_(positions));
  return run_blocks(blocks_, dropout_(embed_norm_(x_BTC)), options, positions);
}

Tensor Bert::pooled(const Tensor& hidden_BTC) {
  TESSERA_CHECK(pooler_, "Bert: no pooler, expected BertConfig::pooler");
  return tanh(pooler_(hidden_BTC.narrow(1, 0, 1))).view({hidden_BTC.dim(0), hidden_BTC.dim(2)});
}

Tensor Bert::classifier_input(const Tensor& pooled_BC) {
  return pooler_ ? tanh(pooler_(pooled_BC)) : pooled_BC;
}

const Child<LmHead>& Bert::head() const {
  TESSERA_CHECK_AS(ConfigError, head_,
                   "Bert: no head, expected BertConfig::mlm_head for logits and losses");
  return head_;
}

Tensor Bert::head_input(const Tensor& hidden_BTC) {
  head();  // an Error without one
  return transform_(hidden_BTC);
}

}  // namespace tessera::nn
