// Cross entropy of rows of logits on CUDA.
//
//   log p[c] = (x[c] - max) - log(sum(exp(x - max)));  loss = -log p[target]
//   dlogits[c] = (p[c] - [c == target]) * scale
// Label smoothing  e: [c == target] is (1 - e) [c == target] + e / V; the forward reads the row twice
// Z-loss           z log(sum(exp(x)))^2 more; p counts times 1 + 2 z log(sum(exp(x)))
// Soft-cap         x = cap tanh(logit / cap) as it is read; dlogits counts times 1 - tanh^2
// Layout           rows of 16-byte vectors where rows start at 16 bytes, else element by element
// Parallelization  a block a row: each thread keeps a maximum and a sum against it (online
//                  softmax), four vectors in flight, then the block combines them
// Memory           forward: one read. backward: one read, one write. fused: one read and one write
//                  as far as the caches reach: the last kCacheCols columns stay in shared memory;
//                  the others are read from the end to the beginning and then made into gradients
//                  from the beginning on, so that what was read last is found in the L2 cache.
// In place         gradients of a narrower type start at the row's first byte and lie over logits
//                  that others still have to read: a block goes in steps of columns, all threads
//                  read before any writes
// Targets          a target that is neither a class nor ignore_index makes loss and gradient NaN
// Determinism      which thread adds what depends on vocabulary and alignment only

#include <algorithm>

#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/ptx.cuh"
#include "core/runtime/cuda/reduce.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/loss/kernel.h"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::block_max;
using tessera::cuda::block_sum;
using tessera::cuda::dynamic_smem;
using tessera::cuda::exp2_approx;
using tessera::cuda::grid_blocks;
using tessera::cuda::is_aligned16;
using tessera::cuda::kVec;
using tessera::cuda::kWarpSize;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;
using tessera::cuda::rcp_approx;
using tessera::cuda::to_float;
using tessera::cuda::visit_device_float;

constexpr float kLog2E = 1.44269504f;
constexpr int kUnroll = 4;
constexpr int kRowBlock = 256;                       // forward and backward
constexpr int kSmallBlock = 128, kFusedBlock = 512;  // fused, by the length of the rows
constexpr int64_t kSmallVocab = 2048;
constexpr int64_t kCacheCols = 24 * 1024 - 32;  // with the sums of warps 96 KiB: two blocks a
                                                // multiprocessor of sm_90

__device__ int64_t target_at(const Targets& targets, int64_t row) {
  return targets.dtype == kI64 ? static_cast<const int64_t*>(targets.data)[row]
                               : static_cast<const int32_t*>(targets.data)[row];
}

__device__ float exp_approx(float x) {
  return exp2_approx(x * kLog2E);
}

/// tanh(x / cap) within 2^-22, with inner = 2 / (cap ln 2): as 1 - 2 / (e^2x + 1).
__device__ float capped_fraction(float x, float inner) {
  return 1.0f - 2.0f * rcp_approx(exp2_approx(x * inner) + 1.0f);
}

/// The maximum so far and the sum of exponentials against it.
struct OnlineSum {
  float max = -INFINITY, sum = 0;

  /// What exponentials are taken against; finite while all logits so far are -inf.
  __device__ float reference() const { return max == -INFINITY ? 0.0f : max; }

  template <int N, int kCount>
  __device__ void add(const Floats<N> (&values)[kCount]) {
    float largest = max;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int i = 0; i < N; ++i) largest = fmaxf(largest, values[u][i]);
    }
    if (largest > max) {
      sum *= exp_approx(max - largest);  // max = -inf: the sum is 0 and stays 0
      max = largest;
    }
    const float against = reference();
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum += exp_approx(values[u][i] - against);
    }
  }

  /// That of all threads of the block; `smem` holds a float a warp.
  template <int kBlock>
  __device__ void combine(float* smem) {
    const float own = max;
    max = block_max<kBlock>(max, smem);
    sum = block_sum<kBlock>(sum * exp_approx(own - reference()), smem);
  }
};

