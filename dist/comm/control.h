#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/check.h"

// Small blocking exchanges between the hosts of all ranks, on a communicator of their own: host
// decisions (stop, save), signatures, verdicts. All ranks make the same calls in the same order
// from one thread each; ranks in different calls end with an error that names both. Waiting ranks
// sleep. Each call is under the watchdog's timeout.

namespace tessera::dist {

class HostTransport;
class CollectiveLog;

/// Small messages between the hosts of all ranks: they block, every rank makes the same calls in the same
/// order, and none of them touches a device.
class Control {
 public:
  Control(std::shared_ptr<HostTransport> transport, std::shared_ptr<CollectiveLog> log);

  int rank() const;
  int world_size() const;

  void barrier(const char* name = "barrier");  ///< returns when all ranks are here
  /// all = `nbytes` of every rank in rank order (world_size * nbytes).
  void all_gather(void* all, const void* mine, int64_t nbytes,
                  const char* name = "control all_gather");
  /// Texts of any length, in rank order.
  std::vector<std::string> all_gather(const std::string& mine);
  void broadcast(void* data, int64_t nbytes, int root);      ///< of rank `root` to all
  std::string broadcast(const std::string& text, int root);  ///< that of rank `root`, of any length
  /// True on every rank if it is on every rank.
  bool all_agree(bool mine);
  int64_t max(int64_t mine);  ///< the largest over all ranks
  int64_t min(int64_t mine);  ///< the smallest over all ranks
  int64_t sum(int64_t mine);  ///< over all ranks
  /// Added in rank order: the same bits on all ranks.
  double sum(double mine);

  static constexpr size_t kMaxVerdictNbytes = 4096;  ///< of a message that goes to all ranks
  /// Makes what one rank alone sees a decision of all: runs `body`; if it throws an Error on any
  /// rank, every rank throws an error with the message and exit status of the lowest such rank, the
  /// message cut to `kMaxVerdictNbytes` or so. Other exceptions pass through on their rank alone.
  void verdict(const std::function<void()>& body);
  /// The same for an error that was caught before (null: this rank has none).
  void verdict(const Error* mine);
  /// The rank whose message `error` is if it came from a verdict, else -1: all ranks have thrown
  /// it, so one of them reports it and all may end in good order.
  int verdict_rank(const Error& error) const;
  /// The last call has thrown such an error: all ranks are at the same place.
  bool has_thrown_verdict() const { return has_thrown_verdict_; }

 private:
  template <class T>
  std::vector<T> all_of(T mine, const char* name);

  std::shared_ptr<HostTransport> transport_;
  std::shared_ptr<CollectiveLog> log_;
  int64_t next_sequence_ = 0;
  std::string verdict_message_;
  int verdict_rank_ = -1;
  bool has_thrown_verdict_ = false;
};

}  // namespace tessera::dist
