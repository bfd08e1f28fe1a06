#include "core/runtime/cpu/math.h"

#include <limits>

#include "test/testing.h"

namespace tessera {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Distance in units of the last place of the f32 nearest to `expected`.
double ulps(float actual, double expected) {
  const auto nearest = static_cast<float>(expected);
  const double ulp = static_cast<double>(std::nextafter(std::fabs(nearest), kInf)) -
                     std::fabs(static_cast<double>(nearest));
  return std::fabs(static_cast<double>(actual) - expected) / ulp;
}

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

TEST_CASE("math: exp is within 2 ulp where the result is a normal number", "[math]") {
  double worst = 0;
  float worst_x = 0;
  const auto check = [&](float x) {
    if (x < -87.33654f || x > 88.7228f) return;
    const double error = ulps(cpu::exp(x), std::exp(static_cast<double>(x)));
    if (error > worst) worst = error, worst_x = x;
  };
  sweep(0.0f, 1e-3f, check);
  sweep(1e-3f, 1.0f, check);
  sweep(1.0f, 89.0f, check);
  INFO("worst at " << worst_x << ": " << worst);
  CHECK(worst < 2);
}

TEST_CASE("math: exp at the ends and beyond", "[math]") {
  CHECK(cpu::exp(0.0f) == 1.0f);
  CHECK(cpu::exp(-0.0f) == 1.0f);
  CHECK(cpu::exp(kInf) == kInf);
  CHECK(cpu::exp(-kInf) == 0.0f);
  CHECK(cpu::exp(std::numeric_limits<float>::max()) == kInf);
  CHECK(cpu::exp(std::numeric_limits<float>::lowest()) == 0.0f);
  CHECK(std::isnan(cpu::exp(std::nanf(""))));
  CHECK(std::isfinite(cpu::exp(88.72283f)));
  CHECK(cpu::exp(88.73f) == kInf);
  CHECK(cpu::exp(-87.3f) > 0.0f);
  CHECK(cpu::exp(-87.34f) == 0.0f);
}

TEST_CASE("math: exp never decreases", "[math]") {
  // Softmax relies on it: a larger logit never has a smaller probability.
  float before = 0;
  int decreases = 0;
  for (float x = -90; x < 90; x += 0.0007f) {
    const float y = cpu::exp(x);
    decreases += y < before;
    before = y;
  }
  CHECK(decreases == 0);
}

}  // namespace
}  // namespace tessera