/// Columns [col, col + W) of a row; -inf behind its end.
template <int W, class T>
__device__ Floats<W> load_cols(const T* row, int64_t col, int64_t end) {
  if (col + W <= end) return load_floats<W>(row + col);
  Floats<W> values;
#pragma unroll
  for (int i = 0; i < W; ++i) values[i] = col + i < end ? to_float(row[col + i]) : -INFINITY;
  return values;
}
/// The same of logits that a soft-cap bounds; 0 bounds none.
template <int W, class T>
__device__ Floats<W> load_capped(const T* row, int64_t col, int64_t end, float cap) {
  Floats<W> values = load_cols<W>(row, col, end);
  if (cap > 0.0f) {
    const float inner = 2.0f * kLog2E / cap;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      if (col + i < end) values[i] = cap * capped_fraction(values[i], inner);
    }
  }
  return values;
}
template <int W, class D>
__device__ void store_cols(D* row, int64_t col, int64_t end, const Floats<W>& values,
                           bool accumulate) {
  if (col + W <= end) return store_floats(row + col, values, accumulate);
#pragma unroll
  for (int i = 0; i < W; ++i) {
    if (col + i < end) {
      const float old = accumulate ? to_float(row[col + i]) : 0.0f;
      row[col + i] = tessera::cuda::from_float<D>(old + values[i]);
    }
  }
}

/// Columns that a block of kBlock threads takes in one step. Vector u of a thread begins at
/// step * kStep + (u * kBlock + thread) * W.
template <int kBlock, int W>
constexpr int64_t kStep = int64_t{kBlock} * W* kUnroll;

template <int kBlock, int W>
__device__ int64_t column(int64_t begin, int64_t step, int u) {
  return begin + step * kStep<kBlock, W> + (u * kBlock + static_cast<int>(threadIdx.x)) * W;
}
template <int kBlock, int W>
__device__ int64_t num_steps(int64_t cols) {
  return (cols + kStep<kBlock, W> - 1) / kStep<kBlock, W>;
}

/// Adds columns [begin, end), from the end to the beginning.
template <int kBlock, int W, class T>
__device__ void add_cols(OnlineSum& online, const T* row, int64_t begin, int64_t end,
                         float cap = 0.0f) {
  for (int64_t step = num_steps<kBlock, W>(end - begin) - 1; step >= 0; --step) {
    Floats<W> values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      values[u] = load_capped<W>(row, column<kBlock, W>(begin, step, u), end, cap);
    }
    online.add(values);
  }
}

/// The sum of columns [0, end), in every thread; `smem` holds a float a warp.
template <int kBlock, int W, class T>
__device__ float sum_cols(const T* row, int64_t end, float cap, float* smem) {
  float sum = 0;
  for (int64_t step = 0; step < num_steps<kBlock, W>(end); ++step) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t col = column<kBlock, W>(0, step, u);
      const Floats<W> values = load_capped<W>(row, col, end, cap);
#pragma unroll
      for (int i = 0; i < W; ++i) sum += col + i < end ? values[i] : 0.0f;
    }
  }
  return block_sum<kBlock>(sum, smem);
}

template <int kBlock, int W, class D>
__device__ void zero_cols(D* row, int64_t vocab) {
  for (int64_t step = 0; step < num_steps<kBlock, W>(vocab); ++step) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      store_cols(row, column<kBlock, W>(0, step, u), vocab, Floats<W>{}, false);
    }
  }
}

