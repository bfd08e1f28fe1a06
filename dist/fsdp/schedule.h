#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dist/comm/world.h"
#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/life.h"
#include "dist/fsdp/memory.h"
#include "dist/fsdp/unit.h"

// [Note: Order of collectives]
// A deadlock or a wrong sum is what ranks get that issue collectives in different orders. So the
// order is data, the same on all ranks: the unit order (registration order, corrected by what step
// 0 called). A forward walks it by a cursor: calling unit v while u < v is due gathers and releases
// u as well, so a unit that some ranks skip is gathered by all. Each call and each skip is an entry
// in `calls_`; backward walks the entries from the newest to the oldest, whatever the rank
// computed: entry c begins (gather, prefetch) when a gradient reaches the outputs of its call, and
// then all later entries are over, since the tape runs from the newest node to the oldest. A unit
// whose last entry is over is reduced, with zeros where this rank has no gradient.

namespace tessera::dist {

/// Drives the units of one model: the hooks of its modules call it, all on the host thread of the
/// rank. It never waits for the device.
class Scheduler {
 public:
  Scheduler(nn::Module& root, World& world, FsdpOptions options);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  void initialize(uint64_t seed);
  void begin_micro_batch(int index, int count);
  ClippedNorm clip_grad_norm(double max_norm, double p, const Tensor& loss_scale);
  void end_step();
  void end_forward();
  void all_reduce_scalars(const Tensor& values);
  Tensor sum_micro_batches(std::span<const Tensor> values);
  void for_each_full(Fsdp::State state,
                     const std::function<void(const std::string&, const Tensor&)>& f);
  void load_full(const std::function<Tensor(const std::string& name)>& values);
  void shards_changed(optim::Optimizer* optimizer);
  // guards.cc
  void hold_unsharded(Unit& unit, bool is_write);
  /// What a hold found, and puts back.
  struct HeldState {
    bool was_unsharded, was_open;
  };
  void end_hold(Unit& unit, const HeldState& before, const std::vector<bool>& is_written);
  void begin_no_sync();
  void end_no_sync() { --num_no_sync_; }
  std::string unit_of(const nn::Module& module) const;
  std::string summary() const;
  MemoryPlan memory_plan() const;
  std::string program() const;
  std::shared_ptr<const ExposedTimes> exposed_times();

  std::vector<optim::FlatShard>& shards() { return shards_; }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  const FsdpOptions& options() const { return options_; }
  const std::shared_ptr<Life>& life() const { return life_; }
  Lanes& lanes() { return lanes_; }
  Comm& scalar_comm() { return *scalar_comm_; }  ///< of all ranks, on the compute stream

 private:
  class Hook;
  class RootHook;
  /// One call of a unit in the forward of this pass, or its turn that this rank skipped.
  struct Call {
    Unit* unit;
    int64_t begin, end;  // ticks: the call's interval, for nested units
    bool is_skipped, is_over;
    int64_t region = 0;        // of recompute, in which it was made
    bool is_replayed = false;  // made again by it
  };
  /// Where a forward is in the unit order.
  struct Pass {
    int position = -1;  // index in order_ of the unit called last; -1 before the first
    int num_calls = 0;  // of that unit in a row
  };
  /// A turn in the unit order.
  struct Turn {
    int unit;
    int num_calls;  // in a row (a unit with two modules); 0: not known yet
    friend bool operator==(const Turn&, const Turn&) = default;
  };

  void resolve_options();
  bool reshards_after_forward() const;
  bool is_on_cpu() const;
  void make_lanes();
  void make_units(nn::Module& root);
  void make_pools();
  void make_shards();
  int64_t num_norm_chunks() const;
  void make_buffers(nn::Module& root);
  void install_hooks(nn::Module& root);
  int64_t nbytes_outside_units() const;
  std::string advice(const OutOfMemory& oom) const;

  void check_values(const char* what);
  void cast_outputs(std::span<Tensor*> outputs) const;
  void end_root_call();
  void begin_call(Unit& unit, std::span<Tensor*> inputs);
  void end_call(Unit& unit, std::span<Tensor*> outputs);
  void on_forward_error() noexcept;
  void enter_forward(Pass& pass, Unit& unit, bool is_train);
  void skip(int position, bool is_train);
  void flush_pass(Pass& pass, bool is_train);
  void enter_backward(int64_t generation, size_t call);
  bool stays_for_call_before(size_t call) const;
  void finish_call(size_t call, const Unit* next = nullptr);
  void finish_backward(bool ok);
  void prefetch_forward(int position);
  void prefetch_backward(size_t call);
  void release_held(const Unit* except);
  void release_held_before(int position);
  bool is_slot_needed(const Unit& unit, int position) const;
  size_t call_to_replay(const Unit& unit, int64_t region) const;
  void begin_replay(Unit& unit);
  void begin_backward(int64_t generation);
  void record_backward(int64_t generation, size_t call, std::span<Tensor*> outputs);
  void gather(Unit& unit, const char* phase);
  Unit& unit_at(int position) const;
  void note(const char* what, const Unit& unit);
  [[noreturn]] void throw_disagreement();
  void agree_on_order();

  World& world_;
  FsdpOptions options_;
  Lanes lanes_;
  std::unique_ptr<Comm> scalar_comm_;  // on the compute stream
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<std::unique_ptr<SlotPool>> pools_;
  std::vector<optim::FlatShard> shards_;
  std::vector<std::pair<const nn::Module*, std::string>> unit_of_module_;
  std::vector<std::pair<nn::Module*, Unit*>> hooked_;
  nn::Module* root_;
  bool has_root_hook_ = false;
  std::vector<std::string> empty_ignored_;  // parameters that had no values when it was made
  std::shared_ptr<Life> life_;
  std::vector<std::string> missing_values_;  // sharded parameters that nobody has given any
  bool has_values_ = false;                  // nothing is missing

  std::vector<Turn> order_;  // the program of a forward
  bool is_order_known_ = false;
  Pass train_pass_, eval_pass_;
  std::vector<Call> calls_, last_calls_;
  std::vector<size_t> replays_;  // the calls that run again now, innermost last
  int64_t generation_ = 0;       // of calls_
  int64_t tick_ = 0;
  bool in_backward_ = false;
  bool is_last_micro_batch_ = true;
  int num_no_sync_ = 0;      // guards alive
  std::vector<Unit*> held_;  // unsharded, between calls
  double grad_factor_ = 1;   // true gradients are that many times those held
  int64_t num_ignored_ = 0;  // elements that `clip_grad_norm` leaves out
  Event shards_ready_;       // what gathers wait for; none until the first since the last change
  int64_t step_ = 0;
  uint64_t program_hash_ = 0;
  int64_t num_issued_ = 0;
  std::vector<std::string> program_;
  std::vector<int64_t> program_nbytes_;

  std::vector<std::pair<Tensor, Tensor>> norm_inputs_;  // own gradient part, its segments
  std::vector<Group*> norm_groups_;                     // whose part that is
  Tensor scalar_staging_;
};

}  // namespace tessera::dist
