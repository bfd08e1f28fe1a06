#pragma once

#include "core/enum_names.h"
#include "kernels/loss/loss.h"
#include "nn/block.h"
#include "nn/classifier.h"
#include "nn/embedding.h"
#include "nn/linear.h"

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

struct Family;
class FamilyConfig;

/// Keys and values of all layers; made by LanguageModel::make_cache. A forward with it appends.
struct KvCache {
  std::vector<LayerCache> layers;
  int64_t length = 0;    ///< positions it holds
  int64_t capacity = 0;  ///< positions it has room for
  /// Positions that each row holds, where they differ; empty: `length`. A forward with them is a
  /// step of decoding, one position a row; a negative length is a row without one.
  std::vector<int32_t> row_lengths = {};

  /// Row `row` alone, which shares the memory. Its length is 0.
  KvCache row(int64_t row) const;
  /// Counts `num_positions` more, of every row that has a query.
  void append(int64_t num_positions);
};

/// What a forward is given beside tokens.
struct ForwardOptions {
  /// i32 [T] or [B, T]; undefined: 0 .. T-1, after the cache's positions if there is one.
  Tensor positions;
  /// i32 [B, T]: index in the row of the first token of each token's document; undefined: one
  /// document a row. Not together with a cache.
  Tensor document_starts;
  KvCache* cache = nullptr;
  /// i32 [T] or [B, T], for models with types of tokens (segments); undefined: all of type 0.
  Tensor token_types;
  /// `logits` only: of the last position alone, [B, 1, V].
  bool last_only = false;
  /// Losses only: i32 [R], the positions in 0 .. B * T - 1 that have targets, which are [R] then; head
  /// and loss do not see the others. Undefined: all, of targets [B, T].
  Tensor loss_rows;
};

/// Which blocks run again in backward instead of keeping their activations. A region is the inside
/// of one block, so a unit that holds the block is gathered for it exactly once more.
struct RecomputePolicy {
  /// None, all of each block, of every n-th block, or of each block what is cheap to have again.
  enum class Kind { kNone, kFull, kEveryN, kSelective };
  friend constexpr auto enum_names(Kind) {
    return std::to_array<EnumName<Kind>>({{Kind::kNone, "none"},
                                          {Kind::kFull, "full"},
                                          {Kind::kEveryN, "every_n"},
                                          {Kind::kSelective, "selective"}});
  }
  Kind kind = Kind::kNone;
  int64_t every = 1;  ///< kEveryN: blocks 0, every, 2 * every, ...
  /// Inputs of blocks that run again are in host memory until then (core/host_checkpoints.h).
  bool offload = false;
  /// Tokens for which an MLP computes at a time, whatever the policy; 0: all. See `MlpBase::set_tile`.
  int64_t mlp_tile = 0;

  /// The whole of the block runs again.
  bool applies_to(int64_t layer) const {
    return kind == Kind::kFull || (kind == Kind::kEveryN && layer % every == 0);
  }
  /// What of block `layer` runs again.
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
  bool is_causal = true;              ///< false: each position sees all, the model cannot generate
};

/// x + bias over the last dimension, for a bias that is sharded with other modules than the one
/// that it follows: a module's parameters are of one unit, but for a tied one.
/// Shapes   x [..., C], value [C] -> [..., C]
class Bias : public Module {
 public:
  explicit Bias(int64_t width);
  Tensor forward(const Tensor& x);

 private:
  Tensor& value_;
};

/// Hidden states to logits, or straight to the loss without ever holding all logits. Its weight is
/// its own, or (tied) that of the token embedding: then this is the parameter's second use. With a
/// soft-cap logits are softcap tanh(x / softcap). With a bias [V] the loss holds all logits.
class LmHead : public Module {
 public:
  /// Error for a bias beside a soft-cap.
  LmHead(int64_t width, int64_t vocab_size, const Init& init, float softcap = 0, bool bias = false);
  /// Tied: the weight of `embedding`, [V, C].
  explicit LmHead(Embedding& embedding, float softcap = 0, bool bias = false);

  /// [B, T, C] -> [B, T, V].
  Tensor forward(const Tensor& hidden_BTC);
  LossSum forward(const Tensor& hidden_BTC, const Tensor& targets_BT,
                  const LinearCrossEntropyOptions& options);
  /// The loss of each position, as linear_cross_entropy_rows.
  struct OfEach {
    LinearCrossEntropyOptions options;
  };
  Tensor forward(const Tensor& hidden_BTC, const Tensor& targets_BT, const OfEach& of_each);

  std::string kind() const override;
  const Tensor& weight() const { return weight_; }

 private:
  void add_bias();
  LinearCrossEntropyOptions capped(LinearCrossEntropyOptions options) const;

  Tensor& weight_;
  Child<Bias> bias_;
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
  /// Of all blocks (Block), in their order; a model need not know of it.
  void set_recompute(const RecomputePolicy& policy);
  /// The blocks' inputs in host memory; null without `RecomputePolicy::offload`.
  const HostCheckpoints* host_checkpoints() const { return host_checkpoints_.get(); }
  /// What it was made of, if it is of a family (family.h), which transformers knows too; else null.
  virtual std::unique_ptr<FamilyConfig> family_config() const;

