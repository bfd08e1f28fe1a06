#include "kernels/loss_scale/loss_scale.h"

#include <limits>

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
}

}  // namespace
}  // namespace tessera
