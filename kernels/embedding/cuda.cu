// Rows of a table on CUDA, and the gradient of the table.
//
//   y[r] = weight[ids[r]];  dw[v] (+)= sum of dy[r] over the r with ids[r] == v, in order
// Forward          a warp a row, four 16-byte words a lane in flight; bytes are copied as they are
// Backward         1. one block sorts the positions by id: stable radix sort, four bits a pass. A
//                     thread counts the digits of its own run of positions in shared memory, the
//                     counts are added up digit by digit, and each thread then places its run.
//                  2. a thread a vocabulary row finds the end of its positions by bisection
//                  3. a warp adds up 32 vectors of a row of dw; where the positions are many, the
//                     eight warps of the block share them
// Ids              outside of [0, vocab) they read nothing: the row of y is NaN, dw ignores them
// Determinism      no atomics: positions are added in ascending order, in blocks of kRunBlock; how
//                  many positions a row has decides who adds them

#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/reduce.cuh"
#include "kernels/embedding/kernel.h"
#include "kernels/float_vec.cuh"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::dynamic_smem;
using tessera::cuda::grid_blocks;
using tessera::cuda::is_aligned16;
using tessera::cuda::kVec;
using tessera::cuda::kWarpSize;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;
using tessera::cuda::load_vec;
using tessera::cuda::store_vec;
using tessera::cuda::Vec;
using tessera::cuda::visit_device_float;

constexpr int kBlock = 256;
constexpr int kWarps = kBlock / kWarpSize;

__device__ int64_t id_at(const void* ids, DType dtype, int64_t position) {
  return dtype == kI64 ? static_cast<const int64_t*>(ids)[position]
                       : static_cast<const int32_t*>(ids)[position];
}

// ---- Forward

/// W bytes of a row at a time.
template <int W>
__global__ void __launch_bounds__(kBlock)
    embedding_fwd_kernel(const EmbeddingFwd p, int64_t words, int64_t row_nbytes) {
  using Word = Vec<uint8_t, W>;
  constexpr int kUnroll = 4;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (row >= p.rows) return;
  const int64_t id = id_at(p.ids, p.ids_dtype, row);
  const bool is_row = id >= 0 && id < p.vocab;
  const uint8_t* const from =
      static_cast<const uint8_t*>(p.weight) + (is_row ? id : 0) * row_nbytes;
  uint8_t* const to = static_cast<uint8_t*>(p.y) + row * row_nbytes;
  for (int64_t first = threadIdx.x % kWarpSize; first < words; first += kUnroll * kWarpSize) {
    Word copied[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t word = first + u * kWarpSize;
      if (is_row && word < words) {
        copied[u] = load_vec<W>(from + word * W);
      } else {  // all bits set: NaN in every dtype
#pragma unroll
        for (int i = 0; i < W; ++i) copied[u][i] = 0xff;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t word = first + u * kWarpSize;
      if (word < words) store_vec(to + word * W, copied[u]);
    }
  }
}

// ---- Backward: positions in the order of their ids

constexpr int kSortBlock = 1024;
constexpr int kDigitBits = 4, kDigits = 1 << kDigitBits;
constexpr int64_t kSortSmemNbytes =
    int64_t{kDigits} * kSortBlock * sizeof(int32_t) + kSortBlock / kWarpSize * sizeof(int32_t);

/// What a position is sorted by; ids that are none of dw's rows come last.
__device__ int64_t key_of(const EmbeddingBwd& p, int64_t position) {
  const int64_t id = id_at(p.ids, p.ids_dtype, position) - p.first;
  return id >= 0 && id < p.vocab ? id : p.vocab;
}

/// Turns counts[digit][thread] into the sums of all counts before them, over all digits.
__device__ void add_up_counts(int32_t* counts, int32_t* warp_sums) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpSize, warp = thread / kWarpSize;
  // kDigits neighbours a thread; the order of a shared word does not matter for the sums.
  int32_t* const own = counts + thread * kDigits;
  int32_t total = 0;
  for (int i = 0; i < kDigits; ++i) {
    const int32_t count = own[i];
    own[i] = total;
    total += count;
  }
  int32_t before = total;  // of this warp's lanes up to this one
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int32_t other = __shfl_up_sync(tessera::cuda::kFullMask, before, distance);
    if (lane >= distance) before += other;
  }
  if (lane == kWarpSize - 1) warp_sums[warp] = before;
  __syncthreads();
  int32_t offset = before - total;
  for (int w = 0; w < warp; ++w) offset += warp_sums[w];
  for (int i = 0; i < kDigits; ++i) own[i] += offset;
  __syncthreads();
}

