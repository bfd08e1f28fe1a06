#include "nn/gpt2/gpt2.h"

namespace tessera::nn {
namespace {

AttentionConfig attention_config(const Gpt2Config& c) {
  const MatrixInit init(c.init_stddev, c.num_layers);
  AttentionConfig a;
  a.width = c.width;
  a.num_heads = c.num_heads;
  a.qkv_bias = a.out_bias = c.bias;
  a.init = init.inside;
  a.out_init = init.out;
  return a;
}

MlpConfig mlp_config(const Gpt2Config& c) {
  const MatrixInit init(c.init_stddev, c.num_layers);
  MlpConfig m;
  m.width = c.width;
  m.ffn_width = c.ffn_width == 0 ? 4 * c.width : c.ffn_width;
  m.bias = c.bias;
  m.gelu = c.gelu;
  m.init = init.inside;
  m.out_init = init.out;
  return m;
}

}  // namespace

Gpt2Block::Gpt2Block(const Gpt2Config& c)
    : PreNormBlock(attention_config(c), mlp_config(c), c.dropout, c.norm_eps, c.bias) {}

Gpt2::Gpt2(const Gpt2Config& config)
    : config_(config),
      shape_(shape_of("Gpt2", config)),
      embed_(this, "embed", config.vocab_size, config.width, Init::normal(0, config.init_stddev)),
      position_(this, "position", config.context_length, config.width,
                Init::normal(0, config.init_stddev)),
      dropout_(this, "dropout", config.dropout),
      blocks_(this, "blocks") {
  for (int64_t layer = 0; layer < config.num_layers; ++layer) blocks_.emplace_back(config);
  norm_.emplace(this, "norm", config.width, config.norm_eps, config.bias);
  emplace_head(head_, config.tied, *embed_, Init::normal(0, config.init_stddev));
}

Tensor Gpt2::forward(const Tensor& ids_BT, const ForwardOptions& options) {
  check_forward(ids_BT, options);
  const Tensor positions = positions_of(ids_BT, options);
  const Tensor x_BTC = dropout_(add(embed_(ids_BT), position_(positions)));
  return norm_(run_blocks(blocks_, x_BTC, options, positions));
}

}  // namespace tessera::nn
