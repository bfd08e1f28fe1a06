#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dist/fsdp/ledger.h"
#include "dist/fsdp/policy.h"
#include "dist/fsdp/shard.h"

// [Note: Plan of the memory]
// How many slots of which size units share, and what scratch their reduces need, follows from the
// layout of the parameters and the policy alone: it is known before a byte is allocated. Two classes
// of units share slots, blocks (a ring) and the others (one slot); a small unit has one of its own.

namespace tessera::dist {

/// A group of a unit: elements as in [Note: Flat layout].
struct GroupPlan {
  GroupLayout layout;
  int64_t shard_numel = 0;
  DType grad_dtype = kF32;                        ///< in which gradients are collected
  DType wire_dtype = kF32;                        ///< in which they travel
  int64_t slot_offset = 0, grad_slot_offset = 0;  ///< bytes
};

struct UnitPlan {
  std::string name;
  bool is_block = false, is_tied = false;  ///< of UnitSpec
  std::vector<GroupPlan> groups;
  int64_t gathered_nbytes = 0, gradient_nbytes = 0;  ///< of the whole, as in a slot
  /// Gathered parameters have memory of their own: all of them are the shard, or it is a part of
  /// them.
  bool has_own_memory = false;
  int gathered_pool = -1, gradient_pool = -1;  ///< index in `Plan::pools`; -1: none

  bool is_trainable() const;
  int64_t num_parameters() const;
};

/// Slots that units take turns in.
struct PoolPlan {
  int64_t nbytes = 0;
  int num_slots = 0;
  bool is_gathered = false;  ///< of parameters; else of gradients
};

/// Scratch of the reduces: one of each, used in the order of its stream.
struct ScratchPlan {
  int64_t staging_nbytes = 0, replicate_staging_nbytes = 0, wire_nbytes = 0;
  int64_t partial_numel = 0;  ///< of the f32 shard between the sums in the group and over replicas
  bool has_partial = false;   ///< it is needed in every step; else only by a backward out of turn
};

struct Plan {
  std::vector<UnitPlan> units;
  std::vector<PoolPlan> pools;
  ScratchPlan scratch;
  int64_t host_gradient_numel = 0;  ///< of the ring of gradient shards whose place is on the host

  /// What an Order is told of it.
  std::vector<UnitUse> uses(const Policy& policy) const;
  std::vector<int> num_gathered_slots() const;  ///< by pool; 0 of pools of gradients
};

/// Bytes of staging that a reduce of a rank's `shard_numel` elements needs.
using StagingNbytes = std::function<int64_t(int64_t shard_numel, DType wire)>;

/// `in_group`, `over_replicas`: not asked where there is no group of that kind.
Plan make_plan(const std::vector<UnitSpec>& specs, const Policy& policy,
               const StagingNbytes& in_group, const StagingNbytes& over_replicas);

}  // namespace tessera::dist
