#include "dist/fsdp/gathered.h"

#include <limits>
#include <utility>

#include "dist/fsdp/flat_bytes.h"
#include "dist/fsdp/unit.h"

namespace tessera::dist {
namespace {

constexpr unsigned char kPoison = 0xff;  // of codes, which have no NaN

}  // namespace

Gathered::Gathered(Unit& unit)
    : unit_(unit),
      state_(unit.plan().residence == Residence::kWhole ? ParamState::kGathered
                                                        : ParamState::kSharded) {}

ParamState Gathered::next(ActionKind kind) const {
  const auto next = next_state(unit_.plan().residence, state_, kind);
  TESSERA_CHECK_AS(InternalError, next.has_value(),
                   "fsdp: the program says {} of unit \"{}\", whose parameters are {}",
                   name_of(kind), unit_.name(), name_of(state_));
  return *next;
}

/// Where the gathered parameters of a group are or go.
char* Gathered::bytes_of(const Group& g) const {
  return g.memory != nullptr ? bytes(g.memory) : bytes(slot_->memory, g.slot_offset);
}

Tensor Gathered::values(const Group& g) const {
  if (!is_there()) return {};
  const auto item = static_cast<int64_t>(size_of(g.layout.dtype));
  return g.memory != nullptr ? view_of_storage(g.memory, 0, {g.layout.numel}, g.layout.dtype)
                             : view_of_storage(slot_->memory, g.slot_offset / item,
                                               {g.layout.numel}, g.layout.dtype);
}

void Gathered::add_slot() {
  pool_->add_slot();
}

void Gathered::gather(const Event& shards_ready, const Event& turn, int64_t step,
                      const char* phase) {
  const ParamState gathering = next(ActionKind::kGather);
  Lanes& lanes = unit_.lanes();
  const Stream& stream = lanes.all_gather;
  if (pool_ != nullptr && slot_ == nullptr) {
    TESSERA_CHECK_AS(
        InternalError, pool_->has_free(),
        "fsdp: the program says gather of unit \"{}\", but no slot of its ring is free",
        unit_.name());
    slot_ = pool_->acquire();
    lanes.wait(stream, slot_->is_free, WaitPoint::kSlotFree);
  }
  // The host is far ahead of the device, and slots may be free for longer than this gather's depth
  // of prefetch. The checker is not told of this wait, so that those for correctness still have to
  // be there.
  if (turn.impl() != nullptr) stream.impl()->wait(turn);
  lanes.wait(stream, shards_ready, WaitPoint::kShardsReady);
  if (has_part_) lanes.wait(stream, is_part_saved_, WaitPoint::kPartSaved);
  for (Group& g : unit_.groups()) gather_group(g, shards_ready, step, phase);
  is_gathered_ = stream.record();
  state_ = gathering;
}

void Gathered::gather_group(Group& g, const Event& shards_ready, int64_t step, const char* phase) {
  const Lanes& lanes = unit_.lanes();
  const CollectiveInfo info{phase, unit_.static_name(), step};
  if (g.coded == nullptr) {
    gather_bytes(g, bytes_of(g), shards_ready, info);
    return;
  }
  char* const full = g.code_offset < 0 ? nullptr : bytes(slot_->memory, g.code_offset);
  const void* const codes = gather_bytes(g, full, shards_ready, info);
  g.coded->dequantize(lanes.all_gather, lanes.nf4_map, bytes_of(g), g.layout.dtype, codes, 0,
                      g.layout.numel);
}

/// What the shards hold, of all ranks: where it is. `full`: where it goes, unless it is the shard.
const void* Gathered::gather_bytes(Group& g, char* full, const Event& shards_ready,
                                   const CollectiveInfo& info) {
  Lanes& lanes = unit_.lanes();
  const Stream& stream = lanes.all_gather;
  if (has_part_) {
    lanes.part_comm->all_gather(stream, full, g.part.raw_data(), g.part.numel(), g.part.dtype(),
                                info);
    return full;
  }
  const Tensor& own = g.coded != nullptr ? g.coded->codes() : g.shard;
  const void* shard = own.raw_data();
  if (lanes.policy.offloads_parameters()) {
    char* place = full + g.layout.shard_nbytes(unit_.shard_begin(g));
    const Event is_loaded = lanes.offloader->load(place, own, slot_->is_free, shards_ready);
    lanes.offloader->wait(stream, is_loaded, OffloadWait::kLoaded);
    shard = place;
  }
  if (lanes.gather_comm == nullptr) return shard;
  lanes.gather_comm->all_gather(stream, full, shard, own.numel(), own.dtype(), info);
  return full;
}

void Gathered::wait_for_gather() {
  if (state_ != ParamState::kGathering) return;
  Lanes& lanes = unit_.lanes();
  const ExposedWait exposed(lanes.compute, is_gathered_, &unit_.exposure, &ExposedTime::gather_ns,
                            unit_.static_name(), lanes.measures_exposure);
  lanes.wait(lanes.compute, is_gathered_, WaitPoint::kGathered);
}

void Gathered::wait() {
  const ParamState open = next(ActionKind::kWait);
  wait_for_gather();
  for (Group& g : unit_.groups()) {
    g.full->attach(bytes_of(g), g.memory != nullptr ? g.memory : slot_->memory);
  }
  state_ = open;
}

void Gathered::join() {
  const ParamState gathered = next(ActionKind::kJoin);
  wait_for_gather();
  state_ = gathered;
}

void Gathered::hide() {
  if (state_ != ParamState::kOpen) return;
  for (Group& g : unit_.groups()) g.full->release();
  state_ = ParamState::kGathered;
}

void Gathered::close() {
  next(ActionKind::kClose);
  hide();
}

void Gathered::release() {
  const ParamState sharded = next(ActionKind::kRelease);
  hide();
  const Lanes& lanes = unit_.lanes();
  if (lanes.part_comm != nullptr && !has_part_) save_part();
  if (lanes.policy.poison) {  // released slots are filled with NaN in stream order
    for (const Group& g : unit_.groups()) {
      if (g.memory != nullptr) continue;
      fill_flat(lanes.compute, bytes_of(g), g.layout.numel, g.layout.dtype,
                std::numeric_limits<double>::quiet_NaN());
      if (g.code_offset < 0) continue;
      lanes.compute.fill_bytes("poison", bytes(slot_->memory, g.code_offset), kPoison,
                               static_cast<size_t>(g.layout.shard_nbytes(g.layout.numel)));
    }
  }
  pool_->release(std::exchange(slot_, nullptr), lanes.compute.record());
  state_ = sharded;
}

/// Keeps this rank's 1 / part_size of the gathered parameters for the next gathers.
void Gathered::save_part() {
  const Lanes& lanes = unit_.lanes();
  const int part_size = lanes.policy.part_size;
  for (Group& g : unit_.groups()) {
    const int64_t numel = g.layout.numel / part_size;
    const int64_t begin = lanes.policy.mesh.shard_rank % part_size * numel;
    const DType dtype = g.coded != nullptr ? kU8 : g.layout.dtype;
    const int64_t nbytes = g.layout.shard_nbytes(numel);
    if (!g.part.is_defined()) {
      const MemoryScope scope(MemoryClass::kGathered);
      g.part = lanes.allocate_array(nbytes / static_cast<int64_t>(size_of(dtype)), dtype);
    }
    const char* const full = g.coded != nullptr ? bytes(slot_->memory, g.code_offset) : bytes_of(g);
    copy_flat(lanes.compute, g.part.raw_data(), full + g.layout.shard_nbytes(begin), g.part.numel(),
              dtype);
  }
  is_part_saved_ = lanes.compute.record();
  has_part_ = true;
}

void Gathered::expire() {
  const ParamState stale = next(ActionKind::kExpire);
  has_part_ = false;
  hide();
  // Whatever still computes with the gathered values has been submitted: the next gather into the
  // same memory waits for it by the event that it is given.
  state_ = stale;
}

}  // namespace tessera::dist
