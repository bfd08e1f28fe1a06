#pragma once

#include <cstring>

#include "core/random.h"
#include "core/runtime/cpu/lanes.h"

// Words of Philox (core/random.h) for many elements at once: a lane a block.

namespace tessera::kernels::cpu {

using PhiloxWords = tessera::cpu::Vector<uint64_t>;

inline constexpr int kPhiloxLanes = tessera::cpu::kLanes<uint64_t>;
inline constexpr int kPhiloxBlocks = 4 * kPhiloxLanes;
inline constexpr int64_t kPhiloxWords = 4 * kPhiloxBlocks;

/// The products of the low halves of each lane.
inline PhiloxWords multiply_low_halves(PhiloxWords a, uint32_t b) {
#if TESSERA_AVX512
  return (PhiloxWords)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (PhiloxWords)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
  return (a & 0xffffffffu) * uint64_t{b};
#endif
}

inline PhiloxWords exclusive_or(PhiloxWords a, PhiloxWords b, PhiloxWords c) {
#if TESSERA_AVX512
  return (PhiloxWords)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
  return a ^ b ^ c;
#endif
}

/// kGroups x kPhiloxLanes blocks (core/random.h), a lane each: word w of a block is the low half of
/// c[group][w]; what stands in the high halves is of no meaning.
template <int kGroups>
void philox_lanes(PhiloxKey key, PhiloxWords (&c)[kGroups][4]) {
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const PhiloxWords k0 = PhiloxWords{} + key.k0, k1 = PhiloxWords{} + key.k1;
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      const PhiloxWords p0 = multiply_low_halves(c[g][0], 0xD2511F53u);
      const PhiloxWords p1 = multiply_low_halves(c[g][2], 0xCD9E8D57u);
      c[g][0] = exclusive_or(p1 >> 32, c[g][1], k0);
      c[g][1] = p1;
      c[g][2] = exclusive_or(p0 >> 32, c[g][3], k1);
      c[g][3] = p0;
    }
    key.k0 += 0x9E3779B9u;
    key.k1 += 0xBB67AE85u;
  }
}

/// The words of kPhiloxBlocks blocks from first_block on, of row `high`.
inline void random_words(PhiloxKey key, uint64_t high, uint64_t first_block, uint32_t* words) {
#if TESSERA_AVX512
  // Such that the interleaving below, by pairs of lanes, puts blocks in order.
  constexpr PhiloxWords kOrder = {0, 4, 1, 5, 2, 6, 3, 7};
#define TESSERA_LOW_PAIRS(a, b) __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14)
#define TESSERA_HIGH_PAIRS(a, b) __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15)
#else
  constexpr PhiloxWords kOrder = {0, 2, 1, 3};
#define TESSERA_LOW_PAIRS(a, b) __builtin_shufflevector(a, b, 0, 4, 2, 6)
#define TESSERA_HIGH_PAIRS(a, b) __builtin_shufflevector(a, b, 1, 5, 3, 7)
#endif
  constexpr int kGroups = kPhiloxBlocks / kPhiloxLanes;
  PhiloxWords c[kGroups][4];
  for (int g = 0; g < kGroups; ++g) {
    const PhiloxWords low = kOrder + (first_block + static_cast<uint64_t>(g * kPhiloxLanes));
    c[g][0] = low, c[g][1] = low >> 32;
    c[g][2] = PhiloxWords{} + high, c[g][3] = PhiloxWords{} + (high >> 32);
  }
  philox_lanes(key, c);
  for (int g = 0; g < kGroups; ++g, words += 4 * kPhiloxLanes) {
    constexpr uint64_t kLow = 0xffffffffu;
    const PhiloxWords front = (c[g][0] & kLow) | c[g][1] << 32;
    const PhiloxWords back = (c[g][2] & kLow) | c[g][3] << 32;
    const PhiloxWords pairs[2] = {TESSERA_LOW_PAIRS(front, back), TESSERA_HIGH_PAIRS(front, back)};
    std::memcpy(words, pairs, sizeof pairs);
  }
#undef TESSERA_LOW_PAIRS
#undef TESSERA_HIGH_PAIRS
}

}  // namespace tessera::kernels::cpu
