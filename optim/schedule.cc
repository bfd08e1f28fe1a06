#include "optim/schedule.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace tessera::optim {

Schedule::Schedule(const ScheduleOptions& options) : options_(options) {
  const auto check = [](bool is_right, const char* name, const char* range, auto value) {
    TESSERA_CHECK_AS(ConfigError, is_right, "schedule: {} must be {}, got {}", name, range, value);
  };
  check(options.peak_lr >= 0, "peak_lr", "at least 0", options.peak_lr);
  check(options.final_lr >= 0, "final_lr", "at least 0", options.final_lr);
  check(options.num_steps >= 1, "num_steps", "at least 1", options.num_steps);
  check(options.warmup_steps >= 0, "warmup_steps", "at least 0", options.warmup_steps);
  check(options.decay_steps >= 0, "decay_steps", "at least 0", options.decay_steps);
  check(options.kind != ScheduleKind::kRangeTest ||
            (options.first_lr > 0 && options.first_lr < options.peak_lr),
        "first_lr", "above 0 and below peak_lr", options.first_lr);
}

float Schedule::lr(int64_t step) const {
  const ScheduleOptions& o = options_;
  const auto peak_lr = static_cast<float>(o.peak_lr), final_lr = static_cast<float>(o.final_lr);
  const auto peak = static_cast<double>(peak_lr), final = static_cast<double>(final_lr);
  const int64_t last = o.num_steps - 1;
  step = std::min(step, last);
  if (o.kind == ScheduleKind::kRangeTest) {
    if (step == last) return peak_lr;
    const double t = static_cast<double>(step) / static_cast<double>(last);
    return static_cast<float>(o.first_lr * std::pow(peak / o.first_lr, t));
  }
  if (step < o.warmup_steps) {
    return static_cast<float>(peak * static_cast<double>(step + 1) /
                              static_cast<double>(o.warmup_steps));
  }
  int64_t start = std::max<int64_t>(o.warmup_steps - 1, 0);  // the last step at the peak
  if (o.kind == ScheduleKind::kWsd) start = std::max(start, last - o.decay_steps);
  if (o.kind == ScheduleKind::kConstant || step <= start) return peak_lr;
  if (step == last) return final_lr;
  const double t = static_cast<double>(step - start) / static_cast<double>(last - start);
  const double f = o.kind == ScheduleKind::kCosine ? 0.5 * (1 + std::cos(M_PI * t)) : 1 - t;
  return static_cast<float>(final + (peak - final) * f);
}

}  // namespace tessera::optim
