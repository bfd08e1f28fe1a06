#include "dist/comm/node_board.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "core/check.h"

namespace tessera::dist {

namespace {

// As long as waking a thread that sleeps takes: whoever comes a little late would otherwise cost
// the others that, which then come late to the next meeting.
constexpr std::chrono::microseconds kSpin{50};
constexpr timespec kAbortPeriod{0, 20'000'000};  // between looks for an end of the World

}  // namespace

// What all ranks write; in the part of the first.
struct alignas(64) NodeBoard::Shared {
  std::atomic<uint32_t> generation{0};  // the word that ranks sleep on
  std::atomic<uint32_t> num_sleeping{0};
  alignas(64) std::atomic<uint32_t> num_arrived{0};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

// Of one rank. Two places in turn: who is in the next call has read the one before, and nobody is
// in the one after that.
struct NodeBoard::Part {
  Shared shared;
  Published published[2];
  alignas(64) std::byte carried[2][kInlineNbytes];
};

int64_t NodeBoard::make_part(NodeMemory& memory) {
  void* data = memory.allocate(sizeof(Part));
  if (data == nullptr) throw CommError("World: no shared memory left for a communicator");
  auto* part = new (data) Part;  // the carried bytes are not touched
  return memory.offset_of(part);
}

NodeBoard::NodeBoard(NodeMemory& memory, const Members& members, int world_size, int me,
                     std::function<void()> throw_if_aborted)
    : Board(members.ranks, members.world_ranks, world_size, me),
      memory_(memory),
      node_ranks_(members.node_ranks),
      throw_if_aborted_(std::move(throw_if_aborted)) {
  for (size_t i = 0; i < node_ranks_.size(); ++i)
    parts_.push_back(reinterpret_cast<Part*>(memory_.at(node_ranks_[i], members.parts[i])));
}

void NodeBoard::begin(const Call&) {
  turn_ ^= 1;
}

NodeBoard::Published& NodeBoard::own_slot() {
  return parts_[static_cast<size_t>(me())]->published[turn_];
}
const NodeBoard::Published& NodeBoard::published(int place) const {
  return parts_[static_cast<size_t>(place)]->published[turn_];
}

int64_t NodeBoard::publish_data(const Call& call) {
  if (call.data_nbytes > kInlineNbytes) {
    const int64_t offset = memory_.offset_of(call.data);
    return offset >= 0 ? offset : kNowhere;
  }
  if (call.data_nbytes > 0) {
    std::memcpy(parts_[static_cast<size_t>(me())]->carried[turn_], call.data,
                static_cast<size_t>(call.data_nbytes));
  }
  return kCarried;
}

const void* NodeBoard::data_at(int place, int64_t where) const {
  if (where == kCarried) return parts_[static_cast<size_t>(place)]->carried[turn_];
  return memory_.at(node_ranks_[static_cast<size_t>(place)], where);
}

void NodeBoard::meet() {
  Shared& shared = parts_.front()->shared;
  const uint32_t generation = shared.generation.load(std::memory_order_relaxed);
  if (shared.num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == parts_.size()) {
    shared.num_arrived.store(0, std::memory_order_relaxed);
    shared.generation.store(generation + 1);
    if (shared.num_sleeping.load() > 0) {
      syscall(SYS_futex, &shared.generation, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }
    return;
  }
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    if (shared.generation.load(std::memory_order_acquire) != generation) return;
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  sleep(generation);
}

void NodeBoard::leave(int64_t nbytes) {
  if (!is_carried(nbytes)) meet();
}

void NodeBoard::sleep(uint32_t generation) {
  Shared& shared = parts_.front()->shared;
  shared.num_sleeping.fetch_add(1);
  while (shared.generation.load() == generation) {
    throw_if_aborted_();  // which leaves num_sleeping too high: wakes for nobody, in a dying World
    syscall(SYS_futex, &shared.generation, FUTEX_WAIT, generation, &kAbortPeriod, nullptr, 0);
  }
  shared.num_sleeping.fetch_sub(1);
}

}  // namespace tessera::dist
