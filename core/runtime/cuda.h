#pragma once

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

}  // namespace tessera
