// Random numbers by counter (Philox 4x32-10): dropout, normal and uniform fills. The words are
// those of the CPU kernels, so that masks and uniform numbers are bitwise the same everywhere;
// normal numbers are the same up to the rounding of fused multiply-adds.
//
// Layout           a block of four words is what four neighbouring elements use. A thread makes the
//                  words of one 16-byte vector: one Philox block for f32, two for bf16 and f16.
// Parallelization  a grid that fits the device strides over the vectors.
// Other layouts    strides or addresses off 16 bytes: a thread still makes whole blocks and moves
//                  their elements one by one.
// Determinism      an element depends on key and counter only.

#include "core/runtime/cuda/launch.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/random/kernel.h"
#include "kernels/random/philox.cuh"
#include "kernels/rows.cuh"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::grid_blocks;
using tessera::cuda::is_aligned16;
using tessera::cuda::kVec;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;
using tessera::cuda::load_vec;

constexpr int kBlock = 256;
constexpr int kResidentBlocks = 6;  // of a multiprocessor

/// Words of elements `first`, a multiple of 4, and the N - 1 behind it.
template <int N>
__device__ void make_words(PhiloxKey key, uint64_t high, int64_t first, uint32_t (&words)[N]) {
  static_assert(N % 4 == 0);
#pragma unroll
  for (int b = 0; b < N / 4; ++b) {
    const Words block = philox_words(key, high, static_cast<uint64_t>(first) / 4 + b);
#pragma unroll
    for (int w = 0; w < 4; ++w) words[4 * b + w] = block.values[w];
  }
}

/// 24 high bits as a float in [0, 1).
__device__ float uniform_of(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

/// sqrt(-2 ln u), u in [2^-24, 1]; the CPU kernel's polynomial.
__device__ float normal_radius(float u) {
  const int bits = __float_as_int(u);
  const int exponent = (bits - 0x3f3504f3) >> 23;  // 0x3f3504f3 is sqrt(1/2)
  const float f = __int_as_float(bits - exponent * (1 << 23)) - 1.0f;
  float p = -7.859551749e-2f;
  p = p * f + 1.288161994e-1f;
  p = p * f - 1.312876414e-1f;
  p = p * f + 1.418119634e-1f;
  p = p * f - 1.662455356e-1f;
  p = p * f + 2.000228608e-1f;
  p = p * f - 2.500081041e-1f;
  p = p * f + 3.333331673e-1f;
  const float log_u = static_cast<float>(exponent) * 0.693147181f + (f - f * f * (0.5f - f * p));
  return sqrtf(fmaxf(-2.0f * log_u, 0.0f));
}

/// cos and sin of 2 pi u, u in [0, 1): quadrant and polynomials in r in [-1/2, 1/2], the CPU
/// kernel's.
__device__ void unit_vector(float u, float* cos_out, float* sin_out) {
  const float quadrant = rintf(4.0f * u);
  const float r = 4.0f * u - quadrant, s = r * r;
  float sin = 1.582067424e-4f;
  sin = sin * s - 4.681266476e-3f;
  sin = sin * s + 7.969258276e-2f;
  sin = sin * s - 6.459640961e-1f;
  sin = (sin * s + 1.570796327f) * r;
  float cos = 9.036316993e-4f;
  cos = cos * s - 2.086007132e-2f;
  cos = cos * s + 2.536692039e-1f;
  cos = cos * s - 1.233700541f;
  cos = cos * s + 1.0f;
  // Odd quadrants swap the two; the signs are bit 1 of q + 1 and of q.
  const auto q = static_cast<unsigned>(static_cast<int>(quadrant));
  const float x = (q & 1) != 0 ? sin : cos, y = (q & 1) != 0 ? cos : sin;
  *cos_out = ((q + 1) & 2) != 0 ? -x : x;
  *sin_out = (q & 2) != 0 ? -y : y;
}

struct Normal {
  /// Two from each pair of words (Box & Muller 1958). The radius wants (0, 1]: a step of 2^-24 up.
  template <int N>
  __device__ static void values(const uint32_t (&words)[N], Floats<N>& out) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float radius = normal_radius(uniform_of(words[i]) + 0x1p-24f);
      float cos, sin;
      unit_vector(uniform_of(words[i + 1]), &cos, &sin);
      out[i] = radius * cos;
      out[i + 1] = radius * sin;
    }
  }
};

struct Uniform {
  template <int N>
  __device__ static void values(const uint32_t (&words)[N], Floats<N>& out) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = uniform_of(words[i]);
  }
};

