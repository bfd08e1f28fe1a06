// What threads of a block do together: barriers, warp operations, asynchronous copies, matrices.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "test/simt/asan.h"
#include "test/simt/machine.h"
#include "test/simt/simt.h"

namespace simt {

void* shared_memory(int64_t byte_offset, size_t nbytes, size_t alignment, Where where) {
  const ThreadState& thread = self();
  const SharedMemory& shared = thread.machine->shared;
  const auto offset = static_cast<size_t>(byte_offset);
  if (byte_offset < 0 || offset + nbytes > shared.nbytes()) {
    thread.machine->fail(
        thread,
        fmt::format("dynamic_smem at byte {} for an element of {} bytes, but the launch has "
                    "{} bytes of shared memory, at {}",
                    byte_offset, nbytes, shared.nbytes(), at(where)));
  }
  check_aligned(shared.data() + offset, alignment, "dynamic_smem", where);
  return shared.data() + offset;
}

void check_aligned(const void* data, size_t alignment, const char* what, Where where) {
  if (reinterpret_cast<uintptr_t>(data) % alignment == 0) return;
  const ThreadState& thread = self();
  thread.machine->fail(thread, fmt::format("{} at {} is not aligned to {} bytes, at {}", what, data,
                                           alignment, at(where)));
}

int sync_block_sum(int value, Where where) {
  ThreadState& thread = self();
  thread.wait = Wait::kBarrier;
  thread.where = where;
  thread.barrier_value = value;
  ++thread.machine->num_at_barrier;
  while (thread.wait == Wait::kBarrier) thread.fiber.yield();
  return thread.barrier_value;
}

void sync_block(Where where) {
  sync_block_sum(0, where);
}

namespace {

/// Whether `thread` completes its operation: all lanes of its mask wait in the same one.
bool completes(Machine& machine, ThreadState& thread) {
  Warp& warp = machine.warp_of(thread);
  const uint32_t mask = thread.mask, bit = 1u << thread.lane();
  const auto fail = [&](const std::string& but) {
    machine.fail(thread, fmt::format("{} with mask {:#010x} at {}, but {}", thread.name, mask,
                                     at(thread.where), but));
  };
  const auto is_same_operation = [&](const ThreadState& other) {
    return other.mask == mask && other.combine == thread.combine &&
           is_same(other.where, thread.where);
  };
  if ((mask & bit) == 0) fail("the calling lane is not in it");
  if (const uint32_t exited = mask & warp.exited; exited != 0) {
    fail(fmt::format("lane {} has exited", std::countr_zero(exited)));
  }
  const uint32_t others = warp.waiting;
  warp.waiting |= bit;
  if (others == 0) {
    warp.first = &thread;
    warp.group = bit;
    return warp.group == mask;
  }
  if (warp.group != 0 && is_same_operation(*warp.first)) {
    warp.group |= bit;
    return warp.group == mask;
  }
  bool is_last = true;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (lane == thread.lane() || (mask >> lane & 1u) == 0) continue;
    // A lane may meet others first, if this one is not among them.
    const ThreadState& other = machine.lane_of(thread, lane);
    const bool names_this = other.wait == Wait::kWarp && (other.mask & bit) != 0;
    if (names_this && !is_same_operation(other)) {
      fail(fmt::format("lane {} is in {} with mask {:#010x} at {}", lane, other.name, other.mask,
                       at(other.where)));
    }
    is_last = is_last && names_this;
  }
  return is_last;
}

}  // namespace

void rendezvous(const char* name, uint32_t mask, const void* in, void* out, Combine combine,
                Where where) {
  ThreadState& thread = self();
  Machine& machine = *thread.machine;
  thread.wait = Wait::kWarp;
  thread.where = where;
  thread.name = name;
  thread.mask = mask;
  thread.in = in;
  thread.out = out;
  thread.combine = combine;
  if (completes(machine, thread)) {
    Lanes lanes{mask, {}, {}};
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (!lanes.has(lane)) continue;
      ThreadState& other = machine.lane_of(thread, lane);
      lanes.ins[lane] = other.in;
      lanes.outs[lane] = other.out;
      other.wait = Wait::kNothing;
    }
    Warp& warp = machine.warp_of(thread);
    warp.waiting &= ~mask;
    if ((warp.group & mask) != 0) warp.group = 0;
    combine(lanes);
  }
  while (thread.wait == Wait::kWarp) thread.fiber.yield();
}

void copy_async(void* to_shared, const void* from, size_t nbytes, Where where) {
  ThreadState& thread = self();
  const Machine& machine = *thread.machine;
  check_aligned(to_shared, nbytes, "cp.async to shared memory", where);
  if (!machine.shared.contains(to_shared, nbytes)) {
    machine.fail(thread, fmt::format("cp.async to {}, outside the {} bytes of shared memory, at {}",
                                     to_shared, machine.shared.nbytes(), at(where)));
  }
  if (from != nullptr) {
    check_aligned(from, nbytes, "cp.async from global memory", where);
    // Here, because the copy itself is made elsewhere.
    if (asan::is_poisoned(from, nbytes)) {
      machine.fail(thread,
                   fmt::format("cp.async reads {} bytes at {}, out of bounds or after they were "
                               "freed, at {}",
                               nbytes, from, at(where)));
    }
  }
  std::memset(to_shared, kPoison, nbytes);
  thread.copies.push_back({to_shared, from, nbytes, thread.copy_group});
}

