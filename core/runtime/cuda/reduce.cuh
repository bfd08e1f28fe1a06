#pragma once

#include "core/runtime/cuda/launch.cuh"

// Sums and maxima of a warp and a block, in an order that only the block size determines: bitwise
// repeatable. All threads take part and all get the result. T is float or double.

namespace tessera::cuda {
inline namespace TESSERA_CUDA_BODY {

namespace detail {
struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
/// NaN loses against a number, as in fmax.
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ double operator()(double a, double b) const { return fmax(a, b); }
};

template <class T, class Op>
__device__ inline T warp_reduce(T value, Op op) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = op(value, __shfl_xor_sync(kFullMask, value, distance));
  }
  return value;
}

/// smem holds one value a warp. The last barrier makes it free for the next use.
template <int kBlock, class T, class Op>
__device__ inline T block_reduce(T value, T* smem, T identity, Op op) {
  static_assert(kBlock % kWarpSize == 0 && kBlock <= kWarpSize * kWarpSize);
  constexpr int kWarps = kBlock / kWarpSize;
  value = warp_reduce(value, op);
  if constexpr (kWarps == 1) return value;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (lane == 0) smem[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  value = warp_reduce(lane < kWarps ? smem[lane] : identity, op);
  __syncthreads();
  return value;
}
}  // namespace detail

/// The butterfly: distances 16, 8, 4, 2, 1.
template <class T>
__device__ inline T warp_sum(T value) {
  return detail::warp_reduce(value, detail::Sum{});
}
/// The largest value of a warp, in every lane; NaN counts as nothing.
template <class T>
__device__ inline T warp_max(T value) {
  return detail::warp_reduce(value, detail::Max{});
}

/// Over a block of kBlock threads along x. `smem` is kBlock / 32 values of shared memory; it may be
/// written again as soon as the call returns.
template <int kBlock, class T>
__device__ inline T block_sum(T value, T* smem) {
  return detail::block_reduce<kBlock>(value, smem, T{0}, detail::Sum{});
}
/// The largest value of a block, in every thread; NaN counts as nothing.
template <int kBlock, class T>
__device__ inline T block_max(T value, T* smem) {
  return detail::block_reduce<kBlock>(value, smem, -static_cast<T>(INFINITY), detail::Max{});
}

}  // namespace TESSERA_CUDA_BODY
}  // namespace tessera::cuda
