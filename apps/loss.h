#pragma once

#include <functional>
#include <optional>

#include "apps/config.h"
#include "apps/data.h"
#include "dist/comm/world.h"
#include "dist/fsdp/fully_shard.h"
#include "nn/transformer.h"

namespace tessera::apps {

/// The model's loss on a batch; `grad_scale` is where backward will start.
LossSum batch_loss(nn::LanguageModel& model, const Batch& batch, const Tensor& grad_scale = {});

/// A loss that is not finite counts like a gradient norm that is not: `clip.norm` becomes NaN and
/// `clip.found_inf` 1. Else no bit changes. On the current stream.
void include_loss(const dist::ClippedNorm& clip, const Tensor& loss);

/// The mean loss over the validation split, or its first `train.eval_batches` micro-batches; the
/// same on all ranks, and the same bits of one model on any number of them. Nothing without
/// samples, nor if `is_to_end` says so on any rank before a micro-batch: who ends a run waits for no
/// evaluation. All ranks call it; the host is at most two micro-batches ahead of the device.
std::optional<double> evaluate(nn::LanguageModel& model, dist::Fsdp& fsdp, dist::World& world,
                               const Samples& samples, const TrainConfig& config,
                               const std::function<bool()>& is_to_end);

}  // namespace tessera::apps
