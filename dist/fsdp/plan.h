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

// [Note: Pieces of a gradient]
// The gradients of an embedding of 250,000 rows are more bytes than all that blocks have in flight.
// With FsdpOptions::gradient_pieces such a unit has them in pieces no larger than those of the
// largest block, in the ring of the blocks. Piece k is the k-th part of what each rank sums, so a
// piece is an ordinary reduce, of that much less, with the same tree of sums over ranks: the same
// bits. The rows of a table that a piece needs are computed when it is due ([Note: Gradients by rows]
// in core/row_gradients.h); the unit's other gradients are kept until then, in a slot of their own.
// A rank's part begins anywhere in a row, so its first row is computed over what lies before, which
// is put back, and there is room for the rest of a row before the first and behind the last part.

namespace tessera::dist {

/// A group of a unit: elements as in [Note: Flat layout].
struct GroupPlan {
  GroupLayout layout;
  int64_t shard_numel = 0;
  DType grad_dtype = kF32;                        ///< in which gradients are collected
  DType wire_dtype = kF32;                        ///< in which they travel
  int64_t slot_offset = 0, grad_slot_offset = 0;  ///< bytes
  int64_t code_offset = -1;  ///< bytes; of the gathered codes in a slot; -1: none are gathered
  /// Gathered parameters have memory of their own: all of them are the shard, or it is a part of
  /// them.
  bool has_own_memory = false;

  int64_t piece_numel = 0;   ///< of what a rank sums, in a piece; 0: all
  int64_t piece_offset = 0;  ///< bytes in a piece's slot, of the first rank's part
  /// Of a group in pieces, by placement: the first element in the slot of what is kept (which begins
  /// at `grad_slot_offset`); -1: a table, computed by rows.
  std::vector<int64_t> kept_begin;
};

struct UnitPlan {
  std::string name;
  bool is_block = false, is_tied = false;  ///< of UnitSpec
  std::vector<GroupPlan> groups;
  int64_t gathered_nbytes = 0, gradient_nbytes = 0;  ///< of the whole, as in a slot
  int64_t slot_nbytes = 0;  ///< of what has no memory of its own: values, and codes beside them
  int64_t sent_nbytes = 0;  ///< that a gather moves, of all ranks
  Residence residence = Residence::kReshard;
  int num_pieces = 1;        ///< of its gradients
  int64_t piece_nbytes = 0;  ///< of a piece, as in a slot; else that of the gradients
  int gathered_pool = -1, gradient_pool = -1;  ///< index in `Plan::pools`; -1: none
  int piece_pool = -1;

  bool is_trainable() const;
  bool is_coded() const;  ///< has a group of codes
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
               const StagingNbytes& in_group, const StagingNbytes& over_replicas,
               const ParameterTable& table = {});

}  // namespace tessera::dist
