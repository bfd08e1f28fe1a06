// Softmax and log-softmax over rows of V elements.
//
//   forward   y = exp(x - max) / sum(exp(x - max));  log: y = x - max - log(sum)
//   backward  dx = y (dy - sum(dy y));  log: dx = dy - exp(y) sum(dy)
//
// Layout           a row belongs to a group of threads (RowGroup), which walk it in vectors of 16
//                  bytes, twice: for the sums, then to write. The second reading comes from the
//                  caches for rows of usual lengths. Forward sums are online: maximum and sum of
//                  exponentials in one reading, the sum rescaled when the maximum grows.
// Parallelization  a grid that fits the device strides over the rows.
// Other rows       not on 16-byte boundaries: the same kernels with vectors of one element.
// Determinism      the order of every sum is a function of the row length and its alignment.

#include "core/runtime/cuda/launch.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/rows.cuh"
#include "kernels/softmax/kernel.h"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::dynamic_smem;
using tessera::cuda::grid_blocks;
using tessera::cuda::is_aligned16;
using tessera::cuda::kVec;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;

constexpr int kMaxThreads = 1024;
constexpr int kResidentThreads = 2048;  // of a multiprocessor
constexpr int kVecsPerThread = 4;       // what a thread should have of a row before a second joins

__device__ float exponential(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  return tessera::cuda::exp2_approx(x * kLog2E);
}

/// Maximum of the elements seen and sum of exp(x - max).
struct OnlineSum {
  float max = -INFINITY, sum = 0;

  template <int N>
  __device__ void add(const Floats<N>& x) {
    float top = x[0];
#pragma unroll
    for (int i = 1; i < N; ++i) top = fmaxf(top, x[i]);
    if (top > max) {
      sum *= exponential(max - top);
      max = top;
    }
    // While nothing but -inf was seen, (-inf) - (-inf) would be NaN; what is NaN stays NaN.
    const float base = max == -INFINITY ? 0.0f : max;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exponential(x[i] - base);
  }
};

template <class T, int N, bool kLog>
__global__ void __launch_bounds__(kMaxThreads, 1)
    softmax_fwd_kernel(SoftmaxFwd a, int row_threads) {
  [[maybe_unused]] constexpr int kUnroll = N == 1 ? 1 : 4;
  RowGroup group(row_threads, dynamic_smem<float>());
  const int64_t block_rows = static_cast<int>(blockDim.x) / row_threads;
  for (int64_t first = blockIdx.x * block_rows; first < a.rows; first += gridDim.x * block_rows) {
    const int64_t row = first + group.index(), cols = row < a.rows ? a.cols : 0;
    const T* x = static_cast<const T*>(a.x) + row_offset(a.x_rows, row);
    const int64_t step = static_cast<int64_t>(row_threads) * N;
    OnlineSum online;
#pragma unroll kUnroll
    for (int64_t c = group.lane() * N; c < cols; c += step) online.add(load_floats<N>(x + c));
    const float max = group.max(online.max);
    // A row of -inf alone is NaN, as exp(-inf + inf) is.
    const float own = online.max == -INFINITY ? 0.0f : exponential(online.max - max);
    const float sum = group.sum(max == -INFINITY ? NAN : online.sum * own);
    const float scale = 1.0f / sum, log_sum = logf(sum);
    T* y = static_cast<T*>(a.y) + row * a.cols;
#pragma unroll kUnroll
    for (int64_t c = group.lane() * N; c < cols; c += step) {
      Floats<N> out = load_floats<N>(x + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        out[i] = kLog ? (out[i] - max) - log_sum : exponential(out[i] - max) * scale;
      }
      store_floats(y + c, out);
    }
  }
}

