// Sums and norms.
//
//   sum           dst[o, i] = factor sum_n x[o, n, i]: along contiguous memory (inner = 1), or over
//                 rows of columns
//   partial_norm  sum |x|^p, max |x|, over the segments of a flat buffer
//   mark_nonfinite  marks that a buffer has an infinity or a NaN
//   checksum      sum bits(x) weight(index) mod 2^64, of each segment
//
// Layout           vectors of 16 bytes, 4 of them under way a thread. f32 over at most 32 terms of
//                  one thread, f64 from there on.
// Parallelization  sum: a task is a (row, chunk of the length, 128 or 256 columns), for a warp if
//                  it is short and else for a block; chunks go through `partials`, which a second
//                  kernel adds in order. partial_norm: the segments' 256-element blocks, counted
//                  through all segments, are dealt to at most 1024 chunks, one a block; a warp
//                  takes a 256-element block at a time. checksum: 64 blocks a segment, each an even
//                  part of it, add what they have to the segment's sum by one atomic.
// Determinism      every order depends on the shape, or on the segments' lengths, only: not on the
//                  device, an address or the rest of the buffer. So a norm is the same whether a
//                  chunk lies in its shard or in the full buffer. Sums of integers have no order.

#include <cmath>

#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/reduce.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/reduce/kernel.h"
#include "kernels/rows.cuh"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::block_sum;
using tessera::cuda::ceil_div;
using tessera::cuda::dynamic_smem;
using tessera::cuda::grid_blocks;
using tessera::cuda::kFullMask;
using tessera::cuda::kVec;
using tessera::cuda::kWarpSize;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;
using tessera::cuda::to_float;
using tessera::cuda::warp_sum;

constexpr int kBlock = 256;
constexpr int kWarps = kBlock / kWarpSize;

/// The first `count` of N elements as f32, zero behind them; one access where that is allowed.
template <int N, class T>
__device__ Floats<N> load_some(const T* from, int64_t count, bool is_aligned) {
  if (is_aligned && count >= N) return load_floats<N>(from);
  Floats<N> values;
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = i < count ? to_float(from[i]) : 0.0f;
  return values;
}

/// dst[at] = total, or += in f64; one rounding.
template <class T>
__device__ void store_total(T* dst, double total, bool accumulate) {
  if (accumulate) total += static_cast<double>(to_float(*dst));
  *dst = tessera::cuda::from_float<T>(static_cast<float>(total));
}
__device__ void store_total(const Sum& p, int64_t at, double total) {
  total *= p.factor;
  if (p.dst_dtype == kF32) {
    store_total(static_cast<float*>(p.dst) + at, total, p.accumulate);
  } else if (p.dst_dtype == kBF16) {
    store_total(static_cast<BFloat16*>(p.dst) + at, total, p.accumulate);
  } else {
    store_total(static_cast<Float16*>(p.dst) + at, total, p.accumulate);
  }
}

// ---- sums ---------------------------------------------------------------------------------------

/// How the length is cut: `chunks` pieces of `chunk_length`, a multiple of 256, the last shorter or
/// empty.
struct SumChunks {
  int64_t chunks, chunk_length;
};

/// Terms of one chunk: `count` from `begin` on.
struct SumRange {
  int64_t begin, count;
};
__device__ SumRange range_of(const Sum& p, const SumChunks& c, int64_t chunk) {
  const int64_t begin = min(chunk * c.chunk_length, p.length);
  return {begin, min(c.chunk_length, p.length - begin)};
}