  /// Sum of -log p(target) over the targets that count, and their number; runs the module's hook.
  LossSum loss(const Tensor& ids_BT, const Tensor& targets_BT, const ForwardOptions& options = {},
               const LinearCrossEntropyOptions& loss_options = {});
  /// -log p(target) of each target, 0 of one that does not count, as `loss` adds them up: as targets,
  /// f32 (f64). Runs the module's hook. Error for a head with a bias.
  Tensor token_losses(const Tensor& ids_BT, const Tensor& targets_BT,
                      const ForwardOptions& options = {});
  /// The model classifies sequences from now on: a layer `score` makes the classes' logits, and what
  /// predicts tokens is a ConfigError. Called once, before `fully_shard`.
  void add_classifier(const ClassifierConfig& config);
  /// Null for a model that predicts tokens.
  const ClassifierConfig* classifier() const { return classifier_ ? &*classifier_ : nullptr; }
  /// Logits of the classes of rows of which the first `lengths` tokens count; runs the module's hook. What
  /// lies behind them must be out of sight: of a causal model it is, else by `document_starts`.
  /// Shapes   ids [B, T], lengths of B numbers in [1, T] -> [B, classes]
  Tensor class_logits(const Tensor& ids_BT, std::span<const int32_t> lengths,
                      const ForwardOptions& options = {});
  /// Shapes   ids [B, T] -> [B, T, V] (or [B, 1, V], see last_only); runs the module's hook.
  Tensor logits(const Tensor& ids_BT, const ForwardOptions& options = {});

  /// An empty cache for `num_rows` sequences of up to `capacity` positions (0: context_length).
  KvCache make_cache(int64_t num_rows, int64_t capacity = 0);

  /// Floating-point operations of one training step per token, for model FLOPs utilization:
  ///   6 * (elements of the matrices that multiply: projections and head, no embeddings; of frozen
  ///        ones 4, as their gradient is left out)
  ///   + 6 * layers * heads * head_width * T
  /// A multiply-add counts 2, backward twice the forward. The second term is the two products of
  /// causal attention, of whose square only the half below the diagonal is counted, and of a layer
  /// with a window of W < T what is inside of it: 2 W - W^2 / T in place of T; of a model that is
  /// not causal, 2 T. Recomputed work does not count; of a classifier no head does, nor the layer of
  /// its classes, which sees one state a sequence.
  double flops_per_token(int64_t T);

 protected:
  virtual const Child<LmHead>& head() const = 0;
  /// What the head gets of the hidden states: as they are, or transformed.
  virtual Tensor head_input(const Tensor& hidden_BTC) { return hidden_BTC; }
  /// What the classes are told by, of the pooled states [B, C].
  virtual Tensor classifier_input(const Tensor& pooled_BC) { return pooled_BC; }
  /// Checks ids and options against the shape; Error that names what does not fit.
  void check_forward(const Tensor& ids_BT, const ForwardOptions& options) const;
  /// Positions first .. first + T - 1 as i32 [T] on the device (the last answer is kept).
  Tensor position_range(int64_t first, int64_t T);
  /// The positions of `options`, else those of ids after what the cache holds.
  Tensor positions_of(const Tensor& ids_BT, const ForwardOptions& options);
  /// x through all blocks, each with its part of the cache, which then holds the positions of x.
  template <class BlockType>
  static Tensor run_blocks(const ChildList<BlockType>& blocks, Tensor x_BTC,
                           const ForwardOptions& options, const Tensor& positions,
                           const Tensor& rope_table = {}) {
    for (int64_t i = 0; i < blocks.num_children(); ++i) {
      AttentionInput input = attention_input(options, positions, i);
      input.rope_table = rope_table;
      x_BTC = blocks[i](x_BTC, input);
    }
    if (options.cache != nullptr) options.cache->append(x_BTC.dim(1));
    return x_BTC;
  }
  /// The hidden states that head and loss see, [B, T, C], or [R, C] with `loss_rows`.
  Tensor hidden_of_targets(const Tensor& ids_BT, const ForwardOptions& options);
  /// The head, tied to `embedding` or with a weight of its own that starts as `init`.
  void emplace_head(Child<LmHead>& head, bool tied, Embedding& embedding, const Init& init,
                    float softcap = 0, bool bias = false);

 private:
  /// What layer `layer` gets.
  static AttentionInput attention_input(const ForwardOptions& options, const Tensor& positions,
                                        int64_t layer);

  Tensor pooled(const Tensor& hidden_BTC, std::span<const int32_t> lengths) const;
  void check_predicts_tokens() const;

  std::optional<ClassifierConfig> classifier_;
  Child<Linear> score_;
  Tensor positions_;
  int64_t positions_first_ = 0;
  std::shared_ptr<HostCheckpoints> host_checkpoints_;
};

/// Checks of a shape that all models share; ConfigError that names `model` and the field.
void check_shape(const char* model, const ModelShape& shape);

/// The shape of a model whose heads share its width. ConfigError that names `model` and the field.
template <class Config>
ModelShape shape_of(const char* model, const Config& c) {
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

/// How the matrices of a model start: normal with `stddev`, the projections that end a sublayer
/// with stddev / sqrt(2 * num_layers) (Radford et al. 2019).
struct MatrixInit {
  MatrixInit(double stddev, int64_t num_layers);
  Init inside, out;
};

}  // namespace tessera::nn
