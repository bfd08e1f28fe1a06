// Layer and RMS normalization over rows of C elements.
//
//   forward   y = (s - mean) rstd w + b,  s = x (+ residual)
//   backward  dx = rstd (g - mean(g) - xhat mean(g xhat)) (+ d_sum),  g = dy w
//             dw = sum over rows of dy xhat,  db = sum over rows of dy
//
// Layout           a row belongs to a group of threads (RowGroup), each with up to 4 vectors of 16
//                  bytes of it (backward: 2 of x and 2 of dy) that stay in registers, as they came,
//                  from the only read to the only write. w and b come from the L1 cache.
// Parallelization  a grid that fits the device strides over the rows; 32 to 64 bytes a thread are
//                  under way before the first use, 48 KiB and more a multiprocessor.
// Backward sums    a thread keeps the sums over rows of its columns in registers and its block
//                  writes one row of `partials`, which a second kernel adds. No atomics.
// Other rows       too long for registers, or not on 16-byte boundaries: kernels that read one
//                  element at a time, a block a row.
// Determinism      the order of every sum is a function of the shapes and of the number of
//                  multiprocessors.

#include "core/runtime/cuda/launch.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/norm/kernel.h"
#include "kernels/rows.cuh"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::dynamic_smem;
using tessera::cuda::from_float;
using tessera::cuda::grid_blocks;
using tessera::cuda::kVec;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;
using tessera::cuda::load_streaming;
using tessera::cuda::num_multiprocessors;
using tessera::cuda::store_vec;
using tessera::cuda::to_float;
using tessera::cuda::Vec;

// ---- forward ------------------------------------------------------------------------------------

constexpr int kFwdVecs = 4;
constexpr int kFwdMaxThreads = 1024;
constexpr int kFwdResidentThreads = 1024;  // of a multiprocessor, at 64 registers a thread

/// What `square` = sum (x - mean)^2 and `shift` = sum (x - mean) make of the statistics: `shift` is
/// what rounding left in the mean.
template <bool kCentered>
__device__ float finish_statistics(float (&sums)[2], float inv_cols, float eps, float* mean) {
  float square = sums[0];
  if constexpr (kCentered) {
    const float shift = sums[1] * inv_cols;
    square -= sums[1] * shift;
    *mean += shift;
  }
  return 1.0f / sqrtf(square * inv_cols + eps);
}

