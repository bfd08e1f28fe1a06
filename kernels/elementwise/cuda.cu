// Element by element: scale, activations, SwiGLU, and their backwards.
//
// Layout           operands of one dtype T, read as vectors of 16 bytes (8 or 4 elements); the
//                  destination's dtype and `accumulate` are decided at run time, once a vector.
//                  Operands that are all contiguous come as one row; rows of a packed buffer go by
//                  their strides.
// Parallelization  a grid that fits the device strides over the vectors; a thread loads two
//                  vectors of each operand before it uses the first: 64 KiB and more are under way
//                  in a multiprocessor.
// Any other layout (strides that are no multiple of a vector, unaligned addresses) goes through the
// same kernels with vectors of one element.
// Determinism      elements are independent of each other.

#include <algorithm>

#include "core/runtime/cuda/launch.cuh"
#include "kernels/elementwise/kernel.h"
#include "kernels/float_vec.cuh"
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
using tessera::cuda::Vec;

constexpr int kBlock = 256;
// Blocks that stay in a multiprocessor, by what the kernel's registers allow.
constexpr int kUnaryBlocks = 6;
constexpr int kBinaryBlocks = 4;
constexpr int kUnroll = 2;

// ---- functions ----------------------------------------------------------------------------------

/// 1 / (1 + exp(-x)) and 1 minus it, the latter without cancellation.
struct Logistic {
  float value, complement;

  __device__ explicit Logistic(float x) {
    const float e = expf(-x);
    value = 1.0f / (1.0f + e);
    complement = x < -80.0f ? 1.0f : e * value;  // e may be infinite there
  }
};

struct Relu {
  __device__ static float value(float x) { return x < 0 ? 0.0f : x; }
  __device__ static float derivative(float x) { return x <= 0 ? 0.0f : 1.0f; }
};

struct Silu {
  __device__ static float value(float x) { return x * Logistic(x).value; }
  __device__ static float derivative(float x) {
    const Logistic s(x);
    return s.value * (1.0f + x * s.complement);
  }
};

/// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x sigmoid(2 u).
struct GeluTanh {
  static constexpr float kSlope = 1.5957691216f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f * kSlope;

  __device__ static float value(float x) {
    return x * Logistic(x * (kSlope + kCubic * x * x)).value;
  }
  __device__ static float derivative(float x) {
    const Logistic s(x * (kSlope + kCubic * x * x));
    return s.value + x * s.value * s.complement * (kSlope + 3.0f * kCubic * x * x);
  }
};

/// x Phi(x), Phi the normal distribution function.
struct GeluExact {
  static constexpr float kSqrtHalf = 0.7071067812f;
  static constexpr float kDensity = 0.3989422804f;  // 1 / sqrt(2 pi)

  __device__ static float value(float x) { return 0.5f * x * (1.0f + erff(x * kSqrtHalf)); }
  __device__ static float derivative(float x) {
    return 0.5f * (1.0f + erff(x * kSqrtHalf)) + x * kDensity * expf(-0.5f * x * x);
  }
};

/// f(a function object): one choice a vector, not one an element.
template <class F>
__device__ auto visit_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kRelu:
      return f(Relu{});
    case Activation::kSilu:
      return f(Silu{});
    case Activation::kGeluTanh:
      return f(GeluTanh{});
    case Activation::kGeluExact:
      break;
  }
  return f(GeluExact{});
}

template <int N>
__device__ Floats<N> values_of(Activation activation, const Floats<N>& x) {
  return visit_activation(activation, [&](auto function) {
    Floats<N> y;
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = function.value(x[i]);
    return y;
  });
}

template <int N>
__device__ Floats<N> derivatives_of(Activation activation, const Floats<N>& x) {
  return visit_activation(activation, [&](auto function) {
    Floats<N> y;
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = function.derivative(x[i]);
    return y;
  });
}

// ---- loops --------------------------------------------------------------------------------------

