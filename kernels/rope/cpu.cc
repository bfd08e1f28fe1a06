#include <algorithm>
#include <cmath>

#include "core/runtime/cpu/lanes.h"
#include "core/runtime/cpu/parallel.h"
#include "kernels/rope/kernel.h"
#include "kernels/rows.h"

// rope_table: angles and their reduction modulo pi / 2 in f64, polynomials in f32, vectorized over
// frequencies. rope: parallel over (batch, time); a position's table row serves all its heads.

namespace tessera::kernels::cpu {
namespace {

using tessera::cpu::parallel_for;

double frequency(const RopeTable& a, int64_t i) {
  const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(a.rotary_dim);
  const double base = std::pow(a.theta, exponent);
  if (a.scaling == RopeTable::Scaling::kNone) return base;
  if (a.scaling == RopeTable::Scaling::kLinear) return base / a.factor;
  const double turns = a.original_max_position * base / (2 * M_PI);  // in the original context
  const double high = (turns - a.low_freq_factor) / (a.high_freq_factor - a.low_freq_factor);
  const double kept = std::clamp(high, 0.0, 1.0);
  return (1 - kept) * base / a.factor + kept * base;
}

/// cos and sin of position * frequency[i]. |r| <= pi / 4 after subtracting `quarter` quarter turns;
/// minimax polynomials (Cephes coefficients), within 1 ulp there.
void sincos_row(float* cos_out, float* sin_out, double position, const double* frequency,
                int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const double angle = position * frequency[i];
    const double quarter = std::nearbyint(angle * M_2_PI);
    // pi / 2 in two parts: the first has 33 bits, so that its product with `quarter` is exact
    // for quarters below 2^20 and off by 2^-22 at worst below 2^31.
    const double reduced =
        (angle - quarter * 1.57079632673412561417) - quarter * 6.07710050650619224932e-11;
    const float r = static_cast<float>(reduced), r2 = r * r;
    const float s =
        r + r * r2 * (-1.6666654611e-1f + r2 * (8.3321608736e-3f + r2 * -1.9515295891e-4f));
    const float c =
        1.0f - 0.5f * r2 +
        r2 * r2 *
            (4.166664568298827e-2f + r2 * (-1.388731625493765e-3f + r2 * 2.443315711809948e-5f));
    // The double keeps the quarter exact; its low two bits say which of the four it is.
    const int32_t turn = static_cast<int32_t>(quarter) & 3;
    const float cos_abs = (turn & 1) != 0 ? s : c, sin_abs = (turn & 1) != 0 ? c : s;
    cos_out[i] = turn == 1 || turn == 2 ? -cos_abs : cos_abs;
    sin_out[i] = turn >= 2 ? -sin_abs : sin_abs;
  }
}

/// Rotates one head; `sign` is -1 for the inverse.
template <class T, bool kInterleaved, bool kAccumulate>
void rotate_head(T* y, const T* x, const float* table, ComputeType<T> sign, int64_t half,
                 int64_t head_dim) {
  using C = ComputeType<T>;
  const float* cosines = table;
  const float* sines = table + half;
  if constexpr (!kInterleaved) {
    tessera::cpu::for_lanes<C>(half, [=](int64_t i, auto lanes) {
      using tessera::cpu::load_lanes;
      const auto c = load_lanes<C>(cosines + i, lanes), s = sign * load_lanes<C>(sines + i, lanes);
      const auto x_a = load_lanes<C>(x + i, lanes), x_b = load_lanes<C>(x + half + i, lanes);
      auto y_a = x_a * c - x_b * s, y_b = x_b * c + x_a * s;
      if constexpr (kAccumulate) {
        y_a += load_lanes<C>(y + i, lanes);
        y_b += load_lanes<C>(y + half + i, lanes);
      }
      tessera::cpu::store_lanes<C>(y + i, y_a, lanes);
      tessera::cpu::store_lanes<C>(y + half + i, y_b, lanes);
    });
  } else {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const int64_t a = 2 * i, b = a + 1;
      const C c = C(cosines[i]), s = sign * C(sines[i]), x_a = C(x[a]), x_b = C(x[b]);
      const C y_a = x_a * c - x_b * s, y_b = x_b * c + x_a * s;
      assign(y[a], kAccumulate ? C(y[a]) + y_a : y_a);
      assign(y[b], kAccumulate ? C(y[b]) + y_b : y_b);
    }
  }
  if (!kAccumulate && x == y) return;
#pragma omp simd
  for (int64_t d = 2 * half; d < head_dim; ++d) {
    assign(y[d], kAccumulate ? C(y[d]) + C(x[d]) : C(x[d]));
  }
}

template <class T, bool kInterleaved, bool kAccumulate>
void rotate(const Rope& a) {
  const auto one_position = [&](int64_t row) {
    const int64_t b = row / a.time, t = row % a.time, half = a.rotary_dim / 2;
    const T* x = static_cast<const T*>(a.x) + b * a.x_strides[0] + t * a.x_strides[1];
    T* y = static_cast<T*>(a.y) + b * a.y_strides[0] + t * a.y_strides[1];
    const float* table = a.table + b * a.table_batch_stride + t * a.rotary_dim;
    const ComputeType<T> sign = a.inverse ? -1 : 1;
    for (int64_t h = 0; h < a.heads; ++h) {
      rotate_head<T, kInterleaved, kAccumulate>(y + h * a.y_strides[2], x + h * a.x_strides[2],
                                                table, sign, half, a.head_dim);
    }
  };
  const int64_t grain = 1 + 32768 / std::max<int64_t>(1, a.heads * a.head_dim);
  parallel_for(a.batch * a.time, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) one_position(row);
  });
}

}  // namespace

void rope_table(const RopeTable& a) {
  constexpr int64_t kBlock = 128;
  const int64_t half = a.rotary_dim / 2;
  parallel_for(a.rows, 1 + 8192 / std::max<int64_t>(1, half), [&](int64_t begin, int64_t end) {
    double frequencies[kBlock];
    for (int64_t first = 0; first < half; first += kBlock) {
      const int64_t count = std::min(kBlock, half - first);
      for (int64_t i = 0; i < count; ++i) frequencies[i] = frequency(a, first + i);
      for (int64_t row = begin; row < end; ++row) {
        const double position =
            static_cast<double>(a.positions != nullptr ? a.positions[row] : row);
        float* out = a.table + row * a.rotary_dim + first;
        sincos_row(out, out + half, position, frequencies, count);
      }
    }
  });
}

void rope(const Rope& a) {
  visit_float(a.dtype, "rope", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.interleaved) {
      a.accumulate ? rotate<T, true, true>(a) : rotate<T, true, false>(a);
    } else {
      a.accumulate ? rotate<T, false, true>(a) : rotate<T, false, false>(a);
    }
  });
}

}  // namespace tessera::kernels::cpu
