// Optimizer updates on a flat shard: one launch, each byte read once and written once.
//
//   AdamW, one element:  g = grad * grad_scale;  m += (1 - beta1) (g - m)
//                        v = beta2 v + (1 - beta2) g^2;  p = keep p - step_size m / (sqrt(v) root2
//                        + eps);  low = p rounded
// Layout           flat arrays of one length; a thread takes kWidth = 4 neighbours: 16-byte loads
//                  of p, m, v and an f32 gradient, an 8-byte store of the low-precision copy. A
//                  warp touches whole sectors in every access.
// Parallelization  a grid that fits the device strides over the shard, so that all blocks stay in
//                  one neighbourhood of each array. No shared memory, no barrier: 64 bytes a thread
//                  are in flight, 64 KiB a multiprocessor, where 40 KiB cover the latency
//                  of 4.8 TB/s.
// Segments         a thread remembers the segment it is in and searches the table when it leaves
//                  it. Vectors across a border go element by element; padding is not touched.
// Stochastic rounding  a variant of the kernel: one Philox block for the four neighbours, whose
//                  element is a multiple of 4 in every layout of ours; others go one by one.
// Eight-bit AdamW  a warp takes a block of 256 states, which its lanes share out; the block's
//                  largest magnitude goes through the warp, codes are found by eight comparisons
//                  with thresholds in shared memory. 16 bytes an element instead of 28.
// Device scalars   gradient scale, skip flag and step count are read here: the host knows none.
// Determinism      elements are independent of each other.

#include <cmath>

#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/reduce.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/optimizer/dynamic_map.h"
#include "kernels/optimizer/kernel.h"
#include "kernels/optimizer/rounding.h"
#include "kernels/random/philox.cuh"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::grid_blocks;
using tessera::cuda::is_aligned16;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;
using tessera::cuda::load_streaming;
using tessera::cuda::store_streaming;

constexpr int kBlock = 256;
constexpr int kWidth = 4;

/// The segment that a thread is in: elements [begin, end) of the shard.
struct Segment {
  int64_t index = 0, begin = 0, end = 0;
};

/// Moves to the first segment that ends behind `at`; behind all of them to an empty one at
/// infinity.
__device__ void seek(const FlatUpdate& p, int64_t at, Segment& segment) {
  int64_t low = segment.index, high = p.num_segments;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (p.bounds[2 * middle + 1] <= at) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  constexpr int64_t kInfinity = INT64_MAX;
  segment.index = low;
  segment.begin = low < p.num_segments ? p.bounds[2 * low] : kInfinity;
  segment.end = low < p.num_segments ? p.bounds[2 * low + 1] : kInfinity;
}

/// base^exponent by squaring: 2 log2(exponent) multiplications instead of the code of pow.
__device__ double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

/// Writes the low-precision copy, rounded to nearest.
class NearestLow {
 public:
  __device__ explicit NearestLow(const FlatUpdate&) {}
  __device__ void enter(const FlatUpdate&, int64_t) {}
  __device__ bool takes_vector(int64_t) const { return true; }

  template <int N>
  __device__ void store(const FlatUpdate& p, int64_t at, const Floats<N>& master) const {
    if (p.low != nullptr) store_floats(p.low, p.low_dtype, at, master, false);
  }
};

/// The same with stochastic rounding.
class StochasticLow {
 public:
  __device__ explicit StochasticLow(const FlatUpdate& p)
      : step_(static_cast<uint64_t>(*p.rounding.step)) {}

  __device__ void enter(const FlatUpdate& p, int64_t segment) {
    const auto packed = static_cast<uint64_t>(p.rounding.segments[2 * segment]);
    key_ = {static_cast<uint32_t>(packed), static_cast<uint32_t>(packed >> 32)};
    origin_ = p.rounding.segments[2 * segment + 1];
  }
  /// Whether the four elements from `element` of the shard on are one block.
  __device__ bool takes_vector(int64_t element) const { return (origin_ + element) % 4 == 0; }

  template <int N>
  __device__ void store(const FlatUpdate& p, int64_t at, const Floats<N>& master) const {
    static_assert(N == 1 || N == 4);
    if (step_ == 0) {
      store_floats(p.low, p.low_dtype, at, master, false);
      return;
    }
    const int64_t element = origin_ + p.first + at;
    const Words words = philox_words(key_, step_, static_cast<uint64_t>(element / 4));
    if (p.low_dtype == kBF16) {
      store_as<BFloat16>(p, at, master, words, element);
    } else {
      store_as<Float16>(p, at, master, words, element);
    }
  }

