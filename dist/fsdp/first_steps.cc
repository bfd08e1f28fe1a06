#include "dist/fsdp/first_steps.h"

#include <algorithm>
#include <limits>
#include <map>

#include "core/autograd.h"
#include "dist/fsdp/shard_view.h"
#include "kernels/reduce/reduce.h"

namespace tessera::dist {

FirstSteps::FirstSteps(Fsdp& fsdp, World& world, int64_t num_steps)
    : world_(world), num_steps_(num_steps) {
  const MemoryScope scope(MemoryClass::kOther);
  const ShardView view(fsdp);
  for (const HeldGroup& g : view.groups()) {
    if (!g.layout.is_trainable) continue;
    for (const Placement& p : g.layout.placements) {
      if (p.numel > 0) order_.push_back(p.name);
    }
  }
  for (const optim::FlatShard& shard : fsdp.shards()) {
    if (shard.segments.empty()) continue;
    Part part{shard.master, shard.grad, {}, {}, static_cast<int64_t>(names_.size())};
    std::vector<int64_t> bounds;
    for (const optim::Segment& s : shard.segments) {
      bounds.insert(bounds.end(), {s.begin, s.end, s.offset});
      const Segment one{s.begin, s.end};
      part.segments.push_back(segments_to_device({&one, 1}, shard.master.numel()));
      names_.push_back(s.parameter);
    }
    const auto count = static_cast<int64_t>(shard.segments.size());
    part.checked = from_values(std::span<const int64_t>(bounds), {count, 3}, kI64);
    parts_.push_back(std::move(part));
  }
  before_ = zeros({static_cast<int64_t>(names_.size())}, kI64);
  after_ = zeros({static_cast<int64_t>(names_.size())}, kI64);
}

void FirstSteps::add_checksums_to(const Tensor& sums) const {
  for (const Part& p : parts_) {
    add_checksums(sums.narrow(0, p.first, p.checked.dim(0)), p.master, p.checked);
  }
}

/// The first ones, ever fewer, and the last.
bool FirstSteps::is_looked_at() const {
  return step_ + 1 == num_steps_ || ((step_ + 1) & step_) == 0;
}

void FirstSteps::before_update() {
  if (is_over()) return;
  const NoGrad no_grad;
  if (step_ == 0) {
    add_checksums_to(before_);
    before_copy_ = HostCopy(before_);
  }
  if (!is_looked_at() || names_.empty()) return;
  const Tensor largest = zeros({static_cast<int64_t>(names_.size())}, kF64);
  for (const Part& p : parts_) {
    for (size_t i = 0; i < p.segments.size(); ++i) {
      partial_norm(largest.narrow(0, p.first + static_cast<int64_t>(i), 1), p.grad, p.segments[i],
                   std::numeric_limits<double>::infinity());
    }
  }
  largest_.emplace_back(largest);
}

void FirstSteps::after_update() {
  if (is_over()) return;
  if (++step_ < num_steps_) return;
  const NoGrad no_grad;
  add_checksums_to(after_);
  after_copy_ = HostCopy(after_);
}

FirstSteps::Found FirstSteps::find() const {
  enum : uint8_t { kGradient = 1, kChanged = 2 };
  std::map<std::string, uint8_t> seen;
  for (size_t i = 0; i < names_.size(); ++i) {
    uint8_t& bits = seen[names_[i]];
    for (const HostCopy& largest : largest_) {
      // NaN is no zero.
      if (!(static_cast<const double*>(largest.data())[i] == 0)) bits |= kGradient;
    }
    const auto sum = [i](const HostCopy& sums) {
      return static_cast<const int64_t*>(sums.data())[i];
    };
    if (sum(before_copy_) != sum(after_copy_)) bits |= kChanged;
  }
  std::vector<uint8_t> mine(order_.size()),
      all(order_.size() * static_cast<size_t>(world_.world_size()));
  for (size_t i = 0; i < order_.size(); ++i) mine[i] = seen[order_[i]];
  world_.control().all_gather(all.data(), mine.data(), static_cast<int64_t>(mine.size()));
  Found found;
  for (size_t i = 0; i < order_.size(); ++i) {
    uint8_t bits = 0;
    for (size_t at = i; at < all.size(); at += order_.size()) bits |= all[at];
    if ((bits & kGradient) == 0) {
      found.without_gradient.push_back(order_[i]);
    } else if ((bits & kChanged) == 0) {
      found.unchanged.push_back(order_[i]);
    }
  }
  return found;
}

}  // namespace tessera::dist