/// One block. After an even number of passes the positions are in `even`, else in `odd`.
__global__ void __launch_bounds__(kSortBlock, 1)
    sort_positions_kernel(const EmbeddingBwd p, int32_t* even, int32_t* odd, int num_passes) {
  int32_t* const counts = dynamic_smem<int32_t>();  // [kDigits, kSortBlock]
  int32_t* const warp_sums = counts + kDigits * kSortBlock;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t begin = p.rows * thread / kSortBlock, end = p.rows * (thread + 1) / kSortBlock;
  for (int64_t i = begin; i < end; ++i) even[i] = static_cast<int32_t>(i);
  for (int pass = 0; pass < num_passes; ++pass) {
    const int32_t* const from = pass % 2 == 0 ? even : odd;
    int32_t* const to = pass % 2 == 0 ? odd : even;
    const auto digit_of = [&](int64_t i) {
      return static_cast<int>(key_of(p, from[i]) >> (pass * kDigitBits) & (kDigits - 1));
    };
    for (int digit = 0; digit < kDigits; ++digit) counts[digit * kSortBlock + thread] = 0;
    for (int64_t i = begin; i < end; ++i) ++counts[digit_of(i) * kSortBlock + thread];
    __syncthreads();
    add_up_counts(counts, warp_sums);
    for (int64_t i = begin; i < end; ++i) {
      to[counts[digit_of(i) * kSortBlock + thread]++] = from[i];
    }
    __syncthreads();  // also makes this pass's positions visible to the block
  }
}

/// run_end[v] = number of positions whose id is at most v.
__global__ void __launch_bounds__(kBlock)
    find_run_ends_kernel(const EmbeddingBwd p, int32_t* run_end, const int32_t* positions) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (row >= p.vocab) return;
  int64_t low = 0, high = p.rows;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (key_of(p, positions[middle]) <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  run_end[row] = static_cast<int32_t>(low);
}

// ---- Backward: sums

constexpr int64_t kRunBlock = 256;  // terms that are added before the sum goes on
constexpr int64_t kLongRun = 64;    // positions that are worth all warps of a block

/// The sum of dy[positions[i]][col .. col + W) over begin <= i < end. Four rows are in flight.
template <int W, class T>
__device__ Floats<W> sum_run(const EmbeddingBwd& p, const int32_t* positions, int64_t begin,
                             int64_t end, int64_t col) {
  const T* const dy = static_cast<const T*>(p.dy) + col;
  Floats<W> total{};
  for (int64_t first = begin; first < end; first += kRunBlock) {
    const int64_t last = first + kRunBlock < end ? first + kRunBlock : end;
    Floats<W> block{};
#pragma unroll 4
    for (int64_t i = first; i < last; ++i) {
      const Floats<W> values = load_floats<W>(dy + positions[i] * p.cols);
#pragma unroll
      for (int j = 0; j < W; ++j) block[j] += values[j];
    }
#pragma unroll
    for (int j = 0; j < W; ++j) total[j] += block[j];
  }
  return total;
}

