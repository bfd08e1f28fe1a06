#pragma once

#include "core/enum_names.h"
#include "kernels/loss/loss.h"
#include "nn/attention.h"
#include "nn/embedding.h"

// What the language models have in common: options of a forward, the cache of generation, the
// head, the recompute policy, and the interface that a trainer sees.
//
// B batch, T time, C model width, V vocabulary

namespace tessera {

/// Lets module hooks see the tensors of a LossSum.
template <class F>
void for_each_tensor(LossSum& loss, F&& f) {
  f(loss.sum);
  f(loss.count);
}

}  // namespace tessera

namespace tessera::nn {

/// Keys and values of all layers; made by LanguageModel::make_cache. A forward with it appends.
struct KvCache {
  std::vector<LayerCache> layers;
  int64_t length = 0;    ///< positions it holds
  int64_t capacity = 0;  ///< positions it has room for
};

struct ForwardOptions {
  /// i32 [T] or [B, T]; undefined: 0 .. T-1, after the cache's positions if there is one.
  Tensor positions;
  /// i32 [B, T]: index in the row of the first token of each token's document; undefined: one
  /// document a row. Not together with a cache.
  Tensor document_starts;
  KvCache* cache = nullptr;
  /// `logits` only: of the last position alone, [B, 1, V].
  bool last_only = false;
};

/// What a block computes again in backward instead of keeping it.
enum class Recompute : unsigned char {
  kNothing,
  kCheap,  ///< outputs of norms and activations; those of attention and matrix products are kept
  kBlock,  ///< all of it but its input
};

/// Which blocks run again in backward instead of keeping their activations. A region is the inside
/// of one block, so a unit that holds the block is gathered for it exactly once more.
struct RecomputePolicy {
  enum class Kind { kNone, kFull, kEveryN, kSelective };
  friend constexpr auto enum_names(Kind) {
    return std::to_array<EnumName<Kind>>({{Kind::kNone, "none"},
                                          {Kind::kFull, "full"},
                                          {Kind::kEveryN, "every_n"},
                                          {Kind::kSelective, "selective"}});
  }
  Kind kind = Kind::kNone;
  int64_t every = 1;  ///< kEveryN: blocks 0, every, 2 * every, ...

  /// The whole of the block runs again.
  bool applies_to(int64_t layer) const {
    return kind == Kind::kFull || (kind == Kind::kEveryN && layer % every == 0);
  }
  Recompute of(int64_t layer) const {
    if (kind == Kind::kSelective) return Recompute::kCheap;
    return applies_to(layer) ? Recompute::kBlock : Recompute::kNothing;
  }
};

/// The sizes of a model that generation and metrics need.
struct ModelShape {
  int64_t vocab_size = 0;
  int64_t context_length = 0;  ///< positions it can tell apart
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_width = 0;
  int64_t width = 0;
  std::vector<int64_t> windows = {};  ///< of attention, a layer; 0 or none: no window
};

/// Hidden states to logits, or straight to the loss without ever holding all logits. Its weight is
/// its own, or (tied) that of the token embedding: then this is the parameter's second use. With a
/// soft-cap logits are softcap tanh(x / softcap).
class LmHead : public Module {
 public:
  LmHead(int64_t width, int64_t vocab_size, const Init& init, float softcap = 0);
  /// Tied: the weight of `embedding`, [V, C].
  explicit LmHead(Embedding& embedding, float softcap = 0);

  /// [B, T, C] -> [B, T, V].
  Tensor forward(const Tensor& hidden_BTC);
  LossSum forward(const Tensor& hidden_BTC, const Tensor& targets_BT,
                  const LinearCrossEntropyOptions& options);

  std::string kind() const override;
  const Tensor& weight() const { return weight_; }

 private:
  Tensor& weight_;
  bool is_tied_;
  float softcap_;
};

/// Base of the language models: what a trainer and a generator see.
class LanguageModel : public Module {
 public:
  /// Hidden states after the last norm. Call it by `call(model, ids)`, so that the hook runs.
  /// Shapes   ids i32 | i64 [B, T] -> [B, T, C]
  virtual Tensor forward(const Tensor& ids_BT, const ForwardOptions& options = {}) = 0;
  virtual const ModelShape& shape() const = 0;
  virtual void set_recompute(const RecomputePolicy& policy) = 0;

  /// Sum of -log p(target) over the targets that count, and their number; runs the module's hook.
  LossSum loss(const Tensor& ids_BT, const Tensor& targets_BT, const ForwardOptions& options = {},
               const LinearCrossEntropyOptions& loss_options = {});
  /// Shapes   ids [B, T] -> [B, T, V] (or [B, 1, V], see last_only); runs the module's hook.
  Tensor logits(const Tensor& ids_BT, const ForwardOptions& options = {});

  /// An empty cache for `num_rows` sequences of up to `capacity` positions (0: context_length).
  KvCache make_cache(int64_t num_rows, int64_t capacity = 0);

  /// Floating-point operations of one training step per token, for model FLOPs utilization:
  ///   6 * (elements of the matrices that multiply: projections and head, no embeddings)
  ///   + 6 * layers * heads * head_width * T
  /// A multiply-add counts 2, backward twice the forward. The second term is the two products of
  /// causal attention, of whose square only the half below the diagonal is counted, and of a layer
  /// with a window of W < T what is inside of it: 2 W - W^2 / T in place of T. Recomputed work does
  /// not count.
  double flops_per_token(int64_t T);

 protected:
  virtual const Child<LmHead>& head() const = 0;
  /// Checks ids and options against the shape; Error that names what does not fit.
  void check_forward(const Tensor& ids_BT, const ForwardOptions& options) const;
  /// Positions first .. first + T - 1 as i32 [T] on the device (the last answer is kept).
  Tensor position_range(int64_t first, int64_t T);
  /// What layer `layer` gets.
  static AttentionInput attention_input(const ForwardOptions& options, const Tensor& positions,
                                        int64_t layer);

 private:
  Tensor positions_;
  int64_t positions_first_ = 0;
};

/// Checks of a shape that all models share; ConfigError that names `model` and the field.
void check_shape(const char* model, const ModelShape& shape);

}  // namespace tessera::nn
