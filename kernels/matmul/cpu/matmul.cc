// Matrix products on the CPU.
//   f32, bf16  oneDNN's matmul primitives (onednn.h); gradients of large layers by fixed tiles, in
//              f32 of its sgemm, in bf16 of the primitives: up to a quarter faster there
//   f16        panels of both operands converted to f32, f32 products of panels; also bf16 where
//              the processor cannot multiply it
//   f64        own loops: for gradient checks
// Determinism: no path splits k over threads, and tiles and panels depend on the shape only.

#include <algorithm>
#include <atomic>
#include <memory>

#include "core/runtime/cpu/parallel.h"
#include "kernels/elementwise/row_io.h"
#include "kernels/matmul/cpu/finish_row.h"
#include "kernels/matmul/cpu/onednn.h"
#include "kernels/matmul/cpu/panels.h"
#include "kernels/matmul/kernel.h"

namespace tessera::kernels::cpu {
namespace {

template <class P>
P* shift(P* data, DType dtype, int64_t elements) {
  using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
  return data == nullptr
             ? nullptr
             : static_cast<Byte*>(data) + elements * static_cast<int64_t>(size_of(dtype));
}

/// f64, and sums of no terms.
void product_f64(const Matmul& p) {
  const double* a = static_cast<const double*>(p.a);
  const double* b = static_cast<const double*>(p.b);
  const int64_t a_row = p.trans_a ? 1 : p.lda, a_col = p.trans_a ? p.lda : 1;
  const int64_t work = std::max<int64_t>(1, p.n * p.k);
  tessera::cpu::parallel_for(p.m, std::max<int64_t>(1, 32768 / work), [&](int64_t r0, int64_t r1) {
    double sums[kPieceCols];
    for (int64_t row = r0; row < r1; ++row) {
      for (int64_t begin = 0; begin < p.n; begin += kPieceCols) {
        const int64_t count = std::min(kPieceCols, p.n - begin);
        std::fill_n(sums, count, 0.0);
        for (int64_t k = 0; !p.trans_b && k < p.k; ++k) {
          const double factor = a[row * a_row + k * a_col];
          const double* terms = b + k * p.ldb + begin;
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) sums[i] += factor * terms[i];
        }
        for (int64_t i = 0; p.trans_b && i < count; ++i) {
          const double* terms = b + (begin + i) * p.ldb;
          for (int64_t k = 0; k < p.k; ++k) sums[i] += a[row * a_row + k * a_col] * terms[k];
        }
        finish_row(p, row, begin, sums, count);
      }
    }
  });
}

/// dst[i, :] = rows [first, first + rows) x columns [col, col + cols) of a stored matrix, in f32.
void convert_panel(float* dst, const void* src, DType dtype, int64_t ld, int64_t first,
                   int64_t rows, int64_t col, int64_t cols) {
  visit_float(dtype, "matmul", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = static_cast<const T*>(src) + first * ld + col;
    const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, cols));
    tessera::cpu::parallel_for(rows, grain, [&](int64_t r0, int64_t r1) {
      for (int64_t r = r0; r < r1; ++r) convert_piece(dst + r * cols, from + r * ld, cols);
    });
  });
}

/// Tiles of c, where they pay (measured on Zen 4 and 5): elsewhere the primitives are as fast. No
/// rows: not worth it. A tile's k may come in pieces of `depth`, which c is the sum of.
struct TileSize {
  int64_t rows = 0, cols = 0, depth = 0;
};

/// The size of the fewest pieces of at most `most` that are of one size, in whole cache lines.
int64_t even_piece(int64_t numel, int64_t most) {
  const int64_t pieces = (numel + most - 1) / most;
  return ((numel + pieces - 1) / pieces + 63) / 64 * 64;
}

/// Rows of the whole product that c is a part of.
int64_t whole_rows(const Matmul& p) {
  return p.num_rows > 0 ? p.num_rows : p.m;
}

TileSize tile_size(const Matmul& p) {
  const int64_t m = whole_rows(p);
  if (p.num_batches != 1 || p.bias != nullptr || p.trans_b) return {};
  if (p.dtype == kF32) {
    // Wide matrices: rows a large power of two apart evict each other, and a small tile reads its
    // operands too often.
    const TileSize wide{512, 512, p.k};
    if (!p.trans_a && p.k >= 1024 && m >= 256 && p.n >= 384) {
      return m >= 1024 && p.n >= 2048 ? wide : TileSize{128, 384, p.k};
    }
    if (p.trans_a && p.k <= 1024 && m >= 2048 && p.n >= 2048) return wide;
    if (p.trans_a && p.k <= 512 && m >= 768 && p.n >= 768) return {384, 384, p.k};
    return {};
  }
  // An f32 gradient of a weight: a tile's columns of dy fit the second cache level.
  if (p.c_dtype != kF32 || !p.trans_a || p.k < 256 || m < 768 || p.n < 768) return {};
  return {even_piece(m, 192), even_piece(p.n, 1024), m > 16384 ? 512 : 1024};
}

