#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.h"

// Updates of flat f32 shards in one pass over memory. Not differentiable. All scalars that depend
// on the step's numbers (step count, scale of the gradient, whether to skip) are on the device, so
// the host never waits. The bits do not depend on the number of threads.

namespace tessera {

/// Elements [begin, end) of a shard, and what multiplies the learning rate and weight decay there.
struct FlatSegment {
  int64_t begin = 0, end = 0;
  float lr_scale = 1;
  float decay_scale = 1;
};

/// The segments of a shard on the device.
struct FlatSegments {
  Tensor bounds;   ///< i64 [S, 2]
  Tensor factors;  ///< f32 [S, 2]
};

/// Copies the segments of a shard of `numel` elements to the device. Error unless they are in
/// ascending order, do not overlap and lie within the shard.
FlatSegments flat_segments(std::span<const FlatSegment> segments, int64_t numel);

/// What every update reads and writes; kernel.h of this family has the formulas. Elements outside
/// the segments are neither read nor written.
struct FlatUpdate {
  Tensor master;          ///< f32 [numel]
  Tensor grad;            ///< f32 | bf16 | f16 [numel]
  Tensor low;             ///< undefined, or any floating dtype [numel]: the new master, rounded
  FlatSegments segments;  ///< of the whole shard
  Tensor grad_scale;      ///< undefined, or f32 []: multiplies the gradient
  Tensor skip;            ///< undefined, or u8 []: not 0 leaves everything as it is
  float lr = 0;
  float weight_decay = 0;
  int64_t first = 0;  ///< the tensors begin at this element of the shard
};

struct AdamWUpdate {
  Tensor exp_avg, exp_avg_sq;  ///< f32 [numel]
  Tensor step;                 ///< i64 []: this step, counted from 1 (see `advance_step`)
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
};
/// AdamW with decoupled weight decay. ShapeError or DtypeError if a tensor does not fit.
void adamw_step(const FlatUpdate& update, const AdamWUpdate& adamw);

struct SgdUpdate {
  Tensor momentum_buffer;  ///< f32 [numel]; undefined without momentum
  float momentum = 0;
  bool nesterov = false;
};
/// Gradient descent with momentum; weight decay is added to the gradient. ShapeError or DtypeError
/// if a tensor does not fit.
void sgd_step(const FlatUpdate& update, const SgdUpdate& sgd);

/// step (i64 []) += 1, unless skip (undefined, or u8 []) is not 0.
void advance_step(const Tensor& step, const Tensor& skip = {});

}  // namespace tessera
