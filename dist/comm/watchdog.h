#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "dist/comm/comm.h"

// [Note: Watchdog]
// One thread a process looks at the deadlines of the collectives in flight, and does nothing else,
// so that nothing it watches can hold it up: not NCCL, not CUDA, not MPI, not a file system. What
// may be held up has a thread of its own: the poller asks devices how far they are, the channel
// talks to the watchdogs of other processes. Threads that run collectives only take the mutex of
// their own log, twice a collective.
//
// A late collective is waited for by those who have entered it, and the fault is with those who
// have not. So before a watchdog ends anything it puts together one view of all ranks: who has
// entered the late collective, who has not and where that rank is instead. Ranks are those of the
// world, whatever communicator it is. Of several processes that are late the lowest rank asks the
// others, and prints what they say; one that does not answer within 0.6 s is stopped or gone.

namespace tessera::dist {

/// The ranks of one communicator.
struct CommGroup {
  uint64_t id = 0;     ///< the same on all its ranks, another for every communicator
  int world_rank = 0;  ///< of the rank that holds this
  std::shared_ptr<const std::vector<int>> world_ranks;  ///< by rank of the communicator

  static constexpr uint64_t kWorldId = 1;

  /// All ranks.
  static CommGroup world(int rank, int world_size);
  /// The same ranks under another id, for calls that are counted apart.
  CommGroup of_its_own(const char* name) const;
};

/// "rank 2", "ranks 0, 1, 4-7", cut after 8 with the number of the others; "no rank".
std::string format_ranks(std::vector<int> ranks);

/// One collective as the watchdog sees it.
struct CollectiveRecord {
  int64_t sequence = 0;  ///< of its communicator, counted from 0
  std::string op, phase, unit;
  int64_t step = -1;
  int64_t nbytes = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;  ///< 0 while in flight

  /// "all_gather of block3 (forward, step 12, 4096 bytes, sequence 41)".
  std::string to_string() const;
};

/// The collectives of one communicator on one rank, in the order they started; the last 16 are
/// kept. One is in flight at a time; beside it the rank's host may be inside a call that puts the
/// next one on its way.
class CollectiveLog {
 public:
  static constexpr size_t kNumKept = 16;

  CollectiveLog(CommGroup group, std::shared_ptr<const std::atomic<bool>> verbose);

  const CommGroup& group() const { return group_; }
  int rank() const { return group_.world_rank; }
  /// A collective has started; the one before is over.
  void begin(const char* op, const CollectiveInfo& info, int64_t nbytes);
  void end();
  /// The host goes into a call that may block; sequences of these calls are counted apart.
  void enter_call(const char* op, const CollectiveInfo& info, int64_t nbytes);
  void leave_call();

  std::deque<CollectiveRecord> records() const;
  /// The call that the host is inside of, if it is.
  std::optional<CollectiveRecord> call() const;
  /// Collectives begun and calls entered so far.
  struct Counts {
    int64_t num_begun = 0, num_calls = 0;
  };
  Counts counts() const;
  /// Time inside of collectives that are over: waiting for the others, and moving bytes.
  int64_t finished_ns() const { return finished_ns_.load(std::memory_order_relaxed); }
  /// Moves the begin of what is in flight, after the process was suspended.
  void forgive(int64_t nanoseconds);

 private:
  static CollectiveRecord make_record(const char* op, const CollectiveInfo& info, int64_t nbytes);

  const CommGroup group_;
  const std::shared_ptr<const std::atomic<bool>> verbose_;
  mutable std::mutex mutex_;
  std::deque<CollectiveRecord> records_;
  std::optional<CollectiveRecord> call_;
  Counts counts_;
  std::atomic<int64_t> finished_ns_{0};
};

/// In flight for the lifetime of this object.
class CollectiveScope {
 public:
  CollectiveScope(CollectiveLog& log, const char* op, const CollectiveInfo& info, int64_t nbytes)
      : log_(log) {
    log_.begin(op, info, nbytes);
  }
  ~CollectiveScope() { log_.end(); }
  CollectiveScope(const CollectiveScope&) = delete;
  CollectiveScope& operator=(const CollectiveScope&) = delete;

 private:
  CollectiveLog& log_;
};

/// The host is inside a call for the lifetime of this object.
class HostCallScope {
 public:
  HostCallScope(CollectiveLog& log, const char* op, const CollectiveInfo& info, int64_t nbytes)
      : log_(log) {
    log_.enter_call(op, info, nbytes);
  }
  ~HostCallScope() { log_.leave_call(); }
  HostCallScope(const HostCallScope&) = delete;
  HostCallScope& operator=(const HostCallScope&) = delete;

