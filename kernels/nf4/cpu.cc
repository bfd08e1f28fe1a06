// NF4 on the CPU. A record is 256 values; of each block of 64 the 16 values that its codes may have
// are computed and rounded once, and codes pick among them.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/elementwise/row_io.h"
#include "kernels/nf4/codes.h"
#include "kernels/nf4/kernel.h"
#include "kernels/optimizer/dynamic_map.h"

namespace tessera::kernels::cpu {
namespace {

constexpr int64_t kGrainRecords = kGrainElements / kNf4Record;

/// The product, rounded: a compiler that sees the sum with it makes one operation of both.
[[gnu::noinline]] float rounded_product(float a, float b) {
  return a * b;
}

/// The largest magnitude; not a number if a value is not finite.
float largest_magnitude(const float* x, int64_t count) {
  float absmax = 0, poison = 0;
#pragma omp simd reduction(max : absmax) reduction(+ : poison)
  for (int64_t i = 0; i < count; ++i) {
    absmax = std::max(absmax, std::abs(x[i]));
    poison += x[i] * 0.0f;
  }
  return poison == 0 ? absmax : std::numeric_limits<float>::quiet_NaN();
}

/// The codes of a whole block, scaled already: how many thresholds are below each value.
void pack_codes(uint8_t* bytes, const float* scaled) {
  using tessera::cpu::kLanes;
  using Floats = tessera::cpu::Vector<float>;
  using Codes = decltype(Floats{} > Floats{});
  int32_t codes[kNf4Block];
  for (int64_t i = 0; i < kNf4Block; i += kLanes<float>) {
    const Floats x = *reinterpret_cast<const Floats*>(scaled + i);
    Codes count{};
    for (int t = 0; t < 15; ++t) count -= x > nf4_threshold(t);
    std::memcpy(codes + i, &count, sizeof count);
  }
#pragma omp simd
  for (int64_t i = 0; i < kNf4Block / 2; ++i) {
    bytes[i] = static_cast<uint8_t>(codes[2 * i] << 4 | codes[2 * i + 1]);
  }
}

/// The codes and the scale of the first `count` values of a block; the others are 0.
float quantize_block(uint8_t* bytes, const float* x, int64_t count) {
  const float largest = largest_magnitude(x, count);
  float scaled[kNf4Block] = {};
  if (count == kNf4Block) {
    const float inverse = 1.0f / std::max(largest, kNf4LeastScale);
    for (int64_t i = 0; i < count; ++i) scaled[i] = x[i] * inverse;
    pack_codes(bytes, scaled);
    return largest;
  }
  const float absmax = largest < kNf4LeastScale ? kNf4LeastScale : largest;
  for (int64_t i = 0; i < count; ++i) scaled[i] = x[i] / absmax;
  pack_codes(bytes, scaled);
  return absmax;
}

#if defined(__AVX2__)
/// values[i] = table[code i] of 64 codes: both bytes of a value are looked up in a register.
void look_up(uint16_t* values, const uint8_t* bytes, const uint16_t* table) {
  const auto* const entries = reinterpret_cast<const __m128i*>(table);
  const __m128i first_half = _mm_loadu_si128(entries), second_half = _mm_loadu_si128(entries + 1);
  const __m128i byte = _mm_set1_epi16(255);
  const __m128i low_table =
      _mm_packus_epi16(_mm_and_si128(first_half, byte), _mm_and_si128(second_half, byte));
  const __m128i high_table =
      _mm_packus_epi16(_mm_srli_epi16(first_half, 8), _mm_srli_epi16(second_half, 8));
  const __m128i nibble = _mm_set1_epi8(15);
  auto* out = reinterpret_cast<__m128i*>(values);
  for (int64_t i = 0; i < kNf4Block / 2; i += 16) {
    const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i));
    const __m128i first = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
    const __m128i second = _mm_and_si128(pairs, nibble);
    for (const __m128i codes :
         {_mm_unpacklo_epi8(first, second), _mm_unpackhi_epi8(first, second)}) {
      const __m128i lows = _mm_shuffle_epi8(low_table, codes);
      const __m128i highs = _mm_shuffle_epi8(high_table, codes);
      _mm_storeu_si128(out++, _mm_unpacklo_epi8(lows, highs));
      _mm_storeu_si128(out++, _mm_unpackhi_epi8(lows, highs));
    }
  }
}
#endif

template <class T>
void look_up(T* values, const uint8_t* bytes, const T* table) {
  for (int64_t i = 0; i < kNf4Block / 2; ++i) {
    values[2 * i] = table[bytes[i] >> 4];
    values[2 * i + 1] = table[bytes[i] & 15];
  }
}

/// Of a dtype of 2 bytes its bits, else f32.
template <class T>
using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, float>;

