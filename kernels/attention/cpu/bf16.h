#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/attention/cpu/blocks.h"

// Attention of bf16 in the processor's own products (AVX512-BF16): sums in f32 of products of two
// bf16 values at a time. Private to kernels/attention/cpu/attention.cc, whose banner has the layout and the
// names; here
//   pairs    A product's operands give two neighbours along the sum in each 32-bit word. Rows of K
//            and V, and P and dS by rows, are such words as they lie; "pairs" of a matrix are its
//            rows 2 r and 2 r + 1 interleaved, which a sum over rows takes.
//   scale    Q is taken as it is; logits stand divided by the scale until the exponential, or until
//            they are capped.
//   rounding P and dS are rounded to bf16 before they are multiplied; the softmax's sums are not.

#if TESSERA_AVX512 && defined(__AVX512BF16__)
#define TESSERA_ATTENTION_BF16 1
#else
#define TESSERA_ATTENTION_BF16 0
#endif

#if TESSERA_ATTENTION_BF16

namespace tessera::kernels::cpu {

/// Two bf16 values, the first in the low half.
using Pair = uint32_t;

inline constexpr int kPairLanes = kLanes<float>;

/// c[i][j] (+)= sum_r a(i, r) . b[r][j] for M x (N vectors) in registers; a(i, r) is the pair
/// a[i * lda + 2 r] of bf16 values or, of pairs, a[r * lda + i]. Sums over r in order.
template <int M, int N, bool kOfPairs>
inline void multiply_pairs_tile(float* c, int64_t ldc, const void* a, int64_t lda, const Pair* b,
                                int64_t ldb, int64_t depth, bool add) {
  Vector<float> sum[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      sum[i][j] = add ? load(c + i * ldc + j * kPairLanes) : Vector<float>{};
    }
  }
  for (int64_t r = 0; r < depth; ++r) {
    __m512bh row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) row[j] = (__m512bh)_mm512_loadu_si512(b + r * ldb + j * kPairLanes);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      Pair pair;
      const int64_t at = kOfPairs ? 4 * (r * lda + i) : 2 * i * lda + 4 * r;
      std::memcpy(&pair, static_cast<const char*>(a) + at, sizeof pair);
      const auto factor = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        sum[i][j] = (Vector<float>)_mm512_dpbf16_ps((__m512)sum[i][j], factor, row[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(c + i * ldc + j * kPairLanes, sum[i][j]);
  }
}

template <int M, int N, bool kOfPairs>
inline void multiply_pairs_rows(int64_t rows, float* c, int64_t ldc, const void* a, int64_t lda,
                                const Pair* b, int64_t ldb, int64_t depth, bool add) {
  for (; rows >= M; rows -= M, c += M * ldc) {
    multiply_pairs_tile<M, N, kOfPairs>(c, ldc, a, lda, b, ldb, depth, add);
    a = static_cast<const char*>(a) + M * (kOfPairs ? 4 : 2 * lda);
  }
  if constexpr (M > 1) {
    constexpr int kNext = M > 4 ? 4 : M / 2;
    if (rows > 0) multiply_pairs_rows<kNext, N, kOfPairs>(rows, c, ldc, a, lda, b, ldb, depth, add);
  }
}

/// The same for `rows` rows and `vectors` vectors of columns.
template <bool kOfPairs>
inline void multiply_pairs(int64_t rows, int vectors, float* c, int64_t ldc, const void* a,
                           int64_t lda, const Pair* b, int64_t ldb, int64_t depth, bool add) {
  const auto columns = [&]<int N>() {
    multiply_pairs_rows<N == 4 ? 6 : 8, N, kOfPairs>(rows, c, ldc, a, lda, b, ldb, depth, add);
    c += N * kPairLanes, b += N * kPairLanes, vectors -= N;
  };
  while (vectors >= 4) columns.template operator()<4>();
  if (vectors == 3) columns.template operator()<3>();
  if (vectors == 2) columns.template operator()<2>();
  if (vectors == 1) columns.template operator()<1>();
}

/// Each lane's `first` and `second`, rounded, as a pair.
inline __m512i pairs_of(Vector<float> first, Vector<float> second) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto both =
      (__m512i)_mm512_maskz_cvtne2ps_pbh(~__mmask32{0}, (__m512)second, (__m512)first);
  return _mm512_maskz_permutexvar_epi16(~__mmask32{0}, _mm512_load_si512(kInterleave), both);
}

