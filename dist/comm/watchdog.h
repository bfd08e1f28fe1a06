#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dist/comm/comm.h"

// A thread a process that looks at the collectives in flight. Threads that run collectives only
// take the mutex of their own log, twice a collective.

namespace tessera::dist {

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
/// kept. One is in flight at a time.
class CollectiveLog {
 public:
  static constexpr size_t kNumKept = 16;

  CollectiveLog(int rank, std::shared_ptr<const std::atomic<bool>> verbose);

  int rank() const { return rank_; }
  void begin(const char* op, const CollectiveInfo& info, int64_t nbytes);
  void end();
  std::deque<CollectiveRecord> records() const;
  /// Moves the begin of what is in flight, after the process was suspended.
  void forgive(int64_t nanoseconds);

 private:
  const int rank_;
  const std::shared_ptr<const std::atomic<bool>> verbose_;
  mutable std::mutex mutex_;
  std::deque<CollectiveRecord> records_;
  int64_t next_sequence_ = 0;
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

/// Looks after collectives that no thread of ours runs: reads from the device when they begin and
/// end, and ends them when the World does.
class CollectivePoller {
 public:
  virtual ~CollectivePoller() = default;
  virtual void poll() = 0;  // from any thread
};

/// Calls `on_timeout` once, from its own thread, when a collective has been in flight for longer
/// than `timeout`; before that it logs, for each rank of this process with a late one, what is late
/// and the rank's last collectives. Time in which the whole process was stopped does not count.
class Watchdog {
 public:
  Watchdog(std::chrono::milliseconds timeout,
           std::function<void(const std::string& reason)> on_timeout);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// A log that this watchdog reads for as long as it is alive.
  std::shared_ptr<CollectiveLog> make_log(int rank);
  /// Calls `poll` about 20 times a second, for as long as the poller is alive, and once more after
  /// `on_timeout`.
  void add_poller(std::weak_ptr<CollectivePoller> poller);
  void set_timeout(std::chrono::milliseconds timeout);  ///< 0 = never
  void set_verbose(bool verbose) { verbose_->store(verbose); }

  /// Whether a collective of `rank` is not over.
  bool has_collective_in_flight(int rank);

  /// Says that the process is being ended from outside: the watchdogs of the process log one line
  /// for each collective in flight, within 0.1 s. Async-signal-safe.
  static void notify_terminate() noexcept;
  /// What to do, once, on the watchdog's thread, before the process ends: with an empty reason
  /// after `notify_terminate`, else before `on_timeout`. Null: nothing. Waits for the end of an
  /// action that has begun.
  void set_on_end(std::function<void(const std::string& reason)> action);

 private:
  void run();
  bool check_late(int64_t now_ns);
  void report_terminate();
  void poll();
  void run_on_end(const std::string& reason);
  std::vector<std::shared_ptr<CollectiveLog>> logs();

  std::atomic<int64_t> timeout_ns_;
  const std::function<void(const std::string&)> on_timeout_;
  const std::shared_ptr<std::atomic<bool>> verbose_;
  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
  std::function<void(const std::string&)> on_end_;
  std::vector<std::weak_ptr<CollectiveLog>> logs_;
  std::vector<std::weak_ptr<CollectivePoller>> pollers_;
  std::thread thread_;
};

}  // namespace tessera::dist
