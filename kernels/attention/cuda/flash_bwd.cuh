#pragma once

#include "kernels/attention/cuda/flash.cuh"

// Backward on tensor cores, in two passes without atomics: each gradient is summed by one block in
// a fixed order, at the price of computing the logits and dP twice (7 products instead of 5).
//
//   P = 2^(logits - lse)    dP = dO V'    dS = P (dP - delta),  delta = rowsum(dO O)
//   dV = P' dO              dQ = scale dS K                      dK = scale dS' Q
//
// lse (in powers of 2) and delta are written before, by attention_stats_kernel.
//
// dQ          A block takes kRows queries of one head as in the forward: a warp's part of S, dP and
//             dQ stays in its registers. K and V come in two stages: the next tile is on its way
//             while one is used.
// dK, dV      A block takes kKeys keys of one key/value head and walks the queries of all heads
//             that share it, head by head in ascending order. GEMMs are transposed (S' = K Q'), so
//             that P' and dS' are a warp's own operands of dV += P' dO and dK += dS' Q. Q, dO and
//             their statistics come in two stages. Blocks that see most queries start first.
// Width 256   dK and dV do not fit into the registers together: two launches.
// kSmall      Tiles for devices whose blocks have 99 KiB of shared memory (compute capability 8.6,
//             8.9, 12.x) where the others take more: chosen at the launch, by what the device says.
// Masks       as in the forward: tiles that see nothing of each other are skipped by block and
//             warp, tiles on a border are masked.
// Soft-cap    S holds t = tanh(scale Q K' / softcap) until the exponential; dS counts times 1 - t^2.

namespace tessera::kernels::cuda {
namespace {

template <int kWidth, bool kSmall = false>
struct DqTiles {
  static constexpr int kWarps = kSmall && kWidth > 128 ? 2 : 4, kThreads = kWarps * kWarpSize;
  static constexpr int kRowTiles = kWidth <= 128 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kRowTiles, kRows = kWarps * kWarpRows;
  static constexpr int kKeys = kWidth <= 64 ? 64 : kSmall ? 16 : 32;
  static constexpr int kPitch = kPitchOf<kWidth>;
  static constexpr int64_t kTileBytes = (2 * kRows + 4 * kKeys) * kPitch * sizeof(uint16_t);
  static constexpr int64_t kStatsOffset = kTileBytes + sizeof(QueryBlock<BFloat16, kWarps>);
  static constexpr size_t kSmemBytes = kStatsOffset + 2 * kRows * sizeof(float);
};

template <int kWidth, bool kSmall = false>
struct DkvTiles {
  static constexpr int kRowTiles = kWidth <= 64 ? 2 : 1;
  static constexpr int kWarps = kWidth <= 64 ? 4 : kWidth <= 128 ? 8 : kSmall ? 2 : 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kWarpKeys = 16 * kRowTiles, kKeys = kWarps * kWarpKeys;
  static constexpr int kQueries = kSmall && kWidth > 96                    ? 16
                                  : kSmall || kWidth <= 64 || kWidth > 128 ? 32
                                                                           : 64;
  static constexpr int kPitch = kPitchOf<kWidth>;
  static constexpr int64_t kTileBytes = (2 * kKeys + 4 * kQueries) * kPitch * sizeof(uint16_t);
  static constexpr int64_t kBlockOffset = kTileBytes + 4 * kQueries * sizeof(float);
  static constexpr size_t kSmemBytes = kBlockOffset + sizeof(KeyBlock);
};

/// Turns logits into P and dP into dS; row i of a lane has its statistics at lse[8 i] and delta.
template <bool kCapped, int kRowTiles, int kColTiles>
__device__ inline void softmax_backward(Accumulator<kRowTiles, kColTiles>& s,
                                        Accumulator<kRowTiles, kColTiles>& dp, const float* lse,
                                        const float* delta, float logit_scale) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const float row_lse = lse[i * 8], row_delta = delta[i * 8];
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
      for (int e = i % 2 * 2; e < i % 2 * 2 + 2; ++e) {
        const float p = exp2_approx(s[i / 2][n][e] * logit_scale - row_lse);
        dp[i / 2][n][e] = p * (dp[i / 2][n][e] - row_delta);
        if (kCapped) dp[i / 2][n][e] *= cap_slope(s[i / 2][n][e]);
      }
    }
  }
}

