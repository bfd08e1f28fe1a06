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
// Device scalars   gradient scale, skip flag and step count are read here: the host knows none.
// Determinism      elements are independent of each other.

#include <cmath>

#include "core/runtime/cuda/launch.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/optimizer/kernel.h"

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

template <int N>
__device__ void store_low(const FlatUpdate& p, int64_t at, const Floats<N>& master) {
  if (p.low != nullptr) store_floats(p.low, p.low_dtype, at, master, false);
}

/// The update rules: constants of the launch, constants of a segment, N elements from `at` on.
class AdamWRule {
 public:
  using Args = AdamWStep;
  static constexpr int kBlocksPerMultiprocessor = 4;  // 64 registers a thread

  __device__ explicit AdamWRule(const AdamWStep& p)
      : inverse_correction1_(1 / (1 - power(p.beta1, *p.step))),
        root2_(static_cast<float>(1 / sqrt(1 - power(p.beta2, *p.step)))),
        scale_(p.grad_scale == nullptr ? 1.0f : *p.grad_scale) {}

  __device__ void enter(const AdamWStep& p, float lr_factor, float decay_factor) {
    const double lr = static_cast<double>(p.lr) * static_cast<double>(lr_factor);
    const double decay = static_cast<double>(p.weight_decay) * static_cast<double>(decay_factor);
    keep_ = static_cast<float>(1 - lr * decay);
    step_size_ = static_cast<float>(lr * inverse_correction1_);
  }

  template <int N, class Grad>
  __device__ void update(const AdamWStep& p, int64_t at) const {
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
    store_low(p, at, master);
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

  __device__ void enter(const SgdStep& p, float lr_factor, float decay_factor) {
    lr_ = p.lr * lr_factor;
    decay_ = p.weight_decay * decay_factor;
  }

  template <int N, class Grad>
  __device__ void update(const SgdStep& p, int64_t at) const {
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
    store_low(p, at, master);
  }

 private:
  float scale_, lr_ = 0, decay_ = 0;
};

template <class Rule, class Grad, int N>
__global__ void __launch_bounds__(kBlock, Rule::kBlocksPerMultiprocessor)
    flat_update_kernel(typename Rule::Args p) {
  if (p.skip != nullptr && *p.skip != 0) return;
  Rule rule(p);
  Segment segment;
  const auto move_to = [&](int64_t at) {
    if (at < segment.end) return;
    seek(p, at, segment);
    if (segment.index < p.num_segments) {
      rule.enter(p, p.factors[2 * segment.index], p.factors[2 * segment.index + 1]);
    }
  };
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlock * N;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * N; at < p.numel;
       at += stride) {
    move_to(p.first + at);
    if (N > 1 && segment.begin <= p.first + at && p.first + at + N <= segment.end &&
        at + N <= p.numel) {
      rule.template update<N, Grad>(p, at);
      continue;
    }
#pragma unroll 1
    for (int64_t i = at; i < at + N && i < p.numel; ++i) {
      move_to(p.first + i);
      if (segment.begin <= p.first + i) rule.template update<1, Grad>(p, i);
    }
  }
}

__global__ void advance_step_kernel(AdvanceStep p) {
  if (threadIdx.x != 0) return;
  if (p.skip == nullptr || *p.skip == 0) ++*p.step;
}

template <class Rule>
LaunchConfig flat_update_config(int64_t numel, int width, cudaStream_t stream) {
  const int64_t resident =
      static_cast<int64_t>(Rule::kBlocksPerMultiprocessor) * tessera::cuda::num_multiprocessors();
  const int64_t blocks = std::min(ceil_div(numel, int64_t{kBlock} * width), resident);
  return {grid_blocks(blocks), kBlock, 0, stream};
}

template <class Rule>
void launch_update(const char* name, const typename Rule::Args& p, bool is_aligned,
                   cudaStream_t stream) {
  if (p.numel == 0 || p.num_segments == 0) return;
  if (p.low != nullptr) check_device_float(p.low_dtype, name);
  tessera::cuda::visit_device_float(p.grad_dtype, name, [&](auto tag) {
    using Grad = typename decltype(tag)::type;
    if (is_aligned && is_aligned16(p.master) && is_aligned16(p.grad) && is_aligned16(p.low)) {
      launch(name, &flat_update_kernel<Rule, Grad, kWidth>,
             flat_update_config<Rule>(p.numel, kWidth, stream), p);
    } else {
      launch(name, &flat_update_kernel<Rule, Grad, 1>, flat_update_config<Rule>(p.numel, 1, stream),
             p);
    }
  });
}

}  // namespace

void adamw_step(CUstream_st* stream, const AdamWStep& p) {
  launch_update<AdamWRule>("adamw_step", p, is_aligned16(p.exp_avg) && is_aligned16(p.exp_avg_sq),
                           stream);
}

void sgd_step(CUstream_st* stream, const SgdStep& p) {
  launch_update<SgdRule>("sgd_step", p, is_aligned16(p.momentum_buffer), stream);
}

void advance_step(CUstream_st* stream, const AdvanceStep& p) {
  launch("advance_step", &advance_step_kernel, LaunchConfig{1, tessera::cuda::kWarpSize, 0, stream},
         p);
}

}  // namespace tessera::kernels::cuda