template <class T, int W>
__global__ void __launch_bounds__(kRowBlock, 3) cross_entropy_fwd_kernel(const CrossEntropyFwd p) {
  const int64_t row = blockIdx.x;
  const int64_t target = target_at(p.targets, row);
  const bool is_ignored = target == p.targets.ignore_index;
  const T* const x = static_cast<const T*>(p.logits) + row * p.row_stride;
  OnlineSum online;
  if (!is_ignored) {
    add_cols<kRowBlock, W>(online, x, 0, p.vocab, p.softcap);
    online.combine<kRowBlock>(dynamic_smem<float>());
  }
  float sum = 0;
  if (p.label_smoothing > 0.0f && !is_ignored) {
    sum = sum_cols<kRowBlock, W>(x, p.vocab, p.softcap, dynamic_smem<float>());
  }
  if (threadIdx.x != 0) return;
  const bool is_class = target >= 0 && target < p.vocab;
  const float log_sum = is_ignored ? 0.0f : logf(online.sum);
  const float max = is_ignored ? 0.0f : online.max;
  const float logit = is_ignored ? 0.0f
                      : is_class
                          ? static_cast<float>(load_capped<1>(x, target, p.vocab, p.softcap)[0])
                          : NAN;
  float loss = log_sum - (logit - max);
  if (p.label_smoothing > 0.0f && !is_ignored) {
    loss += p.label_smoothing * (logit - sum / static_cast<float>(p.vocab));
  }
  if (p.z_loss > 0.0f) loss += p.z_loss * (max + log_sum) * (max + log_sum);  // ignored: of 0
  static_cast<float*>(p.losses)[row] = loss;
  if (p.stats == nullptr) return;
  static_cast<float*>(p.stats)[2 * row] = max;
  static_cast<float*>(p.stats)[2 * row + 1] = log_sum;
}

template <class T, class D, int W>
__global__ void __launch_bounds__(kRowBlock, 3)
    cross_entropy_bwd_kernel(const CrossEntropyBwd p, bool is_ordered) {
  const int64_t row = blockIdx.x;
  const int64_t target_class = target_at(p.targets, row);
  D* const dst = static_cast<D*>(p.dlogits) + row * p.dlogits_row_stride;
  if (target_class == p.targets.ignore_index) {
    if (!p.accumulate) zero_cols<kRowBlock, W>(dst, p.vocab);
    return;
  }
  const T* const x = static_cast<const T*>(p.logits) + row * p.row_stride;
  const float max = static_cast<const float*>(p.stats)[2 * row];
  const float log_sum = static_cast<const float*>(p.stats)[2 * row + 1];  // of_fused: the sum
  const int64_t num_classes = p.num_classes > 0 ? p.num_classes : p.vocab;
  const bool is_class = target_class >= 0 && target_class < num_classes;
  const int64_t target = target_class - p.first;
  const float scale = is_class ? static_cast<const float*>(p.scale)[row * p.scale_stride] : NAN;
  // What p, the target and all classes count.
  const float of_p = p.z_loss > 0.0f ? scale * (1.0f + 2.0f * p.z_loss * (max + log_sum)) : scale;
  const float of_target = scale * (1.0f - p.label_smoothing);
  const float of_all = scale * p.label_smoothing / static_cast<float>(num_classes);
  const float inner = 2.0f * kLog2E / p.softcap, factor = scale / log_sum;
  for (int64_t step = 0; step < num_steps<kRowBlock, W>(p.vocab); ++step) {
    Floats<W> values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      values[u] = load_cols<W>(x, column<kRowBlock, W>(0, step, u), p.vocab);
    }
    if (is_ordered) __syncthreads();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t col = column<kRowBlock, W>(0, step, u);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float at_target = col + i == target ? of_target : 0.0f;
        if (p.softcap > 0.0f) {
          const float t = capped_fraction(values[u][i], inner);
          const float p_col = exp_approx((p.softcap * t - max) - log_sum);
          values[u][i] = (p_col * of_p - at_target - of_all) * (1.0f - t * t);
        } else if (p.of_fused) {
          values[u][i] = exp_approx(values[u][i] - max) * factor - at_target;
        } else {
          const float p_col = exp_approx((values[u][i] - max) - log_sum);
          values[u][i] = p_col * of_p - at_target - of_all;
        }
      }
      store_cols(dst, col, p.vocab, values[u], p.accumulate);
    }
  }
}

