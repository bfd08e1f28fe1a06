// Attention for CUDA: bf16 and f16 on tensor cores (flash_fwd.cuh, flash_bwd.cuh), f32 without
// (plain.cuh). This source chooses the kernels and computes what backward needs of each query:
//
//   lse[b, h, t] / ln 2,  +inf where no key is visible     delta[b, h, t] = sum_d d_out o
//
// Parallel    One warp a row of o; 16 bytes a lane where rows are aligned. Memory-bound: reads o
//             and d_out once, writes 8 bytes a row.
// Bits        Every kernel sums in an order that the shape alone determines.
#include "core/runtime/cuda/reduce.cuh"
#include "kernels/attention/cuda/flash.h"
#include "kernels/attention/cuda/plain.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kStatsThreads = 256, kStatsRows = kStatsThreads / kWarpSize;

template <class T>
__global__ void __launch_bounds__(kStatsThreads)
    attention_stats_kernel(BwdStats stats, const T* d_out, const T* o, const float* lse,
                           const Problem p, int64_t num_rows, bool is_vectorized) {
  // Rows in the order of o, [B, padded T, H].
  const int64_t row = blockIdx.x * int64_t{kStatsRows} + threadIdx.x / kWarpSize;
  if (row >= num_rows) return;
  const int64_t head = row % p.num_heads, t = row / p.num_heads % stats.stride;
  const int64_t batch = row / p.num_heads / stats.stride;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  float* to = stats.lse(p, batch, head) + t;
  if (t >= p.num_queries) {
    if (lane == 0) to[0] = INFINITY, to[stats.delta_offset] = 0.0f;
    return;
  }
  const int64_t offset = ((batch * p.num_queries + t) * p.num_heads + head) * p.head_dim;
  float sum = 0.0f;
  if (is_vectorized) {
    for (int c = lane * kVec<T>; c < p.head_dim; c += kWarpSize * kVec<T>) {
      const Vec<T> x = load_vec<kVec<T>>(d_out + offset + c), y = load_vec<kVec<T>>(o + offset + c);
#pragma unroll
      for (int i = 0; i < kVec<T>; ++i) sum += to_float(x[i]) * to_float(y[i]);
    }
  } else {
    for (int c = lane; c < p.head_dim; c += kWarpSize)
      sum += to_float(d_out[offset + c]) * to_float(o[offset + c]);
  }
  sum = warp_sum(sum);
  if (lane != 0) return;
  const float row_lse = lse[(batch * p.num_heads + head) * p.num_queries + t];
  to[0] = row_lse == -INFINITY ? INFINITY : row_lse * kLog2E;
  to[stats.delta_offset] = sum;
}

template <class T>
void launch_stats(CUstream_st* stream, const AttentionBwd& a) {
  const AttentionShape& s = a.shape;
  const BwdStats stats = make_stats(a);
  const int64_t num_rows = s.batch * stats.stride * s.num_heads;
  if (num_rows == 0) return;
  const bool is_vectorized =
      is_aligned16(a.d_out) && is_aligned16(a.o) && s.head_dim % kVec<T> == 0;
  launch("attention_stats", &attention_stats_kernel<T>,
         {.grid = dim3(grid_blocks(ceil_div(num_rows, kStatsRows))),
          .block = dim3(kStatsThreads),
          .stream = stream},
         stats, static_cast<const T*>(a.d_out), static_cast<const T*>(a.o),
         static_cast<const float*>(a.lse), make_problem(s), num_rows, is_vectorized);
}

}  // namespace

void attention_fwd(CUstream_st* stream, const AttentionFwd& a) {
  const AttentionShape& s = a.shape;
  if (s.batch * s.num_heads * s.num_queries == 0) return;
  visit_device_float(s.dtype, "attention_fwd", [&]<class T>(TypeTag<T>) {
    if constexpr (std::is_same_v<T, float>)
      plain_fwd(stream, a);
    else
      flash_fwd(stream, a);
  });
}

void attention_bwd(CUstream_st* stream, const AttentionBwd& a) {
  const AttentionShape& s = a.shape;
  if (s.batch * s.num_kv_heads * s.num_keys == 0) return;
  const bool has_dq = a.dq != nullptr && s.num_queries > 0;
  const bool has_dkv = a.dk != nullptr || a.dv != nullptr;
  visit_device_float(s.dtype, "attention_bwd", [&]<class T>(TypeTag<T>) {
    launch_stats<T>(stream, a);
    if constexpr (std::is_same_v<T, float>) {
      if (has_dq) plain_dq(stream, a);
      if (has_dkv) plain_dkv(stream, a);
    } else {
      if (has_dq) flash_dq(stream, a);
      if (has_dkv) flash_dkv(stream, a);
    }
  });
}

}  // namespace tessera::kernels::cuda
