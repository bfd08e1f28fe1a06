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
// Device scalars   gradient scale, skip flag and step count are read here: the host knows none.
// Determinism      elements are independent of each other.

#include <cmath>

#include "core/runtime/cuda/launch.cuh"
#include "kernels/float_vec.cuh"
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

  __device__ void enter(const AdamWStep& p, float lr_factor, float decay_factor) {
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

  __device__ void enter(const SgdStep& p, float lr_factor, float decay_factor) {
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

class LionRule {
 public:
  using Args = LionStep;
  static constexpr int kBlocksPerMultiprocessor = 6;

  __device__ explicit LionRule(const LionStep& p)
      : scale_(p.grad_scale == nullptr ? 1.0f : *p.grad_scale) {}

  __device__ void enter(const LionStep& p, float lr_factor, float decay_factor) {
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

/// No update: only the low-precision copy is made again.
class RoundRule {
 public:
  using Args = RoundLow;
  static constexpr int kBlocksPerMultiprocessor = 6;

  __device__ explicit RoundRule(const RoundLow&) {}
  __device__ void enter(const RoundLow&, float, float) {}

  template <int N, class Grad, class Low>
  __device__ void update(const RoundLow& p, int64_t at, const Low& low) const {
    const Floats<N> master = load_streaming<N>(p.master + at);
    low.store(p, at, master);
  }
};

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
      rule.enter(p, p.factors[2 * segment.index], p.factors[2 * segment.index + 1]);
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

template <class Rule>
void launch_update(const char* name, const typename Rule::Args& p, bool is_aligned,
                   cudaStream_t stream) {
  if (p.numel == 0 || p.num_segments == 0) return;
  if (p.low != nullptr) check_device_float(p.low_dtype, name);
  tessera::cuda::visit_device_float(p.grad_dtype, name, [&](auto tag) {
    using Grad = typename decltype(tag)::type;
    if (is_stochastic(p)) {
      launch_with<Rule, StochasticLow, Grad>(name, p, is_aligned, stream);
    } else {
      launch_with<Rule, NearestLow, Grad>(name, p, is_aligned, stream);
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

void lion_step(CUstream_st* stream, const LionStep& p) {
  launch_update<LionRule>("lion_step", p, is_aligned16(p.exp_avg), stream);
}

void round_low(CUstream_st* stream, const RoundLow& p) {
  if (p.numel == 0 || p.num_segments == 0 || p.low == nullptr) return;
  check_device_float(p.low_dtype, "round_low");
  if (is_stochastic(p)) {
    launch_with<RoundRule, StochasticLow, float>("round_low", p, true, stream);
  } else {
    launch_with<RoundRule, NearestLow, float>("round_low", p, true, stream);
  }
}

void advance_step(CUstream_st* stream, const AdvanceStep& p) {
  launch("advance_step", &advance_step_kernel, LaunchConfig{1, tessera::cuda::kWarpSize, 0, stream},
         p);
}

}  // namespace tessera::kernels::cuda
