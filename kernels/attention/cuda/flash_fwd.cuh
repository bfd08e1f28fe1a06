#pragma once

#include "kernels/attention/cuda/flash.cuh"

// Forward on tensor cores (FlashAttention-2's loop order: Dao 2023, arXiv:2307.08691).
//
//   S = Q K'    m, P = online softmax of S    O = O * 2^(former m - m) + P V    O / sum(P)
//
// Parallel    A block takes kRows queries of one head, a warp 32 (16) of them: its part of S, P and
//             O never leaves its registers, and each operand of K and V that it reads from shared
//             memory feeds two products. Blocks of a head follow each other, those that see most
//             keys first, so that K and V of a few heads stay in the L2 cache.
// Pipeline    V of a tile is on its way while S is computed, K of the next tile during the softmax
//             and P V. Two blocks share a multiprocessor and fill each other's waits.
// Masks       Tiles of keys that no query of the block (warp) sees are skipped; only tiles on a
//             border are masked. A masked key adds exact zeros and a former maximum scales by
//             exactly 1, so a query's result depends on nothing that it does not see.
// Registers   hold O and S; sums of P, masks and addresses are in shared memory between tiles.
// Order       Keys ascend; nothing depends on the number of multiprocessors.

namespace tessera::kernels::cuda {
namespace {

template <int kWidth>
struct FwdTiles {
  static constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
  static constexpr int kRowTiles = kWidth <= 128 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kRowTiles, kRows = kWarps * kWarpRows;
  static constexpr int kKeys = kWidth <= 128 ? 64 : 32;
  static constexpr int kPitch = kPitchOf<kWidth>;
  static constexpr int64_t kTileBytes = (kRows + 2 * kKeys) * kPitch * sizeof(uint16_t);
  static constexpr int64_t kSumOffset = kTileBytes + sizeof(QueryBlock<BFloat16, kWarps>);
  static constexpr size_t kSmemBytes = kSumOffset + 2 * kRowTiles * kThreads * sizeof(float);
};

/// One tile's step of the softmax: s becomes P; the maxima, the sums and o follow.
template <int kRowTiles, int kKeyTiles, int kColTiles>
__device__ inline void softmax_step(Accumulator<kRowTiles, kKeyTiles>& s,
                                    Accumulator<kRowTiles, kColTiles>& o,
                                    float (&maximum)[2 * kRowTiles], float* sums, int stride,
                                    float logit_scale) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int r = i / 2, first = i % 2 * 2;
    float latest = fmaxf(s[r][0][first], s[r][0][first + 1]);
#pragma unroll
    for (int n = 1; n < kKeyTiles; ++n)
      latest = fmaxf(latest, fmaxf(s[r][n][first], s[r][n][first + 1]));
    latest = fmaxf(latest, __shfl_xor_sync(kFullMask, latest, 1));
    latest = fmaxf(latest, __shfl_xor_sync(kFullMask, latest, 2));
    latest = fmaxf(maximum[i], latest * logit_scale);
    // A row that has seen nothing keeps -inf; a shift of 0 keeps it free of NaN.
    const float shift = latest == -INFINITY ? 0.0f : latest;
    const float factor = exp2_approx(maximum[i] - shift);
    maximum[i] = latest;
    float added = 0.0f;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = first; e < first + 2; ++e) {
        s[r][n][e] = exp2_approx(s[r][n][e] * logit_scale - shift);
        added += s[r][n][e];
      }
    }
    sums[i * stride] = sums[i * stride] * factor + added;
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      o[r][n][first] *= factor;
      o[r][n][first + 1] *= factor;
    }
  }
}