template <class D, int kBlock, int W>
__global__ void __launch_bounds__(kBlock)
    cross_entropy_fused_kernel(const CrossEntropyFused p, int64_t cached_from) {
  float* const warp_sums = dynamic_smem<float>();
  float* const cache = dynamic_smem<float>(kWarpSize * sizeof(float));
  const int64_t row = blockIdx.x;
  const int64_t target = target_at(p.targets, row);
  float* const x = static_cast<float*>(p.logits) + row * p.row_stride;
  D* const dst = reinterpret_cast<D*>(x);
  if (target == p.targets.ignore_index) {
    if (threadIdx.x == 0) static_cast<float*>(p.losses)[row] = 0;
    return zero_cols<kBlock, W>(dst, p.vocab);
  }
  const bool is_class = target >= 0 && target < p.vocab;
  const float logit = is_class ? x[target] : NAN;

  OnlineSum online;
  for (int64_t step = num_steps<kBlock, W>(p.vocab - cached_from) - 1; step >= 0; --step) {
    Floats<W> values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      values[u] = load_cols<W>(x, column<kBlock, W>(cached_from, step, u), p.vocab);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {  // read again by the same thread
      const int64_t col = column<kBlock, W>(cached_from, step, u);
      if (col < p.vocab) store_floats(cache + (col - cached_from), values[u]);
    }
    online.add(values);
  }
  add_cols<kBlock, W>(online, x, 0, cached_from);
  online.combine<kBlock>(warp_sums);
  if (threadIdx.x == 0) {
    static_cast<float*>(p.losses)[row] = logf(online.sum) - (logit - online.max);
  }

  const float scale = is_class ? *static_cast<const float*>(p.scale) : NAN;
  const float factor = scale / online.sum, reference = online.reference();
  if (p.stats != nullptr && threadIdx.x == 0) {
    static_cast<float*>(p.stats)[2 * row] = reference;
    static_cast<float*>(p.stats)[2 * row + 1] = online.sum;
  }
  const auto store = [&](int64_t col, Floats<W>& values) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const float p_scaled = exp_approx(values[i] - reference) * factor;
      values[i] = p_scaled - (col + i == target ? scale : 0.0f);
    }
    store_cols(dst, col, p.vocab, values, false);
  };
  for (int64_t step = 0; step < num_steps<kBlock, W>(cached_from); ++step) {
    Floats<W> values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      values[u] = load_cols<W>(x, column<kBlock, W>(0, step, u), cached_from);
    }
    if constexpr (sizeof(D) < sizeof(float)) __syncthreads();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t col = column<kBlock, W>(0, step, u);
      if (col < cached_from) store(col, values[u]);
    }
  }
  // The barriers of `combine` or of the last step: nobody reads logits from here on.
  for (int64_t step = 0; step < num_steps<kBlock, W>(p.vocab - cached_from); ++step) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t col = column<kBlock, W>(cached_from, step, u);
      if (col >= p.vocab) continue;
      Floats<W> values = load_floats<W>(cache + (col - cached_from));
      store(col, values);
    }
  }
}

constexpr int kTotalBlock = 1024;

__global__ void __launch_bounds__(kTotalBlock) loss_total_kernel(const LossTotal p) {
  double sum = 0, count = 0;
  for (int64_t row = threadIdx.x; row < p.rows; row += kTotalBlock) {
    if (target_at(p.targets, row) == p.targets.ignore_index) continue;
    sum += static_cast<double>(static_cast<const float*>(p.losses)[row]);
    count += 1;
  }
  double* const smem = dynamic_smem<double>();
  sum = block_sum<kTotalBlock>(sum, smem);
  count = block_sum<kTotalBlock>(count, smem);
  if (threadIdx.x != 0) return;
  *static_cast<float*>(p.sum) = static_cast<float>(sum);
  *static_cast<float*>(p.count) = static_cast<float>(count);
}

LaunchConfig row_config(int64_t rows, int block, int64_t smem_nbytes, CUstream_st* stream) {
  return {dim3(grid_blocks(rows)), dim3(static_cast<unsigned>(block)),
          static_cast<size_t>(smem_nbytes), stream};
}

/// Whether rows of `stride` elements can be read in 16-byte vectors.
bool has_vectors(const void* data, int64_t stride, DType dtype) {
  return is_aligned16(data) && stride * static_cast<int64_t>(size_of(dtype)) % 16 == 0;
}