 private:
  template <class T, int N>
  __device__ static void store_as(const FlatUpdate& p, int64_t at, const Floats<N>& master,
                                  const Words& words, int64_t element) {
    tessera::cuda::Vec<T, N> low = round_floats<T>(master);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      uint32_t word = words.values[i];
      if constexpr (N == 1) {
        const auto w = static_cast<int>(element % 4);
        word = w == 0   ? words.values[0]
               : w == 1 ? words.values[1]
               : w == 2 ? words.values[2]
                        : words.values[3];
      }
      low[i].bits = round_stochastic<T>(__float_as_uint(master[i]), word, low[i].bits);
    }
    tessera::cuda::store_vec(static_cast<T*>(p.low) + at, low);
  }

  uint64_t step_;
  int64_t origin_ = 0;
  PhiloxKey key_ = {};
};

/// The update rules: constants of the launch, constants of a segment, N elements from `at` on.
class AdamWRule {
 public:
  using Args = AdamWStep;
  static constexpr int kBlocksPerMultiprocessor = 4;  // 64 registers a thread

  __device__ explicit AdamWRule(const AdamWStep& p)
      : inverse_correction1_(1 / (1 - power(p.beta1, *p.step))),
        root2_(static_cast<float>(1 / sqrt(1 - power(p.beta2, *p.step)))),
        scale_(p.grad_scale == nullptr ? 1.0f : *p.grad_scale) {}

  __device__ void enter(const AdamWStep& p, float lr_factor, float decay_factor, int64_t) {
    const double lr = static_cast<double>(p.lr) * static_cast<double>(lr_factor);
    const double decay = static_cast<double>(p.weight_decay) * static_cast<double>(decay_factor);
    keep_ = static_cast<float>(1 - lr * decay);
    step_size_ = static_cast<float>(lr * inverse_correction1_);
  }

  template <int N, class Grad, class Low>
  __device__ void update(const AdamWStep& p, int64_t at, const Low& low) const {
    const auto grad = load_streaming<N>(static_cast<const Grad*>(p.grad) + at);
    Floats<N> master = load_streaming<N>(p.master + at);
    Floats<N> m = load_streaming<N>(p.exp_avg + at);
    Floats<N> v = load_streaming<N>(p.exp_avg_sq + at);
    const float weight1 = static_cast<float>(1 - p.beta1);
    const float weight2 = static_cast<float>(1 - p.beta2);
    const float beta2 = static_cast<float>(p.beta2), eps = static_cast<float>(p.eps);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float g = tessera::cuda::to_float(grad[i]) * scale_;
      m[i] += weight1 * (g - m[i]);
      v[i] = beta2 * v[i] + weight2 * g * g;
      master[i] = keep_ * master[i] - step_size_ * m[i] / (sqrtf(v[i]) * root2_ + eps);
    }
    store_streaming(p.master + at, master);
    store_streaming(p.exp_avg + at, m);
    store_streaming(p.exp_avg_sq + at, v);
    low.store(p, at, master);
  }

 private:
  double inverse_correction1_;
  float root2_, scale_, keep_ = 0, step_size_ = 0;
};

class SgdRule {
 public:
  using Args = SgdStep;
  static constexpr int kBlocksPerMultiprocessor = 6;

  __device__ explicit SgdRule(const SgdStep& p)
      : scale_(p.grad_scale == nullptr ? 1.0f : *p.grad_scale) {}

  __device__ void enter(const SgdStep& p, float lr_factor, float decay_factor, int64_t) {
    lr_ = p.lr * lr_factor;
    decay_ = p.weight_decay * decay_factor;
  }

  template <int N, class Grad, class Low>
  __device__ void update(const SgdStep& p, int64_t at, const Low& low) const {
    const auto grad = load_streaming<N>(static_cast<const Grad*>(p.grad) + at);
    Floats<N> master = load_streaming<N>(p.master + at), direction;
    if (p.momentum_buffer == nullptr) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        direction[i] = tessera::cuda::to_float(grad[i]) * scale_ + decay_ * master[i];
      }
    } else {
      Floats<N> b = load_streaming<N>(p.momentum_buffer + at);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float g = tessera::cuda::to_float(grad[i]) * scale_ + decay_ * master[i];
        b[i] = p.momentum * b[i] + g;
        direction[i] = p.nesterov ? g + p.momentum * b[i] : b[i];
      }
      store_streaming(p.momentum_buffer + at, b);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) master[i] -= lr_ * direction[i];
    store_streaming(p.master + at, master);
    low.store(p, at, master);
  }

 private:
  float scale_, lr_ = 0, decay_ = 0;
};

class MuonDirectionRule {
 public:
  using Args = MuonDirection;
  static constexpr int kBlocksPerMultiprocessor = 6;

  __device__ explicit MuonDirectionRule(const MuonDirection& p)
      : scale_(p.grad_scale == nullptr ? 1.0f : *p.grad_scale) {}
  __device__ void enter(const MuonDirection&, float, float, int64_t) {}