/// inner = 1. Task = (o, chunk), for kTaskThreads threads: a warp or the block.
template <class T, int kTaskThreads>
__global__ void __launch_bounds__(kBlock) sum_row_kernel(Sum p, SumChunks c, bool is_aligned) {
  constexpr int N = kVec<T>, kUnroll = 4;
  const int lane = static_cast<int>(threadIdx.x) % kTaskThreads;
  const int64_t task = static_cast<int64_t>(blockIdx.x) * (kBlock / kTaskThreads) +
                       static_cast<int>(threadIdx.x) / kTaskThreads;
  const int64_t o = divide(task, c.chunks), chunk = task - o * c.chunks;
  const SumRange range = o < p.outer ? range_of(p, c, chunk) : SumRange{0, 0};
  const T* x = static_cast<const T*>(p.x) + (range.count > 0 ? o * p.length + range.begin : 0);
  double total = 0;
  constexpr int64_t kStep = int64_t{kTaskThreads} * N;
  for (int64_t first = lane * N; first < range.count; first += kStep * kUnroll) {
    Floats<N> values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = min(first + u * kStep, range.count);
      values[u] = load_some<N>(x + at, range.count - at, is_aligned);
    }
    float block = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < N; ++i) block += values[u][i];
    }
    total += static_cast<double>(block);
  }
  if constexpr (kTaskThreads == kWarpSize) {
    total = warp_sum(total);
  } else {
    total = block_sum<kBlock>(total, dynamic_smem<double>());
  }
  if (lane != 0 || o >= p.outer) return;
  if (c.chunks > 1) {
    p.partials[task] = total;
  } else {
    store_total(p, o, total);
  }
}

/// inner > 1. Block = (o, chunk, 32 vectors of columns); warp w adds rows w, w + 8, ..., then the
/// warps in order.
template <class T>
__global__ void __launch_bounds__(kBlock, 3) sum_cols_kernel(Sum p, SumChunks c, bool is_aligned) {
  constexpr int N = kVec<T>, kCols = kWarpSize * N, kUnroll = 4;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int64_t col_blocks = ceil_div(p.inner, kCols), task = divide(blockIdx.x, col_blocks);
  const int64_t first_col = (blockIdx.x - task * col_blocks) * kCols;
  const int64_t o = divide(task, c.chunks);
  const SumRange range = range_of(p, c, task - o * c.chunks);
  const int64_t col = min(first_col + lane * N, p.inner), count = p.inner - col;
  const T* x = static_cast<const T*>(p.x);
  if (range.count > 0) x += (o * p.length + range.begin) * p.inner + col;
  double totals[N] = {};
  for (int64_t first = warp; first < range.count; first += kWarps * kUnroll) {
    Floats<N> values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t row = first + u * kWarps;
      values[u] = load_some<N>(row < range.count ? x + row * p.inner : x,
                               row < range.count ? count : 0, is_aligned);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float block = 0;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) block += values[u][i];
      totals[i] += static_cast<double>(block);
    }
  }
  double* smem = dynamic_smem<double>();  // [kWarps][kCols]
#pragma unroll
  for (int i = 0; i < N; ++i) smem[warp * kCols + lane * N + i] = totals[i];
  __syncthreads();
  const int64_t width = min(static_cast<int64_t>(kCols), p.inner - first_col);
  for (int64_t i = threadIdx.x; i < width; i += kBlock) {
    double total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += smem[w * kCols + i];
    if (c.chunks > 1) {
      p.partials[task * p.inner + first_col + i] = total;
    } else {
      store_total(p, o * p.inner + first_col + i, total);
    }
  }
}

/// The chunks' sums. inner = 1: a block an o.
__global__ void __launch_bounds__(kBlock) finish_row_kernel(Sum p, SumChunks c) {
  const double* partials = p.partials + blockIdx.x * c.chunks;
  double total = 0;
  for (int64_t chunk = threadIdx.x; chunk < c.chunks; chunk += kBlock) total += partials[chunk];
  total = block_sum<kBlock>(total, dynamic_smem<double>());
  if (threadIdx.x == 0) store_total(p, blockIdx.x, total);
}

/// inner > 1: block = (o, 32 columns); warp w adds chunks w, w + 8, ..., then the warps in order.
__global__ void __launch_bounds__(kBlock) finish_cols_kernel(Sum p, SumChunks c) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int64_t col_blocks = ceil_div(p.inner, kWarpSize), o = divide(blockIdx.x, col_blocks);
  const int64_t col = (blockIdx.x - o * col_blocks) * kWarpSize + lane;
  double total = 0;
  if (col < p.inner) {
    const double* partials = p.partials + o * c.chunks * p.inner + col;
#pragma unroll 4
    for (int64_t chunk = warp; chunk < c.chunks; chunk += kWarps) {
      total += partials[chunk * p.inner];
    }
  }
  double* smem = dynamic_smem<double>();  // [kWarps][kWarpSize]
  smem[threadIdx.x] = total;
  __syncthreads();
  if (warp != 0 || col >= p.inner) return;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += smem[w * kWarpSize + lane];
  store_total(p, o * p.inner + col, total);
}

