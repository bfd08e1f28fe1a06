#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "core/runtime/allocator.h"
#include "core/runtime/stream.h"

// The CUDA half of the device seam: streams, events and memory over the CUDA runtime. A build
// without CUDA has the same functions; they throw UnimplementedError.

namespace tessera {

/// What stands between this process and a CUDA device.
struct CudaProbe {
  bool is_built = false;  ///< the build has the CUDA runtime
  int num_devices = 0;
  std::string problem =
      {};  ///< one clause: "no NVIDIA driver is installed"; empty if CUDA can be used
};
CudaProbe probe_cuda();

/// A CUDA stream that does not wait for the default stream. Kernels are launched on
/// `Stream::cuda()`; `submit` throws, as host functions do not run in it. Errors of kernels are
/// rethrown by `synchronize`, as CudaError.
Stream make_cuda_stream(Device device, std::string name, const StreamOptions& options);
/// cudaMalloc; null when the device is out of memory.
std::unique_ptr<MemoryBackend> make_cuda_backend(Device device);
/// Page-locked host memory, visible to all devices.
std::unique_ptr<MemoryBackend> make_pinned_backend(Device device);
/// Makes `device` the current one of this thread, as launches on its streams need.
void use_cuda_device(Device device);
/// The device's place on the bus of its machine: equal for ranks that share a device.
std::string cuda_device_id(Device device);

/// Makes `error` the stream's from now on, as that of a failed task would be: `synchronize` of the
/// stream, and of streams and events that have waited for it, rethrow it. What is queued still
/// runs. For errors that the host finds. Any thread.
void poison_cuda_stream(const Stream& stream, std::exception_ptr error);
/// Calls `watch` whenever the host has waited for the stream, or for one that has waited for it,
/// before it looks for errors: to find what went wrong meanwhile. Any thread.
void watch_cuda_stream(const Stream& stream, std::function<void()> watch);

/// A gate in a CUDA stream that a thread of the host opens: the stream stands there, the host does
/// not. Gates are opened in the order in which they were waited on. The owner drains the stream
/// before it goes.
class HostGate {
 public:
  explicit HostGate(Device device);
  ~HostGate();
  HostGate(const HostGate&) = delete;
  HostGate& operator=(const HostGate&) = delete;

  /// What is submitted to `stream` from now on runs after `open` with the result.
  uint32_t wait_on(const Stream& stream);
  void open(uint32_t ticket) noexcept;  ///< any thread

 private:
  std::unique_ptr<MemoryBackend> backend_;
  uint32_t* flag_ = nullptr;  // page-locked; the last gate that is open
  uint32_t num_waits_ = 0;
};

}  // namespace tessera
