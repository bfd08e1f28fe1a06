#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "core/dtype.h"

// Vectors of the processor's full width, in the compiler's extensions: 64 bytes where the build has
// AVX-512 (with its 8- and 16-bit parts), else 32. CPU kernels spell their inner loops in them
// where compilers fall short: GCC takes 32 bytes even on processors with 64, and converts 16-bit
// floats in long sequences of shuffles.

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define TESSERA_AVX512 1
#else
#define TESSERA_AVX512 0
#endif
#if TESSERA_AVX512 && defined(__AVX512BF16__)
#define TESSERA_AVX512_BF16 1
#else
#define TESSERA_AVX512_BF16 0
#endif

namespace tessera::cpu {

inline constexpr int kVectorBytes = TESSERA_AVX512 ? 64 : 32;

/// A vector that may lie at any element and alias any memory.
template <class C>
struct VectorOf {
  typedef C type __attribute__((vector_size(kVectorBytes), aligned(sizeof(C)), may_alias));
};
template <class C>
using Vector = typename VectorOf<C>::type;
template <class C>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(C));

template <class C>
inline Vector<C> broadcast(C value) {
  return Vector<C>{} + value;
}

// ---- loads and stores, with conversion ----------------------------------------------------------
// Intrinsics come in their masked form: GCC 12 warns of the undefined vector inside of the others.

#if TESSERA_AVX512
inline constexpr __mmask16 kEveryLane = 0xffff;
typedef uint32_t Vector32Bits __attribute__((vector_size(64)));

/// 16 elements of T, bf16 or f16, as f32.
template <class T>
inline Vector<float> widen_bits(__m256i bits) {
  if constexpr (std::is_same_v<T, Float16>) {
    return (Vector<float>)_mm512_maskz_cvtph_ps(kEveryLane, bits);
  }
  return (Vector<float>)((Vector32Bits)_mm512_maskz_cvtepu16_epi32(kEveryLane, bits) << 16);
}

/// bf16 bits of 16 values, rounded to nearest even; NaN stays NaN.
inline __m256i bf16_bits(__m512 value) {
#if TESSERA_AVX512_BF16
  return (__m256i)_mm512_maskz_cvtneps_pbh(kEveryLane, value);
#else
  const auto bits = (Vector32Bits)value;
  const Vector32Bits rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const auto is_nan = (Vector32Bits)((bits & 0x7fffffff) > 0x7f800000);
  const Vector32Bits all = is_nan ? bits >> 16 | 0x40 : rounded;
  return _mm512_maskz_cvtepi32_epi16(kEveryLane, (__m512i)all);
#endif
}

template <class T>
inline __m256i narrow_bits(__m512 value) {
  if constexpr (std::is_same_v<T, Float16>) {
    return _mm512_maskz_cvtps_ph(kEveryLane, value, _MM_FROUND_TO_NEAREST_INT);
  }
  return bf16_bits(value);
}
#elif defined(__AVX2__) && defined(__F16C__)
inline __m128i bf16_bits(__m256 value) {
  const __m256i bits = (__m256i)value, upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16),
                                             _mm256_or_si256(upper, _mm256_set1_epi32(0x40)),
                                             (__m256i)_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

template <class T>
inline __m128i narrow_bits(__m256 value) {
  if constexpr (std::is_same_v<T, Float16>) {
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
  }
  return bf16_bits(value);
}
#endif

/// Stands for "every lane" where a number of lanes is expected.
struct AllLanes {};

/// The kLanes<C> elements at p as C, a float or double.
template <class C, class T>
inline Vector<C> load_lanes(const T* p, AllLanes = {}) {
  if constexpr (std::is_same_v<C, T>) return *reinterpret_cast<const Vector<C>*>(p);
#if TESSERA_AVX512
  if constexpr (std::is_same_v<C, float> && sizeof(T) == 2) {
    return widen_bits<T>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
#elif defined(__AVX2__) && defined(__F16C__)
  if constexpr (std::is_same_v<C, float> && sizeof(T) == 2) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if constexpr (std::is_same_v<T, Float16>) return (Vector<C>)_mm256_cvtph_ps(bits);
    return (Vector<C>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
  }
#endif
  Vector<C> value;
  for (int i = 0; i < kLanes<C>; ++i) value[i] = static_cast<C>(p[i]);
  return value;
}

/// The first `count` < kLanes<C> elements; the other lanes are `fill`.
template <class C, class T>
inline Vector<C> load_lanes(const T* p, int count, C fill = 0) {
#if TESSERA_AVX512
  const auto mask = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (std::is_same_v<C, float> && std::is_same_v<T, float>) {
    return (Vector<C>)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), mask, p);
  }
  if constexpr (std::is_same_v<C, float> && sizeof(T) == 2) {
    const auto value = (__m512)widen_bits<T>(_mm256_maskz_loadu_epi16(mask, p));
    return (Vector<C>)_mm512_mask_mov_ps(_mm512_set1_ps(fill), mask, value);
  }
