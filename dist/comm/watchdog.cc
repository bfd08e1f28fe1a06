#include "dist/comm/watchdog.h"

#include <algorithm>
#include <utility>

#include "core/log.h"
#include "core/profiler.h"

namespace tessera::dist {

namespace {

constexpr std::chrono::milliseconds kPeriod{50};
std::atomic<bool> terminating{false};
static_assert(std::atomic<bool>::is_always_lock_free);

double seconds(int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) * 1e-9;
}

}  // namespace

std::string CollectiveRecord::to_string() const {
  std::string text = op;
  if (!unit.empty()) text += " of " + unit;
  text += " (";
  if (!phase.empty()) text += phase + ", ";
  if (step >= 0) text += fmt::format("step {}, ", step);
  return text + fmt::format("{} bytes, sequence {})", nbytes, sequence);
}

CollectiveLog::CollectiveLog(int rank, std::shared_ptr<const std::atomic<bool>> verbose)
    : rank_(rank), verbose_(std::move(verbose)) {}

void CollectiveLog::begin(const char* op, const CollectiveInfo& info, int64_t nbytes) {
  CollectiveRecord record;
  record.op = op;
  record.phase = info.phase;
  record.unit = info.unit;
  record.step = info.step;
  record.nbytes = nbytes;
  record.begin_ns = profiler::now_ns();
  std::string line;
  {
    const std::lock_guard lock(mutex_);
    record.sequence = next_sequence_++;
    if (verbose_->load(std::memory_order_relaxed)) line = record.to_string();
    if (records_.size() == kNumKept) records_.pop_front();
    records_.push_back(std::move(record));
  }
  if (!line.empty()) log_info("rank {}: {}", rank_, line);
}

void CollectiveLog::end() {
  const std::lock_guard lock(mutex_);
  records_.back().end_ns = profiler::now_ns();
}

std::deque<CollectiveRecord> CollectiveLog::records() const {
  const std::lock_guard lock(mutex_);
  return records_;
}

void CollectiveLog::forgive(int64_t nanoseconds) {
  const std::lock_guard lock(mutex_);
  if (!records_.empty() && records_.back().end_ns == 0) records_.back().begin_ns += nanoseconds;
}

Watchdog::Watchdog(std::chrono::milliseconds timeout,
                   std::function<void(const std::string& reason)> on_timeout)
    : timeout_ns_(std::chrono::nanoseconds(timeout).count()),
      on_timeout_(std::move(on_timeout)),
      verbose_(std::make_shared<std::atomic<bool>>(false)),
      thread_([this] { run(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  thread_.join();
}

std::shared_ptr<CollectiveLog> Watchdog::make_log(int rank) {
  auto log = std::make_shared<CollectiveLog>(rank, verbose_);
  const std::lock_guard lock(mutex_);
  std::erase_if(logs_, [](const auto& weak) { return weak.expired(); });
  logs_.push_back(log);
  return log;
}

void Watchdog::add_poller(std::weak_ptr<CollectivePoller> poller) {
  const std::lock_guard lock(mutex_);
  std::erase_if(pollers_, [](const auto& weak) { return weak.expired(); });
  pollers_.push_back(std::move(poller));
}

void Watchdog::poll() {
  std::vector<std::shared_ptr<CollectivePoller>> alive;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& weak : pollers_) {
      if (auto poller = weak.lock()) alive.push_back(std::move(poller));
    }
  }
  for (const auto& poller : alive) poller->poll();
}

void Watchdog::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ns_ = std::chrono::nanoseconds(timeout).count();
}

void Watchdog::notify_terminate() noexcept {
  terminating = true;
}

void Watchdog::set_on_end(std::function<void(const std::string&)> action) {
  const std::lock_guard lock(mutex_);
  on_end_ = std::move(action);
}

void Watchdog::run_on_end(const std::string& reason) {
  const std::lock_guard lock(mutex_);  // held: whoever takes the action back waits for its end
  if (const auto action = std::exchange(on_end_, nullptr)) action(reason);
}

std::vector<std::shared_ptr<CollectiveLog>> Watchdog::logs() {
  std::vector<std::shared_ptr<CollectiveLog>> alive;
  const std::lock_guard lock(mutex_);
  for (const auto& weak : logs_) {
    if (auto log = weak.lock()) alive.push_back(std::move(log));
  }
  return alive;
}

bool Watchdog::has_collective_in_flight(int rank) {
  for (const auto& log : logs()) {
    if (log->rank() != rank) continue;
    for (const CollectiveRecord& record : log->records()) {
      if (record.end_ns == 0) return true;
    }
  }
  return false;
}

void Watchdog::run() {
  bool has_reported_terminate = false;
  int64_t previous_ns = profiler::now_ns();
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (stop_changed_.wait_for(lock, kPeriod, [this] { return stop_; })) return;
    }
    const int64_t now_ns = profiler::now_ns();
    const int64_t gap_ns = now_ns - previous_ns;
    previous_ns = now_ns;
    if (gap_ns > 2'000'000'000) {  // stopped (SIGSTOP, a suspended machine) and going on again
      for (const auto& log : logs()) log->forgive(gap_ns);
    }
    if (terminating && !has_reported_terminate) {
      has_reported_terminate = true;
      report_terminate();
    }
    if (terminating) run_on_end("");
    poll();
    if (check_late(now_ns)) {
      poll();
      return;
    }
  }
}

bool Watchdog::check_late(int64_t now_ns) {
  const int64_t timeout_ns = timeout_ns_;
  if (timeout_ns == 0) return false;
  std::string reason;
  std::vector<int> late_ranks;
  const auto alive = logs();
  for (const auto& log : alive) {
    for (const CollectiveRecord& record : log->records()) {
      if (record.end_ns != 0 || now_ns - record.begin_ns <= timeout_ns) continue;
      const std::string line = fmt::format("rank {}: {} has not finished in {:.3g} s", log->rank(),
                                           record.to_string(), seconds(timeout_ns));
      if (reason.empty()) reason = line;
      log_error("{}", line);
      late_ranks.push_back(log->rank());
    }
  }
  if (late_ranks.empty()) return false;
  std::sort(late_ranks.begin(), late_ranks.end());
  late_ranks.erase(std::unique(late_ranks.begin(), late_ranks.end()), late_ranks.end());
  for (const int rank : late_ranks) {
    std::vector<CollectiveRecord> records;
    for (const auto& log : alive) {
      if (log->rank() != rank) continue;
      const auto more = log->records();
      records.insert(records.end(), more.begin(), more.end());
    }
    std::sort(records.begin(), records.end(),
              [](const auto& a, const auto& b) { return a.begin_ns < b.begin_ns; });
    const size_t first = records.size() - std::min(records.size(), CollectiveLog::kNumKept);
    std::string text = fmt::format("rank {}: the last collectives:", rank);
    for (size_t i = first; i < records.size(); ++i) {
      text += fmt::format(
          "\n  {}: {}", records[i].to_string(),
          records[i].end_ns != 0
              ? fmt::format("took {:.3g} s", seconds(records[i].end_ns - records[i].begin_ns))
              : fmt::format("in flight for {:.3g} s", seconds(now_ns - records[i].begin_ns)));
    }
    log_error("{}", text);
  }
  run_on_end(reason);
  on_timeout_(reason);
  return true;
}

void Watchdog::report_terminate() {
  for (const auto& log : logs()) {
    for (const CollectiveRecord& record : log->records()) {
      if (record.end_ns != 0) continue;
      log_error("rank {}: terminated while {} was in flight", log->rank(), record.to_string());
    }
  }
}

}  // namespace tessera::dist
