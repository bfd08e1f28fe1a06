#include "nn/gpt2.h"

#include <cmath>

#include "core/autograd.h"
#include "core/recompute.h"
#include "kernels/pointwise/pointwise.h"

namespace tessera::nn {
namespace {

Init output_init(const Gpt2Config& c) {
  return Init::normal(0, c.init_stddev / std::sqrt(2.0 * static_cast<double>(c.num_layers)));
}

AttentionConfig attention_config(const Gpt2Config& c) {
  AttentionConfig a;
  a.width = c.width;
  a.num_heads = c.num_heads;
  a.qkv_bias = a.out_bias = c.bias;
  a.alibi = c.alibi;
  a.init = Init::normal(0, c.init_stddev);
  a.out_init = output_init(c);
  return a;
}

MlpConfig mlp_config(const Gpt2Config& c) {
  MlpConfig m;
  m.width = c.width;
  m.ffn_width = c.ffn_width == 0 ? 4 * c.width : c.ffn_width;
  m.bias = c.bias;
  m.gelu = c.gelu;
  m.init = Init::normal(0, c.init_stddev);
  m.out_init = output_init(c);
  return m;
}

}  // namespace

ModelShape gpt2_shape(const Gpt2Config& c, const char* model) {
  ModelShape s{.vocab_size = c.vocab_size,
               .context_length = c.context_length,
               .num_layers = c.num_layers,
               .num_heads = c.num_heads,
               .num_kv_heads = c.num_heads,
               .width = c.width};
  check_shape(model, s);
  TESSERA_CHECK_AS(ConfigError, c.width % c.num_heads == 0,
                   "{}: width {} is not divisible by num_heads {}", model, c.width, c.num_heads);
  s.head_width = c.width / c.num_heads;
  return s;
}

Gpt2Block::Gpt2Block(const Gpt2Config& config)
    : norm1_(this, "norm1", config.width, config.norm_eps, config.bias),
      attn_(this, "attn", attention_config(config)),
      norm2_(this, "norm2", config.width, config.norm_eps, config.bias),
      mlp_(this, "mlp", mlp_config(config)),
      dropout_(this, "dropout", config.dropout) {}

Tensor Gpt2Block::body(const Tensor& x_BTC, const AttentionInput& input) {
  Tensor a_BTC = attn_(norm1_(x_BTC), input);
  if (dropout_->is_active()) a_BTC = dropout_(a_BTC);
  const ResidualNorm mid = norm2_(a_BTC, x_BTC);
  if (dropout_->is_active()) return add(mid.sum, dropout_(mlp_(mid.y)));
  return mlp_(mid.y, mid.sum);
}

Tensor Gpt2Block::selective_body(const Tensor& x_BTC, const AttentionInput& input) {
  const Tensor a_BTC =
      recompute_output([this](const std::vector<Tensor>& in) { return std::vector{norm1_(in[0])}; },
                       [&](const std::vector<Tensor>& in) {
                         const Tensor a_BTC = attn_(in[0], input);
                         return dropout_->is_active() ? dropout_(a_BTC) : a_BTC;
                       },
                       {x_BTC});
  return recompute_output(
      [this](const std::vector<Tensor>& in) {
        const ResidualNorm mid = norm2_(in[0], in[1]);
        return std::vector{mid.y, mid.sum};
      },
      [&](const std::vector<Tensor>& in) {
        if (dropout_->is_active()) return add(in[1], dropout_(mlp_(in[0])));
        return mlp_(in[0], in[1]);
      },
      {a_BTC, x_BTC});
}

void Gpt2Block::set_recompute(Recompute what) {
  recompute_ = what;
  mlp_->set_recompute(what == Recompute::kCheap);
}

Tensor Gpt2Block::forward(const Tensor& x_BTC, const AttentionInput& input) {
  if (recompute_ == Recompute::kNothing || !grad_mode()) return body(x_BTC, input);
  if (recompute_ == Recompute::kCheap) return selective_body(x_BTC, input);
  return recompute(
      [this, input](const std::vector<Tensor>& inputs) { return body(inputs[0], input); }, {x_BTC});
}

Gpt2::Gpt2(const Gpt2Config& config)
    : config_(config),
      shape_(gpt2_shape(config)),
      embed_(this, "embed", config.vocab_size, config.width, Init::normal(0, config.init_stddev)),
      position_(this, "position", config.context_length, config.width,
                Init::normal(0, config.init_stddev)),
      dropout_(this, "dropout", config.dropout),
      blocks_(this, "blocks") {
  for (int64_t layer = 0; layer < config.num_layers; ++layer) blocks_.emplace_back(config);
  norm_.emplace(this, "norm", config.width, config.norm_eps, config.bias);
  if (config.tied) {
    head_.emplace(this, "head", *embed_);
  } else {
    head_.emplace(this, "head", config.width, config.vocab_size,
                  Init::normal(0, config.init_stddev));
  }
}

void Gpt2::set_recompute(const RecomputePolicy& policy) {
  for (int64_t i = 0; i < blocks_.num_children(); ++i) {
    blocks_[i]->set_recompute(policy.of(i));
  }
}

Tensor Gpt2::forward(const Tensor& ids_BT, const ForwardOptions& options) {
  check_forward(ids_BT, options);
  const int64_t T = ids_BT.dim(1), first = options.cache != nullptr ? options.cache->length : 0;
  const Tensor positions =
      options.positions.is_defined() ? options.positions : position_range(first, T);
  Tensor x_BTC = add(embed_(ids_BT), position_(positions));
  x_BTC = dropout_(x_BTC);
  for (int64_t i = 0; i < blocks_.num_children(); ++i) {
    x_BTC = blocks_[i](x_BTC, attention_input(options, positions, i));
  }
  if (options.cache != nullptr) options.cache->length += T;
  return norm_(x_BTC);
}

}  // namespace tessera::nn
