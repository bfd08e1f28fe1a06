// A linear layer of few rows, as decoding has it: c = a b^T + ..., bound by the time to read b.
//
// Threads   share the rows of b, which each reads once, one behind the other. Rows of a stay in the
//           caches.
// Tiles     of kTileRows rows of a and kTileCols of b, whose sums stay in registers: a is larger than
//           the first cache level, so each of its vectors that comes from the second is used
//           kTileCols times, and each of b's kTileRows times.
// Sums      each element of c is one chain over k in vectors, whose lanes are added at the end: it
//           depends neither on the other elements nor on how many there are.
#include "kernels/matmul/cpu/few_rows.h"

#include <algorithm>
#include <array>
#include <utility>

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
constexpr int64_t kAheadNbytes = 4096;
#if TESSERA_AVX512  // of 32 registers, and of 16
constexpr int kTileRows = 6, kTileCols = 4;
#else
constexpr int kTileRows = 2, kTileCols = 4;
#endif

/// Else the compiler makes `value` an operand in memory of each of its uses: a load each.
template <class V>
inline void keep_in_register(V& value) {
#if TESSERA_AVX512
  asm("" : "+v"(value));
#endif
}

/// sums[i * kCols + j] = sum_k a[i, k] b[j, k]. What lies `ahead` elements behind b comes to the
/// second cache level meanwhile: the processor's own prefetch begins anew at each page.
template <class T, int kRows, int kWeights, bool kPrefetch>
void dots(float* sums, const T* a, int64_t lda, const T* b, int64_t ldb, int64_t k, int64_t ahead) {
  using Of = Terms<T>;
  Vector<float> chains[kRows][kWeights] = {};
  tessera::cpu::for_steps<Of::kStep>(k, [&](int64_t at, auto lanes) {
    typename Of::Operand weights[kWeights];
#pragma GCC unroll 4
    for (int j = 0; j < kWeights; ++j) {
      weights[j] = Of::load(b + j * ldb + at, lanes);
      if constexpr (kPrefetch) __builtin_prefetch(b + j * ldb + at + ahead, 0, 2);
    }
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
      auto row = Of::load(a + i * lda + at, lanes);
      keep_in_register(row);
#pragma GCC unroll 4
      for (int j = 0; j < kWeights; ++j) chains[i][j] = Of::add(chains[i][j], row, weights[j]);
    }
  });
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kWeights; ++j) {
      sums[i * kCols + j] = tessera::cpu::sum_lanes<float>(chains[i][j]);
    }
  }
}

/// Rows of a in tiles of nearly equal heights; the first tile fetches what lies ahead.
template <class T, int kWeights>
void dots_of_rows(float* sums, int64_t rows, const T* a, int64_t lda, const T* b, int64_t ldb,
                  int64_t k, int64_t ahead) {
  using Tile = void (*)(float*, const T*, int64_t, const T*, int64_t, int64_t, int64_t);
  static constexpr auto kTiles = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array<std::array<Tile, sizeof...(I)>, 2>{
        {{dots<T, I + 1, kWeights, false>...}, {dots<T, I + 1, kWeights, true>...}}};
  }
  (std::make_integer_sequence<int, kTileRows>{});
  bool is_first = true;
  for (int64_t tiles = (rows + kTileRows - 1) / kTileRows; tiles > 0; --tiles) {
    const int64_t height = (rows + tiles - 1) / tiles;
    kTiles[is_first][height - 1](sums, a, lda, b, ldb, k, ahead);
    sums += height * kCols, a += height * lda, rows -= height, is_first = false;
  }
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
            for (; p.m > 1 && j + kTileCols <= count; j += kTileCols) {
              dots_of_rows<T, kTileCols>(sums + j, rows, x, p.lda, b + (col + j) * p.ldb, p.ldb,
                                         p.k, ahead);
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