// ---- norms --------------------------------------------------------------------------------------

/// The segment that a warp is in: its 256-element blocks are [first, first + count) of all.
struct NormSegment {
  int64_t index = 0, first = 0, count = 0, begin = 0, end = 0;
};

__device__ int64_t blocks_of(const PartialNorm& p, int64_t segment) {
  if (segment >= p.num_segments) return 0;
  return ceil_div(p.segments[2 * segment + 1] - p.segments[2 * segment], kSumBlock);
}

/// Blocks of all segments; lanes count a segment each.
__device__ int64_t count_blocks(const PartialNorm& p) {
  int64_t count = 0;
  for (int64_t s = threadIdx.x % kWarpSize; s < p.num_segments; s += kWarpSize) {
    count += blocks_of(p, s);
  }
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    count += __shfl_xor_sync(kFullMask, count, distance);
  }
  return count;
}

/// Moves to the segment with `block`, which lies in or behind the current one, 32 segments at a
/// time. The whole warp calls it.
__device__ void seek(const PartialNorm& p, int64_t block, NormSegment& segment) {
  if (block < segment.first + segment.count) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int64_t index = segment.index, first = segment.first;
  while (true) {
    const int64_t own = blocks_of(p, index + lane);
    int64_t last = own;  // blocks of segments up to this lane's
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int64_t left = __shfl_up_sync(kFullMask, last, distance);
      if (lane >= distance) last += left;
    }
    const unsigned behind = __ballot_sync(kFullMask, block < first + last);
    const int source = behind != 0 ? __ffs(static_cast<int>(behind)) - 1 : kWarpSize - 1;
    const int64_t before = __shfl_sync(kFullMask, last - own, source);
    if (behind != 0) {
      segment.index = index + source;
      segment.first = first + before;
      segment.count = __shfl_sync(kFullMask, own, source);
      segment.begin = p.segments[2 * segment.index];
      segment.end = p.segments[2 * segment.index + 1];
      return;
    }
    index += kWarpSize;
    first += __shfl_sync(kFullMask, last, kWarpSize - 1);
  }
}

enum class Power { kMax, kOne, kTwo, kAny };

/// sum |x|^p of some values, in f32 where that neither overflows nor loses what counts.
template <Power kPower, int N>
__device__ double sum_powers(const Floats<N>& x, double p, float largest) {
  if constexpr (kPower != Power::kAny) {
    const bool fits = kPower == Power::kOne ? largest < 1e36f : largest > 1e-15f && largest < 1e17f;
    if (fits) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) sum += kPower == Power::kOne ? fabsf(x[i]) : x[i] * x[i];
      return static_cast<double>(sum);
    }
  }
  double sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const double magnitude = fabs(static_cast<double>(x[i]));
    if constexpr (kPower == Power::kAny) {
      sum += pow(magnitude, p);
    } else {
      sum += kPower == Power::kOne ? magnitude : magnitude * magnitude;
    }
  }
  return sum;
}

/// a maximum that keeps NaN.
__device__ double max_or_nan(double a, double b) {
  return a != a || a > b ? a : b;
}

/// `values` over the block, in thread 0: their sum, or their maximum that keeps NaN.
template <bool kIsMax>
__device__ double reduce_block(double value, double* smem) {
  if constexpr (kIsMax) {
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      value = max_or_nan(value, __shfl_xor_sync(kFullMask, value, distance));
    }
    if (threadIdx.x % kWarpSize == 0) smem[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) value = max_or_nan(value, smem[w]);
    return value;
  } else {
    return block_sum<kBlock>(value, smem);
  }
}