#endif
  Vector<C> value = broadcast(fill);
  for (int i = 0; i < count; ++i) value[i] = static_cast<C>(p[i]);
  return value;
}

/// p[0, kLanes<C>) = value, rounded once. bf16 results below 2^-126 become zero where the processor
/// has an instruction for the conversion (AVX512-BF16).
template <class C, class T>
inline void store_lanes(T* p, Vector<C> value, AllLanes = {}) {
  if constexpr (std::is_same_v<C, T>) {
    *reinterpret_cast<Vector<C>*>(p) = value;
    return;
  }
#if TESSERA_AVX512
  if constexpr (std::is_same_v<C, float> && sizeof(T) == 2) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bits<T>((__m512)value));
    return;
  }
#elif defined(__AVX2__) && defined(__F16C__)
  if constexpr (std::is_same_v<C, float> && sizeof(T) == 2) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bits<T>((__m256)value));
    return;
  }
#endif
  for (int i = 0; i < kLanes<C>; ++i) p[i] = static_cast<T>(static_cast<ComputeType<T>>(value[i]));
}

/// The first `count` < kLanes<C> lanes.
template <class C, class T>
inline void store_lanes(T* p, Vector<C> value, int count) {
#if TESSERA_AVX512
  const auto mask = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (std::is_same_v<C, float> && std::is_same_v<T, float>) {
    return _mm512_mask_storeu_ps(p, mask, (__m512)value);
  }
  if constexpr (std::is_same_v<C, float> && sizeof(T) == 2) {
    return _mm256_mask_storeu_epi16(p, mask, narrow_bits<T>((__m512)value));
  }
#endif
  for (int i = 0; i < count; ++i) p[i] = static_cast<T>(static_cast<ComputeType<T>>(value[i]));
}

/// Calls f(i, lanes) for steps of kStep elements of [0, count): `lanes`, AllLanes or an int, is how
/// many there are.
template <int kStep, class F>
inline void for_steps(int64_t count, F&& f) {
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) f(i, AllLanes{});
  if (i < count) f(i, static_cast<int>(count - i));
}
/// The same with f(i, lanes, u), u a constant in [0, kUnroll): which of kUnroll running sums the
/// step goes to, so that additions need not wait for each other.
template <int kStep, int kUnroll, class F>
inline void for_steps_of(int64_t count, F&& f) {
  int64_t i = 0;
  const auto several = [&]<int... U>(std::integer_sequence<int, U...>) {
    (f(i + U * kStep, AllLanes{}, std::integral_constant<int, U>{}), ...);
  };
  for (; i + kUnroll * kStep <= count; i += kUnroll * kStep) {
    several(std::make_integer_sequence<int, kUnroll>{});
  }
  for (; i + kStep <= count; i += kStep) f(i, AllLanes{}, std::integral_constant<int, 0>{});
  if (i < count) f(i, static_cast<int>(count - i), std::integral_constant<int, 0>{});
}

/// Steps of a vector of C, as load_lanes and store_lanes take them.
template <class C, class F>
inline void for_lanes(int64_t count, F&& f) {
  for_steps<kLanes<C>>(count, f);
}
template <class C, int kUnroll, class F>
inline void for_lanes_of(int64_t count, F&& f) {
  for_steps_of<kLanes<C>, kUnroll>(count, f);
}

