// A unit's gradients: where they are written, how they travel, when they are complete.
#include "dist/fsdp/gradients.h"

#include <algorithm>
#include <utility>

#include "dist/fsdp/flat_bytes.h"
#include "dist/fsdp/unit.h"
#include "kernels/elementwise/kernel.h"

namespace tessera::dist {
namespace {

/// This rank's own part of a group's gradient shard.
void* own_part(const Unit& unit, const Group& g) {
  return static_cast<char*>(g.grad.raw_data()) + nbytes_of(unit.own_begin(g), kF32);
}

}  // namespace

class Gradients::Sink final : public GradSink {
 public:
  Sink(Gradients& gradients, size_t group, size_t placement)
      : gradients_(gradients), group_(group), placement_(placement) {}

  GradDst destination(const Tensor&) override { return gradients_.destination(group_, placement_); }
  void written(const Tensor&) override {
    gradients_.unit_.groups()[group_].is_written[placement_] = true;
  }

 private:
  Gradients& gradients_;
  const size_t group_, placement_;
};

Gradients::Gradients(Unit& unit) : unit_(unit) {}

std::shared_ptr<GradSink> Gradients::sink(size_t group, size_t placement) {
  return std::make_shared<Sink>(*this, group, placement);
}

// ---- collecting

/// One rank, f32: the first micro-batch's gradients are written where they are needed.
bool Gradients::can_write_into_shard() const {
  const Policy& policy = unit_.lanes().policy;
  const std::vector<Group>& groups = unit_.groups();
  return policy.world_size == 1 && !policy.keeps_whole_gradients() && !has_sums() &&
         !policy.offloads_parameters() &&
         std::all_of(
             groups.begin(), groups.end(),
             [](const Group& g) { return !g.layout.is_trainable || g.grad_dtype == kF32; }) &&
         (!policy.is_reproducible() || policy.wire_dtype == kF32);
}

void Gradients::begin_collecting() {
  if (buffer_ != Buffer::kNone) return;
  Lanes& lanes = unit_.lanes();
  if (lanes.policy.keeps_whole_gradients()) {
    // A backward after the last micro-batch's: the reduce may still read it.
    lanes.wait(lanes.compute, is_reduced_, WaitPoint::kWholeGradFree);
    buffer_ = Buffer::kWhole;
    return;
  }
  buffer_ = can_write_into_shard() ? Buffer::kShard : Buffer::kSlot;
  if (buffer_ == Buffer::kSlot) {
    slot_ = pool_->acquire();
    const ExposedWait exposed(lanes.compute, slot_->is_free, &unit_.exposure,
                              &ExposedTime::reduce_ns, unit_.static_name(),
                              lanes.measures_exposure);
    lanes.wait(lanes.compute, slot_->is_free, WaitPoint::kGradSlotFree);
  }
  for (Group& g : unit_.groups()) {
    if (!g.layout.is_trainable) continue;
    if (buffer_ == Buffer::kShard) {
      g.full_grad->attach(g.grad.raw_data(), g.grad.storage());
    } else {
      g.full_grad->attach(bytes(slot_->memory, g.grad_slot_offset), slot_->memory);
    }
  }
}

GradDst Gradients::destination(size_t group, size_t placement) {
  Group& g = unit_.groups()[group];
  const Placement& p = g.layout.placements[placement];
  TESSERA_CHECK(
      is_expected(),
      "backward: a gradient of parameter \"{}\" comes outside of the calls of unit \"{}\", "
      "whose gradients are on their way already; call block(x), not block->forward(x)",
      p.name, unit_.name());
  begin_collecting();
  return {view_of_storage(g.full_grad, p.begin, p.shape, g.grad_dtype), g.is_written[placement]};
}

/// Ranges that nobody wrote become zero; the next gradients are the first again.
void Gradients::zero_unwritten() {
  for (Group& g : unit_.groups()) {
    if (!g.layout.is_trainable) continue;
    for (size_t i = 0; i < g.layout.placements.size(); ++i) {
      const Placement& p = g.layout.placements[i];
      if (g.is_written[i]) continue;
      fill_flat(unit_.lanes().compute, bytes(g.full_grad, nbytes_of(p.begin, g.grad_dtype)),
                p.numel, g.grad_dtype, 0);
    }
    g.is_written.assign(g.is_written.size(), false);
  }
}

void Gradients::take_buffer_away() {
  if (buffer_ != Buffer::kSlot && buffer_ != Buffer::kShard) return;
  for (Group& g : unit_.groups()) {
    if (g.full_grad != nullptr) g.full_grad->release();
  }
}

void Gradients::discard() {
  if (buffer_ == Buffer::kNone) return;
  for (Group& g : unit_.groups()) g.is_written.assign(g.is_written.size(), false);
  take_buffer_away();
  if (slot_ != nullptr) {
    pool_->release(std::exchange(slot_, nullptr), unit_.lanes().compute.record());
  }
  buffer_ = Buffer::kNone;
}

void Gradients::reset() {
  discard();
  for (Group& g : unit_.groups()) g.leaves.reset();
  sum_ = Sum::kNothing;
  has_kept_ = false;
}

// ---- kept on this rank (no_sync)

void Gradients::keep() {
  if (buffer_ == Buffer::kNone) return;  // this rank has none
  zero_unwritten();
  for (Group& g : unit_.groups()) {
    if (!g.layout.is_trainable) continue;
    if (!g.unreduced.is_defined()) {
      const MemoryScope scope(MemoryClass::kGradients);
      g.unreduced = empty({g.layout.numel}, kF32);
    }
    cast_flat(unit_.lanes().compute, g.unreduced.raw_data(), kF32, g.full_grad->data(),
              g.grad_dtype, g.layout.numel, has_kept_);
  }
  has_kept_ = true;
  discard();
}

void Gradients::add_kept() {
  if (!std::exchange(has_kept_, false)) return;
  const Stream& compute = unit_.lanes().compute;
  for (Group& g : unit_.groups()) {
    if (!g.layout.is_trainable) continue;
    // The sum in f32, rounded once to what travels.
    cast_flat(compute, g.unreduced.raw_data(), kF32, g.full_grad->data(), g.grad_dtype,
              g.layout.numel, /*accumulate=*/true);
    cast_flat(compute, g.full_grad->data(), g.grad_dtype, g.unreduced.raw_data(), kF32,
              g.layout.numel);
  }
}

// ---- reduce

bool Gradients::sums_in_two_levels() const {
  const Policy& policy = unit_.lanes().policy;
  return policy.mesh.shard_size > 1 && policy.mesh.replicate_size > 1;
}

void Gradients::reduce(bool is_last, int64_t step) {
  Lanes& lanes = unit_.lanes();
  begin_collecting();
  zero_unwritten();
  if (lanes.policy.is_reproducible()) {
    for (Group& g : unit_.groups()) {
      if (g.layout.is_trainable) begin_leaf(g);
    }
  }
  add_kept();
  const Event ready = lanes.compute.record();
  for (Group& g : unit_.groups()) {
    if (!g.layout.is_trainable || buffer_ == Buffer::kShard) continue;
    if (g.host_grad != nullptr) lanes.offloader->bring(*g.host_grad, g.grad, has_sums());
    reduce_group(g, ready, is_last, step);
    if (g.host_grad != nullptr) lanes.offloader->send_home(*g.host_grad, g.grad, is_reduced_);
  }
  take_buffer_away();
  if (slot_ != nullptr) pool_->release(std::exchange(slot_, nullptr), is_reduced_);
  buffer_ = Buffer::kNone;
  const bool is_in_group = sums_in_two_levels() && lanes.policy.sync == GradSync::kShard &&
                           !is_last && sum_ <= Sum::kGroup;
  sum_ = is_in_group ? Sum::kGroup : Sum::kOwn;
}

void Gradients::begin_leaf(Group& g) {
  const int micro_batch = unit_.lanes().micro_batch;
  TESSERA_CHECK(g.leaves.num_leaves() == micro_batch,
                "reproducible mode: unit {} has the gradients of {} backwards before that of "
                "micro-batch {}, expected one a micro-batch, each after begin_micro_batch",
                unit_.name(), g.leaves.num_leaves(), micro_batch);
  const MemoryScope scope(MemoryClass::kGradients);
  g.leaves.begin(g.grad.narrow(0, unit_.own_begin(g), unit_.own_numel(g)));
}

/// Where sums over ranks are added up, micro-batch by micro-batch.
const Stream& Gradients::summing_stream() const {
  const Lanes& lanes = unit_.lanes();
  return lanes.policy.mesh.replicate_size > 1 ? lanes.all_reduce
         : lanes.policy.mesh.shard_size > 1   ? lanes.reduce_scatter
                                              : lanes.compute;
}

/// On which the first sum is written.
const Stream& Gradients::writing_stream() const {
  const Lanes& lanes = unit_.lanes();
  return lanes.policy.mesh.shard_size > 1       ? lanes.reduce_scatter
         : lanes.policy.mesh.replicate_size > 1 ? lanes.all_reduce
                                                : lanes.compute;
}

void Gradients::reduce_group(Group& g, const Event& ready, bool is_last, int64_t step) {
  Lanes& lanes = unit_.lanes();
  const Policy& policy = lanes.policy;
  const Stream& first = writing_stream();
  const auto [own, accumulate] = policy.is_reproducible()
                                     ? g.leaves.destination()
                                     : LeafTree::Destination{own_part(unit_, g), has_sums()};
  if (g.host_grad != nullptr) {
    lanes.offloader->wait(first, g.host_grad->is_here, OffloadWait::kGradientHere);
  }
  Journey journey{g, nullptr, own, accumulate, step};
  if (policy.world_size == 1) return reduce_alone(journey);
  lanes.wait(first, ready, WaitPoint::kGradReady);
  journey.source = on_the_wire(g, first);
  if (policy.mesh.shard_size == 1) return reduce_over_replicas(journey);
  if (policy.mesh.replicate_size == 1 || (policy.sync == GradSync::kShard && sum_ <= Sum::kGroup)) {
    return reduce_in_group(journey, is_last);
  }
  reduce_in_two_levels(journey);
}

/// A group's gradients as they travel, written by `stream` if they were not collected so.
const void* Gradients::on_the_wire(const Group& g, const Stream& stream) const {
  const Lanes& lanes = unit_.lanes();
  const bool is_cast = g.wire_dtype != g.grad_dtype;
  void* const sent = is_cast ? lanes.wire_buffer.raw_data() : g.full_grad->data();
  if (lanes.policy.pre_divide != 1) {
    kernels::scale(stream, {.dst = sent,
                            .x = g.full_grad->data(),
                            .dst_dtype = g.wire_dtype,
                            .dtype = g.grad_dtype,
                            .factor = 1 / lanes.policy.pre_divide,
                            .rows = 1,
                            .cols = g.layout.numel,
                            .dst_stride = g.layout.numel,
                            .x_stride = g.layout.numel});
  } else if (is_cast) {
    cast_flat(stream, sent, g.wire_dtype, g.full_grad->data(), g.grad_dtype, g.layout.numel);
  }
  return sent;
}

void Gradients::reduce_alone(const Journey& j) {
  const Lanes& lanes = unit_.lanes();
  Group& g = j.g;
  const void* source = g.full_grad->data();
  DType dtype = g.grad_dtype;
  if (lanes.policy.is_reproducible() && g.wire_dtype != dtype) {  // rounded as if it travelled
    cast_flat(lanes.compute, lanes.wire_buffer.raw_data(), g.wire_dtype, source, dtype,
              g.shard_numel);
    source = lanes.wire_buffer.raw_data();
    dtype = g.wire_dtype;
  }
  cast_flat(lanes.compute, j.own, kF32, source, dtype, g.shard_numel, j.accumulate);
  g.leaves.end(lanes.compute);
  is_reduced_ = lanes.compute.record();
}

/// Every rank has the whole parameters and sums a part of the gradients.
void Gradients::reduce_over_replicas(const Journey& j) {
  const Lanes& lanes = unit_.lanes();
  lanes.replicate_comm->reduce_scatter(lanes.all_reduce, j.own, j.source, unit_.own_numel(j.g),
                                       j.g.wire_dtype, kF32, j.accumulate, lanes.replicas_staging(),
                                       {"reduce", unit_.static_name(), j.step});
  j.g.leaves.end(lanes.all_reduce);
  is_reduced_ = lanes.all_reduce.record();
}

/// One sum over the ranks of the shard group, which with `is_last` goes on over replicas.
void Gradients::reduce_in_group(const Journey& j, bool is_last) {
  const Lanes& lanes = unit_.lanes();
  Group& g = j.g;
  const bool has_replicas = lanes.policy.mesh.replicate_size > 1;
  lanes.reducing_comm().reduce_scatter(
      lanes.reduce_scatter, has_replicas ? g.grad.raw_data() : j.own, j.source, g.shard_numel,
      g.wire_dtype, kF32, j.accumulate, lanes.staging(), {"reduce", unit_.static_name(), j.step});
  g.leaves.end(lanes.reduce_scatter);
  is_reduced_ = lanes.reduce_scatter.record();
  if (has_replicas && is_last) sum_over_replicas(g, j.step);
}

/// Hybrid, all ranks after every micro-batch (or a backward after the last one): this one's sum
/// goes through a buffer of its own.
void Gradients::reduce_in_two_levels(const Journey& j) {
  Lanes& lanes = unit_.lanes();
  Group& g = j.g;
  void* const partial = lanes.make_partial_shard().raw_data();
  lanes.wait(lanes.reduce_scatter, lanes.partial_shard_free, WaitPoint::kPartialFree);
  lanes.reducing_comm().reduce_scatter(lanes.reduce_scatter, partial, j.source, g.shard_numel,
                                       g.wire_dtype, kF32, false, lanes.staging(),
                                       {"reduce", unit_.static_name(), j.step});
  lanes.wait(lanes.all_reduce, lanes.reduce_scatter.record(), WaitPoint::kPartialReady);
  lanes.replicate_comm->reduce_scatter(lanes.all_reduce, j.own, partial, unit_.own_numel(g), kF32,
                                       kF32, j.accumulate, lanes.replicas_staging(),
                                       {"all_reduce", unit_.static_name(), j.step});
  g.leaves.end(lanes.all_reduce);
  is_reduced_ = lanes.partial_shard_free = lanes.all_reduce.record();
}

/// The sum over the shard group becomes that over all ranks, in this replica's part of the shard.
void Gradients::sum_over_replicas(Group& g, int64_t step) {
  const Lanes& lanes = unit_.lanes();
  lanes.wait(lanes.all_reduce, is_reduced_, WaitPoint::kOuterReady);
  lanes.replicate_comm->reduce_scatter(
      lanes.all_reduce, own_part(unit_, g), g.grad.raw_data(), unit_.own_numel(g), kF32, kF32,
      false, lanes.replicas_staging(), {"all_reduce", unit_.static_name(), step});
  is_reduced_ = lanes.all_reduce.record();
}

// ---- the end of a step

void Gradients::finish(int64_t step) {
  TESSERA_CHECK_AS(
      InternalError, buffer_ == Buffer::kNone && !has_kept_,
      "fsdp: the program says finish of unit \"{}\", which has gradients that were not "
      "reduced",
      unit_.name());
  if (is_complete()) return;
  Lanes& lanes = unit_.lanes();
  for (Group& g : unit_.groups()) {
    if (!g.layout.is_trainable) continue;
    has_sums() ? finish_group(g, step) : fill_with_zeros(g);
  }
  sum_ = has_sums() ? Sum::kComplete : Sum::kZeros;
  const ExposedWait exposed(lanes.compute, is_reduced_, &unit_.exposure, &ExposedTime::reduce_ns,
                            unit_.static_name(), lanes.measures_exposure);
  lanes.wait(lanes.compute, is_reduced_, WaitPoint::kGradShardReady);
}

void Gradients::fill_with_zeros(Group& g) {
  if (g.host_grad == nullptr) {
    g.grad.fill_(0);
    return;
  }
  g.host_grad->home.fill_(0);
  g.host_grad->is_home = unit_.lanes().compute.record();
}

void Gradients::finish_group(Group& g, int64_t step) {
  Lanes& lanes = unit_.lanes();
  if (lanes.policy.is_reproducible()) {
    g.leaves.finish(summing_stream());
    is_reduced_ = summing_stream().record();
  }
  if (lanes.policy.mesh.replicate_size == 1) return;
  // Each replica has summed its own part.
  if (g.host_grad != nullptr) {
    lanes.offloader->bring(*g.host_grad, g.grad, /*with_values=*/true);
    lanes.offloader->wait(lanes.all_reduce, g.host_grad->is_here, OffloadWait::kReplicaHere);
  }
  // The last micro-batch of the step had no backward: sums in the shard group are all there is.
  if (sum_ == Sum::kGroup) sum_over_replicas(g, step);
  lanes.replicate_comm->all_gather(lanes.all_reduce, g.grad.raw_data(), own_part(unit_, g),
                                   unit_.own_numel(g), kF32,
                                   {"all_reduce", unit_.static_name(), step});
  is_reduced_ = lanes.all_reduce.record();
  if (g.host_grad != nullptr) lanes.offloader->send_home(*g.host_grad, g.grad, is_reduced_);
}

}  // namespace tessera::dist
