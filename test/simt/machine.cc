// The scheduler. Warps get their turns in the order of the schedule, and so do the lanes of a warp.
// A warp that has its turn runs as far ahead of the others as it can, so that what orders two warps
// must be a barrier, not the number of operations before it. A block in which nobody can run is
// deadlocked.
#include "test/simt/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <new>
#include <numeric>
#include <random>
#include <string_view>

#include "test/simt/asan.h"

namespace simt {
namespace {

constexpr unsigned char kCanary = 0xa5;  // behind shared memory
constexpr size_t kCanaryBytes = 1024;
constexpr size_t kSharedAlignment = 128;

uint3 unflatten(int64_t index, dim3 dims) {
  return {static_cast<unsigned>(index % dims.x), static_cast<unsigned>(index / dims.x % dims.y),
          static_cast<unsigned>(index / dims.x / dims.y)};
}

void run_thread(void* argument) {
  auto& thread = *static_cast<ThreadState*>(argument);
  Machine& machine = *thread.machine;
  try {
    machine.body();
    machine.finish_thread(thread);
  } catch (...) {
    if (machine.failure == nullptr) machine.failure = std::current_exception();
  }
}

}  // namespace

SharedMemory::SharedMemory(size_t nbytes)
    : nbytes_(nbytes),
      data_(static_cast<unsigned char*>(
          ::operator new (nbytes + kCanaryBytes, std::align_val_t{kSharedAlignment}))) {
  std::memset(data_ + nbytes_, kCanary, kCanaryBytes);
  asan::poison(data_ + nbytes_, kCanaryBytes);
}

SharedMemory::~SharedMemory() {
  asan::unpoison(data_ + nbytes_, kCanaryBytes);
  ::operator delete (data_, std::align_val_t{kSharedAlignment});
}

void SharedMemory::poison() {
  std::memset(data_, kPoison, nbytes_);
}

bool SharedMemory::is_canary_alive() const {
  return std::all_of(data_ + nbytes_, data_ + nbytes_ + kCanaryBytes,
                     [](unsigned char byte) { return byte == kCanary; });
}

bool SharedMemory::contains(const void* begin, size_t nbytes) const {
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const auto first = reinterpret_cast<uintptr_t>(data_);
  return address >= first && address + nbytes <= first + nbytes_;
}

std::string at(Where where) {
  // From the root of the tree, as this file's own path tells it.
  constexpr std::string_view own = __FILE__, name = "test/simt/machine.cc";
  constexpr std::string_view root = own.substr(0, own.size() - name.size());
  std::string_view file = where.file;
  if (file.substr(0, root.size()) == root) file.remove_prefix(root.size());
  return fmt::format("{}:{}", file, where.line);
}

Machine::Machine(const char* kernel_name, const Geometry& geometry,
                 const std::function<void()>& kernel)
    : name(kernel_name),
      body(kernel),
      shared(geometry.smem_bytes),
      num_threads(static_cast<size_t>(volume(geometry.block))),
      thread_states(std::make_unique<ThreadState[]>(num_threads)),
      threads(thread_states.get(), num_threads),
      warps(num_threads / kWarpSize) {
  grid = geometry.grid;
  block = geometry.block;
  for (size_t i = 0; i < num_threads; ++i) {
    ThreadState& thread = threads[i];
    thread.machine = this;
    thread.flat = static_cast<unsigned>(i);
    thread.thread_idx = unflatten(static_cast<int64_t>(i), block);
  }
}

void Machine::fail(const ThreadState& thread, const std::string& problem) const {
  throw Error(fmt::format("{}: block [{}, {}, {}] thread {}: {}", name, block_idx.x, block_idx.y,
                          block_idx.z, thread.flat, problem));
}

void Machine::finish_thread(ThreadState& thread) {
  --num_alive;
  Warp& warp = warp_of(thread);
  warp.exited |= 1u << thread.lane();
  if (warp.waiting == 0) return;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const ThreadState& other = lane_of(thread, lane);
    if (other.wait == Wait::kWarp && (other.mask >> thread.lane() & 1u) != 0) {
      fail(other, fmt::format("{} with mask {:#010x} at {}, but lane {} has exited", other.name,
                              other.mask, at(other.where), thread.lane()));
    }
  }
}

