#include "optim/optimizer.h"

#include "optim/shard_owner.h"

namespace tessera::optim {

Optimizer::Optimizer(std::vector<FlatShard> shards, float lr, std::optional<uint64_t> rounding_seed)
    : shards_(std::move(shards)), rounding_seed_(rounding_seed), lr_(lr) {
  const MemoryScope scope(MemoryClass::kOptimizer);
  step_count_ = zeros({}, kI64);
  segments_.reserve(shards_.size());
  for (const FlatShard& shard : shards_) {
    TESSERA_CHECK_SHAPE(shard.master.num_dims() == 1,
                        "Optimizer: the master of shard {} must be flat, got {}", shard.name,
                        shard.master.shape());
    TESSERA_CHECK_SHAPE(
        shard.grad.shape() == shard.master.shape(),
        "Optimizer: the gradient of shard {} must have the master's shape {}, got {}", shard.name,
        shard.master.shape(), shard.grad.shape());
    std::vector<FlatSegment> segments;
    segments.reserve(shard.segments.size());
    for (const Segment& segment : shard.segments) {
      segments.push_back(
          {segment.begin, segment.end, segment.lr_scale, segment.decay ? 1.0f : 0.0f});
      if (!rounding_seed) continue;
      segments.back().key = make_key(*rounding_seed, hash_name("rounding/" + segment.parameter));
      segments.back().first_element = segment.offset;
    }
    const bool has_rounding = rounding_seed && shard.low.is_defined();
    segments_.push_back(flat_segments(segments, shard.master.numel(), has_rounding));
  }
}

void Optimizer::step(float lr, const Tensor& grad_scale, const Tensor& skip) {
  for (const FlatShard& shard : shards_) {
    if (shard.owner != nullptr) shard.owner->begin_update(shard, grad_scale.is_defined());
  }
  advance_step(step_count_, skip);
  for_each_part([&](const FlatUpdate& part, std::span<const Tensor> states) {
    FlatUpdate flat = part;
    flat.grad_scale = grad_scale;
    flat.skip = skip;
    flat.lr = lr;
    update_shard(flat, states);
  });
}

void Optimizer::round_low() {
  for_each_part([](const FlatUpdate& part, std::span<const Tensor>) {
    if (part.low.is_defined()) tessera::round_low(part);
  });
}

void Optimizer::for_each_part(
    const std::function<void(const FlatUpdate&, std::span<const Tensor>)>& f) {
  const std::vector<NamedState> named = state();
  const auto update = [&](size_t index, const ShardWindow& window) {
    FlatUpdate flat;
    flat.master = window.master;
    flat.grad = window.grad;
    flat.low = window.low;
    flat.segments = segments_[index];
    flat.first = window.first;
    if (flat.segments.rounding.is_defined()) flat.rounding_step = step_count_;
    f(flat, window.states);
  };
  // Neighbours with the same store go through it together, so that windows overlap across shards.
  for (size_t begin = 0, end = 0; begin < shards_.size(); begin = end) {
    std::vector<ShardParts> parts;
    for (; end < shards_.size() && shards_[end].store == shards_[begin].store; ++end) {
      parts.push_back({&shards_[end], {}});
      for (const NamedState& s : named) parts.back().states.push_back(s.tensors[end]);
    }
    if (shards_[begin].store != nullptr) {
      shards_[begin].store->for_each_window(
          parts, [&](size_t index, const ShardWindow& window) { update(begin + index, window); });
      continue;
    }
    for (size_t i = begin; i < end; ++i) {
      const FlatShard& shard = shards_[i];
      update(i, {shard.master, shard.grad, shard.low, std::move(parts[i - begin].states), 0});
    }
  }
}

NamedState Optimizer::make_state(std::string name) const {
  const MemoryScope scope(MemoryClass::kOptimizer);
  NamedState state{std::move(name), {}};
  for (const FlatShard& shard : shards_) {
    state.tensors.push_back(shard.store != nullptr ? shard.store->make_state(shard.master.numel())
                                                   : zeros(shard.master.shape(), kF32));
  }
  return state;
}

}  // namespace tessera::optim
