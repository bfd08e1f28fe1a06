// From the last backward of a step to the first gather of the next one: norms, sums over ranks.
#include <limits>

#include "core/elementary/kernel.h"
#include "dist/fsdp/reproducible.h"
#include "dist/fsdp/schedule.h"
#include "kernels/loss_scale/loss_scale.h"
#include "kernels/reduce/reduce.h"

namespace tessera::dist {

void Scheduler::begin_micro_batch(int index, int count) {
  life_->check_open("Fsdp::begin_micro_batch");
  TESSERA_CHECK(index >= 0 && index < count, "begin_micro_batch: {} of {}", index, count);
  is_last_micro_batch_ = index + 1 == count;
  lanes_.micro_batch = index;
}

ClippedNorm Scheduler::clip_grad_norm(double max_norm, double p, const Tensor& loss_scale) {
  life_->check_open("Fsdp::clip_grad_norm");
  for (const auto& unit : units_) {
    // The optimizer writes shards that a gather for nobody may still send.
    if (unit->is_unsharded()) unit->wait_for_gather();
    if (unit->is_reduce_due()) {  // the last backward did not
      note("reduce", *unit);
      unit->reduce(/*is_last=*/true, step_);
    }
    if (unit->is_trainable()) unit->finish_gradients(step_);
  }
  const auto num_parts = static_cast<int64_t>(norm_inputs_.size());
  const int64_t shard_size = lanes_.shard_size, replicas = lanes_.replicate_size;
  const int64_t chunks = num_norm_chunks(), num_groups = num_parts / chunks;
  // One partial a (group, one of world_size chunks; kReproducibleChunks in reproducible mode),
  // gathered and added in the order of chunks, which is not that of ranks where groups of ranks
  // hold replicas.
  Tensor all = empty({num_parts * world_.world_size()}, kF64);
  Tensor mine = all.narrow(0, world_.rank() * num_parts, num_parts);
  for (size_t i = 0; i < norm_inputs_.size(); ++i) {
    Group& g = *norm_groups_[i];
    if (g.host_grad != nullptr) {
      lanes_.offloader->bring(*g.host_grad, g.grad, /*with_values=*/true);
      lanes_.offloader->wait(lanes_.compute, g.host_grad->is_here, OffloadWait::kNormHere);
    }
    partial_norm(mine.narrow(0, static_cast<int64_t>(i), 1), norm_inputs_[i].first,
                 norm_inputs_[i].second, p);
    if (g.host_grad != nullptr) lanes_.offloader->drop(*g.host_grad, g.grad);
  }
  if (world_.world_size() > 1) {
    scalar_comm_->all_gather(lanes_.compute, all.raw_data(), mine.raw_data(), num_parts, kF64,
                             {"grad_norm", "", step_});
  }
  Tensor ordered = empty({num_groups, shard_size, replicas, chunks}, kF64);
  kernels::copy(lanes_.compute, {ordered.raw_data(),
                                 all.raw_data(),
                                 kF64,
                                 kF64,
                                 ordered.shape(),
                                 ordered.strides(),
                                 {chunks, num_parts, shard_size * num_parts, 1},
                                 false});
  ClippedNorm clip{empty({}, kF32), empty({}, kF32), empty({}, kU8), num_ignored_};
  combine_norms(clip.norm, ordered.view({-1}), p);
  unscale_norm(clip.norm, clip.factor, clip.found_inf, loss_scale, grad_factor_,
               max_norm > 0 ? max_norm : std::numeric_limits<double>::infinity());
  life_->set_complete(true);
  return clip;
}

void Scheduler::end_step() {
  life_->check("Fsdp::end_step");
  life_->end_step();
  if (!calls_.empty()) end_forward();  // a forward without a backward
  for (const auto& unit : units_) {
    unit->zero_grad();
    unit->invalidate();
  }
  shards_ready_ = {};
  is_last_micro_batch_ = true;
  lanes_.micro_batch = 0;
  if (world_.world_size() > 1) {
    std::vector<uint64_t> all(static_cast<size_t>(world_.world_size()));
    world_.control().all_gather(all.data(), &program_hash_, sizeof program_hash_);
    for (const uint64_t theirs : all) {
      if (theirs != program_hash_) throw_disagreement();
    }
  }
  ++step_;
  program_hash_ = 0;
  num_issued_ = 0;
  program_.clear();
  program_nbytes_.clear();
}

void Scheduler::all_reduce_scalars(const Tensor& values) {
  life_->check("Fsdp::all_reduce_scalars");
  if (world_.world_size() == 1) return;
  const int64_t numel = values.numel();
  const int64_t staging = scalar_comm_->all_reduce_staging_nbytes(numel, values.dtype());
  if (staging > 0 && (!scalar_staging_.is_defined() || scalar_staging_.numel() < staging)) {
    scalar_staging_ = empty({staging}, kU8);
  }
  scalar_comm_->all_reduce(lanes_.compute, values.raw_data(), numel, values.dtype(),
                           staging > 0 ? scalar_staging_.raw_data() : nullptr,
                           {"scalars", "", step_});
}

Tensor Scheduler::sum_micro_batches(std::span<const Tensor> values) {
  TESSERA_CHECK(!values.empty(), "sum_micro_batches: no values");
  const int64_t numel = values[0].numel();
  if (!options_.reproducible) {
    Tensor sum = zeros({numel}, kF32);
    for (const Tensor& value : values) sum.add_(value.view({numel}));
    all_reduce_scalars(sum);
    return sum.view(values[0].shape());
  }
  // Over ranks first, each micro-batch on its own.
  const auto count = static_cast<int64_t>(values.size());
  Tensor all = empty({count, numel}, kF32);
  std::vector<Tensor> sums;
  for (int64_t i = 0; i < count; ++i) {
    sums.push_back(all.narrow(0, i, 1).view(values[0].shape()));
    sums.back().copy_(values[static_cast<size_t>(i)]);
  }
  all_reduce_scalars(all);
  return sum_in_tree(sums);
}

}  // namespace tessera::dist