void Machine::release_barrier() {
  if (num_at_barrier == 0 || num_at_barrier < num_alive) return;
  const ThreadState* first = nullptr;
  int sum = 0;
  for (const ThreadState& thread : threads) {
    if (thread.wait != Wait::kBarrier) continue;
    if (first == nullptr) first = &thread;
    if (!is_same(thread.where, first->where)) {
      fail(thread, fmt::format("divergent __syncthreads: at {}, but thread {} is at {}",
                               at(thread.where), first->flat, at(first->where)));
    }
    sum += thread.barrier_value;
  }
  for (ThreadState& thread : threads) {
    if (thread.wait != Wait::kBarrier) continue;
    thread.wait = Wait::kNothing;
    thread.barrier_value = sum;
  }
  num_at_barrier = 0;
}

void Machine::fail_deadlocked() const {
  constexpr int kMaxShown = 4;
  std::string text = "deadlock:";
  const ThreadState* first = nullptr;
  int num_shown = 0;
  Where last{"", 0};
  for (const ThreadState& thread : threads) {
    if (thread.fiber.is_done() || is_same(thread.where, last) || num_shown == kMaxShown) continue;
    if (first == nullptr) first = &thread;
    text += fmt::format("{} thread {} waits in {} at {}", num_shown == 0 ? "" : ",", thread.flat,
                        thread.wait == Wait::kBarrier ? "__syncthreads" : thread.name,
                        at(thread.where));
    last = thread.where;
    ++num_shown;
  }
  fail(*first, text);
}

bool Machine::run_warp(unsigned warp, std::span<const unsigned> lanes) {
  bool has_run = false;
  for (const unsigned lane : lanes) {
    ThreadState& thread = threads[warp * kWarpSize + lane];
    if (thread.fiber.is_done() || thread.wait != Wait::kNothing) continue;
    has_run = true;
    current_thread = &thread;
    thread.fiber.resume();
    if (failure != nullptr) std::rethrow_exception(failure);
  }
  return has_run;
}

void Machine::start_block(int64_t index) {
  block_idx = unflatten(index, grid);
  num_alive = threads.size();
  num_at_barrier = 0;
  std::fill(warps.begin(), warps.end(), Warp{});
  for (ThreadState& thread : threads) {
    thread.wait = Wait::kNothing;
    thread.copies.clear();
    thread.copy_group = 0;
    thread.fiber.start(run_thread, &thread);
  }
  shared.poison();
}

void Machine::run_block(int64_t index, const Settings& s) {
  start_block(index);
  std::vector<unsigned> warp_turns(warps.size());
  std::iota(warp_turns.begin(), warp_turns.end(), 0u);
  std::array<unsigned, kWarpSize> lane_turns;
  std::iota(lane_turns.begin(), lane_turns.end(), 0u);
  if (s.order == Order::kReverse) {
    std::reverse(warp_turns.begin(), warp_turns.end());
    std::reverse(lane_turns.begin(), lane_turns.end());
  }
  std::mt19937_64 random(s.seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(index));
  while (num_alive > 0) {
    const bool is_random = s.order == Order::kRandom;
    if (is_random) std::shuffle(warp_turns.begin(), warp_turns.end(), random);
    bool has_run = false;
    for (const unsigned warp : warp_turns) {
      // In order a warp runs on as far as it can, in random order 0 to 3 times.
      const uint64_t max_runs = is_random ? random() % 4 : ~uint64_t{0};
      for (uint64_t run = 0; run < max_runs; ++run) {
        if (is_random) std::shuffle(lane_turns.begin(), lane_turns.end(), random);
        if (!run_warp(warp, lane_turns)) break;
        has_run = true;
      }
    }
    release_barrier();
    const auto is_runnable = [](const ThreadState& thread) {
      return !thread.fiber.is_done() && thread.wait == Wait::kNothing;
    };
    if (!has_run && num_alive > 0 && std::none_of(threads.begin(), threads.end(), is_runnable)) {
      fail_deadlocked();
    }
  }
  if (!shared.is_canary_alive()) {
    fail(self(),
         fmt::format("a thread wrote behind the {} bytes of shared memory", shared.nbytes()));
  }
}

}  // namespace simt
