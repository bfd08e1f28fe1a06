#include "dist/comm/watchdog.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <utility>

#include "core/log.h"
#include "core/profiler.h"
#include "core/random.h"
#include "core/text.h"

namespace tessera::dist {

namespace {

constexpr std::chrono::milliseconds kPeriod{50};
constexpr std::chrono::milliseconds kChannelPeriod{20};
constexpr std::chrono::milliseconds kAnswerTime{600};  // of other processes
constexpr std::chrono::milliseconds kActionTime{2000};
constexpr size_t kMaxLines = 8;   // of one kind in a report
constexpr size_t kMaxName = 160;  // characters of what a caller calls something
constexpr const char* kAsk = "ask";
std::atomic<bool> terminating{false};
static_assert(std::atomic<bool>::is_always_lock_free);

double seconds(int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) * 1e-9;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

/// Lines of a report, at most kMaxLines of them and the number of the others.
class Lines {
 public:
  template <class F>
  void add(const F& line) {
    if (++count_ <= kMaxLines) text_ += "\n  " + line();
  }
  std::string text() const {
    return count_ <= kMaxLines ? text_
                               : fmt::format("{}\n  and {} more", text_, count_ - kMaxLines);
  }

 private:
  std::string text_;
  size_t count_ = 0;
};

}  // namespace

CommGroup CommGroup::world(int rank, int world_size) {
  auto ranks = std::make_shared<std::vector<int>>();
  for (int r = 0; r < world_size; ++r) ranks->push_back(r);
  return {kWorldId, rank, std::move(ranks)};
}

CommGroup CommGroup::of_its_own(const char* name) const {
  CommGroup other = *this;
  other.id = (id ^ hash_name(name)) * 0x100000001b3u + 1;
  return other;
}

std::string format_ranks(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  if (ranks.empty()) return "no rank";
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  size_t num_items = 0, i = 0;
  for (; i < ranks.size() && num_items < kMaxLines; ++num_items) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i < 3) end = i + 1;  // two neighbours are two items
    if (i > 0) text += ", ";
    text +=
        end - i == 1 ? std::to_string(ranks[i]) : fmt::format("{}-{}", ranks[i], ranks[end - 1]);
    i = end;
  }
  return i == ranks.size() ? text : fmt::format("{} and {} more", text, ranks.size() - i);
}

std::string CollectiveRecord::to_string() const {
  std::string text = shorten(op, kMaxName);
  if (!unit.empty()) text += " of " + shorten(unit, kMaxName);
  text += " (";
  if (!phase.empty()) text += shorten(phase, kMaxName) + ", ";
  if (step >= 0) text += fmt::format("step {}, ", step);
  return text + fmt::format("{} bytes, sequence {})", nbytes, sequence);
}

// ---- logs

CollectiveLog::CollectiveLog(CommGroup group, std::shared_ptr<const std::atomic<bool>> verbose)
    : group_(std::move(group)), verbose_(std::move(verbose)) {}

CollectiveRecord CollectiveLog::make_record(const char* op, const CollectiveInfo& info,
                                            int64_t nbytes) {
  CollectiveRecord record;
  record.op = op;
  record.phase = info.phase;
  record.unit = info.unit;
  record.step = info.step;
  record.nbytes = nbytes;
  record.begin_ns = profiler::now_ns();
  return record;
}

void CollectiveLog::begin(const char* op, const CollectiveInfo& info, int64_t nbytes) {
  CollectiveRecord record = make_record(op, info, nbytes);
  std::string line;
  {
    const std::lock_guard lock(mutex_);
    record.sequence = counts_.num_begun++;
    if (verbose_->load(std::memory_order_relaxed)) line = record.to_string();
    if (records_.size() == kNumKept) records_.pop_front();
    records_.push_back(std::move(record));
  }
  if (!line.empty()) log_info("rank {}: {}", rank(), line);
}

void CollectiveLog::end() {
  const std::lock_guard lock(mutex_);
  CollectiveRecord& record = records_.back();
  record.end_ns = profiler::now_ns();
  finished_ns_.fetch_add(record.end_ns - record.begin_ns, std::memory_order_relaxed);
}

void CollectiveLog::enter_call(const char* op, const CollectiveInfo& info, int64_t nbytes) {
  CollectiveRecord record = make_record(op, info, nbytes);
  const std::lock_guard lock(mutex_);
  record.sequence = counts_.num_calls++;
  call_ = std::move(record);
}