/// The lanes of a vector of kCount combined in halves: each of the first half with the one half a
/// vector further, and so on with what remains.
template <class C, int kCount, class V, class F>
inline C combine_lanes(V value, F&& f) {
  if constexpr (kCount * sizeof(C) > 16) {
    typedef C Half __attribute__((vector_size(kCount / 2 * sizeof(C))));
    Half low, high;
    std::memcpy(&low, &value, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof low, sizeof high);
    return combine_lanes<C, kCount / 2>(f(low, high), f);
  } else {
    for (int half = kCount / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) value[i] = f(C(value[i]), C(value[i + half]));
    }
    return value[0];
  }
}
template <class C>
inline C sum_lanes(Vector<C> value) {
  return combine_lanes<C, kLanes<C>>(value, [](const auto& a, const auto& b) { return a + b; });
}
template <class C>
inline C max_lanes(Vector<C> value) {
  return combine_lanes<C, kLanes<C>>(value,
                                     [](const auto& a, const auto& b) { return a > b ? a : b; });
}
/// Running sums of for_lanes_of, in order of pairs.
template <class C, size_t kCount>
inline C sum_lanes(const Vector<C> (&sums)[kCount]) {
  static_assert(kCount == 2 || kCount == 4);
  if constexpr (kCount == 2) return sum_lanes<C>(sums[0] + sums[1]);
  return sum_lanes<C>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// ---- groups -------------------------------------------------------------------------------------
// As many elements as a conversion takes at once: a vector of the compute type, or two for bf16,
// whose halves of a 32-bit word are one shift and one mask away from f32. Loops over groups are for
// what treats all elements alike; which part an element is in is of no meaning to them.

template <class T>
inline constexpr int kParts = TESSERA_AVX512_BF16&& std::is_same_v<T, BFloat16> ? 2 : 1;
template <class T>
inline constexpr int kGroup = kParts<T>* kLanes<ComputeType<T>>;

template <class T>
struct Group {
  Vector<ComputeType<T>> part[kParts<T>];
};

#if TESSERA_AVX512_BF16
inline Group<BFloat16> widen_pairs(__m512i pairs) {
  const auto bits = (Vector32Bits)pairs;
  return {{(Vector<float>)(bits << 16), (Vector<float>)(bits & 0xffff0000u)}};
}
inline __m512i narrow_pairs(const Group<BFloat16>& group) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto both = (__m512i)_mm512_maskz_cvtne2ps_pbh(~__mmask32{0}, (__m512)group.part[1],
                                                       (__m512)group.part[0]);
  return _mm512_maskz_permutexvar_epi16(~__mmask32{0}, _mm512_load_si512(kInterleave), both);
}
#endif

/// The kGroup<T> elements at p.
template <class T>
inline Group<T> load_group(const T* p, AllLanes = {}) {
#if TESSERA_AVX512_BF16
  if constexpr (kParts<T> == 2) return widen_pairs(_mm512_loadu_si512(p));
#endif
  return {{load_lanes<ComputeType<T>>(p)}};
}
/// The first `count` < kGroup<T> elements; the others are `fill`.
template <class T>
inline Group<T> load_group(const T* p, int count, ComputeType<T> fill = 0) {
#if TESSERA_AVX512_BF16
  if constexpr (kParts<T> == 2) {
    const auto there = static_cast<__mmask32>((1u << count) - 1);
    const auto absent = static_cast<int16_t>(T(fill).bits);
    return widen_pairs(_mm512_mask_loadu_epi16(_mm512_set1_epi16(absent), there, p));
  }
#endif
  return {{load_lanes<ComputeType<T>>(p, count, fill)}};
}

template <class T>
inline void store_group(T* p, const Group<T>& group, AllLanes = {}) {
#if TESSERA_AVX512_BF16
  if constexpr (kParts<T> == 2) return _mm512_storeu_si512(p, narrow_pairs(group));
#endif
  store_lanes<ComputeType<T>>(p, group.part[0]);
}
template <class T>
inline void store_group(T* p, const Group<T>& group, int count) {
#if TESSERA_AVX512_BF16
  if constexpr (kParts<T> == 2) {
    const auto there = static_cast<__mmask32>((1u << count) - 1);
    return _mm512_mask_storeu_epi16(p, there, narrow_pairs(group));
  }
#endif
  store_lanes<ComputeType<T>>(p, group.part[0], count);
}

/// Steps of a group of T; kUnroll running sums for each part.
template <class T, class F>
inline void for_groups(int64_t count, F&& f) {
  for_steps<kGroup<T>>(count, f);
}
template <class T, int kUnroll, class F>
inline void for_groups_of(int64_t count, F&& f) {
  for_steps_of<kGroup<T>, kUnroll>(count, f);
}

// ---- functions ----------------------------------------------------------------------------------
// Functions take the type T of the result that they are for: f32 and f64 get full accuracy, 16-bit
// types an error that is small against their rounding.