template <class T, class W, bool kCentered>
__global__ void __launch_bounds__(kFwdMaxThreads) norm_fwd_kernel(NormFwd a, int row_threads) {
  constexpr int N = kVec<T>;
  RowGroup group(row_threads, dynamic_smem<float>());
  const int64_t block_rows = static_cast<int>(blockDim.x) / row_threads;
  const int num_vecs = static_cast<int>(a.cols / N);
  const float inv_cols = 1.0f / static_cast<float>(a.cols);
  for (int64_t first = blockIdx.x * block_rows; first < a.rows; first += gridDim.x * block_rows) {
    const int64_t row = first + group.index();
    const int end = row < a.rows ? num_vecs : 0;
    Vec<T, N> x[kFwdVecs];
    {
      const T* from = static_cast<const T*>(a.x) + row_offset(a.x_rows, row);
#pragma unroll
      for (int i = 0; i < kFwdVecs; ++i) {
        const int v = group.lane() + i * row_threads;
        if (v < end) x[i] = load_streaming<N>(from + v * N);
      }
    }
    if (a.residual != nullptr) {
      const T* from = static_cast<const T*>(a.residual) + row_offset(a.residual_rows, row);
      T* sum = static_cast<T*>(a.sum) + row * a.cols;
      Vec<T, N> residual[kFwdVecs];
#pragma unroll
      for (int i = 0; i < kFwdVecs; ++i) {
        const int v = group.lane() + i * row_threads;
        if (v < end) residual[i] = load_streaming<N>(from + v * N);
      }
#pragma unroll
      for (int i = 0; i < kFwdVecs; ++i) {
        const int v = group.lane() + i * row_threads;
        if (v >= end) continue;
        Floats<N> s = to_floats<N>(x[i]);
        const Floats<N> r = to_floats<N>(residual[i]);
#pragma unroll
        for (int j = 0; j < N; ++j) s[j] += r[j];
        x[i] = round_floats<T>(s);
        store_vec(sum + v * N, x[i]);
      }
    }
    float mean = 0;
    if constexpr (kCentered) {
      float total = 0;
#pragma unroll
      for (int i = 0; i < kFwdVecs; ++i) {
        if (group.lane() + i * row_threads >= end) continue;
        const Floats<N> values = to_floats<N>(x[i]);
#pragma unroll
        for (int j = 0; j < N; ++j) total += values[j];
      }
      mean = group.sum(total) * inv_cols;
    }
    float sums[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kFwdVecs; ++i) {
      if (group.lane() + i * row_threads >= end) continue;
      const Floats<N> values = to_floats<N>(x[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float d = values[j] - mean;
        sums[0] += d * d;
        sums[1] += d;
      }
    }
    group.sum(sums);
    const float rstd = finish_statistics<kCentered>(sums, inv_cols, a.eps, &mean);
    T* y = static_cast<T*>(a.y) + row * a.cols;
#pragma unroll
    for (int i = 0; i < kFwdVecs; ++i) {
      const int v = group.lane() + i * row_threads;
      if (v >= end) continue;
      const Floats<N> w = load_floats<N>(static_cast<const W*>(a.w) + v * N);
      Floats<N> out = to_floats<N>(x[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = (out[j] - mean) * rstd * w[j];
      if (kCentered && a.b != nullptr) {
        const Floats<N> b = load_floats<N>(static_cast<const W*>(a.b) + v * N);
#pragma unroll
        for (int j = 0; j < N; ++j) out[j] += b[j];
      }
      store_floats(y + v * N, out);
    }
    if (group.lane() == 0 && row < a.rows) {
      if constexpr (kCentered) static_cast<float*>(a.mean)[row] = mean;
      static_cast<float*>(a.rstd)[row] = rstd;
    }
  }
}

/// Rows of any length at any address; reads them again for each step.
template <class T, class W, bool kCentered>
__global__ void __launch_bounds__(kFwdMaxThreads) norm_fwd_any_kernel(NormFwd a) {
  RowGroup group(static_cast<int>(blockDim.x), dynamic_smem<float>());
  const float inv_cols = 1.0f / static_cast<float>(a.cols);
  const W* w = static_cast<const W*>(a.w);
  const W* b = static_cast<const W*>(a.b);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.x) + row_offset(a.x_rows, row);
    if (a.residual != nullptr) {  // a thread reads back what it wrote itself
      const T* residual = static_cast<const T*>(a.residual) + row_offset(a.residual_rows, row);
      T* sum = static_cast<T*>(a.sum) + row * a.cols;
      for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) {
        sum[c] = from_float<T>(to_float(x[c]) + to_float(residual[c]));
      }
      x = sum;
    }
    float mean = 0;
    if constexpr (kCentered) {
      float total = 0;
      for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) total += to_float(x[c]);
      mean = group.sum(total) * inv_cols;
    }
    float sums[2] = {0, 0};
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) {
      const float d = to_float(x[c]) - mean;
      sums[0] += d * d;
      sums[1] += d;
    }
    group.sum(sums);
    const float rstd = finish_statistics<kCentered>(sums, inv_cols, a.eps, &mean);
    T* y = static_cast<T*>(a.y) + row * a.cols;
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) {
      const float shift = b != nullptr ? to_float(b[c]) : 0.0f;
      y[c] = from_float<T>((to_float(x[c]) - mean) * rstd * to_float(w[c]) + shift);
    }
    if (threadIdx.x == 0) {
      if constexpr (kCentered) static_cast<float*>(a.mean)[row] = mean;
      static_cast<float*>(a.rstd)[row] = rstd;
    }
  }
}

// ---- backward -----------------------------------------------------------------------------------

constexpr int kBwdVecs = 2;
constexpr int kBwdMaxThreads = 512;
/// Blocks of 256 threads that stay in a multiprocessor: layer_norm keeps twice as many sums.
template <bool kCentered>
constexpr int kBwdResidentBlocks = kCentered ? 2 : 3;

