// Rotary position embedding: pairs of a head's elements turn by angles of a table.
//
//   rope_table  cos and sin of position * frequency_i, angles and their reduction in f64
//   rope        y_a = x_a cos - x_b sin,  y_b = x_b cos + x_a sin (sin negated for the inverse)
//
// Layout           pairs (i, i + half): a thread takes a vector of 16 bytes of each half of a head
//                  and the table's values for it. Interleaved pairs lie within one vector. Elements
//                  behind rotary_dim are copied by vectors of their own. In place is fine: a
//                  thread's elements are its own.
// Parallelization  a grid that fits the device strides over the vectors, those of a position next
//                  to each other: its heads find the table in the L1 cache.
// Other layouts    the same kernel with vectors of one pair.
// Determinism      elements are independent of each other.

#include <cmath>

#include "core/runtime/cuda/launch.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/rope/kernel.h"
#include "kernels/rows.cuh"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::grid_blocks;
using tessera::cuda::is_aligned16;
using tessera::cuda::kVec;
using tessera::cuda::kWarpSize;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;

constexpr int kBlock = 256;
constexpr int kResidentBlocks = 6;  // of a multiprocessor

// ---- table --------------------------------------------------------------------------------------

__device__ double frequency(const RopeTable& a, int64_t i) {
  constexpr double kTwoPi = 6.283185307179586;
  const double base =
      pow(a.theta, -2.0 * static_cast<double>(i) / static_cast<double>(a.rotary_dim));
  if (a.scaling == RopeTable::Scaling::kNone) return base;
  if (a.scaling == RopeTable::Scaling::kLinear) return base / a.factor;
  const double turns = a.original_max_position * base / kTwoPi;  // in the original context
  const double high = (turns - a.low_freq_factor) / (a.high_freq_factor - a.low_freq_factor);
  const double kept = fmin(fmax(high, 0.0), 1.0);
  return (1 - kept) * base / a.factor + kept * base;
}

/// |r| <= pi / 4 after subtracting `quarter` quarter turns; minimax polynomials (Cephes
/// coefficients), as the CPU kernel.
__device__ void store_cos_sin(float* cos_out, float* sin_out, double angle) {
  constexpr double kTwoOverPi = 0.63661977236758134;
  const double quarter = rint(angle * kTwoOverPi);
  // pi / 2 in two parts: the first has 33 bits, so that its product with `quarter` is exact for
  // quarters below 2^20 and off by 2^-22 at worst below 2^31.
  const double reduced =
      (angle - quarter * 1.57079632673412561417) - quarter * 6.07710050650619224932e-11;
  const auto r = static_cast<float>(reduced), r2 = r * r;
  const float s =
      r + r * r2 * (-1.6666654611e-1f + r2 * (8.3321608736e-3f + r2 * -1.9515295891e-4f));
  const float c =
      1.0f - 0.5f * r2 +
      r2 * r2 *
          (4.166664568298827e-2f + r2 * (-1.388731625493765e-3f + r2 * 2.443315711809948e-5f));
  // The double keeps the quarter exact; its low two bits say which of the four it is.
  const int turn = static_cast<int>(quarter) & 3;
  const float cos_abs = (turn & 1) != 0 ? s : c, sin_abs = (turn & 1) != 0 ? c : s;
  *cos_out = turn == 1 || turn == 2 ? -cos_abs : cos_abs;
  *sin_out = turn >= 2 ? -sin_abs : sin_abs;
}

constexpr int kTableRows = 64;  // of a block: each costs a thread a frequency, with its pow, less

/// A lane has a frequency and goes through the block's rows with it.
__global__ void __launch_bounds__(kBlock) rope_table_kernel(RopeTable a) {
  constexpr int kWarps = kBlock / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int64_t half = a.rotary_dim / 2, first = static_cast<int64_t>(blockIdx.x) * kTableRows;
  const int64_t end = min(first + kTableRows, a.rows);
  for (int64_t i = lane; i < half; i += kWarpSize) {
    const double own = frequency(a, i);
    for (int64_t row = first + warp; row < end; row += kWarps) {
      const auto position = static_cast<double>(a.positions != nullptr ? a.positions[row] : row);
      float* out = a.table + row * a.rotary_dim;
      store_cos_sin(out + i, out + half + i, position * own);
    }
  }
}

// ---- rotation -----------------------------------------------------------------------------------

/// The vectors of a head: those that turn (each two halves of a pair, or pairs), then the others.
struct HeadVectors {
  int64_t turning, others;
  __host__ __device__ int64_t count() const { return turning + others; }
};

template <int N>
__device__ void rotate(Floats<N>& a, Floats<N>& b, const float* cosines, const float* sines,
                       float sign) {
  const Floats<N> c = load_floats<N>(cosines), s = load_floats<N>(sines);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float x_a = a[i], x_b = b[i], sine = sign * s[i];
    a[i] = x_a * c[i] - x_b * sine;
    b[i] = x_b * c[i] + x_a * sine;
  }
}

