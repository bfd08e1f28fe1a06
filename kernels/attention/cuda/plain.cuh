#pragma once

#include "core/runtime/cuda/reduce.cuh"
#include "kernels/attention/cuda/params.cuh"

// f32 without tensor cores. A warp takes 4 rows; a tile has 32 columns, one a lane: queries as rows
// and keys as columns in the forward and for dQ, keys as rows and queries as columns for dK and dV.
// Products read the row as a broadcast and the column's row of the tile 16 bytes at a time; its
// pitch is an odd number of 16-byte chunks, free of bank conflicts. A row's sums lie in the lanes
// by head column: out[row][lane + 32 c]. Order and masks as in flash_fwd.cuh and flash_bwd.cuh.

namespace tessera::kernels::cuda {
namespace {

constexpr int kPlainWarps = 8, kPlainThreads = kPlainWarps * kWarpSize;
constexpr int kPlainWarpRows = 4, kPlainRows = kPlainWarps * kPlainWarpRows;
constexpr int kPlainCols = kWarpSize;

template <int kChunks>
using PlainSums = float[kPlainWarpRows][kChunks];

/// Floats between rows of a tile.
__host__ __device__ constexpr int plain_pitch(int head_dim) {
  return ((head_dim + 3) / 4 | 1) * 4;
}

/// Shared memory of `num_tiles` tiles of 32 rows and the warps' weights.
inline size_t plain_smem_bytes(int64_t head_dim, int num_tiles) {
  const int tile = plain_pitch(static_cast<int>(head_dim)) * kPlainRows;
  return (num_tiles * tile + kPlainRows * kPlainCols) * sizeof(float);
}

/// Rows [begin, begin + 32) below `limit`, else zeros; columns from head_dim on are zeros.
__device__ inline void load_plain_tile(float* tile, const HeadRows<const float>& from, int begin,
                                       int limit, int head_dim) {
  const int pitch = plain_pitch(head_dim), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int row = static_cast<int>(threadIdx.x) / kWarpSize; row < kPlainRows; row += kPlainWarps) {
    for (int c = lane; c < pitch; c += kWarpSize)
      tile[row * pitch + c] =
          begin + row < limit && c < head_dim ? from.data[(begin + row) * from.stride + c] : 0.0f;
  }
}

/// dots[r] = row r of `rows` . this lane's row of `cols`.
__device__ inline void plain_dots(float (&dots)[kPlainWarpRows], const float* rows,
                                  const float* cols, int head_dim) {
  const int pitch = plain_pitch(head_dim), lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (float& dot : dots) dot = 0.0f;
  for (int c = 0; c < head_dim; c += 4) {
    const Vec<float, 4> col = load_vec<4>(cols + lane * pitch + c);
#pragma unroll
    for (int r = 0; r < kPlainWarpRows; ++r) {
      const Vec<float, 4> row = load_vec<4>(rows + r * pitch + c);
#pragma unroll
      for (int i = 0; i < 4; ++i) dots[r] += row[i] * col[i];
    }
  }
}

/// out[r] += sum over the tile's rows j of weights[r][j] tile[j]. `weights` is the warp's memory.
template <int kChunks>
__device__ inline void add_weighted(PlainSums<kChunks>& out, const float (&lane_weights)[4],
                                    float* weights, const float* tile, int head_dim) {
  const int pitch = plain_pitch(head_dim), lane = static_cast<int>(threadIdx.x) % kWarpSize;
  __syncwarp();  // the former weights have been read
#pragma unroll
  for (int r = 0; r < kPlainWarpRows; ++r) weights[r * kPlainCols + lane] = lane_weights[r];
  __syncwarp();
  for (int j = 0; j < kPlainCols; ++j) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = lane + c * kWarpSize;
      const float value = column < pitch ? tile[j * pitch + column] : 0.0f;
#pragma unroll
      for (int r = 0; r < kPlainWarpRows; ++r) out[r][c] += weights[r * kPlainCols + j] * value;
    }
  }
}

/// The logit of a pair, in powers of 2; -inf if the query does not see the key.
__device__ inline float plain_logit(float dot, const Problem& p, const KeyRange& range, int query,
                                    int key, float bias) {
  if (key < range.first || key >= range.end) return -INFINITY;
  if (p.is_capped()) return tanhf(dot * p.cap_scale) * p.logit_scale;
  const int position = p.num_keys - p.num_queries + query;
  const float logit = p.negate ? -dot : dot;
  return (logit - bias * static_cast<float>(abs(position - key))) * p.logit_scale;
}

