#include "nn/attention.h"

#include <bit>
#include <cmath>

#include "kernels/attention/attention.h"
#include "kernels/elementwise/elementwise.h"

namespace tessera::nn {
namespace {

AttentionConfig with_defaults(AttentionConfig c) {
  TESSERA_CHECK_AS(ConfigError, c.width > 0 && c.num_heads > 0,
                   "Attention: width and heads must be positive, got {} and {}", c.width,
                   c.num_heads);
  if (c.num_kv_heads == 0) c.num_kv_heads = c.num_heads;
  TESSERA_CHECK_AS(ConfigError, c.num_kv_heads > 0 && c.num_heads % c.num_kv_heads == 0,
                   "Attention: {} heads are not divisible by {} key and value heads", c.num_heads,
                   c.num_kv_heads);
  if (c.head_width == 0) {
    TESSERA_CHECK_AS(ConfigError, c.width % c.num_heads == 0,
                     "Attention: width {} is not divisible by {} heads", c.width, c.num_heads);
    c.head_width = c.width / c.num_heads;
  }
  TESSERA_CHECK_AS(ConfigError, c.head_width > 0, "Attention: head width must be positive, got {}",
                   c.head_width);
  TESSERA_CHECK_AS(ConfigError, !c.rope || c.rope->rotary_dim != 0 || c.head_width % 2 == 0,
                   "Attention: rotary positions need an even head width, got {}", c.head_width);
  TESSERA_CHECK_AS(ConfigError, c.window >= 0 && (c.window == 0 || c.causal),
                   "Attention: a window must not be negative and needs causal, got {}", c.window);
  TESSERA_CHECK_AS(ConfigError, std::isfinite(c.softcap) && c.softcap >= 0,
                   "Attention: softcap must be finite and not negative, got {}", c.softcap);
  TESSERA_CHECK_AS(ConfigError, c.softcap == 0 || !c.alibi,
                   "Attention: alibi and a softcap of {} do not go together", c.softcap);
  return c;
}

}  // namespace

std::vector<float> alibi_slopes(int64_t num_heads) {
  const int64_t below = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(num_heads)));
  std::vector<float> slopes;
  for (int64_t h = 0; h < num_heads; ++h) {
    const double exponent =
        h < below ? 8.0 * static_cast<double>(h + 1) / static_cast<double>(below)
                  : 8.0 * static_cast<double>(2 * (h - below) + 1) / static_cast<double>(2 * below);
    slopes.push_back(static_cast<float>(std::exp2(-exponent)));
  }
  return slopes;
}

Attention::Attention(const AttentionConfig& config) : config_(with_defaults(config)) {
  const AttentionConfig& c = config_;
  qkv_.emplace(this, "qkv", c.width, (c.num_heads + 2 * c.num_kv_heads) * c.head_width,
               LinearOptions{.bias = c.qkv_bias, .init = c.init});
  if (c.qk_norm) {
    q_norm_.emplace(this, "q_norm", c.head_width, c.norm_eps);
    k_norm_.emplace(this, "k_norm", c.head_width, c.norm_eps);
  }
  out_.emplace(this, "out", c.num_heads * c.head_width, c.width,
               LinearOptions{.bias = c.out_bias, .init = c.out_init});
  if (c.alibi) {
    alibi_slopes_ = &register_buffer("alibi_slopes", new_tensor({c.num_heads}, kF32),
                                     /*persistent=*/false);
    if (alibi_slopes_->storage()->is_materialized()) reset_buffers();
  }
}

void Attention::reset_buffers() {
  if (alibi_slopes_ == nullptr) return;
  const std::vector<float> slopes = alibi_slopes(config_.num_heads);
  alibi_slopes_->copy_(from_values(std::span<const float>(slopes), {config_.num_heads}));
}

Tensor Attention::forward(const Tensor& x_BTC, const AttentionInput& input) {
  const AttentionConfig& c = config_;
  TESSERA_CHECK_SHAPE(x_BTC.num_dims() == 3, "Attention: x must be [B, T, C], got {}",
                      x_BTC.shape());
  const int64_t B = x_BTC.dim(0), T = x_BTC.dim(1), H = c.num_heads, G = c.num_kv_heads;
  const Tensor qkv_BTHD = qkv_(x_BTC).view({B, T, H + 2 * G, c.head_width});
  const int64_t sizes[] = {H, G, G};
  std::vector<Tensor> parts = split(qkv_BTHD, sizes, 2);
  Tensor q_BTHD = parts[0], k_BTGD = parts[1], v_BTGD = parts[2];
  if (c.qk_norm) {
    q_BTHD = q_norm_(q_BTHD);
    k_BTGD = k_norm_(k_BTGD);
  }
  if (c.rope) {
    const auto rotate = [&](const Tensor& heads) {
      return input.rope_table.is_defined() ? rope_with_table(heads, input.rope_table, *c.rope)
                                           : rope(heads, input.positions, *c.rope);
    };
    q_BTHD = rotate(q_BTHD);
    k_BTGD = rotate(k_BTGD);
  }
  AttentionOptions options;
  options.causal = c.causal;
  options.scale = c.scale;
  options.window = c.window;
  options.softcap = c.softcap;
  options.document_starts = input.document_starts;
  // The kernels take f32: a buffer in another dtype holds rounded slopes.
  if (alibi_slopes_ != nullptr) options.alibi_slopes = alibi_slopes_->to(kF32);
  if (!input.row_lengths.empty()) {
    TESSERA_CHECK(input.cache != nullptr, "Attention: lengths of {} rows without a cache",
                  input.row_lengths.size());
    const Tensor y_BTHD = attention_decode(q_BTHD, k_BTGD, v_BTGD, input.cache->k_BSGD,
                                           input.cache->v_BSGD, input.row_lengths, options);
    return out_(y_BTHD.view({B, T, H * c.head_width}));
  }
  if (input.cache != nullptr) {
    const int64_t S = input.cache_length + T;
    Tensor &k_BSGD = input.cache->k_BSGD, &v_BSGD = input.cache->v_BSGD;
    TESSERA_CHECK_SHAPE(k_BSGD.dim(0) == B && S <= k_BSGD.dim(1),
                        "Attention: a cache of {} takes no {} positions of {} rows after {}",
                        k_BSGD.shape(), T, B, input.cache_length);
    k_BSGD.narrow(1, input.cache_length, T).copy_(k_BTGD);
    v_BSGD.narrow(1, input.cache_length, T).copy_(v_BTGD);
    k_BTGD = k_BSGD.narrow(1, 0, S);
    v_BTGD = v_BSGD.narrow(1, 0, S);
  }
  const Tensor y_BTHD = attention(q_BTHD, k_BTGD, v_BTGD, options);
  return out_(y_BTHD.view({B, T, H * c.head_width}));
}

std::string Attention::kind() const {
  const AttentionConfig& c = config_;
  std::string text = fmt::format("Attention({} heads of {}", c.num_heads, c.head_width);
  if (c.num_kv_heads != c.num_heads) text += fmt::format(", {} kv heads", c.num_kv_heads);
  if (c.rope) text += fmt::format(", rope theta {}", c.rope->theta);
  if (c.alibi) text += ", alibi";
  if (c.window > 0) text += fmt::format(", window {}", c.window);
  if (c.softcap > 0) text += fmt::format(", softcap {}", c.softcap);
  return text + (c.causal ? ", causal)" : ")");
}

}  // namespace tessera::nn
