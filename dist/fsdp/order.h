#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dist/fsdp/ledger.h"
#include "dist/fsdp/program.h"
#include "dist/fsdp/turns.h"

// [Note: Order of collectives]
// A deadlock or a wrong sum is what ranks get that issue collectives in different orders. So the
// order is data, the same on all ranks: the turns of units (registration order, corrected by what
// step 0 called). A forward walks them by a cursor: calling unit v while u < v is due gathers and
// releases u as well, so a unit that some ranks skip is gathered by all. Each call and each skip is
// an entry in `calls_`; backward walks the entries from the newest to the oldest, whatever the rank
// computed: entry c begins (gather, prefetch) when a gradient reaches the outputs of its call, and
// then all later entries are over, since the tape runs from the newest node to the oldest. A unit
// whose last entry is over is reduced, with zeros where this rank has no gradient.

namespace tessera::dist {

/// Who carries out what an Order decides.
class Issuer {
 public:
  virtual ~Issuer() = default;
  /// Does it, at once: what it throws leaves the Order as it was before the action.
  virtual void act(const Action& action) = 0;
  /// Once, after the first backward: whether all ranks have called the same units. Throws if they
  /// have issued different turns.
  virtual bool agree(const Turns::Hashes& mine) = 0;
};

struct OrderOptions {
  int prefetch_forward = 1, prefetch_backward = 1;  ///< units gathered ahead
  bool keeps_whole_gradients = false;               ///< reduced after the last micro-batch alone
  bool is_alone = false;                            ///< one rank: no_sync changes nothing
};

/// Which unit is gathered, waited for, released and reduced when: a state machine from calls of
/// modules, passes and turns to actions. It knows no tensor, stream or rank; the same calls give
/// the same actions.
class Order {
 public:
  enum class Mode : unsigned char {
    kTrain,   ///< a forward whose backward is to come
    kEval,    ///< a forward without one
    kReplay,  ///< the second run of a recompute region
  };
  static constexpr size_t kNoCall = SIZE_MAX;

  Order(std::vector<UnitUse> units, std::vector<int> num_slots, const OrderOptions& options,
        Issuer& issuer);

  // ---- a forward
  /// A module of the unit begins; `region` of recompute, 0: none.
  void begin_call(int unit, Mode mode, int64_t region = 0);
  /// It ends. What `enter_backward` is to be told when gradients come to its outputs; kNoCall if
  /// none will.
  size_t end_call(int unit, Mode mode);
  /// The root's call without a backward is over: before turns are known nobody else knows that an
  /// evaluation is through.
  void end_root_call();
  /// Leaves every unit sharded; a forward without its backward is forgotten. `ok`: it has not thrown.
  void end_forward(bool ok = true);

  // ---- backward
  /// Gradients have come to the outputs of a call. `generation`: when its forward was made. Error for
  /// one that is over by more than one backward.
  void enter_backward(int64_t generation, size_t call);
  void end_backward(bool ok);

  // ---- a step
  struct Accumulation {
    bool is_last = true;  ///< of the step's micro-batches
    int num_no_sync = 0;  ///< scopes in which gradients stay on this rank
  };
  Accumulation accumulation;
  /// Reduces what no backward has, and completes the gradient shards.
  void complete_gradients();
  void end_step();
  /// The shards of a unit have changed.
  void expire(int unit);

  // ---- scopes in which parameters stay gathered
  struct Before {
    bool was_gathered, was_open;
  };
  Before hold(int unit);
  void end_hold(int unit, const Before& before, bool is_written);

  const Ledger& ledger() const { return ledger_; }
  bool in_backward() const { return in_backward_; }
  int64_t generation() const { return generation_; }  ///< counts forwards
  struct NumCalls {
    int open = 0;    ///< whose backward is not over
    int active = 0;  ///< that are running
  };
  const NumCalls& num_calls(int unit) const { return uses_[static_cast<size_t>(unit)].calls; }

 private:
  /// Where a forward is in the turns.
  struct Pass {
    int position = -1;  // of the unit called last; -1 before the first
    int num_calls = 0;  // of that unit in a row
  };
  struct Use {
    NumCalls calls;
    int num_holds = 0;
    bool is_ahead = false;        // gathered before its turn
    bool is_release_due = false;  // when it is held no longer
    bool is_reduce_due = false;   // some rank has gradients that no later backward sends
    bool is_finished = false;     // its gradient shard is complete
  };

  void begin_backward(int64_t generation);
  Use& use(int unit) { return uses_[static_cast<size_t>(unit)]; }
  void emit(ActionKind kind, int unit, Phase phase = Phase::kNone, int piece = 0);
  void emit_reduces(int unit, Phase phase);
  void gather(int unit, Phase phase);
  void wait(int unit);
  void join(int unit);
  void release(int unit);
  void reduce(int unit);
  void keep_between_calls(int unit);
  void release_held(int except);
  void release_held_before(int position);
  bool is_slot_needed(int unit, int position) const;
  void prefetch_forward(int position);
  void prefetch_backward(size_t call);
  void skip(int position, bool is_train);
  void flush_pass(Pass& pass, bool is_train);
  void enter_forward(Pass& pass, int unit, bool is_train);
  size_t call_to_replay(int unit, int64_t region) const;
  void begin_replay(int unit, int64_t region);
  bool stays_for_call_before(size_t call) const;
  void finish_later_calls(size_t call);
  void finish_call(size_t call, int next);
  void push_call(const Call& call);

  const OrderOptions options_;
  Issuer& issuer_;
  Ledger ledger_;
  Turns turns_;
  std::vector<Use> uses_;
  Pass train_pass_, eval_pass_;
  std::vector<Call> calls_, last_calls_;
  size_t num_live_ = 0;          // calls from this one on are over
  std::vector<size_t> replays_;  // the calls that run again now, innermost last
  std::vector<int> held_;        // gathered, between calls
  int64_t generation_ = 0;       // of calls_
  int64_t tick_ = 0;
  bool in_backward_ = false;
};

}  // namespace tessera::dist