template <class T, int kWidth, bool kCapped>
__global__ void __launch_bounds__(FwdTiles<kWidth>::kThreads, 2)
    flash_fwd_kernel(const FwdParams a) {
  using Tiles = FwdTiles<kWidth>;
  constexpr int kRowTiles = Tiles::kRowTiles, kKeys = Tiles::kKeys, kThreads = Tiles::kThreads;
  const Problem& p = a.problem;
  T* q_tile = dynamic_smem<T>();
  T* k_tile = q_tile + Tiles::kRows * Tiles::kPitch;
  T* v_tile = k_tile + kKeys * Tiles::kPitch;

  auto* block = dynamic_smem<QueryBlock<T, Tiles::kWarps>>(Tiles::kTileBytes);
  block->set(p, a.k, a.v, blockIdx.x, Tiles::kWarpRows);
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  T* q_warp = q_tile + warp * Tiles::kWarpRows * Tiles::kPitch;
  const bool is_biased = p.negate || p.alibi_slopes != nullptr;
  int key = block->spans[0].first.first / kKeys * kKeys;
  load_tile<Tiles::kRows, kWidth, kThreads>(q_tile, a.q.rows<const T>(block->batch, block->head),
                                            block->query, p.num_queries, p.head_dim,
                                            a.is_vectorized);
  load_tile<kKeys, kWidth, kThreads>(k_tile, a.k.rows_at(block->k), key, p.num_keys, p.head_dim,
                                     a.is_vectorized);
  cp_async_commit();

  Accumulator<kRowTiles, kWidth / 8> o;
  set_zero(o);
  float maximum[2 * kRowTiles];
  float* sums = dynamic_smem<float>(Tiles::kSumOffset) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) maximum[i] = -INFINITY, sums[i * kThreads] = 0.0f;

  cp_async_wait<0>();
  __syncthreads();
  for (; key < block->key_end; key += kKeys) {
    load_tile<kKeys, kWidth, kThreads>(v_tile, a.v.rows_at(block->v), key, p.num_keys, p.head_dim,
                                       a.is_vectorized);
    cp_async_commit();
    const QuerySpan span = block->spans[warp];
    const bool is_seen = __any_sync(kFullMask, span.sees(key, kKeys));
    Accumulator<kRowTiles, kKeys / 8> s;
    set_zero(s);
    if (is_seen) {
      multiply_transposed<kWidth, T>(s, q_warp, k_tile);
      const int query = block->query + warp * Tiles::kWarpRows;
      if (kCapped) cap_logits(s, p);
      if (is_biased) bias_logits<false>(s, p, query, key, block->bias);
      if (!span.sees_all(key, kKeys)) mask_logits<false>(s, p, block->starts, query, key);
    }
    cp_async_wait<0>();
    __syncthreads();  // V is here, K is free
    if (key + kKeys < block->key_end)
      load_tile<kKeys, kWidth, kThreads>(k_tile, a.k.rows_at(block->k), key + kKeys, p.num_keys,
                                         p.head_dim, a.is_vectorized);
    cp_async_commit();
    if (is_seen) {
      softmax_step(s, o, maximum, sums, kThreads, p.logit_scale);
      multiply<kWidth, T>(o, s, v_tile);
    }
    cp_async_wait<0>();
    __syncthreads();  // the next K is here, V is free
  }

  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int query = block->query + warp * Tiles::kWarpRows;
  float* lse =
      a.lse + (static_cast<int64_t>(block->batch) * p.num_heads + block->head) * p.num_queries;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    float sum = sums[i * kThreads];
    sum += __shfl_xor_sync(kFullMask, sum, 1);
    sum += __shfl_xor_sync(kFullMask, sum, 2);
    const float inverse = sum > 0.0f ? rcp_approx(sum) : 0.0f;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      o[i / 2][n][i % 2 * 2] *= inverse;
      o[i / 2][n][i % 2 * 2 + 1] *= inverse;
    }
    const int t = query + i * 8 + lane / 4;
    if (lane % 4 == 0 && t < p.num_queries)
      lse[t] = sum > 0.0f ? (maximum[i] + log2_approx(sum)) * kLn2 : -INFINITY;
  }
  store_rows<kWidth>(a.o.rows<T>(block->batch, block->head), query, p.num_queries, p.head_dim, o,
                     q_warp, a.is_output_vectorized, false);
}

template <int kWidth>
LaunchConfig flash_fwd_config(const AttentionShape& s) {
  using Tiles = FwdTiles<kWidth>;
  return {.grid = dim3(grid_blocks(s.batch * s.num_heads * ceil_div(s.num_queries, Tiles::kRows))),
          .block = dim3(Tiles::kThreads),
          .smem_bytes = Tiles::kSmemBytes};
}

template <class T, int kWidth>
void launch_flash_fwd(CUstream_st* stream, const AttentionFwd& a) {
  LaunchConfig config = flash_fwd_config<kWidth>(a.shape);
  config.stream = stream;
  visit_cap(a.shape, [&]<bool kCapped>() {
    launch("attention_fwd", &flash_fwd_kernel<T, kWidth, kCapped>, config, make_fwd_params(a));
  });
}

}  // namespace
}  // namespace tessera::kernels::cuda
