#pragma once

#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "test/simt/fiber.h"
#include "test/simt/simt.h"

// Inside the emulator: the block that runs, and its threads.

namespace simt {

struct Settings {
  Device device = {90, 227 * 1024};
  Order order = Order::kForward;
  uint64_t seed = 1;
  std::vector<int64_t> only_blocks;
};

constexpr unsigned char kPoison = 0xff;  // NaN in every floating format

enum class Wait : unsigned char { kNothing, kBarrier, kWarp };

struct AsyncCopy {
  void* to;
  const void* from;  // null: zeros
  size_t nbytes;
  int group;
};

struct Machine;

/// A thread of the block: what it waits for and its copies under way.
struct ThreadState : Thread {
  Machine* machine = nullptr;
  Fiber fiber;
  Wait wait = Wait::kNothing;
  Where where{};  // of what it waits in, as the next five
  const char* name = "";
  uint32_t mask = 0;
  const void* in = nullptr;
  void* out = nullptr;
  Combine combine = nullptr;
  int barrier_value = 0;  // in: this thread's, out: the block's sum
  std::vector<AsyncCopy> copies;
  int copy_group = 0;  // of the next copies

  int lane() const { return static_cast<int>(flat) % kWarpSize; }
};

/// Shared memory of a block: poisoned, with a canary behind it.
class SharedMemory {
 public:
  explicit SharedMemory(size_t nbytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void poison();
  bool is_canary_alive() const;
  bool contains(const void* begin, size_t nbytes) const;
  unsigned char* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  const size_t nbytes_;
  unsigned char* const data_;
};

inline int64_t volume(dim3 d) {
  return static_cast<int64_t>(d.x) * d.y * d.z;
}

/// "kernels/norm/cuda.cu:12".
std::string at(Where where);

inline bool is_same(Where a, Where b) {
  return a.line == b.line && std::strcmp(a.file, b.file) == 0;
}

/// Which lanes of a warp wait in a warp operation or have exited. The first ones to wait form a
/// group, so that the common case, one group at a time, needs no look at every lane.
struct Warp {
  uint32_t waiting = 0, exited = 0;
  uint32_t group = 0;  // those of `waiting` that are in the operation of its first member
  const ThreadState* first = nullptr;
};

/// Runs blocks of one launch.
struct Machine : Block {
  Machine(const char* kernel_name, const Geometry& geometry, const std::function<void()>& kernel);

  void run_block(int64_t index, const Settings& settings);
  void start_block(int64_t index);
  /// Resumes the runnable lanes of a warp once each, in this order; whether there were any.
  bool run_warp(unsigned warp, std::span<const unsigned> lanes);
  /// Opens the barrier if everyone who is alive waits there.
  void release_barrier();
  /// The kernel has returned in `thread`.
  void finish_thread(ThreadState& thread);
  [[noreturn]] void fail(const ThreadState& thread, const std::string& problem) const;
  [[noreturn]] void fail_deadlocked() const;
  /// The thread of lane `lane` in the warp of `thread`.
  ThreadState& lane_of(const ThreadState& thread, int lane) {
    return threads[thread.flat / kWarpSize * kWarpSize + static_cast<unsigned>(lane)];
  }
  Warp& warp_of(const ThreadState& thread) { return warps[thread.flat / kWarpSize]; }

  const char* const name;
  const std::function<void()>& body;
  SharedMemory shared;
  const size_t num_threads;
  const std::unique_ptr<ThreadState[]> thread_states;
  const std::span<ThreadState> threads;
  std::vector<Warp> warps;
  size_t num_alive = 0, num_at_barrier = 0;
  std::exception_ptr failure;
};

/// The thread that runs.
inline ThreadState& self() {
  return *static_cast<ThreadState*>(current_thread);
}

}  // namespace simt
