#include "dist/fsdp/runtime.h"

#include <algorithm>
#include <optional>

#include "core/profiler.h"

namespace tessera::dist {
Runtime::Runtime(World& world, const std::vector<std::unique_ptr<Unit>>& units,
                 std::vector<std::string> unit_names)
    : world_(world), units_(units), program_(std::move(unit_names)) {}

void Runtime::act(const Action& action) {
  if (!edit) return perform(action);
  for (const Action& other : edit(action)) perform(other);
}

void Runtime::perform(const Action& action) {
  program_.add(action);
  if (action.is_collective() && step_ == 0) announce();
  Unit& unit = *units_[static_cast<size_t>(action.unit)];
  std::optional<profiler::HostSpan> span;
  if (action.is_collective()) span.emplace(name_of(action), unit.static_name());
  switch (action.kind) {
    case ActionKind::kAddSlot:
      return unit.gathered.add_slot();
    case ActionKind::kGather:
      return gather(unit, name_of(action));
    case ActionKind::kWait:
      return unit.gathered.wait();
    case ActionKind::kJoin:
      return unit.gathered.join();
    case ActionKind::kClose:
      return unit.gathered.close();
    case ActionKind::kRelease:
      return unit.gathered.release();
    case ActionKind::kExpire:
      return unit.gathered.expire();
    case ActionKind::kReduce:
      return unit.gradients.reduce(action.piece, action.phase == Phase::kLast, step_);
    case ActionKind::kKeep:
      return unit.gradients.keep();
    case ActionKind::kFinish:
      return unit.gradients.finish(step_);
    case ActionKind::kGatherFull:
      return unit.whole.gather(action.phase, step_);
    case ActionKind::kDropFull:
      return unit.whole.drop();
    case ActionKind::kCount:
      break;
  }
  throw InternalError("fsdp: the program has an action of no kind");
}

void Runtime::gather(Unit& unit, const char* phase) {
  const Stream& compute = unit.lanes().compute;
  // After whatever was submitted since the shards have changed: where a unit keeps its place, a
  // gather writes the bytes that a save or a snapshot reads.
  if (shards_ready_.impl() == nullptr) shards_ready_ = compute.record();
  unit.gathered.gather(shards_ready_, compute.record(), step_, phase);
}

void Runtime::announce() const {
  if (world_.world_size() == 1) return;
  struct Signature {
    int64_t sequence;
    uint64_t hash;
  };
  const Signature mine{program_.num_collectives(), program_.hash()};
  std::vector<Signature> all(static_cast<size_t>(world_.world_size()));
  world_.control().all_gather(all.data(), &mine, sizeof mine);
  for (const Signature& theirs : all) {
    if (theirs.hash != mine.hash || theirs.sequence != mine.sequence) throw_disagreement();
  }
}

/// All ranks have seen that their programs differ: says where.
void Runtime::throw_disagreement() const {
  const int64_t num_skipped = world_.control().max(program_.num_forgotten());
  const std::vector<std::string> texts =
      world_.control().all_gather(program_.collectives(num_skipped));
  throw CommError(fmt::format("fsdp: the ranks issue different collectives in step {}: {}", step_,
                              first_difference(texts, num_skipped)));
}

bool Runtime::agree(const Turns::Hashes& mine) {
  std::vector<Turns::Hashes> all(static_cast<size_t>(world_.world_size()));
  world_.control().all_gather(all.data(), &mine, sizeof mine);
  const auto all_have = [&](uint64_t Turns::Hashes::*hash) {
    return std::all_of(all.begin(), all.end(),
                       [&](const Turns::Hashes& h) { return h.*hash == mine.*hash; });
  };
  TESSERA_CHECK_AS(CommError, all_have(&Turns::Hashes::issued),
                   "fsdp: the ranks called units in different orders in step 0");
  return all_have(&Turns::Hashes::called);
}

void Runtime::end_step() {
  shards_changed();
  if (world_.world_size() > 1) {
    const uint64_t mine = program_.hash();
    std::vector<uint64_t> all(static_cast<size_t>(world_.world_size()));
    world_.control().all_gather(all.data(), &mine, sizeof mine);
    for (const uint64_t theirs : all) {
      if (theirs != mine) throw_disagreement();
    }
  }
  ++step_;
  program_.clear();
}

}  // namespace tessera::dist
