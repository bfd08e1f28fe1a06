#include "optim/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/check.h"

namespace tessera::optim {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"constant", "linear", "cosine", "wsd"};

}  // namespace

std::string_view name_of(ScheduleKind kind) {
  return kNames[static_cast<size_t>(kind)];
}

ScheduleKind schedule_from_name(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<ScheduleKind>(i);
  }
  throw ConfigError(fmt::format("schedule: unknown name \"{}\", expected one of {}", name,
                                fmt::join(kNames, ", ")));
}

Schedule::Schedule(const ScheduleOptions& options) : options_(options) {
  const auto check = [](bool is_right, const char* name, const char* range, auto value) {
    TESSERA_CHECK_AS(ConfigError, is_right, "schedule: {} must be {}, got {}", name, range, value);
  };
  check(options.peak_lr >= 0, "peak_lr", "at least 0", options.peak_lr);
  check(options.final_lr >= 0, "final_lr", "at least 0", options.final_lr);
  check(options.num_steps >= 1, "num_steps", "at least 1", options.num_steps);
  check(options.warmup_steps >= 0, "warmup_steps", "at least 0", options.warmup_steps);
  check(options.decay_steps >= 0, "decay_steps", "at least 0", options.decay_steps);
}

float Schedule::lr(int64_t step) const {
  const ScheduleOptions& o = options_;
  const double peak = static_cast<double>(o.peak_lr), final = static_cast<double>(o.final_lr);
  const int64_t last = o.num_steps - 1;
  step = std::min(step, last);
  if (step < o.warmup_steps) {
    return static_cast<float>(peak * static_cast<double>(step + 1) /
                              static_cast<double>(o.warmup_steps));
  }
  int64_t start = std::max<int64_t>(o.warmup_steps - 1, 0);  // the last step at the peak
  if (o.kind == ScheduleKind::kWsd) start = std::max(start, last - o.decay_steps);
  if (o.kind == ScheduleKind::kConstant || step <= start) return o.peak_lr;
  if (step == last) return o.final_lr;
  const double t = static_cast<double>(step - start) / static_cast<double>(last - start);
  const double f = o.kind == ScheduleKind::kCosine ? 0.5 * (1 + std::cos(M_PI * t)) : 1 - t;
  return static_cast<float>(final + (peak - final) * f);
}

}  // namespace tessera::optim