 private:
  CollectiveLog& log_;
};

/// Looks after collectives that no thread of ours runs: reads from the device when they begin and
/// end, and ends them when the World does.
class CollectivePoller {
 public:
  virtual ~CollectivePoller() = default;
  virtual void poll() = 0;  // from any thread
};

/// Carries short texts between the watchdogs of several processes, one a rank. One thread uses it.
class WatchChannel {
 public:
  WatchChannel(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  virtual ~WatchChannel() = default;
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  virtual void send(int to, std::string text) = 0;         ///< never waits
  virtual bool receive(int* from, std::string* text) = 0;  ///< false: there is none; never waits

 private:
  const int rank_, world_size_;
};

/// Where one rank is: what a view of all ranks is made of.
struct RankView {
  int rank = 0;
  std::map<uint64_t, CollectiveLog::Counts> counts;  ///< by id of the communicator
  std::string where;         ///< "in all_gather of block3 (...)", "in no collective"
  std::string last;          ///< the collective that ended last; empty: none
  double seconds_since = 0;  ///< its end

  std::string to_text() const;
  static RankView from_text(const std::string& text);  ///< of what `to_text` gave
};

/// Calls a function once a period on a thread of its own.
class Ticker {
 public:
  Ticker(std::chrono::milliseconds period, std::function<void()> tick);
  ~Ticker();
  Ticker(const Ticker&) = delete;
  Ticker& operator=(const Ticker&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
  std::thread thread_;
};

/// Calls `on_timeout` once, from its own thread, when a collective (or a call that starts one) has
/// been in flight for longer than `timeout`; before that it logs, for each rank of this process
/// with a late one, what is late, who has not entered it, and the rank's last collectives. Time in
/// which the whole process was stopped does not count. See [Note: Watchdog].
class Watchdog {
 public:
  Watchdog(std::chrono::milliseconds timeout,
           std::function<void(const std::string& reason)> on_timeout);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// A log that this watchdog reads for as long as it is alive.
  std::shared_ptr<CollectiveLog> make_log(CommGroup group);
  /// Calls `poll` about 20 times a second, on a thread of its own, for as long as the poller is
  /// alive, also after `on_timeout`.
  void add_poller(std::weak_ptr<CollectivePoller> poller);
  /// Milliseconds that this rank has spent inside of collectives that are over, on all
  /// communicators: waiting for the others, and moving bytes. Who waits least is whom the others wait
  /// for. Exchanges between hosts (Control) do not count. On CUDA to within 50 ms each.
  double collective_ms(int rank);
  /// To the watchdogs of other processes. Null: none any more; returns when it is out of use.
  void set_channel(std::unique_ptr<WatchChannel> channel);
  void set_timeout(std::chrono::milliseconds timeout);  ///< 0 = never
  /// Logs each collective as it starts (`--debug.dist`).
  void set_verbose(bool verbose) { verbose_->store(verbose); }
  /// A fault to inject: what each collective of the host's takes longer, as on a slow network.
  void set_delay(std::chrono::microseconds delay) { delay_us_.store(delay.count()); }
  std::chrono::microseconds delay() const { return std::chrono::microseconds(delay_us_.load()); }

  /// Whether a collective of `rank` is not over.
  bool has_collective_in_flight(int rank);

  /// Says that the process is being ended from outside: the watchdogs of the process log one line
  /// for each collective in flight, within 0.1 s. Async-signal-safe.
  static void notify_terminate() noexcept;
  /// What to do, once, on the watchdog's thread, before the process ends: with an empty reason
  /// after `notify_terminate`, else before `on_timeout`, which does not wait for it for longer
  /// than 2 s. Null: nothing. Waits for the end of an action that has begun.
  void set_on_end(std::function<void(const std::string& reason)> action);

 private:
  struct Late;

  void run();
  bool check_late(int64_t now_ns);
  std::vector<Late> find_late(int64_t now_ns);
  std::string report_view(const std::vector<Late>& late);
  void report_terminate();
  void poll();
  void use_channel();
  RankView view_of(int rank);
  std::map<int, RankView> views_of_all();
  void run_on_end(const std::string& reason, std::chrono::milliseconds patience);
  std::vector<std::shared_ptr<CollectiveLog>> logs();

  std::atomic<int64_t> timeout_ns_;
  const std::function<void(const std::string&)> on_timeout_;
  const std::shared_ptr<std::atomic<bool>> verbose_;
  std::atomic<int64_t> delay_us_{0};
  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
  std::vector<std::weak_ptr<CollectiveLog>> logs_;
  std::vector<std::weak_ptr<CollectivePoller>> pollers_;
  std::unique_ptr<Ticker> poll_ticker_;  // from the first poller on

  std::mutex channel_mutex_;  // of the channel, which only its ticker uses
  std::unique_ptr<WatchChannel> channel_;
  std::unique_ptr<Ticker> channel_ticker_;
  std::mutex views_mutex_;  // of what the channel's thread exchanges with this one's
  std::condition_variable views_changed_;
  bool wants_views_ = false, was_asked_ = false;
  int num_processes_ = 1;
  std::map<int, RankView> views_;  // answers of other processes

  std::mutex end_mutex_;
  std::condition_variable end_changed_;
  std::function<void(const std::string&)> on_end_;
  bool is_ending_ = false;  // an action has begun
  std::thread end_thread_;  // runs it: a file system may hold it up
  std::thread thread_;      // the deadlines; begins last
};

}  // namespace tessera::dist
