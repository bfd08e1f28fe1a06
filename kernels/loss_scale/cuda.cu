// Loss scaling: its scalars, one thread a launch, and the pass that scales and looks for what is
// not finite. The host knows none of them.
//
//   scale_check:  dst = x factor;  *found_inf = 1 if a stored element has all bits of the exponent
// Layout           flat arrays; a thread moves 16-byte vectors of x, or single elements where an
//                  address is off 16 bytes
// Parallelization  a grid that fits the device strides over the vectors; one store of the flag a
//                  warp that found something
// Determinism      elements are independent; all that write the flag write 1

#include <algorithm>

#include "core/runtime/cuda/launch.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/loss_scale/kernel.h"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::is_aligned16;
using tessera::cuda::kFullMask;
using tessera::cuda::kVec;
using tessera::cuda::kWarpSize;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;

constexpr int kBlock = 256;
constexpr int kResidentBlocks = 8;  // of a multiprocessor

__device__ bool is_finite(float x) {
  constexpr unsigned kExponent = 0x7f800000;
  return (__float_as_uint(x) & kExponent) != kExponent;
}
__device__ bool is_finite(BFloat16 x) {
  return (x.bits & 0x7f80u) != 0x7f80u;
}
__device__ bool is_finite(Float16 x) {
  return (x.bits & 0x7c00u) != 0x7c00u;
}

template <class T, class Out, int N>
__global__ void __launch_bounds__(kBlock, kResidentBlocks) scale_check_kernel(ScaleCheck p) {
  const T* x = static_cast<const T*>(p.x);
  Out* dst = static_cast<Out*>(p.dst);
  bool is_all_finite = true;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlock * N;
  int64_t at = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * N;
  for (; at + N <= p.numel; at += stride) {
    Floats<N> values = load_floats<N>(x + at);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] *= p.factor;
    const tessera::cuda::Vec<Out, N> out = round_floats<Out>(values);
#pragma unroll
    for (int i = 0; i < N; ++i) is_all_finite = is_all_finite && is_finite(out[i]);
    tessera::cuda::store_vec(dst + at, out);
  }
  for (; at < p.numel; ++at) {  // the last, short vector
    const Out out = tessera::cuda::from_float<Out>(tessera::cuda::to_float(x[at]) * p.factor);
    is_all_finite = is_all_finite && is_finite(out);
    dst[at] = out;
  }
  if (__any_sync(kFullMask, !is_all_finite) && threadIdx.x % kWarpSize == 0) *p.found_inf = 1;
}

template <class T, class Out, int N>
void launch_vectors(const ScaleCheck& p, cudaStream_t stream) {
  const int64_t resident = int64_t{kResidentBlocks} * tessera::cuda::num_multiprocessors();
  const int64_t blocks = std::min(ceil_div(p.numel, int64_t{kBlock} * N), resident);
  launch("scale_check", &scale_check_kernel<T, Out, N>,
         LaunchConfig{tessera::cuda::grid_blocks(blocks), kBlock, 0, stream}, p);
}

template <class T, class Out>
void launch_scale_check(const ScaleCheck& p, cudaStream_t stream) {
  if (is_aligned16(p.x) && is_aligned16(p.dst)) {
    launch_vectors<T, Out, kVec<T>>(p, stream);
  } else {
    launch_vectors<T, Out, 1>(p, stream);
  }
}

__global__ void unscale_norm_kernel(UnscaleNorm p) {
  if (threadIdx.x != 0) return;
  const float inverse = p.scale == nullptr ? p.grad_factor : p.grad_factor / *p.scale;
  const bool finite = is_finite(*p.norm);
  const float norm = *p.norm * inverse;
  *p.norm = norm;
  *p.found_inf = finite ? 0 : 1;
  *p.factor = finite ? fminf(1.0f, p.max_norm / (norm + 1e-6f)) * inverse : 0.0f;
}

__global__ void update_loss_scale_kernel(UpdateLossScale p) {
  if (threadIdx.x != 0) return;
  if (*p.found_inf != 0) {
    *p.scale = fmaxf(p.min_scale, *p.scale * p.backoff);
    *p.num_good = 0;
    ++*p.num_skipped;
  } else if (++*p.num_good >= p.interval) {
    *p.scale = fminf(p.max_scale, *p.scale * p.growth);
    *p.num_good = 0;
  }
}

}  // namespace

void scale_check(CUstream_st* stream, const ScaleCheck& p) {
  if (p.numel == 0) return;
  tessera::cuda::visit_device_float(p.dtype, "scale_check", [&](auto from) {
    tessera::cuda::visit_device_float(p.dst_dtype, "scale_check", [&](auto to) {
      using T = typename decltype(from)::type;
      using Out = typename decltype(to)::type;
      launch_scale_check<T, Out>(p, stream);
    });
  });
}

void unscale_norm(CUstream_st* stream, const UnscaleNorm& p) {
  launch("unscale_norm", &unscale_norm_kernel, LaunchConfig{1, kWarpSize, 0, stream}, p);
}

void update_loss_scale(CUstream_st* stream, const UpdateLossScale& p) {
  launch("update_loss_scale", &update_loss_scale_kernel, LaunchConfig{1, kWarpSize, 0, stream}, p);
}

}  // namespace tessera::kernels::cuda
