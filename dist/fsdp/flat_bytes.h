#pragma once

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

inline char* bytes(const std::shared_ptr<Storage>& storage, int64_t offset = 0) {
  return static_cast<char*>(storage->data()) + offset;
}

/// `numel` elements become `value`, in the order of `stream`.
inline void fill_flat(const Stream& stream, void* data, int64_t numel, DType dtype, double value) {
  if (numel > 0) kernels::fill(stream, {data, dtype, {numel}, {1}, value});
}

}  // namespace tessera::dist