/// Block c: blocks [num_blocks c / chunks, num_blocks (c + 1) / chunks). A lane adds its eight
/// elements of a 256-element block to its own f64 sum.
template <class T, Power kPower>
__global__ void __launch_bounds__(kBlock) partial_norm_kernel(PartialNorm p) {
  constexpr int N = kVec<T>, kParts = static_cast<int>(kSumBlock) / (kWarpSize * N);
  constexpr int kUnroll = 4 / kParts;
  constexpr unsigned kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
  const int64_t num_blocks = count_blocks(p), chunk = blockIdx.x;
  const int64_t chunks = min(num_blocks, kMaxNormChunks);
  const int64_t end = chunk < chunks ? num_blocks * (chunk + 1) / chunks : 0;
  const int64_t begin = chunk < chunks ? num_blocks * chunk / chunks : 0;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  NormSegment segment;
  double total = 0;
  unsigned largest_seen = 0;
  for (int64_t first = begin + static_cast<int>(threadIdx.x) / kWarpSize; first < end;
       first += kWarps * kUnroll) {
    Floats<N> values[kUnroll][kParts];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t block = first + u * kWarps;
      if (block < end) seek(p, block, segment);
      const int64_t from = segment.begin + (block - segment.first) * kSumBlock;
      const int64_t count = block < end ? segment.end - from : 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int64_t at = (part * kWarpSize + lane) * N;
        const T* x = static_cast<const T*>(p.x) + (at < count ? from + at : 0);
        values[u][part] =
            load_some<N>(x, min(kSumBlock, count) - at, reinterpret_cast<uintptr_t>(x) % 16 == 0);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        unsigned largest = 0;  // as integers, NaN > infinity > every finite number
#pragma unroll
        for (int i = 0; i < N; ++i) {
          largest = max(largest, __float_as_uint(values[u][part][i]) & kMagnitude);
        }
        largest_seen = max(largest_seen, largest);
        if (kPower != Power::kMax && largest != 0) {
          total += sum_powers<kPower>(values[u][part], p.p, __uint_as_float(largest));
        }
      }
    }
  }
  if constexpr (kPower == Power::kMax) total = static_cast<double>(__uint_as_float(largest_seen));
  total = reduce_block<kPower == Power::kMax>(total, dynamic_smem<double>());
  const int has_nonfinite = __syncthreads_or(largest_seen >= kInfinity);
  if (threadIdx.x != 0) return;
  p.chunks[2 * chunk] = total;
  p.chunks[2 * chunk + 1] = has_nonfinite != 0 ? 1 : 0;
}

/// What the chunks add up to. Chunks that had no blocks are zero, so that their number is no
/// matter.
template <bool kIsMax>
__global__ void __launch_bounds__(kBlock) finish_norm_kernel(PartialNorm p, int64_t num_chunks) {
  double total = 0;
  int has_nonfinite = 0;
  for (int64_t c = threadIdx.x; c < num_chunks; c += kBlock) {
    total = kIsMax ? max_or_nan(total, p.chunks[2 * c]) : total + p.chunks[2 * c];
    has_nonfinite |= p.chunks[2 * c + 1] != 0 ? 1 : 0;
  }
  total = reduce_block<kIsMax>(total, dynamic_smem<double>());
  has_nonfinite = __syncthreads_or(has_nonfinite);
  if (threadIdx.x != 0) return;
  *p.partial = total;
  if (p.has_nonfinite != nullptr) *p.has_nonfinite = has_nonfinite != 0 ? 1 : 0;
}

constexpr int kCombineTile = 1024;

