#include "apps/run_control.h"

#include <signal.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>

#include "core/glob.h"
#include "core/split.h"
#include "core/text.h"
#include "dist/comm/watchdog.h"

namespace tessera::apps {
namespace {

/// What a signal means to a training.
struct Handled {
  int number;
  const char* name;
  bool ends_soon;    // who sent it waits no longer than a moment
  bool ends_second;  // it comes once, unless somebody is impatient
};
constexpr Handled kHandled[] = {{SIGTERM, "SIGTERM", true, true},
                                {SIGINT, "SIGINT", true, true},
                                {SIGUSR1, "SIGUSR1", false, true},
                                {SIGHUP, "SIGHUP", false, false},
                                {SIGXCPU, "SIGXCPU", false, false}};
constexpr int kIgnored[] = {SIGPIPE, SIGXFSZ};  // the write says so
// What came so soon after the first is the same request: timeout(1) sends each signal twice.
constexpr int64_t kSameRequest_ns = 100'000'000;

std::atomic<const char*> cause_of_preemption{nullptr};  // null: none
std::atomic<bool> is_stepping{false}, is_over{false};
std::atomic<int64_t> first_end_ns{0}, first_user_ns{0};
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free &&
              std::atomic<const char*>::is_always_lock_free);

struct sigaction previous[std::size(kHandled)], previous_ignored[std::size(kIgnored)];

int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

/// The process ends by the signal, so that who started it sees why.
void end_by(int number, const char* why) {
  write_fatal_report(why);
  ::signal(number, SIG_DFL);
  ::raise(number);
}

/// Async-signal-safe.
void on_signal(int number) {
  const int saved_errno = errno;
  const Handled* signal = kHandled;
  while (signal->number != number) ++signal;
  request_preemption(signal->name);
  if (!is_stepping) {
    char why[64] = "ended before the first step by ";
    ::strncat(why, signal->name, sizeof(why) - std::strlen(why) - 1);
    end_by(number, why);
  } else if (signal->ends_second) {
    std::atomic<int64_t>& first = signal->ends_soon ? first_end_ns : first_user_ns;
    int64_t none = 0;
    const int64_t now = now_ns();
    if (!first.compare_exchange_strong(none, now)) {
      if (now - none > kSameRequest_ns) {
        char why[64] = "ended by a second ";
        ::strncat(why, signal->name, sizeof(why) - std::strlen(why) - 1);
        end_by(number, why);
      }
    } else if (signal->ends_soon && !is_over) {
      dist::Watchdog::notify_terminate();
    }
  }
  errno = saved_errno;
}

/// A limit of processor time whose warning (SIGXCPU) comes with the end itself, as `ulimit -t` sets
/// it, is made to warn earlier.
void warn_before_cpu_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_CPU, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (limit.rlim_cur < limit.rlim_max) return;
  const rlim_t margin = std::clamp<rlim_t>(limit.rlim_max / 10, 1, 60);
  limit.rlim_cur = limit.rlim_max > margin ? limit.rlim_max - margin : limit.rlim_max;
  ::setrlimit(RLIMIT_CPU, &limit);
}

}  // namespace

SignalHandlers::SignalHandlers() {
  forget_preemption();
  is_stepping = is_over = false;
  first_end_ns = first_user_ns = 0;
  warn_before_cpu_limit();
  for (size_t i = 0; i < std::size(kIgnored); ++i) {
    struct sigaction action = {};
    action.sa_handler = SIG_IGN;
    ::sigaction(kIgnored[i], &action, &previous_ignored[i]);
  }
  for (size_t i = 0; i < std::size(kHandled); ++i) {
    const int number = kHandled[i].number;
    ::sigaction(number, nullptr, &previous[i]);
    if (number == SIGHUP && previous[i].sa_handler == SIG_IGN) continue;
    struct sigaction action = {};
    action.sa_handler = on_signal;
    // Calls that it interrupts go on; a process may end from inside the handler.
    action.sa_flags = SA_RESTART | SA_NODEFER;
    ::sigaction(number, &action, nullptr);
  }
}

