#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// [Note: Program of a step]
// What a rank does with the memory and the collectives of its units in a step is a list of actions:
// plain data, that can be printed, hashed, compared between ranks, executed (runtime.h) and walked
// without a tensor or a stream (ledger.h). An Order (order.h) makes it from the calls of modules;
// whatever is gathered, waited for, released or reduced is so because an action said it.

namespace tessera::dist {

/// What of a unit's parameters stays after use.
enum class Residence : unsigned char {
  kReshard,  ///< gathered for each use into a slot, released after it
  kKeep,     ///< gathered once a step into memory of its own
  kWhole,    ///< the shard is the whole and on the device: nothing to gather
};

enum class ActionKind : unsigned char {
  kAddSlot,     ///< the unit's ring grows by a slot: units in use have taken all of it
  kGather,      ///< shards -> slot, on the stream all_gather; collective
  kWait,        ///< compute waits for the gather; from here on modules can read the parameters
  kJoin,        ///< compute waits for a gather that nobody on this rank reads
  kClose,       ///< modules can read the parameters no longer; they stay
  kRelease,     ///< the slot goes back to its ring once compute is done with it
  kExpire,      ///< the shards have changed: what is gathered is out of date
  kReduce,      ///< the gradients of a backward, or a piece of them -> shard; collective
  kKeep,        ///< instead of that they are added up on this rank (no_sync)
  kFinish,      ///< the step's gradient shard is completed
  kGatherFull,  ///< f32 shards -> memory for who reads them whole; collective
  kDropFull,    ///< that memory is given back
  kCount
};

enum class Phase : unsigned char {
  kNone,
  kForward,   ///< of a gather
  kBackward,  ///< of a gather
  kUnshard,   ///< of a gather: for an UnshardGuard
  kLast,      ///< of a reduce: of the step's last micro-batch
  kMaster,    ///< of a gather_full: what the optimizer updates
  kGradient,  ///< of a gather_full: gradient shards
};

struct Action {
  ActionKind kind;
  Phase phase = Phase::kNone;
  int32_t unit = 0;    ///< index
  int64_t nbytes = 0;  ///< of the whole unit: what is gathered or reduced; else 0
  int32_t piece = 0;   ///< of a reduce in pieces ([Note: Pieces of a gradient]), each of `nbytes`
  bool is_collective() const {
    return kind == ActionKind::kGather || kind == ActionKind::kReduce ||
           kind == ActionKind::kGatherFull;
  }
  friend bool operator==(const Action&, const Action&) = default;
};
const char* name_of(ActionKind kind);       ///< "gather", "wait", "reduce", ...; lives for ever
const char* name_of(const Action& action);  ///< the same, of gathers "gather_forward", ...

/// Where a unit's parameters are, and what memory they take beside the shard.
enum class ParamState : unsigned char {
  kSharded,    ///< nothing (of kKeep with memory of its own: that)
  kStale,      ///< a slot, whose values are out of date
  kGathering,  ///< a slot, which a gather fills; compute does not wait for it yet
  kGathered,   ///< a slot with the values; modules cannot read them
  kOpen,       ///< the same; modules can
};
std::string_view name_of(ParamState state);

/// What an action makes of a state; none if it cannot follow on it.
std::optional<ParamState> next_state(Residence residence, ParamState state, ActionKind kind);

/// The actions of a rank since the last `clear`, in the order in which they were issued. A run that
/// only evaluates ends no step: of its collectives the last ones are kept, at least `num_kept` and
/// fewer than twice as many, with what comes between them.
class Program {
 public:
  static constexpr int64_t kNumKept = 1 << 17;
  explicit Program(std::vector<std::string> units, int64_t num_kept = kNumKept);

  void add(const Action& action);
  void clear();

  const std::vector<Action>& actions() const { return actions_; }
  int64_t num_collectives() const { return num_collectives_; }
  /// Collectives before those of `actions`; the same on ranks that have issued as many.
  int64_t num_forgotten() const { return num_forgotten_; }
  /// Of kinds, units and bytes of the collectives: equal on all ranks, or somebody will hang. What
  /// else a rank does (waits, releases) is its own affair.
  uint64_t hash() const { return hash_; }

  /// "gather_forward blocks.0", a line an action; "reduce embed, piece 1" of those after the first.
  std::string to_string() const;
  /// "gather_forward blocks.0 (1024 bytes)", a line a collective, without the first `num_skipped`.
  std::string collectives(int64_t num_skipped = 0) const;
  const std::string& unit(int index) const { return units_[static_cast<size_t>(index)]; }

 private:
  std::string describe(const Action& action) const;

  std::vector<std::string> units_;
  std::vector<uint64_t> unit_hashes_;
  const int64_t num_kept_;
  std::vector<Action> actions_;
  size_t newer_ = 0;  // the first action that stays when older ones are forgotten
  int64_t num_collectives_ = 0, num_forgotten_ = 0;
  uint64_t hash_ = 0;
};

/// Where the texts of `Program::collectives`, one a rank, part: "as number 3, rank 0 "reduce head
/// (64 bytes)" and rank 2 "nothing"". Where they are the same, it was in the `num_skipped` before.
std::string first_difference(std::span<const std::string> of_ranks, int64_t num_skipped = 0);

}  // namespace tessera::dist
