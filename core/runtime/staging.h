#pragma once

#include <memory>

#include "core/dtype.h"
#include "core/runtime/stream.h"

// [Note: Values between host and device]
// A host that waited for the device in each step would leave it idle. So values go through small
// buffers that the device can reach (page-locked beside CUDA): the host fills one and goes on, or
// has one filled and reads it a step later, when its event is long over. A buffer is used again
// once the copy is done; while it is not, another one is made, so that nobody waits.

namespace tessera {

class MemoryBackend;
class Tensor;

/// Host memory of a HostStaging, uninitialized; goes back when it is destroyed.
class HostBuffer {
 public:
  HostBuffer() noexcept;
  HostBuffer(HostBuffer&&) noexcept;
  HostBuffer& operator=(HostBuffer&&) noexcept;
  ~HostBuffer();

  void* data() const;
  /// dst (device memory) = the buffer, in the order of `stream`; the buffer goes back after that.
  /// `name` is the task's and must be a literal.
  void upload(const char* name, const Stream& stream, void* dst) &&;
  /// The buffer = src (device memory), in the order of `stream`; the event that covers it.
  Event download(const char* name, const Stream& stream, const void* src);

 private:
  friend class HostStaging;
  struct Pool;
  struct Buffer;
  HostBuffer(std::shared_ptr<Pool> pool, std::unique_ptr<Buffer> buffer, size_t nbytes);
  void give_back() noexcept;

  std::shared_ptr<Pool> pool_;
  std::unique_ptr<Buffer> buffer_;
  size_t nbytes_ = 0;
};

/// The buffers of one rank; see [Note: Values between host and device]. Thread-safe. Buffers may
/// outlive it.
class HostStaging {
 public:
  explicit HostStaging(std::unique_ptr<MemoryBackend> backend);

  /// Never waits for the device.
  HostBuffer acquire(size_t nbytes);
  /// Buffers made so far: as many as were in flight at once.
  int num_buffers() const;

 private:
  std::shared_ptr<HostBuffer::Pool> pool_;
};

/// The values of a contiguous tensor as they are now in the order of the current stream, for the
/// host to read later.
class HostCopy {
 public:
  HostCopy() = default;
  explicit HostCopy(const Tensor& source);

  bool is_defined() const { return buffer_.data() != nullptr; }
  /// Blocks until the values are there; rethrows what poisoned the stream.
  const void* data() const;
  /// The first element.
  double item() const;

 private:
  HostBuffer buffer_;
  Event event_;
  DType dtype_ = kF32;
};

}  // namespace tessera
