#pragma once

#include "core/tensor.h"

namespace tessera {

/// Layer normalization over the last dimension (Ba et al. 2016, arXiv:1607.06450).
///   y[..., c] = (x[..., c] - mean) * rstd * w[c] + b[c],   rstd = 1 / sqrt(var_c(x) + eps)
/// Shapes   x [..., C], w [C], b [C] or undefined -> y [..., C]; x may be a slice of a packed
///          buffer (rows contiguous), without a copy
/// Dtypes   x, y f32 | bf16 | f16 | f64; w, b the same or f32; sums in f32, one rounding at the end
/// Saves    x, w, mean, rstd (8 bytes per row)
/// Grads    dx, dw, db; dw and db are summed over rows in fixed order (bitwise repeatable)
/// Streams  current stream; never synchronizes
/// Errors   ShapeError if w or b is not [C]; DtypeError if w is neither x's dtype nor f32
Tensor layer_norm(const Tensor& x, const Tensor& w, const Tensor& b, float eps = 1e-5f);

/// RMS normalization over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).
///   y[..., c] = x[..., c] * rstd[...] * w[c],   rstd = 1 / sqrt(mean_c(x^2) + eps)
/// Shapes   x [..., C], w [C] -> y [..., C]; x may be a slice of a packed buffer, e.g. the heads
///          [B, T, H, D] of a qkv buffer, without a copy
/// Dtypes   x, y f32 | bf16 | f16 | f64; w the same or f32; sums in f32, one rounding at the end
/// Saves    x, w, rstd (4 bytes per row)
/// Grads    dx, dw; dw is summed over rows in fixed order (bitwise repeatable)
/// Streams  current stream; never synchronizes
/// Errors   ShapeError if w is not [C]; DtypeError if w is neither x's dtype nor f32
Tensor rms_norm(const Tensor& x, const Tensor& w, float eps = 1e-5f);

/// What the fused residual norms return: `sum` goes on along the residual path, `y` into a branch.
struct ResidualNorm {
  Tensor y, sum;
};

/// sum = x + residual (rounded to x's dtype), y = layer_norm(sum, w, b): the same bits as the two
/// ops, in one pass over memory each way. The gradients of x and residual are one tensor,
/// d_sum + the norm's dx. Shapes, dtypes and errors as layer_norm; residual like x.
/// Saves sum, w, mean, rstd.
ResidualNorm add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& w,
                            const Tensor& b, float eps = 1e-5f);

/// sum = x + residual (rounded to x's dtype), y = rms_norm(sum, w); else as add_layer_norm.
/// Saves sum, w, rstd.
ResidualNorm add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& w,
                          float eps = 1e-5f);

}  // namespace tessera
