#pragma once

#include <cstdint>
#include <vector>

#include "dist/fsdp/program.h"

namespace tessera::dist {

/// A unit as far as a program is about it.
struct UnitUse {
  Residence residence = Residence::kReshard;
  int pool = -1;  ///< of its gathered slot; -1: memory of its own
  bool is_trainable = true;
  bool keeps_part = false;  ///< a part stays after use, which gets out of date
  int64_t gathered_nbytes = 0, gradient_nbytes = 0;  ///< of gradients those of a reduce
  int num_reduces = 1;                               ///< pieces in which gradients travel
  int64_t sent_nbytes = gathered_nbytes;             ///< by a gather: less than it makes, of codes
};

/// What the actions so far have left: the state of each unit's parameters and the slots taken, with
/// no tensor and no stream. An Order decides by it, tests and planners check and count with it.
class Ledger {
 public:
  /// `num_slots` of each pool.
  Ledger(std::vector<UnitUse> units, std::vector<int> num_slots);

  /// Null if `action` can follow on the ones before, and is counted; else why not ("its parameters
  /// are sharded", "no slot of its ring is free"), and nothing changes.
  const char* apply(const Action& action);

  int num_units() const { return static_cast<int>(units_.size()); }
  const UnitUse& unit(int index) const { return units_[static_cast<size_t>(index)]; }
  ParamState state(int unit) const { return states_[static_cast<size_t>(unit)]; }
  /// The values are there or on the way.
  bool is_gathered(int unit) const { return state(unit) >= ParamState::kGathering; }
  /// They are, or there is memory for them.
  bool can_gather(int unit) const;
  int num_slots(int pool) const { return num_slots_[static_cast<size_t>(pool)]; }
  int num_free(int pool) const { return num_free_[static_cast<size_t>(pool)]; }
  /// Bytes of the units that have a slot now.
  int64_t gathered_nbytes() const { return gathered_nbytes_; }

 private:
  std::vector<UnitUse> units_;
  std::vector<ParamState> states_;
  std::vector<int> num_slots_, num_free_;
  int64_t gathered_nbytes_ = 0;
};

}  // namespace tessera::dist