  template <int N, class Grad, class Low>
  __device__ void update(const MuonDirection& p, int64_t at, const Low&) const {
    const auto grad = load_streaming<N>(static_cast<const Grad*>(p.grad) + at);
    Floats<N> b = load_streaming<N>(p.momentum_buffer + at), direction;
    const float weight = 1 - p.momentum, of_b = p.nesterov ? p.momentum : 1.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float g = tessera::cuda::to_float(grad[i]) * scale_;
      b[i] += weight * (g - b[i]);
      direction[i] = g + of_b * (b[i] - g);
    }
    store_streaming(p.momentum_buffer + at, b);
    store_floats(p.direction + at, direction);
  }

 private:
  float scale_;
};

class MuonApplyRule {
 public:
  using Args = MuonApply;
  static constexpr int kBlocksPerMultiprocessor = 6;

  __device__ explicit MuonApplyRule(const MuonApply&) {}
  __device__ void enter(const MuonApply& p, float lr_factor, float decay_factor, int64_t segment) {
    const float lr = p.lr * lr_factor;
    keep_ = 1 - lr * p.weight_decay * decay_factor;
    step_ = lr * p.scales[segment];
  }

  template <int N, class Grad, class Low>
  __device__ void update(const MuonApply& p, int64_t at, const Low& low) const {
    const Floats<N> o = load_floats<N>(p.orthogonal + at);
    Floats<N> master = load_streaming<N>(p.master + at);
#pragma unroll
    for (int i = 0; i < N; ++i) master[i] = keep_ * master[i] - step_ * o[i];
    store_streaming(p.master + at, master);
    low.store(p, at, master);
  }

 private:
  float keep_ = 0, step_ = 0;
};

class LionRule {
 public:
  using Args = LionStep;
  static constexpr int kBlocksPerMultiprocessor = 6;

  __device__ explicit LionRule(const LionStep& p)
      : scale_(p.grad_scale == nullptr ? 1.0f : *p.grad_scale) {}

  __device__ void enter(const LionStep& p, float lr_factor, float decay_factor, int64_t) {
    lr_ = p.lr * lr_factor;
    keep_ = 1 - lr_ * p.weight_decay * decay_factor;
  }

  template <int N, class Grad, class Low>
  __device__ void update(const LionStep& p, int64_t at, const Low& low) const {
    const auto grad = load_streaming<N>(static_cast<const Grad*>(p.grad) + at);
    Floats<N> master = load_streaming<N>(p.master + at);
    Floats<N> m = load_streaming<N>(p.exp_avg + at);
    const float beta1 = static_cast<float>(p.beta1), beta2 = static_cast<float>(p.beta2);
    const float weight1 = static_cast<float>(1 - p.beta1);
    const float weight2 = static_cast<float>(1 - p.beta2);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float g = tessera::cuda::to_float(grad[i]) * scale_;
      const float u = beta1 * m[i] + weight1 * g;
      m[i] = beta2 * m[i] + weight2 * g;
      const float sign = u > 0 ? 1.0f : u < 0 ? -1.0f : u;
      master[i] = keep_ * master[i] - lr_ * sign;
    }
    store_streaming(p.master + at, master);
    store_streaming(p.exp_avg + at, m);
    low.store(p, at, master);
  }

 private:
  float scale_, lr_ = 0, keep_ = 0;
};

class AdafactorApplyRule {
 public:
  using Args = AdafactorApply;
  static constexpr int kBlocksPerMultiprocessor = 4;

  __device__ explicit AdafactorApplyRule(const AdafactorApply&) {}
  __device__ void enter(const AdafactorApply& p, float lr_factor, float decay_factor,
                        int64_t segment) {
    const float lr = p.lr * lr_factor;
    keep_ = 1 - lr * p.weight_decay * decay_factor;
    const int64_t* const place = p.places + 5 * segment;
    rows_ = p.values + place[0];
    cols_ = p.values + place[1];
    divisor_ = p.values[place[2]];
    step_ = p.values[place[2] + 1];
    num_cols_ = place[3];
    origin_ = place[4];
  }

  template <int N, class Grad, class Low>
  __device__ void update(const AdafactorApply& p, int64_t at, const Low& low) const {
    const Floats<N> g = load_floats<N>(p.scaled + at);
    Floats<N> master = load_streaming<N>(p.master + at);
    const int64_t element = origin_ + p.first + at;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool is_vector = num_cols_ == 0;
      const int64_t row = is_vector ? 0 : (element + i) / num_cols_;
      const int64_t col = element + i - row * num_cols_;
      const float value = (is_vector ? 1.0f : rows_[row]) * cols_[col] / divisor_;
      const float v = value > p.least ? value : p.least;
      master[i] = keep_ * master[i] - step_ * (g[i] / sqrtf(v));
    }
    store_streaming(p.master + at, master);
    low.store(p, at, master);
  }

 private:
  const float* rows_ = nullptr;
  const float* cols_ = nullptr;
  float keep_ = 0, divisor_ = 1, step_ = 0;
  int64_t num_cols_ = 0, origin_ = 0;
};

