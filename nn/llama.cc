#include "nn/llama.h"

#include <cmath>

#include "core/autograd.h"
#include "core/recompute.h"

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

Init output_init(const LlamaConfig& c) {
  return Init::normal(0, c.init_stddev / std::sqrt(2.0 * static_cast<double>(c.num_layers)));
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
  a.init = Init::normal(0, c.init_stddev);
  a.out_init = output_init(c);
  return a;
}

MlpConfig mlp_config(const LlamaConfig& c) {
  MlpConfig m;
  m.width = c.width;
  m.ffn_width = c.ffn_width;
  m.bias = false;
  m.init = Init::normal(0, c.init_stddev);
  m.out_init = output_init(c);
  return m;
}

}  // namespace

std::vector<int64_t> windows_of(const LlamaConfig& c) {
  std::vector<int64_t> windows;
  for (int64_t layer = 0; layer < c.num_layers; ++layer) windows.push_back(c.window_of(layer));
  return windows;
}

LlamaBlock::LlamaBlock(const LlamaConfig& config, int64_t layer)
    : norm1_(this, "norm1", config.width, config.norm_eps),
      attn_(this, "attn", attention_config(config, layer)),
      norm2_(this, "norm2", config.width, config.norm_eps),
      mlp_(this, "mlp", mlp_config(config)) {}

Tensor LlamaBlock::body(const Tensor& x_BTC, const AttentionInput& input) {
  const ResidualNorm mid = norm2_(attn_(norm1_(x_BTC), input), x_BTC);
  return mlp_(mid.y, mid.sum);
}

Tensor LlamaBlock::selective_body(const Tensor& x_BTC, const AttentionInput& input) {
  const Tensor a_BTC =
      recompute_output([this](const std::vector<Tensor>& in) { return std::vector{norm1_(in[0])}; },
                       [&](const std::vector<Tensor>& in) { return attn_(in[0], input); }, {x_BTC});
  return recompute_output(
      [this](const std::vector<Tensor>& in) {
        const ResidualNorm mid = norm2_(in[0], in[1]);
        return std::vector{mid.y, mid.sum};
      },
      [&](const std::vector<Tensor>& in) { return mlp_(in[0], in[1]); }, {a_BTC, x_BTC});
}

void LlamaBlock::set_recompute(Recompute what) {
  recompute_ = what;
  mlp_->set_recompute(what == Recompute::kCheap);
}

Tensor LlamaBlock::forward(const Tensor& x_BTC, const AttentionInput& input) {
  if (recompute_ == Recompute::kNothing || !grad_mode()) return body(x_BTC, input);
  if (recompute_ == Recompute::kCheap) return selective_body(x_BTC, input);
  return recompute(
      [this, input](const std::vector<Tensor>& inputs) { return body(inputs[0], input); }, {x_BTC});
}

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
  if (config_.tied) {
    head_.emplace(this, "head", *embed_, config_.logit_softcap);
  } else {
    head_.emplace(this, "head", config_.width, config_.vocab_size,
                  Init::normal(0, config_.init_stddev), config_.logit_softcap);
  }
}

void Llama::set_recompute(const RecomputePolicy& policy) {
  for (int64_t i = 0; i < blocks_.num_children(); ++i) {
    blocks_[i]->set_recompute(policy.of(i));
  }
}

Tensor Llama::forward(const Tensor& ids_BT, const ForwardOptions& options) {
  check_forward(ids_BT, options);
  const int64_t T = ids_BT.dim(1);
  Tensor positions = options.positions;
  if (options.cache != nullptr && !positions.is_defined()) {
    positions = position_range(options.cache->length, T);
  }
  // Angles of given positions cost more than the rotation itself: once for all layers.
  Tensor table;
  if (positions.is_defined()) table = rope_table(positions, shape_.head_width, config_.rope);
  Tensor x_BTC = embed_(ids_BT);
  for (int64_t i = 0; i < blocks_.num_children(); ++i) {
    AttentionInput input = attention_input(options, positions, i);
    input.rope_table = table;
    x_BTC = blocks_[i](x_BTC, input);
  }
  if (options.cache != nullptr) options.cache->length += T;
  return norm_(x_BTC);
}

}  // namespace tessera::nn
