#pragma once

#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "core/log.h"
#include "core/profiler.h"
#include "core/runtime/cuda/cuda.h"
#include "core/runtime/stream.h"

namespace tessera::dist {

/// How long the compute stream has stood still for a unit's collectives, nanoseconds.
struct ExposedTime {
  int64_t gather_ns = 0, reduce_ns = 0;
  int64_t total_ns() const { return gather_ns + reduce_ns; }
};

/// The same by unit. The times are there once the compute stream has passed the point where it was
/// asked for; one thread reads them.
class ExposedTimes {
 public:
  struct Entry {
    std::string unit;
    ExposedTime time;
  };

  explicit ExposedTimes(std::vector<Entry> entries) : entries_(std::move(entries)) {}

  const std::vector<Entry>& entries() const {
    for (const Late& late : late_)
      entries_[late.index].time.*late.part += static_cast<int64_t>(late.span.ms() * 1e6);
    late_.clear();
    return entries_;
  }
  double gather_ms() const { return sum(&ExposedTime::gather_ns); }
  double reduce_ms() const { return sum(&ExposedTime::reduce_ns); }
  /// The units that compute waited for longest, at most `count`, longest first.
  std::vector<Entry> longest(size_t count) const {
    std::vector<Entry> all = entries();
    std::stable_sort(all.begin(), all.end(), [](const Entry& a, const Entry& b) {
      return a.time.total_ns() > b.time.total_ns();
    });
    all.resize(std::min(count, all.size()));
    return all;
  }

  void set(size_t index, const ExposedTime& time) { entries_[index].time = time; }
  void add(size_t index, int64_t ExposedTime::*part, CudaSpan span) {
    late_.push_back({index, part, std::move(span)});
  }

 private:
  struct Late {  // read from the device when somebody wants to know
    size_t index;
    int64_t ExposedTime::*part;
    CudaSpan span;
  };

  double sum(int64_t ExposedTime::*part) const {
    int64_t total = 0;
    for (const Entry& e : entries()) total += e.time.*part;
    return static_cast<double>(total) * 1e-6;
  }

  mutable std::vector<Entry> entries_;
  mutable std::vector<Late> late_;
};

/// What a unit's waits have taken since they were last asked for. On `cpu` only tasks of the
/// compute stream touch `time`; on `cuda` only the host touches `late`.
struct Exposure {
  struct Late {
    int64_t ExposedTime::*part;
    CudaSpan span;
  };
  ExposedTime time;
  std::deque<Late> late;

  /// Bounded, should nobody ask: the oldest, long over, is forgotten.
  void add(int64_t ExposedTime::*part, CudaSpan span) {
    constexpr size_t kMost = 1024;
    if (late.size() == kMost) late.pop_front();
    late.push_back({part, std::move(span)});
  }
};

/// Adds to a unit's `exposure` for how long `compute` stands at the wait for `event` that is
/// submitted in this scope. The stream measures itself: on `cpu` by a task before and one after,
/// which carry the unit's name (that lives for ever) in a timeline; on `cuda`, if `is_measured`,
/// by two events. There the name is in the timeline anyway.
class ExposedWait {
 public:
  ExposedWait(const Stream& compute, const Event& event, Exposure* exposure,
              int64_t ExposedTime::*part, const char* unit, bool is_measured)
      : compute_(compute), exposure_(exposure), part_(part), unit_(unit) {
    if (event.impl() == nullptr) return;
    if (profiler::is_on()) label_wait();
    if (compute.device().type == DeviceType::kCuda) {
      if (profiler::is_on()) task_.emplace(compute, "wait", unit);
      if (is_measured) span_.emplace(compute);
    } else if (!event.is_done()) {
      is_on_ = true;
      compute_.submit(unit_, [total = &(exposure_->time.*part_)] { *total -= profiler::now_ns(); });
    }
  }
  ~ExposedWait() {
    if (is_on_) {
      compute_.submit(unit_, [total = &(exposure_->time.*part_)] { *total += profiler::now_ns(); });
    }
    if (span_) end_span();
    if (is_labelled_) profiler::use_label(label_);
  }
  ExposedWait(const ExposedWait&) = delete;
  ExposedWait& operator=(const ExposedWait&) = delete;

 private:
  void label_wait() {
    label_ = profiler::current_label(), is_labelled_ = true;
    profiler::TaskLabel label = profiler::label_of(label_);
    label.wait = part_ == &ExposedTime::gather_ns ? profiler::TaskLabel::Wait::kGather
                                                  : profiler::TaskLabel::Wait::kReduce;
    profiler::set_label(label);
  }
  void end_span() noexcept {
    try {
      span_->end();
      exposure_->add(part_, std::move(*span_));
    } catch (const std::exception& error) {  // the wait itself was submitted: nothing is lost
      log_error("{}", error.what());
    }
  }

  const Stream& compute_;
  Exposure* exposure_;
  int64_t ExposedTime::*part_;
  const char* unit_;
  bool is_on_ = false, is_labelled_ = false;
  int32_t label_ = 0;  // of the thread before
  std::optional<CudaTask> task_;
  std::optional<CudaSpan> span_;
};

}  // namespace tessera::dist
