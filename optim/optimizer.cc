#include "optim/optimizer.h"

#include "kernels/optimizer/dynamic_map.h"
#include "optim/shard_owner.h"

namespace tessera::optim {

Optimizer::Optimizer(std::vector<FlatShard> shards) : shards_(std::move(shards)) {
  const MemoryScope scope(MemoryClass::kOptimizer);
  step_count_ = zeros({}, kI64);
}

Optimizer::Optimizer(std::vector<FlatShard> shards, double lr, double weight_decay,
                     std::optional<uint64_t> rounding_seed)
    : Optimizer(std::move(shards)) {
  rounding_seed_ = rounding_seed;
  lr_ = static_cast<float>(lr);
  const MemoryScope scope(MemoryClass::kOptimizer);
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
      const float decay = static_cast<float>(segment.decay ? weight_decay : 0);
      segments.push_back(
          {segment.begin, segment.end, segment.lr_scale, segment.weight_decay.value_or(decay)});
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
  update({lr, grad_scale, skip});
}

void Optimizer::update(const StepScalars& step) {
  for_parts(
      0, shards_.size(), step, {},
      [&](const FlatUpdate& part, std::span<const Tensor> states) { update_shard(part, states); });
}

void Optimizer::update_shard(const FlatUpdate&, std::span<const Tensor>) {
  throw InternalError("Optimizer: neither `update` nor `update_shard` is overridden");
}

void Optimizer::round_low() {
  for_parts(0, shards_.size(), {}, {.states = false, .grad = false},
            [](const FlatUpdate& part, std::span<const Tensor>) {
              if (part.low.is_defined()) tessera::round_low(part);
            });
}

void Optimizer::for_parts(size_t first, size_t last, const StepScalars& step, PartUse use,
                          const PartUpdate& f) {
  const std::vector<NamedState> named = use.states ? state() : std::vector<NamedState>();
  const auto update = [&](size_t index, const ShardWindow& window) {
    FlatUpdate flat;
    flat.master = window.master;
    flat.grad = window.grad;
    flat.low = window.low;
    flat.segments = segments_[index];
    flat.first = window.first;
    flat.grad_scale = step.grad_scale;
    flat.skip = step.skip;
    flat.lr = step.lr;
    flat.weight_decay = 1;  // the segments have theirs
    if (flat.segments.rounding.is_defined()) flat.rounding_step = step_count_;
    f(flat, window.states);
  };
  // Neighbours with the same store go through it together, so that windows overlap across shards.
  for (size_t begin = first, end = first; begin < last; begin = end) {
    std::vector<ShardParts> parts;
    for (; end < last && shards_[end].store == shards_[begin].store; ++end) {
      parts.push_back({&shards_[end], {}, use.master, use.grad});
      for (const NamedState& s : named) parts.back().states.push_back({s.tensors[end], s.block});
    }
    if (shards_[begin].store != nullptr) {
      shards_[begin].store->for_each_window(
          parts, [&](size_t index, const ShardWindow& window) { update(begin + index, window); });
      continue;
    }
    for (size_t i = begin; i < end; ++i) {
      const FlatShard& shard = shards_[i];
      std::vector<Tensor> states;
      for (const BlockState& s : parts[i - begin].states) states.push_back(s.values);
      update(i, {shard.master, shard.grad, shard.low, std::move(states), 0});
    }
  }
}

NamedState Optimizer::make_state(std::string name, DType dtype, int64_t block) const {
  const MemoryScope scope(MemoryClass::kOptimizer);
  NamedState state{std::move(name), {}, block};
  for (const FlatShard& shard : shards_) {
    const int64_t numel = state_numel(shard.master.numel(), block);
    state.tensors.push_back(shard.store != nullptr ? shard.store->make_state(numel, dtype)
                                                   : zeros({numel}, dtype));
  }
  return state;
}

void Optimizer::check_state_blocks(const char* optimizer) const {
  for (const FlatShard& shard : shards_) {
    for (const Segment& s : shard.segments) {
      TESSERA_CHECK(s.begin % kernels::kStateBlock == 0,
                    "{}: {} begins at element {} of its shard, expected a multiple of {}",
                    optimizer, s.parameter, s.begin, kernels::kStateBlock);
    }
  }
}

void check_range(bool is_right, const char* optimizer, const char* name, const char* range,
                 double value) {
  TESSERA_CHECK_AS(ConfigError, is_right, "{}: {} must be {}, got {}", optimizer, name, range,
                   value);
}

void check_decay_rate(const char* optimizer, const char* name, double value) {
  check_range(value >= 0 && value < 1, optimizer, name, "in [0, 1)", value);
}

void check_not_negative(const char* optimizer, const char* name, double value) {
  check_range(value >= 0, optimizer, name, "at least 0", value);
}

}  // namespace tessera::optim
