#pragma once

#include <span>

#include "kernels/rope/rope.h"
#include "nn/linear.h"
#include "nn/norm.h"

// B batch, T time, S cached time, C model width, H heads, G key and value heads, D head width

namespace tessera::nn {

/// Keys and values of one layer, [B, capacity, G, D] each.
struct LayerCache {
  Tensor k_BSGD, v_BSGD;
};

/// What a block needs besides its input; the same for all layers of a forward.
struct AttentionInput {
  /// i32 [T] or [B, T]; undefined: 0 .. T-1.
  Tensor positions;
  /// The `rope_table` of these positions, if the model made one for all layers.
  Tensor rope_table;
  /// i32 [B, T]: where each query's document starts; undefined: one document a row.
  Tensor document_starts;
  /// Earlier keys and values to attend to and to extend; null: none.
  LayerCache* cache = nullptr;
  int64_t cache_length = 0;  ///< positions already in the cache
  /// Those of each row, where they differ and x has one position a row; empty: cache_length.
  std::span<const int32_t> row_lengths = {};
};

/// Sizes and kind of an attention module.
struct AttentionConfig {
  int64_t width = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;  ///< 0: num_heads. Divides num_heads.
  int64_t head_width = 0;    ///< 0: width / num_heads
  bool qkv_bias = false;
  bool out_bias = false;
  bool qk_norm = false;  ///< RmsNorm over each head of q and k, before the rotation (Qwen3)
  float norm_eps = 1e-5f;
  std::optional<RopeOptions> rope = {};  ///< rotary positions
  bool alibi = false;                    ///< linear biases (Press et al. 2022) instead of positions
  bool causal = true;
  int64_t window = 0;  ///< positions that a query sees, its own the last; 0: all (AttentionOptions)
  float softcap = 0;   ///< bound of the logits; 0: none
  float scale = 0;     ///< of the logits; 0: 1 / sqrt(head_width)
  std::optional<Init> init = {};      ///< of the qkv projection; default as in Linear
  std::optional<Init> out_init = {};  ///< of the output projection; default as in Linear
};

/// Self-attention with one packed projection: rows of qkv.weight are the H query heads, then the G
/// key heads, then the G value heads, D rows each.
/// Shapes   x [B, T, C] -> [B, T, C]
class Attention : public Module {
 public:
  /// ConfigError if the heads do not divide or a window or soft-cap is negative.
  explicit Attention(const AttentionConfig& config);

  Tensor forward(const Tensor& x_BTC, const AttentionInput& input = {});

  std::string kind() const override;
  void reset_buffers() override;
  const AttentionConfig& config() const { return config_; }  ///< with the defaults filled in

 private:
  AttentionConfig config_;
  Child<Linear> qkv_;
  Child<RmsNorm> q_norm_, k_norm_;
  Child<Linear> out_;
  Tensor* alibi_slopes_ = nullptr;
};

/// The slopes of ALiBi for each head: 2^(-8 (h + 1) / H) if H is a power of two, else those of the
/// power of two below and every second one of the power of two above.
std::vector<float> alibi_slopes(int64_t num_heads);

}  // namespace tessera::nn
