// softsign and its gradient: a grid strides over the elements, which are independent of each other.

#include <tessera/core/runtime/cuda/launch.cuh>

#include "softsign.h"

namespace example::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::grid_blocks;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;

constexpr int kBlock = 256;

__global__ void __launch_bounds__(kBlock) softsign_fwd_kernel(SoftsignFwd a) {
  const auto i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= a.numel) return;
  const float x = static_cast<const float*>(a.x)[i];
  static_cast<float*>(a.y)[i] = x / (1 + fabsf(x));
}

__global__ void __launch_bounds__(kBlock) softsign_bwd_kernel(SoftsignBwd a) {
  const auto i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= a.numel) return;
  const float d = 1 + fabsf(static_cast<const float*>(a.x)[i]);
  static_cast<float*>(a.dx)[i] = static_cast<const float*>(a.dy)[i] / (d * d);
}

LaunchConfig config_of(CUstream_st* stream, int64_t numel, tessera::DType dtype) {
  TESSERA_CHECK_DTYPE(dtype == tessera::kF32, "softsign: expected f32 on cuda, got {}", dtype);
  return {dim3(grid_blocks(ceil_div(numel, kBlock))), dim3(kBlock), 0, stream};
}

}  // namespace

void softsign_fwd(CUstream_st* s, const SoftsignFwd& a) {
  if (a.numel == 0) return;
  launch("softsign_fwd", softsign_fwd_kernel, config_of(s, a.numel, a.dtype), a);
}

void softsign_bwd(CUstream_st* s, const SoftsignBwd& a) {
  if (a.numel == 0) return;
  launch("softsign_bwd", softsign_bwd_kernel, config_of(s, a.numel, a.dtype), a);
}

}  // namespace example::cuda
