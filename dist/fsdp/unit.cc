#include "dist/fsdp/unit.h"

#include <algorithm>
#include <mutex>
#include <set>

#include "core/elementary/kernel.h"
#include "kernels/elementwise/kernel.h"

namespace tessera::dist {
namespace {

constexpr int64_t kSlotAlignment = 512;  // of groups inside a slot, bytes

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t nbytes_of(int64_t numel, DType dtype) {
  return numel * static_cast<int64_t>(size_of(dtype));
}

char* bytes(const std::shared_ptr<Storage>& storage, int64_t offset = 0) {
  return static_cast<char*>(storage->data()) + offset;
}

void fill_bytes(const Stream& stream, void* data, int64_t numel, DType dtype, double value) {
  if (numel > 0) kernels::fill(stream, {data, dtype, {numel}, {1}, value});
}

}  // namespace

const char* intern(const std::string& text) {
  static std::mutex mutex;
  static auto* texts = new std::set<std::string>;  // leaked: traces may be written at exit
  std::lock_guard lock(mutex);
  return texts->insert(text).first->c_str();
}

/// Hands a parameter's gradients to its unit's slot.
class Unit::Sink final : public GradSink {
 public:
  Sink(Unit& unit, size_t group, size_t placement)
      : unit_(unit), group_(group), placement_(placement) {}

  GradDst destination(const Tensor&) override {
    return unit_.gradient_destination(group_, placement_);
  }
  void written(const Tensor&) override { unit_.groups_[group_].is_written[placement_] = true; }

 private:
  Unit& unit_;
  const size_t group_, placement_;
};

Unit::Unit(UnitSpec spec, const PrecisionOptions& precision, int world_size, Lanes& lanes,
           Residence residence, bool keeps_full_grad)
    : spec_(std::move(spec)),
      static_name_(intern(spec_.name)),
      lanes_(lanes),
      residence_(residence),
      keeps_full_grad_(keeps_full_grad) {
  for (GroupLayout& layout : make_layout(spec_, precision, world_size)) {
    Group g;
    g.shard_numel = layout.numel / lanes.shard_size;
    g.grad_dtype = keeps_full_grad ? kF32 : lanes.reduce_dtype;
    // A group kept in f32 also reduces in f32.
    if (layout.dtype == kF32) g.grad_dtype = kF32;
    g.slot_offset = gathered_nbytes_;
    gathered_nbytes_ += round_up(nbytes_of(layout.numel, layout.dtype), kSlotAlignment);
    if (layout.is_trainable) {
      g.grad_slot_offset = gradient_nbytes_;
      gradient_nbytes_ += round_up(nbytes_of(layout.numel, g.grad_dtype), kSlotAlignment);
    }
    g.layout = std::move(layout);
    groups_.push_back(std::move(g));
  }
}

void Unit::shard_parameters(bool in_place) {
  for (Group& g : groups_) {
    const GroupLayout& layout = g.layout;
    const int64_t shard_begin = lanes_.shard_rank * g.shard_numel;
    g.full = std::make_shared<Storage>(static_cast<size_t>(nbytes_of(layout.numel, layout.dtype)),
                                       lanes_.compute.device());
    {
      MemoryScope scope(MemoryClass::kParameters);
      const auto make = [&](DType dtype, bool is_on_host) {
        return is_on_host ? empty_on_host(g.shard_numel, dtype) : empty({g.shard_numel}, dtype);
      };
      if (in_place && residence_ == Residence::kKeep) {
        g.full->materialize(MemoryClass::kParameters);
        g.shard = view_of_storage(g.full, shard_begin, {g.shard_numel}, layout.dtype);
      } else {
        g.shard = make(layout.dtype, lanes_.offloads_parameters());
        if (residence_ == Residence::kWhole) g.full->attach(g.shard.raw_data(), g.shard.storage());
      }
      if (layout.dtype == kF32) {
        g.master = g.shard;
      } else if (layout.is_trainable) {
        g.master = make(kF32, lanes_.offloader != nullptr);
      }
    }
    if (layout.is_trainable) {
      MemoryScope scope(MemoryClass::kGradients);
      if (lanes_.offloader != nullptr && lanes_.offloader->has_gradients()) {
        g.host_grad = std::make_unique<HostGradient>();
        g.host_grad->home = empty_on_host(g.shard_numel, kF32);
        g.grad = empty_unmaterialized({g.shard_numel}, kF32);
      } else {
        g.grad = empty({g.shard_numel}, kF32);
      }
      g.full_grad = std::make_shared<Storage>(
          static_cast<size_t>(nbytes_of(layout.numel, g.grad_dtype)), lanes_.compute.device());
      if (keeps_full_grad_) g.full_grad->materialize(MemoryClass::kGradients);
      g.is_written.assign(layout.placements.size(), false);
    }
    // Padding is never read, but a shard is gathered whole: give it a value.
    g.shard.fill_(0);
    if (g.master.is_defined()) g.master.fill_(0);
    for (const Placement& p : layout.placements) {
      const Tensor& value = p.parameter->tensor;
      if (!value.storage()->is_materialized()) continue;
      const int64_t from = std::max(shard_begin, p.begin);
      const int64_t to = std::min(shard_begin + g.shard_numel, p.begin + p.numel);
      if (from >= to) continue;
      NoGrad no_grad;
      const Tensor part =
          value.detach().contiguous().view({p.numel}).narrow(0, from - p.begin, to - from);
      g.shard.narrow(0, from - shard_begin, to - from).copy_(part);
      if (g.master.is_defined() && g.master.impl() != g.shard.impl()) {
        g.master.narrow(0, from - shard_begin, to - from).copy_(part);
      }
    }
  }
  make_views();
}

void Unit::make_views() {
  for (size_t k = 0; k < groups_.size(); ++k) {
    Group& g = groups_[k];
    for (size_t i = 0; i < g.layout.placements.size(); ++i) {
      const Placement& p = g.layout.placements[i];
      Tensor view = view_of_storage(g.full, p.begin, p.shape, g.layout.dtype);
      view.set_requires_grad(g.layout.is_trainable);
      if (g.layout.is_trainable) set_grad_sink(view, std::make_shared<Sink>(*this, k, i));
      p.parameter->tensor = view;
    }
  }
}

void Unit::set_pools(SlotPool* gathered, SlotPool* gradient) {
  gathered_pool_ = gathered;
  gradient_pool_ = gradient;
}

bool Unit::is_trainable() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const Group& g) { return g.layout.is_trainable; });
}

