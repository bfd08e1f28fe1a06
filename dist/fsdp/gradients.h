#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/autograd.h"
#include "core/runtime/stream.h"
#include "dist/fsdp/pieces.h"
#include "dist/fsdp/shard.h"

namespace tessera::dist {

struct Group;
class Unit;

/// The gradients of a unit: where a backward writes them, how they travel, and what of the step's
/// sum the gradient shard has. The verbs are actions of a program.
class Gradients {
 public:
  /// Where gradients of this backward are, and what memory they take beside the shard.
  enum class Buffer : unsigned char {
    kNone,    ///< nowhere: nothing
    kSlot,    ///< in a gradient slot
    kShard,   ///< in the gradient shard itself (one rank, f32): nothing
    kWhole,   ///< in the unit's whole f32 gradient, which is there for ever (GradSync::kLast)
    kPieces,  ///< tables nowhere yet, the others in a slot ([Note: Pieces of a gradient] in plan.h)
  };
  /// What the gradient shard, which is there for ever, holds of this step.
  enum class Sum : unsigned char {
    kNothing,   ///< nothing; what is there is of the last step
    kZeros,     ///< zeros: no rank had gradients, and the step is complete
    kGroup,     ///< sums over the shard group; those over replicas are due (GradSync::kShard)
    kOwn,       ///< in this replica's own part, sums over all ranks
    kComplete,  ///< sums over all ranks, in all parts
  };

  explicit Gradients(Unit& unit);

  /// Null: none. `pieces`: of what is reduced in pieces.
  void set_pools(SlotPool* pool, SlotPool* pieces) { pool_ = pool, piece_pool_ = pieces; }
  Buffer buffer() const { return buffer_; }
  Sum sum() const { return sum_; }
  bool is_complete() const { return sum_ == Sum::kZeros || sum_ == Sum::kComplete; }

  /// Whether a gradient may come now: a call of the unit is open. Asked by the sinks.
  std::function<bool()> is_expected;
  /// Hands the gradients of a parameter to where they are collected.
  std::shared_ptr<GradSink> sink(size_t group, size_t placement);

  /// Sends the gradients of this backward, or of them one piece after the other, on their way and
  /// adds them to the gradient shard. Ranges that nobody wrote count as zero. `is_last`: of the
  /// step's micro-batches.
  void reduce(int piece, bool is_last, int64_t step);
  /// Instead of `reduce`: they are added up on this rank, in f32, until the next reduce.
  void keep();
  /// The gradient shard is complete for tasks of the compute stream after this; one whose place is
  /// in host memory, for who brings it.
  void finish(int64_t step);
  /// The next gradients replace the shard's instead of adding to it.
  void reset();
  /// Forgets gradients that were written but not reduced (a backward failed).
  void discard();

 private:
  class Sink;

  GradDst destination(size_t group, size_t placement);
  bool takes_rows(size_t group, size_t placement);
  void check_expected(size_t group, size_t placement) const;
  void begin_collecting();
  void attach_buffer();
  Slot* take_slot(SlotPool& pool);
  bool can_write_into_shard() const;
  void zero_unwritten();
  void take_buffer_away();
  void begin_leaf(Group& g);
  const Stream& summing_stream() const;
  const Stream& writing_stream() const;
  bool is_in_pieces() const { return buffer_ == Buffer::kPieces; }
  int num_pieces() const;
  std::shared_ptr<Storage> kept_memory() const;
  bool has_sums() const { return sum_ >= Sum::kGroup; }
  bool sums_in_two_levels() const;
  bool sums_in_group() const;
  Piece piece_of(const Group& g, int index) const;

  /// A piece of one group, or all of it, where it was collected.
  struct Collected {
    Group& g;
    Piece piece;
    void* data;  // of g.grad_dtype
  };
  std::vector<Collected> collect(int index, Slot* slot);
  void add_kept(const Collected& c) const;

  /// Its way into the shard.
  struct Journey {
    const Collected& what;
    const void* source;  // what travels, of g.wire_dtype
    void* own;           // where this rank's sum goes
    bool accumulate;     // it is added to what is there
    int64_t step;
  };
  void begin_reduce();
  void reduce_all(bool is_last, int64_t step);
  void reduce_piece(int index, int64_t step);
  void end_reduce(bool is_last, int64_t step);
  void reduce_group(const Collected& c, const Event& ready, int64_t step);
  const void* on_the_wire(const Collected& c, const Stream& stream) const;
  void reduce_alone(const Journey& j);
  void reduce_over_replicas(const Journey& j);
  void reduce_in_group(const Journey& j);
  void reduce_in_two_levels(const Journey& j);
  void end_group(Group& g, bool is_last, int64_t step);
  void sum_over_replicas(Group& g, int64_t step);
  void finish_group(Group& g, int64_t step);
  void fill_with_zeros(Group& g);

  Unit& unit_;
  SlotPool *pool_ = nullptr, *piece_pool_ = nullptr;
  Slot* slot_ = nullptr;
  Pieces pieces_;
  int next_piece_ = 0;  // to be reduced
  Buffer buffer_ = Buffer::kNone;
  Sum sum_ = Sum::kNothing;
  bool has_kept_ = false;  // `unreduced` of the groups holds gradients of this step
  Event is_reduced_;
};

}  // namespace tessera::dist
