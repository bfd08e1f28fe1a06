#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "core/dtype.h"
#include "core/shape.h"

// Rows of the last dimension: what row-wise kernels (norm, softmax, loss) share.

namespace tessera::kernels {

/// Where rows lie: row r starts at element (r / inner) * outer_stride + (r % inner) * inner_stride.
/// Covers contiguous tensors, column slices, and the heads of a packed qkv buffer ([B, T, H, D]
/// with H of more heads: `inner` = H).
struct RowLayout {
  int64_t inner = 1, inner_stride = 0, outer_stride = 0;

  int64_t offset(int64_t row) const {
    return row / inner * outer_stride + row % inner * inner_stride;
  }
  /// Bytes from the first to the last element.
  int64_t span_nbytes(int64_t rows, int64_t cols, DType dtype) const {
    if (rows == 0 || cols == 0) return 0;
    return (offset(rows - 1) + cols) * static_cast<int64_t>(size_of(dtype));
  }
};

inline RowLayout contiguous_rows(int64_t cols) {
  return {1, 0, cols};
}

/// The layout of a strided view, if two levels describe it and its last dimension is contiguous.
inline std::optional<RowLayout> row_layout(const Shape& shape, const Strides& strides) {
  const int last = shape.num_dims() - 1;
  if (last < 0 || (shape[last] > 1 && strides[last] != 1)) return std::nullopt;
  // Innermost first: dimensions that continue the one inside of them merge with it.
  struct Level {
    int64_t count = 1, stride = 0;
  } levels[2];
  int num_levels = 0;
  for (int i = last - 1; i >= 0; --i) {
    if (shape[i] == 1) continue;
    if (shape[i] == 0) return contiguous_rows(shape[last]);
    if (num_levels > 0) {
      Level& inside = levels[num_levels - 1];
      if (strides[i] == inside.count * inside.stride) {
        inside.count *= shape[i];
        continue;
      }
    }
    if (num_levels == 2) return std::nullopt;
    levels[num_levels++] = {shape[i], strides[i]};
  }
  if (num_levels == 2) return RowLayout{levels[0].count, levels[0].stride, levels[1].stride};
  return RowLayout{1, 0, levels[0].stride};
}

/// dst = value, rounded once. GCC vectorizes the assignment of bits, but not that of a class.
template <class T>
inline void assign(T& dst, ComputeType<T> value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    dst.bits = BFloat16(value).bits;
  } else {
    dst = T(value);
  }
}

/// Rows a thread should take at least: about 20 us of work.
inline int64_t row_grain(int64_t cols) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, cols));
}

}  // namespace tessera::kernels
