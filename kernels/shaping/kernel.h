#pragma once

#include "core/dtype.h"
#include "core/runtime/dispatch.h"

namespace tessera::kernels {

/// y[o, m, i] = x[o, index[o, m, i], i]; x [outer, length, inner], index and y [outer, count,
/// inner], contiguous. An index outside of [0, length) is an error of the task on the CPU; on CUDA
/// its element has all bits set (NaN), and its gradient goes nowhere.
struct Gather {
  void* y;
  const void* x;
  const void* index;
  DType dtype, index_dtype;  ///< any; i32 or i64
  int64_t outer, length, count, inner;
  Cost cost() const;  // the range of `x` is all of it, though `count` elements a line are read
};
TESSERA_DECLARE_KERNEL(gather, Gather);

/// sums[o, index[o, m, i], i] += dy[o, m, i], in order of m (on CUDA, where inner is 1, of groups
/// of 32). Layouts as above.
struct ScatterAdd {
  void* sums;  ///< f32; f64 for f64
  const void* dy;
  const void* index;
  DType dtype, index_dtype;
  int64_t outer, length, count, inner;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(scatter_add, ScatterAdd);

}  // namespace tessera::kernels