/// Rows of vectors of `width` elements, cut into one sequence of vectors.
struct VectorRows {
  int64_t rows, row_vecs;

  __host__ __device__ int64_t count() const { return rows * row_vecs; }
};

/// A vector's row and its first column, counted in vectors.
struct VectorPlace {
  int64_t row, vec;
};
__device__ VectorPlace place_of(const VectorRows& r, int64_t index) {
  if (r.rows == 1) return {0, index};
  const int64_t row = divide(index, r.row_vecs);
  return {row, index - row * r.row_vecs};
}

/// For each vector that this thread works on: `load(place)` for kUnroll of them, then
/// `store(place, loaded)` for each.
template <class Loaded, class Load, class Store>
__device__ void for_vectors(const VectorRows& r, Load load, Store store) {
  const int64_t count = r.count(), stride = static_cast<int64_t>(gridDim.x) * kBlock * kUnroll;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kBlock * kUnroll + threadIdx.x;
       first < count; first += stride) {
    VectorPlace places[kUnroll];
    Loaded loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kBlock >= count) continue;
      places[u] = place_of(r, first + u * kBlock);
      loaded[u] = load(places[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kBlock < count) store(places[u], loaded[u]);
    }
  }
}

// ---- unary and SwiGLU ---------------------------------------------------------------------------

template <class T, int N>
struct Pair {
  Vec<T, N> first, second;
};

template <class T, int N>
__global__ void __launch_bounds__(kBlock, kUnaryBlocks) scale_kernel(Scale p, VectorRows vectors) {
  const auto factor = static_cast<float>(p.factor);
  for_vectors<Vec<T, N>>(
      vectors,
      [&](VectorPlace at) {
        return load_vec<N>(static_cast<const T*>(p.x) + at.row * p.x_stride + at.vec * N);
      },
      [&](VectorPlace at, const Vec<T, N>& x) {
        Floats<N> out = to_floats<N>(x);
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] *= factor;
        store_floats(p.dst, p.dst_dtype, at.row * p.dst_stride + at.vec * N, out, p.accumulate);
      });
}

template <class T, int N>
__global__ void __launch_bounds__(kBlock, kUnaryBlocks)
    activation_fwd_kernel(ActivationFwd p, VectorRows vectors) {
  for_vectors<Vec<T, N>>(
      vectors,
      [&](VectorPlace at) {
        return load_vec<N>(static_cast<const T*>(p.x) + at.row * p.x_stride + at.vec * N);
      },
      [&](VectorPlace at, const Vec<T, N>& x) {
        store_floats(static_cast<T*>(p.y) + at.row * p.cols + at.vec * N,
                     values_of(p.activation, to_floats<N>(x)));
      });
}

template <class T, int N>
__global__ void __launch_bounds__(kBlock, kBinaryBlocks)
    activation_bwd_kernel(ActivationBwd p, VectorRows vectors) {
  for_vectors<Pair<T, N>>(
      vectors,
      [&](VectorPlace at) {
        return Pair<T, N>{
            load_vec<N>(static_cast<const T*>(p.x) + at.row * p.x_stride + at.vec * N),
            load_vec<N>(static_cast<const T*>(p.dy) + at.row * p.dy_stride + at.vec * N)};
      },
      [&](VectorPlace at, const Pair<T, N>& in) {
        Floats<N> out = derivatives_of(p.activation, to_floats<N>(in.first));
        const Floats<N> dy = to_floats<N>(in.second);
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] *= dy[i];
        store_floats(p.dx, p.dx_dtype, at.row * p.dx_stride + at.vec * N, out, p.accumulate);
      });
}

