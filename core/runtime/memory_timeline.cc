#include "core/runtime/memory_timeline.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

namespace tessera {
namespace {

/// Of all timelines: there is one for a step now and then.
std::mutex& timelines_mutex() {
  static std::mutex mutex;
  return mutex;
}
std::vector<MemoryTimeline*>& timelines() {
  static std::vector<MemoryTimeline*> all;
  return all;
}

int64_t total_of(const MemoryTimeline::Bytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

}  // namespace

std::atomic<int> MemoryTimeline::num_alive = 0;

MemoryTimeline::MemoryTimeline(const Allocator& allocator, size_t max_points)
    : allocator_(&allocator), max_points_(std::max<size_t>(max_points, 2)) {
  result_.bytes.push_back(allocator.stats().allocated_by_class);
  num_in_last_ = 1;
  const std::lock_guard lock(timelines_mutex());
  timelines().push_back(this);
  num_alive.fetch_add(1, std::memory_order_relaxed);
}

MemoryTimeline::~MemoryTimeline() {
  const std::lock_guard lock(timelines_mutex());
  std::erase(timelines(), this);
  num_alive.fetch_sub(1, std::memory_order_relaxed);
}

void MemoryTimeline::mark(std::string name) {
  const std::lock_guard lock(timelines_mutex());
  result_.marks.push_back({std::ssize(result_.bytes), std::move(name)});
}

MemoryTimeline::Result MemoryTimeline::result() const {
  const std::lock_guard lock(timelines_mutex());
  return result_;
}

void MemoryTimeline::tell(const Allocator* allocator, const Bytes& bytes) {
  const std::lock_guard lock(timelines_mutex());
  for (MemoryTimeline* const timeline : timelines()) {
    if (timeline->allocator_ == allocator) timeline->add(bytes);
  }
}

void MemoryTimeline::add(const Bytes& bytes) {
  std::vector<Bytes>& points = result_.bytes;
  if (num_in_last_ < num_each_) {
    ++num_in_last_;
    if (total_of(bytes) > total_of(points.back())) points.back() = bytes;
    return;
  }
  if (points.size() == max_points_) {
    size_t kept = 0;
    for (size_t i = 0; i < points.size(); i += 2, ++kept) {
      const bool is_second = i + 1 < points.size() && total_of(points[i + 1]) > total_of(points[i]);
      points[kept] = points[i + (is_second ? 1 : 0)];
    }
    points.resize(kept);
    for (Mark& m : result_.marks) m.point /= 2;
    num_each_ *= 2;
  }
  points.push_back(bytes);
  num_in_last_ = 1;
}

}  // namespace tessera
