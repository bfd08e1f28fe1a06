#pragma once

#include <cstdint>

#include "core/dtype.h"

// Stochastic rounding of f32 to bf16 and f16, the same bits on every device: integer arithmetic
// only.

#if defined(__CUDACC__)
#define TESSERA_ROUNDING_FUNCTION __host__ __device__ inline
#else
#define TESSERA_ROUNDING_FUNCTION inline
#endif

namespace tessera::kernels {

/// Rounds a magnitude (f32 bits without the sign) between two neighbours of T up if the part that
/// T drops, as a fraction of their distance, exceeds word / 2^32: up with just the probability that
/// makes the expectation the value itself. What T can hold stays as it is. From kLargest on, T's
/// largest finite value, rounding is to nearest: chance makes no infinity, and what is not finite
/// stays so.
template <class T>
struct StochasticGrid;

template <>
struct StochasticGrid<BFloat16> {
  static constexpr uint32_t kLargest = 0x7f7f0000u;

  TESSERA_ROUNDING_FUNCTION static uint32_t round(uint32_t magnitude, uint32_t word) {
    return (magnitude + (word >> 16)) >> 16;  // a carry goes on into the exponent
  }
};

template <>
struct StochasticGrid<Float16> {
  static constexpr uint32_t kLargest = 0x477fe000u;

  TESSERA_ROUNDING_FUNCTION static uint32_t round(uint32_t magnitude, uint32_t word) {
    constexpr uint32_t kSmallestNormal = 0x38800000u;
    if (magnitude >= kSmallestNormal) return (magnitude - 0x38000000u + (word >> 19)) >> 13;
    // Multiples of 2^-24, as a fixed-point number with 32 bits behind the point.
    const uint32_t exponent = magnitude >> 23;
    const uint64_t significand = (magnitude & 0x7fffffu) | (exponent > 0 ? 0x800000u : 0u);
    const uint32_t shift = 126 - (exponent > 0 ? exponent : 1);
    const uint64_t fixed = shift < 64 ? significand << 32 >> shift : 0;
    return static_cast<uint32_t>((fixed + word) >> 32);
  }
};

/// The rounded bits of the f32 `bits`, `nearest` where chance has no say.
template <class T>
TESSERA_ROUNDING_FUNCTION uint16_t round_stochastic(uint32_t bits, uint32_t word,
                                                    uint16_t nearest) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= StochasticGrid<T>::kLargest) return nearest;
  const uint32_t sign = bits >> 16 & 0x8000u;
  return static_cast<uint16_t>(sign | StochasticGrid<T>::round(magnitude, word));
}

}  // namespace tessera::kernels
