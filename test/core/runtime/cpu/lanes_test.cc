#include "core/runtime/cpu/lanes.h"

#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "test/testing.h"

namespace tessera {
namespace {

using cpu::kLanes;
using cpu::Vector;

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Calls f with f32 values of both signs and all exponents whose magnitude is in [low, high).
template <class F>
void sweep(float low, float high, F&& f) {
  const uint32_t first = std::bit_cast<uint32_t>(low), last = std::bit_cast<uint32_t>(high);
  const uint32_t step = std::max(1u, (last - first) / 300007);
  for (uint32_t bits = first; bits < last; bits += step) {
    f(std::bit_cast<float>(bits));
    f(-std::bit_cast<float>(bits));
  }
}

template <class T>
float exp_of(float x) {
  return cpu::exp_lanes<T>(cpu::broadcast(x))[0];
}

/// The worst error of exp_lanes<T> where results are normal numbers, relative.
template <class T>
double worst_exp_error() {
  double worst = 0;
  const auto check = [&](float x) {
    if (x < -87.33654f || x > 88.0f) return;
    const double exact = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::fabs(static_cast<double>(exp_of<T>(x)) - exact) / exact);
  };
  sweep(1e-8f, 1e-3f, check);
  sweep(1e-3f, 1.0f, check);
  sweep(1.0f, 89.0f, check);
  return worst;
}

TEST_CASE("lanes: exp has the accuracy that its result type asks for", "[lanes]") {
  CHECK(worst_exp_error<float>() < 0x1p-22);  // 2 ulp are 2^-22 to 2^-23
  CHECK(worst_exp_error<BFloat16>() < 0x1p-13);
  CHECK(worst_exp_error<Float16>() < 0x1p-16);
}

TEST_CASE("lanes: exp at the ends, for infinities and NaN", "[lanes]") {
  const auto check = []<class T>(TypeTag<T>) {
    CHECK(exp_of<T>(0.0f) == 1.0f);
    CHECK(exp_of<T>(-0.0f) == 1.0f);
    CHECK(exp_of<T>(-kInf) == 0.0f);
    CHECK(exp_of<T>(-87.34f) == 0.0f);
    CHECK(exp_of<T>(std::numeric_limits<float>::lowest()) == 0.0f);
    CHECK(exp_of<T>(-87.3f) > 0.0f);
    CHECK(std::isfinite(exp_of<T>(88.0f)));
    CHECK(std::isnan(exp_of<T>(std::nanf(""))));
  };
  check(TypeTag<float>{});
  check(TypeTag<BFloat16>{});
}

TEST_CASE("lanes: exp never decreases by more than its error", "[lanes]") {
  // Softmax relies on it: a larger logit never has a smaller probability, but for the last bit.
  float before = 0;
  double worst = 0;
  for (float x = -87.4f; x < 88; x += 0.0007f) {
    const float y = exp_of<float>(x);
    if (y < before) worst = std::max(worst, static_cast<double>(before - y) / before);
    before = y;
  }
  CHECK(worst == 0);
}

template <class T>
void check_pow2(double bound) {
  double worst = 0;
  sweep(1e-6f, 126.0f, [&](float x) {
    const double exact = std::exp2(static_cast<double>(x));
    const double error = static_cast<double>(cpu::pow2_lanes<T>(cpu::broadcast(x))[0]) - exact;
    worst = std::max(worst, std::fabs(error) / exact);
  });
  CHECK(worst < bound);
  CHECK(cpu::pow2_lanes<T>(cpu::broadcast(126.0f))[0] == 0x1p126f);
  CHECK(cpu::pow2_lanes<T>(cpu::broadcast(-126.0f))[0] == 0x1p-126f);
}

TEST_CASE("lanes: log and tanh are within a few units in the last place", "[lanes]") {
  double worst_log = 0, worst_tanh = 0;
  const auto check = [&](float x) {
    const auto relative = [](float value, double exact) {
      return exact == 0 ? std::fabs(static_cast<double>(value))
                        : std::fabs(static_cast<double>(value) - exact) / std::fabs(exact);
    };
    const auto wide = static_cast<double>(x);
    worst_tanh = std::max(worst_tanh,
                          relative(cpu::tanh_lanes<float>(cpu::broadcast(x))[0], std::tanh(wide)));
    if (x <= 0) return;
    worst_log =
        std::max(worst_log, relative(cpu::log_lanes<float>(cpu::broadcast(x))[0], std::log(wide)));
  };
  sweep(0x1p-120f, 0.5f, check);
  sweep(0.5f, 2.0f, check);
  sweep(2.0f, 0x1p127f, check);
  CHECK(worst_log < 0x1p-22);
  CHECK(worst_tanh < 0x1p-21);
}

TEST_CASE("lanes: log at the ends, for subnormal numbers, infinities and NaN", "[lanes]") {
  const auto log_of = [](float x) { return cpu::log_lanes<float>(cpu::broadcast(x))[0]; };
  CHECK(log_of(0.0f) == -kInf);
  CHECK(log_of(-0.0f) == -kInf);
  CHECK(log_of(1.0f) == 0.0f);
  CHECK(log_of(kInf) == kInf);
  CHECK(std::isnan(log_of(-1.0f)));
  CHECK(std::isnan(log_of(std::numeric_limits<float>::quiet_NaN())));
  CHECK(std::fabs(log_of(0x1p-149f) + 149 * 0.69314718f) < 1e-5f);
}

TEST_CASE("lanes: pow2 has the accuracy that its result type asks for, up to the ends", "[lanes]") {
  check_pow2<Float16>(0x1p-18);
  check_pow2<BFloat16>(0x1p-13);
}

TEST_CASE("lanes: the reciprocal for bf16 is within 2^-13, for other types exact", "[lanes]") {
  double worst = 0;
  sweep(1e-6f, 1e6f, [&](float x) {
    const double exact = 1 / static_cast<double>(x);
    const double value = cpu::reciprocal_lanes<BFloat16>(cpu::broadcast(x))[0];
    worst = std::max(worst, std::fabs(value / exact - 1));
    CHECK(cpu::reciprocal_lanes<float>(cpu::broadcast(x))[0] == 1 / x);
  });
  CHECK(worst < 0x1p-13);
  CHECK(cpu::reciprocal_lanes<BFloat16>(cpu::broadcast(kInf))[0] == 0.0f);
}

/// Bits of every kind: normal, subnormal, infinite, NaN, ties of bf16 and f16 rounding.
std::vector<float> special_values() {
  std::vector<float> values = {0.0f, -0.0f, kInf, -kInf, std::nanf(""), 1.0f, -65504.0f, 65520.0f};
  for (uint32_t exponent = 2; exponent < 255; exponent += 3) {
    for (uint32_t mantissa : {0x0000u, 0x8000u, 0x18000u, 0x7fffu, 0x7fffffu, 0x1000u, 0x3000u}) {
      values.push_back(std::bit_cast<float>(exponent << 23 | mantissa));
      values.push_back(std::bit_cast<float>(0x80000000u | exponent << 23 | mantissa));
    }
  }
  return values;
}

template <class T>
void check_conversion() {
  INFO("to " << name_of(dtype_of<T>));
  std::vector<float> values = special_values();
  const auto count = static_cast<int64_t>(values.size());
  std::vector<T> rounded(values.size());
  cpu::for_lanes<float>(count, [&](int64_t i, auto lanes) {
    cpu::store_lanes<float>(rounded.data() + i, cpu::load_lanes<float>(values.data() + i, lanes),
                            lanes);
  });
  std::vector<float> back(values.size());
  cpu::for_lanes<float>(count, [&](int64_t i, auto lanes) {
    cpu::store_lanes<float>(back.data() + i, cpu::load_lanes<float>(rounded.data() + i, lanes),
                            lanes);
  });
  for (size_t i = 0; i < values.size(); ++i) {
    INFO("value " << values[i]);
    const T expected = T(values[i]);
    if (std::isnan(values[i])) {
      CHECK(std::isnan(static_cast<float>(rounded[i])));
      CHECK(std::isnan(back[i]));
      continue;
    }
    CHECK(static_cast<float>(rounded[i]) == static_cast<float>(expected));
    CHECK(back[i] == static_cast<float>(expected));
    CHECK(std::signbit(back[i]) == std::signbit(values[i]));
  }
}

/// A copy by groups has the bits of one by vectors, whatever the count; what is beyond stays.
template <class T>
void check_groups() {
  INFO(name_of(dtype_of<T>));
  using C = ComputeType<T>;
  const std::vector<float> values = special_values();
  std::vector<T> from;
  for (const float value : values) from.push_back(T(value));
  const int64_t most = 2 * cpu::kGroup<T> + 3;
  REQUIRE(static_cast<int64_t>(from.size()) > most);
  for (int64_t count = 0; count <= most; ++count) {
    std::vector<T> by_groups(static_cast<size_t>(most) + 1, T(7.0f)), by_lanes = by_groups;
    cpu::for_groups<T>(count, [&](int64_t i, auto lanes) {
      cpu::store_group(by_groups.data() + i, cpu::load_group(from.data() + i, lanes), lanes);
    });
    cpu::for_lanes<C>(count, [&](int64_t i, auto lanes) {
      cpu::store_lanes<C>(by_lanes.data() + i, cpu::load_lanes<C>(from.data() + i, lanes), lanes);
    });
    CHECK(std::memcmp(by_groups.data(), by_lanes.data(), by_groups.size() * sizeof(T)) == 0);
  }
}

TEST_CASE("lanes: groups are as many elements, in order, with the fill where there are none",
          "[lanes]") {
  check_groups<float>();
  check_groups<BFloat16>();
  check_groups<Float16>();
  check_groups<double>();
  const BFloat16 one(1.0f);
  const auto group = cpu::load_group(&one, 1, -kInf);
  int ones = 0, fills = 0;
  for (const auto& part : group.part) {
    for (int i = 0; i < kLanes<float>; ++i) {
      ones += part[i] == 1.0f;
      fills += part[i] == -kInf;
    }
  }
  CHECK(ones == 1);
  CHECK(fills == cpu::kGroup<BFloat16> - 1);
}

TEST_CASE("lanes: loads and stores convert as the element types do", "[lanes]") {
  check_conversion<float>();
  check_conversion<BFloat16>();
  check_conversion<Float16>();
  check_conversion<double>();
}

template <class C, class T>
void check_partial() {
  INFO(name_of(dtype_of<T>) << " as " << name_of(dtype_of<C>));
  std::vector<T> memory;
  for (int i = 0; i < 2 * kLanes<C>; ++i) memory.push_back(T(static_cast<float>(i + 1)));
  for (int count = 1; count < kLanes<C>; ++count) {
    const Vector<C> value = cpu::load_lanes<C>(memory.data() + 1, count, C(-7));
    for (int i = 0; i < kLanes<C>; ++i) CHECK(value[i] == (i < count ? C(i + 2) : C(-7)));
    std::vector<T> out(static_cast<size_t>(kLanes<C>), T(99.0f));
    cpu::store_lanes<C>(out.data(), value, count);
    for (int i = 0; i < kLanes<C>; ++i) {
      CHECK(static_cast<C>(out[static_cast<size_t>(i)]) == (i < count ? C(i + 2) : C(99)));
    }
  }
}

TEST_CASE("lanes: a part of a vector reads and writes no more than its elements", "[lanes]") {
  check_partial<float, float>();
  check_partial<float, BFloat16>();
  check_partial<float, Float16>();
  check_partial<double, double>();
}

TEST_CASE("lanes: for_lanes and for_lanes_of visit each element once, in whole vectors and a rest",
          "[lanes]") {
  for (int64_t count = 0; count < 7 * kLanes<float> + 3; ++count) {
    std::vector<float> hits(static_cast<size_t>(count)), hits_of(hits);
    const auto add = [](float* at, auto lanes) {
      cpu::store_lanes<float>(at, cpu::load_lanes<float>(at, lanes) + 1.0f, lanes);
    };
    cpu::for_lanes<float>(count, [&](int64_t i, auto lanes) { add(hits.data() + i, lanes); });
    cpu::for_lanes_of<float, 4>(
        count, [&](int64_t i, auto lanes, auto) { add(hits_of.data() + i, lanes); });
    const auto once = [](float hit) { return hit == 1.0f; };
    CHECK(std::all_of(hits.begin(), hits.end(), once));
    CHECK(std::all_of(hits_of.begin(), hits_of.end(), once));
  }
}

TEST_CASE("lanes: sums and maxima of the lanes", "[lanes]") {
  std::vector<float> values(static_cast<size_t>(kLanes<float>));
  std::iota(values.begin(), values.end(), 1.0f);
  const Vector<float> v = cpu::load_lanes<float>(values.data());
  const float sum = 0.5f * kLanes<float> * (kLanes<float> + 1);
  CHECK(cpu::sum_lanes<float>(v) == sum);
  CHECK(cpu::max_lanes<float>(v) == kLanes<float>);
  CHECK(cpu::max_lanes<float>(-v) == -1);
  const Vector<float> four[4] = {v, 2 * v, 3 * v, 4 * v};
  CHECK(cpu::sum_lanes<float>(four) == 10 * sum);
  const Vector<float> nan = cpu::broadcast(std::nanf(""));
  CHECK(cpu::max_of<float>(nan, v)[0] == 1);  // what the header says of NaN
  CHECK(std::isnan(cpu::max_of<float>(v, nan)[0]));
  CHECK(cpu::min_of<float>(nan, v)[0] == 1);
  CHECK(std::isnan(cpu::min_of<float>(v, nan)[0]));
}

}  // namespace
}  // namespace tessera