/// N elements of each half, or N pairs if interleaved.
template <class T, int N, bool kInterleaved>
__global__ void __launch_bounds__(kBlock) rope_kernel(Rope a, HeadVectors v) {
  const int64_t half = a.rotary_dim / 2, count = a.batch * a.time * a.heads * v.count();
  const float sign = a.inverse ? -1.0f : 1.0f;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; index < count;
       index += stride) {
    const int64_t head = divide(index, v.count()), vec = index - head * v.count();
    const int64_t position = divide(head, a.heads), h = head - position * a.heads;
    const int64_t b = divide(position, a.time), t = position - b * a.time;
    const T* x =
        static_cast<const T*>(a.x) + b * a.x_strides[0] + t * a.x_strides[1] + h * a.x_strides[2];
    T* y = static_cast<T*>(a.y) + b * a.y_strides[0] + t * a.y_strides[1] + h * a.y_strides[2];
    const float* table = a.table + b * a.table_batch_stride + t * a.rotary_dim;
    if (vec >= v.turning) {
      const int64_t at = a.rotary_dim + (vec - v.turning) * N;
      if (a.accumulate || x != y) store_floats(y + at, load_floats<N>(x + at), a.accumulate);
    } else if constexpr (kInterleaved) {
      const int64_t pair = vec * N;
      Floats<N> first, second;
      if constexpr (N == 1) {  // pairs of heads of odd width start anywhere
        first = load_floats<1>(x + 2 * pair), second = load_floats<1>(x + 2 * pair + 1);
      } else {
        const Floats<2 * N> in = load_floats<2 * N>(x + 2 * pair);
#pragma unroll
        for (int i = 0; i < N; ++i) first[i] = in[2 * i], second[i] = in[2 * i + 1];
      }
      rotate(first, second, table + pair, table + half + pair, sign);
      if constexpr (N == 1) {
        store_floats(y + 2 * pair, first, a.accumulate);
        store_floats(y + 2 * pair + 1, second, a.accumulate);
      } else {
        Floats<2 * N> out;
#pragma unroll
        for (int i = 0; i < N; ++i) out[2 * i] = first[i], out[2 * i + 1] = second[i];
        store_floats(y + 2 * pair, out, a.accumulate);
      }
    } else {
      const int64_t at = vec * N;
      Floats<N> first = load_floats<N>(x + at), second = load_floats<N>(x + half + at);
      rotate(first, second, table + at, table + half + at, sign);
      store_floats(y + at, first, a.accumulate);
      store_floats(y + half + at, second, a.accumulate);
    }
  }
}

// ---- geometry -----------------------------------------------------------------------------------

/// Whether vectors of `width` elements, and table vectors for them, start at 16-byte boundaries.
bool is_vectorized(const Rope& a, int64_t width) {
  const int64_t half = a.rotary_dim / 2;
  bool even = is_aligned16(a.x) && is_aligned16(a.y) && is_aligned16(a.table);
  for (int d = 0; d < 3; ++d) even = even && (a.x_strides[d] | a.y_strides[d]) % width == 0;
  // Halves start at a vector, also in the table's rows; interleaved vectors hold width / 2 pairs.
  even = even && half % width == 0 && a.table_batch_stride % 4 == 0;
  return even && (a.head_dim - a.rotary_dim) % width == 0;
}

template <class T, int N, bool kInterleaved>
void launch_rope(const Rope& a, cudaStream_t stream) {
  const HeadVectors v{a.rotary_dim / 2 / N, (a.head_dim - a.rotary_dim) / N};
  const int64_t count = a.batch * a.time * a.heads * v.count();
  const int64_t resident =
      static_cast<int64_t>(kResidentBlocks) * tessera::cuda::num_multiprocessors();
  launch("rope", &rope_kernel<T, N, kInterleaved>,
         LaunchConfig{grid_blocks(std::min(ceil_div(count, kBlock), resident)), kBlock, 0, stream},
         a, v);
}

}  // namespace

// ---- launchers ----------------------------------------------------------------------------------

void rope_table(CUstream_st* stream, const RopeTable& a) {
  if (a.rows * a.rotary_dim == 0) return;
  launch("rope_table", &rope_table_kernel,
         LaunchConfig{grid_blocks(ceil_div(a.rows, kTableRows)), kBlock, 0, stream}, a);
}

void rope(CUstream_st* stream, const Rope& a) {
  if (a.batch * a.time * a.heads * a.head_dim == 0) return;
  tessera::cuda::visit_device_float(a.dtype, "rope", [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVec<T>;
    if (a.interleaved) {
      is_vectorized(a, N) ? launch_rope<T, N / 2, true>(a, stream)
                          : launch_rope<T, 1, true>(a, stream);
    } else {
      is_vectorized(a, N) ? launch_rope<T, N, false>(a, stream)
                          : launch_rope<T, 1, false>(a, stream);
    }
  });
}

}  // namespace tessera::kernels::cuda