/// Calls f(TypeTag<T>, TypeTag<D>) with the types of logits and of their gradient.
template <class F>
void visit_types(const char* op, DType dtype, DType dlogits_dtype, F&& f) {
  visit_device_float(dtype, op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, float>) {
      visit_device_float(dlogits_dtype, op, [&](auto d) { f(tag, d); });
    } else {
      f(tag, tag);
    }
  });
}

}  // namespace

void cross_entropy_fwd(CUstream_st* stream, const CrossEntropyFwd& p) {
  if (p.rows == 0) return;
  visit_device_float(p.dtype, p.targets.op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const LaunchConfig config = row_config(
        p.rows, kRowBlock, kRowBlock / kWarpSize * static_cast<int64_t>(sizeof(float)), stream);
    if (has_vectors(p.logits, p.row_stride, p.dtype)) {
      launch("cross_entropy_fwd", &cross_entropy_fwd_kernel<T, kVec<T>>, config, p);
    } else {
      launch("cross_entropy_fwd", &cross_entropy_fwd_kernel<T, 1>, config, p);
    }
  });
}

void cross_entropy_bwd(CUstream_st* stream, const CrossEntropyBwd& p) {
  if (p.rows == 0) return;
  const bool has_wide_rows = has_vectors(p.logits, p.row_stride, p.dtype) &&
                             has_vectors(p.dlogits, p.dlogits_row_stride, p.dlogits_dtype);
  const bool is_ordered = p.dlogits == p.logits && size_of(p.dlogits_dtype) < size_of(p.dtype);
  visit_types(p.targets.op, p.dtype, p.dlogits_dtype, [&](auto t, auto d) {
    using T = typename decltype(t)::type;
    using D = typename decltype(d)::type;
    const LaunchConfig config = row_config(p.rows, kRowBlock, 0, stream);
    if (has_wide_rows) {
      launch("cross_entropy_bwd", &cross_entropy_bwd_kernel<T, D, kVec<T>>, config, p, is_ordered);
    } else {
      launch("cross_entropy_bwd", &cross_entropy_bwd_kernel<T, D, 1>, config, p, is_ordered);
    }
  });
}

void cross_entropy_fused(CUstream_st* stream, const CrossEntropyFused& p) {
  if (p.rows == 0) return;
  visit_device_float(p.dtype, p.targets.op, [](auto) {});
  // A multiple of all vector widths, so that the cached columns begin with a vector.
  const int64_t cached_from = std::max<int64_t>(0, (p.vocab - kCacheCols + 15) / 16 * 16);
  const int64_t cached_cols = (p.vocab - cached_from + 3) / 4 * 4;
  const int64_t smem_nbytes = (kWarpSize + cached_cols) * static_cast<int64_t>(sizeof(float));
  visit_device_float(p.dlogits_dtype, p.targets.op, [&](auto tag) {
    using D = typename decltype(tag)::type;
    const bool is_wide = has_vectors(p.logits, p.row_stride, p.dtype);
    const auto run = [&](auto kernel, int block) {
      launch("cross_entropy_fused", kernel, row_config(p.rows, block, smem_nbytes, stream), p,
             cached_from);
    };
    if (p.vocab <= kSmallVocab) {
      is_wide ? run(&cross_entropy_fused_kernel<D, kSmallBlock, 4>, kSmallBlock)
              : run(&cross_entropy_fused_kernel<D, kSmallBlock, 1>, kSmallBlock);
    } else {
      is_wide ? run(&cross_entropy_fused_kernel<D, kFusedBlock, 4>, kFusedBlock)
              : run(&cross_entropy_fused_kernel<D, kFusedBlock, 1>, kFusedBlock);
    }
  });
}

void loss_total(CUstream_st* stream, const LossTotal& p) {
  visit_device_float(p.dtype, p.targets.op, [](auto) {});
  launch("loss_total", &loss_total_kernel,
         row_config(1, kTotalBlock, kTotalBlock / kWarpSize * static_cast<int64_t>(sizeof(double)),
                    stream),
         p);
}

}  // namespace tessera::kernels::cuda
