#include "dist/fsdp/program.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/random.h"

namespace tessera::dist {

const char* name_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::kAddSlot:
      return "add_slot";
    case ActionKind::kGather:
      return "gather";
    case ActionKind::kWait:
      return "wait";
    case ActionKind::kJoin:
      return "join";
    case ActionKind::kClose:
      return "close";
    case ActionKind::kRelease:
      return "release";
    case ActionKind::kExpire:
      return "expire";
    case ActionKind::kReduce:
      return "reduce";
    case ActionKind::kKeep:
      return "keep";
    case ActionKind::kFinish:
      return "finish";
    case ActionKind::kGatherFull:
      return "gather_full";
    case ActionKind::kDropFull:
      return "drop_full";
    case ActionKind::kCount:
      break;
  }
  return "?";
}

const char* name_of(const Action& action) {
  switch (action.phase) {
    case Phase::kForward:
      return "gather_forward";
    case Phase::kBackward:
      return "gather_backward";
    case Phase::kUnshard:
      return "gather_unshard";
    case Phase::kGradient:
      return "gather_full_gradient";
    case Phase::kNone:
    case Phase::kLast:
    case Phase::kMaster:
      break;
  }
  return name_of(action.kind);
}

std::string_view name_of(ParamState state) {
  switch (state) {
    case ParamState::kSharded:
      return "sharded";
    case ParamState::kStale:
      return "out of date";
    case ParamState::kGathering:
      return "being gathered";
    case ParamState::kGathered:
      return "gathered";
    case ParamState::kOpen:
      return "open";
  }
  return "?";
}

std::optional<ParamState> next_state(Residence residence, ParamState state, ActionKind kind) {
  using enum ParamState;
  const bool is_whole = residence == Residence::kWhole;
  switch (kind) {
    case ActionKind::kGather:
      if (!is_whole && (state == kSharded || state == kStale)) return kGathering;
      return std::nullopt;
    case ActionKind::kWait:
      if (state == kGathering || state == kGathered) return kOpen;
      return std::nullopt;
    case ActionKind::kJoin:
      if (state == kGathering) return kGathered;
      return std::nullopt;
    case ActionKind::kClose:
      if (state == kOpen) return kGathered;
      return std::nullopt;
    case ActionKind::kRelease:
      if (residence == Residence::kReshard && (state == kGathered || state == kOpen)) {
        return kSharded;
      }
      return std::nullopt;
    case ActionKind::kExpire:
      // Nobody may write shards that a gather still sends.
      if (is_whole || state == kGathering) return std::nullopt;
      return state == kSharded ? kSharded : kStale;
    case ActionKind::kAddSlot:
    case ActionKind::kReduce:
    case ActionKind::kKeep:
    case ActionKind::kFinish:
    case ActionKind::kGatherFull:
    case ActionKind::kDropFull:
      return state;
    case ActionKind::kCount:
      break;
  }
  return std::nullopt;
}

Program::Program(std::vector<std::string> units, int64_t num_kept)
    : units_(std::move(units)), num_kept_(num_kept) {
  for (const std::string& unit : units_) unit_hashes_.push_back(hash_name(unit));
}

void Program::add(const Action& action) {
  // By their number, which is the same on all ranks: what is left can be compared.
  if (action.is_collective() && num_collectives_ > 0 && num_collectives_ % num_kept_ == 0) {
    if (newer_ > 0) num_forgotten_ += num_kept_;
    actions_.erase(actions_.begin(), actions_.begin() + static_cast<std::ptrdiff_t>(newer_));
    newer_ = actions_.size();
  }
  actions_.push_back(action);
  if (!action.is_collective()) return;
  const uint64_t phase =
      action.kind == ActionKind::kReduce ? 0 : static_cast<uint64_t>(action.phase);
  const uint64_t what =
      static_cast<uint64_t>(action.piece) << 16 | static_cast<uint64_t>(action.kind) << 8 | phase;
  const uint64_t own = unit_hashes_[static_cast<size_t>(action.unit)] ^
                       (static_cast<uint64_t>(action.nbytes) * 0xC2B2AE3D27D4EB4Fu + what);
  hash_ = own ^ (hash_ * 0x9E3779B97F4A7C15u + 1);
  ++num_collectives_;
}

void Program::clear() {
  actions_.clear();
  newer_ = 0;
  num_collectives_ = num_forgotten_ = 0;
  hash_ = 0;
}

std::string Program::describe(const Action& a) const {
  const std::string text = fmt::format("{} {}", name_of(a), unit(a.unit));
  return a.piece == 0 ? text : fmt::format("{}, piece {}", text, a.piece);
}

std::string Program::to_string() const {
  std::string text;
  for (const Action& a : actions_) text += describe(a) + "\n";
  return text;
}

std::string Program::collectives(int64_t num_skipped) const {
  std::string text;
  int64_t number = num_forgotten_;
  for (const Action& a : actions_) {
    if (!a.is_collective() || number++ < num_skipped) continue;
    text += fmt::format("{} ({} bytes)\n", describe(a), a.nbytes);
  }
  return text;
}

std::string first_difference(std::span<const std::string> of_ranks, int64_t num_skipped) {
  const std::string& first = of_ranks.front();
  size_t other = 1;
  while (other + 1 < of_ranks.size() && of_ranks[other] == first) ++other;
  const std::string& second = of_ranks[other];
  if (second == first) {
    return fmt::format("before number {}, of which no rank has kept all", num_skipped + 1);
  }
  size_t begin = 0, i = 0;  // of the line in which character i lies
  int64_t number = num_skipped + 1;
  for (; i < std::min(first.size(), second.size()) && first[i] == second[i]; ++i) {
    if (first[i] == '\n') begin = i + 1, ++number;
  }
  const auto line_of = [begin](const std::string& text) {
    return begin < text.size() ? text.substr(begin, text.find('\n', begin) - begin)
                               : std::string("nothing");
  };
  return fmt::format("as number {}, rank 0 \"{}\" and rank {} \"{}\"", number, line_of(first),
                     other, line_of(second));
}

}  // namespace tessera::dist