/// The greater of each pair; b where a or b is NaN.
template <class C>
inline Vector<C> max_of(Vector<C> a, Vector<C> b) {
#if TESSERA_AVX512
  if constexpr (std::is_same_v<C, float>) {
    return (Vector<C>)_mm512_maskz_max_ps(kEveryLane, (__m512)a, (__m512)b);
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<C, float>) return (Vector<C>)_mm256_max_ps((__m256)a, (__m256)b);
#endif
  return a > b ? a : b;
}
/// The smaller of each pair; b where a or b is NaN.
template <class C>
inline Vector<C> min_of(Vector<C> a, Vector<C> b) {
#if TESSERA_AVX512
  if constexpr (std::is_same_v<C, float>) {
    return (Vector<C>)_mm512_maskz_min_ps(kEveryLane, (__m512)a, (__m512)b);
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<C, float>) return (Vector<C>)_mm256_min_ps((__m256)a, (__m256)b);
#endif
  return a < b ? a : b;
}

template <class C>
inline Vector<C> abs_of(Vector<C> x) {
  using Bits = std::conditional_t<sizeof(C) == 8, uint64_t, uint32_t>;
  typedef Bits AllBits __attribute__((vector_size(kVectorBytes)));
  return (Vector<C>)((AllBits)x & (~Bits{0} >> 1));
}

/// a b + c, rounded once.
inline Vector<float> fused_multiply_add(Vector<float> a, Vector<float> b, Vector<float> c) {
#if TESSERA_AVX512
  return (Vector<float>)_mm512_maskz_fmadd_ps(kEveryLane, (__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vector<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int i = 0; i < kLanes<float>; ++i) a[i] = std::fma(a[i], b[i], c[i]);
  return a;
#endif
}

/// 2^f for |f| <= 1/2 by minimax polynomials that are exact at 0 (own fits): within 2^-23 relative,
/// 2^-18 for f16, 2^-13 for bf16.
template <class T>
inline Vector<float> pow2_fraction(Vector<float> f) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return ((f * 5.500892966e-2f + 2.422109720e-1f) * f + 6.932829288e-1f) * f + 1.0f;
  } else if constexpr (sizeof(T) == 2) {
    const Vector<float> p = (f * 9.582853143e-3f + 5.590642673e-2f) * f + 2.402409862e-1f;
    return (p * f + 6.931241932e-1f) * f + 1.0f;
  } else {
    Vector<float> p = (f * 1.326472708e-3f + 9.671512862e-3f) * f + 5.550733746e-2f;
    p = (p * f + 2.402224208e-1f) * f + 6.931469776e-1f;
    return p * f + 1.0f;
  }
}

/// x = n + f: the nearest integer and the rest.
struct IntegerPart {
  Vector<float> n, f;
#if TESSERA_AVX512
  explicit IntegerPart(Vector<float> x)
      : n((Vector<float>)_mm512_maskz_roundscale_ps(kEveryLane, (__m512)x, 8)), f(x - n) {}

  /// y * 2^n where `mask` says so, else 0.
  Vector<float> scale(Vector<float> y, __mmask16 mask = kEveryLane) const {
    return (Vector<float>)_mm512_maskz_scalef_ps(mask, (__m512)y, (__m512)n);
  }
#else
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum. What is
  // above falls out of the shift.
  static constexpr float kRound = 12582912.0f;
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
  Vector<float> shifted;
  explicit IntegerPart(Vector<float> x) : f(x - ((x + kRound) - kRound)), shifted(x + kRound) {
    n = x - f;
  }

  Vector<float> scale(Vector<float> y) const {
    return (Vector<float>)((Int)y + ((Int)shifted << 23));
  }
#endif
};

/// exp(x) for x <= 88.72283: within 2 ulp in f32, 2^-16 relative for f16, 2^-13 for bf16; 0 below
/// -87.3 (also for -inf), NaN for NaN. x log2(e) = n + f, 2^n 2^f.
template <class T, class C = ComputeType<T>>
inline Vector<C> exp_lanes(Vector<C> x) {
  if constexpr (std::is_same_v<C, double>) {
    for (int i = 0; i < kLanes<C>; ++i) x[i] = std::exp(x[i]);
    return x;
  } else {
    constexpr float kLog2E = 1.44269502f, kRest = 1.92596299e-8f;
    IntegerPart part(x * kLog2E);
    if constexpr (sizeof(T) == 4) {
      part.f = fused_multiply_add(x, broadcast(kLog2E), -part.n) + x * kRest;
    }
    const Vector<float> y = pow2_fraction<T>(part.f);
#if TESSERA_AVX512
    return part.scale(y, _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.33654f), _CMP_NLT_UQ));
#else
    return x < -87.33654f ? Vector<float>{} : part.scale(y);
#endif
  }
}