int64_t Unit::num_parameters() const {
  int64_t count = 0;
  for (const Group& g : groups_) {
    for (const Placement& p : g.layout.placements) count += p.numel;
  }
  return count;
}

int64_t Unit::own_numel(const Group& g) const {
  return g.shard_numel / lanes_.replicate_size;
}
int64_t Unit::own_begin(const Group& g) const {
  return lanes_.replicate_rank * own_numel(g);
}

// ---- parameters

bool Unit::can_prefetch() const {
  return is_unsharded_ || residence_ == Residence::kWhole || gathered_slot_ != nullptr ||
         groups_.front().full->is_materialized() || gathered_pool_->has_free();
}

void Unit::unshard(const Event& shards_ready, int64_t step, const char* phase) {
  if (is_unsharded_) return;
  if (residence_ == Residence::kWhole) {
    is_unsharded_ = is_waited_ = true;
    return;
  }
  const Stream& stream = lanes_.all_gather;
  const bool is_own = groups_.front().full->is_materialized();  // in place: memory of its own
  if (!is_own && gathered_slot_ == nullptr) {
    gathered_slot_ = gathered_pool_->acquire();
    lanes_.wait(stream, gathered_slot_->is_free, WaitPoint::kSlotFree);
  }
  lanes_.wait(stream, shards_ready, WaitPoint::kShardsReady);
  if (has_part_) lanes_.wait(stream, is_part_saved_, WaitPoint::kPartSaved);
  for (Group& g : groups_) {
    if (!is_own) {
      g.full->attach(bytes(gathered_slot_->memory, g.slot_offset), gathered_slot_->memory);
    }
    if (has_part_) {
      lanes_.part_comm->all_gather(stream, g.full->data(), g.part.raw_data(), g.part.numel(),
                                   g.layout.dtype, {phase, static_name_, step});
      continue;
    }
    const void* shard = g.shard.raw_data();
    if (lanes_.offloads_parameters()) {
      char* place = bytes(g.full, nbytes_of(lanes_.shard_rank * g.shard_numel, g.layout.dtype));
      const Event is_loaded =
          lanes_.offloader->load(place, g.shard, gathered_slot_->is_free, shards_ready);
      lanes_.offloader->wait(stream, is_loaded, OffloadWait::kLoaded);
      shard = place;
    }
    if (lanes_.gather_comm != nullptr) {
      lanes_.gather_comm->all_gather(stream, g.full->data(), shard, g.shard_numel, g.layout.dtype,
                                     {phase, static_name_, step});
    }
  }
  is_gathered_ = stream.record();
  is_unsharded_ = true;
  is_waited_ = false;
  is_stale_ = false;
}

