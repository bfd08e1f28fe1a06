#include "core/dtype.h"

#include <limits>

#include "test/testing.h"

namespace tessera {
namespace {

using testing::error_of;

constexpr float kInf = std::numeric_limits<float>::infinity();

/// The value of a 16-bit float by its definition.
double value_of(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa == 0 ? sign * kInf : std::nan("");
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

/// Every rounding decision: each value, the midpoint to the next one (a tie, to even) and the f32
/// neighbours of the midpoint, with both signs. Returns the number of wrong ones.
template <class Encode>
int count_wrong(Encode encode, int exponent_bits, int mantissa_bits) {
  const uint16_t infinity = static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  // The next value after the largest finite one would be this; half way to it begins infinity.
  const double beyond = std::ldexp(1.0, 1 << (exponent_bits - 1));
  int wrong = 0;
  for (uint16_t h = 0; h < infinity; ++h) {
    const double low = value_of(h, exponent_bits, mantissa_bits);
    const auto next = static_cast<uint16_t>(h + 1);
    const double high = next == infinity ? beyond : value_of(next, exponent_bits, mantissa_bits);
    const auto middle = static_cast<float>((low + high) / 2);
    for (const float sign : {1.0f, -1.0f}) {
      const auto expect = [&](float value, uint16_t bits) {
        const uint16_t signed_bits = static_cast<uint16_t>(bits | (sign < 0 ? 0x8000 : 0));
        wrong += encode(sign * value) != signed_bits;
      };
      expect(static_cast<float>(low), h);
      if (middle == 0) continue;  // half of the smallest bf16 is not an f32
      expect(middle, h % 2 == 0 ? h : next);
      expect(std::nextafter(middle, kInf), next);
      expect(std::nextafter(middle, 0.0f), h);
    }
  }
  return wrong;
}

TEST_CASE("dtype: bf16 decodes every bit pattern", "[dtype]") {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    BFloat16 value;
    value.bits = static_cast<uint16_t>(bits);
    const double expected = value_of(value.bits, 8, 7);
    const float actual = value;
    wrong += std::isnan(expected) ? !std::isnan(actual) : static_cast<double>(actual) != expected;
  }
  CHECK(wrong == 0);
}

TEST_CASE("dtype: bf16 rounds to nearest even at every boundary", "[dtype]") {
  CHECK(count_wrong([](float x) { return BFloat16(x).bits; }, 8, 7) == 0);
  CHECK(BFloat16(kInf).bits == 0x7f80);
  CHECK(BFloat16(-kInf).bits == 0xff80);
  CHECK(BFloat16(std::numeric_limits<float>::max()).bits == 0x7f80);
  CHECK(BFloat16(-0.0f).bits == 0x8000);
}

TEST_CASE("dtype: bf16 keeps every NaN a NaN", "[dtype]") {
  // The payload in the low half only would round to infinity or, with a carry, to minus zero.
  for (const uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7fc00000u}) {
    CHECK(std::isnan(static_cast<float>(BFloat16(std::bit_cast<float>(bits)))));
  }
}

TEST_CASE("dtype: f16 decodes every bit pattern, with and without F16C", "[dtype]") {
  int wrong = 0, different = 0;
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const double expected = value_of(bits, 5, 10);
    const float actual = Float16::decode_portable(bits);
    wrong += std::isnan(expected) ? !std::isnan(actual) : static_cast<double>(actual) != expected;
    different += std::bit_cast<uint32_t>(actual) != std::bit_cast<uint32_t>(Float16::decode(bits));
  }
  CHECK(wrong == 0);
  CHECK(different == 0);
}

TEST_CASE("dtype: f16 rounds to nearest even at every boundary, with and without F16C", "[dtype]") {
  CHECK(count_wrong(&Float16::encode_portable, 5, 10) == 0);
  CHECK(count_wrong(&Float16::encode, 5, 10) == 0);
  CHECK(Float16::encode_portable(65519.996f) == 0x7bff);
  CHECK(Float16::encode_portable(65520.0f) == 0x7c00);
  CHECK(Float16::encode_portable(kInf) == 0x7c00);
  CHECK(Float16::encode_portable(-kInf) == 0xfc00);
  CHECK(Float16::encode_portable(0x1p-25f) == 0);         // a tie with zero
  CHECK(Float16::encode_portable(0x1.000002p-25f) == 1);  // just above
  CHECK(Float16::encode_portable(-0x1p-149f) == 0x8000);  // underflow keeps the sign
}

TEST_CASE("dtype: both f16 encoders agree on a sweep of all f32", "[dtype]") {
  int different = 0;
  for (uint64_t bits = 0; bits < 0x100000000u; bits += 641) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    different += Float16::encode(value) != Float16::encode_portable(value);
  }
  CHECK(different == 0);
}

TEST_CASE("dtype: names go both ways, sizes are in bytes", "[dtype]") {
  const std::vector<std::pair<DType, size_t>> sizes = {{kF32, 4}, {kBF16, 2}, {kF16, 2}, {kF64, 8},
                                                       {kI32, 4}, {kI64, 8},  {kU8, 1}};
  for (const auto& [dtype, nbytes] : sizes) {
    CHECK(size_of(dtype) == nbytes);
    CHECK(dtype_from_name(name_of(dtype)) == dtype);
  }
  CHECK(error_of([] { dtype_from_name("fp32"); }) ==
        "dtype: \"fp32\" is not one of f32, bf16, f16, f64, i32, i64, u8");
  CHECK(is_floating(kBF16));
  CHECK_FALSE(is_floating(kI64));
}

TEST_CASE("dtype: visiting gives the C++ type, and names the op for an integer", "[dtype]") {
  for (const DType dtype : {kF32, kBF16, kF16, kF64, kI32, kI64, kU8}) {
    visit_dtype(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      CHECK(dtype_of<T> == dtype);
      CHECK(sizeof(T) == size_of(dtype));
    });
  }
  CHECK(error_of([] { visit_float(kI32, "gelu", [](auto) {}); }) ==
        "gelu: expected a floating dtype, got i32");
  CHECK(std::is_same_v<ComputeType<double>, double>);
  CHECK(std::is_same_v<ComputeType<BFloat16>, float>);
}

}  // namespace
}  // namespace tessera
