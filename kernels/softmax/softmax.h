#pragma once

#include "core/tensor.h"

namespace tessera {

/// Softmax over the last dimension, shifted by the row's maximum so that it cannot overflow.
///   y[..., c] = exp(x[..., c] - max) / sum_c exp(x[..., c] - max)
/// Shapes   x [..., C] -> y [..., C]; x may be a slice of a packed buffer (rows contiguous)
/// Dtypes   x, y f32 | bf16 | f16 | f64; sums in f32, one rounding at the end
/// Saves    y
/// Grads    dx = y * (dy - sum_c(dy * y))
/// Streams  current stream; never synchronizes
/// Errors   ShapeError for a scalar or C = 0; DtypeError unless floating
Tensor softmax(const Tensor& x);

/// Logarithm of the softmax over the last dimension: y = x - max - log(sum_c exp(x - max)).
/// Saves y; dx = dy - exp(y) * sum_c(dy). Shapes, dtypes and errors as softmax.
Tensor log_softmax(const Tensor& x);

}  // namespace tessera
