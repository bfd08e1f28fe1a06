#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/runtime/dispatch.h"

namespace tessera::kernels {

/// sums[r] = sum over c of x[r, c]^2, in f32 (f64 for f64) and a fixed order.
struct RowSquares {
  void* sums;  ///< [rows], f32 (f64 for f64)
  const void* x;
  DType dtype;  ///< f32 | bf16 | f16 | f64
  int64_t rows, cols;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(row_squares, RowSquares);

/// x[i] /= max(factor sqrt(sum of the row sums), eps): the Frobenius norm becomes 1 / factor.
struct ScaleByNorm {
  void* x;
  const void* sums;  ///< as in RowSquares
  DType dtype;
  int64_t rows, cols;
  float factor, eps;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(scale_by_norm, ScaleByNorm);

/// out[i, j] = a x[i, j] + b y[i, j], rounded once; `is_symmetric`: of y only the lower triangle is
/// read, y[j, i] = y[i, j]. x may be out; neither is y.
struct MatrixCombine {
  void* out;
  const void* x;  ///< of out's dtype; absent: 0
  const void* y;
  DType dtype;    ///< of out and x: f32 | bf16 | f16 | f64
  DType y_dtype;  ///< f32 (f64 for f64)
  int64_t rows, cols;
  double a, b;
  bool is_symmetric;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(matrix_combine, MatrixCombine);

}  // namespace tessera::kernels