OnednnMatmul onednn_call(const Matmul& p) {
  return {.c = p.c,
          .a = p.a,
          .b = p.b,
          .bias = p.bias,
          .dtype = p.dtype,
          .c_dtype = p.c_dtype,
          .bias_dtype = p.bias_dtype,
          .trans_a = p.trans_a,
          .trans_b = p.trans_b,
          .accumulate = p.accumulate,
          .m = p.m,
          .n = p.n,
          .k = p.k,
          .lda = p.lda,
          .ldb = p.ldb,
          .ldc = p.ldc,
          .num_batches = p.num_batches,
          .batch_stride_a = p.batch_stride_a,
          .batch_stride_b = p.batch_stride_b,
          .batch_stride_c = p.batch_stride_c};
}

/// The part of p that rows [row, row_end) of a tile from column `col` on are, of k in [depth,
/// depth + k); false if oneDNN failed.
bool run_tile(const Matmul& p, const TileSize& tile, int64_t row, int64_t row_end, int64_t col,
              int64_t depth) {
  OnednnMatmul part = onednn_call(p);
  part.m = std::min(row_end, p.m) - row, part.n = std::min(tile.cols, p.n - col);
  part.k = std::min(tile.depth, p.k - depth), part.accumulate = p.accumulate || depth > 0;
  part.c = shift(p.c, p.c_dtype, row * p.ldc + col);
  part.a = shift(p.a, p.dtype, p.trans_a ? depth * p.lda + row : row * p.lda + depth);
  part.b = shift(p.b, p.dtype, depth * p.ldb + col);
  if (p.dtype == kF32) {
    return onednn_sgemm(static_cast<float*>(part.c), static_cast<const float*>(part.a),
                        static_cast<const float*>(part.b), part.trans_a, part.accumulate, part.m,
                        part.n, part.k, part.lda, part.ldb, part.ldc);
  }
  part.one_thread = true;
  return try_onednn_matmul(part);
}

void product_tiles(const Matmul& p, const TileSize& tile) {
  const int64_t tiles_n = (p.n + tile.cols - 1) / tile.cols;
  // Tiles of the whole product: of the first and the last one maybe a part of the rows.
  const int64_t first_tile = p.first_row / tile.rows;
  const int64_t tiles_m = (p.first_row + p.m + tile.rows - 1) / tile.rows - first_tile;
  std::atomic<bool> is_ok = true;
  tessera::cpu::parallel_for(tiles_m * tiles_n, 1, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t row_end = (first_tile + t / tiles_n + 1) * tile.rows - p.first_row;
      const int64_t row = std::max<int64_t>(0, row_end - tile.rows), col = t % tiles_n * tile.cols;
      for (int64_t depth = 0; depth < p.k; depth += tile.depth) {
        if (!run_tile(p, tile, row, row_end, col, depth)) is_ok = false;
      }
    }
  });
  TESSERA_CHECK_AS(InternalError, is_ok, "matmul: a tile failed in oneDNN");
}

void product_onednn(const Matmul& p) {
  // A long k (the head's dx): the primitives get slower with the columns they sum over at once.
  constexpr int64_t kCols = 384, kLongDepth = 8192;
  const bool in_columns = p.dtype == kBF16 && p.num_batches == 1 && p.bias == nullptr &&
                          !p.trans_a && !p.trans_b && p.k >= kLongDepth && p.n > kCols;
  if (!in_columns) return onednn_matmul(onednn_call(p));
  for (int64_t col = 0; col < p.n; col += kCols) {
    OnednnMatmul part = onednn_call(p);
    part.n = std::min(kCols, p.n - col);
    part.c = shift(p.c, p.c_dtype, col), part.b = shift(p.b, p.dtype, col);
    onednn_matmul(part);
  }
}

/// c = residual, so that the product can be added to it.
void preset_residual(Matmul& p) {
  if (p.residual != p.c) {
    visit_float(p.c_dtype, "matmul", [&](auto tag) {
      using T = typename decltype(tag)::type;
      for_pieces(p.m, p.n, [&](int64_t row, int64_t begin, int64_t end) {
        std::copy_n(static_cast<const T*>(p.residual) + row * p.ld_residual + begin, end - begin,
                    static_cast<T*>(p.c) + row * p.ldc + begin);
      });
    });
  }
  p.residual = nullptr;
  p.accumulate = true;
}

/// Everything but the activation.
void product(Matmul p) {
  const bool native = p.dtype == kF32 || (p.dtype == kBF16 && onednn_has_bf16());
  if (p.k > 0 && native) {
    if (p.residual != nullptr) preset_residual(p);
    if (const TileSize tile = tile_size(p); tile.rows > 0) return product_tiles(p, tile);
    return product_onednn(p);
  }
  for (int64_t i = 0; i < p.num_batches; ++i) {
    Matmul one = p;
    one.c = shift(p.c, p.c_dtype, i * p.batch_stride_c);
    one.a = shift(p.a, p.dtype, i * p.batch_stride_a);
    one.b = shift(p.b, p.dtype, i * p.batch_stride_b);
    if (p.dtype == kF64 || p.k == 0) {
      product_f64(one);
    } else {
      product_panels(one);
    }
  }
}

}  // namespace

