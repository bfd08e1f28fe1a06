#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

// Elementary functions for CPU kernels, one value at a time; lanes.h has vectors of them.

namespace tessera::cpu {

/// exp(x) in f32, within 2 ulp; 0 below -87.3 (also for -inf), inf above 88.7, NaN for NaN.
/// Range reduction x = n ln2 + r, |r| <= ln2 / 2, degree-6 polynomial (Cephes coefficients).
inline float exp(float x) {
  // Selects, not fmin and fmax: those are calls. A NaN becomes -88 here and is put back at the end.
  const float above = x > -88.0f ? x : -88.0f;
  const float clamped = above < 89.0f ? above : 89.0f;
  const float n = std::nearbyint(clamped * 1.44269504088896341f);
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = (p * r * r + r) + 1.0f;
  // Two factors of 2^(n/2): n = 128 overflows to inf and n < -126 loses to zero without a branch.
  const int32_t half = static_cast<int32_t>(n) >> 1, rest = static_cast<int32_t>(n) - half;
  const float scaled =
      y * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((rest + 127) << 23);
  const float lower = x < -87.33654f ? 0.0f : scaled;
  const float upper = x > 88.72283f ? std::bit_cast<float>(0x7f800000) : lower;
  return x != x ? x : upper;
}
inline double exp(double x) {
  return std::exp(x);
}

}  // namespace tessera::cpu
