#pragma once

#include <functional>
#include <optional>

#include "apps/config.h"
#include "apps/data.h"
#include "dist/comm/world.h"
#include "dist/fsdp/fully_shard.h"
#include "nn/transformer.h"

namespace tessera::apps {

/// Positions that head and loss run on, of the `num_positions` of a micro-batch with `num_targets`: as
/// many, but for up to a 16th of all (64 at least) that make it one of few numbers, so that a GEMM has
/// no shape of its own a step.
int64_t num_loss_rows(int64_t num_positions, int64_t num_targets);

/// What is added to the cross entropy of training: `train.z_loss`, `train.label_smoothing`.
struct LossTerms {
  float z_loss = 0, label_smoothing = 0;
};

/// What a model's losses get of a batch.
struct LossInput {
  Tensor ids, targets;
  nn::ForwardOptions options;
};
LossInput loss_input(const Batch& batch);
/// Documents and positions of a batch.
nn::ForwardOptions forward_options(const Batch& batch);

/// The model's loss on a batch; `grad_scale` is where backward will start. The head sees the positions
/// with a target alone (`num_loss_rows`): their losses have the bits that all positions together would
/// give them where a row of a GEMM does not depend on the number of rows, and so has their sum, which
/// is in f64 in the order of positions (CUDA: of 1024 strided parts, which differ).
LossSum batch_loss(nn::LanguageModel& model, const Batch& batch, const Tensor& grad_scale = {},
                   const LossTerms& terms = {});

/// A loss that is not finite counts like a gradient norm that is not: `clip.norm` becomes NaN and
/// `clip.found_inf` 1. Else no bit changes. On the current stream.
void include_loss(const dist::ClippedNorm& clip, const Tensor& loss);

/// The loss of a batch as `batch_loss` or, of pairs, as `preference_loss` makes it.
using LossOfBatch = std::function<LossSum(const Batch&)>;

/// The mean loss over the validation split, or its first `train.eval_batches` micro-batches; the
/// same on all ranks, and the same bits of one model on any number of them. Nothing without
/// samples, nor if `is_to_end` says so on any rank before a micro-batch: who ends a run waits for no
/// evaluation. All ranks call it; the host is at most two micro-batches ahead of the device.
std::optional<double> evaluate(nn::Module& model, dist::Fsdp& fsdp, dist::World& world,
                               const Samples& samples, const TrainConfig& config,
                               const LossOfBatch& loss_of, const std::function<bool()>& is_to_end);

}  // namespace tessera::apps