SignalHandlers::~SignalHandlers() {
  if (is_over) return;
  for (size_t i = 0; i < std::size(kHandled); ++i) {
    ::sigaction(kHandled[i].number, &previous[i], nullptr);
  }
  for (size_t i = 0; i < std::size(kIgnored); ++i) {
    ::sigaction(kIgnored[i], &previous_ignored[i], nullptr);
  }
}

void SignalHandlers::begin_steps() {
  is_stepping = true;
}

void SignalHandlers::end_run() {
  is_stepping = true;  // also of a run that had no step left
  first_end_ns = first_user_ns = 0;
  is_over = true;
}

void request_preemption(const char* cause) {
  const char* none = nullptr;
  cause_of_preemption.compare_exchange_strong(none, cause);
}
bool is_preemption_requested() {
  return cause_of_preemption != nullptr;
}
std::string preemption_cause() {
  const char* const cause = cause_of_preemption;
  return cause != nullptr ? cause : "";
}
void forget_preemption() {
  cause_of_preemption = nullptr;
}

std::string nonfinite_advice(const Config& config, double lr) {
  const OptimConfig& o = config.optim;
  std::string text = fmt::format(
      "more often than the data the cause is: a learning rate that is too high ({:g} in this step; "
      "lower optim.lr = {:g} or raise optim.warmup_steps = {})",
      lr, o.schedule.peak_lr, o.schedule.warmup_steps);
  if (o.clip == 0) text += ", gradients without a limit (set optim.clip = 1)";
  if (config.precision.param_dtype == kF16) {
    text += ", the range of f16 (set precision.param_dtype = bf16)";
  }
  return text;
}

std::string flat_loss(std::span<const double> losses, bool is_new) {
  std::vector<double> finite;
  std::copy_if(losses.begin(), losses.end(), std::back_inserter(finite),
               [](double loss) { return std::isfinite(loss); });
  const size_t count = finite.size(), third = count / 3;
  if (third < 3) return "";
  const auto mean = [&](size_t begin) {
    return std::accumulate(finite.begin() + static_cast<std::ptrdiff_t>(begin),
                           finite.begin() + static_cast<std::ptrdiff_t>(begin + third), 0.0) /
           static_cast<double>(third);
  };
  const double first = mean(0), last = mean(count - third);
  const auto [least, most] = std::minmax_element(finite.begin(), finite.end());
  const bool is_one_number = *most - *least <= 1e-6 * std::abs(first);
  if (!is_new && !is_one_number) return "";
  // Neighbours differ by noise twice over, and hardly by the trend.
  double squares = 0;
  for (size_t i = 1; i < count; ++i) squares += std::pow(finite[i] - finite[i - 1], 2);
  const double variance = squares / (2 * static_cast<double>(count - 1));
  const double error = std::sqrt(2 * variance / static_cast<double>(third));
  if (!is_one_number && first - last > 2 * error) return "";
  return fmt::format("the loss {}: {:.4f} (mean of steps 1 to {}), {:.4f} (of the last {})",
                     last - first > 2 * error ? "rises" : "stays flat", first, third, last, third);
}

std::vector<std::string> dead_parameters(const dist::FirstSteps::Found& found,
                                         const std::vector<dist::ParameterGroup>& groups,
                                         const std::vector<std::string>& trained) {
  std::vector<std::string> texts;
  const auto add = [&](std::vector<std::string> names, const char* of_group, const char* of_some) {
    const auto is_dead = [&](const std::string& name) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    std::vector<std::string> told;
    for (const dist::ParameterGroup& group : groups) {
      const auto is_in = [&](const std::string& name) {
        const std::vector<std::string_view> patterns = split(group.match);
        return std::any_of(patterns.begin(), patterns.end(),
                           [&](std::string_view pattern) { return matches_glob(name, pattern); });
      };
      std::vector<std::string> members;
      std::copy_if(trained.begin(), trained.end(), std::back_inserter(members), is_in);
      if (members.empty() || !std::all_of(members.begin(), members.end(), is_dead)) continue;
      texts.push_back(fmt::format("{} {} ({} parameters)", of_group, group.match, members.size()));
      told.insert(told.end(), members.begin(), members.end());
    }
    std::erase_if(names, [&](const std::string& name) {
      return std::find(told.begin(), told.end(), name) != told.end();
    });
    constexpr size_t kMost = 5;
    if (!names.empty())
      texts.push_back(fmt::format("{} {}", of_some, join_few(names, ", ", kMost)));
  };
  add(found.without_gradient, "no gradient comes to the group", "no gradient comes to");
  add(found.unchanged, "updates do not change the group", "updates do not change");
  return texts;
}

