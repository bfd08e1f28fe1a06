#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace tessera::dist {

enum class Reduction : unsigned char { kSum, kMax };

/// dst = reduction over `num_sources` arrays of `numel` elements, in the tree of
/// [Note: Tree over ranks] (comm.h) where the order matters; one rounding at the end. With
/// `accumulate`, dst += it. `dst` may be one of the sources unless it accumulates.
/// Dtypes   kSum: src and dst floating, f32 sums (f64 for f64 sources). kMax: f32, i32 or u8,
///          dst the same, no accumulate; NaN wins
struct TreeReduce {
  void* dst;
  const void* const* sources;
  int num_sources;
  int64_t numel;
  DType src_dtype, dst_dtype;
  bool accumulate = false;
  Reduction reduction = Reduction::kSum;
};
/// Runs on the calling thread; single-threaded (workers of communication streams are).
void tree_reduce(const TreeReduce& a);

}  // namespace tessera::dist
