#pragma once

#include <string>
#include <vector>

#include "core/profiler.h"
#include "core/runtime/stream.h"

namespace tessera::dist {

/// How long the compute stream has stood still for a unit's collectives, nanoseconds. Only tasks of
/// that stream touch it.
struct ExposedTime {
  int64_t gather_ns = 0, reduce_ns = 0;
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

 private:
  double sum(int64_t ExposedTime::*part) const {
    int64_t total = 0;
    for (const Entry& e : entries) total += e.time.*part;
    return static_cast<double>(total) * 1e-6;
  }
};

/// Adds to `*total_ns` for how long `compute` stands at the wait for `event` that is submitted in
/// this scope. The stream measures itself, by a task before and one after; on `cpu` only.
class ExposedWait {
 public:
  ExposedWait(const Stream& compute, const Event& event, int64_t* total_ns)
      : compute_(compute),
        total_ns_(total_ns),
        is_on_(compute.device().type == DeviceType::kCpu && !event.is_done()) {
    if (is_on_) compute_.submit("stamp", [total = total_ns_] { *total -= profiler::now_ns(); });
  }
  ~ExposedWait() {
    if (is_on_) compute_.submit("stamp", [total = total_ns_] { *total += profiler::now_ns(); });
  }
  ExposedWait(const ExposedWait&) = delete;
  ExposedWait& operator=(const ExposedWait&) = delete;

 private:
  const Stream& compute_;
  int64_t* total_ns_;
  bool is_on_;
};

}  // namespace tessera::dist