/// dst[r][c] = the pair of rows 2 r and 2 r + 1 of src, [(rows + 1) / 2][width]; zero where there
/// is no row or column.
inline void interleave_rows(Pair* dst, int64_t width, const BFloat16* src, int64_t stride,
                            int64_t rows, int64_t cols) {
  for (int64_t row = 0; row < rows; row += 2, src += 2 * stride, dst += width) {
    for (int64_t c = 0; c < width; c += kPairLanes) {
      const auto lanes = static_cast<int>(std::clamp<int64_t>(cols - c, 0, kPairLanes));
      const auto mask = static_cast<__mmask16>((1u << lanes) - 1);
      const auto half = [&](const BFloat16* from, bool is_there) {
        const auto wanted = static_cast<__mmask16>(is_there ? mask : 0);
        return (Vector<Pair>)_mm512_maskz_cvtepu16_epi32(
            tessera::cpu::kEveryLane, _mm256_maskz_loadu_epi16(wanted, from + c));
      };
      const Vector<Pair> second = half(src + stride, row + 1 < rows);
      store(dst + c, half(src, true) | second << 16);
    }
  }
}

/// Rows of the block as they are, [kRows][width], zero where there is no row or column.
inline void copy_rows(const AttentionShape& s, const Block<float>& block, const void* base,
                      const HeadStrides& strides, int64_t width, BFloat16* dst) {
  std::memset(static_cast<void*>(dst), 0, static_cast<size_t>(kRows * width) * sizeof(BFloat16));
  for (int64_t i = 0; i < block.count; ++i) {
    const BFloat16* row = static_cast<const BFloat16*>(base) + block.batch * strides.batch +
                          block.query(s, i) * strides.time + block.head(s, i) * strides.head;
    std::copy_n(row, s.head_dim, dst + i * width);
  }
}

/// dst[c][i] = pair c of row i: rows as the columns of a product's second operand.
inline void transpose_pairs(Pair* dst, const BFloat16* rows, int64_t width) {
  transpose(dst, kRows, reinterpret_cast<const Pair*>(rows), width / 2, kRows, width / 2, Pair{1});
}

/// A tile of keys or values by rows whose length is even: in place, or padded in `buffer`.
struct PairTile {
  const BFloat16* data;
  int64_t stride;

  PairTile(const Rows<const BFloat16>& rows, int64_t begin, int64_t num_keys, int64_t head_dim,
           BFloat16* buffer)
      : data(rows.data + begin * rows.stride), stride(rows.stride) {
    if (head_dim % 2 == 0) return;
    for (int64_t k = 0; k < num_keys; ++k) {
      std::copy_n(data + k * stride, head_dim, buffer + k * (head_dim + 1));
      buffer[k * (head_dim + 1) + head_dim].bits = 0;
    }
    data = buffer;
    stride = head_dim + 1;
  }
};

/// Memory of a block's task.
struct ForwardPairs {
  static constexpr int64_t kArea = kRows * kMaxAttentionWidth;
  alignas(64) float o[kArea], o_rows[kArea];
  alignas(64) float p[kKeys * kRows];
  alignas(64) Pair q[kArea / 2], v[kArea / 2], p_pairs[kKeys / 2 * kRows];
  alignas(64) BFloat16 rows[kArea], buffer[kArea];
};

/// P of one run as pairs of keys.
inline void pair_keys(const Run& run, const float* p, Pair* pairs) {
  for (int64_t k = run.begin; k < run.end; k += 2) {
    for (int j = run.low; j < run.high; ++j) {
      const float* at = p + k * kRows + j * kPairLanes;
      const Vector<float> second = k + 1 < run.end ? load(at + kRows) : Vector<float>{};
      _mm512_storeu_si512(pairs + k / 2 * kRows + j * kPairLanes, pairs_of(load(at), second));
    }
  }
}

