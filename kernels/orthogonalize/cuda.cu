// Elementwise parts of Newton-Schulz: the products are GEMMs.
//
// row_squares      a block takes a row, sums of threads in a fixed order
// scale_by_norm    every block adds the row sums in the same order, so that the norm never goes
//                  through the host; then a grid-stride loop
// matrix_combine   one element a thread; the mirrored half of a symmetric operand is read by columns
// Determinism      fixed orders, no atomics

#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/reduce.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/orthogonalize/kernel.h"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::block_sum;
using tessera::cuda::ceil_div;
using tessera::cuda::dynamic_smem;
using tessera::cuda::grid_blocks;
using tessera::cuda::kWarpSize;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;

constexpr int kBlock = 256;

template <class T>
__global__ void __launch_bounds__(kBlock) row_squares_kernel(RowSquares p) {
  float* const smem = dynamic_smem<float>();
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* const x = static_cast<const T*>(p.x) + row * p.cols;
    float sum = 0;
    for (int64_t c = threadIdx.x; c < p.cols; c += kBlock) {
      const float value = tessera::cuda::to_float(x[c]);
      sum += value * value;
    }
    sum = block_sum<kBlock>(sum, smem);
    if (threadIdx.x == 0) static_cast<float*>(p.sums)[row] = sum;
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock) scale_by_norm_kernel(ScaleByNorm p) {
  double total = 0;
  for (int64_t r = threadIdx.x; r < p.rows; r += kBlock) {
    total += static_cast<double>(static_cast<const float*>(p.sums)[r]);
  }
  total = block_sum<kBlock>(total, dynamic_smem<double>());
  const double norm = static_cast<double>(p.factor) * sqrt(total);
  const double eps = static_cast<double>(p.eps);
  const float scale = static_cast<float>(1 / (norm > eps ? norm : eps));
  T* const x = static_cast<T*>(p.x);
  const int64_t numel = p.rows * p.cols;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < numel;
       i += static_cast<int64_t>(gridDim.x) * kBlock) {
    x[i] = tessera::cuda::from_float<T>(tessera::cuda::to_float(x[i]) * scale);
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock) matrix_combine_kernel(MatrixCombine p) {
  const float* const y = static_cast<const float*>(p.y);
  const int64_t numel = p.rows * p.cols;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; at < numel;
       at += static_cast<int64_t>(gridDim.x) * kBlock) {
    const int64_t row = at / p.cols, col = at % p.cols;
    const bool is_mirrored = p.is_symmetric && col > row;
    float value = static_cast<float>(p.b) * y[is_mirrored ? col * p.cols + row : at];
    if (p.x != nullptr) {
      value =
          static_cast<float>(p.a) * tessera::cuda::to_float(static_cast<const T*>(p.x)[at]) + value;
    }
    static_cast<T*>(p.out)[at] = tessera::cuda::from_float<T>(value);
  }
}

LaunchConfig config_for(int64_t blocks, size_t smem_bytes, cudaStream_t stream) {
  const int64_t resident = int64_t{8} * tessera::cuda::num_multiprocessors();
  return {grid_blocks(blocks < resident ? blocks : resident), kBlock, smem_bytes, stream};
}

}  // namespace

void row_squares(CUstream_st* stream, const RowSquares& p) {
  if (p.rows == 0) return;
  tessera::cuda::visit_device_float(p.dtype, "row_squares", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch("row_squares", &row_squares_kernel<T>,
           config_for(p.rows, kBlock / kWarpSize * sizeof(float), stream), p);
  });
}

void scale_by_norm(CUstream_st* stream, const ScaleByNorm& p) {
  if (p.rows * p.cols == 0) return;
  tessera::cuda::visit_device_float(p.dtype, "scale_by_norm", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(
        "scale_by_norm", &scale_by_norm_kernel<T>,
        config_for(ceil_div(p.rows * p.cols, kBlock), kBlock / kWarpSize * sizeof(double), stream),
        p);
  });
}

void matrix_combine(CUstream_st* stream, const MatrixCombine& p) {
  if (p.rows * p.cols == 0) return;
  tessera::cuda::visit_device_float(p.dtype, "matrix_combine", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch("matrix_combine", &matrix_combine_kernel<T>,
           config_for(ceil_div(p.rows * p.cols, kBlock), 0, stream), p);
  });
}

}  // namespace tessera::kernels::cuda