template <class T, int N>
__global__ void __launch_bounds__(kBlock, kBinaryBlocks)
    swiglu_fwd_kernel(SwigluFwd p, VectorRows vectors) {
  for_vectors<Pair<T, N>>(
      vectors,
      [&](VectorPlace at) {
        return Pair<T, N>{
            load_vec<N>(static_cast<const T*>(p.gate) + at.row * p.gate_stride + at.vec * N),
            load_vec<N>(static_cast<const T*>(p.up) + at.row * p.up_stride + at.vec * N)};
      },
      [&](VectorPlace at, const Pair<T, N>& in) {
        Floats<N> out = values_of(Activation::kSilu, to_floats<N>(in.first));
        const Floats<N> up = to_floats<N>(in.second);
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] *= up[i];
        store_floats(static_cast<T*>(p.y) + at.row * p.cols + at.vec * N, out);
      });
}

template <class T, int N>
struct Triple {
  Vec<T, N> gate, up, dy;
};

template <class T, int N>
__global__ void __launch_bounds__(kBlock, kBinaryBlocks)
    swiglu_bwd_kernel(SwigluBwd p, VectorRows vectors) {
  for_vectors<Triple<T, N>>(
      vectors,
      [&](VectorPlace at) {
        return Triple<T, N>{
            load_vec<N>(static_cast<const T*>(p.gate) + at.row * p.gate_stride + at.vec * N),
            load_vec<N>(static_cast<const T*>(p.up) + at.row * p.up_stride + at.vec * N),
            load_vec<N>(static_cast<const T*>(p.dy) + at.row * p.dy_stride + at.vec * N)};
      },
      [&](VectorPlace at, const Triple<T, N>& in) {
        const Floats<N> gate = to_floats<N>(in.gate), up = to_floats<N>(in.up);
        const Floats<N> dy = to_floats<N>(in.dy);
        Floats<N> dgate, dup;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const Logistic s(gate[i]);
          dgate[i] = dy[i] * up[i] * (s.value * (1.0f + gate[i] * s.complement));
          dup[i] = dy[i] * (gate[i] * s.value);
        }
        if (p.dgate != nullptr) {
          store_floats(p.dgate, p.dgate_dtype, at.row * p.dgate_stride + at.vec * N, dgate,
                       p.accumulate_dgate);
        }
        if (p.dup != nullptr) {
          store_floats(p.dup, p.dup_dtype, at.row * p.dup_stride + at.vec * N, dup,
                       p.accumulate_dup);
        }
      });
}

// ---- geometry -----------------------------------------------------------------------------------

/// Elements of a vector that all operands of a row-wise kernel can be read and written in: 16 bytes
/// of their dtype, or 1.
class VectorWidth {
 public:
  VectorWidth(DType dtype, int64_t rows, int64_t cols)
      : width_(static_cast<int>(16 / size_of(dtype))), rows_(rows) {
    if (cols % width_ != 0) width_ = 1;
  }
  VectorWidth& operand(const void* data, int64_t stride) {
    if (!is_aligned16(data) || (rows_ > 1 && stride % width_ != 0)) width_ = 1;
    return *this;
  }
  int get() const { return width_; }

 private:
  int width_;
  int64_t rows_;
};

LaunchConfig vectors_config(const VectorRows& vectors, int resident_blocks, cudaStream_t stream) {
  const int64_t resident =
      static_cast<int64_t>(resident_blocks) * tessera::cuda::num_multiprocessors();
  const int64_t blocks = std::min(ceil_div(vectors.count(), kBlock * kUnroll), resident);
  return {grid_blocks(blocks), kBlock, 0, stream};
}

/// One row where rows follow each other in all operands, so that no index is divided.
VectorRows vector_rows(int64_t rows, int64_t cols, int width, bool is_one_row) {
  return is_one_row ? VectorRows{1, rows * cols / width} : VectorRows{rows, cols / width};
}

template <class Args>
using VectorKernel = void (*)(Args, VectorRows);

/// Launches `vectors` of 16 bytes or `scalars` on p's rows and columns.
template <class T, class Args>
void launch_rows(const char* name, const Args& p, const VectorWidth& width, bool is_one_row,
                 VectorKernel<Args> vectors, VectorKernel<Args> scalars, int resident_blocks,
                 cudaStream_t stream) {
  const VectorRows r = vector_rows(p.rows, p.cols, width.get(), is_one_row);
  if (r.count() == 0) return;
  launch(name, width.get() == kVec<T> ? vectors : scalars,
         vectors_config(r, resident_blocks, stream), p, r);
}

}  // namespace

