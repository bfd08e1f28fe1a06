#include "optim/optimizer.h"

namespace tessera::optim {

Optimizer::Optimizer(std::vector<FlatShard> shards, float lr)
    : shards_(std::move(shards)), lr_(lr) {
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
    }
    segments_.push_back(flat_segments(segments, shard.master.numel()));
  }
}

void Optimizer::step(float lr, const Tensor& grad_scale, const Tensor& skip) {
  advance_step(step_count_, skip);
  for (size_t i = 0; i < shards_.size(); ++i) {
    const FlatShard& shard = shards_[i];
    FlatUpdate update;
    update.master = shard.master;
    update.grad = shard.grad;
    update.low = shard.low;
    update.segments = segments_[i];
    update.grad_scale = grad_scale;
    update.skip = skip;
    update.lr = lr;
    update_shard(i, update);
  }
}

NamedState Optimizer::make_state(std::string name) const {
  const MemoryScope scope(MemoryClass::kOptimizer);
  NamedState state{std::move(name), {}};
  for (const FlatShard& shard : shards_) state.tensors.push_back(zeros(shard.master.shape(), kF32));
  return state;
}

}  // namespace tessera::optim
