#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/autograd.h"
#include "dist/comm/comm.h"
#include "dist/fsdp/exposure.h"
#include "dist/fsdp/offload.h"
#include "dist/fsdp/reproducible.h"
#include "dist/fsdp/shard.h"

namespace tessera::dist {

/// The places where one stream waits for another. A test hides one at a time from the
/// happens-before checker, which then has to report something: none of them is for nothing.
enum class WaitPoint : unsigned char {
  kNone,
  kFullReady,       ///< all_gather, before a state is gathered whole: the shard was computed
  kFullGathered,    ///< compute, before it reads that state
  kSlotFree,        ///< all_gather: the slot's last unit was computed with
  kShardsReady,     ///< all_gather: the optimizer has written the shards
  kPartSaved,       ///< all_gather: the part kept after forward was copied
  kGathered,        ///< compute: the parameters are there
  kGradSlotFree,    ///< compute: the gradient slot's last unit was reduced
  kWholeGradFree,   ///< compute: the unit's whole gradient was reduced before (kLast)
  kGradReady,       ///< the reducing stream: the gradients are complete
  kOuterReady,      ///< all_reduce: the shard group's sum is complete
  kPartialFree,     ///< reduce_scatter: the buffer between the two sums was read
  kPartialReady,    ///< all_reduce: that buffer was written
  kGradShardReady,  ///< compute: the gradient shard is complete
  kCount
};

/// Streams, communicators and settings that all units share. Each communicator has one stream.
struct Lanes {
  Stream compute;
  Stream all_gather;      // gathers parameters while other units compute
  Stream reduce_scatter;  // reduces gradients of a finished unit while earlier ones compute
  Stream all_reduce;      // hybrid: the outer reduction while the next unit reduces inside
  std::unique_ptr<Comm> gather_comm;     // of the shard group; null if it has one rank
  std::unique_ptr<Comm> reduce_comm;     // of the shard group; null: gather_comm does both
  std::unique_ptr<Comm> part_comm;       // of part_size neighbours in the shard group; or null
  std::unique_ptr<Comm> replicate_comm;  // of the ranks with the same shard; null if there is one
  int shard_size = 1, shard_rank = 0;
  int part_size = 1;  // reshard_after_forward = part_size
  int replicate_size = 1, replicate_rank = 0;
  DType reduce_dtype = kF32, wire_dtype = kF32;
  double pre_divide = 1;  // of gradients before they travel; gradient shards hold the quotient
  GradSync sync = GradSync::kEveryMicroBatch;
  bool poison = false;
  bool is_reduced_into_shards = false;  // by NCCL: gradient shards are memory of the communicators
  bool measures_exposure = false;       // on cuda, where it takes two events a wait
  bool reproducible = false;
  int micro_batch = 0;                                                   // of the step
  Tensor reduce_staging, replicate_staging, wire_buffer, partial_shard;  // see Unit::reduce
  Event partial_shard_free;
  int64_t partial_numel = 0;             // of partial_shard when it is needed
  std::shared_ptr<Offloader> offloader;  // null: nothing in host memory

  bool offloads_parameters() const { return offloader != nullptr && offloader->has_parameters(); }

  WaitPoint hidden_wait = WaitPoint::kNone;  // from the happens-before checker, by tests

  /// `stream` waits for `event`.
  void wait(const Stream& stream, const Event& event, WaitPoint point) const {
    if (point == hidden_wait && event.impl() != nullptr) [[unlikely]] {
      stream.impl()->wait(event);
    } else {
      stream.wait(event);
    }
  }
  Comm& reducing_comm() const { return reduce_comm != nullptr ? *reduce_comm : *gather_comm; }

