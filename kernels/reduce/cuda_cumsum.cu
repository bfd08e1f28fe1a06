// Cumulative sums: y[o, n, i] = sum of x[o, m, i] over m <= n, in reverse over m >= n.
//
// Parallelization  inner = 1: a block a row, 1024 elements at a time; a thread adds up four
//                  neighbours, shuffles add over the warp, shared memory over the warps. Else a
//                  thread a column, eight elements under way.
// Sums             inner = 1: f32 within the 1024 elements, f64 across; else f64.
// Determinism      the order depends on the shape only.

#include "core/runtime/cuda/launch.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/reduce/kernel.h"
#include "kernels/rows.cuh"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::dynamic_smem;
using tessera::cuda::grid_blocks;
using tessera::cuda::kFullMask;
using tessera::cuda::kWarpSize;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;
using tessera::cuda::to_float;

constexpr int kBlock = 256, kWarps = kBlock / kWarpSize;
constexpr int kItems = 4;  // of a thread

__device__ void store_sum(const Cumsum& p, int64_t at, double total) {
  store_floats(p.y, p.y_dtype, at, Floats<1>{{static_cast<float>(total)}}, p.accumulate);
}

template <class T>
__global__ void __launch_bounds__(kBlock) cumsum_row_kernel(Cumsum p) {
  const int64_t row = blockIdx.x * p.length;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  float* warp_sums = dynamic_smem<float>();
  double before = 0;  // the sum of the elements before these 1024
  for (int64_t first = 0; first < p.length; first += kBlock * kItems) {
    const int64_t begin = first + static_cast<int64_t>(threadIdx.x) * kItems;
    const auto place = [&](int64_t n) { return row + (p.reverse ? p.length - 1 - n : n); };
    float sums[kItems];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (begin + i < p.length) sum += to_float(static_cast<const T*>(p.x)[place(begin + i)]);
      sums[i] = sum;
    }
    float last = sum;  // of the lanes up to this one
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const float left = __shfl_up_sync(kFullMask, last, distance);
      if (lane >= distance) last += left;
    }
    const float left = __shfl_up_sync(kFullMask, last, 1);
    __syncthreads();  // the sums of the elements before have been read
    if (lane == kWarpSize - 1) warp_sums[warp] = last;
    __syncthreads();
    float offset = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) offset = all;
      all += warp_sums[w];
    }
    if (lane > 0) offset += left;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (begin + i >= p.length) break;
      store_sum(p, place(begin + i), before + static_cast<double>(offset + sums[i]));
    }
    before += static_cast<double>(all);
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock) cumsum_col_kernel(Cumsum p) {
  constexpr int kUnroll = 8;
  const int64_t line = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (line >= p.outer * p.inner) return;
  const int64_t o = divide(line, p.inner), column = o * p.length * p.inner + line - o * p.inner;
  const auto place = [&](int64_t n) {
    return column + (p.reverse ? p.length - 1 - n : n) * p.inner;
  };
  double total = 0;
  for (int64_t first = 0; first < p.length; first += kUnroll) {
    float values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u < p.length) values[u] = to_float(static_cast<const T*>(p.x)[place(first + u)]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u >= p.length) break;
      total += static_cast<double>(values[u]);
      store_sum(p, place(first + u), total);
    }
  }
}

}  // namespace

void cumsum(CUstream_st* stream, const Cumsum& p) {
  const int64_t lines = p.outer * p.inner;
  if (lines * p.length == 0) return;
  check_device_float(p.y_dtype, "cumsum");
  tessera::cuda::visit_device_float(p.dtype, "cumsum", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.inner == 1) {
      launch("cumsum", &cumsum_row_kernel<T>,
             LaunchConfig{grid_blocks(lines), kBlock, kWarps * sizeof(float), stream}, p);
    } else {
      launch("cumsum", &cumsum_col_kernel<T>,
             LaunchConfig{grid_blocks(ceil_div(lines, kBlock)), kBlock, 0, stream}, p);
    }
  });
}

}  // namespace tessera::kernels::cuda