/// What the soft-cap multiplies the gradient of such a logit by.
__device__ inline float plain_slope(float logit, const Problem& p) {
  return p.is_capped() ? cap_slope(logit / p.logit_scale) : 1.0f;
}

__device__ inline KeyRange plain_range(const Problem& p, const int32_t* starts, int query) {
  return query < p.num_queries ? visible_keys(p, starts, query) : KeyRange{0, 0};
}

template <int kChunks>
__device__ inline void store_plain(const HeadRows<float>& to, int begin, int limit, int head_dim,
                                   const PlainSums<kChunks>& sums, const float (&factors)[4],
                                   bool accumulate) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int r = 0; r < kPlainWarpRows; ++r) {
    if (begin + r >= limit) continue;
    float* dst = to.data + (begin + r) * to.stride;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = lane + c * kWarpSize;
      if (column >= head_dim) continue;
      const float value = sums[r][c] * factors[r];
      dst[column] = accumulate ? dst[column] + value : value;
    }
  }
}

template <int kChunks>
__global__ void __launch_bounds__(kPlainThreads, 1) plain_fwd_kernel(const FwdParams a) {
  const Problem& p = a.problem;
  const int tile_numel = plain_pitch(p.head_dim) * kPlainRows;
  float* q_tile = dynamic_smem<float>();
  float *k_tile = q_tile + tile_numel, *v_tile = k_tile + tile_numel;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int row = warp * kPlainWarpRows;
  float* weights = v_tile + tile_numel + row * kPlainCols;
  const float* q_rows = q_tile + row * plain_pitch(p.head_dim);

  const int num_blocks = (p.num_queries + kPlainRows - 1) / kPlainRows;
  const auto batch_head = static_cast<int>(blockIdx.x / num_blocks);
  const int batch = batch_head / p.num_heads, head = batch_head % p.num_heads;
  const int block_query = static_cast<int>(blockIdx.x % num_blocks) * kPlainRows;
  const int32_t* starts = p.starts(batch);
  const QuerySpan span = query_span(p, starts, block_query, kPlainRows);
  const auto k = a.k.rows<const float>(batch, head / p.group());
  const auto v = a.v.rows<const float>(batch, head / p.group());
  load_plain_tile(q_tile, a.q.rows<const float>(batch, head), block_query, p.num_queries,
                  p.head_dim);

  PlainSums<kChunks> o{};
  float maximum[kPlainWarpRows], sum[kPlainWarpRows];
  KeyRange ranges[kPlainWarpRows];
#pragma unroll
  for (int r = 0; r < kPlainWarpRows; ++r) {
    maximum[r] = -INFINITY, sum[r] = 0.0f;
    ranges[r] = plain_range(p, starts, block_query + row + r);
  }
  const float bias = p.bias(head);
  for (int key = span.first.first / kPlainCols * kPlainCols; key < span.last.end;
       key += kPlainCols) {
    __syncthreads();  // the former tile has been used
    load_plain_tile(k_tile, k, key, p.num_keys, p.head_dim);
    load_plain_tile(v_tile, v, key, p.num_keys, p.head_dim);
    __syncthreads();
    float s[kPlainWarpRows];
    plain_dots(s, q_rows, k_tile, p.head_dim);
#pragma unroll
    for (int r = 0; r < kPlainWarpRows; ++r) {
      s[r] = plain_logit(s[r], p, ranges[r], block_query + row + r, key + lane, bias);
      const float latest = fmaxf(maximum[r], warp_max(s[r]));
      const float shift = latest == -INFINITY ? 0.0f : latest;
      const float factor = exp2f(maximum[r] - shift);
      maximum[r] = latest;
      s[r] = exp2f(s[r] - shift);
      sum[r] = sum[r] * factor + s[r];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) o[r][c] *= factor;
    }
    add_weighted(o, s, weights, v_tile, p.head_dim);
  }
  float factors[kPlainWarpRows];
#pragma unroll
  for (int r = 0; r < kPlainWarpRows; ++r) {
    sum[r] = warp_sum(sum[r]);
    factors[r] = sum[r] > 0.0f ? 1.0f / sum[r] : 0.0f;
    const int t = block_query + row + r;
    if (lane == 0 && t < p.num_queries)
      a.lse[static_cast<int64_t>(batch_head) * p.num_queries + t] =
          sum[r] > 0.0f ? (maximum[r] + log2f(sum[r])) * kLn2 : -INFINITY;
  }
  store_plain(a.o.rows<float>(batch, head), block_query + row, p.num_queries, p.head_dim, o,
              factors, false);
}

