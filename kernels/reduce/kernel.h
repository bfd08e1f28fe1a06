#pragma once

#include <algorithm>

#include "core/dtype.h"
#include "core/runtime/dispatch.h"
#include "kernels/rows.h"

namespace tessera::kernels {

/// Terms that are added in f32 before the sum goes on in f64.
inline constexpr int64_t kSumBlock = 256;
inline constexpr int64_t kMaxSumChunks = 64;

/// Pieces of a long sum that are added up on their own; a function of the length only.
inline int64_t num_sum_chunks(int64_t length) {
  return std::clamp<int64_t>((length + kSumBlock - 1) / kSumBlock, 1, kMaxSumChunks);
}

/// The same for a device. CUDA cuts further, until there is work for all multiprocessors, by a rule
/// that knows the shape only.
inline int64_t num_sum_chunks(int64_t outer, int64_t length, int64_t inner, DeviceType device) {
  if (device != DeviceType::kCuda) return num_sum_chunks(length);
  constexpr int64_t kTasks = 1024, kTaskCols = 256;
  const int64_t tasks = std::max<int64_t>(1, outer * ((inner + kTaskCols - 1) / kTaskCols));
  const int64_t blocks = std::max<int64_t>(1, length / kSumBlock);
  return std::clamp<int64_t>((kTasks + tasks - 1) / tasks, 1, blocks);
}

/// dst[o, i] = factor * sum_n x[o, n, i], or += with `accumulate`. All contiguous.
/// `partials`: outer * chunks() * inner f64, null if there is one chunk.
struct Sum {
  void* dst;
  double* partials;
  const void* x;
  DType dst_dtype, dtype;
  int64_t outer, length, inner;
  double factor = 1;
  bool accumulate = false;
  int64_t num_chunks = 0;  ///< of a device's own; 0: num_sum_chunks(length)

  int64_t chunks() const { return num_chunks > 0 ? num_chunks : num_sum_chunks(length); }
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(sum, Sum);

/// y[o, n, i] = sum of x[o, m, i] over m <= n, with `reverse` over m >= n; or += with `accumulate`.
/// All contiguous.
struct Cumsum {
  void* y;
  const void* x;
  DType y_dtype, dtype;
  int64_t outer, length, inner;
  bool reverse = false, accumulate = false;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(cumsum, Cumsum);

/// Chunks of a norm at most; the CPU uses kMaxSumChunks of them.
inline constexpr int64_t kMaxNormChunks = 1024;

/// *partial = sum |x|^p over segments [begin, end) (max |x| for p = inf); see `partial_norm` in
/// reduce.h. `chunks`: kMaxNormChunks pairs of f64, scratch. `has_nonfinite` may be null.
struct PartialNorm {
  double* partial;
  uint8_t* has_nonfinite;
  double* chunks;
  const void* x;
  const int64_t* segments;
  DType dtype;
  int64_t numel, num_segments;
  double p;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(partial_norm, PartialNorm);

/// *norm = (partials[0] + partials[1] + ...)^(1/p), their maximum for p = inf.
struct CombineNorms {
  float* norm;
  const double* partials;
  int64_t num_partials;
  double p;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(combine_norms, CombineNorms);

/// *factor = min(1, max_norm / (*norm + 1e-6)), 0 if *norm is not finite; *found_inf = not finite.
struct ClipFactor {
  float* factor;
  uint8_t* found_inf;
  const float* norm;
  float max_norm;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(clip_factor, ClipFactor);

/// *mark = max(*mark, value) if an element of `x` is inf or NaN; see `mark_nonfinite` in reduce.h.
struct MarkNonfinite {
  int32_t* mark;
  const void* x;
  DType dtype;
  int64_t rows, cols;
  RowLayout layout;
  int32_t value;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(mark_nonfinite, MarkNonfinite);

/// Checksums of the bits of segments [begin, end) of a flat buffer, whose first element is element
/// `offset` of something larger; see `add_checksums` in reduce.h. `segments`: (begin, end, offset).
struct Checksum {
  uint64_t* sums;  ///< num_segments, added to
  const void* x;
  const int64_t* segments;
  int64_t item_nbytes;  ///< of an element: 1, 2, 4 or 8
  int64_t numel, num_segments;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(checksum, Checksum);

#if defined(__CUDACC__)
#define TESSERA_CHECKSUM_FUNCTION __host__ __device__ inline
#else
#define TESSERA_CHECKSUM_FUNCTION inline
#endif

/// What element `index` counts: odd, so that no flipped bit is multiplied away.
TESSERA_CHECKSUM_FUNCTION uint32_t checksum_weight(int64_t index) {
  return (static_cast<uint32_t>(index) + 1) * 0x9e3779b1u | 1u;
}

/// Calls f(T()) with the unsigned integer of `item_nbytes` bytes.
template <class F>
void visit_checksum_item(int64_t item_nbytes, const F& f) {
  switch (item_nbytes) {
    case 1:
      return f(uint8_t());
    case 2:
      return f(uint16_t());
    case 4:
      return f(uint32_t());
    default:
      return f(uint64_t());
  }
}

}  // namespace tessera::kernels
