#pragma once

#include <cstdint>

#include "core/enum_names.h"

namespace tessera::optim {

/// How the learning rate goes after the warm-up.
enum class ScheduleKind : unsigned char {
  kConstant,
  kLinear,
  kCosine,
  kWsd,
  kRangeTest,  ///< every rate once, to see which ones train (Smith 2017, arXiv:1506.01186)
};
constexpr auto enum_names(ScheduleKind) {
  return std::to_array<EnumName<ScheduleKind>>({{ScheduleKind::kConstant, "constant"},
                                                {ScheduleKind::kLinear, "linear"},
                                                {ScheduleKind::kCosine, "cosine"},
                                                {ScheduleKind::kWsd, "wsd"},
                                                {ScheduleKind::kRangeTest, "range_test"}});
}

/// Rates count as f32.
struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::kCosine;
  double peak_lr = 1e-3;
  double final_lr = 0;       ///< not used by kConstant and kRangeTest
  int64_t num_steps = 1;     ///< steps of the whole run
  int64_t warmup_steps = 0;  ///< 0: the first step is at the peak
  double first_lr = 1e-7;    ///< kRangeTest: of the first step
  int64_t decay_steps = 0;   ///< kWsd: the last steps, from the peak to final_lr; 0: none
};

/// The learning rate of step 0, 1, ..., num_steps - 1. With w = warmup_steps:
///   warmup    lr(s) = peak (s + 1) / w for s < w, so lr(w - 1) is exactly the peak
///   kConstant the peak from then on
///   kLinear, kCosine  from the peak at step max(w - 1, 0) to exactly final_lr at num_steps - 1:
///             lr = final + (peak - final) f(t), t in [0, 1], f = 1 - t or (1 + cos(pi t)) / 2
///   kWsd      warmup, stable, decay: the peak up to step num_steps - 1 - decay_steps, then linear
///             to exactly final_lr at num_steps - 1; a decay that is too long begins after warmup
///   kRangeTest  without warmup: lr(s) = first (peak / first)^(s / (num_steps - 1)), so that equal
///             numbers of steps multiply the rate by equal factors, from first_lr to exactly peak
/// A run that ends within the warmup never decays, and a single step is at the peak. Steps from
/// num_steps on stay at the last step's rate.
/// Errors   ConfigError if a rate or a number of steps is negative or num_steps is 0, or if
///          first_lr of a kRangeTest is not in (0, peak_lr)
class Schedule {
 public:
  explicit Schedule(const ScheduleOptions& options);
  /// The rate of a step, counted from 0.
  float lr(int64_t step) const;
  const ScheduleOptions& options() const { return options_; }

 private:
  ScheduleOptions options_;
};

}  // namespace tessera::optim
