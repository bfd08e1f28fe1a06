#pragma once

#include <cstdint>

#include "core/runtime/cuda/ptx.cuh"
#include "kernels/attention/cuda/params.cuh"

// What the attention kernels for tensor cores share: tiles in shared memory, the two products,
// masks and bias of the logits, and the write of a result.
//
// A tile holds rows of one head, padded with zeros to kWidth columns and to whole tiles. Its rows
// are kWidth + 8 elements apart: an odd number of 16-byte chunks, so that the eight rows which
// ldmatrix reads at once, or which eight lanes write at once, lie in different banks, and all
// addresses are one register and a constant.

namespace tessera::kernels::cuda {
namespace {

template <int kWidth>
constexpr int kPitchOf = kWidth + 8;

/// Starts to copy rows [begin, begin + kRows) into a tile; rows from `limit` on and columns from
/// head_dim on become zeros.
template <int kRows, int kWidth, int kThreads, class T>
__device__ inline void load_tile(T* tile, const HeadRows<const T>& from, int begin, int limit,
                                 int head_dim, bool is_vectorized) {
  constexpr int kPitch = kPitchOf<kWidth>;
  if (is_vectorized) {
    // A thread stays in one column of 16-byte chunks.
    constexpr int kChunks = kWidth / 8, kRowsAtOnce = kThreads / kChunks;
    const int first = static_cast<int>(threadIdx.x) / kChunks;
    const int col = static_cast<int>(threadIdx.x) % kChunks * 8;
    if (kThreads % kChunks != 0 && first >= kRowsAtOnce) return;  // threads left over
    const T* source = from.data + (begin + first) * from.stride + col;
    const int num_valid = col < head_dim ? limit - begin : 0;
#pragma unroll
    for (int i = 0; i < (kRows + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
      const int row = first + i * kRowsAtOnce;
      if (kRows % kRowsAtOnce != 0 && row >= kRows) break;
      cp_async_16(tile + row * kPitch + col, source, row < num_valid);
      source += kRowsAtOnce * from.stride;
    }
  } else {
#pragma unroll 1
    for (int item = static_cast<int>(threadIdx.x); item < kRows * kWidth; item += kThreads) {
      const int row = item / kWidth, col = item % kWidth;
      const bool valid = begin + row < limit && col < head_dim;
      tile[row * kPitch + col] =
          valid ? from.data[(begin + row) * from.stride + col] : from_float<T>(0.0f);
    }
  }
}

/// Calls f<T, kWidth>() with the element type and the head width rounded up to one that is
/// compiled.
template <class F>
void visit_flash(const AttentionShape& s, F&& f) {
  const auto visit_width = [&]<class T>() {
    if (s.head_dim <= 64) return f.template operator()<T, 64>();
    if (s.head_dim <= 80) return f.template operator()<T, 80>();
    if (s.head_dim <= 96) return f.template operator()<T, 96>();
    if (s.head_dim <= 128) return f.template operator()<T, 128>();
    static_assert(kMaxAttentionWidth == 256);
    return f.template operator()<T, 256>();
  };
  s.dtype == kBF16 ? visit_width.template operator()<BFloat16>()
                   : visit_width.template operator()<Float16>();
}

/// Calls f<kCapped>(): kernels with a soft-cap are compiled apart, as its registers would be missing
/// in the others.
template <class F>
void visit_cap(const AttentionShape& s, F&& f) {
  s.is_capped() ? f.template operator()<true>() : f.template operator()<false>();
}

/// Products of one warp, with f32 sums: acc[r][n] is the mma tile of rows 16 r and columns 8 n.
template <int kRowTiles, int kColTiles>
using Accumulator = float[kRowTiles][kColTiles][4];

template <int kRowTiles, int kColTiles>
__device__ inline void set_zero(Accumulator<kRowTiles, kColTiles>& acc) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[r][n][i] = 0.0f;
    }
  }
}