/// Warp w of block b has piece b * kWarps + w: of a row of dw the `slices`-th part, W elements a
/// lane.
template <class T, int W>
__global__ void __launch_bounds__(kBlock, 4)
    embedding_bwd_kernel(const EmbeddingBwd p, const int32_t* run_end, const int32_t* positions,
                         int64_t slices) {
  float* const parts = dynamic_smem<float>();  // [kWarps, kWarpSize * W]
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int64_t first_piece = static_cast<int64_t>(blockIdx.x) * kWarps;
  const auto row_of = [&](int64_t piece) { return piece / slices; };
  const auto col_of = [&](int64_t piece) { return (piece % slices * kWarpSize + lane) * W; };
  const auto begin_of = [&](int64_t row) { return row == 0 ? 0 : int64_t{run_end[row - 1]}; };
  const auto write = [&](int64_t piece, const Floats<W>& sums) {
    const int64_t at = row_of(piece) * p.dw_stride + col_of(piece);
    store_floats(p.dw, p.dw_dtype, at, sums, p.accumulate);
  };
  const int64_t num_pieces = p.vocab * slices;

  if (const int64_t piece = first_piece + warp; piece < num_pieces && col_of(piece) < p.cols) {
    const int64_t row = row_of(piece), begin = begin_of(row), end = run_end[row];
    const bool is_untouched = begin == end && p.accumulate;
    if (end - begin <= kLongRun && !is_untouched) {
      write(piece, sum_run<W, T>(p, positions, begin, end, col_of(piece)));
    }
  }
  for (int64_t piece = first_piece; piece < first_piece + kWarps && piece < num_pieces; ++piece) {
    const int64_t row = row_of(piece), begin = begin_of(row), count = run_end[row] - begin;
    if (count <= kLongRun) continue;  // the same for all threads
    const bool has_cols = col_of(piece) < p.cols;
    if (has_cols) {
      store_floats(parts + (warp * kWarpSize + lane) * W,
                   sum_run<W, T>(p, positions, begin + count * warp / kWarps,
                                 begin + count * (warp + 1) / kWarps, col_of(piece)));
    }
    __syncthreads();
    if (warp == 0 && has_cols) {
      Floats<W> sums{};
      for (int w = 0; w < kWarps; ++w) {
        const auto part = load_floats<W>(parts + (w * kWarpSize + lane) * W);
#pragma unroll
        for (int j = 0; j < W; ++j) sums[j] += part[j];
      }
      write(piece, sums);
    }
    __syncthreads();
  }
}

/// Passes of the sort that tell ids up to `vocab` from each other.
int sort_passes(int64_t vocab) {
  int bits = 0;
  while (vocab >> bits != 0) ++bits;
  return (bits + kDigitBits - 1) / kDigitBits;
}

template <class T, int W>
void launch_sums(CUstream_st* stream, const EmbeddingBwd& p, const int32_t* positions) {
  const int64_t slices = ceil_div(p.cols, int64_t{kWarpSize} * W);
  launch("embedding_bwd", &embedding_bwd_kernel<T, W>,
         LaunchConfig{dim3(grid_blocks(ceil_div(p.vocab * slices, kWarps))), dim3(kBlock),
                      kBlock * W * sizeof(float), stream},
         p, p.order, positions, slices);
}

}  // namespace

void embedding_fwd(CUstream_st* stream, const EmbeddingFwd& p) {
  const int64_t row_nbytes = p.cols * static_cast<int64_t>(size_of(p.dtype));
  if (p.rows == 0 || row_nbytes == 0) return;
  visit_device_float(p.dtype, "embedding", [](auto) {});
  const LaunchConfig config{dim3(grid_blocks(ceil_div(p.rows, kWarps))), dim3(kBlock), 0, stream};
  const auto run = [&](auto kernel, int64_t width) {
    launch("embedding_fwd", kernel, config, p, row_nbytes / width, row_nbytes);
  };
  const bool is_wide = row_nbytes % 16 == 0 && is_aligned16(p.weight) && is_aligned16(p.y);
  is_wide ? run(&embedding_fwd_kernel<16>, 16) : run(&embedding_fwd_kernel<2>, 2);
}

void embedding_bwd(CUstream_st* stream, const EmbeddingBwd& p) {
  if (p.vocab == 0 || p.cols == 0) return;
  check_device_float(p.dw_dtype, "embedding");
  visit_device_float(p.dtype, "embedding", [&](auto tag) {
    using T = typename decltype(tag)::type;
    int32_t* const even = p.order + p.vocab;
    int32_t* const odd = even + p.rows;
    const int num_passes = sort_passes(p.vocab);
    const int32_t* const positions = num_passes % 2 == 0 ? even : odd;
    launch("embedding_bwd", &sort_positions_kernel,
           LaunchConfig{dim3(1), dim3(kSortBlock), kSortSmemNbytes, stream}, p, even, odd,
           num_passes);
    launch("embedding_bwd", &find_run_ends_kernel,
           LaunchConfig{dim3(grid_blocks(ceil_div(p.vocab, kBlock))), dim3(kBlock), 0, stream}, p,
           p.order, positions);
    constexpr int kWidth = kVec<T>;
    const bool is_wide = p.cols % kWidth == 0 && p.dw_stride % kWidth == 0 && is_aligned16(p.dy) &&
                         is_aligned16(p.dw);
    is_wide ? launch_sums<T, kWidth>(stream, p, positions)
            : launch_sums<T, 1>(stream, p, positions);
  });
}

}  // namespace tessera::kernels::cuda
