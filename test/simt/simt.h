#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(TESSERA_ON_DEVICE)
#include <cuda_runtime_api.h>
#else
#include "test/simt/include/vector_types.h"
#endif

// Runs CUDA kernels on the host, for tests. Each thread of a block is a fiber that runs until it
// waits; blocks run one after the other. A warp is 32 consecutive fibers, and each *_sync operation
// a rendezvous of exactly the lanes of its mask, whose last lane computes every lane's result.
//
// What the device leaves undefined shows here: the order of threads and blocks is a Schedule,
// shared memory is NaN before the first write, and bytes of cp.async are NaN until they are waited
// for. Divergent barriers, lanes missing from a mask, exited lanes, deadlocks, misaligned vectors
// and shared memory that is too small are an Error with block, thread, file and line. Accesses out
// of bounds are AddressSanitizer's to find: build with it.
//
// The tests of the kernel families also run on a device (test/cuda), where the classes for tests
// are there and do what can be done.
//
// State belongs to the thread that launches; launches of several threads do not touch each other.

namespace simt {

constexpr int kWarpSize = 32;
constexpr int kNumMultiprocessors = 4;

/// A mistake of a kernel or its launch; the text names kernel, block, thread, file and line.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The caller's file and line, as a default argument `Where where = Where::here()`.
struct Where {
  const char* file;
  int line;
  static constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// ----- for tests

/// In which order blocks, warps of a block and lanes of a warp get their turns. Forward and in
/// reverse, a warp runs until the next barrier before another warp does; at random, they mix.
enum class Order { kForward, kReverse, kRandom };

/// Schedules launches of this thread for a scope; without one the order is forward.
class Schedule {
 public:
  explicit Schedule(Order order, uint64_t seed = 1);
  ~Schedule();
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

 private:
  Order previous_order_;
  uint64_t previous_seed_;
};

/// Devices by compute capability, times 10, and the shared memory of a block.
struct Device {
  int compute_capability;
  size_t max_shared_bytes;
};
constexpr Device kDevices[] = {{80, 163 * 1024}, {86, 99 * 1024},   {89, 99 * 1024},
                               {90, 227 * 1024}, {100, 227 * 1024}, {120, 99 * 1024}};
/// What launches of this thread run on for a scope; without one it is 90.
class OnDevice {
 public:
  explicit OnDevice(const Device& device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  Device previous_;
};
/// Of a block of this thread's launches.
size_t max_shared_bytes();

/// Launches of this thread run only these blocks (linear index; negative counts from the end) for
/// a scope: OnlyBlocks({0, -1}) is the first and the last of a grid too large to run.
class OnlyBlocks {
 public:
  explicit OnlyBlocks(std::vector<int64_t> blocks);
  ~OnlyBlocks();
  OnlyBlocks(const OnlyBlocks&) = delete;
  OnlyBlocks& operator=(const OnlyBlocks&) = delete;

 private:
  std::vector<int64_t> previous_;
};

/// Counts the ldmatrix of launches of this thread in a scope: how often 8 rows were read together,
/// and how many turns more than one that took because rows lay in the same banks.
class MatrixLoads {
 public:
  MatrixLoads();
  int64_t num_reads() const;
  int64_t num_conflicts() const;

 private:
  int64_t first_read_, first_conflict_;
};

/// Zeroed memory of any size of which only touched pages cost something: buffers above 2^32 bytes.
class ReservedBuffer {
 public:
  explicit ReservedBuffer(int64_t nbytes);
  ~ReservedBuffer();
  ReservedBuffer(const ReservedBuffer&) = delete;
  ReservedBuffer& operator=(const ReservedBuffer&) = delete;
  void* data() const;
  template <class T>
  T* as() const {
    return static_cast<T*>(data());
  }
  int64_t nbytes() const { return nbytes_; }

 private:
  void* data_;
  int64_t nbytes_;
};

// ----- for launches

struct Geometry {
  dim3 grid, block;
  size_t smem_bytes = 0;
};

/// Checks the geometry, then runs `body` once for each thread of the grid, in the stream.
void launch(const char* name, const Geometry& geometry, cudaStream_t stream,
            std::function<void()> body);

/// Who runs what is put into a stream. The default runs it at once, in the calling thread.
using Launcher = std::function<void(cudaStream_t, std::function<void()>)>;
/// For the runtime that owns streams; for the whole process, before the first launch. An empty
/// function restores the default.
void set_launcher(Launcher launcher);
void enqueue(cudaStream_t stream, std::function<void()> work);

// ----- for kernels, under CUDA's names in intrinsics.h and ptx.cuh

/// One thread of a block, as far as kernels see it.
struct Thread {
  uint3 thread_idx;
  unsigned flat;  // index in the block
};
/// The running block, as far as kernels see it.
struct Block {
  uint3 block_idx;
  dim3 grid, block;
};
extern constinit thread_local Thread* current_thread;
extern constinit thread_local Block* current_block;

/// Shared memory from `byte_offset` on, where an object of `nbytes` must fit.
void* shared_memory(int64_t byte_offset, size_t nbytes, size_t alignment, Where where);
void check_aligned(const void* data, size_t alignment, const char* what, Where where);

void sync_block(Where where);
/// As sync_block; the sum over the block of `value`.
int sync_block_sum(int value, Where where);

/// The lanes of a warp that met: each lane's argument, and where its result goes.
class Lanes {
 public:
  bool has(int lane) const { return lane >= 0 && lane < kWarpSize && (mask >> lane & 1u) != 0; }
  template <class T>
  const T& in(int lane) const {
    return *static_cast<const T*>(ins[lane]);
  }
  template <class T>
  T& out(int lane) const {
    return *static_cast<T*>(outs[lane]);
  }

  uint32_t mask;
  const void* ins[kWarpSize];
  void* outs[kWarpSize];
};
using Combine = void (*)(const Lanes&);
/// Waits for the lanes of `mask`; the last one to come calls `combine`. `name` is CUDA's.
void rendezvous(const char* name, uint32_t mask, const void* in, void* out, Combine combine,
                Where where);

/// cp.async: zeros if `from` is null. The bytes land at the wait.
void copy_async(void* to_shared, const void* from, size_t nbytes, Where where);
void commit_copies();
void wait_copies(int num_pending);
/// ldmatrix of `num` 8 x 8 matrices into r[0, num).
void load_matrices(uint32_t* r, int num, const void* row, bool transposed, Where where);
/// mma.m16n8k16 on 16-bit elements that `decode` turns into f32.
void multiply_accumulate(float* d, const uint32_t* a, const uint32_t* b, const float* c,
                         float (*decode)(uint16_t), Where where);

}  // namespace simt
