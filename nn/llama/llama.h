#pragma once

#include "nn/family.h"
#include "nn/transformer.h"

// Llama (Touvron et al. 2023) and its relatives: rotary positions, RmsNorm before each sublayer,
// SwiGLU, grouped key and value heads. Mistral is this with its sizes, the first of them with a
// window; Qwen2 adds qkv_bias, Qwen3 qk_norm and a head_width of its own; their small models have a
// tied head.
//
// B batch, T time, C model width

namespace tessera::nn {

/// Sizes of Llama and the families of its shape: Mistral, Qwen2, Qwen3.
struct LlamaConfig {
  int64_t vocab_size = 32000;
  int64_t context_length = 2048;
  int64_t num_layers = 16;
  int64_t num_heads = 16;
  int64_t num_kv_heads = 0;  ///< 0: num_heads
  int64_t width = 2048;
  int64_t head_width = 0;  ///< 0: width / num_heads
  int64_t ffn_width = 0;   ///< 0: 8/3 * width rounded up to a multiple of 64
  bool tied = false;       ///< the head uses the token embedding's weight
  bool qkv_bias = false;
  bool qk_norm = false;
  int64_t window = 0;  ///< positions that a query sees, its own the last; 0: all
  /// Which layers have the window, 'w', and which see all, 'f', repeated over the layers: "wf" every
  /// second one from the first, "ffw" every third from the third.
  std::string window_layers = "w";
  float attn_softcap = 0;   ///< attention logits count as cap tanh(x / cap) (Gemma 2); 0: none
  float logit_softcap = 0;  ///< the same of the logits of the vocabulary
  float norm_eps = 1e-5f;
  RopeOptions rope{};
  /// Matrices and embeddings start normal with this deviation, the projections that end a sublayer
  /// with it / sqrt(2 * num_layers), biases at zero, norms at one.
  double init_stddev = 0.02;

  /// Positions that the layer's attention sees back; 0: all.
  int64_t window_of(int64_t layer) const {
    const auto at = static_cast<size_t>(layer) % window_layers.size();
    return window_layers[at] == 'w' ? window : 0;
  }
};

/// The family that the configuration is of (nn/family.h).
const Family& family_of(const LlamaConfig& config);

/// `window_of` every layer.
std::vector<int64_t> windows_of(const LlamaConfig& config);

/// A block of Llama: RMS norms before attention, with rotary positions, and SwiGLU.
class LlamaBlock final : public PreNormBlock<RmsNorm, SwiGlu> {
 public:
  LlamaBlock(const LlamaConfig& config, int64_t layer);
};

/// Names: embed.weight blocks.N.{norm1,attn.qkv,attn.q_norm,attn.k_norm,attn.out,norm2,mlp.gate_up,
/// mlp.down}.* norm.weight head.weight (tied: the same parameter as embed.weight).
class Llama : public LanguageModel {
 public:
  /// ConfigError if sizes are not positive, the heads do not divide, or a window, its layers or a
  /// soft-cap are out of range.
  explicit Llama(const LlamaConfig& config);

  Tensor forward(const Tensor& ids_BT, const ForwardOptions& options = {}) override;
  const ModelShape& shape() const override { return shape_; }
  std::unique_ptr<FamilyConfig> family_config() const override;
  const LlamaConfig& config() const { return config_; }

 protected:
  const Child<LmHead>& head() const override { return head_; }

 private:
  LlamaConfig config_;
  ModelShape shape_;
  Child<Embedding> embed_;
  ChildList<LlamaBlock> blocks_;
  Child<RmsNorm> norm_;
  Child<LmHead> head_;
};

}  // namespace tessera::nn
