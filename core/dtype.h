#pragma once

#include <fmt/format.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "core/check.h"

namespace tessera {

/// Element types. Floating: f32, bf16, f16, f64 (f64 is for gradient checks on the CPU).
enum class DType : unsigned char { kF32, kBF16, kF16, kF64, kI32, kI64, kU8 };

inline constexpr DType kF32 = DType::kF32;    ///< IEEE 754 binary32
inline constexpr DType kBF16 = DType::kBF16;  ///< the upper half of an f32
inline constexpr DType kF16 = DType::kF16;    ///< IEEE 754 binary16
inline constexpr DType kF64 = DType::kF64;    ///< IEEE 754 binary64
inline constexpr DType kI32 = DType::kI32;    ///< signed
inline constexpr DType kI64 = DType::kI64;    ///< signed
inline constexpr DType kU8 = DType::kU8;      ///< unsigned

/// Bytes of one element.
constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case kF64:
    case kI64:
      return 8;
    case kF32:
    case kI32:
      return 4;
    case kBF16:
    case kF16:
      return 2;
    case kU8:
      return 1;
  }
  return 0;
}

/// f32, bf16, f16 and f64.
constexpr bool is_floating(DType dtype) {
  return dtype == kF32 || dtype == kBF16 || dtype == kF16 || dtype == kF64;
}

/// "f32", "bf16", "f16", "f64", "i32", "i64", "u8".
std::string_view name_of(DType dtype);
/// The inverse of `name_of`; ConfigError that lists the names if there is none.
DType dtype_from_name(std::string_view name);

/// bfloat16: the upper half of an f32; rounds to nearest even, NaN stays NaN.
struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (u >> 16) | 0x40u;
    bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
  }
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

/// IEEE 754 binary16; rounds to nearest even.
struct Float16 {
  uint16_t bits = 0;

  Float16() = default;
  explicit Float16(float value) : bits(encode(value)) {}
  operator float() const { return decode(bits); }

  /// The nearest value, ties to even.
  static uint16_t encode(float value);
  /// Exact.
  static float decode(uint16_t bits);
  /// The same without F16C instructions.
  static uint16_t encode_portable(float value);
  /// The same without F16C instructions.
  static float decode_portable(uint16_t bits);
};

inline uint16_t Float16::encode(float value) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
  return encode_portable(value);
#endif
}

inline float Float16::decode(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  return decode_portable(bits);
#endif
}

inline uint16_t Float16::encode_portable(float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((u >> 13) & 0x3ffu));
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // >= 2^16, inf
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 makes the FPU round at 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

inline float Float16::decode_portable(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // a NaN becomes quiet
    const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (magnitude << 13));
  }
  // Scaling by 2^112 moves the exponent bias from 15 to 127 and normalizes subnormals.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | sign);
}

/// A type as a value, for functions of a dtype.
template <class T>
struct TypeTag {
  using type = T;
};

/// dtype_of<float> == kF32 and so on.
template <class T>
constexpr DType dtype_of = [] {
  if constexpr (std::is_same_v<T, float>)
    return kF32;
  else if constexpr (std::is_same_v<T, BFloat16>)
    return kBF16;
  else if constexpr (std::is_same_v<T, Float16>)
    return kF16;
  else if constexpr (std::is_same_v<T, double>)
    return kF64;
  else if constexpr (std::is_same_v<T, int32_t>)
    return kI32;
  else if constexpr (std::is_same_v<T, int64_t>)
    return kI64;
  else {
    static_assert(std::is_same_v<T, uint8_t>, "no dtype for this type");
    return kU8;
  }
}();

/// What a kernel adds and multiplies in: f64 for f64, else f32.
template <class T>
using ComputeType = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// Calls f(TypeTag<T>{}) with the C++ type of a floating dtype; DtypeError that names `op` else.
template <class F>
decltype(auto) visit_float(DType dtype, const char* op, F&& f) {
  switch (dtype) {
    case kF32:
      return f(TypeTag<float>{});
    case kBF16:
      return f(TypeTag<BFloat16>{});
    case kF16:
      return f(TypeTag<Float16>{});
    case kF64:
      return f(TypeTag<double>{});
    default:
      break;
  }
  throw DtypeError(fmt::format("{}: expected a floating dtype, got {}", op, name_of(dtype)));
}

/// Calls f(TypeTag<T>{}) with the C++ type of any dtype.
template <class F>
decltype(auto) visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case kI32:
      return f(TypeTag<int32_t>{});
    case kI64:
      return f(TypeTag<int64_t>{});
    case kU8:
      return f(TypeTag<uint8_t>{});
    default:
      return visit_float(dtype, "visit_dtype", f);
  }
}

}  // namespace tessera

template <>
struct fmt::formatter<tessera::DType> : fmt::formatter<std::string_view> {
  auto format(tessera::DType dtype, fmt::format_context& ctx) const {
    return fmt::formatter<std::string_view>::format(tessera::name_of(dtype), ctx);
  }
};