/// acc += a b' over kWidth columns; a [16 kRowTiles, kWidth] and b [8 kColTiles, kWidth] are tiles.
template <int kWidth, class T, int kRowTiles, int kColTiles>
__device__ inline void multiply_transposed(Accumulator<kRowTiles, kColTiles>& acc, const T* a,
                                           const T* b) {
  constexpr int kPitch = kPitchOf<kWidth>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  // Matrices of a: rows 0-7 and 8-15, then the same of the next 8 columns. Of b: columns 0-7 and
  // 8-15 of the sum's index, then the same of the next 8 rows.
  const T* a_lane = a + lane % 16 * kPitch + lane / 16 * 8;
  const T* b_lane = b + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 8;
  // Where the accumulators leave few registers, fragments must not be read far ahead.
  [[maybe_unused]] constexpr int kUnroll = kRowTiles * kWidth >= 256 ? 2 : 8;
#pragma unroll kUnroll
  for (int k = 0; k < kWidth; k += 16) {
    uint32_t fragment_a[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) ldmatrix_x4(fragment_a[r], a_lane + r * 16 * kPitch + k);
#pragma unroll
    for (int n = 0; n < kColTiles; n += 2) {
      uint32_t fragment_b[4];
      ldmatrix_x4(fragment_b, b_lane + n * 8 * kPitch + k);
      const uint32_t b_low[2] = {fragment_b[0], fragment_b[1]};
      const uint32_t b_high[2] = {fragment_b[2], fragment_b[3]};
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        mma_m16n8k16<T>(acc[r][n], fragment_a[r], b_low, acc[r][n]);
        mma_m16n8k16<T>(acc[r][n + 1], fragment_a[r], b_high, acc[r][n + 1]);
      }
    }
  }
}

/// acc += a b; a [16 kRowTiles, 8 kSumTiles] is another product, rounded to T: a lane's values of
/// two neighbouring mma tiles are its operand of the next mma. b [8 kSumTiles, kWidth] is a tile.
template <int kWidth, class T, int kRowTiles, int kSumTiles>
__device__ inline void multiply(Accumulator<kRowTiles, kWidth / 8>& acc,
                                const Accumulator<kRowTiles, kSumTiles>& a, const T* b) {
  constexpr int kPitch = kPitchOf<kWidth>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const T* b_lane = b + lane % 16 * kPitch + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kSumTiles; k += 2) {
    uint32_t fragment_a[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      fragment_a[r][0] = pack2<T>(a[r][k][0], a[r][k][1]);
      fragment_a[r][1] = pack2<T>(a[r][k][2], a[r][k][3]);
      fragment_a[r][2] = pack2<T>(a[r][k + 1][0], a[r][k + 1][1]);
      fragment_a[r][3] = pack2<T>(a[r][k + 1][2], a[r][k + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < kWidth / 8; n += 2) {
      uint32_t fragment_b[4];
      ldmatrix_x4_trans(fragment_b, b_lane + k * 8 * kPitch + n * 8);
      const uint32_t b_low[2] = {fragment_b[0], fragment_b[1]};
      const uint32_t b_high[2] = {fragment_b[2], fragment_b[3]};
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        mma_m16n8k16<T>(acc[r][n], fragment_a[r], b_low, acc[r][n]);
        mma_m16n8k16<T>(acc[r][n + 1], fragment_a[r], b_high, acc[r][n + 1]);
      }
    }
  }
}

/// Applies f(logit, query, key) to the logits of a warp's tile, whose rows are queries from `query`
/// on and whose columns are keys from `key` on; kTransposed: the other way round. Keys are relative
/// to the lane's first key, so that they are constants; f is called for a query at a time, with
/// what `begin_query(t, lane_key)` returns.
template <bool kTransposed, int kRowTiles, int kColTiles, class BeginQuery, class F>
__device__ inline void visit_logits(Accumulator<kRowTiles, kColTiles>& s, int query, int key,
                                    BeginQuery begin_query, F f) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int row = lane / 4, col = lane % 4 * 2;
  constexpr int kQueries = 2 * (kTransposed ? kColTiles : kRowTiles);
  constexpr int kKeys = 2 * (kTransposed ? kRowTiles : kColTiles);
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    const auto of_query = begin_query(query + (kTransposed ? i / 2 * 8 + i % 2 + col : i * 8 + row),
                                      key + (kTransposed ? row : col));
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      float& logit =
          kTransposed ? s[j / 2][i / 2][j % 2 * 2 + i % 2] : s[i / 2][j / 2][i % 2 * 2 + j % 2];
      logit = f(logit, kTransposed ? j * 8 : j / 2 * 8 + j % 2, of_query);
    }
  }
}

