// Pointwise ops with broadcasting: dst = op(a, b, c), or +=.
//
// Layout           dtypes and op are decided at run time, once a vector of 8 elements: there is one
//                  kernel for each number of operands. An operand walks along the last dimension
//                  with stride 1, is repeated in it, or is a number. Anything else (other strides,
//                  rows that do not start at vectors) goes through the same kernels with vectors of
//                  one element, comparisons of integers always.
// Parallelization  a grid that fits the device strides over the vectors; a thread reads all
//                  operands of a vector as raw words before it converts the first: 16 KiB (bf16) or
//                  32 KiB (f32) of each operand are under way in a multiprocessor.
// Determinism      elements are independent of each other.

#include <algorithm>

#include "core/runtime/cuda/launch.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/pointwise/kernel.h"
#include "kernels/rows.cuh"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::from_float;
using tessera::cuda::grid_blocks;
using tessera::cuda::is_aligned16;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;
using tessera::cuda::load_vec;
using tessera::cuda::store_vec;
using tessera::cuda::to_float;
using tessera::cuda::Vec;

constexpr int kBlock = 256;
constexpr int kWidth = 8;  // elements of a vector
/// Blocks of a multiprocessor, as the registers allow.
constexpr int resident_blocks(int operands) {
  return operands == 3 ? 3 : 4;
}

/// Elementary functions of a value.
struct Functions {
  __device__ static float exp(float x) { return expf(x); }
  __device__ static float log(float x) { return logf(x); }
  __device__ static float sqrt(float x) { return sqrtf(x); }
  __device__ static float tanh(float x) { return tanhf(x); }
  __device__ static float abs(float x) { return fabsf(x); }
  __device__ static float pow(float x, float exponent) { return powf(x, exponent); }
};

/// Pointwise with its shape as plain arrays: rows are the outer dimensions.
struct PointwiseArgs {
  struct Operand {
    const void* data;  ///< null: `number`
    DType dtype;
    float number;
    int64_t strides[Shape::kMaxDims];
  };
  void* dst;
  DType dst_dtype;
  PointwiseOp op;
  bool accumulate;
  int last;  ///< index of the last dimension
  int64_t rows, row_vecs;
  int64_t shape[Shape::kMaxDims], dst_strides[Shape::kMaxDims];
  Operand in[3];
};

// ---- elements -----------------------------------------------------------------------------------

/// N elements of at most 4 bytes each, as they lie in memory.
template <int N>
struct Raw {
  uint32_t words[N];
};

template <int N, class Bits>
__device__ void load_bits(Raw<N>& raw, const void* data, int64_t at) {
  const Vec<Bits, N> bits = load_vec<N>(static_cast<const Bits*>(data) + at);
  memcpy(raw.words, &bits, sizeof(bits));
}

/// Element i of `Bits` in the words.
template <class Bits, int N>
__device__ uint32_t bits_of(const Raw<N>& raw, int i) {
  constexpr int kPerWord = 4 / sizeof(Bits);
  return static_cast<Bits>(raw.words[i / kPerWord] >> (i % kPerWord * 8 * sizeof(Bits)));
}

template <int N>
__device__ Raw<N> load_raw(const void* data, DType dtype, int64_t at) {
  Raw<N> raw{};
  if (dtype == kF32) {
    load_bits<N, uint32_t>(raw, data, at);
  } else if (dtype == kU8) {
    load_bits<N, uint8_t>(raw, data, at);
  } else {
    load_bits<N, uint16_t>(raw, data, at);
  }
  return raw;
}

template <int N>
__device__ Floats<N> to_floats(const Raw<N>& raw, DType dtype) {
  Floats<N> values;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (dtype == kF32) {
      values[i] = __uint_as_float(raw.words[i]);
    } else if (dtype == kBF16) {
      values[i] = __uint_as_float(bits_of<uint16_t>(raw, i) << 16);
    } else if (dtype == kF16) {
      values[i] =
          tessera::cuda::f16_bits_to_float(static_cast<uint16_t>(bits_of<uint16_t>(raw, i)));
    } else {
      values[i] = static_cast<float>(bits_of<uint8_t>(raw, i));
    }
  }
  return values;
}