inline void forward_block_bf16(const AttentionFwd& a, int64_t batch, int64_t kv_head,
                               int64_t block_index) {
  using T = BFloat16;
  const AttentionShape& s = a.shape;
  const int64_t D = s.head_dim, width = padded_width(D), pairs = (D + 1) / 2;
  const auto scale = static_cast<float>(s.scale), cap = static_cast<float>(s.softcap);
  const float unit = s.is_capped() ? 1.0f : scale;
  ForwardPairs tiles;
  const Block<float> block(s, batch, kv_head, block_index, unit);
  copy_rows(s, block, a.q, a.q_strides, width, tiles.rows);
  transpose_pairs(tiles.q, tiles.rows, width);
  std::fill_n(tiles.o, width * kRows, 0.0f);
  const Rows<const T> k_rows(static_cast<const T*>(a.k), a.k_strides, batch, kv_head);
  const Rows<const T> v_rows(static_cast<const T*>(a.v), a.v_strides, batch, kv_head);
  OnlineSoftmax<T> softmax;

  for (int64_t tile = block.key_begin; tile < block.key_end; tile += kKeys) {
    const int64_t num_keys = std::min(kKeys, block.key_end - tile);
    Run runs[kKeys / kMaskStep];
    const int num_runs = find_runs(block, tile, num_keys, runs);
    if (num_runs == 0) continue;
    const PairTile k(k_rows, tile, num_keys, D, tiles.buffer);
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      const int64_t lane = run.low * kPairLanes;
      multiply_pairs<false>(
          run.end - run.begin, run.high - run.low, tiles.p + run.begin * kRows + lane, kRows,
          k.data + run.begin * k.stride, k.stride, tiles.q + lane, kRows, pairs, false);
      if (s.is_capped()) cap_run<float>(run, cap, scale, tiles.p, nullptr);
      mask_run(block, tile, run, s.alibi_slopes != nullptr, tiles.p);
    }
    softmax.update(tiles.p, runs, num_runs, tiles.o, D, unit);
    interleave_rows(tiles.v, width, v_rows.data + tile * v_rows.stride, v_rows.stride, num_keys, D);
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      const int64_t lane = run.low * kPairLanes;
      pair_keys(run, tiles.p, tiles.p_pairs);
      multiply_pairs<true>(
          D, run.high - run.low, tiles.o + lane, kRows, tiles.v + run.begin / 2 * width, width,
          tiles.p_pairs + run.begin / 2 * kRows + lane, kRows, (run.end - run.begin + 1) / 2, true);
    }
  }

  transpose(tiles.o_rows, width, tiles.o, kRows, width, kRows, 1.0f);
  store_output<T>(a, block, softmax, tiles.o_rows, width);
}

/// Memory of backward for one block of rows: q and d_out by columns (q, d_out) and as pairs of rows
/// (q_pairs, do_pairs), K as pairs of keys.
struct BackwardPairs {
  static constexpr int64_t kArea = kRows * kMaxAttentionWidth;
  alignas(64) float dq[kArea], p[kKeys * kRows], ds[kKeys * kRows], slopes[kKeys * kRows],
      lse[kRows], delta[kRows];
  alignas(64) Pair q[kArea / 2], d_out[kArea / 2], q_pairs[kArea / 2], do_pairs[kArea / 2],
      k_pairs[kArea / 2], ds_pairs[kKeys / 2 * kRows];
  alignas(64) BFloat16 q_rows[kArea], do_rows[kArea], o_rows[kArea], k_buffer[kArea],
      v_buffer[kArea], p_rows[kKeys * kRows], ds_rows[kKeys * kRows];
  alignas(64) float dq_rows[kArea];
};

/// q and d_out in their layouts, lse and delta = rowsum(d_out * o).
inline void load_block(const AttentionBwd& a, const Block<float>& block, BackwardPairs& tiles) {
  const AttentionShape& s = a.shape;
  const int64_t width = padded_width(s.head_dim);
  const HeadStrides o_strides = contiguous_strides(s);
  copy_rows(s, block, a.q, a.q_strides, width, tiles.q_rows);
  copy_rows(s, block, a.d_out, o_strides, width, tiles.do_rows);
  copy_rows(s, block, a.o, o_strides, width, tiles.o_rows);
  transpose_pairs(tiles.q, tiles.q_rows, width);
  transpose_pairs(tiles.d_out, tiles.do_rows, width);
  interleave_rows(tiles.q_pairs, width, tiles.q_rows, width, kRows, width);
  interleave_rows(tiles.do_pairs, width, tiles.do_rows, width, kRows, width);
  for (int64_t i = 0; i < kRows; ++i) {
    // A row that sees nothing has lse -inf; with +inf its probabilities are exp(-inf) = 0.
    tiles.lse[i] = std::numeric_limits<float>::infinity();
    if (i < block.count) {
      const float lse = static_cast<const float*>(
          a.lse)[lse_index(s, block.batch, block.head(s, i), block.query(s, i))];
      if (lse != -std::numeric_limits<float>::infinity()) tiles.lse[i] = lse;
    }
    Vector<float> sum{};
    tessera::cpu::for_lanes<float>(width, [&](int64_t c, auto lanes) {
      sum += tessera::cpu::load_lanes<float>(tiles.do_rows + i * width + c, lanes) *
             tessera::cpu::load_lanes<float>(tiles.o_rows + i * width + c, lanes);
    });
    tiles.delta[i] = tessera::cpu::sum_lanes<float>(sum);
  }
  std::fill_n(tiles.dq, width * kRows, 0.0f);
}