/// tanh(cap_scale logit) of a warp's logits, within 2^-22: as 1 - 2 / (e^2x + 1).
template <int kRowTiles, int kColTiles>
__device__ inline void cap_logits(Accumulator<kRowTiles, kColTiles>& s, const Problem& p) {
  const float inner = p.cap_scale * (2 * kLog2E);
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[r][n][i] = 1.0f - 2.0f * rcp_approx(exp2_approx(s[r][n][i] * inner) + 1.0f);
    }
  }
}

/// -inf for keys that a query does not see; queries past the last see none.
template <bool kTransposed, int kRowTiles, int kColTiles>
__device__ inline void mask_logits(Accumulator<kRowTiles, kColTiles>& s, const Problem& p,
                                   const int32_t* starts, int query, int key) {
  struct Range {
    int first;
    unsigned count;
  };
  visit_logits<kTransposed>(
      s, query, key,
      [&](int t, int lane_key) -> Range {
        if (t >= p.num_queries) return {0, 0};
        const KeyRange range = visible_keys(p, starts, t);
        return {range.first - lane_key, static_cast<unsigned>(max(0, range.end - range.first))};
      },
      [](float logit, int k, Range range) {
        return static_cast<unsigned>(k - range.first) < range.count ? logit : -INFINITY;
      });
}

/// Negates the logits if need be and subtracts bias |position - key|.
template <bool kTransposed, int kRowTiles, int kColTiles>
__device__ inline void bias_logits(Accumulator<kRowTiles, kColTiles>& s, const Problem& p,
                                   int query, int key, float bias) {
  const float sign = p.negate ? -1.0f : 1.0f;
  visit_logits<kTransposed>(
      s, query, key,
      [&](int t, int lane_key) {
        return static_cast<float>(p.num_keys - p.num_queries + t - lane_key);
      },
      [=](float logit, int k, float position) {
        return logit * sign - bias * fabsf(position - static_cast<float>(k));
      });
}

/// Writes a warp's rows [begin, begin + 16 kRowTiles) below `limit`, or adds to them. `staging` is
/// a tile of those rows that no other warp reads: whole rows leave 16 bytes at a time.
template <int kWidth, class T, int kRowTiles>
__device__ inline void store_rows(const HeadRows<T>& to, int begin, int limit, int head_dim,
                                  const Accumulator<kRowTiles, kWidth / 8>& acc, T* staging,
                                  bool is_vectorized, bool accumulate) {
  constexpr int kPitch = kPitchOf<kWidth>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int g = lane / 4, col = lane % 4 * 2;
  if (is_vectorized && !accumulate) {
    __syncwarp();  // all lanes have read what was here
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const uint32_t pair = pack2<T>(acc[i / 2][n][i % 2 * 2], acc[i / 2][n][i % 2 * 2 + 1]);
        *reinterpret_cast<uint32_t*>(staging + (i * 8 + g) * kPitch + n * 8 + col) = pair;
      }
    }
    __syncwarp();
    constexpr int kChunks = kWidth / 8;
#pragma unroll
    for (int item = lane; item < 16 * kRowTiles * kChunks; item += kWarpSize) {
      const int row = item / kChunks, c = item % kChunks * 8;
      if (begin + row < limit && c < head_dim)
        store_vec(to.data + (begin + row) * to.stride + c,
                  load_vec<8>(static_cast<const T*>(staging + row * kPitch + c)));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = begin + i * 8 + g;
    if (row >= limit) continue;
    T* dst = to.data + row * to.stride;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int c = n * 8 + col + e;
        if (c >= head_dim) continue;
        const float value = acc[i / 2][n][i % 2 * 2 + e];
        dst[c] = from_float<T>(accumulate ? to_float(dst[c]) + value : value);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels::cuda