template <class T, int N, bool kLog>
__global__ void __launch_bounds__(kMaxThreads, 1)
    softmax_bwd_kernel(SoftmaxBwd a, int row_threads) {
  [[maybe_unused]] constexpr int kUnroll = N == 1 ? 1 : 2;
  RowGroup group(row_threads, dynamic_smem<float>());
  const int64_t block_rows = static_cast<int>(blockDim.x) / row_threads;
  for (int64_t first = blockIdx.x * block_rows; first < a.rows; first += gridDim.x * block_rows) {
    const int64_t row = first + group.index(), cols = row < a.rows ? a.cols : 0;
    const T* y_row = static_cast<const T*>(a.y) + row * a.cols;
    const T* dy_row = static_cast<const T*>(a.dy) + row * a.cols;
    const int64_t step = static_cast<int64_t>(row_threads) * N;
    float total = 0;
#pragma unroll kUnroll
    for (int64_t c = group.lane() * N; c < cols; c += step) {
      const Floats<N> dy = load_floats<N>(dy_row + c);
      if constexpr (kLog) {
#pragma unroll
        for (int i = 0; i < N; ++i) total += dy[i];
      } else {
        const Floats<N> y = load_floats<N>(y_row + c);
#pragma unroll
        for (int i = 0; i < N; ++i) total += dy[i] * y[i];
      }
    }
    total = group.sum(total);
    T* dx = static_cast<T*>(a.dx) + row_offset(a.dx_rows, row);
#pragma unroll kUnroll
    for (int64_t c = group.lane() * N; c < cols; c += step) {
      Floats<N> out = load_floats<N>(dy_row + c);
      const Floats<N> y = load_floats<N>(y_row + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        out[i] = kLog ? out[i] - exponential(y[i]) * total : y[i] * (out[i] - total);
      }
      store_floats(dx + c, out, a.accumulate);
    }
  }
}

struct RowsConfig {
  LaunchConfig launch;
  int row_threads;
};

RowsConfig rows_config(int64_t rows, int64_t cols, int width, cudaStream_t stream) {
  const RowGeometry geometry =
      RowGeometry::choose(ceil_div(cols, width), kVecsPerThread, kMaxThreads);
  const int64_t resident = static_cast<int64_t>(tessera::cuda::num_multiprocessors()) *
                           (kResidentThreads / geometry.block);
  const int64_t blocks = std::min(ceil_div(rows, geometry.rows()), resident);
  return {
      {grid_blocks(blocks), static_cast<unsigned>(geometry.block), RowGroup::kSmemBytes, stream},
      geometry.threads};
}

template <class T, int N, bool kLog>
auto kernel_for(const SoftmaxFwd&) {
  return &softmax_fwd_kernel<T, N, kLog>;
}
template <class T, int N, bool kLog>
auto kernel_for(const SoftmaxBwd&) {
  return &softmax_bwd_kernel<T, N, kLog>;
}

bool has_aligned_rows(const SoftmaxFwd& a) {
  return is_aligned16(a.y) && rows_are_aligned(a.x, a.x_rows, size_of(a.dtype));
}
bool has_aligned_rows(const SoftmaxBwd& a) {
  return is_aligned16(a.y) && is_aligned16(a.dy) &&
         rows_are_aligned(a.dx, a.dx_rows, size_of(a.dtype));
}

template <bool kLog, class Args>
void launch_rows(const char* name, cudaStream_t stream, const Args& a) {
  tessera::cuda::visit_device_float(a.dtype, name, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVec<T>;
    if (a.rows * a.cols == 0) return;
    const bool is_aligned = a.cols % N == 0 && has_aligned_rows(a);
    const RowsConfig config = rows_config(a.rows, a.cols, is_aligned ? N : 1, stream);
    launch(name, is_aligned ? kernel_for<T, N, kLog>(a) : kernel_for<T, 1, kLog>(a), config.launch,
           a, config.row_threads);
  });
}

}  // namespace

void softmax_fwd(CUstream_st* stream, const SoftmaxFwd& a) {
  launch_rows<false>("softmax_fwd", stream, a);
}

void log_softmax_fwd(CUstream_st* stream, const SoftmaxFwd& a) {
  launch_rows<true>("log_softmax_fwd", stream, a);
}

void softmax_bwd(CUstream_st* stream, const SoftmaxBwd& a) {
  launch_rows<false>("softmax_bwd", stream, a);
}

void log_softmax_bwd(CUstream_st* stream, const SoftmaxBwd& a) {
  launch_rows<true>("log_softmax_bwd", stream, a);
}

}  // namespace tessera::kernels::cuda
