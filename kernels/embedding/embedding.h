#pragma once

#include "core/tensor.h"

namespace tessera {

/// Rows of a table: y[...] = weight[ids[...]].
/// Shapes   ids [...], weight [V, C] -> y [..., C]
/// Dtypes   ids i32 | i64; weight, y f32 | bf16 | f16 | f64
/// Saves    ids
/// Grads    dweight, in its destination's dtype: each row is the sum over the positions that name
///          it, in order, in f32 (f64 for f64): bitwise repeatable; the other rows become zero, or
///          are not touched when accumulating
/// Streams  current stream; never synchronizes
/// Errors   DtypeError if ids are not integers or weight is not floating; ShapeError if weight is
///          not [V, C] or there are 2^31 ids or more; on the CPU an id outside [0, V) is an Error
///          of the kernel's task that names the id and its position; on CUDA its row of y is NaN
Tensor embedding(const Tensor& ids, const Tensor& weight);

}  // namespace tessera