template <int kChunks>
__global__ void __launch_bounds__(kPlainThreads, 1) plain_dq_kernel(const BwdParams a) {
  const Problem& p = a.problem;
  const int tile_numel = plain_pitch(p.head_dim) * kPlainRows;
  float* q_tile = dynamic_smem<float>();
  float *do_tile = q_tile + tile_numel, *k_tile = do_tile + tile_numel;
  float* v_tile = k_tile + tile_numel;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int row = static_cast<int>(threadIdx.x) / kWarpSize * kPlainWarpRows;
  float* weights = v_tile + tile_numel + row * kPlainCols;

  const int num_blocks = (p.num_queries + kPlainRows - 1) / kPlainRows;
  const auto batch_head = static_cast<int>(blockIdx.x / num_blocks);
  const int batch = batch_head / p.num_heads, head = batch_head % p.num_heads;
  const int block_query = static_cast<int>(blockIdx.x % num_blocks) * kPlainRows;
  const int32_t* starts = p.starts(batch);
  const QuerySpan span = query_span(p, starts, block_query, kPlainRows);
  const auto k = a.k.rows<const float>(batch, head / p.group());
  const auto v = a.v.rows<const float>(batch, head / p.group());
  load_plain_tile(q_tile, a.q.rows<const float>(batch, head), block_query, p.num_queries,
                  p.head_dim);
  load_plain_tile(do_tile, a.d_out.rows<const float>(batch, head), block_query, p.num_queries,
                  p.head_dim);

  PlainSums<kChunks> dq{};
  KeyRange ranges[kPlainWarpRows];
  float lse[kPlainWarpRows], delta[kPlainWarpRows];
#pragma unroll
  for (int r = 0; r < kPlainWarpRows; ++r) {
    const int t = block_query + row + r;  // within the padding of the statistics
    ranges[r] = plain_range(p, starts, t);
    lse[r] = a.stats.lse(p, batch, head)[t];
    delta[r] = a.stats.lse(p, batch, head)[a.stats.delta_offset + t];
  }
  const float bias = p.bias(head);
  for (int key = span.first.first / kPlainCols * kPlainCols; key < span.last.end;
       key += kPlainCols) {
    __syncthreads();  // the former tile has been used
    load_plain_tile(k_tile, k, key, p.num_keys, p.head_dim);
    load_plain_tile(v_tile, v, key, p.num_keys, p.head_dim);
    __syncthreads();
    float s[kPlainWarpRows], dp[kPlainWarpRows];
    plain_dots(s, q_tile + row * plain_pitch(p.head_dim), k_tile, p.head_dim);
    plain_dots(dp, do_tile + row * plain_pitch(p.head_dim), v_tile, p.head_dim);
#pragma unroll
    for (int r = 0; r < kPlainWarpRows; ++r) {
      s[r] = plain_logit(s[r], p, ranges[r], block_query + row + r, key + lane, bias);
      dp[r] = exp2f(s[r] - lse[r]) * (dp[r] - delta[r]) * plain_slope(s[r], p);
    }
    add_weighted(dq, dp, weights, k_tile, p.head_dim);
  }
  store_plain(a.dq.rows<float>(batch, head), block_query + row, p.num_queries, p.head_dim, dq,
              {p.scale, p.scale, p.scale, p.scale}, a.accumulate_dq);
}