template <int kRowTiles, int kColTiles>
__device__ inline void scale_by(Accumulator<kRowTiles, kColTiles>& acc, float factor) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[r][n][i] *= factor;
    }
  }
}

template <class T, int kWidth, bool kSmall, bool kCapped>
__global__ void __launch_bounds__(DqTiles<kWidth, kSmall>::kThreads, 2)
    flash_dq_kernel(const BwdParams a) {
  using Tiles = DqTiles<kWidth, kSmall>;
  constexpr int kRowTiles = Tiles::kRowTiles, kKeys = Tiles::kKeys, kThreads = Tiles::kThreads;
  constexpr int kRowNumel = Tiles::kRows * Tiles::kPitch, kKeyNumel = kKeys * Tiles::kPitch;
  const Problem& p = a.problem;
  T* q_tile = dynamic_smem<T>();
  T* do_tile = q_tile + kRowNumel;
  T* k_tiles = do_tile + kRowNumel;  // two stages
  T* v_tiles = k_tiles + 2 * kKeyNumel;
  auto* block = dynamic_smem<QueryBlock<T, Tiles::kWarps>>(Tiles::kTileBytes);
  float* stats = dynamic_smem<float>(Tiles::kStatsOffset);
  block->set(p, a.k, a.v, blockIdx.x, Tiles::kWarpRows);
  __syncthreads();

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const bool is_biased = p.negate || p.alibi_slopes != nullptr;
  int key = block->spans[0].first.first / kKeys * kKeys;
  const auto load_keys = [&](int stage, int from) {
    load_tile<kKeys, kWidth, kThreads>(k_tiles + stage * kKeyNumel, a.k.rows_at(block->k), from,
                                       p.num_keys, p.head_dim, a.is_vectorized);
    load_tile<kKeys, kWidth, kThreads>(v_tiles + stage * kKeyNumel, a.v.rows_at(block->v), from,
                                       p.num_keys, p.head_dim, a.is_vectorized);
  };
  load_tile<Tiles::kRows, kWidth, kThreads>(q_tile, a.q.rows<const T>(block->batch, block->head),
                                            block->query, p.num_queries, p.head_dim,
                                            a.is_vectorized);
  load_tile<Tiles::kRows, kWidth, kThreads>(
      do_tile, a.d_out.rows<const T>(block->batch, block->head), block->query, p.num_queries,
      p.head_dim, a.is_vectorized);
  load_keys(0, key);
  cp_async_commit();
  for (int i = static_cast<int>(threadIdx.x); i < Tiles::kRows; i += kThreads) {
    const int t = block->query + i;
    const float* lse = a.stats.lse(p, block->batch, block->head) + t;
    stats[i] = t < p.num_queries ? lse[0] : INFINITY;
    stats[Tiles::kRows + i] = t < p.num_queries ? lse[a.stats.delta_offset] : 0.0f;
  }

  Accumulator<kRowTiles, kWidth / 8> dq;
  set_zero(dq);
  const int row = warp * Tiles::kWarpRows;
  for (int stage = 0; key < block->key_end; key += kKeys, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this tile is here, the other stage is free
    if (key + kKeys < block->key_end) load_keys(stage ^ 1, key + kKeys);
    cp_async_commit();
    const QuerySpan span = block->spans[warp];
    if (!__any_sync(kFullMask, span.sees(key, kKeys))) continue;
    Accumulator<kRowTiles, kKeys / 8> s, dp;
    set_zero(s);
    set_zero(dp);
    multiply_transposed<kWidth, T>(s, q_tile + row * Tiles::kPitch, k_tiles + stage * kKeyNumel);
    if (kCapped) cap_logits(s, p);
    if (is_biased) bias_logits<false>(s, p, block->query + row, key, block->bias);
    if (!span.sees_all(key, kKeys))
      mask_logits<false>(s, p, block->starts, block->query + row, key);
    multiply_transposed<kWidth, T>(dp, do_tile + row * Tiles::kPitch, v_tiles + stage * kKeyNumel);
    const float* row_stats = stats + row + lane / 4;
    softmax_backward<kCapped>(s, dp, row_stats, row_stats + Tiles::kRows, p.logit_scale);
    multiply<kWidth, T>(dq, dp, k_tiles + stage * kKeyNumel);
  }
  cp_async_wait<0>();
  __syncthreads();  // also where there was no tile
  scale_by(dq, p.scale);
  store_rows<kWidth>(a.dq.rows<T>(block->batch, block->head), block->query + row, p.num_queries,
                     p.head_dim, dq, q_tile + row * Tiles::kPitch, a.is_dq_vectorized,
                     a.accumulate_dq);
}

