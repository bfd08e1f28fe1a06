#include "kernels/loss_scale/loss_scale.h"

#include <limits>

#include "core/runtime/context.h"
#include "kernels/loss_scale/kernel.h"
#include "test/testing.h"

namespace tessera {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Clip {
  Tensor norm, factor = empty({}, kF32), found_inf = empty({}, kU8);
};

Clip unscale(double norm, const Tensor& scale, double grad_factor, double max_norm) {
  Clip clip{full({}, norm, kF32)};
  unscale_norm(clip.norm, clip.factor, clip.found_inf, scale, grad_factor, max_norm);
  return clip;
}

TEST_CASE("loss_scale: the norm is reported and clipped as if nothing had been scaled",
          "[loss_scale]") {
  for (const double scale : {1.0, 1024.0, 65536.0}) {
    for (const double grad_factor : {1.0, 4.0}) {
      INFO("scale " << scale << " grad_factor " << grad_factor);
      const double held = scale / grad_factor;
      const Clip clip = unscale(5 * held, full({}, scale, kF32), grad_factor, 1.0);
      CHECK(clip.norm.item() == 5);
      CHECK(clip.factor.item() * held == Approx(0.2).epsilon(1e-6));
      CHECK(clip.found_inf.item() == 0);
      CHECK(unscale(0.5 * held, full({}, scale, kF32), grad_factor, 1.0).factor.item() == 1 / held);
      CHECK(unscale(5 * held, full({}, scale, kF32), grad_factor, kInfinity).factor.item() ==
            1 / held);
    }
  }
  CHECK(unscale(5, {}, 1, 1.0).factor.item() == Approx(0.2).epsilon(1e-6));
}

TEST_CASE("loss_scale: a norm that is not finite gives factor 0 and found_inf", "[loss_scale]") {
  for (const double norm : {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    const Clip clip = unscale(norm, full({}, 8, kF32), 1, 1.0);
    CHECK(clip.factor.item() == 0);
    CHECK(clip.found_inf.item() == 1);
    CHECK(!std::isfinite(clip.norm.item()));
  }
}

TEST_CASE("loss_scale: falls at once, grows after the interval, stays in its bounds",
          "[loss_scale]") {
  const Tensor scale = full({}, 8, kF32), good = zeros({}, kI64), skipped = zeros({}, kI64);
  const Tensor inf = full({}, 1, kU8), fine = zeros({}, kU8);
  const LossScaleRule rule{
      .growth = 2, .backoff = 0.5, .interval = 3, .min_scale = 2, .max_scale = 16};
  const auto step = [&](const Tensor& found_inf) {
    update_loss_scale(scale, good, skipped, found_inf, rule);
    return scale.item();
  };
  CHECK(step(fine) == 8);
  CHECK(step(fine) == 8);
  CHECK(step(inf) == 4);  // the count starts anew
  CHECK(good.item() == 0);
  CHECK(step(fine) == 4);
  CHECK(step(fine) == 4);
  CHECK(good.item() == 2);
  CHECK(step(fine) == 8);
  CHECK(good.item() == 0);
  for (int i = 0; i < 6; ++i) step(fine);
  CHECK(scale.item() == 16);
  for (int i = 0; i < 5; ++i) step(inf);
  CHECK(scale.item() == 2);
  CHECK(skipped.item() == 6);
}

TEST_CASE("scale_check: scales, rounds, and finds what is not finite once it is stored",
          "[loss_scale]") {
  const auto run = [](const Tensor& x, DType dst_dtype, double factor) {
    const Tensor dst = empty(x.shape(), dst_dtype), found = zeros({}, kU8);
    kernels::scale_check(current_stream(), {.dst = dst.raw_data(),
                                            .x = x.raw_data(),
                                            .found_inf = found.data<uint8_t>(),
                                            .dst_dtype = dst_dtype,
                                            .dtype = x.dtype(),
                                            .factor = static_cast<float>(factor),
                                            .numel = x.numel()});
    return std::pair(dst, found.item());
  };
  for (const DType from : {kF32, kBF16, kF16}) {
    for (const DType to : {kF32, kBF16, kF16}) {
      for (const int64_t numel : {0, 1, 7, 1024, 70'001}) {
        const Tensor x = testing::randn({numel}, from, 5);
        auto expected = x.to_vector();
        for (double& value : expected) value *= 0.25;  // exact
        const auto [dst, found] = run(x, to, 0.25);
        testing::check_close(
            dst.to_vector(),
            from_values(std::span<const double>(expected), {numel}, to).to_vector(), 0, "dst");
        CHECK(found == 0);
        for (const double bad : {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
          if (numel == 0) continue;
          Tensor spoiled = x.clone();
          spoiled.narrow(0, numel - 1, 1).fill_(bad);
          CHECK(run(spoiled, to, 0.25).second == 1);
        }
      }
    }
  }
  // Finite as f32, not as f16; and a product that overflows.
  CHECK(run(full({3}, 1e6, kF32), kF16, 1).second == 1);
  CHECK(run(full({3}, 1e6, kF32), kF16, 0.0625).second == 0);
  CHECK(run(full({3}, 3e38, kF32), kF32, 2).second == 1);
  // A flag that is up stays up.
  const Tensor up = full({}, 1, kU8), x = full({2}, 1, kF32);
  kernels::scale_check(current_stream(),
                       {x.raw_data(), x.raw_data(), up.data<uint8_t>(), kF32, kF32, 0.5f, 2});
  CHECK(up.item() == 1);
  CHECK(x.to_vector() == std::vector<double>{0.5, 0.5});
}

TEST_CASE("loss_scale: arguments are checked", "[loss_scale]") {
  const Tensor f = zeros({}, kF32), u = zeros({}, kU8), i = zeros({}, kI64);
  CHECK_THROWS_WITH(unscale_norm(f, f, u, {}, 1, 0),
                    Catch::Contains("unscale_norm: max_norm must be > 0, got 0"));
  CHECK_THROWS_WITH(unscale_norm(f, f, u, {}, 0, 1),
                    Catch::Contains("unscale_norm: grad_factor must be > 0, got 0"));
  CHECK_THROWS_AS(unscale_norm(f, f, f, {}, 1, 1), DtypeError);
  CHECK_THROWS_AS(unscale_norm(f, f, u, zeros({2}, kF32), 1, 1), ShapeError);
  CHECK_THROWS_AS(update_loss_scale(f, i, i, f, {}), DtypeError);
  CHECK_THROWS_AS(update_loss_scale(zeros({2}, kF32), i, i, u, {}), ShapeError);
  CHECK_THROWS_WITH(scale_check(zeros({}, kF64), 1, u),
                    Catch::Contains("scale_check: x must be f32, bf16 or f16, got f64"));
  CHECK_THROWS_WITH(
      scale_check(zeros({2, 3}).transpose(0, 1), 1, u),
      Catch::Contains("scale_check: x must be contiguous, got strides 1, 3 of [3, 2]"));
  CHECK_THROWS_WITH(scale_check(f, 1, f), Catch::Contains("scale_check: found_inf must be u8"));
}

}  // namespace
}  // namespace tessera
