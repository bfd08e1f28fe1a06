#include "dist/fsdp/unit.h"

#include <algorithm>
#include <mutex>
#include <set>

#include "core/elementary/kernel.h"
#include "dist/fsdp/flat_bytes.h"

namespace tessera::dist {
namespace {

constexpr int64_t kSlotAlignment = 512;  // of groups inside a slot, bytes

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
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
    if (layout.dtype == kF32) g.grad_dtype = kF32;
    // A group that is kept in f32 beside low ones reduces in f32; where all are f32 the setting is
    // about them.
    const bool is_kept_f32 = layout.dtype == kF32 && precision.param_dtype != kF32;
    g.wire_dtype = is_kept_f32 ? kF32 : lanes.wire_dtype;
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

std::shared_ptr<Storage> Lanes::allocate(int64_t nbytes, MemoryClass memory_class) const {
  Comm* comm = gather_comm != nullptr ? gather_comm.get() : replicate_comm.get();
  if (comm != nullptr) return comm->allocate(nbytes, memory_class);
  auto memory = std::make_shared<Storage>(static_cast<size_t>(nbytes), compute.device());
  memory->materialize(memory_class);
  return memory;
}

Tensor Lanes::allocate_array(int64_t numel, DType dtype) const {
  return view_of_storage(allocate(nbytes_of(numel, dtype), MemoryScope::current()), 0, {numel},
                         dtype);
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
      const auto make_sent = [&](DType dtype, bool is_on_host) {
        return is_on_host || lanes_.gather_comm == nullptr
                   ? make(dtype, is_on_host)
                   : lanes_.allocate_array(g.shard_numel, dtype);
      };
      if (in_place && residence_ == Residence::kKeep) {
        g.memory =
            lanes_.allocate(static_cast<int64_t>(g.full->nbytes()), MemoryClass::kParameters);
        g.shard = view_of_storage(g.memory, shard_begin, {g.shard_numel}, layout.dtype);
      } else {
        g.shard = make_sent(layout.dtype, lanes_.offloads_parameters());
        if (residence_ == Residence::kWhole) g.memory = g.shard.storage();
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
        g.grad = lanes_.replicate_comm != nullptr || lanes_.is_reduced_into_shards
                     ? lanes_.allocate_array(g.shard_numel, kF32)
                     : empty({g.shard_numel}, kF32);
      }
      g.full_grad = std::make_shared<Storage>(
          static_cast<size_t>(nbytes_of(layout.numel, g.grad_dtype)), lanes_.compute.device());
      if (keeps_full_grad_) {
        const auto memory =
            lanes_.allocate(static_cast<int64_t>(g.full_grad->nbytes()), MemoryClass::kGradients);
        g.full_grad->attach(memory->data(), memory);
      }
      g.is_written.assign(layout.placements.size(), false);
    }
    // Padding is never read, but a shard is gathered whole: give it a value.
    g.shard.fill_(0);
    if (g.master.is_defined()) g.master.fill_(0);
    for (const Placement& p : layout.placements) {
      const Tensor& value = p.parameter->tensor;
      if (!p.parameter->has_values()) missing_values_.push_back(p.name);
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
      p.parameter->is_sharded = true;
    }
    g.full->set_owner(fmt::format(
        "parameters of unit \"{}\", which can be read from when a call of {} begins until another "
        "unit is called, and the same in backward; call block(x), not block->forward(x), which "
        "gathers nothing; outside of calls make an UnshardGuard",
        spec_.name, spec_.modules.size() == 1 ? "its module" : "one of its modules"));
  }
}

/// Where the gathered parameters of a group are or go.
char* Unit::gathered_bytes(const Group& g) const {
  return g.memory != nullptr ? bytes(g.memory) : bytes(gathered_slot_->memory, g.slot_offset);
}

/// The modules can read the parameters from here on. Not before compute waits for the gather:
/// whether it was issued ahead, and how far it is, must not decide what a read finds.
void Unit::open() {
  if (std::exchange(is_open_, true)) return;
  for (Group& g : groups_) {
    g.full->attach(gathered_bytes(g), g.memory != nullptr ? g.memory : gathered_slot_->memory);
  }
}