template <class T>
void dequantize_block(Bits<T>* values, const uint8_t* bytes, float absmax, int64_t count) {
  float products[16];
  for (int i = 0; i < 16; ++i) products[i] = nf4_value(i) * absmax;
  T rounded[16];
  convert_piece(rounded, products, 16);
  Bits<T> table[16];
  std::memcpy(table, rounded, sizeof table);
  if (count == kNf4Block) return look_up(values, bytes, table);
  Bits<T> whole[kNf4Block];
  look_up(whole, bytes, table);
  std::copy(whole, whole + count, values);
}

}  // namespace

void nf4_quantize(const Nf4Quantize& p) {
  const int64_t num_records = (p.numel + kNf4Record - 1) / kNf4Record;
  tessera::cpu::parallel_for(num_records, kGrainRecords / 8, [&](int64_t first, int64_t last) {
    float buffer[kNf4Record];
    for (int64_t r = first; r < last; ++r) {
      const int64_t count = std::min(kNf4Record, p.numel - r * kNf4Record);
      const float* const x = load_piece(buffer, p.values, p.dtype, r * kNf4Record, 1, count);
      for (int64_t b = 0; b < kNf4RecordBlocks; ++b) {
        uint8_t* const bytes = p.records + r * kNf4RecordNbytes + b * kNf4Block / 2;
        const int64_t left = std::clamp<int64_t>(count - b * kNf4Block, 0, kNf4Block);
        if (left == 0) {
          std::fill_n(bytes, kNf4Block / 2, static_cast<uint8_t>(kNf4Zero << 4 | kNf4Zero));
        } else {
          p.absmax[r * kNf4RecordBlocks + b] = quantize_block(bytes, x + b * kNf4Block, left);
        }
      }
    }
  });
}

void nf4_mean(const Nf4Mean& p) {
  double sums[kNf4NestedBlock] = {};
  for (int64_t first = 0; first < p.num_blocks; first += kNf4NestedBlock) {
    const int64_t count = std::min(kNf4NestedBlock, p.num_blocks - first);
    for (int64_t i = 0; i < count; ++i) sums[i] += static_cast<double>(p.absmax[first + i]);
  }
  for (int64_t half = kNf4NestedBlock / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  *p.mean = static_cast<float>(sums[0] / static_cast<double>(p.num_blocks));
}

void nf4_compress(const Nf4Compress& p) {
  const DynamicMap& map = dynamic_map(/*is_signed=*/true);
  const float mean = *p.mean;
  for (int64_t first = 0; first < p.num_blocks; first += kNf4NestedBlock) {
    const int64_t count = std::min(kNf4NestedBlock, p.num_blocks - first);
    float centred[kNf4NestedBlock];
    for (int64_t i = 0; i < count; ++i) centred[i] = p.absmax[first + i] - mean;
    const float nested = largest_magnitude(centred, count);
    p.nested[first / kNf4NestedBlock] = nested;
    const float inverse = 1 / nested;
    const int64_t begin = std::max(first, p.first);
    const int64_t end = std::min(first + count, p.first + p.count);
    for (int64_t i = begin; i < end; ++i) {
      const float x = std::clamp(centred[i - first] * inverse, -1.0f, 1.0f);
      const auto code = std::lower_bound(map.thresholds.begin(), map.thresholds.end(), x) -
                        map.thresholds.begin();
      const int64_t own = i - p.first;
      p.records[own / kNf4RecordBlocks * kNf4RecordNbytes + kNf4CodeBytes +
                own % kNf4RecordBlocks] = nested > 0 ? static_cast<uint8_t>(code) : uint8_t{0};
    }
  }
}

void nf4_dequantize(const Nf4Dequantize& p) {
  const DynamicMap& map = dynamic_map(/*is_signed=*/true);
  const float mean = *p.mean;
  const int64_t num_records = (p.numel + kNf4Record - 1) / kNf4Record;
  visit_float(p.dtype, "nf4_dequantize", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) <= 4) {
      auto* const values = static_cast<Bits<T>*>(p.values);
      tessera::cpu::parallel_for(num_records, kGrainRecords, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
          const uint8_t* const record = p.records + r * kNf4RecordNbytes;
          const float nested =
              p.nested[(p.first_record + r) / (kNf4NestedBlock / kNf4RecordBlocks)];
          for (int64_t b = 0; b < kNf4RecordBlocks; ++b) {
            const int64_t at = r * kNf4Record + b * kNf4Block;
            if (at >= p.numel) break;
            const float absmax =
                rounded_product(map.values[record[kNf4CodeBytes + b]], nested) + mean;
            dequantize_block<T>(values + at, record + b * kNf4Block / 2, absmax,
                                std::min(kNf4Block, p.numel - at));
          }
        }
      });
    }
  });
}

}  // namespace tessera::kernels::cpu
