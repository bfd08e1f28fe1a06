#pragma once

#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/reduce.cuh"
#include "kernels/rows.h"

// Rows of the last dimension on the device: what row-wise kernels (norm, softmax) share.

namespace tessera::kernels::cuda {
inline namespace TESSERA_CUDA_BODY {

/// a / b for a >= 0, b > 0. Most of the time both fit 32 bits, where it costs a quarter.
__device__ inline int64_t divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) {
    return static_cast<int64_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
  }
  return a / b;
}

/// RowLayout::offset.
__device__ inline int64_t row_offset(const RowLayout& layout, int64_t row) {
  if (layout.inner == 1) return row * layout.outer_stride;
  const int64_t outer = divide(row, layout.inner);
  return outer * layout.outer_stride + (row - outer * layout.inner) * layout.inner_stride;
}

/// Whether N elements of `element_nbytes` bytes at a multiple of N of any row are a 16-byte vector.
inline bool rows_are_aligned(const void* data, const RowLayout& layout, int64_t element_nbytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
         layout.inner_stride * element_nbytes % 16 == 0 &&
         layout.outer_stride * element_nbytes % 16 == 0;
}

/// How a block's threads are dealt to rows: groups of `threads` (a power of two), a row each.
struct RowGeometry {
  int threads;  ///< of a row, at most 1024
  int block;    ///< of a block: as many rows as fit 256 threads
  int rows() const { return block / threads; }

  /// For rows of `num_items` items of which a thread takes `items_per_thread`.
  static RowGeometry choose(int64_t num_items, int64_t items_per_thread, int max_threads) {
    constexpr int kBlock = 256, kSectorLanes = 8;  // 8 lanes of 16 bytes are one 128-byte line
    int threads = 1;
    while (threads < max_threads && threads * items_per_thread < num_items) threads *= 2;
    while (threads < kSectorLanes && threads < num_items) threads *= 2;
    return {threads, std::max(threads, kBlock)};
  }
};

/// One thread's place among the threads of its row, and reductions over them. Every thread of the
/// block takes part in every call. Order: the butterfly over lanes, then over warps; it depends on
/// the geometry only.
class RowGroup {
 public:
  static constexpr int kMaxWarps = 32, kMaxValues = 2;
  /// Shared memory for reductions of up to kMaxValues values at once.
  static constexpr int64_t kSmemBytes =
      2 * kMaxValues * kMaxWarps * static_cast<int64_t>(sizeof(float));

  __device__ RowGroup(int threads, float* smem)
      : threads_(threads),
        lane_(static_cast<int>(threadIdx.x) & (threads - 1)),
        index_(static_cast<int>(threadIdx.x) / threads),
        smem_(smem) {}

  __device__ int threads() const { return threads_; }
  __device__ int lane() const { return lane_; }    ///< of the row's threads
  __device__ int index() const { return index_; }  ///< of the block's rows

  /// Replaces each of the values by its sum over the row's threads.
  template <int N>
  __device__ void sum(float (&values)[N]) {
    reduce(values, tessera::cuda::detail::Sum{});
  }
  __device__ float sum(float value) {
    float values[1] = {value};
    sum(values);
    return values[0];
  }
  __device__ float max(float value) {
    float values[1] = {value};
    reduce(values, tessera::cuda::detail::Max{});
    return values[0];
  }

 private:
  template <int N, class Op>
  __device__ void reduce(float (&values)[N], Op op) {
    static_assert(N <= kMaxValues);
    constexpr int kWarp = tessera::cuda::kWarpSize;
    butterfly(values, threads_ < kWarp ? threads_ : kWarp, op);
    if (threads_ <= kWarp) return;
    // Two buffers in turn: whoever writes one has passed the barrier after the reads of the other,
    // so that one barrier a reduction is enough.
    float* smem = smem_ + (is_odd_ ? kMaxValues * kMaxWarps : 0);
    is_odd_ = !is_odd_;
    const int warps = threads_ / kWarp, lane = lane_ % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) smem[i * kMaxWarps + warp] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] = smem[i * kMaxWarps + index_ * warps + (lane & (warps - 1))];
    }
    butterfly(values, warps, op);
  }

  template <int N, class Op>
  __device__ static void butterfly(float (&values)[N], int width, Op op) {
    for (int distance = width / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        values[i] = op(values[i], __shfl_xor_sync(tessera::cuda::kFullMask, values[i], distance));
      }
    }
  }

  int threads_, lane_, index_;
  bool is_odd_ = false;
  float* smem_;
};

}  // namespace TESSERA_CUDA_BODY
}  // namespace tessera::kernels::cuda
