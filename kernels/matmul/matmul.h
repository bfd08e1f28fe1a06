#pragma once

#include "core/tensor.h"
#include "kernels/elementwise/elementwise.h"

// Matrix products. Dims: M rows, N columns, K summed; in layers R = all leading dims of x together.
//
// Common to all ops here
//   Dtypes   f32 | bf16 | f16 | f64, the same for all operands; a bias may be f32 beside bf16 and
//            f16; sums in f32 (f64), one rounding at the end
//   Grads    written into their destinations by the product itself, adding where that is asked; a
//            parameter's gradient comes in its own dtype, so an f32 gradient of bf16 operands is
//            not rounded on the way
//   Bits     the same for any number of threads; rows of `linear` do not depend on other rows, but
//            by cuBLASLt (backend.h), whose order of sums depends on the shape
//   Streams  current stream; never synchronizes

namespace tessera {

/// While one lives on this thread, linear layers take their rows for few (kernels::matmul_few_rows):
/// on the CPU bound by the time to read the weights once, which is what decoding wants. A row has the
/// same bits whatever the others, but other ones than outside of it.
class FewRows {
 public:
  FewRows();
  ~FewRows();
  FewRows(const FewRows&) = delete;
  FewRows& operator=(const FewRows&) = delete;
  static bool is_active();

 private:
  bool was_active_;
};

/// Matrix product over the last two dimensions.
///   y[..., m, n] = sum_k a[..., m, k] b[..., k, n]
/// Shapes   a [..., M, K]; b [..., K, N] with the same leading dimensions, or [K, N] for all
///          -> y [..., M, N]. Transposed views and evenly spaced rows are read where they are;
///          anything else is copied first.
/// Saves    a, b
/// Grads    da = dy b^T, db = a^T dy (summed over the leading dimensions if b has none)
/// Errors   ShapeError if the shapes do not fit; DtypeError if the dtypes differ
Tensor matmul(const Tensor& a, const Tensor& b);

/// A linear layer.
///   y[..., n] = sum_k x[..., k] w[n, k] + bias[n]
/// Shapes   x [..., K] (evenly spaced rows, else copied), w [N, K], bias [N] or undefined
///          -> y [..., N]
/// Saves    x, w; x not if w requires no gradient, whose product is then left out
/// Grads    dx = dy w, dw = dy^T x, dbias = sum over rows of dy in fixed order
/// Errors   ShapeError if w is not [N, K] or bias not [N]; DtypeError if w has not x's dtype
///          or bias neither x's dtype nor f32
Tensor linear(const Tensor& x, const Tensor& w, const Tensor& bias = {});

/// gelu(linear(x, w, bias)), with the same bits as the two ops.
/// Saves    those of `linear` and the pre-activation
/// Shapes, errors: as `linear`
Tensor linear_gelu(const Tensor& x, const Tensor& w, const Tensor& bias, Gelu kind);

/// residual + linear(x, w, bias) with one rounding.
/// Shapes   residual [..., N], the shape of the result
/// Saves    those of `linear`
/// Grads    those of `linear`; d_residual = dy
/// Errors   as `linear`; ShapeError or DtypeError if residual has not the result's shape and dtype
Tensor linear_residual(const Tensor& x, const Tensor& w, const Tensor& bias,
                       const Tensor& residual);

}  // namespace tessera
