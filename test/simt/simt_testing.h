#pragma once

#include <functional>
#include <vector>

#include "core/tensor.h"
#include "test/simt/simt.h"
#include "test/testing.h"

// For tests that run a family's CUDA kernels on the emulator beside its CPU kernels.

namespace tessera::testing {

/// Memory of exactly the bytes of a contiguous tensor, in an allocation of its own, so that
/// AddressSanitizer sees an access before or behind it. 256-byte aligned, as cudaMalloc's, plus
/// `offset` elements for tests of the scalar paths.
class DeviceBuffer {
 public:
  /// NaN in every floating format, all ones in every integer.
  DeviceBuffer(const Shape& shape, DType dtype, int64_t offset = 0);
  /// A copy of a tensor on the CPU.
  explicit DeviceBuffer(const Tensor& tensor, int64_t offset = 0);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const;
  template <class T>
  T* as() const {
    return static_cast<T*>(data());
  }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  /// A copy as a tensor on the CPU.
  Tensor tensor() const;

 private:
  size_t nbytes() const { return static_cast<size_t>(shape_.numel()) * size_of(dtype_); }

  Shape shape_;
  DType dtype_;
  void* allocation_;
  void* data_;
};

/// Calls `run`, which launches kernels and returns their outputs, in the three schedules of the
/// emulator. Fails the test unless the outputs are bitwise the same; returns them.
std::vector<Tensor> run_in_all_schedules(const std::function<std::vector<Tensor>()>& run);

}  // namespace tessera::testing
