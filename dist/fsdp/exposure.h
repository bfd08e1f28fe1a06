#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "core/profiler.h"
#include "core/runtime/stream.h"

namespace tessera::dist {

/// How long the compute stream has stood still for a unit's collectives, nanoseconds. Only tasks of
/// that stream touch it.
struct ExposedTime {
  int64_t gather_ns = 0, reduce_ns = 0;
  int64_t total_ns() const { return gather_ns + reduce_ns; }
};

/// The same by unit.
struct ExposedTimes {
  struct Entry {
    std::string unit;
    ExposedTime time;
  };
  std::vector<Entry> entries;

  double gather_ms() const { return sum(&ExposedTime::gather_ns); }
  double reduce_ms() const { return sum(&ExposedTime::reduce_ns); }
  /// The units that compute waited for longest, at most `count`, longest first.
  std::vector<Entry> longest(size_t count) const {
    std::vector<Entry> all = entries;
    std::stable_sort(all.begin(), all.end(), [](const Entry& a, const Entry& b) {
      return a.time.total_ns() > b.time.total_ns();
    });
    all.resize(std::min(count, all.size()));
    return all;
  }

 private:
  double sum(int64_t ExposedTime::*part) const {
    int64_t total = 0;
    for (const Entry& e : entries) total += e.time.*part;
    return static_cast<double>(total) * 1e-6;
  }
};

/// Adds to `*total_ns` for how long `compute` stands at the wait for `event` that is submitted in
/// this scope. The stream measures itself, by a task before and one after, which carry the unit's
/// name (that lives for ever) in a timeline; on `cpu` only.
class ExposedWait {
 public:
  ExposedWait(const Stream& compute, const Event& event, int64_t* total_ns, const char* unit)
      : compute_(compute),
        total_ns_(total_ns),
        unit_(unit),
        is_on_(compute.device().type == DeviceType::kCpu && !event.is_done()) {
    if (is_on_) compute_.submit(unit_, [total = total_ns_] { *total -= profiler::now_ns(); });
  }
  ~ExposedWait() {
    if (is_on_) compute_.submit(unit_, [total = total_ns_] { *total += profiler::now_ns(); });
  }
  ExposedWait(const ExposedWait&) = delete;
  ExposedWait& operator=(const ExposedWait&) = delete;

 private:
  const Stream& compute_;
  int64_t* total_ns_;
  const char* unit_;
  bool is_on_;
};

}  // namespace tessera::dist
