#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/dtype.h"
#include "core/enum_names.h"
#include "dist/fsdp/groups.h"
#include "dist/fsdp/wrap.h"

namespace tessera::dist {

using tessera::name_of;  // of the enums below, beside those of this namespace

/// What is sharded over which ranks. P parameters, W ranks, S ranks in a shard group.
enum class Strategy : unsigned char {
  kFullShard,         ///< ZeRO-3: parameters, gradients, optimizer states / W
  kShardGradOp,       ///< ZeRO-2: gradients and states / W; parameters stay gathered in a step
  kShardOptim,        ///< ZeRO-1: states / W; full parameters and gradients are kept
  kNoShard,           ///< DDP: everything on every rank
  kHybridShard,       ///< full_shard inside groups of S ranks, replicated over the groups
  kHybridShardZero2,  ///< shard_grad_op inside groups of S ranks, replicated over the groups
};
constexpr auto enum_names(Strategy) {
  return std::to_array<EnumName<Strategy>>({{Strategy::kFullShard, "full_shard"},
                                            {Strategy::kShardGradOp, "shard_grad_op"},
                                            {Strategy::kShardOptim, "shard_optim"},
                                            {Strategy::kNoShard, "no_shard"},
                                            {Strategy::kHybridShard, "hybrid_shard"},
                                            {Strategy::kHybridShardZero2, "hybrid_shard_zero2"}});
}
/// Whether the states are sharded inside groups of ranks and replicated over the groups.
constexpr bool is_hybrid(Strategy strategy) {
  return strategy == Strategy::kHybridShard || strategy == Strategy::kHybridShardZero2;
}

/// When the gradients of a step with several micro-batches travel.
enum class GradSync : unsigned char {
  kEveryMicroBatch,  ///< `true`: reduced over all ranks after each, added into the f32 shard
  kShard,            ///< `shard`: inside the shard group after each, across groups after the last
  kLast,             ///< `false`: kept whole in f32, 4 bytes x P; reduced after the last
};
constexpr auto enum_names(GradSync) {
  return std::to_array<EnumName<GradSync>>({{GradSync::kEveryMicroBatch, "true"},
                                            {GradSync::kShard, "shard"},
                                            {GradSync::kLast, "false"}});
}

/// What lives in host memory between uses; [Note: Offload] in offload.h counts the bytes.
enum class Offload : unsigned char {
  kNone,
  kOptimizer,           ///< optimizer states, and masters where parameters are not f32
  kParamsAndOptimizer,  ///< parameter and gradient shards too
};
constexpr auto enum_names(Offload) {
  return std::to_array<EnumName<Offload>>({{Offload::kNone, "none"},
                                           {Offload::kOptimizer, "optimizer"},
                                           {Offload::kParamsAndOptimizer, "params_and_optimizer"}});
}

/// dtypes of a step. Masters, gradient shards and optimizer states are f32 always.
struct PrecisionOptions {
  DType param_dtype = kF32;  ///< of gathered parameters and activations
  /// Of gradients before the reduce; default param_dtype. Gradients of f32 parameters are collected
  /// in f32 whatever it is, and rounded to it once, as they travel.
  std::optional<DType> reduce_dtype;
  /// In which chunks travel to the rank that adds them, in f32; default reduce_dtype. With f32
  /// parameters another one than a low reduce_dtype is a ConfigError.
  std::optional<DType> wire_dtype;
  std::optional<DType> buffer_dtype;  ///< of floating module buffers; default: as they are
  std::optional<DType> output_dtype;  ///< of the root's floating results but scalars (losses)
  bool cast_forward_inputs = true;    ///< floating inputs of a unit become param_dtype
  /// Norm parameters stay f32, a group of their own, whose gradients travel in f32.
  bool norm_fp32 = false;
  /// A power of two that gradients are divided by before they travel, so that no sum of f16 values
  /// overflows on the way; the clip factor multiplies by it. Default: f16 on the wire, the number
  /// of ranks rounded up; else 1.
  std::optional<double> pre_divide;
};

/// How a model is sharded, see `fully_shard`. The defaults are full_shard in f32, a unit a block.
struct FsdpOptions {
  Strategy strategy = Strategy::kFullShard;
  /// Ranks in a shard group of a hybrid strategy; 0: the ranks of this node.
  int shard_size = 0;
  WrapPolicy wrap;  ///< default: wrap::transformer_block()
  /// Set by the strategy; a value that contradicts it is a ConfigError. A number g that divides the
  /// shard group: after its first use in a step a unit keeps 1/g of its parameters in memory of
  /// their own, and is gathered from g neighbouring ranks until the next step.
  std::optional<std::variant<bool, int>> reshard_after_forward;
  int prefetch_forward = 1;   ///< units gathered ahead of the one that computes, >= 0
  int prefetch_backward = 1;  ///< the same in backward
  /// Default: kShard for hybrid strategies, kLast for shard_optim, else kEveryMicroBatch.
  std::optional<GradSync> sync_every_micro_batch;
  /// 2: gathers and reduces on their own communicators and streams; 1: both on one.
  int communicators = 2;
  /// false: gradients are the sum over ranks. true: the mean, as in PyTorch; the norm and the
  /// factor of `clip_grad_norm`, which the optimizer then must be given, divide by the number of
  /// ranks (one rounding each, none for a power of two).
  bool average_gradients = false;
  /// The gradient of a table (an embedding, a head) that is larger than the largest block's is
  /// computed, reduced and dropped in pieces of at most that size ([Note: Pieces of a gradient] in
  /// plan.h), in slots that blocks have anyway: the same bits, but for an f32 head whose GEMMs round
  /// otherwise for fewer rows. A head's logits are computed again, in blocks of 512 rows: once more,
  /// or several times where a rank's part of a piece is less than a few blocks. Of no effect where
  /// whole gradients are kept (sync_every_micro_batch = kLast) or gradient shards live in host memory.
  bool gradient_pieces = false;
  PrecisionOptions precision;
  Offload offload = Offload::kNone;
  /// Elements of a shard that the device holds at once of what is in host memory, three times; a
  /// multiple of 256.
  int64_t offload_window = int64_t{1} << 20;
  /// The same bits at any power of two of ranks up to 64, as long as micro-batches are dealt in the
  /// order of [Note: One tree over a step]; needs sync_every_micro_batch true (then the default).
  bool reproducible = false;
  /// Full names of parameters that are left alone: not sharded, not reduced, not clipped, not
  /// optimized. A deferred one gets its bytes, and its values by `initialize`, on every rank.
  std::vector<std::string> ignored;
  /// Groups of parameters by name, and who updates which: shards hold parameters of one optimizer.
  ParameterRules parameters;
  /// What the advice of an out-of-memory error calls an option, where the application has a name of
  /// its own for it: given "FsdpOptions::offload" (also fields of PrecisionOptions and
  /// "RecomputePolicy::kind"; "batch" and "sequence" for the samples of a forward and their length),
  /// "fsdp.offload". Default: what it is given. Called on the thread that ran out, which may be any.
  std::function<std::string(std::string_view option)> name_option;
};

}  // namespace tessera::dist