// ---- launchers ----------------------------------------------------------------------------------

void scale(CUstream_st* stream, const Scale& p) {
  check_device_float(p.dst_dtype, "scale");
  VectorWidth width(p.dtype, p.rows, p.cols);
  width.operand(p.dst, p.dst_stride).operand(p.x, p.x_stride);
  tessera::cuda::visit_device_float(p.dtype, "scale", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_rows<T>("scale", p, width, p.dst_stride == p.cols && p.x_stride == p.cols,
                   &scale_kernel<T, kVec<T>>, &scale_kernel<T, 1>, kUnaryBlocks, stream);
  });
}

void activation_fwd(CUstream_st* stream, const ActivationFwd& p) {
  VectorWidth width(p.dtype, p.rows, p.cols);
  width.operand(p.y, p.cols).operand(p.x, p.x_stride);
  tessera::cuda::visit_device_float(p.dtype, "activation_fwd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_rows<T>("activation_fwd", p, width, p.x_stride == p.cols,
                   &activation_fwd_kernel<T, kVec<T>>, &activation_fwd_kernel<T, 1>, kUnaryBlocks,
                   stream);
  });
}

void activation_bwd(CUstream_st* stream, const ActivationBwd& p) {
  check_device_float(p.dx_dtype, "activation_bwd");
  VectorWidth width(p.dtype, p.rows, p.cols);
  width.operand(p.dx, p.dx_stride).operand(p.dy, p.dy_stride).operand(p.x, p.x_stride);
  tessera::cuda::visit_device_float(p.dtype, "activation_bwd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_rows<T>("activation_bwd", p, width,
                   p.dx_stride == p.cols && p.dy_stride == p.cols && p.x_stride == p.cols,
                   &activation_bwd_kernel<T, kVec<T>>, &activation_bwd_kernel<T, 1>, kBinaryBlocks,
                   stream);
  });
}

void swiglu_fwd(CUstream_st* stream, const SwigluFwd& p) {
  VectorWidth width(p.dtype, p.rows, p.cols);
  width.operand(p.y, p.cols).operand(p.gate, p.gate_stride).operand(p.up, p.up_stride);
  tessera::cuda::visit_device_float(p.dtype, "swiglu_fwd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_rows<T>("swiglu_fwd", p, width, p.gate_stride == p.cols && p.up_stride == p.cols,
                   &swiglu_fwd_kernel<T, kVec<T>>, &swiglu_fwd_kernel<T, 1>, kBinaryBlocks, stream);
  });
}

void swiglu_bwd(CUstream_st* stream, const SwigluBwd& p) {
  if (p.dgate != nullptr) check_device_float(p.dgate_dtype, "swiglu_bwd");
  if (p.dup != nullptr) check_device_float(p.dup_dtype, "swiglu_bwd");
  VectorWidth width(p.dtype, p.rows, p.cols);
  width.operand(p.dgate, p.dgate_stride).operand(p.dup, p.dup_stride).operand(p.dy, p.dy_stride);
  width.operand(p.gate, p.gate_stride).operand(p.up, p.up_stride);
  const bool is_one_row = p.dgate_stride == p.cols && p.dup_stride == p.cols &&
                          p.dy_stride == p.cols && p.gate_stride == p.cols && p.up_stride == p.cols;
  tessera::cuda::visit_device_float(p.dtype, "swiglu_bwd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_rows<T>("swiglu_bwd", p, width, is_one_row, &swiglu_bwd_kernel<T, kVec<T>>,
                   &swiglu_bwd_kernel<T, 1>, kBinaryBlocks, stream);
  });
}

}  // namespace tessera::kernels::cuda
