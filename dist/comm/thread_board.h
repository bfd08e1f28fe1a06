#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "dist/comm/board.h"

namespace tessera::dist {

class ThreadMeeting;

/// What the communicators of one run of thread ranks share: the reason for their end. Thread-safe.
class ThreadDomain {
 public:
  bool is_aborted() const { return is_aborted_.load(); }
  /// Empty unless it is aborted.
  std::string reason() const;
  void add(const std::shared_ptr<ThreadMeeting>& meeting);
  void abort(const std::string& reason) noexcept;
  void throw_if_aborted() const;
  /// The rank whose exception came first, although others may be through with theirs earlier.
  void set_culprit(int rank);
  int culprit() const { return culprit_; }

 private:
  mutable std::mutex mutex_;
  std::atomic<int> culprit_{-1};
  std::atomic<bool> is_aborted_{false};
  std::string reason_;
  std::vector<std::weak_ptr<ThreadMeeting>> meetings_;
};

/// A network to imitate (LocalOptions).
struct Imitation {
  double latency_us = 0, bandwidth_bytes_per_s = 0;
  int max_random_delay_us = 0;
  uint64_t delay_seed = 0;
};

/// The board of ranks that are threads of one process: data is read wherever it lies. Either all
/// ranks pass the first meeting or none does. Ranks between the two meetings only copy, so the
/// second always ends, and no rank gives up a buffer that another still reads.
class ThreadBoard final : public Board {
 public:
  /// What the boards of the ranks share.
  static std::shared_ptr<ThreadMeeting> make_meeting(int num_ranks,
                                                     const std::shared_ptr<ThreadDomain>& domain);

  ThreadBoard(std::shared_ptr<ThreadMeeting> meeting, std::vector<int> world_ranks, int me,
              const Imitation& imitation);

  bool is_carried(int64_t) const override { return false; }
  bool reads_any_memory() const override { return true; }
  void meet() override;
  void leave(int64_t nbytes) override;

 private:
  void begin(const Call& call) override;
  Published& own_slot() override;
  const Published& published(int place) const override;
  int64_t publish_data(const Call& call) override;
  const void* data_at(int place, int64_t where) const override;
  void meet_first() override;
  void on_disagreement(const std::string& message) override;

  const std::shared_ptr<ThreadMeeting> meeting_;
  const Imitation imitation_;
  std::mt19937_64 delays_;
  int64_t sent_nbytes_ = 0;                    // of the call
  std::chrono::steady_clock::time_point end_;  // when the imitated network is done with it

  friend class ThreadMeeting;
};

}  // namespace tessera::dist