/// Writes the block's sums over rows, [1 or 2][cols] from `out` on: those of its row groups, in
/// order. Blocks of more than one row have block_rows * cols floats of shared memory for it.
template <int kOutputs, int N>
__device__ void write_partials(const Floats<N> (&sums)[kOutputs][kBwdVecs], const RowGroup& group,
                               float* out, int64_t cols) {
  const int num_vecs = static_cast<int>(cols / N), threads = group.threads();
  const int block_rows = static_cast<int>(blockDim.x) / threads;
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    float* smem = block_rows == 1 ? nullptr : dynamic_smem<float>(RowGroup::kSmemBytes);
    float* to = block_rows == 1 ? out + o * cols : smem + group.index() * cols;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBwdVecs; ++i) {
      const int v = group.lane() + i * threads;
      if (v < num_vecs) store_vec(to + v * N, sums[o][i]);
    }
    if (block_rows == 1) continue;
    __syncthreads();
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
      float total = 0;
      for (int r = 0; r < block_rows; ++r) total += smem[r * cols + c];
      out[o * cols + c] = total;
    }
  }
}

template <class T, class W, bool kCentered, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads, kBwdResidentBlocks<kCentered> * 256 / kMaxThreads)
    norm_bwd_kernel(NormBwd a, int row_threads) {
  constexpr int N = kVec<T>, kOutputs = kCentered ? 2 : 1;
  RowGroup group(row_threads, dynamic_smem<float>());
  const int64_t block_rows = static_cast<int>(blockDim.x) / row_threads;
  const int num_vecs = static_cast<int>(a.cols / N);
  const float inv_cols = 1.0f / static_cast<float>(a.cols);
  Floats<N> totals[kOutputs][kBwdVecs];  // dw, db of this thread's columns
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
    for (int i = 0; i < kBwdVecs; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) totals[o][i][j] = 0;
    }
  }
  for (int64_t first = blockIdx.x * block_rows; first < a.rows; first += gridDim.x * block_rows) {
    const int64_t row = first + group.index();
    const int end = row < a.rows ? num_vecs : 0;
    Vec<T, N> x[kBwdVecs], dy[kBwdVecs], extra[kBwdVecs];
    const T* x_row = static_cast<const T*>(a.x) + row_offset(a.x_rows, row);
    const T* dy_row = static_cast<const T*>(a.dy) + row * a.cols;
    const T* extra_row = static_cast<const T*>(a.d_sum) + (a.d_sum != nullptr ? row * a.cols : 0);
#pragma unroll
    for (int i = 0; i < kBwdVecs; ++i) {
      const int v = group.lane() + i * row_threads;
      if (v >= end) continue;
      x[i] = load_streaming<N>(x_row + v * N);
      dy[i] = load_streaming<N>(dy_row + v * N);
      if (a.d_sum != nullptr) extra[i] = load_streaming<N>(extra_row + v * N);
    }
    const float mean = kCentered && end > 0 ? static_cast<const float*>(a.mean)[row] : 0.0f;
    const float rstd = end > 0 ? static_cast<const float*>(a.rstd)[row] : 0.0f;
    float sums[2] = {0, 0};  // of g xhat and of g
#pragma unroll
    for (int i = 0; i < kBwdVecs; ++i) {
      const int v = group.lane() + i * row_threads;
      if (v >= end) continue;
      const Floats<N> w = load_floats<N>(static_cast<const W*>(a.w) + v * N);
      const Floats<N> xs = to_floats<N>(x[i]), dys = to_floats<N>(dy[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float xhat = (xs[j] - mean) * rstd;
        totals[0][i][j] += dys[j] * xhat;
        if constexpr (kCentered) totals[1][i][j] += dys[j];
        sums[0] += dys[j] * w[j] * xhat;
        sums[1] += dys[j] * w[j];
      }
    }
    if (a.dx == nullptr) continue;
    group.sum(sums);
    const float mean_gx = sums[0] * inv_cols, mean_g = kCentered ? sums[1] * inv_cols : 0.0f;
    T* dx = static_cast<T*>(a.dx) + row_offset(a.dx_rows, row);
#pragma unroll
    for (int i = 0; i < kBwdVecs; ++i) {
      const int v = group.lane() + i * row_threads;
      if (v >= end) continue;
      const Floats<N> w = load_floats<N>(static_cast<const W*>(a.w) + v * N);
      const Floats<N> xs = to_floats<N>(x[i]), dys = to_floats<N>(dy[i]);
      Floats<N> out;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        out[j] = rstd * (dys[j] * w[j] - mean_g - (xs[j] - mean) * rstd * mean_gx);
      }
      if (a.d_sum != nullptr) {
        const Floats<N> extras = to_floats<N>(extra[i]);
#pragma unroll
        for (int j = 0; j < N; ++j) out[j] += extras[j];
      }
      store_floats(dx + v * N, out, a.accumulate_dx);
    }
  }
  if (a.partials == nullptr) return;
  write_partials(totals, group, static_cast<float*>(a.partials) + blockIdx.x * kOutputs * a.cols,
                 a.cols);
}

