#pragma once

// What each pointwise op computes, once for CPU vectors and CUDA floats.

#if defined(__CUDACC__)
#define TESSERA_POINTWISE_FUNCTION __device__ inline
#else
#define TESSERA_POINTWISE_FUNCTION inline
#endif

// clang-format off
// X(name, floating-point operations, value) by the number of operands a, b, c. V is a vector of C
// or C itself; conditions select lane by lane, so that they combine by & and |. Gradients of an op
// take dy first. F has the elementary functions.
#define TESSERA_POINTWISE_OPS_OF_1(X)                                                            \
  X(Exp, 1, F::exp(a))                                                                           \
  X(Log, 1, F::log(a))                                                                           \
  X(Sqrt, 1, F::sqrt(a))                                                                         \
  X(Rsqrt, 2, one / F::sqrt(a))                                                                  \
  X(Tanh, 1, F::tanh(a))                                                                         \
  X(Sigmoid, 3, one / (one + F::exp(-a)))                                                        \
  X(Abs, 1, F::abs(a))

// Of integers too: 1 or 0.
#define TESSERA_POINTWISE_COMPARISONS(X)                                                         \
  X(Eq, 1, a == b ? one : zero)                                                                  \
  X(Ne, 1, a != b ? one : zero)                                                                  \
  X(Lt, 1, a < b ? one : zero)                                                                   \
  X(Le, 1, a <= b ? one : zero)                                                                  \
  X(And, 1, ((a != zero) & (b != zero)) ? one : zero)                                            \
  X(Or, 1, ((a != zero) | (b != zero)) ? one : zero)

#define TESSERA_POINTWISE_OPS_OF_2(X)                                                            \
  TESSERA_POINTWISE_COMPARISONS(X)                                                               \
  X(Add, 1, a + b)                                                                               \
  X(Sub, 1, a - b)                                                                               \
  X(Mul, 1, a * b)                                                                               \
  X(Div, 1, a / b)                                                                               \
  X(Pow, 1, F::pow(a, b))                                                                        \
  X(Maximum, 1, larger(a, b))                                                                    \
  X(Minimum, 1, smaller(a, b))                                                                   \
  X(SquaredDifference, 2, (a - b) * (a - b))                                                     \
  X(AbsBwd, 1, b > zero ? a : (b < zero ? -a : zero)) /* dy, x */                                \
  X(SqrtBwd, 2, a / (b + b))                          /* dy, y */                                \
  X(RsqrtBwd, 4, C(-0.5) * a * (b * b * b))           /* dy, y */                                \
  X(TanhBwd, 3, a * (one - b * b))                      /* dy, y */                              \
  X(SigmoidBwd, 3, a * ((one - b) * b))                 /* dy, y */

#define TESSERA_POINTWISE_OPS_OF_3(X)                                                            \
  X(Where, 0, a != zero ? b : c)                                                                 \
  X(Clamp, 2, smaller(larger(a, b), c))                                                          \
  X(IsInside, 2, ((a > b) & (a < c)) ? one : zero)                                                \
  X(SquaredDifferenceBwd, 3, (a + a) * (b - c))                 /* dy, x, other */               \
  X(DivBwd, 3, -a * (b / c / c))                                  /* dy, dividend, divisor */    \
  X(PowBwd, 4, c == zero ? zero : a * (c * F::pow(b, c - one))) /* dy, base, exponent */         \
  X(ExponentBwd, 4, ((b == zero) & (c >= zero)) ? zero : a * (F::pow(b, c) * F::log(b)))         \
  X(MaximumBwd, 2, b < c ? zero : (b == c ? a * C(0.5) : a)) /* dy, x, other */
// clang-format on

namespace tessera::kernels {

/// NaN if one of them is.
template <class V>
TESSERA_POINTWISE_FUNCTION V larger(V a, V b) {
  return ((a > b) | (a != a)) ? a : b;
}
template <class V>
TESSERA_POINTWISE_FUNCTION V smaller(V a, V b) {
  return ((a < b) | (a != a)) ? a : b;
}

#define TESSERA_POINTWISE_DEFINE(name, flops, value)                                        \
  struct name##Value {                                                                      \
    template <class F, class V, class C>                                                    \
    TESSERA_POINTWISE_FUNCTION static V of([[maybe_unused]] V a, [[maybe_unused]] V b,      \
                                           [[maybe_unused]] V c, [[maybe_unused]] C unit) { \
      [[maybe_unused]] const V zero{}, one = zero + unit;                                   \
      return value;                                                                         \
    }                                                                                       \
  };
TESSERA_POINTWISE_OPS_OF_1(TESSERA_POINTWISE_DEFINE)
TESSERA_POINTWISE_OPS_OF_2(TESSERA_POINTWISE_DEFINE)
TESSERA_POINTWISE_OPS_OF_3(TESSERA_POINTWISE_DEFINE)
#undef TESSERA_POINTWISE_DEFINE

}  // namespace tessera::kernels