/// P' and dS' of a transposed tile: the columns are queries, whose statistics are in shared memory.
template <int kRowTiles, int kColTiles>
__device__ inline void exponentiate_columns(Accumulator<kRowTiles, kColTiles>& s, const float* lse,
                                            float logit_scale) {
  const int col = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kColTiles; ++n) {
    const Vec<float, 2> column = load_vec<2>(lse + n * 8 + col);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[r][n][i] = exp2_approx(s[r][n][i] * logit_scale - column[i % 2]);
    }
  }
}

/// dS *= 1 - t^2 of a transposed tile; the capped logits are 2^(logit_scale t - lse) = P, of which
/// no more is left by now. Where P is 0, so is dS.
template <int kRowTiles, int kColTiles>
__device__ inline void multiply_cap_slopes(Accumulator<kRowTiles, kColTiles>& ds,
                                           const Accumulator<kRowTiles, kColTiles>& p,
                                           const float* lse, float logit_scale) {
  const int col = static_cast<int>(threadIdx.x) % 4 * 2;
  const float inverse = rcp_approx(logit_scale);
#pragma unroll
  for (int n = 0; n < kColTiles; ++n) {
    const Vec<float, 2> column = load_vec<2>(lse + n * 8 + col);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ds[r][n][i] *= cap_slope((log2_approx(p[r][n][i]) + column[i % 2]) * inverse);
    }
  }
}

template <int kRowTiles, int kColTiles>
__device__ inline void subtract_delta_columns(Accumulator<kRowTiles, kColTiles>& dp,
                                              const Accumulator<kRowTiles, kColTiles>& p,
                                              const float* delta) {
  const int col = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kColTiles; ++n) {
    const Vec<float, 2> column = load_vec<2>(delta + n * 8 + col);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dp[r][n][i] = p[r][n][i] * (dp[r][n][i] - column[i % 2]);
    }
  }
}