void commit_copies() {
  ++self().copy_group;
}

void wait_copies(int num_pending) {
  ThreadState& thread = self();
  std::erase_if(thread.copies, [&](const AsyncCopy& copy) {
    if (copy.group >= thread.copy_group - num_pending) return false;
    if (copy.from == nullptr) {
      std::memset(copy.to, 0, copy.nbytes);
    } else {
      std::memcpy(copy.to, copy.from, copy.nbytes);
    }
    return true;
  });
}

namespace {

thread_local int64_t num_matrix_reads = 0, num_matrix_conflicts = 0;

/// Rows of 16 bytes take one turn together unless two lie in the same 16 of 128 bytes.
void count_conflicts(const Lanes& lanes, int matrix) {
  int turns = 0;
  for (int row = 0; row < 8; ++row) {
    const auto* own = lanes.in<const unsigned char*>(8 * matrix + row);
    int num_same = 1;
    for (int other = 0; other < row; ++other) {
      const auto* data = lanes.in<const unsigned char*>(8 * matrix + other);
      if (data != own && (data - own) % 128 == 0) ++num_same;
    }
    turns = std::max(turns, num_same);
  }
  ++num_matrix_reads;
  num_matrix_conflicts += turns - 1;
}

template <int kNum, bool kTransposed>
void combine_matrices(const Lanes& lanes) {
  for (int i = 0; i < kNum; ++i) count_conflicts(lanes, i);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < kNum; ++i) {
      const auto element = [&](int row, int column) {
        uint16_t value = 0;
        std::memcpy(&value, lanes.in<const unsigned char*>(8 * i + row) + 2 * column, 2);
        return static_cast<uint32_t>(value);
      };
      const uint32_t lo = kTransposed ? element(2 * t, g) : element(g, 2 * t);
      const uint32_t hi = kTransposed ? element(2 * t + 1, g) : element(g, 2 * t + 1);
      (&lanes.out<uint32_t>(lane))[i] = lo | hi << 16;
    }
  }
}

struct MmaOperands {
  const uint32_t *a, *b;
  const float* c;
  float (*decode)(uint16_t);
};

void combine_mma(const Lanes& lanes) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& in = lanes.in<MmaOperands>(lane);
    const int g = lane / 4, t = lane % 4;
    const auto element = [&](uint32_t word, int e) {
      return in.decode(static_cast<uint16_t>(word >> (16 * e)));
    };
    for (int e = 0; e < 2; ++e) {
      for (int i = 0; i < 4; ++i) a[g + 8 * (i % 2)][2 * t + e + 8 * (i / 2)] = element(in.a[i], e);
      for (int i = 0; i < 2; ++i) b[2 * t + e + 8 * i][g] = element(in.b[i], e);
    }
  }
  float d[kWarpSize][4];  // first all results: d may be c
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      float sum = lanes.in<MmaOperands>(lane).c[i];
      for (int k = 0; k < 16; ++k) sum += a[g + 8 * (i / 2)][k] * b[k][2 * t + i % 2];
      d[lane][i] = sum;
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    std::memcpy(&lanes.out<float>(lane), d[lane], sizeof(d[lane]));
  }
}

}  // namespace

MatrixLoads::MatrixLoads() : first_read_(num_matrix_reads), first_conflict_(num_matrix_conflicts) {}

int64_t MatrixLoads::num_reads() const {
  return num_matrix_reads - first_read_;
}

int64_t MatrixLoads::num_conflicts() const {
  return num_matrix_conflicts - first_conflict_;
}

void load_matrices(uint32_t* r, int num, const void* row, bool transposed, Where where) {
  constexpr size_t kRowBytes = 16;
  const ThreadState& thread = self();
  if (thread.lane() < 8 * num) {
    check_aligned(row, kRowBytes, "ldmatrix row", where);
    if (!thread.machine->shared.contains(row, kRowBytes)) {
      thread.machine->fail(
          thread, fmt::format("ldmatrix row at {}, outside the {} bytes of shared memory, at {}",
                              row, thread.machine->shared.nbytes(), at(where)));
    }
  }
  Combine combine = nullptr;
  if (num == 4) {
    combine = transposed ? combine_matrices<4, true> : combine_matrices<4, false>;
  } else {
    combine = transposed ? combine_matrices<2, true> : combine_matrices<2, false>;
  }
  rendezvous("ldmatrix", 0xffffffffu, &row, r, combine, where);
}

void multiply_accumulate(float* d, const uint32_t* a, const uint32_t* b, const float* c,
                         float (*decode)(uint16_t), Where where) {
  const MmaOperands operands{a, b, c, decode};
  rendezvous("mma", 0xffffffffu, &operands, d, combine_mma, where);
}

}  // namespace simt