  /// Memory that communicators send from or receive into, of theirs. All ranks call it in the same
  /// order.
  std::shared_ptr<Storage> allocate(int64_t nbytes, MemoryClass memory_class) const;
  /// The same as an array, of the class of the current scope.
  Tensor allocate_array(int64_t numel, DType dtype) const;
};

/// What of a unit's parameters stays after use.
enum class Residence : unsigned char {
  kReshard,  ///< gathered for each use into a slot, released after it
  kKeep,     ///< gathered once a step into memory of its own
  kWhole,    ///< the shard is the whole and on the device: nothing to gather
};

/// One group's buffers on this rank. Elements as in [Note: Flat layout].
struct Group {
  GroupLayout layout;
  int64_t shard_numel = 0;
  Tensor master;  // f32 shard; undefined for frozen groups of a lower dtype
  Tensor shard;   // param_dtype shard that gathers send; the master itself in f32
  Tensor grad;    // f32 gradient shard; undefined for frozen groups
  std::unique_ptr<HostGradient> host_grad;  // where `grad` lives if not on the device
  const Tensor& home_of_grad() const { return host_grad != nullptr ? host_grad->home : grad; }
  // Gathered parameters; the views that modules use. It has bytes only between `wait_for_unshard`
  // and `reshard`; gathers go to where those bytes will be.
  std::shared_ptr<Storage> full;
  std::shared_ptr<Storage> memory;                // of them, where they do not take a slot
  std::shared_ptr<Storage> full_grad;             // gradients before the reduce
  DType grad_dtype = kF32;                        // of full_grad
  DType wire_dtype = kF32;                        // in which they travel
  int64_t slot_offset = 0, grad_slot_offset = 0;  // bytes
  Tensor part;       // 1 / part_size of the gathered parameters, kept for the next gathers
  Tensor unreduced;  // f32: gradients of the whole group that `no_sync` keeps here
  std::vector<bool> is_written;  // a placement's gradient, since the slot was acquired
  LeafTree leaves;               // reproducible: this rank's part of the step's sum
};

/// A unit: the parameters that are gathered and reduced together, as a state machine. All verbs
/// run on the host at once and are idempotent; what they enqueue is ordered by events. States and
/// what they mean for memory:
///   sharded     shards only
///   unsharded   + one gathered slot (Residence::kReshard) or the unit's own (kKeep)
///   collecting  + one gradient slot, from the first gradient written to the end of the reduce
class Unit {
 public:
  Unit(UnitSpec spec, const PrecisionOptions& precision, int world_size, Lanes& lanes,
       Residence residence, bool keeps_full_grad);

  /// Memory for shards (materialized here) and views in place of the modules' parameters.
  void shard_parameters(bool in_place);
  void set_pools(SlotPool* gathered, SlotPool* gradient);
  const SlotPool* gathered_pool() const { return gathered_pool_; }

  /// The parameters are there or on the way, or a slot is free for them.
  bool can_prefetch() const;
  /// Starts the gather unless the parameters are there or on the way, not before compute has come
  /// to `turn`.
  void unshard(const Event& shards_ready, const Event& turn, int64_t step, const char* phase);
  /// The compute stream waits for the gather; the modules can read the parameters from here on.
  void wait_for_unshard();
  /// The same for what nobody reads: a gather that this rank issues for others.
  void wait_for_gather();
  /// Releases the slot (kReshard) once the compute stream is done with it.
  void reshard();
  bool is_unsharded() const { return is_unsharded_; }
  /// The modules can read the parameters.
  bool is_open() const { return is_open_; }
  /// Modules cannot read the parameters, which stay where they are (`wait_for_unshard` undoes it).
  void close();
  /// The gathered parameters have memory of their own: all of them are the shard, or it is a part
  /// of them.
  bool has_own_memory() const { return groups_.front().memory != nullptr; }
  /// Full names of parameters that had no values when they were sharded.
  const std::vector<std::string>& missing_values() const { return missing_values_; }
  /// This rank's part of the full parameters becomes that of its shards, where a placement (in the
  /// order of groups) is written (guards.cc).
  void write_shards(const std::vector<bool>& is_written);
  /// The shards changed: what is gathered is out of date.
  void invalidate();