/// Rows of any length at any address. The block's sums over rows are its row of `partials` itself;
/// a thread only touches its own columns.
template <class T, class W, bool kCentered>
__global__ void __launch_bounds__(kBwdMaxThreads) norm_bwd_any_kernel(NormBwd a) {
  constexpr int kOutputs = kCentered ? 2 : 1;
  RowGroup group(static_cast<int>(blockDim.x), dynamic_smem<float>());
  const float inv_cols = 1.0f / static_cast<float>(a.cols);
  const W* w = static_cast<const W*>(a.w);
  float* dw = static_cast<float*>(a.partials);
  if (dw != nullptr) dw += blockIdx.x * kOutputs * a.cols;
  float* db = dw + (dw != nullptr ? a.cols : 0);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.x) + row_offset(a.x_rows, row);
    const T* dy = static_cast<const T*>(a.dy) + row * a.cols;
    const float mean = kCentered ? static_cast<const float*>(a.mean)[row] : 0.0f;
    const float rstd = static_cast<const float*>(a.rstd)[row];
    const bool is_first = row == blockIdx.x;
    float sums[2] = {0, 0};
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) {
      const float d = to_float(dy[c]), xhat = (to_float(x[c]) - mean) * rstd;
      const float g = d * to_float(w[c]);
      sums[0] += g * xhat;
      sums[1] += g;
      if (a.partials != nullptr) {
        dw[c] = (is_first ? 0.0f : dw[c]) + d * xhat;
        if constexpr (kCentered) db[c] = (is_first ? 0.0f : db[c]) + d;
      }
    }
    if (a.dx == nullptr) continue;
    group.sum(sums);
    const float mean_gx = sums[0] * inv_cols, mean_g = kCentered ? sums[1] * inv_cols : 0.0f;
    T* dx = static_cast<T*>(a.dx) + row_offset(a.dx_rows, row);
    const T* extra = static_cast<const T*>(a.d_sum) + (a.d_sum != nullptr ? row * a.cols : 0);
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) {
      const float xhat = (to_float(x[c]) - mean) * rstd;
      float out = rstd * (to_float(dy[c]) * to_float(w[c]) - mean_g - xhat * mean_gx);
      if (a.d_sum != nullptr) out += to_float(extra[c]);
      if (a.accumulate_dx) out += to_float(dx[c]);
      dx[c] = from_float<T>(out);
    }
  }
}

/// Sums over `count` rows of partials, for dw and db at once.
struct AddPartials {
  struct Output {
    void* dst;  ///< or absent
    DType dtype;
    bool accumulate;
  };
  Output outputs[2];
  const float* partials;  ///< [count, num_outputs, cols]
  int64_t count, num_outputs, cols;
};

constexpr int kAddWarps = 16;
constexpr int kAddCols = tessera::cuda::kWarpSize;

