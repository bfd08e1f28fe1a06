// Scalars of loss scaling, one thread a launch: the host knows none of them. What is not finite is
// found by its bits.

#include "core/runtime/cuda/launch.cuh"
#include "kernels/loss_scale/kernel.h"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;

__device__ bool is_finite(float x) {
  constexpr unsigned kExponent = 0x7f800000;
  return (__float_as_uint(x) & kExponent) != kExponent;
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

void unscale_norm(CUstream_st* stream, const UnscaleNorm& p) {
  launch("unscale_norm", &unscale_norm_kernel, LaunchConfig{1, tessera::cuda::kWarpSize, 0, stream},
         p);
}

void update_loss_scale(CUstream_st* stream, const UpdateLossScale& p) {
  launch("update_loss_scale", &update_loss_scale_kernel,
         LaunchConfig{1, tessera::cuda::kWarpSize, 0, stream}, p);
}

}  // namespace tessera::kernels::cuda