/// 2^x for |x| <= 126, as accurate: for results of 16 bits.
template <class T>
inline Vector<float> pow2_lanes(Vector<float> x) {
  const IntegerPart part(x);
  return part.scale(pow2_fraction<T>(part.f));
}

/// ln(x) within 2 ulp; -inf for 0, NaN below. x = 2^n m, m in [sqrt(1/2), sqrt(2)); a polynomial
/// (own fit) in m - 1.
template <class C>
inline Vector<C> log_lanes(Vector<C> x) {
  if constexpr (std::is_same_v<C, double>) {
    for (int i = 0; i < kLanes<C>; ++i) x[i] = std::log(x[i]);
    return x;
  } else {
    typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
    constexpr int32_t kSqrtHalf = 0x3f3504f3;
    constexpr float kLog[] = {-7.634429907e-2f, 1.276155036e-1f, -1.316019505e-1f, 1.420176247e-1f,
                              -1.662335648e-1f, 2.000122667e-1f, -2.500082106e-1f, 3.333333171e-1f};
    const Int is_tiny = x < 1.17549435e-38f;  // subnormal numbers are made normal
    const auto bits = (Int)(is_tiny ? x * 8388608.0f : x);
    const Int exponent = (bits - kSqrtHalf) >> 23;
    const Vector<float> f = (Vector<float>)(bits - (exponent << 23)) - 1.0f;
    const Vector<float> n = __builtin_convertvector(exponent + (is_tiny & -23), Vector<float>);
    Vector<float> p = kLog[0] * f + kLog[1];
    for (size_t i = 2; i < std::size(kLog); ++i) p = p * f + kLog[i];
    const Vector<float> square = f * f, rest = n * -2.12194440e-4f + square * f * p;
    const Vector<float> y = n * 0.693359375f + (f + (rest - 0.5f * square));
    const Vector<float> nan = broadcast(std::bit_cast<float>(0x7fc00000));
    const Vector<float> inf = broadcast(std::bit_cast<float>(0x7f800000));
    return x > 0.0f ? (x < inf ? y : inf) : (x == 0.0f ? -inf : nan);
  }
}

/// tanh(x) within 4 ulp: an odd polynomial (own fit) near 0, beyond by the exponential.
template <class C>
inline Vector<C> tanh_lanes(Vector<C> x) {
  if constexpr (std::is_same_v<C, double>) {
    for (int i = 0; i < kLanes<C>; ++i) x[i] = std::tanh(x[i]);
    return x;
  } else {
    constexpr float kTanh[] = {-5.717036561e-3f, 2.065057900e-2f, -5.374349526e-2f, 1.333149125e-1f,
                               -3.333328392e-1f};
    const Vector<float> magnitude = abs_of<C>(x), square = x * x;
    Vector<float> p = kTanh[0] * square + kTanh[1];
    for (size_t i = 2; i < std::size(kTanh); ++i) p = p * square + kTanh[i];
    const Vector<float> e = exp_lanes<C>(min_of<C>(broadcast(20.0f), magnitude + magnitude));
    const Vector<float> large = 1.0f - 2.0f / (e + 1.0f);
    return magnitude < 0.625f ? x + x * square * p : (x < 0.0f ? -large : large);
  }
}

template <class C>
inline Vector<C> sqrt_lanes(Vector<C> x) {
#if TESSERA_AVX512
  if constexpr (sizeof(C) == 8) return (Vector<C>)_mm512_maskz_sqrt_pd(0xff, (__m512d)x);
  if constexpr (sizeof(C) == 4) return (Vector<C>)_mm512_maskz_sqrt_ps(kEveryLane, (__m512)x);
#elif defined(__AVX2__)
  if constexpr (sizeof(C) == 8) return (Vector<C>)_mm256_sqrt_pd((__m256d)x);
  if constexpr (sizeof(C) == 4) return (Vector<C>)_mm256_sqrt_ps((__m256)x);
#endif
  for (int i = 0; i < kLanes<C>; ++i) x[i] = std::sqrt(x[i]);
  return x;
}

/// 1 / x; for bf16 results within 2^-14 where the processor has an instruction for that.
template <class T, class C = ComputeType<T>>
inline Vector<C> reciprocal_lanes(Vector<C> x) {
#if TESSERA_AVX512
  if constexpr (std::is_same_v<T, BFloat16>) {
    return (Vector<C>)_mm512_maskz_rcp14_ps(kEveryLane, (__m512)x);
  }
#endif
  return C(1) / x;
}

}  // namespace tessera::cpu