/// Rows of vectors; the last of a row may be shorter than N.
template <class T, int N, bool kIsAligned>
__global__ void __launch_bounds__(kBlock) dropout_kernel(Dropout p, int64_t row_vecs) {
  const auto factor = static_cast<float>(p.factor);
  const T* x = static_cast<const T*>(p.x);
  const int64_t count = p.rows * row_vecs, stride = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < count;
       i += stride) {
    const int64_t row = divide(i, row_vecs), col = (i - row * row_vecs) * N;
    const int64_t x_at = row * p.x_stride + col, y_at = row * p.y_stride + col;
    Floats<N> out;
    if constexpr (kIsAligned) out = load_floats<N>(x + x_at);
    uint32_t words[N];
    make_words(p.key, static_cast<uint64_t>(p.first_row + row), col, words);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (kIsAligned) {
        out[j] = words[j] >= p.threshold ? out[j] * factor : 0.0f;
      } else if (col + j < p.cols) {
        const float kept = tessera::cuda::to_float(x[x_at + j]) * factor;
        store_floats<1>(p.y, p.y_dtype, y_at + j, {{words[j] >= p.threshold ? kept : 0.0f}},
                        p.accumulate);
      }
    }
    if constexpr (kIsAligned) store_floats(p.y, p.y_dtype, y_at, out, p.accumulate);
  }
}

/// x[i] = offset + slope * (value first_element + i); vectors are counted from element 0 of the
/// sequence, so that the first and the last may stick out of x.
template <class T, class Values>
__global__ void __launch_bounds__(kBlock)
    fill_kernel(T* x, PhiloxKey key, int64_t first_element, int64_t numel, float offset,
                float slope, bool is_aligned) {
  constexpr int N = kVec<T>;
  const int64_t first_vec = first_element / N;
  const int64_t count = tessera::cuda::ceil_div(first_element + numel, N) - first_vec;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < count;
       i += stride) {
    uint32_t words[N];
    make_words(key, 0, (first_vec + i) * N, words);
    Floats<N> out;
    Values::values(words, out);
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = __fadd_rn(offset, __fmul_rn(slope, out[j]));
    const int64_t at = (first_vec + i) * N - first_element;
    if (is_aligned && at >= 0 && at + N <= numel) {
      store_floats(x + at, out);
      continue;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (at + j >= 0 && at + j < numel) x[at + j] = tessera::cuda::from_float<T>(out[j]);
    }
  }
}

LaunchConfig vectors_config(int64_t count, cudaStream_t stream) {
  const int64_t resident =
      static_cast<int64_t>(kResidentBlocks) * tessera::cuda::num_multiprocessors();
  return {grid_blocks(std::min(ceil_div(count, kBlock), resident)), kBlock, 0, stream};
}

template <class Values>
void launch_fill(const char* name, cudaStream_t stream, void* x, DType dtype, PhiloxKey key,
                 int64_t first_element, int64_t numel, double offset, double slope) {
  if (numel == 0) return;
  tessera::cuda::visit_device_float(dtype, name, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool is_aligned = is_aligned16(x) && first_element % kVec<T> == 0;
    launch(name, &fill_kernel<T, Values>, vectors_config(ceil_div(numel, kVec<T>) + 1, stream),
           static_cast<T*>(x), key, first_element, numel, static_cast<float>(offset),
           static_cast<float>(slope), is_aligned);
  });
}

}  // namespace

void dropout(CUstream_st* stream, const Dropout& p) {
  if (p.rows * p.cols == 0) return;
  check_device_float(p.y_dtype, "dropout");
  tessera::cuda::visit_device_float(p.dtype, "dropout", [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVec<T>;
    const bool is_aligned = p.cols % N == 0 && is_aligned16(p.x) && is_aligned16(p.y) &&
                            (p.rows == 1 || (p.x_stride % N == 0 && p.y_stride % N == 0));
    if (is_aligned) {
      launch("dropout", &dropout_kernel<T, N, true>, vectors_config(p.rows * (p.cols / N), stream),
             p, p.cols / N);
    } else {
      const int64_t row_vecs = ceil_div(p.cols, 4);
      launch("dropout", &dropout_kernel<T, 4, false>, vectors_config(p.rows * row_vecs, stream), p,
             row_vecs);
    }
  });
}

void fill_normal(CUstream_st* stream, const FillNormal& p) {
  launch_fill<Normal>("fill_normal", stream, p.x, p.dtype, p.key, p.first_element, p.numel, p.mean,
                      p.stddev);
}

void fill_uniform(CUstream_st* stream, const FillUniform& p) {
  launch_fill<Uniform>("fill_uniform", stream, p.x, p.dtype, p.key, p.first_element, p.numel, p.low,
                       p.high - p.low);
}

}  // namespace tessera::kernels::cuda