void CollectiveLog::leave_call() {
  const std::lock_guard lock(mutex_);
  call_.reset();
}

std::deque<CollectiveRecord> CollectiveLog::records() const {
  const std::lock_guard lock(mutex_);
  return records_;
}

std::optional<CollectiveRecord> CollectiveLog::call() const {
  const std::lock_guard lock(mutex_);
  return call_;
}

CollectiveLog::Counts CollectiveLog::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void CollectiveLog::forgive(int64_t nanoseconds) {
  const std::lock_guard lock(mutex_);
  if (!records_.empty() && records_.back().end_ns == 0) records_.back().begin_ns += nanoseconds;
  if (call_) call_->begin_ns += nanoseconds;
}

// ---- views

std::string RankView::to_text() const {
  std::string text =
      fmt::format("{}\n{}\n{}\n{}\n", rank, seconds_since, one_line(where), one_line(last));
  for (const auto& [id, c] : counts)
    text += fmt::format("{} {} {}\n", id, c.num_begun, c.num_calls);
  return text;
}

RankView RankView::from_text(const std::string& text) {
  RankView view;
  std::istringstream in(text);
  std::string line;
  in >> view.rank >> view.seconds_since;
  std::getline(in, line);
  std::getline(in, view.where);
  std::getline(in, view.last);
  uint64_t id = 0;
  CollectiveLog::Counts counts;
  while (in >> id >> counts.num_begun >> counts.num_calls) view.counts[id] = counts;
  return view;
}

RankView Watchdog::view_of(int rank) {
  RankView view;
  view.rank = rank;
  const int64_t now_ns = profiler::now_ns();
  int64_t last_ns = 0;
  std::vector<std::string> places;
  for (const auto& log : logs()) {
    if (log->rank() != rank) continue;
    view.counts[log->group().id] = log->counts();
    if (const auto call = log->call()) places.push_back("in the call of " + call->to_string());
    for (const CollectiveRecord& record : log->records()) {
      if (record.end_ns == 0) {
        places.push_back("in " + record.to_string());
      } else if (record.end_ns > last_ns) {
        last_ns = record.end_ns;
        view.last = record.to_string();
        view.seconds_since = seconds(now_ns - last_ns);
      }
    }
  }
  constexpr size_t kMaxPlaces = 3;
  const size_t num_places = places.size();
  places.resize(std::min(num_places, kMaxPlaces));
  view.where = num_places == 0 ? "in no collective" : fmt::format("{}", fmt::join(places, " and "));
  if (num_places > kMaxPlaces) view.where += fmt::format(" and {} more", num_places - kMaxPlaces);
  return view;
}

/// Of the ranks that can be reached; empty if another process asks them all.
std::map<int, RankView> Watchdog::views_of_all() {
  std::map<int, RankView> all;
  for (const auto& log : logs()) all.try_emplace(log->rank(), RankView{});
  for (auto& [rank, view] : all) view = view_of(rank);
  std::unique_lock lock(views_mutex_);
  if (num_processes_ == 1) return all;
  const int rank = all.empty() ? 0 : all.begin()->first;
  const auto turn = 3 * kChannelPeriod * std::min(rank, 4);  // time to be asked by a lower one
  if (views_changed_.wait_for(lock, turn, [this] { return was_asked_; })) return {};
  wants_views_ = true;
  views_changed_.wait_for(lock, kAnswerTime,
                          [this] { return static_cast<int>(views_.size()) + 1 >= num_processes_; });
  for (const auto& [r, view] : views_) all.try_emplace(r, view);
  return all;
}

/// On the channel's thread.
void Watchdog::use_channel() {
  const std::lock_guard lock(channel_mutex_);
  if (channel_ == nullptr) return;
  int from = 0;
  for (std::string text; channel_->receive(&from, &text);) {
    if (text == kAsk) {
      channel_->send(from, view_of(channel_->rank()).to_text());
      const std::lock_guard views_lock(views_mutex_);
      if (from < channel_->rank()) was_asked_ = true;
    } else {
      const std::lock_guard views_lock(views_mutex_);
      views_[from] = RankView::from_text(text);
    }
    views_changed_.notify_all();
  }
  bool asks = false;
  {
    const std::lock_guard views_lock(views_mutex_);
    asks = std::exchange(wants_views_, false);
  }
  for (int r = 0; asks && r < channel_->world_size(); ++r) {
    if (r != channel_->rank()) channel_->send(r, kAsk);
  }
}