/// kDk, kDv: which of the two this launch computes. A null destination is not written.
template <class T, int kWidth, bool kSmall, bool kCapped, bool kDk, bool kDv>
__global__ void __launch_bounds__(DkvTiles<kWidth, kSmall>::kThreads,
                                  kWidth > 128 ? 2 : 8 / DkvTiles<kWidth, kSmall>::kWarps)
    flash_dkv_kernel(const BwdParams a) {
  using Tiles = DkvTiles<kWidth, kSmall>;
  constexpr int kRowTiles = Tiles::kRowTiles, kThreads = Tiles::kThreads;
  constexpr int kQueries = Tiles::kQueries, kQueryNumel = kQueries * Tiles::kPitch;
  const Problem& p = a.problem;
  T* k_tile = dynamic_smem<T>();
  T* v_tile = k_tile + Tiles::kKeys * Tiles::kPitch;
  T* q_tiles = v_tile + Tiles::kKeys * Tiles::kPitch;  // two stages
  T* do_tiles = q_tiles + 2 * kQueryNumel;
  float* stats = dynamic_smem<float>(Tiles::kTileBytes);  // two stages of lse and delta

  auto* block = dynamic_smem<KeyBlock>(Tiles::kBlockOffset);
  block->set(p, blockIdx.x, Tiles::kKeys, kQueries);
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x) / kWarpSize * Tiles::kWarpKeys;
  const bool is_biased = p.negate || p.alibi_slopes != nullptr;

  const auto load_queries = [&](int stage, int head, int query) {
    const int batch = block->batch;
    load_tile<kQueries, kWidth, kThreads>(q_tiles + stage * kQueryNumel,
                                          a.q.rows<const T>(batch, head), query, p.num_queries,
                                          p.head_dim, a.is_vectorized);
    load_tile<kQueries, kWidth, kThreads>(do_tiles + stage * kQueryNumel,
                                          a.d_out.rows<const T>(batch, head), query, p.num_queries,
                                          p.head_dim, a.is_vectorized);
    const int i = static_cast<int>(threadIdx.x);
    if (i < kQueries / 2) {  // 4 floats each, first of lse, then of delta
      const int64_t offset =
          i < kQueries / 4 ? i * 4 : a.stats.delta_offset + (i - kQueries / 4) * 4;
      cp_async_16(stats + stage * 2 * kQueries + i * 4,
                  a.stats.lse(p, batch, head) + query + offset);
    }
  };
  load_tile<Tiles::kKeys, kWidth, kThreads>(k_tile, a.k.rows<const T>(block->batch, block->kv_head),
                                            block->key, p.num_keys, p.head_dim, a.is_vectorized);
  load_tile<Tiles::kKeys, kWidth, kThreads>(v_tile, a.v.rows<const T>(block->batch, block->kv_head),
                                            block->key, p.num_keys, p.head_dim, a.is_vectorized);
  int query = block->query_begin, head = block->head_begin;
  if (head < block->head_end) load_queries(0, head, query);
  cp_async_commit();

  Accumulator<kRowTiles, kWidth / 8> dk, dv;
  if (kDk) set_zero(dk);
  if (kDv) set_zero(dv);
  for (int stage = 0; head < block->head_end; stage ^= 1) {
    int next_query = query + kQueries, next_head = head;
    if (next_query >= block->query_end) next_query = block->query_begin, ++next_head;
    cp_async_wait<0>();
    __syncthreads();  // this tile is here, the other stage is free
    if (next_head < block->head_end) load_queries(stage ^ 1, next_head, next_query);
    cp_async_commit();
    const int key = block->key + row;
    const QuerySpan span = query_span(p, block->starts, query, kQueries);
    if (__any_sync(kFullMask, span.sees(key, Tiles::kWarpKeys))) {
      const T* q_tile = q_tiles + stage * kQueryNumel;
      const T* do_tile = do_tiles + stage * kQueryNumel;
      const float* lse = stats + stage * 2 * kQueries;
      Accumulator<kRowTiles, kQueries / 8> s;
      set_zero(s);
      multiply_transposed<kWidth, T>(s, k_tile + row * Tiles::kPitch, q_tile);
      if (kCapped) cap_logits(s, p);
      if (is_biased) bias_logits<true>(s, p, query, key, p.bias(head));
      if (!span.sees_all(key, Tiles::kWarpKeys)) mask_logits<true>(s, p, block->starts, query, key);
      exponentiate_columns(s, lse, p.logit_scale);
      if (kDv) multiply<kWidth, T>(dv, s, do_tile);
      if (kDk) {
        Accumulator<kRowTiles, kQueries / 8> dp;
        set_zero(dp);
        multiply_transposed<kWidth, T>(dp, v_tile + row * Tiles::kPitch, do_tile);
        subtract_delta_columns(dp, s, lse + kQueries);
        if (kCapped) multiply_cap_slopes(dp, s, lse, p.logit_scale);
        multiply<kWidth, T>(dk, dp, q_tile);
      }
    }
    query = next_query, head = next_head;
  }
  cp_async_wait<0>();
  __syncthreads();  // also where there was no tile
  const int batch = block->batch, kv_head = block->kv_head, key = block->key + row;
  if (kDk && a.dk.data != nullptr) {
    scale_by(dk, p.scale);
    store_rows<kWidth>(a.dk.rows<T>(batch, kv_head), key, p.num_keys, p.head_dim, dk,
                       k_tile + row * Tiles::kPitch, a.is_dk_vectorized, a.accumulate_dk);
  }
  if (kDv && a.dv.data != nullptr) {
    store_rows<kWidth>(a.dv.rows<T>(batch, kv_head), key, p.num_keys, p.head_dim, dv,
                       v_tile + row * Tiles::kPitch, a.is_dv_vectorized, a.accumulate_dv);
  }
}

