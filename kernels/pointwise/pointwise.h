#pragma once

#include <utility>

#include "core/tensor.h"

namespace tessera {

/// A tensor, or a number known on the host, as an operand of the functions below. A number has no
/// shape and no dtype: it is taken in f32 (f64 beside f64), by comparisons in the tensor's dtype.
class Operand {
 public:
  Operand(Tensor tensor) : tensor_(std::move(tensor)) {}  // NOLINT(google-explicit-constructor)
  Operand(double number) : number_(number) {}             // NOLINT(google-explicit-constructor)

  /// Undefined if it is a number.
  const Tensor& tensor() const { return tensor_; }
  double number() const { return number_; }

 private:
  Tensor tensor_;
  double number_ = 0;
};

/// Arithmetic with PyTorch's broadcasting.
///   y = a + b   a - b   a b   a / b   a^b   max(a, b)   min(a, b)   (a - b)^2
/// Shapes   a, b any shapes that broadcast to each other -> y their common shape
/// Dtypes   f32 | bf16 | f16 | f64, the same for all tensors; computed in f32 (f64), one rounding
/// Values   IEEE's for zero, infinity and NaN; a^0 = 1; max and min are NaN if an operand is
/// Saves    what the gradients that are wanted read: of mul the other operand, of div the divisor
///          and, for its own gradient, the dividend, of pow, maximum, minimum and
///          squared_difference both, else nothing
/// Grads    da, db; over broadcast dimensions summed in fixed order (see `sum_to`). Where a = b,
///          maximum and minimum give each half; the exponent's gradient is 0 at 0^b with b >= 0
/// Streams  current stream; never synchronizes
/// Errors   ShapeError if the shapes do not broadcast; DtypeError if a dtype is not floating or
///          they differ; Error if both are numbers or a tensor is on another device than the
///          current Context's
Tensor add(const Operand& a, const Operand& b);
Tensor sub(const Operand& a, const Operand& b);
Tensor mul(const Operand& a, const Operand& b);
Tensor div(const Operand& a, const Operand& b);
Tensor pow(const Operand& base, const Operand& exponent);
Tensor maximum(const Operand& a, const Operand& b);
Tensor minimum(const Operand& a, const Operand& b);
Tensor squared_difference(const Operand& a, const Operand& b);

inline Tensor operator+(const Operand& a, const Operand& b) {
  return add(a, b);
}
inline Tensor operator-(const Operand& a, const Operand& b) {
  return sub(a, b);
}
inline Tensor operator*(const Operand& a, const Operand& b) {
  return mul(a, b);
}
inline Tensor operator/(const Operand& a, const Operand& b) {
  return div(a, b);
}

/// Functions of one tensor: y = e^x   ln x   x^(1/2)   x^(-1/2)   tanh x   1 / (1 + e^-x)   |x| -x
/// Shapes   x any -> y the same
/// Dtypes   f32 | bf16 | f16 | f64; computed in f32 (f64), one rounding
/// Saves    log, abs: x; neg: nothing; the others: y
/// Grads    dx; of abs 0 at 0
/// Errors   DtypeError if x is not floating
Tensor exp(const Tensor& x);
Tensor log(const Tensor& x);
Tensor sqrt(const Tensor& x);
Tensor rsqrt(const Tensor& x);
Tensor tanh(const Tensor& x);
Tensor sigmoid(const Tensor& x);
Tensor abs(const Tensor& x);
Tensor neg(const Tensor& x);

inline Tensor operator-(const Tensor& x) {
  return neg(x);
}

/// y = min(max(x, low), high); an infinity leaves that side open; NaN stays NaN.
/// Saves    which elements are between low and high (1 byte each), if x wants a gradient
/// Grads    dx = dy between low and high, 0 beyond and at them
/// Shapes, dtypes, errors: as `exp`.
Tensor clamp(const Tensor& x, double low, double high);

/// Masks: u8, 1 where the comparison holds, else 0 (with NaN: only `ne` holds). No gradient.
/// Shapes   a, b any shapes that broadcast to each other -> their common shape
/// Dtypes   any, the same for both, compared exactly; beside integers a number must be whole
/// Errors   as `add`, but for the dtypes: DtypeError if they differ
Tensor eq(const Operand& a, const Operand& b);
Tensor ne(const Operand& a, const Operand& b);
Tensor lt(const Operand& a, const Operand& b);
Tensor le(const Operand& a, const Operand& b);
Tensor gt(const Operand& a, const Operand& b);
Tensor ge(const Operand& a, const Operand& b);
/// Of masks, in which every value but 0 is true; DtypeError if one is not u8.
Tensor logical_and(const Tensor& a, const Tensor& b);
Tensor logical_or(const Tensor& a, const Tensor& b);
Tensor logical_not(const Tensor& mask);

/// y = mask ? a : b, element by element.
/// Shapes   mask, a, b any shapes that broadcast to each other -> y their common shape
/// Dtypes   mask u8 (0: false); a, b as `add`
/// Saves    mask
/// Grads    da = mask ? dy : 0, db = mask ? 0 : dy, summed as in `add`; what is not taken never
///          reaches a gradient, be it infinite or NaN
/// Errors   as `add`; DtypeError if mask is not u8
Tensor where(const Tensor& mask, const Operand& a, const Operand& b);
/// y = mask ? number : x.
Tensor masked_fill(const Tensor& x, const Tensor& mask, double number);

}  // namespace tessera
