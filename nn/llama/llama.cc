#include "nn/llama/llama.h"

#include <cmath>

namespace tessera::nn {
namespace {

LlamaConfig with_defaults(LlamaConfig c) {
  check_shape("Llama", {.vocab_size = c.vocab_size,
                        .context_length = c.context_length,
                        .num_layers = c.num_layers,
                        .num_heads = c.num_heads,
                        .width = c.width});
  if (c.num_kv_heads == 0) c.num_kv_heads = c.num_heads;
  TESSERA_CHECK_AS(ConfigError, c.num_kv_heads > 0 && c.num_heads % c.num_kv_heads == 0,
                   "Llama: num_heads {} is not divisible by num_kv_heads {}", c.num_heads,
                   c.num_kv_heads);
  if (c.head_width == 0) {
    TESSERA_CHECK_AS(ConfigError, c.width % c.num_heads == 0,
                     "Llama: width {} is not divisible by num_heads {}", c.width, c.num_heads);
    c.head_width = c.width / c.num_heads;
  }
  TESSERA_CHECK_AS(ConfigError,
                   c.head_width > 0 && (c.rope.rotary_dim != 0 || c.head_width % 2 == 0),
                   "Llama: rotary positions need an even head width, got {}", c.head_width);
  if (c.ffn_width == 0) c.ffn_width = (8 * c.width + 3 * 64 - 1) / (3 * 64) * 64;
  TESSERA_CHECK_AS(ConfigError, c.ffn_width > 0, "Llama: ffn_width must be positive, got {}",
                   c.ffn_width);
  TESSERA_CHECK_AS(ConfigError, c.window >= 0, "Llama: window must not be negative, got {}",
                   c.window);
  TESSERA_CHECK_AS(
      ConfigError,
      !c.window_layers.empty() && c.window_layers.find_first_not_of("wf") == std::string::npos,
      "Llama: window_layers must be letters w and f, got \"{}\"", c.window_layers);
  for (const float softcap : {c.attn_softcap, c.logit_softcap}) {
    TESSERA_CHECK_AS(ConfigError, std::isfinite(softcap) && softcap >= 0,
                     "Llama: a softcap must be finite and not negative, got {}", softcap);
  }
  return c;
}

AttentionConfig attention_config(const LlamaConfig& c, int64_t layer) {
  AttentionConfig a;
  a.width = c.width;
  a.num_heads = c.num_heads;
  a.num_kv_heads = c.num_kv_heads;
  a.head_width = c.head_width;
  a.qkv_bias = c.qkv_bias;
  a.qk_norm = c.qk_norm;
  a.window = c.window_of(layer);
  a.softcap = c.attn_softcap;
  a.norm_eps = c.norm_eps;
  a.rope = c.rope;
  const MatrixInit init(c.init_stddev, c.num_layers);
  a.init = init.inside;
  a.out_init = init.out;
  return a;
}

MlpConfig mlp_config(const LlamaConfig& c) {
  MlpConfig m;
  m.width = c.width;
  m.ffn_width = c.ffn_width;
  m.bias = false;
  const MatrixInit init(c.init_stddev, c.num_layers);
  m.init = init.inside;
  m.out_init = init.out;
  return m;
}

}  // namespace

std::vector<int64_t> windows_of(const LlamaConfig& c) {
  std::vector<int64_t> windows;
  for (int64_t layer = 0; layer < c.num_layers; ++layer) windows.push_back(c.window_of(layer));
  return windows;
}

LlamaBlock::LlamaBlock(const LlamaConfig& c, int64_t layer)
    : PreNormBlock(attention_config(c, layer), mlp_config(c), std::nullopt, c.norm_eps) {}

Llama::Llama(const LlamaConfig& config)
    : config_(with_defaults(config)),
      shape_{.vocab_size = config_.vocab_size,
             .context_length = config_.context_length,
             .num_layers = config_.num_layers,
             .num_heads = config_.num_heads,
             .num_kv_heads = config_.num_kv_heads,
             .head_width = config_.head_width,
             .width = config_.width,
             .windows = windows_of(config_)},
      embed_(this, "embed", config_.vocab_size, config_.width,
             Init::normal(0, config_.init_stddev)),
      blocks_(this, "blocks") {
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) blocks_.emplace_back(config_, layer);
  norm_.emplace(this, "norm", config_.width, config_.norm_eps);
  emplace_head(head_, config_.tied, *embed_, Init::normal(0, config_.init_stddev),
               config_.logit_softcap);
}

Tensor Llama::forward(const Tensor& ids_BT, const ForwardOptions& options) {
  check_forward(ids_BT, options);
  Tensor positions = options.positions;
  if (options.cache != nullptr) positions = positions_of(ids_BT, options);
  // Angles of given positions cost more than the rotation itself: once for all layers.
  Tensor table;
  if (positions.is_defined()) table = rope_table(positions, shape_.head_width, config_.rope);
  return norm_(run_blocks(blocks_, embed_(ids_BT), options, positions, table));
}

}  // namespace tessera::nn
