#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/check.h"
#include "core/runtime/cpu/lanes.h"
#include "kernels/optimizer/dynamic_map.h"

// Eight-bit states on the CPU ([Note: Eight-bit states] in dynamic_map.h): a code is how many of 255
// ascending thresholds are below a value. Neither way to find it searches.

#if TESSERA_AVX512 && defined(__AVX512VBMI__)
#define TESSERA_AVX512_VBMI 1
#else
#define TESSERA_AVX512_VBMI 0
#endif

namespace tessera::kernels::cpu {

/// One value after the other: its leading bits say between which two codes it is at most, and one
/// comparison decides.
class CodeCells {
 public:
  explicit CodeCells(const DynamicMap& map) : map_(map), codes_(2 * kCells) {
    const auto below = [&](float x) {  // thresholds below x
      return std::lower_bound(map.thresholds.begin(), map.thresholds.end(), x) -
             map.thresholds.begin();
    };
    for (uint32_t cell = 0; cell < kCells; ++cell) {
      // The cell's magnitudes are in [low, high]; those of the first reach down to 0.
      const float low = cell == 0 ? 0 : std::bit_cast<float>((cell + kFirst) << kShift);
      const float high = std::bit_cast<float>(((cell + kFirst + 1) << kShift) - 1);
      const auto add = [&](uint32_t at, float least, float largest) {
        TESSERA_CHECK_AS(InternalError, below(largest) - below(least) <= 1,
                         "CodeCells: more than one code begins between {} and {}", least, largest);
        codes_[at] = static_cast<uint8_t>(below(least));
      };
      add(cell, low, high);
      add(cell + kCells, -high, -low);
    }
  }

  /// Of a value in [-1, 1].
  uint8_t code_of(float x) const {
    const auto bits = std::bit_cast<uint32_t>(x);
    const uint32_t magnitude = std::max((bits & 0x7fffffffu) >> kShift, kFirst) - kFirst;
    const uint8_t code = codes_[magnitude + (bits >> 31) * kCells];
    return static_cast<uint8_t>(code + (x > map_.thresholds[code]));
  }

 private:
  static constexpr uint32_t kShift = 15;                     // 8 bits of the significand stay
  static constexpr uint32_t kFirst = 0x33800000u >> kShift;  // of 2^-24, below every threshold
  static constexpr uint32_t kCells = (0x3f800000u >> kShift) - kFirst + 1;

  const DynamicMap& map_;
  std::vector<uint8_t> codes_;  // a cell's lower code; of negative values behind those of positive
};

#if TESSERA_AVX512_VBMI
/// 64 values at once. In a decade the thresholds lie equally far apart, so codes are a line in the
/// magnitude; the lines of the decades, each less steep than the one below it, meet at their ends
/// (but for a fifth of a code), so the least of all of them is the one that counts. Rounded down by
/// a half more than that, it is the code or the one below it, and one comparison decides. f32 values
/// are looked up as four tables of bytes, which lie in registers.
class CodeVectors {
 public:
  static constexpr int64_t kValues = 64;

  CodeVectors(const DynamicMap& map, bool is_signed) {
    for (size_t i = 0; i < 256; ++i) {
      values_.set(i, map.values[i]);
      thresholds_.set(i, map.thresholds[i]);
    }
    const float per_decade = is_signed ? 1 : 2;  // codes of the lowest
    zero_ = is_signed ? 127 : 0;
    const auto line = [&](int decade) {  // the lowest is 0, it ends at 1e-6
      const double end = std::pow(10, decade - 6), codes = per_decade * std::exp2(decade);
      const double slope = codes / (0.9 * end);
      return Line{static_cast<float>(slope),
                  static_cast<float>(0.5 + per_decade * (std::exp2(decade + 1) - 1) - slope * end)};
    };
    lowest_ = line(0);
    for (int octave = 0; octave < 16; ++octave) {  // from 2^(octave - 15) on, the first from 0 on
      const double begin = octave == 0 ? 0 : std::exp2(octave - 15);
      int decade = 1;
      while (decade < 5 && std::pow(10, decade - 6) <= begin) ++decade;
      const Line lower = line(decade), upper = line(decade + 1);
      slopes_[0][octave] = lower.slope, offsets_[0][octave] = lower.offset;
      slopes_[1][octave] = upper.slope, offsets_[1][octave] = upper.offset;
    }
  }