__device__ int lane_of_thread() {
  return static_cast<int>(threadIdx.x) % tessera::cuda::kWarpSize;
}

/// A warp takes a block of 256 elements after the other: f(block, begin, end, segment), by the whole
/// warp, for those that begin in a segment. Blocks begin with segments, so the others are padding.
template <class F>
__device__ void for_state_blocks(const FlatUpdate& p, F&& f) {
  Segment segment;
  const int64_t num_blocks = ceil_div(p.numel, kStateBlock);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kBlock / tessera::cuda::kWarpSize);
  for (int64_t block =
           (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) / tessera::cuda::kWarpSize;
       block < num_blocks; block += warps) {
    const int64_t begin = block * kStateBlock;
    if (p.first + begin >= segment.end) seek(p, p.first + begin, segment);
    if (segment.begin > p.first + begin) continue;
    int64_t end = segment.end - p.first;
    if (end > p.numel) end = p.numel;
    if (end > begin + kStateBlock) end = begin + kStateBlock;
    f(block, begin, end, segment.index);
  }
}

template <class Grad>
__global__ void __launch_bounds__(kBlock) adafactor_collect_kernel(AdafactorCollect p) {
  if (p.skip != nullptr && *p.skip != 0) return;
  const float scale = p.grad_scale == nullptr ? 1.0f : *p.grad_scale;
  const int lane = lane_of_thread();
  for_state_blocks(p, [&](int64_t block, int64_t begin, int64_t end, int64_t) {
    float sum = 0;
    for (int64_t at = begin + lane; at < end; at += tessera::cuda::kWarpSize) {
      p.scaled[at] = tessera::cuda::to_float(static_cast<const Grad*>(p.grad)[at]) * scale;
      sum += p.master[at] * p.master[at];
    }
    sum = tessera::cuda::warp_sum(sum);
    if (lane == 0) p.squares[block] = sum;
  });
}

__device__ float adafactor_weight(const AdafactorFactors& p) {
  return static_cast<float>(pow(static_cast<double>(*p.step), p.beta2_decay));
}

/// A block a row.
__global__ void __launch_bounds__(kBlock) adafactor_rows_kernel(AdafactorFactors p) {
  if (p.skip != nullptr && *p.skip != 0) return;
  float* const smem = tessera::cuda::dynamic_smem<float>();
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    float sum = 0;
    for (int64_t c = threadIdx.x; c < p.cols; c += kBlock) {
      const float g = p.g[row * p.cols + c];
      sum += g * g;
    }
    sum = tessera::cuda::block_sum<kBlock>(sum, smem);
    if (threadIdx.x != 0) continue;
    const float old = p.values[row];
    p.next[row] = old + adafactor_weight(p) * (sum / static_cast<float>(p.cols) - old);
  }
}

/// A block takes 32 columns, each of its warps every eighth row of them, so that a matrix of few
/// columns is work for more than a few blocks; the sums of the warps are added in their order.
__global__ void __launch_bounds__(kBlock) adafactor_cols_kernel(AdafactorFactors p) {
  const int64_t rows = p.rows == 0 ? 1 : p.rows;
  if (p.skip != nullptr && *p.skip != 0) {
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
         i < p.rows + p.cols + 2; i += static_cast<int64_t>(gridDim.x) * kBlock) {
      p.next[i] = p.values[i];
    }
    return;
  }
  constexpr int kWarps = kBlock / tessera::cuda::kWarpSize;
  float* const sums = tessera::cuda::dynamic_smem<float>();
  const int lane = lane_of_thread(),
            warp = static_cast<int>(threadIdx.x) / tessera::cuda::kWarpSize;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * tessera::cuda::kWarpSize; first < p.cols;
       first += static_cast<int64_t>(gridDim.x) * tessera::cuda::kWarpSize) {
    const int64_t c = first + lane;
    float sum = 0;
    for (int64_t r = warp; c < p.cols && r < rows; r += kWarps) {
      const float g = p.g[r * p.cols + c];
      sum += g * g;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (warp == 0 && c < p.cols) {
      for (int w = 1; w < kWarps; ++w) sum += sums[w * tessera::cuda::kWarpSize + lane];
      const float old = p.values[p.rows + c];
      p.next[p.rows + c] = old + adafactor_weight(p) * (sum / static_cast<float>(rows) - old);
    }
    __syncthreads();  // before the sums of the next columns
  }
}