template <int kWidth, bool kSmall = false>
LaunchConfig flash_dq_config(const AttentionShape& s) {
  using Tiles = DqTiles<kWidth, kSmall>;
  return {.grid = dim3(grid_blocks(s.batch * s.num_heads * ceil_div(s.num_queries, Tiles::kRows))),
          .block = dim3(Tiles::kThreads),
          .smem_bytes = Tiles::kSmemBytes};
}

template <int kWidth, bool kSmall = false>
LaunchConfig flash_dkv_config(const AttentionShape& s) {
  using Tiles = DkvTiles<kWidth, kSmall>;
  return {.grid = dim3(grid_blocks(s.batch * s.num_kv_heads * ceil_div(s.num_keys, Tiles::kKeys))),
          .block = dim3(Tiles::kThreads),
          .smem_bytes = Tiles::kSmemBytes};
}

/// Calls f<kSmall>() with whether the device needs the small tiles; those of widths that fit
/// everywhere are never compiled. `kOnlySmall`: they serve all devices.
template <class Tiles, bool kOnlySmall = false, class F>
void visit_tiles(F&& f) {
  constexpr size_t kEverywhere = 99 * 1024;
  if constexpr (kOnlySmall) {
    f.template operator()<true>();
  } else {
    if constexpr (Tiles::kSmemBytes > kEverywhere) {
      if (Tiles::kSmemBytes > tessera::cuda::max_smem_bytes()) return f.template operator()<true>();
    }
    f.template operator()<false>();
  }
}

template <class T, int kWidth>
void launch_flash_dq(CUstream_st* stream, const AttentionBwd& a) {
  visit_tiles<DqTiles<kWidth>>([&]<bool kSmall>() {
    LaunchConfig config = flash_dq_config<kWidth, kSmall>(a.shape);
    config.stream = stream;
    visit_cap(a.shape, [&]<bool kCapped>() {
      launch("attention_dq", &flash_dq_kernel<T, kWidth, kSmall, kCapped>, config,
             make_bwd_params(a));
    });
  });
}

template <class T, int kWidth>
void launch_flash_dkv(CUstream_st* stream, const AttentionBwd& a) {
  visit_cap(a.shape, [&]<bool kCapped>() {
    // At width 128 the large tiles leave no register for the soft-cap.
    visit_tiles<DkvTiles<kWidth>, kCapped && kWidth == 128>([&]<bool kSmall>() {
      LaunchConfig config = flash_dkv_config<kWidth, kSmall>(a.shape);
      config.stream = stream;
      const BwdParams params = make_bwd_params(a);
      if constexpr (kWidth <= 128) {
        launch("attention_dkv", &flash_dkv_kernel<T, kWidth, kSmall, kCapped, true, true>, config,
               params);
      } else {
        if (a.dk != nullptr)
          launch("attention_dk", &flash_dkv_kernel<T, kWidth, kSmall, kCapped, true, false>, config,
                 params);
        if (a.dv != nullptr)
          launch("attention_dv", &flash_dkv_kernel<T, kWidth, kSmall, kCapped, false, true>, config,
                 params);
      }
    });
  });
}

}  // namespace
}  // namespace tessera::kernels::cuda