template <int N>
__device__ void store_result(const PointwiseArgs& p, int64_t at, const Floats<N>& y) {
  if (p.dst_dtype != kU8) return store_floats(p.dst, p.dst_dtype, at, y, p.accumulate);
  Vec<uint8_t, N> mask;
#pragma unroll
  for (int i = 0; i < N; ++i) mask[i] = y[i] != 0.0f ? 1 : 0;
  store_vec(static_cast<uint8_t*>(p.dst) + at, mask);
}

// ---- kernels ------------------------------------------------------------------------------------

/// Where a vector is: element offsets of the destination and of each operand.
template <int kOperands>
struct Place {
  int64_t dst, in[kOperands];
};

template <int kOperands, int N>
__device__ Place<kOperands> place_of(const PointwiseArgs& p, int64_t index) {
  int64_t row = p.rows == 1 ? 0 : divide(index, p.row_vecs);
  const int64_t col = (index - row * p.row_vecs) * N;
  Place<kOperands> at;
  at.dst = col * p.dst_strides[p.last];
#pragma unroll
  for (int i = 0; i < kOperands; ++i) at.in[i] = col * p.in[i].strides[p.last];
  for (int d = p.last - 1; d >= 0; --d) {
    const int64_t rest = divide(row, p.shape[d]), k = row - rest * p.shape[d];
    at.dst += k * p.dst_strides[d];
#pragma unroll
    for (int i = 0; i < kOperands; ++i) at.in[i] += k * p.in[i].strides[d];
    row = rest;
  }
  return at;
}

/// N > 1: the destination's last stride is 1, the operands' are 1 or 0, rows start at vectors.
template <int kOperands, int N>
__global__ void __launch_bounds__(kBlock, resident_blocks(kOperands))
    pointwise_kernel(PointwiseArgs p) {
  const int64_t count = p.rows * p.row_vecs, stride = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; index < count;
       index += stride) {
    const Place<kOperands> at = place_of<kOperands, N>(p, index);
    Raw<N> raw[kOperands];
#pragma unroll
    for (int i = 0; i < kOperands; ++i) {
      const PointwiseArgs::Operand& in = p.in[i];
      if (in.data == nullptr) continue;
      if (N == 1 || in.strides[p.last] != 0) {
        raw[i] = load_raw<N>(in.data, in.dtype, at.in[i]);
      } else {
        raw[i].words[0] = load_raw<1>(in.data, in.dtype, at.in[i]).words[0];
      }
    }
    Floats<N> x[kOperands];
#pragma unroll
    for (int i = 0; i < kOperands; ++i) {
      const PointwiseArgs::Operand& in = p.in[i];
      if (in.data != nullptr && (N == 1 || in.strides[p.last] != 0)) {
        x[i] = to_floats(raw[i], in.dtype);
        continue;
      }
      const float same =
          in.data == nullptr ? in.number : to_floats(Raw<1>{raw[i].words[0]}, in.dtype)[0];
#pragma unroll
      for (int k = 0; k < N; ++k) x[i][k] = same;
    }
    Floats<N> y;
    visit_pointwise<kOperands, false>(p.op, [&](auto value) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float b = kOperands > 1 ? x[kOperands > 1 ? 1 : 0][k] : 0.0f;
        const float c = kOperands > 2 ? x[kOperands > 2 ? 2 : 0][k] : 0.0f;
        y[k] = decltype(value)::template of<Functions, float, float>(x[0][k], b, c, 1.0f);
      }
    });
    store_result(p, at.dst, y);
  }
}

__device__ int64_t load_integer(const PointwiseArgs::Operand& in, int64_t at) {
  if (in.data == nullptr) return static_cast<int64_t>(in.number);
  return in.dtype == kI64 ? static_cast<const int64_t*>(in.data)[at]
                          : static_cast<const int32_t*>(in.data)[at];
}