/// One block: all threads fetch, one adds in order, as every rank does with the same numbers.
__global__ void __launch_bounds__(kBlock) combine_norms_kernel(CombineNorms p) {
  double* smem = dynamic_smem<double>();
  const bool is_max = p.p == static_cast<double>(INFINITY);
  double total = 0;
  for (int64_t first = 0; first < p.num_partials; first += kCombineTile) {
    const int64_t count = min(static_cast<int64_t>(kCombineTile), p.num_partials - first);
    for (int64_t i = threadIdx.x; i < count; i += kBlock) smem[i] = p.partials[first + i];
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 8
      for (int64_t i = 0; i < count; ++i) {
        total = is_max ? max_or_nan(total, smem[i]) : total + smem[i];
      }
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  if (p.p == 2) {
    total = sqrt(total);
  } else if (p.p != 1 && !is_max) {
    total = pow(total, 1 / p.p);
  }
  *p.norm = static_cast<float>(total);
}

__global__ void clip_factor_kernel(ClipFactor p) {
  if (threadIdx.x != 0) return;
  constexpr unsigned kExponent = 0x7f800000;
  const float norm = *p.norm;
  const bool finite = (__float_as_uint(norm) & kExponent) != kExponent;
  *p.found_inf = finite ? 0 : 1;
  *p.factor = finite ? fminf(1.0f, p.max_norm / (norm + 1e-6f)) : 0.0f;
}

constexpr int kMarkUnroll = 4;

/// Tasks of kBlock * N * kMarkUnroll columns of a row, dealt to the blocks in turn.
template <class T>
__global__ void __launch_bounds__(kBlock) mark_nonfinite_kernel(MarkNonfinite p, bool is_aligned) {
  constexpr int N = kVec<T>;
  constexpr int64_t kTaskCols = int64_t{kBlock} * N * kMarkUnroll;
  constexpr unsigned kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
  const int64_t row_tasks = ceil_div(p.cols, kTaskCols), tasks = p.rows * row_tasks;
  unsigned largest = 0;  // as integers, NaN > infinity > every finite number
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t row = divide(task, row_tasks), first = (task - row * row_tasks) * kTaskCols;
    const T* x = static_cast<const T*>(p.x) + row_offset(p.layout, row);
    Floats<N> values[kMarkUnroll];
#pragma unroll
    for (int u = 0; u < kMarkUnroll; ++u) {
      const int64_t at = first + (u * kBlock + static_cast<int>(threadIdx.x)) * N;
      values[u] = load_some<N>(at < p.cols ? x + at : x, p.cols - at, is_aligned);
    }
#pragma unroll
    for (int u = 0; u < kMarkUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        largest = max(largest, __float_as_uint(values[u][i]) & kMagnitude);
      }
    }
  }
  if (__syncthreads_or(largest >= kInfinity) != 0 && threadIdx.x == 0) {
    atomicMax(p.mark, p.value);
  }
}

/// Block b: part b % kParts of segment b / kParts.
constexpr int kChecksumParts = 64;

template <class T>
__global__ void __launch_bounds__(kBlock) checksum_kernel(Checksum p) {
  const int64_t s = blockIdx.x / kChecksumParts, part = blockIdx.x % kChecksumParts;
  const int64_t begin = p.segments[3 * s], offset = p.segments[3 * s + 2];
  const int64_t length = p.segments[3 * s + 1] - begin;
  const int64_t last = length * (part + 1) / kChecksumParts;
  const T* x = static_cast<const T*>(p.x) + begin;
  unsigned long long total = 0;
#pragma unroll 4
  for (int64_t i = length * part / kChecksumParts + static_cast<int>(threadIdx.x); i < last;
       i += kBlock) {
    total += static_cast<unsigned long long>(x[i]) * checksum_weight(offset + i);
  }
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    total += __shfl_xor_sync(kFullMask, total, distance);
  }
  unsigned long long* smem = dynamic_smem<unsigned long long>();
  if (threadIdx.x % kWarpSize == 0) smem[threadIdx.x / kWarpSize] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) total += smem[w];
  atomicAdd(reinterpret_cast<unsigned long long*>(p.sums + s), total);
}

// ---- geometry -----------------------------------------------------------------------------------

SumChunks sum_chunks(const Sum& p) {
  const int64_t chunks = p.partials == nullptr ? 1 : p.chunks();
  return {chunks, ceil_div(ceil_div(p.length, chunks), kSumBlock) * kSumBlock};
}

/// A chunk this long is worth a block.
constexpr int64_t kWarpTaskLength = 2048;

LaunchConfig sum_row_config(const Sum& p, const SumChunks& c, cudaStream_t stream) {
  const int64_t tasks = p.outer * c.chunks;
  const bool is_warp = c.chunk_length <= kWarpTaskLength;
  return {grid_blocks(is_warp ? ceil_div(tasks, kWarps) : tasks), kBlock, kWarps * sizeof(double),
          stream};
}

LaunchConfig sum_cols_config(const Sum& p, const SumChunks& c, int block_cols,
                             cudaStream_t stream) {
  return {grid_blocks(p.outer * c.chunks * ceil_div(p.inner, block_cols)), kBlock,
          static_cast<size_t>(kWarps * block_cols) * sizeof(double), stream};
}

/// As many chunks as the segments can have blocks, which only the device knows.
int64_t max_norm_chunks(const PartialNorm& p) {
  if (p.num_segments == 0) return 0;
  return std::min(kMaxNormChunks, ceil_div(p.numel, kSumBlock) + p.num_segments);
}

