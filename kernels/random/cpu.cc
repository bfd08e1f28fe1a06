#include <bit>
#include <cmath>

#include "kernels/elementwise/row_io.h"
#include "kernels/random/kernel.h"
#include "kernels/random/words.h"

namespace tessera::kernels::cpu {

namespace {

static_assert(kPieceCols % kPhiloxWords == 0);

/// sqrt(-2 ln u), u in [2^-24, 1]. ln by a polynomial in f = m - 1, m in [sqrt(1/2), sqrt(2)).
float normal_radius(float u) {
  const int32_t bits = std::bit_cast<int32_t>(u);
  const int32_t exponent = (bits - 0x3f3504f3) >> 23;  // 0x3f3504f3 is sqrt(1/2)
  const float f = std::bit_cast<float>(bits - (exponent << 23)) - 1.0f;
  float p = -7.859551749e-2f;
  p = p * f + 1.288161994e-1f;
  p = p * f - 1.312876414e-1f;
  p = p * f + 1.418119634e-1f;
  p = p * f - 1.662455356e-1f;
  p = p * f + 2.000228608e-1f;
  p = p * f - 2.500081041e-1f;
  p = p * f + 3.333331673e-1f;
  const float log_u = static_cast<float>(exponent) * 0.693147181f + (f - f * f * (0.5f - f * p));
  const float square = -2.0f * log_u;
  return std::sqrt(square > 0.0f ? square : 0.0f);  // std::fmax would not vectorize
}

/// cos and sin of 2 pi u, u in [0, 1): quadrant and polynomials in r in [-1/2, 1/2], the angle in
/// quadrants from its middle.
struct UnitVector {
  float cos, sin;
};
UnitVector unit_vector(float u) {
  const float quadrant = std::nearbyint(4.0f * u);
  const float r = 4.0f * u - quadrant, s = r * r;
  float sin = 1.582067424e-4f;
  sin = sin * s - 4.681266476e-3f;
  sin = sin * s + 7.969258276e-2f;
  sin = sin * s - 6.459640961e-1f;
  sin = (sin * s + 1.570796327f) * r;
  float cos = 9.036316993e-4f;
  cos = cos * s - 2.086007132e-2f;
  cos = cos * s + 2.536692039e-1f;
  cos = cos * s - 1.233700541f;
  cos = cos * s + 1.0f;
  // Odd quadrants swap the two; the signs are bit 1 of q + 1 and of q.
  const uint32_t q = static_cast<uint32_t>(static_cast<int32_t>(quadrant));
  const uint32_t x = std::bit_cast<uint32_t>((q & 1) != 0 ? sin : cos);
  const uint32_t y = std::bit_cast<uint32_t>((q & 1) != 0 ? cos : sin);
  return {std::bit_cast<float>(x ^ ((q + 1) & 2) << 30), std::bit_cast<float>(y ^ (q & 2) << 30)};
}

/// Normal numbers from words, two from each pair (Box & Muller 1958).
void normal_values(const uint32_t* words, float* __restrict values) {
#pragma omp simd
  for (int i = 0; i < 2 * kPhiloxBlocks; ++i) {
    // The radius wants (0, 1]: one step of 2^-24 up.
    const float radius = normal_radius(uniform_from_bits(words[2 * i]) + 0x1p-24f);
    const UnitVector v = unit_vector(uniform_from_bits(words[2 * i + 1]));
    values[2 * i] = radius * v.cos;
    values[2 * i + 1] = radius * v.sin;
  }
}

void uniform_values(const uint32_t* words, float* __restrict values) {
#pragma omp simd
  for (int i = 0; i < kPhiloxWords; ++i) values[i] = uniform_from_bits(words[i]);
}

/// x[i] = offset + slope * (value first_element + i), the values made kPhiloxWords at a time.
template <class MakeValues>
void fill(void* x, DType dtype, PhiloxKey key, int64_t first_element, int64_t numel, double offset,
          double slope, MakeValues make_values) {
  const int64_t first_group = first_element / kPhiloxWords;
  const int64_t groups = (first_element + numel + kPhiloxWords - 1) / kPhiloxWords - first_group;
  tessera::cpu::parallel_for(
      groups, kGrainElements / kPhiloxWords, [&](int64_t begin, int64_t end) {
        uint32_t words[kPhiloxWords];
        float values[kPhiloxWords];
        for (int64_t group = first_group + begin; group < first_group + end; ++group) {
          random_words(key, 0, static_cast<uint64_t>(group) * kPhiloxBlocks, words);
          make_values(words, values);
          // The first and last group may stick out of x.
          const int64_t from = std::max(group * kPhiloxWords, first_element);
          const int64_t to = std::min((group + 1) * kPhiloxWords, first_element + numel);
          visit_compute_type(dtype, [&](auto tag) {
            using C = typename decltype(tag)::type;
            C out[kPhiloxWords];
#pragma omp simd
            for (int i = 0; i < kPhiloxWords; ++i) {
              out[i] = static_cast<C>(offset) + static_cast<C>(slope) * static_cast<C>(values[i]);
            }
            store_piece(x, dtype, from - first_element, 1, out + (from - group * kPhiloxWords),
                        to - from, false);
          });
        }
      });
}

}  // namespace

namespace {

/// to = from * factor where the word is at least `threshold`, else 0; or +=.
template <class D, class T, class C>
void drop_piece(D* to, const T* from, const uint32_t* words, uint32_t threshold, C factor,
                int64_t count, bool accumulate) {
  using tessera::cpu::load_lanes;
  using tessera::cpu::Vector;
  tessera::cpu::for_lanes<C>(count, [=](int64_t i, auto lanes) {
    Vector<C> y;
    if constexpr (std::is_same_v<C, float>) {  // as many words as values in a vector
      const auto word = *reinterpret_cast<const Vector<uint32_t>*>(words + i);
      y = word >= threshold ? load_lanes<C>(from + i, lanes) * factor : Vector<C>{};
    } else {
      y = load_lanes<C>(from + i, lanes) * factor;
      for (int lane = 0; lane < tessera::cpu::kLanes<C>; ++lane) {
        if (words[i + lane] < threshold) y[lane] = 0;
      }
    }
    if (accumulate) y += load_lanes<C>(to + i, lanes);
    tessera::cpu::store_lanes<C>(to + i, y, lanes);
  });
}

}  // namespace

void dropout(const Dropout& p) {
  visit_float(p.dtype, "dropout", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    const C factor = static_cast<C>(p.factor);
    const auto y_nbytes = static_cast<int64_t>(size_of(p.y_dtype));
    for_pieces(p.rows, p.cols, [&](int64_t row, int64_t begin, int64_t end) {
      uint32_t words[kPieceCols];
      const int64_t count = end - begin, y_at = row * p.y_stride + begin;
      const uint64_t global_row = static_cast<uint64_t>(p.first_row + row);
      const T* x = static_cast<const T*>(p.x) + row * p.x_stride + begin;
      const char* y_bytes = static_cast<const char*>(p.y) + y_at * y_nbytes;
      for (int64_t c = 0; c < count; c += kPhiloxWords) {  // begin is a multiple of kPhiloxWords
        // The memory's part of the work meanwhile: x and y arrive while words are made.
        for (int64_t at = c; at < std::min(c + kPhiloxWords, count); at += 64 / sizeof(C)) {
          __builtin_prefetch(x + at);
          __builtin_prefetch(y_bytes + at * y_nbytes, 1);
        }
        random_words(p.key, global_row, static_cast<uint64_t>(begin + c) / 4, words + c);
      }
      if (p.y_dtype == p.dtype) {
        return drop_piece(static_cast<T*>(p.y) + y_at, x, words, p.threshold, factor, count,
                          p.accumulate);
      }
      C y[kPieceCols];
      drop_piece(y, x, words, p.threshold, factor, count, false);
      store_piece(p.y, p.y_dtype, y_at, 1, y, count, p.accumulate);
    });
  });
}

void fill_normal(const FillNormal& p) {
  fill(p.x, p.dtype, p.key, p.first_element, p.numel, p.mean, p.stddev, normal_values);
}

void fill_uniform(const FillUniform& p) {
  fill(p.x, p.dtype, p.key, p.first_element, p.numel, p.low, p.high - p.low, uniform_values);
}

}  // namespace tessera::kernels::cpu
