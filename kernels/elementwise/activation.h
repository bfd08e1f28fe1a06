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

/// The normal distribution function of x and exp(-x^2 / 2). Of its smaller tail, of |x|: the
/// exponential times a polynomial in t = 1 / (1 + p |x|) (own fits of that form, which is
/// Hastings'): but for rounding within 5e-8 absolute and 1e-4 relative, for bf16 5e-5 and 5e-4.
template <class T>
struct Normal {
  using C = ComputeType<T>;
  Lanes<T> cdf, exponential;

  explicit Normal(Lanes<T> x) {
    exponential = exp_lanes<T>(C(-0.5) * x * x);
    if constexpr (std::is_same_v<C, double>) {
      for (int i = 0; i < tessera::cpu::kLanes<C>; ++i) {
        cdf[i] = 0.5 * std::erfc(-0.70710678118654752 * x[i]);
      }
    } else {
      const Lanes<T> tail = exponential * tail_factor(tessera::cpu::abs_of<C>(x));
      cdf = x < 0.0f ? tail : 1.0f - tail;
    }
  }

 private:
  static Lanes<T> tail_factor(Lanes<T> x) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const Lanes<T> t = tessera::cpu::reciprocal_lanes<T>(0.485f * x + 1.0f);
      Lanes<T> p = -1.206518628e-1f * t + 2.569240001e-1f;
      p = p * t + 1.682974165e-1f;
      return (p * t + 1.953941545e-1f) * t;
    }
    const Lanes<T> t = tessera::cpu::reciprocal_lanes<T>(0.29f * x + 1.0f);
    Lanes<T> p = -8.959433620e-2f * t + 2.877244796e-1f;
    p = p * t - 9.723223278e-2f;
    p = p * t + 1.823015339e-1f;
    p = p * t + 9.982116436e-2f;
    return (p * t + 1.169793559e-1f) * t;
  }
};

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
      e = tessera::cpu::pow2_lanes<T>(max_of<C>(-bound, min_of<C>(bound, x_unit)));
    } else {
      bound = tessera::cpu::broadcast(C(87));
      e = exp_lanes<T>(min_of<C>(bound, x_unit));
    }
    value = x_unit < bound ? tessera::cpu::reciprocal_lanes<T>(C(1) + e) : Lanes<T>{};
    complement = e * value;
  }

  /// The value without the complement. Beyond +-200 the exponential is infinite or zero, so bf16
  /// needs one bound on |x| and no selection.
  static Lanes<T> value_of(Lanes<T> x_unit) {
#if TESSERA_AVX512
    if constexpr (std::is_same_v<T, BFloat16>) {
      constexpr int kLesserMagnitude = 2;  // with the sign of the first
      const auto bounded = (Lanes<T>)_mm512_maskz_range_ps(
          tessera::cpu::kEveryLane, (__m512)x_unit, _mm512_set1_ps(200.0f), kLesserMagnitude);
      return tessera::cpu::reciprocal_lanes<T>(1.0f + tessera::cpu::pow2_lanes<T>(bounded));
    }
#endif
    return Logistic(x_unit).value;
  }
};

/// x sigmoid(x).
struct Silu {
  template <class T>
  static Lanes<T> value(Lanes<T> x) {
    return x * Logistic<T>::value_of(x * ComputeType<T>(Logistic<T>::kUnit));
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
    return x * Logistic<T>::value_of(x * (C(kUnit * kSlope) + C(kUnit * kCubic) * (x * x)));
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
  static constexpr double kDensity = 0.39894228040143268;  // 1 / sqrt(2 pi)

  template <class T>
  static Lanes<T> value(Lanes<T> x) {
    return x * Normal<T>(x).cdf;
  }
  template <class T>
  static Lanes<T> derivative(Lanes<T> x) {
    const Normal<T> normal(x);
    return normal.cdf + x * ComputeType<T>(kDensity) * normal.exponential;
  }
};

}  // namespace tessera::kernels::cpu
