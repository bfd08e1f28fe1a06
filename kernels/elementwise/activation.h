#pragma once

#include "core/runtime/cpu/lanes.h"

// Activations and their derivatives as CPU kernels compute them, a vector of values at a time and
// without branches. T is the type of the rows, which says how accurate a result has to be.

namespace tessera::kernels::cpu {

using tessera::cpu::exp_lanes;
using tessera::cpu::max_of;
using tessera::cpu::min_of;

/// Values of rows of T, in its compute type.
template <class T>
using Lanes = tessera::cpu::Vector<ComputeType<T>>;

/// erf(x), within 1.2e-7 absolute in f32. Minimax polynomials (own fit): x P(x^2) below 1,
/// 1 - exp(-Q(|x|)) above; 1 from 4 on.
template <class T>
inline Lanes<T> erf(Lanes<T> x) {
  using C = ComputeType<T>;
  if constexpr (std::is_same_v<C, double>) {
    for (int i = 0; i < tessera::cpu::kLanes<C>; ++i) x[i] = std::erf(x[i]);
    return x;
  } else {
    const Lanes<T> a = min_of<C>(tessera::cpu::broadcast(4.0f), tessera::cpu::abs_of<C>(x));
    const Lanes<T> s = a * a;
    Lanes<T> p = 7.889119571e-5f * s - 8.020841291e-4f;
    p = p * s + 5.189535341e-3f;
    p = p * s - 2.685444459e-2f;
    p = p * s + 1.128360018e-1f;
    p = p * s - 3.761262714e-1f;
    p = p * s + 1.128379166f;
    Lanes<T> q = 2.149611383e-5f * a - 4.391063756e-4f;
    q = q * a + 4.193611099e-3f;
    q = q * a - 2.517896783e-2f;
    q = q * a + 1.083724786e-1f;
    q = q * a + 6.332626122e-1f;
    q = q * a + 1.129556830f;
    q = q * a - 1.834441497e-4f;
    const Lanes<T> y = a < 1.0f ? a * p : 1.0f - exp_lanes<T>(-q);
    return x < 0.0f ? -y : y;
  }
}

struct Relu {
  template <class T>
  static Lanes<T> value(Lanes<T> x) {
    return x < ComputeType<T>(0) ? Lanes<T>{} : x;
  }
  /// x may be the output: both are positive for the same inputs.
  template <class T>
  static Lanes<T> derivative(Lanes<T> x) {
    return x <= ComputeType<T>(0) ? Lanes<T>{} : Lanes<T>{} + ComputeType<T>(1);
  }
};

/// s = 1 / (1 + exp(-x)) and 1 - s without cancellation. Takes x times kUnit, the factor that
/// makes the exponential cheap; it costs nothing where x is a product.
template <class T>
struct Logistic {
  using C = ComputeType<T>;
  static constexpr double kUnit = sizeof(T) == 2 ? -1.4426950408889634 : -1;  // -log2(e)
  Lanes<T> value, complement;

  explicit Logistic(Lanes<T> x_unit) {
    // The exponential stays finite; beyond the bound, and for NaN, the value is 0.
    Lanes<T> e, bound;
    if constexpr (sizeof(T) == 2) {
      bound = tessera::cpu::broadcast(126.0f);
      e = tessera::cpu::pow2_lanes(max_of<C>(-bound, min_of<C>(bound, x_unit)));
    } else {
      bound = tessera::cpu::broadcast(C(87));
      e = exp_lanes<T>(min_of<C>(bound, x_unit));
    }
    value = x_unit < bound ? C(1) / (C(1) + e) : Lanes<T>{};
    complement = e * value;
  }
};

/// x sigmoid(x).
struct Silu {
  template <class T>
  static Lanes<T> value(Lanes<T> x) {
    return x * Logistic<T>(x * ComputeType<T>(Logistic<T>::kUnit)).value;
  }
  template <class T>
  static Lanes<T> derivative(Lanes<T> x) {
    const Logistic<T> s(x * ComputeType<T>(Logistic<T>::kUnit));
    return s.value * (ComputeType<T>(1) + x * s.complement);
  }
};

/// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x sigmoid(2 u).
struct GeluTanh {
  static constexpr double kSlope = 1.5957691216057308;  // 2 sqrt(2 / pi)
  static constexpr double kCubic = 0.044715 * kSlope;

  template <class T>
  static Lanes<T> value(Lanes<T> x) {
    using C = ComputeType<T>;
    constexpr double kUnit = Logistic<T>::kUnit;
    return x * Logistic<T>(x * (C(kUnit * kSlope) + C(kUnit * kCubic) * (x * x))).value;
  }
  template <class T>
  static Lanes<T> derivative(Lanes<T> x) {
    using C = ComputeType<T>;
    const Lanes<T> square = x * x;
    constexpr double kUnit = Logistic<T>::kUnit;
    const Logistic<T> s(x * (C(kUnit * kSlope) + C(kUnit * kCubic) * square));
    return s.value + x * s.value * s.complement * (C(kSlope) + C(3 * kCubic) * square);
  }
};

/// x Phi(x), Phi the normal distribution function.
struct GeluExact {
  static constexpr double kSqrtHalf = 0.70710678118654752;
  static constexpr double kDensity = 0.39894228040143268;  // 1 / sqrt(2 pi)

  template <class T>
  static Lanes<T> value(Lanes<T> x) {
    using C = ComputeType<T>;
    return C(0.5) * x * (C(1) + erf<T>(x * C(kSqrtHalf)));
  }
  template <class T>
  static Lanes<T> derivative(Lanes<T> x) {
    using C = ComputeType<T>;
    return C(0.5) * (C(1) + erf<T>(x * C(kSqrtHalf))) +
           x * C(kDensity) * exp_lanes<T>(C(-0.5) * x * x);
  }
};

}  // namespace tessera::kernels::cpu