template <int kChunks>
__global__ void __launch_bounds__(kPlainThreads, 1) plain_dkv_kernel(const BwdParams a) {
  const Problem& p = a.problem;
  const int tile_numel = plain_pitch(p.head_dim) * kPlainRows;
  float* k_tile = dynamic_smem<float>();
  float *v_tile = k_tile + tile_numel, *q_tile = v_tile + tile_numel;
  float* do_tile = q_tile + tile_numel;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int row = static_cast<int>(threadIdx.x) / kWarpSize * kPlainWarpRows;
  float* weights = do_tile + tile_numel + row * kPlainCols;
  auto* block = dynamic_smem<KeyBlock>((4 * tile_numel + kPlainRows * kPlainCols) * sizeof(float));
  block->set(p, blockIdx.x, kPlainRows, kPlainCols);
  __syncthreads();
  const int batch = block->batch, kv_head = block->kv_head, block_key = block->key;
  load_plain_tile(k_tile, a.k.rows<const float>(batch, kv_head), block_key, p.num_keys, p.head_dim);
  load_plain_tile(v_tile, a.v.rows<const float>(batch, kv_head), block_key, p.num_keys, p.head_dim);

  PlainSums<kChunks> dk{}, dv{};
  for (int head = block->head_begin; head < block->head_end; ++head) {
    const float bias = p.bias(head);
    const float* lse = a.stats.lse(p, batch, head);
    for (int query = block->query_begin; query < block->query_end; query += kPlainCols) {
      __syncthreads();  // the former tile has been used
      load_plain_tile(q_tile, a.q.rows<const float>(batch, head), query, p.num_queries, p.head_dim);
      load_plain_tile(do_tile, a.d_out.rows<const float>(batch, head), query, p.num_queries,
                      p.head_dim);
      __syncthreads();
      const KeyRange range = plain_range(p, block->starts, query + lane);
      float s[kPlainWarpRows], dp[kPlainWarpRows];
      plain_dots(s, k_tile + row * plain_pitch(p.head_dim), q_tile, p.head_dim);
      plain_dots(dp, v_tile + row * plain_pitch(p.head_dim), do_tile, p.head_dim);
#pragma unroll
      for (int r = 0; r < kPlainWarpRows; ++r) {
        const float logit = plain_logit(s[r], p, range, query + lane, block_key + row + r, bias);
        s[r] = exp2f(logit - lse[query + lane]);
        dp[r] = s[r] * (dp[r] - lse[a.stats.delta_offset + query + lane]) * plain_slope(logit, p);
      }
      add_weighted(dv, s, weights, do_tile, p.head_dim);
      add_weighted(dk, dp, weights, q_tile, p.head_dim);
    }
  }
  if (a.dk.data != nullptr)
    store_plain(a.dk.rows<float>(batch, kv_head), block_key + row, p.num_keys, p.head_dim, dk,
                {p.scale, p.scale, p.scale, p.scale}, a.accumulate_dk);
  if (a.dv.data != nullptr)
    store_plain(a.dv.rows<float>(batch, kv_head), block_key + row, p.num_keys, p.head_dim, dv,
                {1.0f, 1.0f, 1.0f, 1.0f}, a.accumulate_dv);
}

/// Calls f<kChunks>() with the 32-column chunks of a head's width.
template <class F>
void visit_plain(const AttentionShape& s, F&& f) {
  if (s.head_dim <= 64) return f.template operator()<2>();
  if (s.head_dim <= 128) return f.template operator()<4>();
  return f.template operator()<8>();
}

inline LaunchConfig plain_config(int64_t num_heads, int64_t num_rows, size_t smem_bytes,
                                 CUstream_st* stream) {
  return {.grid = dim3(grid_blocks(num_heads * ceil_div(num_rows, kPlainRows))),
          .block = dim3(kPlainThreads),
          .smem_bytes = smem_bytes,
          .stream = stream};
}

inline void plain_fwd(CUstream_st* stream, const AttentionFwd& a) {
  const AttentionShape& s = a.shape;
  visit_plain(s, [&]<int kChunks>() {
    launch(
        "attention_fwd", &plain_fwd_kernel<kChunks>,
        plain_config(s.batch * s.num_heads, s.num_queries, plain_smem_bytes(s.head_dim, 3), stream),
        make_fwd_params(a));
  });
}

inline void plain_dq(CUstream_st* stream, const AttentionBwd& a) {
  const AttentionShape& s = a.shape;
  visit_plain(s, [&]<int kChunks>() {
    launch(
        "attention_dq", &plain_dq_kernel<kChunks>,
        plain_config(s.batch * s.num_heads, s.num_queries, plain_smem_bytes(s.head_dim, 4), stream),
        make_bwd_params(a));
  });
}

inline void plain_dkv(CUstream_st* stream, const AttentionBwd& a) {
  const AttentionShape& s = a.shape;
  visit_plain(s, [&]<int kChunks>() {
    launch("attention_dkv", &plain_dkv_kernel<kChunks>,
           plain_config(s.batch * s.num_kv_heads, s.num_keys,
                        plain_smem_bytes(s.head_dim, 4) + sizeof(KeyBlock), stream),
           make_bwd_params(a));
  });
}

}  // namespace
}  // namespace tessera::kernels::cuda