// ---- threads

Ticker::Ticker(std::chrono::milliseconds period, std::function<void()> tick)
    : thread_([this, period, tick = std::move(tick)] {
        for (;;) {
          {
            std::unique_lock lock(mutex_);
            if (stop_changed_.wait_for(lock, period, [this] { return stop_; })) return;
          }
          try {
            tick();
          } catch (const std::exception& error) {
            log_error("{}", error.what());
          }
        }
      }) {}

Ticker::~Ticker() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  thread_.join();
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
  set_channel(nullptr);
  poll_ticker_.reset();
  if (end_thread_.joinable()) end_thread_.join();
}

std::shared_ptr<CollectiveLog> Watchdog::make_log(CommGroup group) {
  auto log = std::make_shared<CollectiveLog>(std::move(group), verbose_);
  const std::lock_guard lock(mutex_);
  std::erase_if(logs_, [](const auto& weak) { return weak.expired(); });
  logs_.push_back(log);
  return log;
}

void Watchdog::add_poller(std::weak_ptr<CollectivePoller> poller) {
  const std::lock_guard lock(mutex_);
  std::erase_if(pollers_, [](const auto& weak) { return weak.expired(); });
  pollers_.push_back(std::move(poller));
  if (poll_ticker_ == nullptr) poll_ticker_ = std::make_unique<Ticker>(kPeriod, [this] { poll(); });
}

double Watchdog::collective_ms(int rank) {
  int64_t total = 0;
  for (const auto& log : logs()) {
    if (log->rank() == rank && log->group().id != CommGroup::kWorldId) total += log->finished_ns();
  }
  return static_cast<double>(total) * 1e-6;
}

void Watchdog::set_channel(std::unique_ptr<WatchChannel> channel) {
  channel_ticker_.reset();
  {
    const std::lock_guard views_lock(views_mutex_);
    num_processes_ = channel != nullptr ? channel->world_size() : 1;
  }
  const std::lock_guard lock(channel_mutex_);
  channel_ = std::move(channel);
  if (channel_ != nullptr)
    channel_ticker_ = std::make_unique<Ticker>(kChannelPeriod, [this] { use_channel(); });
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
  std::unique_lock lock(end_mutex_);
  end_changed_.wait(lock, [this] { return !is_ending_; });
  on_end_ = std::move(action);
}

void Watchdog::run_on_end(const std::string& reason, std::chrono::milliseconds patience) {
  std::unique_lock lock(end_mutex_);
  if (!is_ending_ && on_end_ != nullptr) {
    is_ending_ = true;
    if (end_thread_.joinable()) end_thread_.join();  // it is over
    end_thread_ = std::thread([this, reason, action = std::exchange(on_end_, nullptr)] {
      try {
        action(reason);
      } catch (const std::exception& error) {
        log_error("{}", error.what());
      }
      const std::lock_guard end_lock(end_mutex_);
      is_ending_ = false;
      end_changed_.notify_all();
    });
  }
  end_changed_.wait_for(lock, patience, [this] { return !is_ending_; });
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
    if (terminating) run_on_end("", {});
    if (check_late(now_ns)) return;
  }
}

// ---- reports

struct Watchdog::Late {
  std::shared_ptr<CollectiveLog> log;
  CollectiveRecord record;
  bool is_call;

  std::string to_string() const { return (is_call ? "the call of " : "") + record.to_string(); }
  bool is_same(const Late& other) const {
    return is_call == other.is_call && log->group().id == other.log->group().id &&
           record.sequence == other.record.sequence;
  }
};

std::vector<Watchdog::Late> Watchdog::find_late(int64_t now_ns) {
  std::vector<Late> late;
  const int64_t timeout_ns = timeout_ns_;
  if (timeout_ns == 0) return late;
  for (const auto& log : logs()) {
    for (const CollectiveRecord& record : log->records()) {
      if (record.end_ns == 0 && now_ns - record.begin_ns > timeout_ns)
        late.push_back({log, record, false});
    }
    if (const auto call = log->call(); call && now_ns - call->begin_ns > timeout_ns)
      late.push_back({log, *call, true});
  }
  return late;
}

