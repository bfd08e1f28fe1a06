#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/enum_names.h"
#include "core/tensor.h"

namespace tessera {

/// Multiplication by a number known on the host: y = factor * x.
/// Shapes   x any -> y the same; x may be row-strided (others are copied first)
/// Dtypes   f32 | bf16 | f16 | f64
/// Saves    nothing
/// Grads    dx = factor * dy
/// Errors   DtypeError if x is not floating
Tensor scale(const Tensor& x, double factor);

/// Which function `gelu` is.
enum class Gelu { kTanh, kExact };
constexpr auto enum_names(Gelu) {
  return std::to_array<EnumName<Gelu>>({{Gelu::kTanh, "tanh"}, {Gelu::kExact, "exact"}});
}

/// Gaussian error linear unit (Hendrycks & Gimpel 2016, arXiv:1606.08415).
///   kExact   y = x Phi(x),  Phi the standard normal distribution function
///   kTanh    y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, as GPT-2 has it
/// Shapes   x any -> y the same; x may be row-strided (others are copied first)
/// Dtypes   f32 | bf16 | f16 | f64; computed in f32 (f64), one rounding
/// Saves    x
/// Errors   DtypeError if x is not floating
Tensor gelu(const Tensor& x, Gelu kind = Gelu::kTanh);

/// y = max(x, 0); NaN stays NaN. The gradient at 0 is 0. Saves y. Shapes, dtypes: as `gelu`.
Tensor relu(const Tensor& x);

/// y = x / (1 + exp(-x)), also known as swish. Saves x. Shapes, dtypes, errors: as `gelu`.
Tensor silu(const Tensor& x);

/// Gated unit of feed-forward layers (Shazeer 2020, arXiv:2002.05202): y = silu(gate) * up.
/// Shapes   gate, up [..., F] -> y [..., F]; both may be slices of one packed [..., 2 F] tensor
///          (see `split`), whose gradient is then written in place
/// Dtypes   f32 | bf16 | f16 | f64, the same for both; computed in f32 (f64), one rounding
/// Saves    gate, up
/// Grads    dgate, dup, in one pass
/// Streams  current stream; never synchronizes
/// Errors   ShapeError if the shapes differ; DtypeError if the dtypes differ or are not floating
Tensor swiglu(const Tensor& gate, const Tensor& up);

/// Cuts x along `dim` into views of the given sizes (packed q, k, v or gate and up).
/// Shapes   x [..., sum(sizes), ...] -> one view for each size
/// Saves    nothing
/// Grads    one buffer of x's shape: ops that consumed a part write their gradient straight into
///          its slice; a part without a gradient is zero
/// Errors   ShapeError if the sizes are negative or do not sum to the dimension
std::vector<Tensor> split(const Tensor& x, std::span<const int64_t> sizes, int dim = -1);

}  // namespace tessera
