#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/runtime/allocator.h"

namespace tessera {

/// How the bytes of an allocator change while this lives, by class, in the order in which the host
/// allocates and frees. However long it lasts there are at most `max_points`: neighbours become one,
/// which is the one with more bytes, so that the peak stays. Without one, an allocation reads one
/// flag. Thread-safe; outlived by the allocator.
class MemoryTimeline {
 public:
  using Bytes = std::array<int64_t, kNumMemoryClasses>;
  struct Mark {
    int64_t point;  ///< index in `bytes` of what comes next
    std::string name;
  };
  struct Result {
    std::vector<Bytes> bytes;  ///< the first: as it began
    std::vector<Mark> marks;
  };

  explicit MemoryTimeline(const Allocator& allocator, size_t max_points = 400);
  ~MemoryTimeline();
  MemoryTimeline(const MemoryTimeline&) = delete;
  MemoryTimeline& operator=(const MemoryTimeline&) = delete;

  /// What begins here: "backward".
  void mark(std::string name);
  Result result() const;

  /// For the allocator, whose bytes are now these.
  static void note(const Allocator* allocator, const Bytes& bytes) {
    if (num_alive.load(std::memory_order_relaxed) > 0) tell(allocator, bytes);
  }

 private:
  static void tell(const Allocator* allocator, const Bytes& bytes);
  void add(const Bytes& bytes);

  static std::atomic<int> num_alive;
  const Allocator* allocator_;
  size_t max_points_;
  int64_t num_each_ = 1, num_in_last_ = 0;  // changes that a point stands for; in the last one
  Result result_;
};

}  // namespace tessera