/// One block: the divisor.
__global__ void __launch_bounds__(kBlock) adafactor_mean_kernel(AdafactorFactors p) {
  if (p.skip != nullptr && *p.skip != 0) return;
  double sum = 0;
  for (int64_t r = threadIdx.x; r < p.rows; r += kBlock) sum += static_cast<double>(p.next[r]);
  sum = tessera::cuda::block_sum<kBlock>(sum, tessera::cuda::dynamic_smem<double>());
  if (threadIdx.x != 0) return;
  const float mean = p.rows == 0 ? 1.0f : static_cast<float>(sum / static_cast<double>(p.rows));
  const float eps = static_cast<float>(p.eps1);
  p.next[p.rows + p.cols] = mean > eps ? mean : eps;
}

/// As many blocks as parts, whatever the device: the sum's order is fixed.
__global__ void __launch_bounds__(kBlock) adafactor_norm_kernel(AdafactorFactors p) {
  if (p.skip != nullptr && *p.skip != 0) return;
  const float divisor = p.next[p.rows + p.cols];
  const float least = static_cast<float>(p.eps1 * p.eps1);
  const int64_t numel = p.rows == 0 ? p.cols : p.rows * p.cols;
  float sum = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < numel;
       i += AdafactorFactors::kParts * kBlock) {
    const int64_t row = i / p.cols;
    const float value =
        (p.rows == 0 ? 1.0f : p.next[row]) * p.next[p.rows + i - row * p.cols] / divisor;
    const float v = value > least ? value : least;
    sum += p.g[i] * p.g[i] / v;
  }
  sum = tessera::cuda::block_sum<kBlock>(sum, tessera::cuda::dynamic_smem<float>());
  if (threadIdx.x == 0) p.workspace[blockIdx.x] = sum;
}

/// One block: what the update is multiplied by.
__global__ void __launch_bounds__(kBlock) adafactor_step_kernel(AdafactorFactors p) {
  if (p.skip != nullptr && *p.skip != 0) return;
  double* const smem = tessera::cuda::dynamic_smem<double>();
  const int64_t numel = p.rows == 0 ? p.cols : p.rows * p.cols;
  double update = 0, squares = 0;
  for (int64_t i = threadIdx.x; i < AdafactorFactors::kParts; i += kBlock) {
    update += static_cast<double>(p.workspace[i]);
  }
  for (int64_t i = threadIdx.x; i < ceil_div(numel, kStateBlock); i += kBlock) {
    squares += static_cast<double>(p.squares[i]);
  }
  update = tessera::cuda::block_sum<kBlock>(update, smem);
  squares = tessera::cuda::block_sum<kBlock>(squares, smem);
  if (threadIdx.x != 0) return;
  const auto n = static_cast<double>(numel);
  const double slowest = 1 / sqrt(static_cast<double>(*p.step));
  const double rho = p.lr < slowest ? p.lr : slowest;
  const double rms = sqrt(squares / n), update_rms = sqrt(update / n) / p.d;
  const double alpha = (rms > p.eps2 ? rms : p.eps2) * rho;
  p.next[p.rows + p.cols + 1] = static_cast<float>(alpha / (update_rms > 1 ? update_rms : 1.0));
}

/// No update: only the low-precision copy is made again.
class RoundRule {
 public:
  using Args = RoundLow;
  static constexpr int kBlocksPerMultiprocessor = 6;

  __device__ explicit RoundRule(const RoundLow&) {}
  __device__ void enter(const RoundLow&, float, float, int64_t) {}

  template <int N, class Grad, class Low>
  __device__ void update(const RoundLow& p, int64_t at, const Low& low) const {
    const Floats<N> master = load_streaming<N>(p.master + at);
    low.store(p, at, master);
  }
};

/// The code of a scaled value: how many thresholds are below it.
__device__ uint8_t code_of(const float* thresholds, float x) {
  int code = 0;
#pragma unroll
  for (int half = 128; half > 0; half /= 2) {
    if (thresholds[code + half - 1] < x) code += half;
  }
  return static_cast<uint8_t>(code);
}

/// The larger one; what is not a number wins.
__device__ float larger(float a, float b) {
  return a > b || a != a ? a : b;
}

/// The largest of a warp's magnitudes: the scale of its codes. Not a number if it is not finite.
__device__ float scale_of_warp(float absmax) {
#pragma unroll
  for (int distance = tessera::cuda::kWarpSize / 2; distance > 0; distance /= 2) {
    absmax = larger(absmax, __shfl_xor_sync(tessera::cuda::kFullMask, absmax, distance));
  }
  return absmax <= 3.402823466e38f ? absmax : __uint_as_float(0x7fc00000u);
}

