#pragma once

#include "kernels/matmul/cuda/gemm.cuh"

// The product of f32, in full f32: a block makes a tile of c in steps of kF32TileK of k, a thread 8
// x 8 sums of it. The next step's operands are on their way in registers meanwhile.

namespace tessera::kernels::cuda {
inline namespace TESSERA_CUDA_BODY {

constexpr int kF32TileK = 8;
constexpr int kF32Stride = kTileM + 4;  // floats between the rows (of k) of a tile
constexpr int kF32TileFloats = kF32TileK * kF32Stride;
constexpr int64_t kF32SmemNbytes =
    std::max<int64_t>(int64_t{2} * 2 * kF32TileFloats * sizeof(float), kSumsNbytes);
constexpr int kF32Vectors = kTileM * kF32TileK / 4 / kGemmBlock;  // of an operand's tile, a thread
static_assert(kTileM == kTileN);

/// This thread's part of a tile of op(a) (or op(b) transposed: `outer` is then its column): 128 of
/// `outer` from `first` on, kF32TileK of k. kAlongK: stored rows run along k.
template <bool kAlongK>
__device__ void fetch_f32(Floats<4> (&values)[kF32Vectors], const Stored<float>& from,
                          int64_t first, int64_t k) {
#pragma unroll
  for (int i = 0; i < kF32Vectors; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kGemmBlock;
    const int64_t row = kAlongK ? first + index / (kF32TileK / 4) : k + index / (kTileM / 4);
    const int64_t col =
        kAlongK ? k + index % (kF32TileK / 4) * 4 : first + index % (kTileM / 4) * 4;
    const int64_t count = row < from.rows ? from.cols - col : 0;
    values[i] = load4(from.data + row * from.ld + col, count, from.is_aligned);
  }
}

/// Into the tile [kF32TileK, 128].
template <bool kAlongK>
__device__ void keep_f32(float* tile, const Floats<4> (&values)[kF32Vectors]) {
#pragma unroll
  for (int i = 0; i < kF32Vectors; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kGemmBlock;
    if constexpr (kAlongK) {
      const int outer = index / (kF32TileK / 4), k = index % (kF32TileK / 4) * 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) tile[(k + j) * kF32Stride + outer] = values[i][j];
    } else {
      const int k = index / (kTileM / 4), outer = index % (kTileM / 4) * 4;
      tessera::cuda::store_vec(tile + k * kF32Stride + outer, values[i]);
    }
  }
}

/// Thread (y, x) of 16 x 16 sums rows 4y + {0..3, 64..67} and columns 4x + {0..3, 64..67}.
template <bool kTransA, bool kTransB>
__global__ void __launch_bounds__(kGemmBlock, 2)
    gemm_f32_kernel(const Matmul p, const GemmLaunch geometry) {
  float* const smem = tessera::cuda::dynamic_smem<float>();
  const TileOrigin origin = tile_origin(geometry);
  const Stored<float> a{shifted<float>(p.a, origin.batch * p.batch_stride_a), p.lda,
                        kTransA ? p.k : p.m, kTransA ? p.m : p.k, geometry.is_a_aligned};
  const Stored<float> b{shifted<float>(p.b, origin.batch * p.batch_stride_b), p.ldb,
                        kTransB ? p.n : p.k, kTransB ? p.k : p.n, geometry.is_b_aligned};
  const int64_t num_steps = tessera::cuda::ceil_div(p.k, kF32TileK);
  Floats<4> next_a[kF32Vectors], next_b[kF32Vectors];
  const auto fetch = [&](int64_t step) {
    fetch_f32<!kTransA>(next_a, a, origin.row, step * kF32TileK);
    fetch_f32<kTransB>(next_b, b, origin.col, step * kF32TileK);
  };
  const auto keep = [&](int64_t step) {
    float* const tile_a = smem + step % 2 * (2 * kF32TileFloats);
    keep_f32<!kTransA>(tile_a, next_a);
    keep_f32<kTransB>(tile_a + kF32TileFloats, next_b);
  };

  const int y = static_cast<int>(threadIdx.x) / 16 * 4, x = static_cast<int>(threadIdx.x) % 16 * 4;
  float sums[8][8] = {};
  if (num_steps > 0) fetch(0), keep(0);
  __syncthreads();
  for (int64_t step = 0; step < num_steps; ++step) {
    const bool has_next = step + 1 < num_steps;
    if (has_next) fetch(step + 1);
    const float* const tile_a = smem + step % 2 * (2 * kF32TileFloats);
    const float* const tile_b = tile_a + kF32TileFloats;
#pragma unroll
    for (int k = 0; k < kF32TileK; ++k) {
      const auto a0 = tessera::cuda::load_vec<4>(tile_a + k * kF32Stride + y);
      const auto a1 = tessera::cuda::load_vec<4>(tile_a + k * kF32Stride + y + kTileM / 2);
      const auto b0 = tessera::cuda::load_vec<4>(tile_b + k * kF32Stride + x);
      const auto b1 = tessera::cuda::load_vec<4>(tile_b + k * kF32Stride + x + kTileN / 2);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float factor = i < 4 ? a0[i % 4] : a1[i % 4];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          sums[i][j] = fmaf(factor, j < 4 ? b0[j % 4] : b1[j % 4], sums[i][j]);
        }
      }
    }
    if (has_next) keep(step + 1);  // the other half: read before the last barrier
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = y + i % 4 + i / 4 * (kTileM / 2);
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      tessera::cuda::store_vec(
          smem + row * kSumsStride + x + j / 4 * (kTileN / 2),
          Floats<4>{{sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]}});
    }
  }
  __syncthreads();
  write_tile<float>(p, origin, smem, geometry.is_c_aligned);
}

}  // namespace TESSERA_CUDA_BODY
}  // namespace tessera::kernels::cuda
