#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/elementary/kernel.h"
#include "core/runtime/stream.h"
#include "core/storage.h"

// Ranges of a unit's buffers, by address.

namespace tessera::dist {

inline int64_t nbytes_of(int64_t numel, DType dtype) {
  return numel * static_cast<int64_t>(size_of(dtype));
}

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

inline char* bytes(const std::shared_ptr<Storage>& storage, int64_t offset = 0) {
  return static_cast<char*>(storage->data()) + offset;
}

/// `numel` elements become `value`, in the order of `stream`.
inline void fill_flat(const Stream& stream, void* data, int64_t numel, DType dtype, double value) {
  if (numel > 0) kernels::fill(stream, {data, dtype, {numel}, {1}, value});
}

/// `numel` elements of `src` become those of `dst`, or are added to them, in the order of `stream`.
inline void cast_flat(const Stream& stream, void* dst, DType dst_dtype, const void* src,
                      DType src_dtype, int64_t numel, bool accumulate = false) {
  kernels::copy(stream, {dst, src, dst_dtype, src_dtype, {numel}, {1}, {1}, accumulate});
}
inline void copy_flat(const Stream& stream, void* dst, const void* src, int64_t numel,
                      DType dtype) {
  cast_flat(stream, dst, dtype, src, dtype, numel);
}

/// Elements that [begin, end) and those from `first` on, `numel` of them, have in common.
struct Overlap {
  int64_t begin, end;
  Overlap(int64_t begin_, int64_t end_, int64_t first, int64_t numel)
      : begin(std::max(begin_, first)), end(std::min(end_, first + numel)) {}
  bool is_empty() const { return begin >= end; }
  int64_t numel() const { return end - begin; }
};

}  // namespace tessera::dist