/// The codes of the first `count` of `values`.
template <int N>
__device__ void store_codes(uint8_t* codes, const Floats<N>& values, float absmax,
                            const float* thresholds, int64_t count) {
  const float inverse = 1 / absmax;
  const auto code = [&](float value) {
    const float x = value * inverse;
    return absmax > 0 ? code_of(thresholds, x > -1 ? (x < 1 ? x : 1.0f) : -1.0f) : uint8_t{0};
  };
  if (count >= N) {
    tessera::cuda::Vec<uint8_t, N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = code(values[i]);
    tessera::cuda::store_vec(codes, out);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) codes[i] = code(values[i]);
  }
}

/// A warp takes a block of states: each lane two times four neighbours, or their single elements at
/// the end of a segment. The maps are in shared memory.
constexpr int kLaneElements = kStateBlock / tessera::cuda::kWarpSize;
static_assert(kLaneElements == 2 * kWidth);
constexpr int kStateBlocksPerMultiprocessor =
    2;  // 128 registers a thread: both moments stay in them

template <class Low, class Grad, int N>
__global__ void __launch_bounds__(kBlock, kStateBlocksPerMultiprocessor)
    adamw_8bit_kernel(AdamW8bitStep p) {
  if (p.skip != nullptr && *p.skip != 0) return;
  float* const maps = tessera::cuda::dynamic_smem<float>();
  for (int i = static_cast<int>(threadIdx.x); i < 4 * 256; i += kBlock) maps[i] = p.maps[i];
  __syncthreads();
  const float* const m_values = maps;
  const float* const m_thresholds = maps + 256;
  const float* const v_values = maps + 512;
  const float* const v_thresholds = maps + 768;
  const double inverse_correction1 = 1 / (1 - power(p.beta1, *p.step));
  const float root2 = static_cast<float>(1 / sqrt(1 - power(p.beta2, *p.step)));
  const float scale = p.grad_scale == nullptr ? 1.0f : *p.grad_scale;
  const float beta1 = static_cast<float>(p.beta1), beta2 = static_cast<float>(p.beta2);
  const float weight1 = static_cast<float>(1 - p.beta1);
  const float weight2 = static_cast<float>(1 - p.beta2);
  const float eps = static_cast<float>(p.eps);
  Low low(p);
  const int lane = lane_of_thread();
  for_state_blocks(p, [&](int64_t block, int64_t begin, int64_t end, int64_t segment) {
    const double lr = static_cast<double>(p.lr) * static_cast<double>(p.factors[2 * segment]);
    const double decay =
        static_cast<double>(p.weight_decay) * static_cast<double>(p.factors[2 * segment + 1]);
    const float keep = static_cast<float>(1 - lr * decay);
    const float step_size = static_cast<float>(lr * inverse_correction1);
    low.enter(p, segment);
    const float m_scale = p.exp_avg_absmax[block], v_scale = p.exp_avg_sq_absmax[block];
    Floats<N> m[kLaneElements / N], v[kLaneElements / N];
    float m_absmax = 0, v_absmax = 0;
    const auto at_of = [&](int k) { return begin + (k * tessera::cuda::kWarpSize + lane) * N; };
#pragma unroll
    for (int k = 0; k < kLaneElements / N; ++k) {
      const int64_t at = at_of(k);
      const auto update = [&](int i, float grad, uint8_t m_code, uint8_t v_code, float& master) {
        const float g = grad * scale;
        m[k][i] = __fmaf_rn(weight1, g, beta1 * (m_values[m_code] * m_scale));  // as the CPU does
        v[k][i] = __fmaf_rn(weight2 * g, g, beta2 * (v_values[v_code] * v_scale));
        master = __fmul_rn(keep, master) - step_size * m[k][i] / (sqrtf(v[k][i]) * root2 + eps);
        m_absmax = larger(m_absmax, fabsf(m[k][i]));
        v_absmax = larger(v_absmax, fabsf(v[k][i]));
      };
      const Grad* const grads = static_cast<const Grad*>(p.grad) + at;
      if (at + N <= end && low.takes_vector(p.first + at)) {
        const auto grad = load_streaming<N>(grads);
        const auto m_codes = tessera::cuda::load_vec<N>(p.exp_avg + at);
        const auto v_codes = tessera::cuda::load_vec<N>(p.exp_avg_sq + at);
        Floats<N> master = load_streaming<N>(p.master + at);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          update(i, tessera::cuda::to_float(grad[i]), m_codes[i], v_codes[i], master[i]);
        }
        store_streaming(p.master + at, master);
        low.store(p, at, master);
        continue;
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (at + i >= end) continue;
        Floats<1> master = load_streaming<1>(p.master + at + i);
        update(i, tessera::cuda::to_float(grads[i]), p.exp_avg[at + i], p.exp_avg_sq[at + i],
               master[0]);
        store_streaming(p.master + at + i, master);
        low.store(p, at + i, master);
      }
    }
    m_absmax = scale_of_warp(m_absmax);
    v_absmax = scale_of_warp(v_absmax);
#pragma unroll
    for (int k = 0; k < kLaneElements / N; ++k) {
      const int64_t at = at_of(k);
      store_codes<N>(p.exp_avg + at, m[k], m_absmax, m_thresholds, end - at);
      store_codes<N>(p.exp_avg_sq + at, v[k], v_absmax, v_thresholds, end - at);
    }
    if (lane == 0) {
      p.exp_avg_absmax[block] = m_absmax;
      p.exp_avg_sq_absmax[block] = v_absmax;
    }
  });
}