  void decode(float* values, const uint8_t* codes, float absmax) const {
    __m512 x[kParts];
    values_.pick(x, transposed(_mm512_loadu_si512(codes)));
#pragma GCC unroll 4
    for (int k = 0; k < kParts; ++k) {
      _mm512_storeu_ps(values + k * kLanes, _mm512_mul_ps(x[k], _mm512_set1_ps(absmax)));
    }
  }

  /// `inverse` is finite; a value times it may be a last bit beyond 1, which has the code of 1.
  void encode(uint8_t* codes, const float* values, float inverse) const {
    __m512 x[kParts], threshold[kParts];
    __m512i code[kParts];
#pragma GCC unroll 4
    for (int k = 0; k < kParts; ++k) {
      x[k] = _mm512_mul_ps(_mm512_loadu_ps(values + k * kLanes), _mm512_set1_ps(inverse));
      code[k] = guess(x[k]);
    }
    thresholds_.pick(threshold, packed(code));
#pragma GCC unroll 4
    for (int k = 0; k < kParts; ++k) {
      const __mmask16 is_above = _mm512_cmp_ps_mask(x[k], threshold[k], _CMP_GT_OQ);
      code[k] = _mm512_mask_add_epi32(code[k], is_above, code[k], _mm512_set1_epi32(1));
    }
    _mm512_storeu_si512(codes, transposed(packed(code)));
  }

 private:
  static constexpr int kParts = 4, kLanes = 16;
  static constexpr __mmask16 kEvery = 0xffff;

  /// offset + slope |x|, half a code below what it says.
  struct Line {
    float slope, offset;
  };

  /// 256 values of f32, each byte of them in a table.
  class Table {
   public:
    void set(size_t i, float value) {
      const auto bits = std::bit_cast<std::array<uint8_t, 4>>(value);
      for (size_t byte = 0; byte < 4; ++byte) bytes_[byte][i] = bits[byte];
    }
    /// Element i of 16-byte lane L of value[k] is that of byte 16 L + 4 k + i of `index`.
    void pick(__m512 (&value)[kParts], __m512i index) const {
      const __mmask64 is_upper = _mm512_movepi8_mask(index);
      __m512i byte[4];
#pragma GCC unroll 4
      for (int b = 0; b < 4; ++b) {
        const auto half = [&](int first) __attribute__((always_inline)) {
          return _mm512_permutex2var_epi8(_mm512_load_si512(bytes_[b] + first), index,
                                          _mm512_load_si512(bytes_[b] + first + 64));
        };
        byte[b] = _mm512_mask_mov_epi8(half(0), is_upper, half(128));
      }
      const __m512i low01 = _mm512_unpacklo_epi8(byte[0], byte[1]);
      const __m512i high01 = _mm512_unpackhi_epi8(byte[0], byte[1]);
      const __m512i low23 = _mm512_unpacklo_epi8(byte[2], byte[3]);
      const __m512i high23 = _mm512_unpackhi_epi8(byte[2], byte[3]);
      value[0] = (__m512)_mm512_unpacklo_epi16(low01, low23);
      value[1] = (__m512)_mm512_unpackhi_epi16(low01, low23);
      value[2] = (__m512)_mm512_unpacklo_epi16(high01, high23);
      value[3] = (__m512)_mm512_unpackhi_epi16(high01, high23);
    }

   private:
    alignas(64) uint8_t bytes_[4][256] = {};
  };

