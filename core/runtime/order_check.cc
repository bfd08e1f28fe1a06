#include "core/runtime/order_check.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

// Method. Each stream has a clock (tasks submitted so far) and a vector clock: for every other
// stream, how many of its tasks are known to be finished before this stream's next task. An event
// carries the vector clock of its record; a wait takes the maximum. An access at clock c of stream
// a happens before the next task of stream b iff b's vector clock has at least c for a. The host's
// own waits raise one more vector clock, that of every stream's later tasks.
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
  mutable std::mutex mutex;
  std::unordered_map<const EventImpl*, EventClock> events;
  size_t sweep_events_at = 1024;
  VectorClock host_known;
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
    const auto knows = [&before, i = static_cast<size_t>(before.stream)](const VectorClock& c) {
      return i < c.size() && c[i] >= before.clock;
    };
    return knows(streams[static_cast<size_t>(stream)].known) || knows(host_known);
  }

  /// What is finished once everything submitted to the stream so far is.
  VectorClock clock_of(int stream) const {
    const auto i = static_cast<size_t>(stream);
    VectorClock clock = streams[i].known;
    raise(clock, host_known);
    if (clock.size() <= i) clock.resize(i + 1);
    clock[i] = streams[i].clock;
    return clock;
  }

  const VectorClock* find(const Event& event) const {
    const auto it = events.find(event.impl());
    const bool is_same = it != events.end() && it->second.event.lock() == event.shared_impl();
    return is_same ? &it->second.clock : nullptr;
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
  std::lock_guard lock(state_->mutex);
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
  std::lock_guard lock(state_->mutex);
  auto& events = state_->events;
  if (events.size() >= state_->sweep_events_at) {
    std::erase_if(events, [](const auto& entry) { return entry.second.event.expired(); });
    state_->sweep_events_at = std::max<size_t>(1024, 2 * events.size());
  }
  events[event.impl()] = {event.shared_impl(), state_->clock_of(state_->index(stream))};
}

void OrderCheck::on_wait(const Stream& stream, const Event& event) {
  std::lock_guard lock(state_->mutex);
  const int index = state_->index(stream);
  if (const VectorClock* clock = state_->find(event)) {
    raise(state_->streams[static_cast<size_t>(index)].known, *clock);
  }
}

void OrderCheck::on_host_wait(const Stream& stream) {
  std::lock_guard lock(state_->mutex);
  raise(state_->host_known, state_->clock_of(state_->index(stream)));
}

void OrderCheck::on_host_wait(const Event& event) {
  std::lock_guard lock(state_->mutex);
  if (const VectorClock* clock = state_->find(event)) raise(state_->host_known, *clock);
}

void OrderCheck::clear(const void* data, int64_t nbytes) {
  std::lock_guard lock(state_->mutex);
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + static_cast<uintptr_t>(nbytes);
  state_->split(begin);
  state_->split(end);
  auto it = state_->pieces.lower_bound(begin);
  while (it != state_->pieces.end() && it->first < end) it = state_->pieces.erase(it);
}

std::vector<std::string> OrderCheck::conflicts() const {
  std::lock_guard lock(state_->mutex);
  return state_->conflicts;
}

void OrderCheck::throw_if_conflicts() const {
  const std::vector<std::string> found = conflicts();
  if (found.empty()) return;
  throw InternalError(
      fmt::format("order check: {} conflicts, the first: {}", found.size(), found.front()));
}

}  // namespace tessera