/// Block = (output, 32 columns): a lane a column, warp w adds rows w, w + 16, ...; then the warps
/// in order.
__global__ void __launch_bounds__(kAddWarps* kAddCols) add_partials_kernel(AddPartials a) {
  const int64_t col_blocks = tessera::cuda::ceil_div(a.cols, kAddCols);
  const int64_t output = blockIdx.x / col_blocks;
  const int lane = static_cast<int>(threadIdx.x) % kAddCols;
  const int warp = static_cast<int>(threadIdx.x) / kAddCols;
  const int64_t col = (blockIdx.x - output * col_blocks) * kAddCols + lane;
  const AddPartials::Output to = output == 0 ? a.outputs[0] : a.outputs[1];
  if (to.dst == nullptr) return;
  float* smem = dynamic_smem<float>();
  float total = 0;
  if (col < a.cols) {
    const float* from = a.partials + output * a.cols + col;
#pragma unroll 8
    for (int64_t row = warp; row < a.count; row += kAddWarps) {
      total += from[row * a.num_outputs * a.cols];
    }
  }
  smem[warp * kAddCols + lane] = total;
  __syncthreads();
  if (warp != 0 || col >= a.cols) return;
  total = 0;
#pragma unroll
  for (int w = 0; w < kAddWarps; ++w) total += smem[w * kAddCols + lane];
  store_floats<1>(to.dst, to.dtype, col, {{total}}, to.accumulate);
}

// ---- geometry -----------------------------------------------------------------------------------

/// Threads of a block whose whole is one row, for the kernels without vectors.
int any_block(int64_t cols, int max_threads) {
  return cols >= 4096 ? max_threads : 256;
}

struct NormConfig {
  LaunchConfig launch;
  int row_threads;  ///< 0: the kernels for any rows
};

NormConfig norm_fwd_config(const NormFwd& a, cudaStream_t stream) {
  const auto size = static_cast<int64_t>(size_of(a.dtype)), width = 16 / size;
  const bool is_aligned =
      a.cols % width == 0 && rows_are_aligned(a.x, a.x_rows, size) &&
      (a.residual == nullptr || rows_are_aligned(a.residual, a.residual_rows, size)) &&
      tessera::cuda::is_aligned16(a.y) && tessera::cuda::is_aligned16(a.sum) &&
      tessera::cuda::is_aligned16(a.w) && tessera::cuda::is_aligned16(a.b);
  const int64_t num_vecs = a.cols / width;
  const bool fits = num_vecs <= kFwdVecs * kFwdMaxThreads;
  const RowGeometry geometry = RowGeometry::choose(num_vecs, kFwdVecs, kFwdMaxThreads);
  const int block = is_aligned && fits ? geometry.block : any_block(a.cols, kFwdMaxThreads);
  const int block_rows = is_aligned && fits ? geometry.rows() : 1;
  const int64_t resident =
      static_cast<int64_t>(num_multiprocessors()) * (kFwdResidentThreads / block);
  const int64_t blocks = std::min(ceil_div(a.rows, block_rows), resident);
  return {{grid_blocks(blocks), static_cast<unsigned>(block), RowGroup::kSmemBytes, stream},
          is_aligned && fits ? geometry.threads : 0};
}

NormConfig norm_bwd_config(const NormBwd& a, int resident_blocks, cudaStream_t stream) {
  const auto size = static_cast<int64_t>(size_of(a.dtype)), width = 16 / size;
  const bool is_aligned =
      a.cols % width == 0 && rows_are_aligned(a.x, a.x_rows, size) &&
      (a.dx == nullptr || rows_are_aligned(a.dx, a.dx_rows, size)) &&
      tessera::cuda::is_aligned16(a.dy) && tessera::cuda::is_aligned16(a.d_sum) &&
      tessera::cuda::is_aligned16(a.w) && tessera::cuda::is_aligned16(a.partials);
  const int64_t num_vecs = a.cols / width;
  const bool is_fast = is_aligned && num_vecs <= kBwdVecs * kBwdMaxThreads;
  const RowGeometry geometry = RowGeometry::choose(num_vecs, kBwdVecs, kBwdMaxThreads);
  const int block = is_fast ? geometry.block : any_block(a.cols, kBwdMaxThreads);
  const int block_rows = is_fast ? geometry.rows() : 1;
  int64_t blocks =
      std::min(ceil_div(a.rows, block_rows),
               static_cast<int64_t>(num_multiprocessors()) * (resident_blocks * 256 / block));
  if (a.partials != nullptr) blocks = std::min(blocks, a.partial_rows());
  size_t smem_bytes = RowGroup::kSmemBytes;
  if (block_rows > 1) smem_bytes += static_cast<size_t>(block_rows * a.cols) * sizeof(float);
  return {{grid_blocks(blocks), static_cast<unsigned>(block), smem_bytes, stream},
          is_fast ? geometry.threads : 0};
}

