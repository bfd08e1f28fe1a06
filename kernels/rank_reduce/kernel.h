#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/runtime/dispatch.h"

namespace tessera::kernels {

enum class Reduction : unsigned char { kSum, kMax };

/// [Note: Tree over ranks]
/// Sums over ranks add in f32 (f64 for f64) in a fixed tree: the sum over ranks [0, n) is the sum
/// over the first ceil(n / 2) plus that over the rest, each formed the same way; one rounding at
/// the end. So the bits do not depend on the transport, and a sum inside groups of g ranks followed
/// by one over a power of two of groups gives the bits of a flat one.

/// dst = reduction over `num_sources` arrays of `numel` elements, in the tree of
/// [Note: Tree over ranks] where the order matters; one rounding at the end. With `accumulate`,
/// dst += it. `dst` may be one of the sources unless it accumulates.
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

/// The same over the arrays of all ranks as one of them sees them after an exchange: its own, and
/// those of the others in rank order, `others_stride` bytes apart, without a place for its own.
/// On CUDA f64 goes into f64 only.
struct RankReduce {
  void* dst;
  const void *own, *others;
  int64_t others_stride;
  int rank, num_ranks;
  int64_t numel;
  DType src_dtype, dst_dtype;
  bool accumulate = false;
  Reduction reduction = Reduction::kSum;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(rank_reduce, RankReduce);

/// DtypeError unless the dtypes are those of the reduction.
void check_reduce_dtypes(Reduction reduction, DType src, DType dst, bool accumulate);

}  // namespace tessera::kernels