template <class Rule, class Low, class Grad, int N>
__global__ void __launch_bounds__(kBlock, Rule::kBlocksPerMultiprocessor)
    flat_update_kernel(typename Rule::Args p) {
  if (p.skip != nullptr && *p.skip != 0) return;
  Rule rule(p);
  Low low(p);
  Segment segment;
  const auto move_to = [&](int64_t at) {
    if (at < segment.end) return;
    seek(p, at, segment);
    if (segment.index < p.num_segments) {
      rule.enter(p, p.factors[2 * segment.index], p.factors[2 * segment.index + 1], segment.index);
      low.enter(p, segment.index);
    }
  };
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlock * N;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * N; at < p.numel;
       at += stride) {
    move_to(p.first + at);
    if (N > 1 && segment.begin <= p.first + at && p.first + at + N <= segment.end &&
        at + N <= p.numel && low.takes_vector(p.first + at)) {
      rule.template update<N, Grad>(p, at, low);
      continue;
    }
#pragma unroll 1
    for (int64_t i = at; i < at + N && i < p.numel; ++i) {
      move_to(p.first + i);
      if (segment.begin <= p.first + i) rule.template update<1, Grad>(p, i, low);
    }
  }
}

__global__ void advance_step_kernel(AdvanceStep p) {
  if (threadIdx.x != 0) return;
  if (p.skip == nullptr || *p.skip == 0) ++*p.step;
}

LaunchConfig flat_update_config(int64_t numel, int width, int blocks_per_multiprocessor,
                                cudaStream_t stream) {
  const int64_t resident =
      int64_t{blocks_per_multiprocessor} * tessera::cuda::num_multiprocessors();
  const int64_t blocks = std::min(ceil_div(numel, int64_t{kBlock} * width), resident);
  return {grid_blocks(blocks), kBlock, 0, stream};
}

template <class Rule, class Low, class Grad>
void launch_with(const char* name, const typename Rule::Args& p, bool is_aligned,
                 cudaStream_t stream) {
  constexpr int kResident = Rule::kBlocksPerMultiprocessor;
  if (is_aligned && is_aligned16(p.master) && is_aligned16(p.grad) && is_aligned16(p.low)) {
    launch(name, &flat_update_kernel<Rule, Low, Grad, kWidth>,
           flat_update_config(p.numel, kWidth, kResident, stream), p);
  } else {
    launch(name, &flat_update_kernel<Rule, Low, Grad, 1>,
           flat_update_config(p.numel, 1, kResident, stream), p);
  }
}

bool is_stochastic(const FlatUpdate& p) {
  return p.low != nullptr && p.rounding.segments != nullptr && p.low_dtype != kF32;
}

/// `kWritesLow`: the rule stores the low-precision copy.
template <class Rule, bool kWritesLow = true>
void launch_update(const char* name, const typename Rule::Args& p, bool is_aligned,
                   cudaStream_t stream) {
  if (p.numel == 0 || p.num_segments == 0) return;
  if (p.low != nullptr) check_device_float(p.low_dtype, name);
  tessera::cuda::visit_device_float(p.grad_dtype, name, [&](auto tag) {
    using Grad = typename decltype(tag)::type;
    if constexpr (kWritesLow) {
      if (is_stochastic(p)) {
        launch_with<Rule, StochasticLow, Grad>(name, p, is_aligned, stream);
        return;
      }
    }
    launch_with<Rule, NearestLow, Grad>(name, p, is_aligned, stream);
  });
}

template <class Rule>
void launch_without_gradient(const char* name, const typename Rule::Args& p, bool is_aligned,
                             cudaStream_t stream) {
  if (p.numel == 0 || p.num_segments == 0) return;
  if (p.low != nullptr) check_device_float(p.low_dtype, name);
  if (is_stochastic(p)) {
    launch_with<Rule, StochasticLow, float>(name, p, is_aligned, stream);
  } else {
    launch_with<Rule, NearestLow, float>(name, p, is_aligned, stream);
  }
}

}  // namespace

