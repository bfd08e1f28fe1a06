#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "core/dtype.h"

// Small matrix products on cache-resident tiles, in the compiler's vector extensions: 64-byte
// vectors where the build has AVX-512, else 32 bytes. Private to kernels/attention/cpu.cc.

namespace tessera::kernels::cpu {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kTileVectors = 4;  ///< columns of a register tile, in vectors
#else
inline constexpr int kVectorBytes = 32;
inline constexpr int kTileVectors = 2;
#endif

/// A vector that may lie at any element and alias any memory.
template <class A>
struct VectorOf {
  typedef A type __attribute__((vector_size(kVectorBytes), aligned(sizeof(A)), may_alias));
  static constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));
};
template <class A>
using Vector = typename VectorOf<A>::type;
template <class A>
inline constexpr int kLanes = VectorOf<A>::kLanes;

template <class A>
inline Vector<A> load(const A* p) {
  return *reinterpret_cast<const Vector<A>*>(p);
}
template <class A>
inline void store(A* p, Vector<A> value) {
  *reinterpret_cast<Vector<A>*>(p) = value;
}
template <class A>
inline Vector<A> broadcast(A value) {
  return Vector<A>{} + value;
}

/// exp(x) for x <= 88, lane by lane; 0 below -87.3 (also for -inf), NaN for NaN. The reduction and
/// polynomial of cpu::exp (core/runtime/cpu/math.h), without the steps that only large x needs.
inline Vector<float> exp_lanes(Vector<float> x) {
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
  // Adding 1.5 * 2^23 rounds to an integer n, which then stands in the low bits of the sum, here
  // already with the exponent's bias. The high bits fall out of the shift.
  constexpr float kRound = 12582912.0f + 127.0f;
  const Vector<float> shifted = x * 1.44269504088896341f + kRound;
  const Vector<float> n = shifted - kRound;
  const Vector<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Vector<float> y = (p * r * r + r) + 1.0f;
  const Vector<float> power = (Vector<float>)((Int)shifted << 23);
  return x < -87.33654f ? Vector<float>{} : y * power;
}
inline Vector<double> exp_lanes(Vector<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
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
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, Float16>) {
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(dst + i,
                       _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
  }
#endif
#pragma omp simd
  for (int64_t k = i; k < count; ++k) dst[k] = static_cast<A>(src[k]);
}

}  // namespace tessera::kernels::cpu
