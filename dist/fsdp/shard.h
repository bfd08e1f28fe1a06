#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/runtime/stream.h"
#include "core/tensor.h"
#include "dist/fsdp/groups.h"
#include "dist/fsdp/options.h"
#include "dist/fsdp/wrap.h"
#include "optim/flat_shard.h"

// [Note: Flat layout]
// A unit's parameters of one (dtype, trainable, optimizer) form a group with one numbering, in elements, for
// its gathered, gradient, master and optimizer buffers: each tensor starts at a multiple of 256
// and the whole is padded to 256 x world_size, under every strategy. Rank r of a shard group of S
// owns chunk r of S. So 256-element blocks never straddle tensors or shards, and a norm has the
// same blocks whatever the strategy. Padding is never read by norm, optimizer or checkpoint.
// A group of codes (coded.h) has the same numbering: its granule of 256 elements is a record.
// In reproducible mode the padding is that of kReproducibleChunks ranks for any number of them.

namespace tessera::dist {

inline constexpr int64_t kLayoutBlock = 256;

/// One parameter's place in its group.
struct Placement {
  std::string name;
  nn::Parameter* parameter;
  Shape shape;
  int64_t begin, numel;  // elements
  bool decay;
  ParameterSettings settings = {};
};

struct GroupLayout {
  DType dtype = kF32;
  bool is_trainable = true;
  std::vector<Placement> placements;
  int64_t numel = 0;  // with padding
  std::string optimizer = {};
  bool is_coded = false;

  /// Bytes of `count` elements, a multiple of 256, as shards hold and gathers send them.
  int64_t shard_nbytes(int64_t count) const;
};

/// The groups of a unit, in the order in which their first parameters are registered.
std::vector<GroupLayout> make_layout(const UnitSpec& spec, const PrecisionOptions& precision,
                                     int world_size, const ParameterTable& table = {});

/// Scales that every rank has beside the codes of a group ([Note: Coded groups] in coded.h).
int64_t num_scales(const GroupLayout& layout);

/// The parts of the placements that lie in [begin, end) of the group, counted from `begin`.
std::vector<optim::Segment> segments_in(const GroupLayout& layout, int64_t begin, int64_t end);

/// Fixed memory that units take turns in.
struct Slot {
  std::shared_ptr<Storage> memory;
  Event is_free;  // whoever takes the slot waits for it
};

/// The slots of one class of units. Which slot is free is decided on the host in program order, so
/// it is the same on all ranks; when it is free, on the device by `is_free`.
class SlotPool {
 public:
  using Allocate = std::function<std::shared_ptr<Storage>(int64_t nbytes)>;
  /// `is_eager`: all bytes now (where `allocate` is collective), else when a slot is first taken.
  SlotPool(int64_t nbytes, int num_slots, Allocate allocate, bool is_eager);

  /// The slot that has been free for the longest; a new one if none is (a unit that is in use
  /// inside that of too many others; what the ring holds is known from the first step on).
  Slot* acquire();
  void release(Slot* slot, Event is_free);
  void add_slot();
  bool has_free() const { return !free_.empty(); }
  int num_slots() const { return static_cast<int>(slots_.size()); }
  int num_materialized() const;  ///< slots that have their bytes
  int64_t nbytes() const { return nbytes_; }

 private:
  void materialize(Slot& slot);

  int64_t nbytes_;
  Allocate allocate_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Slot*> free_;  // longest free first
};

}  // namespace tessera::dist