__global__ void __launch_bounds__(kBlock) compare_integers_kernel(PointwiseArgs p) {
  const int64_t count = p.rows * p.row_vecs, stride = static_cast<int64_t>(gridDim.x) * kBlock;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; index < count;
       index += stride) {
    const Place<2> at = place_of<2, 1>(p, index);
    const int64_t a = load_integer(p.in[0], at.in[0]), b = load_integer(p.in[1], at.in[1]);
    visit_pointwise<2, true>(p.op, [&](auto value) {
      const int64_t y = decltype(value)::template of<Functions, int64_t, int64_t>(a, b, 0, 1);
      static_cast<uint8_t*>(p.dst)[at.dst] = static_cast<uint8_t>(y);
    });
  }
}

// ---- geometry -----------------------------------------------------------------------------------

/// Whether a row starts at a vector wherever the strides lead, and goes by 1 (or `may_repeat`: 0).
bool is_vectorized(const void* data, DType dtype, const Strides& strides, bool may_repeat) {
  const int last = strides.num_dims() - 1;
  if (may_repeat && (data == nullptr || strides[last] == 0)) return true;
  bool is_even = strides[last] == 1;
  for (int d = 0; d < last; ++d) is_even = is_even && strides[d] % kWidth == 0;
  const auto alignment = std::min<size_t>(16, kWidth * size_of(dtype));
  return is_even && reinterpret_cast<uintptr_t>(data) % alignment == 0;
}

PointwiseArgs make_args(const Pointwise& p, int width) {
  const int last = p.shape.num_dims() - 1;
  PointwiseArgs args{};
  args.dst = p.dst, args.dst_dtype = p.dst_dtype, args.op = p.op, args.accumulate = p.accumulate;
  args.last = last;
  args.rows = p.shape[last] == 0 ? 0 : p.shape.numel() / p.shape[last];
  args.row_vecs = p.shape[last] / width;
  std::copy_n(p.shape.begin(), last + 1, args.shape);
  std::copy_n(p.dst_strides.begin(), last + 1, args.dst_strides);
  for (size_t i = 0; i < p.in.size(); ++i) {
    const Pointwise::Operand& in = p.in[i];
    args.in[i] = {in.data, in.dtype, static_cast<float>(in.number), {}};
    std::copy_n(in.strides.begin(), last + 1, args.in[i].strides);
  }
  return args;
}

template <int N>
auto kernel_of(int operands) {
  return operands == 1   ? &pointwise_kernel<1, N>
         : operands == 2 ? &pointwise_kernel<2, N>
                         : &pointwise_kernel<3, N>;
}

}  // namespace

// ---- launchers ----------------------------------------------------------------------------------

void pointwise(CUstream_st* stream, const Pointwise& p) {
  const bool is_integer = p.compute_dtype() == kI64;
  bool is_vector = !is_integer && p.shape.dim(-1) % kWidth == 0 &&
                   is_vectorized(p.dst, p.dst_dtype, p.dst_strides, false);
  if (p.dst_dtype != kU8) check_device_float(p.dst_dtype, "pointwise");
  for (const Pointwise::Operand& in : p.in) {
    if (in.data == nullptr) continue;
    if (!is_integer && in.dtype != kU8) check_device_float(in.dtype, "pointwise");
    is_vector = is_vector && is_vectorized(in.data, in.dtype, in.strides, true);
  }
  const PointwiseArgs args = make_args(p, is_vector ? kWidth : 1);
  const int64_t vectors = args.rows * args.row_vecs;
  if (vectors == 0) return;
  const int operands = num_operands(p.op);
  const int64_t resident =
      int64_t{resident_blocks(operands)} * tessera::cuda::num_multiprocessors();
  const LaunchConfig config{grid_blocks(std::min(ceil_div(vectors, kBlock), resident)), kBlock, 0,
                            stream};
  launch("pointwise",
         is_integer  ? &compare_integers_kernel
         : is_vector ? kernel_of<kWidth>(operands)
                     : kernel_of<1>(operands),
         config, args);
}

}  // namespace tessera::kernels::cuda
