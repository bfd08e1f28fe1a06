#include "dist/fsdp/scaler.h"

#include "core/settings.h"
#include "kernels/elementwise/elementwise.h"

namespace tessera::dist {

LossScaler::LossScaler(const LossScaleOptions& options) : options_(options) {
  const LossScaleRule& r = options.rule;
  check_option(options.init > 0 && options.init <= r.max_scale, "LossScaleOptions::init",
               "{}, expected more than 0 and at most {}", options.init, r.max_scale);
  TESSERA_CHECK_AS(ConfigError, r.growth >= 1 && r.backoff > 0 && r.backoff < 1,
                   "LossScaler: growth {} and backoff {}, expected at least 1 and in (0, 1)",
                   r.growth, r.backoff);
  check_option(r.interval >= 1, "LossScaleRule::interval", "{}, expected at least 1", r.interval);
  TESSERA_CHECK_AS(ConfigError, r.min_scale > 0 && r.min_scale <= r.max_scale,
                   "LossScaler: scales from {} to {}, expected a range above 0", r.min_scale,
                   r.max_scale);
  const double init = options.scaling == LossScaling::kNone ? 1.0 : options.init;
  state_ = {full({}, init, kF32), zeros({}, kI64), zeros({}, kI64)};
  if (options.scaling == LossScaling::kDynamic) return;
  // A scale that stays: only the steps are counted.
  options_.rule.growth = 1;
  options_.rule.min_scale = options_.rule.max_scale = init;
}

Tensor LossScaler::grad_scale(double factor) const {
  return tessera::scale(state_.scale, factor);
}

void LossScaler::update(const Tensor& found_inf) {
  update_loss_scale(state_.scale, state_.num_good, state_.num_skipped, found_inf, options_.rule);
}

}  // namespace tessera::dist
