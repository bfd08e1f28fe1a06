#include "nn/bloom/bloom.h"

namespace tessera::nn {
namespace {

AttentionConfig attention_config(const BloomConfig& c) {
  const MatrixInit init(c.init_stddev, c.num_layers);
  AttentionConfig a;
  a.width = c.width;
  a.num_heads = c.num_heads;
  a.qkv_bias = a.out_bias = true;
  a.alibi = true;
  a.init = init.inside;
  a.out_init = init.out;
  return a;
}

MlpConfig mlp_config(const BloomConfig& c) {
  const MatrixInit init(c.init_stddev, c.num_layers);
  MlpConfig m;
  m.width = c.width;
  m.ffn_width = 4 * c.width;
  m.init = init.inside;
  m.out_init = init.out;
  return m;
}

}  // namespace

BloomBlock::BloomBlock(const BloomConfig& c)
    : PreNormBlock(attention_config(c), mlp_config(c), c.dropout, c.norm_eps) {}

Bloom::Bloom(const BloomConfig& config)
    : config_(config),
      shape_(shape_of("Bloom", config)),
      embed_(this, "embed", config.vocab_size, config.width, Init::normal(0, config.init_stddev)),
      embed_norm_(this, "embed_norm", config.width, config.norm_eps, true),
      blocks_(this, "blocks") {
  for (int64_t layer = 0; layer < config.num_layers; ++layer) blocks_.emplace_back(config);
  norm_.emplace(this, "norm", config.width, config.norm_eps, true);
  emplace_head(head_, config.tied, *embed_, Init::normal(0, config.init_stddev));
}

Tensor Bloom::forward(const Tensor& ids_BT, const ForwardOptions& options) {
  check_forward(ids_BT, options);
  return norm_(run_blocks(blocks_, embed_norm_(embed_(ids_BT)), options, {}));
}

}  // namespace tessera::nn