  /// Sends the gradients of this backward on their way and adds them to the gradient shard. Ranges
  /// that nobody wrote count as zero. `is_last`: of the step's micro-batches.
  void reduce(bool is_last, int64_t step);
  /// Instead of `reduce`: they stay on this rank, in f32, for the next reduce (guards.cc).
  void keep_gradients();
  /// A reduce would have something to send that no later backward sends.
  bool is_reduce_due() const { return is_reduce_due_ || (keeps_full_grad_ && has_full_grad_); }
  /// All parts of the gradient shard are complete for tasks of the compute stream after this; one
  /// whose place is in host memory, for who brings it.
  void finish_gradients(int64_t step);
  /// The next gradients replace the shard's instead of adding to it.
  void zero_grad();
  /// Forgets gradients that were written but not reduced (a backward failed).
  void discard_gradients();
  /// Takes the unit out of the modules' parameters; they have no bytes after this.
  void detach();

  const UnitSpec& spec() const { return spec_; }
  const std::string& name() const { return spec_.name; }
  std::vector<Group>& groups() { return groups_; }
  Residence residence() const { return residence_; }
  bool is_trainable() const;
  int64_t gathered_nbytes() const { return gathered_nbytes_; }
  int64_t gradient_nbytes() const { return gradient_nbytes_; }
  int64_t num_parameters() const;
  /// This rank's part of a shard whose gradient it sums and whose norm it takes.
  int64_t own_begin(const Group& g) const;
  int64_t own_numel(const Group& g) const;

  // Calls of the unit's modules that the scheduler counts.
  bool is_ahead = false;  // gathered before its turn
  int active_calls = 0;   // forwards running now
  int open_calls = 0;     // calls of this pass whose backward is not over
  Exposure exposure;      // since the last `Fsdp::exposed_times`
  // Guards that keep it unsharded, and whether it shall be resharded when they are gone.
  int num_holds = 0;
  bool is_reshard_due = false;

 private:
  class Sink;

  void make_views();
  char* gathered_bytes(const Group& g) const;
  void open();
  GradDst gradient_destination(size_t group, size_t placement);
  void acquire_gradient_slot();
  void save_part();
  void add_kept_gradients();
  void zero_unwritten(Group& g);
  void reduce_group(Group& g, const Event& ready, bool is_last, int64_t step);
  void reduce_over_replicas(Group& g, int64_t step);
  bool has_partial_sums() const;
  void begin_leaf(Group& g);
  const Stream& summing_stream() const;
  bool writes_into_shard() const;

  UnitSpec spec_;
  const char* static_name_;  // for traces and the watchdog
  Lanes& lanes_;
  std::vector<Group> groups_;
  Residence residence_;
  bool keeps_full_grad_;
  int64_t gathered_nbytes_ = 0, gradient_nbytes_ = 0;
  SlotPool *gathered_pool_ = nullptr, *gradient_pool_ = nullptr;
  Slot *gathered_slot_ = nullptr, *gradient_slot_ = nullptr;
  Event is_gathered_;
  bool is_unsharded_ = false, is_waited_ = false, is_stale_ = true;
  bool is_open_ = false;
  bool has_full_grad_ = false;   // full_grad holds gradients of this backward (or step: kLast)
  bool has_shard_grad_ = false;  // the gradient shard holds gradients of this step
  bool is_finished_ = false;     // and all of them
  bool has_outer_sum_ = false;   // kShard: its own part is summed over replicas already
  bool has_part_ = false;        // parts hold what the shards hold
  bool has_unreduced_ = false;   // this rank's unreduced holds gradients of this step
  bool is_reduce_due_ = false;   // some rank's does
  bool is_direct_ = false;       // full_grad is the gradient shard itself
  Event is_reduced_, is_part_saved_;
  std::vector<std::string> missing_values_;
};

/// A copy of `text` that lives for ever (names for traces and the watchdog).
const char* intern(const std::string& text);

}  // namespace tessera::dist