void adamw_step(CUstream_st* stream, const AdamWStep& p) {
  launch_update<AdamWRule>("adamw_step", p, is_aligned16(p.exp_avg) && is_aligned16(p.exp_avg_sq),
                           stream);
}

void adamw_8bit_step(CUstream_st* stream, const AdamW8bitStep& p) {
  constexpr const char* kName = "adamw_8bit_step";
  if (p.numel == 0 || p.num_segments == 0) return;
  if (p.low != nullptr) check_device_float(p.low_dtype, kName);
  const bool is_aligned = is_aligned16(p.master) && is_aligned16(p.grad) && is_aligned16(p.low) &&
                          is_aligned16(p.exp_avg) && is_aligned16(p.exp_avg_sq);
  LaunchConfig config =
      flat_update_config(p.numel, kLaneElements, kStateBlocksPerMultiprocessor, stream);
  config.smem_bytes = 4 * 256 * sizeof(float);
  tessera::cuda::visit_device_float(p.grad_dtype, kName, [&](auto tag) {
    using Grad = typename decltype(tag)::type;
    const auto go = [&](auto width) {
      constexpr int kN = decltype(width)::value;
      if (is_stochastic(p)) {
        launch(kName, &adamw_8bit_kernel<StochasticLow, Grad, kN>, config, p);
      } else {
        launch(kName, &adamw_8bit_kernel<NearestLow, Grad, kN>, config, p);
      }
    };
    if (is_aligned) {
      go(std::integral_constant<int, kWidth>{});
    } else {
      go(std::integral_constant<int, 1>{});
    }
  });
}

void sgd_step(CUstream_st* stream, const SgdStep& p) {
  launch_update<SgdRule>("sgd_step", p, is_aligned16(p.momentum_buffer), stream);
}

void muon_direction(CUstream_st* stream, const MuonDirection& p) {
  launch_update<MuonDirectionRule, false>(
      "muon_direction", p, is_aligned16(p.momentum_buffer) && is_aligned16(p.direction), stream);
}

void muon_apply(CUstream_st* stream, const MuonApply& p) {
  launch_without_gradient<MuonApplyRule>("muon_apply", p, is_aligned16(p.orthogonal), stream);
}

void lion_step(CUstream_st* stream, const LionStep& p) {
  launch_update<LionRule>("lion_step", p, is_aligned16(p.exp_avg), stream);
}

void adafactor_collect(CUstream_st* stream, const AdafactorCollect& p) {
  if (p.numel == 0 || p.num_segments == 0) return;
  tessera::cuda::visit_device_float(p.grad_dtype, "adafactor_collect", [&](auto tag) {
    using Grad = typename decltype(tag)::type;
    launch("adafactor_collect", &adafactor_collect_kernel<Grad>,
           flat_update_config(p.numel, kLaneElements, 4, stream), p);
  });
}

void adafactor_factors(CUstream_st* stream, const AdafactorFactors& p) {
  constexpr size_t kSums = kBlock / tessera::cuda::kWarpSize * sizeof(double);
  const auto blocks = [](int64_t wanted) {
    return grid_blocks(std::min(wanted, int64_t{8} * tessera::cuda::num_multiprocessors()));
  };
  if (p.rows > 0) {
    launch("adafactor_rows", &adafactor_rows_kernel,
           LaunchConfig{blocks(p.rows), kBlock, kSums, stream}, p);
  }
  launch("adafactor_cols", &adafactor_cols_kernel,
         LaunchConfig{blocks(ceil_div(p.cols, int64_t{tessera::cuda::kWarpSize})), kBlock,
                      kBlock * sizeof(float), stream},
         p);
  launch("adafactor_mean", &adafactor_mean_kernel, LaunchConfig{1, kBlock, kSums, stream}, p);
  launch("adafactor_norm", &adafactor_norm_kernel,
         LaunchConfig{static_cast<unsigned>(AdafactorFactors::kParts), kBlock, kSums, stream}, p);
  launch("adafactor_step", &adafactor_step_kernel, LaunchConfig{1, kBlock, kSums, stream}, p);
}

void adafactor_apply(CUstream_st* stream, const AdafactorApply& p) {
  launch_without_gradient<AdafactorApplyRule>("adafactor_apply", p, is_aligned16(p.scaled), stream);
}

void round_low(CUstream_st* stream, const RoundLow& p) {
  if (p.low != nullptr) launch_without_gradient<RoundRule>("round_low", p, true, stream);
}

void advance_step(CUstream_st* stream, const AdvanceStep& p) {
  launch("advance_step", &advance_step_kernel, LaunchConfig{1, tessera::cuda::kWarpSize, 0, stream},
         p);
}

}  // namespace tessera::kernels::cuda
