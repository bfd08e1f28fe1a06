#include "dist/fsdp/ledger.h"

#include <utility>

namespace tessera::dist {
namespace {

const char* refusal(ParamState state) {
  switch (state) {
    case ParamState::kSharded:
      return "its parameters are sharded";
    case ParamState::kStale:
      return "its parameters are out of date";
    case ParamState::kGathering:
      return "its parameters are being gathered";
    case ParamState::kGathered:
      return "its parameters are gathered";
    case ParamState::kOpen:
      return "its parameters are open";
  }
  return "?";
}

}  // namespace

Ledger::Ledger(std::vector<UnitUse> units, std::vector<int> num_slots)
    : units_(std::move(units)), num_slots_(std::move(num_slots)), num_free_(num_slots_) {
  for (const UnitUse& u : units_) {
    states_.push_back(u.residence == Residence::kWhole ? ParamState::kGathered
                                                       : ParamState::kSharded);
  }
}

bool Ledger::can_gather(int index) const {
  const int pool = unit(index).pool;
  return state(index) != ParamState::kSharded || pool < 0 || num_free(pool) > 0;
}

const char* Ledger::apply(const Action& action) {
  const UnitUse& use = unit(action.unit);
  ParamState& state = states_[static_cast<size_t>(action.unit)];
  const auto next = next_state(use.residence, state, action.kind);
  if (!next) return refusal(state);
  const bool has_memory = state != ParamState::kSharded,
             gets_memory = *next != ParamState::kSharded;
  if (action.kind == ActionKind::kAddSlot) {
    if (use.pool < 0) return "its memory is its own";
    ++num_slots_[static_cast<size_t>(use.pool)];
    ++num_free_[static_cast<size_t>(use.pool)];
  } else if (!has_memory && gets_memory) {
    if (!can_gather(action.unit)) return "no slot of its ring is free";
    if (use.pool >= 0) --num_free_[static_cast<size_t>(use.pool)];
    gathered_nbytes_ += use.gathered_nbytes;
  } else if (has_memory && !gets_memory) {
    if (use.pool >= 0) ++num_free_[static_cast<size_t>(use.pool)];
    gathered_nbytes_ -= use.gathered_nbytes;
  }
  state = *next;
  return nullptr;
}

}  // namespace tessera::dist
