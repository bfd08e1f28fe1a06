#pragma once

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "core/runtime/dispatch.h"
#include "kernels/elementwise/kernel.h"

namespace tessera::kernels {

/// Row-major general matrix product, for each of `num_batches` matrices:
///   s = op(a) op(b) + bias + residual (+ c, with `accumulate`),   c = activation(s)
/// op(a) is [m, k]: a is stored [m, k], or [k, m] with `trans_a`; op(b) is [k, n]: b is stored
/// [k, n], or [n, k] with `trans_b`. Sums in f32 (f64 for f64), one rounding when s is stored; the
/// activation is of the rounded s (on CUDA of the unrounded one where cuBLASLt fuses it). a and b
/// share a dtype; c has the same, or f32 beside bf16 and f16 operands. The bits do not depend on
/// the number of threads, and on the CPU, with `trans_b` and without `trans_a` (a linear layer),
/// those of a row do not depend on the other rows. k = 0 is a sum of 0.
struct Matmul {
  void* c;
  const void* a;
  const void* b;
  DType dtype;    ///< of a and b
  DType c_dtype;  ///< of c, pre_activation and residual
  bool trans_a = false, trans_b = false;
  bool accumulate = false;  ///< c += ...; not beside a residual or an activation
  bool activate = false;    ///< with `activation`; c is contiguous then
  Activation activation = Activation::kGeluTanh;
  DType bias_dtype = kF32;  ///< dtype or f32
  int64_t m, n, k;
  /// c is rows [first_row, first_row + m) of a product of num_rows (0: m itself). What cuts the whole
  /// into tiles cuts the part: on the CPU it has the same bits, if it is more than one row, and in
  /// f32 up to 512 terms.
  int64_t first_row = 0, num_rows = 0;
  int64_t lda, ldb, ldc;  ///< elements between stored rows
  int64_t num_batches = 1;
  int64_t batch_stride_a = 0, batch_stride_b = 0, batch_stride_c = 0;  ///< elements
  const void* bias = nullptr;                                          ///< [n] or absent
  const void* residual = nullptr;  ///< [m, n] or absent; may be c; one batch only
  int64_t ld_residual = 0;
  void* pre_activation = nullptr;  ///< s, [m, n] contiguous, or absent; one batch only
  /// [m] of c_dtype or absent: the sums of the rows of op(a), written. A bias's gradient beside its
  /// weight's; only for products that `fuses_row_sums` names.
  void* row_sums = nullptr;
  void* workspace = nullptr;  ///< scratch of cuBLASLt, set by `matmul` itself
  int64_t workspace_nbytes = 0;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(matmul, Matmul);

/// Whether this product on this stream also computes `row_sums` (p.row_sums is ignored).
bool fuses_row_sums(const ::tessera::Stream& s, const Matmul& p);

/// db[n] = sum over the rows of dy [rows, n], or db += with `accumulate`: runs of rows are added in
/// f32 (f64 for f64), then the runs in order. `partials` holds num_chunks(rows) x n such sums.
struct BiasGrad {
  void* db;
  void* partials;
  const void* dy;
  DType db_dtype, dtype;  ///< dtype is that of dy
  int64_t rows, n, ld_dy;
  bool accumulate = false;
  static int64_t num_chunks(int64_t rows) { return std::clamp<int64_t>((rows + 31) / 32, 1, 32); }
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(bias_grad, BiasGrad);

}  // namespace tessera::kernels