void product_panels(const Matmul& p) {
  // One buffer a thread, of fixed size: 2 + 4 + 4 MiB.
  constexpr int64_t kRows = 512, kCols = 1024, kDepth = 1024;
  thread_local const std::unique_ptr<float[]> buffer =
      std::make_unique_for_overwrite<float[]>(kRows * kCols + kRows * kDepth + kDepth * kCols);
  float* const sums = buffer.get();
  float* const a = sums + kRows * kCols;
  float* const b = a + kRows * kDepth;
  for (int64_t j = 0; j < p.n; j += kCols) {
    const int64_t n = std::min(kCols, p.n - j);
    for (int64_t i = 0; i < p.m; i += kRows) {
      const int64_t m = std::min(kRows, p.m - i);
      for (int64_t l = 0; l < p.k; l += kDepth) {
        const int64_t k = std::min(kDepth, p.k - l);
        p.trans_a ? convert_panel(a, p.a, p.dtype, p.lda, l, k, i, m)
                  : convert_panel(a, p.a, p.dtype, p.lda, i, m, l, k);
        p.trans_b ? convert_panel(b, p.b, p.dtype, p.ldb, j, n, l, k)
                  : convert_panel(b, p.b, p.dtype, p.ldb, l, k, j, n);
        onednn_matmul({sums,
                       a,
                       b,
                       nullptr,
                       kF32,
                       kF32,
                       kF32,
                       p.trans_a,
                       p.trans_b,
                       l > 0,
                       m,
                       n,
                       k,
                       p.trans_a ? m : k,
                       p.trans_b ? k : n,
                       n,
                       1,
                       0,
                       0,
                       0});
      }
      for_pieces(m, n, [&](int64_t row, int64_t begin, int64_t end) {
        finish_row(p, i + row, j + begin, sums + row * n + begin, end - begin);
      });
    }
  }
}

void matmul(const Matmul& p) {
  if (p.m == 0 || p.n == 0 || p.num_batches == 0) return;
  if (!p.activate) return product(p);
  Matmul linear = p;
  if (p.pre_activation != nullptr) linear.c = p.pre_activation;
  product(linear);
  activation_fwd({p.c, linear.c, p.c_dtype, p.activation, p.m, p.n, p.n});
}

namespace {

/// sums[c] += dy[c] + dy[ld + c] + ... of kRows rows, in order.
template <int kRows, class T, class C>
void add_rows(C* sums, const T* dy, int64_t ld, int64_t cols) {
  using tessera::cpu::load_lanes;
  tessera::cpu::for_lanes<C>(cols, [=](int64_t c, auto lanes) {
    auto sum = load_lanes<C>(sums + c, lanes);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) sum += load_lanes<C>(dy + row * ld + c, lanes);
    tessera::cpu::store_lanes<C>(sums + c, sum, lanes);
  });
}

/// sums = the sums of the columns of rows [first, last); four rows share a walk over the sums.
template <class T, class C>
void sum_rows(C* sums, const T* dy, int64_t ld, int64_t first, int64_t last, int64_t cols) {
  std::fill_n(sums, cols, C(0));
  int64_t row = first;
  for (; row + 4 <= last; row += 4) add_rows<4>(sums, dy + row * ld, ld, cols);
  for (; row < last; ++row) add_rows<1>(sums, dy + row * ld, ld, cols);
}

}  // namespace

void bias_grad(const BiasGrad& p) {
  const int64_t chunks = BiasGrad::num_chunks(p.rows);
  visit_compute_type(p.dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    C* const partials = static_cast<C*>(p.partials);
    visit_float(p.dtype, "bias_grad", [&](auto dy_tag) {
      using T = typename decltype(dy_tag)::type;
      for_pieces(chunks, p.n, [&](int64_t chunk, int64_t begin, int64_t end) {
        const T* dy = static_cast<const T*>(p.dy) + begin;
        if constexpr (std::is_same_v<ComputeType<T>, C>) {
          sum_rows(partials + chunk * p.n + begin, dy, p.ld_dy, p.rows * chunk / chunks,
                   p.rows * (chunk + 1) / chunks, end - begin);
        }
      });
    });
    for_pieces(1, p.n, [&](int64_t, int64_t begin, int64_t end) {
      const int64_t count = end - begin;
      C* const sums = partials + begin;
      for (int64_t chunk = 1; chunk < chunks; ++chunk) {
        const C* more = sums + chunk * p.n;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) sums[i] += more[i];
      }
      store_piece(p.db, p.db_dtype, begin, 1, sums, count, p.accumulate);
    });
  });
}

}  // namespace tessera::kernels::cpu
