#include "core/runtime/order_check.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <unordered_map>

// Method. Each stream has a clock (tasks submitted so far) and a vector clock: for every other
// stream, how many of its tasks are known to be finished before this stream's next task. An event
// carries the vector clock of its record; a wait takes the maximum. An access at clock c of stream
// a happens before the next task of stream b iff b's vector clock has at least c for a.
// Ranges live in an interval map that is split at access boundaries. To keep it small, a write that
// covers pieces merges them into one.

namespace tessera {
namespace {

constexpr size_t kMaxConflicts = 100;
using VectorClock = std::vector<uint64_t>;  // by dense stream index

void raise(VectorClock& to, const VectorClock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

struct LastAccess {
  int stream = -1;  // dense index
  uint64_t clock = 0;
  const char* name = "";
};

struct Piece {
  uintptr_t end;
  LastAccess writer;
  std::vector<LastAccess> readers;  // the last one of each stream since the write
};

}  // namespace

struct OrderCheck::State {
  struct StreamState {
    std::string name;
    uint64_t clock = 0;
    VectorClock known;
  };
  std::vector<StreamState> streams;
  std::unordered_map<int, int> index_of_stream;
  struct EventClock {
    std::weak_ptr<EventImpl> event;  // expired: the address may be another event's
    VectorClock clock;
  };
  std::unordered_map<const EventImpl*, EventClock> events;
  std::map<uintptr_t, Piece> pieces;  // disjoint, by begin
  std::vector<std::string> conflicts;

  int index(const Stream& stream) {
    const auto [it, is_new] =
        index_of_stream.try_emplace(stream.id(), static_cast<int>(streams.size()));
    if (is_new) streams.push_back({stream.name(), 0, {}});
    return it->second;
  }

  bool is_ordered(const LastAccess& before, int stream) const {
    if (before.stream < 0 || before.stream == stream) return true;
    const VectorClock& known = streams[static_cast<size_t>(stream)].known;
    const auto i = static_cast<size_t>(before.stream);
    return i < known.size() && known[i] >= before.clock;
  }

  void report(const char* name, int stream, bool is_write, const LastAccess& before,
              bool before_writes) {
    std::string line = fmt::format(
        "{} ({}) {} bytes that {} ({}) {}: no event orders them", name,
        streams[static_cast<size_t>(stream)].name, is_write ? "writes" : "reads", before.name,
        streams[static_cast<size_t>(before.stream)].name, before_writes ? "wrote" : "read");
    if (conflicts.size() < kMaxConflicts &&
        std::find(conflicts.begin(), conflicts.end(), line) == conflicts.end()) {
      conflicts.push_back(std::move(line));
    }
  }

  /// Splits the piece that contains `at`, if any, so that a piece begins there.
  void split(uintptr_t at) {
    auto it = pieces.upper_bound(at);
    if (it == pieces.begin()) return;
    --it;
    if (it->first == at || it->second.end <= at) return;
    Piece tail = it->second;
    it->second.end = at;
    pieces.emplace(at, std::move(tail));
  }

  void access(const Access& a, int stream, const LastAccess& now) {
    const auto begin = reinterpret_cast<uintptr_t>(a.data);
    const uintptr_t end = begin + static_cast<uintptr_t>(a.nbytes);
    split(begin);
    split(end);
    auto it = pieces.lower_bound(begin);
    if (a.is_write) {
      for (auto p = it; p != pieces.end() && p->first < end; p = pieces.erase(p)) {
        if (!is_ordered(p->second.writer, stream)) {
          report(now.name, stream, true, p->second.writer, true);
        }
        for (const LastAccess& reader : p->second.readers) {
          if (!is_ordered(reader, stream)) report(now.name, stream, true, reader, false);
        }
      }
      pieces.emplace(begin, Piece{end, now, {}});
      return;
    }
    uintptr_t at = begin;  // reads also cover gaps, so that a later unordered write is seen
    while (at < end) {
      it = pieces.lower_bound(at);
      if (it == pieces.end() || it->first > at) {
        const uintptr_t gap_end = it == pieces.end() ? end : std::min(end, it->first);
        it = pieces.emplace(at, Piece{gap_end, {}, {}}).first;
      }
      Piece& piece = it->second;
      if (!is_ordered(piece.writer, stream)) report(now.name, stream, false, piece.writer, true);
      const auto reader = std::find_if(piece.readers.begin(), piece.readers.end(),
                                       [&](const LastAccess& r) { return r.stream == stream; });
      if (reader == piece.readers.end()) {
        piece.readers.push_back(now);
      } else {
        *reader = now;
      }
      at = piece.end;
    }
  }
};

OrderCheck::OrderCheck() : state_(std::make_unique<State>()) {}
OrderCheck::~OrderCheck() = default;

void OrderCheck::on_task(const Stream& stream, const char* name, const Cost& cost) {
  const int index = state_->index(stream);
  auto& s = state_->streams[static_cast<size_t>(index)];
  const LastAccess now{index, ++s.clock, name};
  for (const Access& a : cost.accesses()) {
    if (!a.is_write) state_->access(a, index, now);
  }
  for (const Access& a : cost.accesses()) {
    if (a.is_write) state_->access(a, index, now);
  }
}

void OrderCheck::on_record(const Stream& stream, const Event& event) {
  const int index = state_->index(stream);
  auto& s = state_->streams[static_cast<size_t>(index)];
  VectorClock clock = s.known;
  if (clock.size() <= static_cast<size_t>(index)) clock.resize(static_cast<size_t>(index) + 1);
  clock[static_cast<size_t>(index)] = s.clock;
  auto& events = state_->events;
  if (events.size() > 4096) {
    std::erase_if(events, [](const auto& entry) { return entry.second.event.expired(); });
  }
  events[event.impl()] = {event.shared_impl(), std::move(clock)};
}

void OrderCheck::on_wait(const Stream& stream, const Event& event) {
  const auto it = state_->events.find(event.impl());
  if (it == state_->events.end() || it->second.event.lock() != event.shared_impl()) return;
  raise(state_->streams[static_cast<size_t>(state_->index(stream))].known, it->second.clock);
}

void OrderCheck::clear(const void* data, int64_t nbytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + static_cast<uintptr_t>(nbytes);
  state_->split(begin);
  state_->split(end);
  auto it = state_->pieces.lower_bound(begin);
  while (it != state_->pieces.end() && it->first < end) it = state_->pieces.erase(it);
}

const std::vector<std::string>& OrderCheck::conflicts() const {
  return state_->conflicts;
}

void OrderCheck::throw_if_conflicts() const {
  if (state_->conflicts.empty()) return;
  throw InternalError(fmt::format("order check: {} conflicts, the first: {}",
                                  state_->conflicts.size(), state_->conflicts.front()));
}

}  // namespace tessera
