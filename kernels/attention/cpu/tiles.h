#pragma once

#include <cstdint>

#include "core/runtime/cpu/lanes.h"

// Small matrix products on cache-resident tiles, in vectors (core/runtime/cpu/lanes.h). Private to
// the kernels in this folder.

namespace tessera::kernels::cpu {

using tessera::cpu::broadcast;
using tessera::cpu::exp_lanes;
using tessera::cpu::kLanes;
using tessera::cpu::Vector;

/// Columns of a register tile, in vectors.
inline constexpr int kTileVectors = TESSERA_AVX512 ? 4 : 2;

template <class A>
inline Vector<A> load(const A* p) {
  return *reinterpret_cast<const Vector<A>*>(p);
}
template <class A>
inline void store(A* p, Vector<A> value) {
  *reinterpret_cast<Vector<A>*>(p) = value;
}
/// c[i][j] (+)= sum_r a(i, r) * b[r][j] for an M x (N vectors) tile held in registers, with
/// a(i, r) = a[i * lda + r], or a[r * lda + i] when transposed. Sums over r in order.
template <class A, int M, int N, bool kTransposeA>
inline void multiply_tile(A* __restrict__ c, int64_t ldc, const A* __restrict__ a, int64_t lda,
                          const A* __restrict__ b, int64_t ldb, int64_t depth, bool add) {
  constexpr int kLane = kLanes<A>;
  Vector<A> sum[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sum[i][j] = add ? load(c + i * ldc + j * kLane) : Vector<A>{};
  }
  for (int64_t r = 0; r < depth; ++r) {
    Vector<A> row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) row[j] = load(b + r * ldb + j * kLane);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const A factor = kTransposeA ? a[r * lda + i] : a[i * lda + r];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] += factor * row[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(c + i * ldc + j * kLane, sum[i][j]);
  }
}

/// Rows of a register tile: few columns need more rows to hide the latency of the multiply-add.
template <int N>
inline constexpr int kTileRows = kTileVectors == 4 ? (N == 4 ? 6 : 8) : (N == 2 ? 6 : 8);

template <class A, int M, int N, bool kTransposeA>
inline void multiply_rows(int64_t rows, A* c, int64_t ldc, const A* a, int64_t lda, const A* b,
                          int64_t ldb, int64_t depth, bool add) {
  for (; rows >= M; rows -= M, c += M * ldc, a += M * (kTransposeA ? 1 : lda))
    multiply_tile<A, M, N, kTransposeA>(c, ldc, a, lda, b, ldb, depth, add);
  if constexpr (M > 1) {
    constexpr int kNext = M > 4 ? 4 : M / 2;
    if (rows > 0) multiply_rows<A, kNext, N, kTransposeA>(rows, c, ldc, a, lda, b, ldb, depth, add);
  }
}

/// The same for `rows` rows and `vectors` vectors of columns.
template <class A, bool kTransposeA>
inline void multiply(int64_t rows, int vectors, A* c, int64_t ldc, const A* a, int64_t lda,
                     const A* b, int64_t ldb, int64_t depth, bool add) {
  constexpr int kLane = kLanes<A>;
  const auto columns = [&]<int N>() {
    multiply_rows<A, kTileRows<N>, N, kTransposeA>(rows, c, ldc, a, lda, b, ldb, depth, add);
    c += N * kLane, b += N * kLane, vectors -= N;
  };
  while (vectors >= kTileVectors) columns.template operator()<kTileVectors>();
  if constexpr (kTileVectors == 4) {
    if (vectors == 3) columns.template operator()<3>();
    if (vectors == 2) columns.template operator()<2>();
  }
  if (vectors == 1) columns.template operator()<1>();
}

/// dst[j * ld_dst + i] = factor * src[i * ld_src + j]; rows and cols are multiples of 4.
template <class A>
inline void transpose(A* __restrict__ dst, int64_t ld_dst, const A* __restrict__ src,
                      int64_t ld_src, int64_t rows, int64_t cols, A factor) {
  typedef A Quad __attribute__((vector_size(4 * sizeof(A)), aligned(sizeof(A)), may_alias));
  const auto row = [&](int64_t i, int64_t j) {
    return *reinterpret_cast<const Quad*>(src + i * ld_src + j) * factor;
  };
  for (int64_t i = 0; i < rows; i += 4) {
    for (int64_t j = 0; j < cols; j += 4) {
      const Quad r0 = row(i, j), r1 = row(i + 1, j), r2 = row(i + 2, j), r3 = row(i + 3, j);
      const Quad low01 = __builtin_shufflevector(r0, r1, 0, 4, 1, 5);
      const Quad high01 = __builtin_shufflevector(r0, r1, 2, 6, 3, 7);
      const Quad low23 = __builtin_shufflevector(r2, r3, 0, 4, 1, 5);
      const Quad high23 = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
      A* out = dst + j * ld_dst + i;
      const auto put = [&](int k, Quad value) {
        *reinterpret_cast<Quad*>(out + k * ld_dst) = value;
      };
      put(0, __builtin_shufflevector(low01, low23, 0, 1, 4, 5));
      put(1, __builtin_shufflevector(low01, low23, 2, 3, 6, 7));
      put(2, __builtin_shufflevector(high01, high23, 0, 1, 4, 5));
      put(3, __builtin_shufflevector(high01, high23, 2, 3, 6, 7));
    }
  }
}

/// dst[0, count) = src[0, count), widened.
template <class A, class T>
inline void widen(A* __restrict__ dst, const T* __restrict__ src, int64_t count) {
  tessera::cpu::for_lanes<A>(count, [=](int64_t i, auto lanes) {
    tessera::cpu::store_lanes<A>(dst + i, tessera::cpu::load_lanes<A>(src + i, lanes), lanes);
  });
}

}  // namespace tessera::kernels::cpu