template <class T, Power kPower>
void launch_norm(const PartialNorm& p, cudaStream_t stream) {
  const int64_t chunks = max_norm_chunks(p);
  constexpr size_t kSmemBytes = kWarps * sizeof(double);
  if (chunks > 0) {
    launch("partial_norm", &partial_norm_kernel<T, kPower>,
           LaunchConfig{grid_blocks(chunks), kBlock, kSmemBytes, stream}, p);
  }
  launch("partial_norm: chunks", &finish_norm_kernel<kPower == Power::kMax>,
         LaunchConfig{1, kBlock, kSmemBytes, stream}, p, chunks);
}

}  // namespace

// ---- launchers ----------------------------------------------------------------------------------

void sum(CUstream_st* stream, const Sum& p) {
  if (p.outer * p.inner == 0) return;
  check_device_float(p.dst_dtype, "sum");
  const SumChunks c = sum_chunks(p);
  tessera::cuda::visit_device_float(p.dtype, "sum", [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVec<T>;
    const bool is_even = p.inner == 1 ? p.length % N == 0 || p.outer == 1 : p.inner % N == 0;
    const bool is_aligned = is_even && tessera::cuda::is_aligned16(p.x);
    if (p.inner == 1) {
      launch("sum",
             c.chunk_length <= kWarpTaskLength ? &sum_row_kernel<T, kWarpSize>
                                               : &sum_row_kernel<T, kBlock>,
             sum_row_config(p, c, stream), p, c, is_aligned);
    } else {
      launch("sum", &sum_cols_kernel<T>, sum_cols_config(p, c, kWarpSize * N, stream), p, c,
             is_aligned);
    }
  });
  if (c.chunks == 1) return;
  if (p.inner == 1) {
    launch("sum: chunks", &finish_row_kernel,
           LaunchConfig{grid_blocks(p.outer), kBlock, kWarps * sizeof(double), stream}, p, c);
  } else {
    launch("sum: chunks", &finish_cols_kernel,
           LaunchConfig{grid_blocks(p.outer * ceil_div(p.inner, kWarpSize)), kBlock,
                        kBlock * sizeof(double), stream},
           p, c);
  }
}

void partial_norm(CUstream_st* stream, const PartialNorm& p) {
  tessera::cuda::visit_device_float(p.dtype, "partial_norm", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.p == static_cast<double>(INFINITY)) {
      launch_norm<T, Power::kMax>(p, stream);
    } else if (p.p == 2) {
      launch_norm<T, Power::kTwo>(p, stream);
    } else if (p.p == 1) {
      launch_norm<T, Power::kOne>(p, stream);
    } else {
      launch_norm<T, Power::kAny>(p, stream);
    }
  });
}

void combine_norms(CUstream_st* stream, const CombineNorms& p) {
  launch("combine_norms", &combine_norms_kernel,
         LaunchConfig{1, kBlock, kCombineTile * sizeof(double), stream}, p);
}

void clip_factor(CUstream_st* stream, const ClipFactor& p) {
  launch("clip_factor", &clip_factor_kernel, LaunchConfig{1, tessera::cuda::kWarpSize, 0, stream},
         p);
}

void mark_nonfinite(CUstream_st* stream, const MarkNonfinite& p) {
  if (p.rows * p.cols == 0) return;
  tessera::cuda::visit_device_float(p.dtype, "mark_nonfinite", [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int64_t kTaskCols = int64_t{kBlock} * kVec<T> * kMarkUnroll, kMaxBlocks = 1024;
    const int64_t tasks = p.rows * ceil_div(p.cols, kTaskCols);
    launch("mark_nonfinite", &mark_nonfinite_kernel<T>,
           LaunchConfig{grid_blocks(std::min(tasks, kMaxBlocks)), kBlock, 0, stream}, p,
           rows_are_aligned(p.x, p.layout, sizeof(T)));
  });
}

void checksum(CUstream_st* stream, const Checksum& p) {
  if (p.num_segments == 0) return;
  visit_checksum_item(p.item_nbytes, [&](auto tag) {
    launch("checksum", &checksum_kernel<decltype(tag)>,
           LaunchConfig{grid_blocks(p.num_segments * kChecksumParts), kBlock,
                        kWarps * sizeof(unsigned long long), stream},
           p);
  });
}

}  // namespace tessera::kernels::cuda
