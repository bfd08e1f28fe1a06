// A unit's gradients: where they are written, how they travel, when they are complete.
#include <algorithm>

#include "core/elementary/kernel.h"
#include "dist/fsdp/flat_bytes.h"
#include "dist/fsdp/unit.h"
#include "kernels/elementwise/kernel.h"

namespace tessera::dist {

/// One rank, f32: the first micro-batch's gradients are written where they are needed.
bool Unit::writes_into_shard() const {
  return lanes_.shard_size * lanes_.replicate_size == 1 && !keeps_full_grad_ && !has_shard_grad_ &&
         !lanes_.offloads_parameters() &&
         std::all_of(
             groups_.begin(), groups_.end(),
             [](const Group& g) { return !g.layout.is_trainable || g.grad_dtype == kF32; }) &&
         (!lanes_.reproducible || lanes_.wire_dtype == kF32);
}

void Unit::acquire_gradient_slot() {
  if (has_full_grad_) return;
  has_full_grad_ = true;
  if (keeps_full_grad_) {  // a backward after the last micro-batch's: the reduce may still read it
    lanes_.wait(lanes_.compute, is_reduced_, WaitPoint::kWholeGradFree);
    return;
  }
  is_direct_ = writes_into_shard();
  if (!is_direct_) {
    gradient_slot_ = gradient_pool_->acquire();
    const ExposedWait exposed(lanes_.compute, gradient_slot_->is_free, &exposure,
                              &ExposedTime::reduce_ns, static_name_, lanes_.measures_exposure);
    lanes_.wait(lanes_.compute, gradient_slot_->is_free, WaitPoint::kGradSlotFree);
  }
  for (Group& g : groups_) {
    if (!g.layout.is_trainable) continue;
    if (is_direct_) {
      g.full_grad->attach(g.grad.raw_data(), g.grad.storage());
    } else {
      g.full_grad->attach(bytes(gradient_slot_->memory, g.grad_slot_offset),
                          gradient_slot_->memory);
    }
  }
}

GradDst Unit::gradient_destination(size_t group, size_t placement) {
  TESSERA_CHECK(
      open_calls > 0,
      "backward: a gradient of parameter \"{}\" comes outside of the calls of unit \"{}\", "
      "whose gradients are on their way already; call block(x), not block->forward(x)",
      groups_[group].layout.placements[placement].name, spec_.name);
  acquire_gradient_slot();
  Group& g = groups_[group];
  const Placement& p = g.layout.placements[placement];
  return {view_of_storage(g.full_grad, p.begin, p.shape, g.grad_dtype), g.is_written[placement]};
}

void Unit::zero_unwritten(Group& g) {
  for (size_t i = 0; i < g.layout.placements.size(); ++i) {
    const Placement& p = g.layout.placements[i];
    if (!g.is_written[i]) {
      fill_flat(lanes_.compute, bytes(g.full_grad, nbytes_of(p.begin, g.grad_dtype)), p.numel,
                g.grad_dtype, 0);
    }
  }
}

void Unit::reduce(bool is_last, int64_t step) {
  if (!is_trainable()) return;
  acquire_gradient_slot();
  if (keeps_full_grad_ && !is_last) return;  // goes on collecting
  for (Group& g : groups_) {
    if (!g.layout.is_trainable) continue;
    zero_unwritten(g);
    g.is_written.assign(g.is_written.size(), false);
    if (lanes_.reproducible) begin_leaf(g);
  }
  add_kept_gradients();
  const Event ready = lanes_.compute.record();
  for (Group& g : groups_) {
    if (!g.layout.is_trainable || is_direct_) continue;
    if (g.host_grad != nullptr) lanes_.offloader->bring(*g.host_grad, g.grad, has_shard_grad_);
    reduce_group(g, ready, is_last, step);
    if (g.host_grad != nullptr) lanes_.offloader->send_home(*g.host_grad, g.grad, is_reduced_);
  }
  if (gradient_slot_ != nullptr) {
    for (Group& g : groups_) {
      if (g.full_grad != nullptr) g.full_grad->release();
    }
    gradient_pool_->release(std::exchange(gradient_slot_, nullptr), is_reduced_);
  } else if (is_direct_) {
    for (Group& g : groups_) {
      if (g.full_grad != nullptr) g.full_grad->release();
    }
  }
  has_full_grad_ = is_direct_ = false;
  has_shard_grad_ = true;
  is_finished_ = false;
  has_outer_sum_ = has_outer_sum_ || is_last;
}

void Unit::begin_leaf(Group& g) {
  TESSERA_CHECK(g.leaves.num_leaves() == lanes_.micro_batch,
                "train.reproducible: unit {} has the gradients of {} backwards before that of "
                "micro-batch {}, expected one a micro-batch, each after begin_micro_batch",
                spec_.name, g.leaves.num_leaves(), lanes_.micro_batch);
  MemoryScope scope(MemoryClass::kGradients);
  g.leaves.begin(g.grad.narrow(0, own_begin(g), own_numel(g)));
}

/// Where sums over ranks are added up, micro-batch by micro-batch.
const Stream& Unit::summing_stream() const {
  return lanes_.replicate_size > 1 ? lanes_.all_reduce
         : lanes_.shard_size > 1   ? lanes_.reduce_scatter
                                   : lanes_.compute;
}

void Unit::reduce_group(Group& g, const Event& ready, bool is_last, int64_t step) {
  const bool has_shard_group = lanes_.shard_size > 1, has_replicas = lanes_.replicate_size > 1;
  const CollectiveInfo info{"reduce", static_name_, step};
  const DType wire = g.wire_dtype;
  // Where this rank's sum goes, and whether it is added to what is there.
  const auto [own, accumulate] = lanes_.reproducible
                                     ? g.leaves.destination()
                                     : LeafTree::Destination{static_cast<char*>(g.grad.raw_data()) +
                                                                 nbytes_of(own_begin(g), kF32),
                                                             has_shard_grad_};
  if (g.host_grad != nullptr) {
    const Stream& writer = has_shard_group ? lanes_.reduce_scatter
                           : has_replicas  ? lanes_.all_reduce
                                           : lanes_.compute;
    lanes_.offloader->wait(writer, g.host_grad->is_here, OffloadWait::kGradientHere);
  }
  if (!has_shard_group && !has_replicas) {
    const void* source = g.full_grad->data();
    DType source_dtype = g.grad_dtype;
    if (lanes_.reproducible && wire != g.grad_dtype) {  // rounded as if it travelled
      kernels::copy(
          lanes_.compute,
          {lanes_.wire_buffer.raw_data(), source, wire, source_dtype, {g.shard_numel}, {1}, {1}});
      source = lanes_.wire_buffer.raw_data();
      source_dtype = wire;
    }
    kernels::copy(lanes_.compute,
                  {own, source, kF32, source_dtype, {g.shard_numel}, {1}, {1}, accumulate});
    g.leaves.end(lanes_.compute);
    is_reduced_ = lanes_.compute.record();
    return;
  }
  const Stream& first = has_shard_group ? lanes_.reduce_scatter : lanes_.all_reduce;
  lanes_.wait(first, ready, WaitPoint::kGradReady);
  const void* source = g.full_grad->data();
  if (lanes_.pre_divide != 1) {
    void* divided = wire == g.grad_dtype ? g.full_grad->data() : lanes_.wire_buffer.raw_data();
    kernels::scale(first, {.dst = divided,
                           .x = source,
                           .dst_dtype = wire,
                           .dtype = g.grad_dtype,
                           .factor = 1 / lanes_.pre_divide,
                           .rows = 1,
                           .cols = g.layout.numel,
                           .dst_stride = g.layout.numel,
                           .x_stride = g.layout.numel});
    source = divided;
  } else if (wire != g.grad_dtype) {
    source = lanes_.wire_buffer.raw_data();
    kernels::copy(first, {lanes_.wire_buffer.raw_data(),
                          g.full_grad->data(),
                          wire,
                          g.grad_dtype,
                          {g.layout.numel},
                          {1},
                          {1},
                          false});
  }
  if (!has_shard_group) {
    lanes_.replicate_comm->reduce_scatter(
        first, own, source, own_numel(g), wire, kF32, accumulate,
        lanes_.replicate_staging.is_defined() ? lanes_.replicate_staging.raw_data() : nullptr,
        info);
    g.leaves.end(first);
    is_reduced_ = first.record();
    return;
  }
  void* staging = lanes_.reduce_staging.is_defined() ? lanes_.reduce_staging.raw_data() : nullptr;
  if (!has_replicas || (lanes_.sync == GradSync::kShard && !has_outer_sum_)) {
    void* shard = has_replicas ? g.grad.raw_data() : own;
    lanes_.reducing_comm().reduce_scatter(first, shard, source, g.shard_numel, wire, kF32,
                                          accumulate, staging, info);
    g.leaves.end(first);
    is_reduced_ = first.record();
    if (has_replicas && is_last) reduce_over_replicas(g, step);
    return;
  }
  // Hybrid, all ranks after every micro-batch (or a backward after the last one): this one's sum
  // goes through a buffer of its own.
  if (!lanes_.partial_shard.is_defined()) {
    const MemoryScope scope(MemoryClass::kGathered);
    lanes_.partial_shard = lanes_.allocate_array(lanes_.partial_numel, kF32);
    lanes_.partial_shard_free = lanes_.compute.record();
  }
  lanes_.wait(first, lanes_.partial_shard_free, WaitPoint::kPartialFree);
  lanes_.reducing_comm().reduce_scatter(first, lanes_.partial_shard.raw_data(), source,
                                        g.shard_numel, wire, kF32, false, staging, info);
  lanes_.wait(lanes_.all_reduce, first.record(), WaitPoint::kPartialReady);
  lanes_.replicate_comm->reduce_scatter(
      lanes_.all_reduce, own, lanes_.partial_shard.raw_data(), own_numel(g), kF32, kF32, accumulate,
      lanes_.replicate_staging.is_defined() ? lanes_.replicate_staging.raw_data() : nullptr,
      {"all_reduce", static_name_, step});
  g.leaves.end(lanes_.all_reduce);
  is_reduced_ = lanes_.partial_shard_free = lanes_.all_reduce.record();
}

/// The sum over the shard group becomes that over all ranks, in this replica's part of the shard.
void Unit::reduce_over_replicas(Group& g, int64_t step) {
  lanes_.wait(lanes_.all_reduce, is_reduced_, WaitPoint::kOuterReady);
  void* own = static_cast<char*>(g.grad.raw_data()) + nbytes_of(own_begin(g), kF32);
  lanes_.replicate_comm->reduce_scatter(
      lanes_.all_reduce, own, g.grad.raw_data(), own_numel(g), kF32, kF32, false,
      lanes_.replicate_staging.is_defined() ? lanes_.replicate_staging.raw_data() : nullptr,
      {"all_reduce", static_name_, step});
  is_reduced_ = lanes_.all_reduce.record();
}

/// The last micro-batch of the step had no backward: sums inside the shard group are all there is.
bool Unit::has_partial_sums() const {
  return has_shard_grad_ && lanes_.sync == GradSync::kShard && lanes_.shard_size > 1 &&
         lanes_.replicate_size > 1 && !has_outer_sum_;
}

void Unit::finish_gradients(int64_t step) {
  if (is_finished_) return;
  is_finished_ = true;
  const bool is_outer_due = has_partial_sums();
  for (Group& g : groups_) {
    if (!g.layout.is_trainable) continue;
    if (!has_shard_grad_) {
      if (g.host_grad != nullptr) {
        g.host_grad->home.fill_(0);
        g.host_grad->is_home = lanes_.compute.record();
      } else {
        g.grad.fill_(0);
      }
      continue;
    }
    if (lanes_.reproducible) {
      g.leaves.finish(summing_stream());
      is_reduced_ = summing_stream().record();
    }
    if (lanes_.replicate_size > 1) {  // each replica has summed its own part
      if (g.host_grad != nullptr) {
        lanes_.offloader->bring(*g.host_grad, g.grad, /*with_values=*/true);
        lanes_.offloader->wait(lanes_.all_reduce, g.host_grad->is_here, OffloadWait::kReplicaHere);
      }
      if (is_outer_due) reduce_over_replicas(g, step);
      const void* own = static_cast<char*>(g.grad.raw_data()) + nbytes_of(own_begin(g), kF32);
      lanes_.replicate_comm->all_gather(lanes_.all_reduce, g.grad.raw_data(), own, own_numel(g),
                                        kF32, {"all_reduce", static_name_, step});
      is_reduced_ = lanes_.all_reduce.record();
      if (g.host_grad != nullptr) {
        lanes_.offloader->send_home(*g.host_grad, g.grad, is_reduced_);
      }
    }
  }
  has_outer_sum_ = has_outer_sum_ || is_outer_due;
  const ExposedWait exposed(lanes_.compute, is_reduced_, &exposure, &ExposedTime::reduce_ns,
                            static_name_, lanes_.measures_exposure);
  lanes_.wait(lanes_.compute, is_reduced_, WaitPoint::kGradShardReady);
}

void Unit::zero_grad() {
  discard_gradients();
  for (Group& g : groups_) g.leaves.reset();
  has_shard_grad_ = has_outer_sum_ = has_unreduced_ = is_reduce_due_ = is_finished_ = false;
}

void Unit::discard_gradients() {
  if (!has_full_grad_) return;
  for (Group& g : groups_) g.is_written.assign(g.is_written.size(), false);
  if (gradient_slot_ != nullptr || is_direct_) {
    for (Group& g : groups_) {
      if (g.full_grad != nullptr) g.full_grad->release();
    }
  }
  if (gradient_slot_ != nullptr) {
    gradient_pool_->release(std::exchange(gradient_slot_, nullptr), lanes_.compute.record());
  }
  has_full_grad_ = is_direct_ = false;
}

}  // namespace tessera::dist
