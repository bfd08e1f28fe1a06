#include "dist/fsdp/turns.h"

#include <algorithm>

namespace tessera::dist {

Turns::Turns(int num_units) : num_units_(num_units) {
  for (int unit = 0; unit < num_units; ++unit) turns_.push_back({unit, 0});
}

int Turns::find(int unit, int begin) const {
  while (begin < size() && unit_at(begin) != unit) ++begin;
  return begin;
}

std::vector<Turns::Turn> Turns::turns_of(std::span<const Call> calls, bool with_skipped) {
  std::vector<Turn> turns;
  for (const Call& call : calls) {
    if (call.is_skipped && !with_skipped) continue;
    if (turns.empty() || turns.back().unit != call.unit) turns.push_back({call.unit, 0});
    if (!call.is_skipped) ++turns.back().num_calls;
  }
  return turns;
}

Turns::Hashes Turns::hashes_of(std::span<const Call> calls) {
  const auto hash_of = [&](bool with_skipped) {
    uint64_t hash = 0;
    for (const Turn& turn : turns_of(calls, with_skipped)) {
      hash = hash * 0x100000001b3u + static_cast<uint64_t>(turn.unit) + 1;
    }
    return hash;
  };
  return {hash_of(true), hash_of(false)};
}

void Turns::learn(std::span<const Call> calls, bool all_called_the_same) {
  is_known_ = true;
  turns_ = turns_of(calls, !all_called_the_same);
  if (!all_called_the_same) return;
  std::vector<bool> has_turn(static_cast<size_t>(num_units_));
  for (const Turn& turn : turns_) has_turn[static_cast<size_t>(turn.unit)] = true;
  for (int unit = 0; unit < num_units_; ++unit) {
    if (has_turn[static_cast<size_t>(unit)]) continue;
    const int position = unit == 0 ? 0 : find(unit - 1, 0) + 1;
    turns_.insert(turns_.begin() + position, Turn{unit, 0});
  }
}

}  // namespace tessera::dist
