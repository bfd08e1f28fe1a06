// Elementwise parts of Newton-Schulz on the CPU.

#include <cmath>
#include <numeric>

#include "kernels/elementwise/row_io.h"
#include "kernels/orthogonalize/kernel.h"

namespace tessera::kernels::cpu {

void row_squares(const RowSquares& p) {
  visit_compute_type(p.dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    C* const sums = static_cast<C*>(p.sums);
    tessera::cpu::parallel_for(p.rows, 1, [&](int64_t first, int64_t last) {
      C buffer[kPieceCols];
      for (int64_t r = first; r < last; ++r) {
        C sum = 0;
        for (int64_t c = 0; c < p.cols; c += kPieceCols) {
          const int64_t count = std::min(kPieceCols, p.cols - c);
          const C* const x = load_piece(buffer, p.x, p.dtype, r * p.cols + c, 1, count);
          C part = 0;
#pragma omp simd reduction(+ : part)
          for (int64_t i = 0; i < count; ++i) part += x[i] * x[i];
          sum += part;
        }
        sums[r] = sum;
      }
    });
  });
}

void scale_by_norm(const ScaleByNorm& p) {
  visit_compute_type(p.dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    const C* const sums = static_cast<const C*>(p.sums);
    double total = 0;
    for (int64_t r = 0; r < p.rows; ++r) total += static_cast<double>(sums[r]);
    const double norm = static_cast<double>(p.factor) * std::sqrt(total);
    const C scale = static_cast<C>(1 / std::max(norm, static_cast<double>(p.eps)));
    for_pieces(p.rows, p.cols, [&](int64_t row, int64_t begin, int64_t end) {
      C buffer[kPieceCols], out[kPieceCols];
      const int64_t at = row * p.cols + begin, count = end - begin;
      const C* const x = load_piece(buffer, p.x, p.dtype, at, 1, count);
      for (int64_t i = 0; i < count; ++i) out[i] = x[i] * scale;
      store_piece(p.x, p.dtype, at, 1, static_cast<const C*>(out), count, false);
    });
  });
}

void matrix_combine(const MatrixCombine& p) {
  visit_compute_type(p.dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    const C* const y = static_cast<const C*>(p.y);
    const C a = static_cast<C>(p.a), b = static_cast<C>(p.b);
    for_pieces(p.rows, p.cols, [&](int64_t row, int64_t begin, int64_t end) {
      C buffer[kPieceCols], out[kPieceCols];
      const int64_t at = row * p.cols + begin, count = end - begin;
      const int64_t lower = p.is_symmetric ? std::clamp<int64_t>(row + 1 - begin, 0, count) : count;
      for (int64_t i = 0; i < lower; ++i) out[i] = b * y[at + i];
      for (int64_t i = lower; i < count; ++i) out[i] = b * y[(begin + i) * p.cols + row];
      if (p.x != nullptr) {
        const C* const x = load_piece(buffer, p.x, p.dtype, at, 1, count);
        for (int64_t i = 0; i < count; ++i) out[i] = a * x[i] + out[i];
      }
      store_piece(p.out, p.dtype, at, 1, static_cast<const C*>(out), count, false);
    });
  });
}

}  // namespace tessera::kernels::cpu