  /// As `pick` takes them.
  static __m512i packed(const __m512i (&code)[kParts]) {
    return _mm512_packus_epi16(_mm512_packus_epi32(code[0], code[1]),
                               _mm512_packus_epi32(code[2], code[3]));
  }
  /// Bytes in order to those that `pick` takes, and back.
  static __m512i transposed(__m512i bytes) {
    alignas(64) static constexpr int32_t kOrder[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                       2, 6, 10, 14, 3, 7, 11, 15};
    return _mm512_maskz_permutexvar_epi32(kEvery, _mm512_load_si512(kOrder), bytes);
  }

  /// The code of x or the one below.
  __m512i guess(__m512 x) const {
    const __m512i sign_bit = _mm512_set1_epi32(INT32_MIN);
    const __m512 magnitude = (__m512)_mm512_maskz_andnot_epi32(kEvery, sign_bit, (__m512i)x);
    const __m512 indexed = _mm512_maskz_max_ps(kEvery, magnitude, _mm512_set1_ps(0x1p-15f));
    const __m512i octave = _mm512_maskz_srli_epi32(kEvery, (__m512i)indexed, 23);  // 4 bits count
    const auto at = [&](int i) __attribute__((always_inline)) {
      return _mm512_fmadd_ps(
          magnitude, _mm512_maskz_permutexvar_ps(kEvery, octave, _mm512_load_ps(slopes_[i])),
          _mm512_maskz_permutexvar_ps(kEvery, octave, _mm512_load_ps(offsets_[i])));
    };
    __m512 code =
        _mm512_fmadd_ps(magnitude, _mm512_set1_ps(lowest_.slope), _mm512_set1_ps(lowest_.offset));
    code = _mm512_maskz_min_ps(kEvery, code, _mm512_maskz_min_ps(kEvery, at(0), at(1)));
    code = (__m512)_mm512_ternarylogic_epi32(sign_bit, (__m512i)x, (__m512i)code, 0xca);
    return _mm512_maskz_cvttps_epi32(kEvery, _mm512_add_ps(code, _mm512_set1_ps(zero_)));
  }

  Table values_, thresholds_;
  alignas(64) float slopes_[2][16], offsets_[2][16];
  Line lowest_;
  float zero_;  // the code of 0
};
#endif

/// Codes of blocks and back.
class CodeTable {
 public:
  explicit CodeTable(bool is_signed) : CodeTable(dynamic_map(is_signed), is_signed) {}

  /// values[i] = map[codes[i]] * absmax
  void decode(float* values, const uint8_t* codes, float absmax, int64_t count) const {
    int64_t i = 0;
#if TESSERA_AVX512_VBMI
    constexpr int64_t kStep = CodeVectors::kValues;
    for (; i + kStep <= count; i += kStep) vectors_.decode(values + i, codes + i, absmax);
#endif
    for (; i < count; ++i) values[i] = map_.values[codes[i]] * absmax;
  }

  /// Of a block with this largest magnitude; not a number if a value is not finite.
  void encode(uint8_t* codes, const float* values, float absmax, int64_t count) const {
    if (!(absmax > 0)) {
      std::fill(codes, codes + count, uint8_t{0});
      return;
    }
    const float inverse = 1 / absmax;
    int64_t i = 0;
#if TESSERA_AVX512_VBMI
    constexpr int64_t kStep = CodeVectors::kValues;
    const int64_t end = std::isfinite(inverse) ? count : 0;
    for (; i + kStep <= end; i += kStep) vectors_.encode(codes + i, values + i, inverse);
#endif
    for (; i < count; ++i) {
      const float x = values[i] * inverse;  // not a number: 0 times the inverse of a subnormal one
      codes[i] = cells_.code_of(x > -1 ? (x < 1 ? x : 1.0f) : -1.0f);
    }
  }

 private:
  CodeTable(const DynamicMap& map, [[maybe_unused]] bool is_signed)
      : map_(map),
#if TESSERA_AVX512_VBMI
        vectors_(map, is_signed),
#endif
        cells_(map) {
  }

  const DynamicMap& map_;
#if TESSERA_AVX512_VBMI
  CodeVectors vectors_;
#endif
  CodeCells cells_;
};

}  // namespace tessera::kernels::cpu
