#include "nn/bloom.h"

namespace tessera::nn {
namespace {

/// Of the blocks and the sizes; the rest of a Gpt2 is not there.
Gpt2Config gpt2_config(const BloomConfig& c) {
  Gpt2Config g;
  g.vocab_size = c.vocab_size;
  g.context_length = c.context_length;
  g.num_layers = c.num_layers;
  g.num_heads = c.num_heads;
  g.width = c.width;
  g.alibi = true;
  g.dropout = c.dropout;
  g.norm_eps = c.norm_eps;
  g.init_stddev = c.init_stddev;
  return g;
}

}  // namespace

Bloom::Bloom(const BloomConfig& config)
    : config_(config),
      shape_(gpt2_shape(gpt2_config(config), "Bloom")),
      embed_(this, "embed", config.vocab_size, config.width, Init::normal(0, config.init_stddev)),
      embed_norm_(this, "embed_norm", config.width, config.norm_eps, true),
      blocks_(this, "blocks") {
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    blocks_.emplace_back(gpt2_config(config));
  }
  norm_.emplace(this, "norm", config.width, config.norm_eps, true);
  if (config.tied) {
    head_.emplace(this, "head", *embed_);
  } else {
    head_.emplace(this, "head", config.width, config.vocab_size,
                  Init::normal(0, config.init_stddev));
  }
}

void Bloom::set_recompute(const RecomputePolicy& policy) {
  for (int64_t i = 0; i < blocks_.num_children(); ++i) {
    blocks_[i]->set_recompute(policy.of(i));
  }
}

Tensor Bloom::forward(const Tensor& ids_BT, const ForwardOptions& options) {
  check_forward(ids_BT, options);
  Tensor x_BTC = embed_norm_(embed_(ids_BT));
  for (int64_t i = 0; i < blocks_.num_children(); ++i) {
    x_BTC = blocks_[i](x_BTC, attention_input(options, {}, i));
  }
  if (options.cache != nullptr) options.cache->length += ids_BT.dim(1);
  return norm_(x_BTC);
}

}  // namespace tessera::nn