/// p = exp(unit p - lse), ds = p * (ds - delta) for one run, capped times the soft-cap's slopes:
/// both by rows, ds also by pairs of keys.
template <bool kCapped>
inline void softmax_backward(const Run& run, float unit, BackwardPairs& tiles) {
  for (int j = run.low; j < run.high; ++j) {
    const int64_t lane = j * kPairLanes;
    const Vector<float> lse = load(tiles.lse + lane), delta = load(tiles.delta + lane);
    const auto one_key = [&](int64_t k) {
      const int64_t at = k * kRows + lane;
      const Vector<float> p = exp_lanes<BFloat16>(load(tiles.p + at) * unit - lse);
      Vector<float> ds = p * (load(tiles.ds + at) - delta);
      if constexpr (kCapped) ds *= load(tiles.slopes + at);
      tessera::cpu::store_lanes<float>(tiles.p_rows + at, p);
      tessera::cpu::store_lanes<float>(tiles.ds_rows + at, ds);
      return ds;
    };
    for (int64_t k = run.begin; k < run.end; k += 2) {
      const Vector<float> first = one_key(k);
      const Vector<float> second = k + 1 < run.end ? one_key(k + 1) : Vector<float>{};
      _mm512_storeu_si512(tiles.ds_pairs + k / 2 * kRows + lane, pairs_of(first, second));
    }
  }
}

inline void backward_block_bf16(const AttentionBwd& a, int64_t batch, int64_t kv_head,
                                int64_t block_index, BackwardPairs& tiles, float* dk, float* dv) {
  using T = BFloat16;
  const AttentionShape& s = a.shape;
  const int64_t D = s.head_dim, width = padded_width(D), pairs = (D + 1) / 2;
  const int columns = static_cast<int>(width) / kPairLanes;
  const auto scale = static_cast<float>(s.scale), cap = static_cast<float>(s.softcap);
  const Block<float> block(s, batch, kv_head, block_index, s.is_capped() ? 1.0f : scale);
  load_block(a, block, tiles);
  const Rows<const T> k_rows(static_cast<const T*>(a.k), a.k_strides, batch, kv_head);
  const Rows<const T> v_rows(static_cast<const T*>(a.v), a.v_strides, batch, kv_head);

  for (int64_t tile = block.key_begin; tile < block.key_end; tile += kKeys) {
    const int64_t num_keys = std::min(kKeys, block.key_end - tile);
    Run runs[kKeys / kMaskStep];
    const int num_runs = find_runs(block, tile, num_keys, runs);
    if (num_runs == 0) continue;
    const PairTile k(k_rows, tile, num_keys, D, tiles.k_buffer);
    const PairTile v(v_rows, tile, num_keys, D, tiles.v_buffer);
    if (a.dq != nullptr) {
      interleave_rows(tiles.k_pairs, width, k_rows.data + tile * k_rows.stride, k_rows.stride,
                      num_keys, D);
    }
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      const int64_t keys = run.end - run.begin, lane = run.low * kPairLanes;
      const int64_t row_pairs = (run.high - run.low) * kPairLanes / 2;
      const int vectors = run.high - run.low;
      const int64_t from = run.begin * kRows + lane;
      multiply_pairs<false>(keys, vectors, tiles.p + from, kRows, k.data + run.begin * k.stride,
                            k.stride, tiles.q + lane, kRows, pairs, false);
      if (s.is_capped()) cap_run<float>(run, cap, scale, tiles.p, tiles.slopes);
      mask_run(block, tile, run, s.alibi_slopes != nullptr, tiles.p);
      multiply_pairs<false>(keys, vectors, tiles.ds + from, kRows, v.data + run.begin * v.stride,
                            v.stride, tiles.d_out + lane, kRows, pairs, false);
      s.is_capped() ? softmax_backward<true>(run, 1.0f, tiles)
                    : softmax_backward<false>(run, scale, tiles);
      const int64_t at = (tile + run.begin) * width;
      if (a.dv != nullptr)
        multiply_pairs<false>(keys, columns, dv + at, width, tiles.p_rows + from, kRows,
                              tiles.do_pairs + lane / 2 * width, width, row_pairs, true);
      if (a.dk != nullptr)
        multiply_pairs<false>(keys, columns, dk + at, width, tiles.ds_rows + from, kRows,
                              tiles.q_pairs + lane / 2 * width, width, row_pairs, true);
      if (a.dq != nullptr)
        multiply_pairs<true>(
            D, vectors, tiles.dq + lane, kRows, tiles.k_pairs + run.begin / 2 * width, width,
            tiles.ds_pairs + run.begin / 2 * kRows + lane, kRows, (keys + 1) / 2, true);
    }
  }

  if (a.dq == nullptr) return;
  transpose(tiles.dq_rows, width, tiles.dq, kRows, width, kRows, scale);
  for (int64_t i = 0; i < block.count; ++i) {
    T* dst = static_cast<T*>(a.dq) + batch * a.dq_strides.batch +
             block.query(s, i) * a.dq_strides.time + block.head(s, i) * a.dq_strides.head;
    store_row(dst, tiles.dq_rows + i * width, D, 1.0f, a.accumulate_dq);
  }
}

}  // namespace tessera::kernels::cpu

#endif
