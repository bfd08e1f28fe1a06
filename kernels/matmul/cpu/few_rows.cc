// A linear layer of few rows, as decoding has it: c = a b^T + ..., bound by the time to read b.
//
// Threads   share the rows of b, which each reads once, one behind the other. Rows of a stay in the
//           caches.
// Sums      each element of c is two chains over k in vectors, which are added at the end with
//           their lanes: it depends neither on the other elements nor on how many there are.
#include "kernels/matmul/cpu/few_rows.h"

#include <algorithm>

#include "core/runtime/cpu/parallel.h"
#include "kernels/matmul/cpu/finish_row.h"

namespace tessera::kernels {
namespace cpu {
namespace {

using tessera::cpu::AllLanes;
using tessera::cpu::kLanes;
using tessera::cpu::Vector;

/// What a step of a chain takes of each operand, and how it adds their product.
template <class T>
struct Terms {
  using Operand = Vector<float>;
  static constexpr int kStep = kLanes<float>;
  template <class Lanes>
  static Operand load(const T* p, Lanes lanes) {
    return tessera::cpu::load_lanes<float>(p, lanes);
  }
  static Vector<float> add(Vector<float> sum, const Operand& a, const Operand& b) {
    return sum + a * b;
  }
};

#if TESSERA_AVX512_BF16
template <>
struct Terms<BFloat16> {
  using Operand = __m512i;
  static constexpr int kStep = 32;
  static Operand load(const BFloat16* p, AllLanes) { return _mm512_loadu_si512(p); }
  static Operand load(const BFloat16* p, int count) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << count) - 1), p);
  }
  static Vector<float> add(Vector<float> sum, Operand a, Operand b) {
    return (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

constexpr int64_t kCols = 16;     // rows of b that a thread finishes at once
constexpr int64_t kMaxRows = 32;  // rows of a that share a walk over them
constexpr int kChains = 2;        // of each sum, so that additions need not wait for each other
constexpr int64_t kAheadNbytes = 4096;

/// sums[i * kCols + j] = sum_k a[i, k] b[j, k]. What lies `ahead` elements behind b comes to the
/// second cache level meanwhile: the processor's own prefetch begins anew at each page.
template <class T, int kRows, int kWeights, bool kPrefetch>
void dots(float* sums, const T* a, int64_t lda, const T* b, int64_t ldb, int64_t k, int64_t ahead) {
  using Of = Terms<T>;
  Vector<float> chains[kRows][kWeights][kChains] = {};
  tessera::cpu::for_steps_of<Of::kStep, kChains>(k, [&](int64_t at, auto lanes, auto u) {
    typename Of::Operand weights[kWeights];
#pragma GCC unroll 4
    for (int j = 0; j < kWeights; ++j) {
      weights[j] = Of::load(b + j * ldb + at, lanes);
      if constexpr (kPrefetch) __builtin_prefetch(b + j * ldb + at + ahead, 0, 2);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const auto row = Of::load(a + i * lda + at, lanes);
#pragma GCC unroll 4
      for (int j = 0; j < kWeights; ++j) {
        chains[i][j][u] = Of::add(chains[i][j][u], row, weights[j]);
      }
    }
  });
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kWeights; ++j) {
      sums[i * kCols + j] = tessera::cpu::sum_lanes<float>(chains[i][j]);
    }
  }
}

/// Rows of a in tiles of four; the first tile fetches what lies ahead.
template <class T, int kWeights>
void dots_of_rows(float* sums, int64_t rows, const T* a, int64_t lda, const T* b, int64_t ldb,
                  int64_t k, int64_t ahead) {
  const auto tile = [&]<int kRows, bool kPrefetch>() {
    dots<T, kRows, kWeights, kPrefetch>(sums, a, lda, b, ldb, k, ahead);
    sums += kRows * kCols, a += kRows * lda, rows -= kRows;
  };
  if (rows >= 4) tile.template operator()<4, true>();
  while (rows >= 4) tile.template operator()<4, false>();
  if (rows == 3) tile.template operator()<3, true>();
  if (rows == 2) tile.template operator()<2, true>();
  if (rows == 1) tile.template operator()<1, true>();
}

template <class T>
void product(const Matmul& p) {
  const T* a = static_cast<const T*>(p.a);
  const T* b = static_cast<const T*>(p.b);
  constexpr int64_t kGrainNbytes = 1 << 18;  // worth about 20 us
  const int64_t block_nbytes = kCols * p.k * static_cast<int64_t>(sizeof(T));
  const int64_t blocks = (p.n + kCols - 1) / kCols;
  tessera::cpu::parallel_for(
      blocks, std::max<int64_t>(1, kGrainNbytes / block_nbytes), [&](int64_t first, int64_t last) {
        float sums[kMaxRows * kCols];
        for (int64_t block = first; block < last; ++block) {
          const int64_t col = block * kCols, count = std::min(kCols, p.n - col);
          for (int64_t row = 0; row < p.m; row += kMaxRows) {
            const int64_t rows = std::min(kMaxRows, p.m - row);
            const T* const x = a + row * p.lda;
            int64_t j = 0;
            // Of one row the fetches stay close: a single stream of memory. Of more, b's next rows.
            const int64_t ahead =
                p.m == 1 ? kAheadNbytes / static_cast<int64_t>(sizeof(T)) : kCols * p.ldb;
            for (; p.m > 1 && j + 2 <= count; j += 2) {
              dots_of_rows<T, 2>(sums + j, rows, x, p.lda, b + (col + j) * p.ldb, p.ldb, p.k,
                                 ahead);
            }
            for (; j < count; ++j) {
              dots_of_rows<T, 1>(sums + j, rows, x, p.lda, b + (col + j) * p.ldb, p.ldb, p.k,
                                 ahead);
            }
            for (int64_t i = 0; i < rows; ++i) finish_row(p, row + i, col, sums + i * kCols, count);
          }
        }
      });
}

}  // namespace

void matmul_few_rows(const Matmul& p) {
  if (p.m == 0 || p.n == 0) return;
  Matmul linear = p;
  if (p.activate && p.pre_activation != nullptr) linear.c = p.pre_activation;
  visit_float(p.dtype, "matmul", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) <= sizeof(float)) product<T>(linear);
  });
  if (p.activate) activation_fwd({p.c, linear.c, p.c_dtype, p.activation, p.m, p.n, p.n});
}

}  // namespace cpu

bool takes_few_rows(const Stream& s, const Matmul& p) {
  return s.device().type == DeviceType::kCpu && p.trans_b && !p.trans_a && p.num_batches == 1 &&
         p.k > 0 && p.dtype != kF64;
}

void matmul_few_rows(const Stream& s, const Matmul& p) {
  if (s.is_observed()) s.declare("matmul_few_rows", p.cost());
  s.submit("matmul_few_rows", [p] { cpu::matmul_few_rows(p); });
}

}  // namespace tessera::kernels