RunControl::RunControl(const TrainConfig& config, dist::World& world)
    : world_(world),
      start_(std::chrono::steady_clock::now()),
      max_seconds_(config.max_minutes * 60) {}

RunControl::Decision RunControl::poll(dist::CheckpointWriter::State writer, bool is_save_due,
                                      bool has_failed, double waited_ms) {
  struct News {
    uint8_t is_preempted, is_out_of_time, is_save_due, has_failed;
    dist::CheckpointWriter::State writer;
    double waited_ms;
  };
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
  const bool is_late = max_seconds_ > 0 && elapsed.count() >= max_seconds_;
  const News mine{is_preemption_requested(), is_late, is_save_due, has_failed, writer, waited_ms};
  std::vector<News> all(static_cast<size_t>(world_.world_size()));
  world_.control().all_gather(all.data(), &mine, sizeof(mine), "end of a step");
  Decision decision;
  for (const News& news : all) {
    decision.is_preempted = decision.is_preempted || news.is_preempted != 0;
    decision.is_out_of_time = decision.is_out_of_time || news.is_out_of_time != 0;
    decision.has_failed = decision.has_failed || news.has_failed != 0;
    decision.writers.push_back(news.writer);
    decision.waited_ms.push_back(news.waited_ms);
  }
  decision.is_save_due = all.front().is_save_due != 0;
  return decision;
}

void SlowRank::add(const std::vector<double>& waited_ms, double step_ms) {
  steps_.push_back({waited_ms, step_ms});
  if (steps_.size() > kWindow) steps_.pop_front();
}

std::optional<SlowRank::Finding> SlowRank::find() const {
  if (steps_.empty() || steps_.front().waited_ms.size() < 2) return std::nullopt;
  const size_t num_ranks = steps_.front().waited_ms.size();
  const auto num_steps = static_cast<double>(steps_.size());
  std::vector<double> behind_ms(num_ranks, 0);
  std::vector<size_t> num_slowest(num_ranks, 0);
  double step_ms = 0;
  for (const Step& step : steps_) {
    double total = 0;
    for (const double waited : step.waited_ms) total += waited;
    for (size_t r = 0; r < num_ranks; ++r) {
      const double of_others = (total - step.waited_ms[r]) / static_cast<double>(num_ranks - 1);
      behind_ms[r] += (of_others - step.waited_ms[r]) / num_steps;
    }
    const auto least = std::min_element(step.waited_ms.begin(), step.waited_ms.end());
    ++num_slowest[static_cast<size_t>(least - step.waited_ms.begin())];
    step_ms += step.step_ms / num_steps;
  }
  const auto most = std::max_element(behind_ms.begin(), behind_ms.end());
  const auto rank = static_cast<size_t>(most - behind_ms.begin());
  constexpr double kMargin = 0.1;
  const bool is_persistent = steps_.size() == kWindow && 8 * num_slowest[rank] >= 7 * kWindow &&
                             *most >= kMargin * step_ms;
  return Finding{static_cast<int>(rank), *most, is_persistent};
}

std::optional<double> SpikeGuard::score(double loss) const {
  const auto count = static_cast<double>(losses_.size());
  if (losses_.size() < static_cast<size_t>(config_.spike_window)) return std::nullopt;
  double sum = 0, squares = 0;
  for (const double x : losses_) sum += x;
  const double mean = sum / count;
  for (const double x : losses_) squares += (x - mean) * (x - mean);
  // A window without any spread calls every digit a spike.
  constexpr double kSmallestSpread = 1e-3;
  const double spread = std::max(std::sqrt(squares / count), kSmallestSpread * std::abs(mean));
  return (loss - mean) / spread;
}

bool SpikeGuard::is_spike(double loss) const {
  return is_on() && score(loss).value_or(0) > config_.spike_z;
}

void SpikeGuard::add(double loss) {
  losses_.push_back(loss);
  if (losses_.size() > static_cast<size_t>(config_.spike_window)) losses_.pop_front();
}

}  // namespace tessera::apps