void Unit::close() {
  if (!std::exchange(is_open_, false)) return;
  for (Group& g : groups_) g.full->release();
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
  return is_unsharded_ || has_own_memory() || gathered_slot_ != nullptr ||
         gathered_pool_->has_free();
}

void Unit::unshard(const Event& shards_ready, const Event& turn, int64_t step, const char* phase) {
  if (is_unsharded_) return;
  if (residence_ == Residence::kWhole) {
    is_unsharded_ = is_waited_ = true;
    return;
  }
  const Stream& stream = lanes_.all_gather;
  if (!has_own_memory() && gathered_slot_ == nullptr) {
    gathered_slot_ = gathered_pool_->acquire();
    lanes_.wait(stream, gathered_slot_->is_free, WaitPoint::kSlotFree);
  }
  // The host is far ahead of the device, and slots may be free for longer than this gather's depth
  // of prefetch. The checker is not told of this wait, so that those for correctness still have to
  // be there.
  if (turn.impl() != nullptr) stream.impl()->wait(turn);
  lanes_.wait(stream, shards_ready, WaitPoint::kShardsReady);
  if (has_part_) lanes_.wait(stream, is_part_saved_, WaitPoint::kPartSaved);
  for (Group& g : groups_) {
    char* const full = gathered_bytes(g);
    if (has_part_) {
      lanes_.part_comm->all_gather(stream, full, g.part.raw_data(), g.part.numel(), g.layout.dtype,
                                   {phase, static_name_, step});
      continue;
    }
    const void* shard = g.shard.raw_data();
    if (lanes_.offloads_parameters()) {
      char* place = full + nbytes_of(lanes_.shard_rank * g.shard_numel, g.layout.dtype);
      const Event is_loaded =
          lanes_.offloader->load(place, g.shard, gathered_slot_->is_free, shards_ready);
      lanes_.offloader->wait(stream, is_loaded, OffloadWait::kLoaded);
      shard = place;
    }
    if (lanes_.gather_comm != nullptr) {
      lanes_.gather_comm->all_gather(stream, full, shard, g.shard_numel, g.layout.dtype,
                                     {phase, static_name_, step});
    }
  }
  is_gathered_ = stream.record();
  is_unsharded_ = true;
  is_waited_ = false;
  is_stale_ = false;
}

void Unit::wait_for_unshard() {
  wait_for_gather();
  open();
}

void Unit::wait_for_gather() {
  if (is_waited_) return;
  const ExposedWait exposed(lanes_.compute, is_gathered_, &exposure, &ExposedTime::gather_ns,
                            static_name_, lanes_.measures_exposure);
  lanes_.wait(lanes_.compute, is_gathered_, WaitPoint::kGathered);
  is_waited_ = true;
}

void Unit::reshard() {
  if (!is_unsharded_) return;
  is_reshard_due = num_holds > 0;
  if (is_reshard_due) return;
  close();
  if (residence_ != Residence::kReshard) {
    is_unsharded_ = !is_stale_ || residence_ == Residence::kWhole;
    return;
  }
  wait_for_gather();
  if (lanes_.part_comm != nullptr && !has_part_) save_part();
  if (lanes_.poison) {  // released slots are filled with NaN in stream order
    for (const Group& g : groups_) {
      fill_flat(lanes_.compute, gathered_bytes(g), g.layout.numel, g.layout.dtype,
                std::numeric_limits<double>::quiet_NaN());
    }
  }
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
      g.part = lanes_.allocate_array(numel, g.layout.dtype);
    }
    kernels::copy(lanes_.compute, {g.part.raw_data(),
                                   gathered_bytes(g) + nbytes_of(begin, g.layout.dtype),
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
  close();
  // Whatever still computes with the gathered values has been submitted: the next gather into
  // the same memory waits for it by the event that the caller passes to `unshard`.
  is_unsharded_ = false;
}

void Unit::detach() {
  for (Group& g : groups_) {
    for (const Placement& p : g.layout.placements) {
      set_grad_sink(p.parameter->tensor, nullptr);
      p.parameter->is_sharded = false;
    }
    g.full->set_owner(fmt::format("parameters of unit \"{}\", whose Fsdp has ended", spec_.name));
  }
  close();
}

}  // namespace tessera::dist
