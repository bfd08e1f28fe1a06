#include "apps/run_control.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "dist/comm/watchdog.h"

namespace tessera::apps {
namespace {

constexpr int kSignals[] = {SIGTERM, SIGUSR1};

std::atomic<bool> preemption_requested{false};
std::atomic<int> num_terms{0}, num_users{0};
std::atomic<int> final_signal{0};  // that came twice
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

struct sigaction previous[2];

/// Async-signal-safe.
void on_signal(int number) {
  preemption_requested = true;
  if (number == SIGTERM) {
    if (num_terms++ == 0) {
      dist::Watchdog::notify_terminate();
    } else {  // the first has written the status
      ::signal(number, SIG_DFL);
      ::raise(number);
    }
  } else if (num_users++ > 0) {
    final_signal = number;
    dist::Watchdog::notify_terminate();
    ::alarm(1);  // if nobody is there to notice
  }
}

}  // namespace

SignalHandlers::SignalHandlers() {
  preemption_requested = false;
  num_terms = num_users = final_signal = 0;
  for (size_t i = 0; i < 2; ++i) {
    struct sigaction action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    // The second SIGTERM ends the process from inside the handler.
    if (kSignals[i] == SIGTERM) action.sa_flags |= SA_NODEFER;
    ::sigaction(kSignals[i], &action, &previous[i]);
  }
}

SignalHandlers::~SignalHandlers() {
  for (size_t i = 0; i < 2; ++i) ::sigaction(kSignals[i], &previous[i], nullptr);
}

bool SignalHandlers::ends_at_once() {
  return final_signal != 0;
}

void SignalHandlers::end_by_signal() {
  const int number = final_signal;
  ::signal(number, SIG_DFL);
  ::kill(::getpid(), number);
}

void request_preemption() {
  preemption_requested = true;
}
bool is_preemption_requested() {
  return preemption_requested;
}
void forget_preemption() {
  preemption_requested = false;
}

std::string nonfinite_advice(const Config& config, double lr) {
  const OptimConfig& o = config.optim;
  std::string text = fmt::format(
      "more often than the data the cause is: a learning rate that is too high ({:g} in this step; "
      "lower optim.lr = {:g} or raise optim.warmup_steps = {})",
      lr, o.lr, o.warmup_steps);
  if (o.clip == 0) text += ", gradients without a limit (set optim.clip = 1)";
  if (config.precision.param_dtype == "f16") {
    text += ", the range of f16 (set precision.param_dtype = bf16)";
  }
  return text;
}

RunControl::RunControl(const TrainConfig& config, dist::World& world)
    : world_(world),
      start_(std::chrono::steady_clock::now()),
      max_seconds_(config.max_minutes * 60) {}

RunControl::Decision RunControl::poll(dist::CheckpointWriter::State writer, bool is_save_due,
                                      bool has_failed) {
  struct News {
    uint8_t is_preempted, is_out_of_time, is_save_due, has_failed;
    dist::CheckpointWriter::State writer;
  };
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
  const bool is_late = max_seconds_ > 0 && elapsed.count() >= max_seconds_;
  const News mine{is_preemption_requested(), is_late, is_save_due, has_failed, writer};
  std::vector<News> all(static_cast<size_t>(world_.world_size()));
  world_.control().all_gather(all.data(), &mine, sizeof(mine));
  Decision decision;
  for (const News& news : all) {
    decision.is_preempted = decision.is_preempted || news.is_preempted != 0;
    decision.is_out_of_time = decision.is_out_of_time || news.is_out_of_time != 0;
    decision.has_failed = decision.has_failed || news.has_failed != 0;
    decision.writers.push_back(news.writer);
  }
  decision.is_save_due = all.front().is_save_due != 0;
  return decision;
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
