// What the ranks agree on: the collectives of a step, and the order in which units are called.
#include <algorithm>

#include "core/random.h"
#include "dist/fsdp/schedule.h"

namespace tessera::dist {

void Scheduler::note(const char* what, const Unit& unit) {
  const std::string line = fmt::format("{} {}", what, unit.name());
  const bool is_reduce = std::string_view(what) == "reduce";
  const int64_t nbytes = is_reduce ? unit.gradient_nbytes() : unit.gathered_nbytes();
  program_hash_ =
      hash_name(line) ^ static_cast<uint64_t>(nbytes) ^ (program_hash_ * 0x9E3779B97F4A7C15u + 1);
  program_.push_back(line);
  program_nbytes_.push_back(nbytes);
  ++num_issued_;
  if (step_ > 0 || world_.world_size() == 1) return;
  // Step 0: every collective is announced, so that a rank that would issue another one is named
  // before anybody hangs.
  struct Signature {
    int64_t sequence;
    uint64_t hash;
  };
  const Signature mine{num_issued_, program_hash_};
  std::vector<Signature> all(static_cast<size_t>(world_.world_size()));
  world_.control().all_gather(all.data(), &mine, sizeof mine);
  for (const Signature& theirs : all) {
    if (theirs.hash != mine.hash || theirs.sequence != mine.sequence) throw_disagreement();
  }
}

/// All ranks have seen that their programs differ: says where.
void Scheduler::throw_disagreement() {
  std::string mine;
  for (size_t i = 0; i < program_.size(); ++i) {
    mine += fmt::format("{} ({} bytes)\n", program_[i], program_nbytes_[i]);
  }
  const std::vector<std::string> texts = world_.control().all_gather(mine);
  const std::string& first = texts.front();
  size_t other = 1;
  while (other + 1 < texts.size() && texts[other] == first) ++other;
  const std::string& second = texts[other];
  size_t begin = 0, i = 0;  // of the line in which character i lies
  int64_t number = 1;
  for (; i < std::min(first.size(), second.size()) && first[i] == second[i]; ++i) {
    if (first[i] == '\n') begin = i + 1, ++number;
  }
  const auto line_of = [begin](const std::string& text) {
    return begin < text.size() ? text.substr(begin, text.find('\n', begin) - begin)
                               : std::string("nothing");
  };
  throw CommError(fmt::format(
      "fsdp: the ranks issue different collectives in step {}: as number {}, rank 0 \"{}\" "
      "and rank {} \"{}\"",
      step_, number, line_of(first), other, line_of(second)));
}

/// After the first backward: the order in which the units were called replaces the registration
/// order. Where all ranks called the same, turns that none of them took fall out, and units that
/// nobody called keep a turn behind their predecessor; else the turns stay as they were issued.
void Scheduler::agree_on_order() {
  std::vector<Turn> issued, called;
  for (const Call& call : calls_) {
    int index = 0;
    while (units_[static_cast<size_t>(index)].get() != call.unit) ++index;
    for (std::vector<Turn>* turns : {&issued, &called}) {
      if (turns == &called && call.is_skipped) continue;
      if (turns->empty() || turns->back().unit != index) turns->push_back({index, 0});
      if (!call.is_skipped) ++turns->back().num_calls;
    }
  }
  const auto hash_of = [](const std::vector<Turn>& turns) {
    uint64_t hash = 0;
    for (const Turn& turn : turns) {
      hash = hash * 0x100000001b3u + static_cast<uint64_t>(turn.unit) + 1;
    }
    return hash;
  };
  struct Hashes {
    uint64_t issued, called;
  };
  const Hashes mine{hash_of(issued), hash_of(called)};
  std::vector<Hashes> all(static_cast<size_t>(world_.world_size()));
  world_.control().all_gather(all.data(), &mine, sizeof mine);
  const auto all_have = [&](uint64_t Hashes::*hash) {
    return std::all_of(all.begin(), all.end(),
                       [&](const Hashes& h) { return h.*hash == mine.*hash; });
  };
  TESSERA_CHECK_AS(CommError, all_have(&Hashes::issued),
                   "fsdp: the ranks called units in different orders in step 0");
  is_order_known_ = true;
  if (!all_have(&Hashes::called)) {
    order_ = std::move(issued);
    return;
  }
  order_ = std::move(called);
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    const auto turn_of = [this](int unit) {
      return std::find_if(order_.begin(), order_.end(),
                          [unit](const Turn& turn) { return turn.unit == unit; });
    };
    if (turn_of(u) != order_.end()) continue;
    order_.insert(u == 0 ? order_.begin() : turn_of(u - 1) + 1, Turn{u, 0});
  }
}

std::string Scheduler::program() const {
  std::string text;
  for (const std::string& line : program_) text += line + "\n";
  return text;
}

}  // namespace tessera::dist