// ---- launchers ----------------------------------------------------------------------------------

/// Calls f with the C++ types of the rows and of w.
template <class F>
void visit_types(const char* name, DType dtype, DType w_dtype, F&& f) {
  tessera::cuda::visit_device_float(dtype, name, [&](auto tag) {
    if (w_dtype == dtype) {
      f(tag, tag);
    } else {
      f(tag, TypeTag<float>{});
    }
  });
}

template <bool kCentered>
void norm_fwd(const char* name, cudaStream_t stream, const NormFwd& a) {
  visit_types(name, a.dtype, a.w_dtype, [&](auto t, auto w) {
    using T = typename decltype(t)::type;
    using W = typename decltype(w)::type;
    if (a.rows == 0) return;
    const NormConfig config = norm_fwd_config(a, stream);
    if (config.row_threads != 0) {
      launch(name, &norm_fwd_kernel<T, W, kCentered>, config.launch, a, config.row_threads);
    } else {
      launch(name, &norm_fwd_any_kernel<T, W, kCentered>, config.launch, a);
    }
  });
}

template <class T, class W, bool kCentered>
void launch_norm_bwd(const char* name, const NormBwd& a, const NormConfig& config) {
  if (config.row_threads == 0) {
    launch(name, &norm_bwd_any_kernel<T, W, kCentered>, config.launch, a);
  } else if (config.launch.block.x == 256) {
    launch(name, &norm_bwd_kernel<T, W, kCentered, 256>, config.launch, a, config.row_threads);
  } else {
    launch(name, &norm_bwd_kernel<T, W, kCentered, kBwdMaxThreads>, config.launch, a,
           config.row_threads);
  }
}

template <bool kCentered>
void norm_bwd(const char* name, cudaStream_t stream, const NormBwd& a) {
  const NormConfig config = norm_bwd_config(a, kBwdResidentBlocks<kCentered>, stream);
  visit_types(name, a.dtype, a.w_dtype, [&](auto t, auto w) {
    if (a.rows == 0) return;
    launch_norm_bwd<typename decltype(t)::type, typename decltype(w)::type, kCentered>(name, a,
                                                                                       config);
  });
  if (a.partials == nullptr) return;
  AddPartials add{};
  add.outputs[0] = {a.dw, a.dw_dtype, a.accumulate_dw};
  add.outputs[1] = {a.db, a.db_dtype, a.accumulate_db};
  add.partials = static_cast<const float*>(a.partials);
  add.count = config.launch.grid.x;
  add.num_outputs = kCentered ? 2 : 1;
  add.cols = a.cols;
  for (int o = 0; o < add.num_outputs; ++o) {
    if (add.outputs[o].dst != nullptr) check_device_float(add.outputs[o].dtype, name);
  }
  launch(name, &add_partials_kernel,
         LaunchConfig{grid_blocks(ceil_div(a.cols, kAddCols) * add.num_outputs),
                      kAddWarps * kAddCols, kAddWarps * kAddCols * sizeof(float), stream},
         add);
}

}  // namespace

void layer_norm_fwd(CUstream_st* stream, const NormFwd& a) {
  norm_fwd<true>("layer_norm_fwd", stream, a);
}

void rms_norm_fwd(CUstream_st* stream, const NormFwd& a) {
  norm_fwd<false>("rms_norm_fwd", stream, a);
}

void layer_norm_bwd(CUstream_st* stream, const NormBwd& a) {
  norm_bwd<true>("layer_norm_bwd", stream, a);
}

void rms_norm_bwd(CUstream_st* stream, const NormBwd& a) {
  norm_bwd<false>("rms_norm_bwd", stream, a);
}

}  // namespace tessera::kernels::cuda
