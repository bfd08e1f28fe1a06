#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>

#include "core/check.h"
#if !defined(TESSERA_SIMT)
#include <nvtx3/nvToolsExt.h>

#include "core/runtime/cuda/check.h"
#endif

// How kernels reach the device. A `.cu` file is compiled twice: by nvcc for the GPU, and with
// TESSERA_SIMT by the host compiler for the emulator of the tests, whose <cuda_runtime.h> comes
// from the include path. So kernels use launch() and dynamic_smem() only, never <<<>>> or
// __shared__ variables.
//
// fmt 9 takes nvcc for a compiler without constexpr: nvcc needs -DFMT_USE_CONSTEXPR=1.

// The two bodies of a function differ, and a test program may link both.
#if defined(TESSERA_SIMT)
#define TESSERA_CUDA_BODY emulated
#else
#define TESSERA_CUDA_BODY compiled
#endif

namespace tessera::cuda {
inline namespace TESSERA_CUDA_BODY {

constexpr int kWarpSize = 32;                ///< threads
constexpr unsigned kFullMask = 0xffffffffu;  ///< all threads of a warp

/// Geometry of a launch. Rows go on grid.x only: y and z end at 65,535.
struct LaunchConfig {
  dim3 grid, block;
  size_t smem_bytes = 0;  ///< dynamic shared memory of a block
  cudaStream_t stream = nullptr;
};

/// a / b rounded up.
__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// `num_blocks` as the grid.x of a launch. ShapeError above 2^31 - 1.
inline unsigned grid_blocks(int64_t num_blocks) {
  TESSERA_CHECK_SHAPE(num_blocks >= 0 && num_blocks <= std::numeric_limits<int32_t>::max(),
                      "grid_blocks: expected 0 to 2147483647 blocks, got {}", num_blocks);
  return static_cast<unsigned>(num_blocks);
}

#if defined(TESSERA_SIMT)

inline int num_multiprocessors() {
  return simt::kNumMultiprocessors;
}

inline size_t max_smem_bytes() {
  return simt::max_shared_bytes();
}

template <class T>
T* dynamic_smem(int64_t byte_offset = 0, simt::Where where = simt::Where::here()) {
  return static_cast<T*>(simt::shared_memory(byte_offset, sizeof(T), alignof(T), where));
}

template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), const LaunchConfig& config, A&&... args) {
  std::tuple<P...> held(std::forward<A>(args)...);
  simt::launch(name, {config.grid, config.block, config.smem_bytes}, config.stream,
               [kernel, held] { std::apply(kernel, held); });
}

#else

namespace detail {
/// An attribute of the current device, read once a device.
template <cudaDeviceAttr kAttribute>
int device_attribute() {
  constexpr int kMaxDevices = 64;
  static int values[kMaxDevices] = {};  // every thread would write the same value
  int device = 0;
  TESSERA_CUDA_CHECK(cudaGetDevice(&device));
  int value = device < kMaxDevices ? __atomic_load_n(&values[device], __ATOMIC_RELAXED) : 0;
  if (value == 0) {
    TESSERA_CUDA_CHECK(cudaDeviceGetAttribute(&value, kAttribute, device));
    if (device < kMaxDevices) __atomic_store_n(&values[device], value, __ATOMIC_RELAXED);
  }
  return value;
}
}  // namespace detail

/// Multiprocessors of the current device; the emulator has 4.
inline int num_multiprocessors() {
  return detail::device_attribute<cudaDevAttrMultiProcessorCount>();
}
/// Shared memory that a block of the current device may ask for: 163 KiB on compute capability 8.0,
/// 227 on 9.0 and 10.0, 99 on 8.6, 8.9 and 12.0.
inline size_t max_smem_bytes() {
  return static_cast<size_t>(detail::device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>());
}

/// The block's dynamic shared memory from `byte_offset` on; 128-byte aligned at 0.
template <class T>
__device__ T* dynamic_smem(int64_t byte_offset = 0) {
  extern __shared__ __align__(128) unsigned char dynamic_smem_bytes[];
  return reinterpret_cast<T*>(dynamic_smem_bytes + byte_offset);
}

namespace detail {

[[noreturn]] inline void fail_launch(const char* name, const LaunchConfig& c, cudaError_t error) {
  cudaGetLastError();
  ::tessera::detail::fail<CudaError>(__FILE__, __LINE__,
                                     "{}: launch of grid [{}, {}, {}], block [{}, {}, {}], {} "
                                     "bytes of shared memory failed: {} ({})",
                                     name, c.grid.x, c.grid.y, c.grid.z, c.block.x, c.block.y,
                                     c.block.z, c.smem_bytes, cudaGetErrorString(error),
                                     cudaGetErrorName(error));
}

inline void launch_kernel(const char* name, const void* kernel, const LaunchConfig& c,
                          void** args) {
  constexpr size_t kSmemWithoutOptIn = 48 * 1024;
  cudaError_t error = cudaSuccess;
  if (c.smem_bytes > kSmemWithoutOptIn) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(c.smem_bytes));
  }
  if (error == cudaSuccess) {
    nvtxRangePushA(name);
    error = cudaLaunchKernel(kernel, c.grid, c.block, args, c.smem_bytes, c.stream);
    nvtxRangePop();
  }
  if (error != cudaSuccess) fail_launch(name, c, error);
}

}  // namespace detail

/// Launches `kernel` on config.stream under an NVTX range `name`; opts in to more than 48 KiB of
/// shared memory. `args` are converted to the kernel's parameter types. An empty grid is an error
/// of the caller.
/// Errors   CudaError with the name, grid, block and shared memory if the launch is refused
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), const LaunchConfig& config, A&&... args) {
  std::tuple<P...> held(std::forward<A>(args)...);
  std::apply(
      [&](P&... params) {
        void* pointers[] = {const_cast<void*>(static_cast<const void*>(&params))..., nullptr};
        detail::launch_kernel(name, reinterpret_cast<const void*>(kernel), config, pointers);
      },
      held);
}

#endif

}  // namespace TESSERA_CUDA_BODY
}  // namespace tessera::cuda
