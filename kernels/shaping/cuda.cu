// Gather along a dimension, and its backward.
//
// Parallelization  gather: a thread an element. scatter_add: a line of the dimension is one
//                  worker's, so that no atomics are needed: with inner = 1 a warp's, which takes 32
//                  elements at a time and adds up, by shuffles, those that name one place; else a
//                  thread's, neighbours being neighbours in memory.
// Determinism      each place's terms are added in a fixed order.

#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/vec.cuh"
#include "kernels/rows.cuh"
#include "kernels/shaping/kernel.h"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::grid_blocks;
using tessera::cuda::kFullMask;
using tessera::cuda::kWarpSize;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;
using tessera::cuda::to_float;

constexpr int kBlock = 256, kWarps = kBlock / kWarpSize;

template <class Args>
__device__ int64_t index_at(const Args& p, int64_t at) {
  return p.index_dtype == kI64 ? static_cast<const int64_t*>(p.index)[at]
                               : static_cast<const int32_t*>(p.index)[at];
}
template <class Args>
__device__ bool is_in_range(const Args& p, int64_t index) {
  return index >= 0 && index < p.length;
}

/// T is an unsigned integer of the dtype's size.
template <class T>
__global__ void __launch_bounds__(kBlock) gather_kernel(Gather p) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (at >= p.outer * p.count * p.inner) return;
  const int64_t row = divide(at, p.inner), i = at - row * p.inner, o = divide(row, p.count);
  const int64_t index = index_at(p, at);
  static_cast<T*>(p.y)[at] = is_in_range(p, index)
                                 ? static_cast<const T*>(p.x)[(o * p.length + index) * p.inner + i]
                                 : static_cast<T>(~T{0});
}

template <class T>
__global__ void __launch_bounds__(kBlock) scatter_row_kernel(ScatterAdd p) {
  const int64_t o = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (o >= p.outer) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float* sums = static_cast<float*>(p.sums) + o * p.length;
  for (int64_t first = 0; first < p.count; first += kWarpSize) {
    const int64_t at = o * p.count + first + lane;
    const bool is_there = first + lane < p.count;
    const int64_t index = is_there ? index_at(p, at) : -1;
    const float value = is_there ? to_float(static_cast<const T*>(p.dy)[at]) : 0.0f;
    float total = 0;
    int leader = kWarpSize;  // the first lane with this index
    for (int other = kWarpSize - 1; other >= 0; --other) {
      const bool is_same = __shfl_sync(kFullMask, index, other) == index;
      const float term = __shfl_sync(kFullMask, value, other);
      if (is_same) total += term, leader = other;
    }
    if (leader == lane && is_in_range(p, index)) sums[index] += total;
    __syncwarp();  // another lane may add to this place next
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock) scatter_col_kernel(ScatterAdd p) {
  const int64_t line = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (line >= p.outer * p.inner) return;
  const int64_t o = divide(line, p.inner), i = line - o * p.inner;
  float* sums = static_cast<float*>(p.sums) + o * p.length * p.inner + i;
  for (int64_t m = 0; m < p.count; ++m) {
    const int64_t at = (o * p.count + m) * p.inner + i, index = index_at(p, at);
    if (is_in_range(p, index)) {
      sums[index * p.inner] += to_float(static_cast<const T*>(p.dy)[at]);
    }
  }
}

LaunchConfig threads_config(int64_t threads, cudaStream_t stream) {
  return {grid_blocks(ceil_div(threads, kBlock)), kBlock, 0, stream};
}

}  // namespace

void gather(CUstream_st* stream, const Gather& p) {
  const LaunchConfig config = threads_config(p.outer * p.count * p.inner, stream);
  if (config.grid.x == 0) return;
  switch (size_of(p.dtype)) {
    case 1:
      return launch("gather", &gather_kernel<uint8_t>, config, p);
    case 2:
      return launch("gather", &gather_kernel<uint16_t>, config, p);
    case 4:
      return launch("gather", &gather_kernel<uint32_t>, config, p);
    default:
      return launch("gather", &gather_kernel<uint64_t>, config, p);
  }
}

void scatter_add(CUstream_st* stream, const ScatterAdd& p) {
  if (p.outer * p.count * p.inner == 0) return;
  tessera::cuda::visit_device_float(p.dtype, "scatter_add", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.inner == 1) {
      launch("scatter_add", &scatter_row_kernel<T>,
             LaunchConfig{grid_blocks(ceil_div(p.outer, kWarps)), kBlock, 0, stream}, p);
    } else {
      launch("scatter_add", &scatter_col_kernel<T>, threads_config(p.outer * p.inner, stream), p);
    }
  });
}

}  // namespace tessera::kernels::cuda