void Unit::wait_for_unshard() {
  if (is_waited_) return;
  const ExposedWait exposed(lanes_.compute, is_gathered_, &exposed_time.gather_ns);
  lanes_.wait(lanes_.compute, is_gathered_, WaitPoint::kGathered);
  is_waited_ = true;
}

void Unit::reshard() {
  if (!is_unsharded_) return;
  is_reshard_due = num_holds > 0;
  if (is_reshard_due) return;
  if (residence_ != Residence::kReshard) {
    is_unsharded_ = !is_stale_ || residence_ == Residence::kWhole;
    return;
  }
  wait_for_unshard();
  if (lanes_.part_comm != nullptr && !has_part_) save_part();
  if (lanes_.poison) {  // released slots are filled with NaN in stream order
    for (const Group& g : groups_) {
      fill_bytes(lanes_.compute, g.full->data(), g.layout.numel, g.layout.dtype,
                 std::numeric_limits<double>::quiet_NaN());
    }
  }
  for (Group& g : groups_) g.full->release();
  gathered_pool_->release(std::exchange(gathered_slot_, nullptr), lanes_.compute.record());
  is_unsharded_ = false;
}

/// Keeps this rank's 1 / part_size of the gathered parameters for the next gathers.
void Unit::save_part() {
  for (Group& g : groups_) {
    const int64_t numel = g.layout.numel / lanes_.part_size;
    const int64_t begin = lanes_.shard_rank % lanes_.part_size * numel;
    if (!g.part.is_defined()) {
      MemoryScope scope(MemoryClass::kGathered);
      g.part = empty({numel}, g.layout.dtype);
    }
    kernels::copy(lanes_.compute, {g.part.raw_data(),
                                   bytes(g.full, nbytes_of(begin, g.layout.dtype)),
                                   g.layout.dtype,
                                   g.layout.dtype,
                                   {numel},
                                   {1},
                                   {1},
                                   false});
  }
  is_part_saved_ = lanes_.compute.record();
  has_part_ = true;
}

void Unit::invalidate() {
  is_stale_ = true;
  has_part_ = false;
  if (residence_ == Residence::kWhole || !is_unsharded_) return;
  // Whatever still computes with the gathered values has been submitted: the next gather into
  // the same memory waits for it by the event that the caller passes to `unshard`.
  is_unsharded_ = false;
}

// ---- gradients

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
    const ExposedWait exposed(lanes_.compute, gradient_slot_->is_free, &exposed_time.reduce_ns);
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
  acquire_gradient_slot();
  Group& g = groups_[group];
  const Placement& p = g.layout.placements[placement];
  return {view_of_storage(g.full_grad, p.begin, p.shape, g.grad_dtype), g.is_written[placement]};
}

void Unit::zero_unwritten(Group& g) {
  for (size_t i = 0; i < g.layout.placements.size(); ++i) {
    const Placement& p = g.layout.placements[i];
    if (!g.is_written[i]) {
      fill_bytes(lanes_.compute, bytes(g.full_grad, nbytes_of(p.begin, g.grad_dtype)), p.numel,
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
  // Only a low-precision group's gradients travel in a low precision.
  const DType wire = g.layout.dtype == kF32 ? g.grad_dtype : lanes_.wire_dtype;
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
    lanes_.partial_shard = empty({lanes_.partial_numel}, kF32);
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
  const ExposedWait exposed(lanes_.compute, is_reduced_, &exposed_time.reduce_ns);
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

void Unit::detach() {
  for (Group& g : groups_) {
    for (const Placement& p : g.layout.placements) set_grad_sink(p.parameter->tensor, nullptr);
    g.full->release();
  }
}

}  // namespace tessera::dist
