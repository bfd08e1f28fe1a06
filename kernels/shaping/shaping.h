#pragma once

#include <vector>

#include "core/tensor.h"

// Ops that arrange elements. Their inverses, `split` and the views, are in elementwise.h and
// tensor.h.

namespace tessera {

/// The tensors one behind the other along `dim`.
/// Shapes   each [..., n_k, ...], alike but for n_k -> [..., sum of n_k, ...]
/// Dtypes   any, the same for all
/// Saves    nothing
/// Grads    of each its part of dy
/// Streams  current stream; never synchronizes
/// Errors   ShapeError if there is no tensor, if one is [] or if they differ in another dimension;
///          DtypeError if the dtypes differ
Tensor cat(const std::vector<Tensor>& tensors, int dim = 0);

/// The tensors as slices of a new dimension `dim` of the result.
/// Shapes   each [...], alike -> [..., number of tensors, ...]
/// The rest as `cat`.
Tensor stack(const std::vector<Tensor>& tensors, int dim = 0);

/// Elements picked along `dim`: y[..., m, ...] = x[..., index[..., m, ...], ...].
/// Shapes   x [..., n, ...], index [..., m, ...], alike but for that dimension -> y as index
/// Dtypes   x any; index i32 | i64
/// Saves    index
/// Grads    dx: sums over the elements that name it, f32 (f64 for f64) in fixed order: bitwise
///          repeatable
/// Streams  current stream; never synchronizes
/// Errors   ShapeError if index is not as above; DtypeError if it is not integer; on the CPU an
///          index outside [0, n) is an Error of the kernel's task that names it and its position;
///          on CUDA its element is NaN (all bits set)
Tensor gather(const Tensor& x, int dim, const Tensor& index);

}  // namespace tessera