/// Logs who has entered what is late, and where the others are. A clause about the first of `late`:
/// "; rank 2 has not entered it".
std::string Watchdog::report_view(const std::vector<Late>& late) {
  const std::map<int, RankView> views = views_of_all();
  if (views.empty()) return "";
  std::string clause;
  std::set<int> all_missing;
  std::vector<const Late*> told;
  Lines lines;
  for (const Late& l : late) {
    if (std::any_of(told.begin(), told.end(), [&](const Late* t) { return t->is_same(l); }))
      continue;
    told.push_back(&l);
    std::vector<int> entered, missing, silent;
    for (const int rank : *l.log->group().world_ranks) {
      const auto view = views.find(rank);
      if (view == views.end()) {
        silent.push_back(rank);
        continue;
      }
      const auto counts = view->second.counts.find(l.log->group().id);
      const bool has_entered =
          counts != view->second.counts.end() &&
          (l.is_call ? counts->second.num_calls : counts->second.num_begun) > l.record.sequence;
      (has_entered ? entered : missing).push_back(rank);
    }
    all_missing.insert(missing.begin(), missing.end());
    std::string text = "entered by " + format_ranks(entered);
    std::string absent;
    if (!missing.empty())
      absent += fmt::format("; {} not entered it",
                            format_ranks(missing) + (missing.size() == 1 ? " has" : " have"));
    if (!silent.empty()) {
      absent += fmt::format("; {} not answer: stopped or gone",
                            format_ranks(silent) + (silent.size() == 1 ? " does" : " do"));
    }
    if (told.size() == 1) clause = absent;
    lines.add([&] { return fmt::format("{}: {}{}", l.to_string(), text, absent); });
  }
  for (const int rank : all_missing) {
    const RankView& view = views.at(rank);
    lines.add([&] {
      std::string text = fmt::format("rank {}: {}", rank, view.where);
      if (!view.last.empty()) {
        text +=
            fmt::format("; the last that ended, {:.3g} s ago: {}", view.seconds_since, view.last);
      }
      return text;
    });
  }
  log_error("all ranks:{}", lines.text());
  return clause;
}

bool Watchdog::check_late(int64_t now_ns) {
  const std::vector<Late> late = find_late(now_ns);
  if (late.empty()) return false;
  const std::string limit = fmt::format("has not finished in {:.3g} s", seconds(timeout_ns_));
  std::set<int> late_ranks;
  for (size_t i = 0; i < late.size(); ++i) {
    late_ranks.insert(late[i].log->rank());
    if (i < kMaxLines) {
      log_error("rank {}: {} {}", late[i].log->rank(), late[i].to_string(), limit);
    } else if (i == kMaxLines) {
      log_error("and {} more", late.size() - kMaxLines);
    }
  }
  const std::string reason = fmt::format("rank {}: {} {}{}", late[0].log->rank(),
                                         late[0].to_string(), limit, report_view(late));
  size_t num_told = 0;
  for (const int rank : late_ranks) {
    if (num_told++ == kMaxLines) break;
    std::vector<CollectiveRecord> records;
    for (const auto& log : logs()) {
      if (log->rank() != rank) continue;
      const auto more = log->records();
      records.insert(records.end(), more.begin(), more.end());
    }
    std::sort(records.begin(), records.end(),
              [](const auto& a, const auto& b) { return a.begin_ns < b.begin_ns; });
    const size_t first = records.size() - std::min(records.size(), CollectiveLog::kNumKept);
    if (records.empty()) continue;
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
  run_on_end(reason, kActionTime);
  on_timeout_(reason);
  return true;
}

void Watchdog::report_terminate() {
  size_t count = 0;
  const auto tell = [&](int rank, const std::string& what) {
    if (++count <= 2 * kMaxLines)
      log_error("rank {}: terminated while {} was in flight", rank, what);
  };
  for (const auto& log : logs()) {
    for (const CollectiveRecord& record : log->records()) {
      if (record.end_ns == 0) tell(log->rank(), record.to_string());
    }
    if (const auto call = log->call()) tell(log->rank(), "the call of " + call->to_string());
  }
  if (count > 2 * kMaxLines) log_error("and {} more", count - 2 * kMaxLines);
}

}  // namespace tessera::dist
