#include "optim/schedule.h"

#include "test/testing.h"

namespace tessera {
namespace {

using optim::Schedule;
using optim::ScheduleKind;
using optim::ScheduleOptions;
using testing::error_of;

constexpr ScheduleKind kKinds[] = {ScheduleKind::kConstant, ScheduleKind::kLinear,
                                   ScheduleKind::kCosine, ScheduleKind::kWsd};
constexpr float kPeak = 3e-4f, kFinal = 1.7e-5f;

Schedule make(ScheduleKind kind, int64_t num_steps, int64_t warmup, int64_t decay) {
  return Schedule({.kind = kind,
                   .peak_lr = kPeak,
                   .final_lr = kFinal,
                   .num_steps = num_steps,
                   .warmup_steps = warmup,
                   .decay_steps = decay});
}

TEST_CASE("schedule: warmup ends exactly at the peak, the last step exactly at final", "[optim]") {
  for (const ScheduleKind kind : kKinds) {
    for (const int64_t num_steps : {2, 3, 10, 101, 1000}) {
      for (const int64_t warmup : {0, 1, 2, 7, 100}) {
        if (warmup >= num_steps) continue;
        const Schedule schedule = make(kind, num_steps, warmup, num_steps / 2);
        INFO(fmt::format("{}, {} steps, warmup {}", name_of(kind), num_steps, warmup));
        CHECK(schedule.lr(std::max<int64_t>(warmup - 1, 0)) == kPeak);
        if (warmup > 1) {
          CHECK(std::fabs(schedule.lr(0) - kPeak / static_cast<float>(warmup)) < 1e-10f);
        }
        const float last = kind == ScheduleKind::kConstant ? kPeak : kFinal;
        CHECK(schedule.lr(num_steps - 1) == last);
        CHECK(schedule.lr(num_steps) == last);
        CHECK(schedule.lr(num_steps + 1000) == last);
        for (int64_t step = 1; step < num_steps; ++step) {  // up, then never up again
          if (step < warmup) {
            CHECK(schedule.lr(step) > schedule.lr(step - 1));
          } else {
            CHECK(schedule.lr(step) <= schedule.lr(step - 1));
          }
        }
      }
    }
  }
}

TEST_CASE("schedule: the shapes between peak and final", "[optim]") {
  const auto near = [](float lr, double expected) {
    CHECK(std::fabs(lr - expected) <= 1e-7 * expected);
  };
  // Warmup of 3: the peak is at step 2, the last step is 10, so step 6 is the middle.
  near(make(ScheduleKind::kLinear, 11, 3, 0).lr(6), (kPeak + kFinal) / 2.0);
  near(make(ScheduleKind::kLinear, 11, 3, 0).lr(4), kFinal + (kPeak - kFinal) * 0.75);
  near(make(ScheduleKind::kCosine, 11, 3, 0).lr(6), (kPeak + kFinal) / 2.0);
  near(make(ScheduleKind::kCosine, 11, 3, 0).lr(4),
       kFinal + (kPeak - kFinal) * (1 + std::sqrt(0.5)) / 2);
  const Schedule wsd = make(ScheduleKind::kWsd, 11, 3, 4);
  for (int64_t step = 2; step <= 6; ++step) CHECK(wsd.lr(step) == kPeak);
  near(wsd.lr(7), kFinal + (kPeak - kFinal) * 0.75);
  near(wsd.lr(9), kFinal + (kPeak - kFinal) * 0.25);
}

TEST_CASE("schedule: runs that leave no room", "[optim]") {
  for (const ScheduleKind kind : kKinds) {
    CHECK(make(kind, 1, 0, 0).lr(0) == kPeak);
    CHECK(make(kind, 4, 4, 2).lr(3) == kPeak);      // nothing but warmup
    CHECK(make(kind, 4, 8, 2).lr(3) == kPeak / 2);  // not even all of it
    CHECK(make(kind, 4, 8, 2).lr(100) == kPeak / 2);
  }
  CHECK(make(ScheduleKind::kWsd, 10, 4, 100).lr(3) == kPeak);  // decay begins after warmup
  CHECK(make(ScheduleKind::kWsd, 10, 4, 100).lr(4) < kPeak);
  CHECK(make(ScheduleKind::kWsd, 10, 4, 0).lr(9) == kPeak);  // no decay
}

TEST_CASE("schedule: names and mistakes", "[optim]") {
  for (const ScheduleKind kind : kKinds)
    CHECK(enum_from_name<ScheduleKind>(name_of(kind), "schedule") == kind);
  CHECK(error_of([] { enum_from_name<ScheduleKind>("cosin", "schedule"); }) ==
        "schedule: unknown name \"cosin\", expected one of constant, linear, cosine, wsd, "
        "range_test");
  const auto has = [](auto change, const std::string& part) {
    ScheduleOptions options;
    change(options);
    CHECK(error_of([&] { Schedule{options}; }).find(part) == 0);
  };
  has([](ScheduleOptions& o) { o.peak_lr = -1; }, "schedule: peak_lr must be at least 0, got -1");
  has([](ScheduleOptions& o) { o.final_lr = -1; }, "schedule: final_lr must be at least 0, got -1");
  has([](ScheduleOptions& o) { o.num_steps = 0; }, "schedule: num_steps must be at least 1, got 0");
  has([](ScheduleOptions& o) { o.warmup_steps = -1; },
      "schedule: warmup_steps must be at least 0, got -1");
  has([](ScheduleOptions& o) { o.decay_steps = -1; },
      "schedule: decay_steps must be at least 0, got -1");
}

TEST_CASE("schedule: a range test multiplies the rate by equal factors, from first to peak",
          "[optim]") {
  ScheduleOptions options{.kind = ScheduleKind::kRangeTest,
                          .peak_lr = 1,
                          .num_steps = 7,
                          .warmup_steps = 3,
                          .first_lr = 1e-6};
  const Schedule schedule(options);
  for (int64_t step = 0; step < 7; ++step) {
    CHECK(schedule.lr(step) == Approx(std::pow(10.0, static_cast<double>(step) - 6)));
  }
  CHECK(schedule.lr(6) == 1.0f);
  CHECK(schedule.lr(60) == 1.0f);
  options.num_steps = 1;
  CHECK(Schedule(options).lr(0) == 1.0f);
  options.first_lr = 1;
  CHECK(error_of([&] {
          Schedule schedule_of_nothing(options);
        }).find("schedule: first_lr must be above 0 and below peak_lr, got 1") == 0);
}

}  // namespace
}  // namespace tessera
