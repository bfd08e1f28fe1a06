#pragma once

#include <algorithm>
#include <cmath>

#include "core/runtime/cpu/math.h"

// Activations and their derivatives as CPU kernels compute them, one value at a time and without
// branches, so that loops over them vectorize. T is float or double.

namespace tessera::kernels::cpu {

/// erf(x) in f32, within 1.2e-7 absolute. Minimax polynomials (own fit): x P(x^2) below 1,
/// 1 - exp(-Q(|x|)) above; 1 from 4 on.
inline float erf(float x) {
  const float magnitude = std::fabs(x);
  const float a = magnitude < 4.0f ? magnitude : 4.0f;
  const float s = a * a;
  float p = 7.889119571e-5f;
  p = p * s - 8.020841291e-4f;
  p = p * s + 5.189535341e-3f;
  p = p * s - 2.685444459e-2f;
  p = p * s + 1.128360018e-1f;
  p = p * s - 3.761262714e-1f;
  p = p * s + 1.128379166f;
  float q = 2.149611383e-5f;
  q = q * a - 4.391063756e-4f;
  q = q * a + 4.193611099e-3f;
  q = q * a - 2.517896783e-2f;
  q = q * a + 1.083724786e-1f;
  q = q * a + 6.332626122e-1f;
  q = q * a + 1.129556830f;
  q = q * a - 1.834441497e-4f;
  const float y = std::copysign(a < 1.0f ? a * p : 1.0f - tessera::cpu::exp(-q), x);
  return x != x ? x : y;
}
inline double erf(double x) {
  return std::erf(x);
}

struct Relu {
  template <class T>
  static T value(T x) {
    return x < T(0) ? T(0) : x;
  }
  /// x may be the output: both are positive for the same inputs.
  template <class T>
  static T derivative(T x) {
    return x <= T(0) ? T(0) : T(1);
  }
};

/// 1 / (1 + exp(-x)) and 1 minus it, the latter without cancellation.
template <class T>
struct Logistic {
  T value, complement;

  explicit Logistic(T x) {
    const T e = tessera::cpu::exp(-x);
    value = T(1) / (T(1) + e);
    complement = x < T(-80) ? T(1) : e * value;  // e may be infinite there
  }
};

/// x sigmoid(x).
struct Silu {
  template <class T>
  static T value(T x) {
    return x * tessera::cpu::sigmoid(x);
  }
  template <class T>
  static T derivative(T x) {
    const Logistic<T> s(x);
    return s.value * (T(1) + x * s.complement);
  }
};

/// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x sigmoid(2 u).
struct GeluTanh {
  static constexpr double kSlope = 1.5957691216057308;  // 2 sqrt(2 / pi)
  static constexpr double kCubic = 0.044715 * kSlope;

  template <class T>
  static T value(T x) {
    return x * tessera::cpu::sigmoid(x * (T(kSlope) + T(kCubic) * x * x));
  }
  template <class T>
  static T derivative(T x) {
    const Logistic<T> s(x * (T(kSlope) + T(kCubic) * x * x));
    return s.value + x * s.value * s.complement * (T(kSlope) + T(3 * kCubic) * x * x);
  }
};

/// x Phi(x), Phi the normal distribution function.
struct GeluExact {
  static constexpr double kSqrtHalf = 0.70710678118654752;
  static constexpr double kDensity = 0.39894228040143268;  // 1 / sqrt(2 pi)

  template <class T>
  static T value(T x) {
    return T(0.5) * x * (T(1) + erf(x * T(kSqrtHalf)));
  }
  template <class T>
  static T derivative(T x) {
    return T(0.5) * (T(1) + erf(x * T(kSqrtHalf))) +
           x * T(kDensity) * tessera::cpu::exp(T(-0.5) * x * x);
  }
};

}  // namespace tessera::kernels::cpu
