#pragma once

#include <cstdint>

#include "core/runtime/stream.h"
#include "core/tensor.h"
#include "dist/comm/comm.h"
#include "dist/fsdp/program.h"
#include "dist/fsdp/shard.h"

namespace tessera::dist {

struct Group;
class Unit;

/// The gathered parameters of a unit, as a state machine (ParamState says what each state holds in
/// memory). Each verb is an action of a program; it runs on the host at once, and what it enqueues
/// is ordered by events. One that cannot follow on the state is an InternalError that names both.
class Gathered {
 public:
  explicit Gathered(Unit& unit);

  /// Where a unit's parameters take a slot.
  void set_pool(SlotPool* pool) { pool_ = pool; }
  const SlotPool* pool() const { return pool_; }
  ParamState state() const { return state_; }
  /// The values are there or on the way.
  bool is_there() const { return state_ >= ParamState::kGathering; }

  /// The ring grows by a slot.
  void add_slot();
  /// Starts the gather, in order after `shards_ready`, and not before compute has come to `turn`.
  void gather(const Event& shards_ready, const Event& turn, int64_t step, const char* phase);
  /// The compute stream waits for the gather; modules can read the parameters from here on. Not
  /// before: whether it was issued ahead, and how far it is, must not decide what a read finds.
  void wait();
  /// The same for what nobody reads: a gather that this rank issues for others.
  void join();
  /// Modules cannot read the parameters, which stay where they are.
  void close();
  /// Gives the slot back once the compute stream is done with it.
  void release();
  /// The shards have changed: what is gathered is out of date.
  void expire();

  /// A group's gathered parameters where they are, whether or not modules can read them; undefined
  /// where they are not. Tasks of the compute stream may read them once it has waited.
  Tensor values(const Group& g) const;

  /// Takes the bytes from the modules' views, whatever the state.
  void hide();

 private:
  ParamState next(ActionKind kind) const;
  void gather_group(Group& g, const Event& shards_ready, int64_t step, const char* phase);
  const void* gather_bytes(Group& g, char* full, const Event& shards_ready,
                           const CollectiveInfo& info);
  char* bytes_of(const Group& g) const;
  void wait_for_gather();
  void save_part();

  Unit& unit_;
  SlotPool* pool_ = nullptr;
  Slot* slot_ = nullptr;
  ParamState state_;
  Event is_gathered_, is_part_saved_;
  bool has_part_ = false;  // parts hold what the shards hold
};

}  // namespace tessera::dist
