#pragma once

#include <cuda_runtime_api.h>

namespace tessera::cuda {

/// CudaError with the call's text, the runtime's words and its name of the error. Clears the error,
/// so that the next launch does not report it again.
[[noreturn]] void fail(const char* call, cudaError_t error, const char* file, int line);
/// For destructors: the error is logged and gone.
void log_failure(const char* call, cudaError_t error) noexcept;

}  // namespace tessera::cuda

/// TESSERA_CUDA_CHECK(cudaMemsetAsync(...)): throws what went wrong in the call.
#define TESSERA_CUDA_CHECK(call)                                     \
  do {                                                               \
    const cudaError_t cuda_error_ = (call);                          \
    if (cuda_error_ != cudaSuccess) [[unlikely]]                     \
      ::tessera::cuda::fail(#call, cuda_error_, __FILE__, __LINE__); \
  } while (0)
