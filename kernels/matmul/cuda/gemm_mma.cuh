#pragma once

#include "kernels/matmul/cuda/gemm.cuh"

// The product of bf16 and f16 on tensor cores. A block makes a tile of c in steps of kMmaTileK of
// k: four stages of cp.async in front of eight warps of 64 x 32, mma.m16n8k16, f32 sums in
// registers. Tiles keep the stored orientation in shared memory; ldmatrix transposes where that is
// needed.

namespace tessera::kernels::cuda {
inline namespace TESSERA_CUDA_BODY {

constexpr int kMmaTileK = 32;
constexpr int kStages = 4;
constexpr int kStageElements = (kTileM + kTileN) * kMmaTileK;
constexpr int64_t kMmaSmemNbytes =
    std::max<int64_t>(int64_t{kStages} * kStageElements * 2, kSumsNbytes);
constexpr int kChunk = 8;  // elements of two bytes in 16 bytes
constexpr int kWarpM = 64, kWarpN = 32, kWarpsN = kTileN / kWarpN;

/// Where a chunk of a tile of kCols columns lies. The chunks of eight successive rows that one
/// ldmatrix phase reads fall into eight different groups of banks: rows of 64 bytes share a line of
/// 128 in pairs, rows of 256 start at the same bank.
template <int kCols>
__device__ int swizzled(int row, int chunk) {
  constexpr int kChunks = kCols / kChunk;
  static_assert(kChunks == 4 || kChunks == 16);
  const int phase = kChunks == 4 ? row / 2 % 4 : row % 8;
  return row * kCols + (chunk ^ phase) * kChunk;
}

/// The tile of kRows x kCols at (row, col) on its way to shared memory; 0 outside of the matrix.
template <int kRows, int kCols, class T>
__device__ void fetch_tile(T* tile, const Stored<T>& from, int64_t row, int64_t col) {
  constexpr int kChunks = kCols / kChunk;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kGemmBlock) {
    const int r = i / kChunks, chunk = i % kChunks;
    T* const to = tile + swizzled<kCols>(r, chunk);
    const int64_t first = col + chunk * kChunk;
    const int64_t count = row + r < from.rows ? from.cols - first : 0;
    const T* const source = from.data + (row + r) * from.ld + first;
    if (from.is_aligned && (count >= kChunk || count <= 0)) {
      tessera::cuda::cp_async_16(to, count > 0 ? source : from.data, count > 0);
    } else {
      tessera::cuda::Vec<T> vec;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) vec[j].bits = j < count ? source[j].bits : uint16_t{0};
      tessera::cuda::store_vec(to, vec);
    }
  }
}

/// A fragment of 16 x 16 of op(a) from its tile ([kTileM, kMmaTileK], or transposed).
template <bool kTrans, class T>
__device__ void load_a(uint32_t (&a)[4], const T* tile, int row, int k) {
  const int lane = static_cast<int>(threadIdx.x) % tessera::cuda::kWarpSize;
  if constexpr (kTrans) {
    tessera::cuda::ldmatrix_x4_trans(
        a, tile + swizzled<kTileM>(k + lane % 8 + lane / 16 * 8, row / kChunk + lane / 8 % 2));
  } else {
    tessera::cuda::ldmatrix_x4(a,
                               tile + swizzled<kMmaTileK>(row + lane % 16, k / kChunk + lane / 16));
  }
}

/// Two fragments of 16 x 8 of op(b), side by side, from its tile ([kMmaTileK, kTileN], or
/// transposed).
template <bool kTrans, class T>
__device__ void load_b(uint32_t (&b)[2][2], const T* tile, int k, int col) {
  const int lane = static_cast<int>(threadIdx.x) % tessera::cuda::kWarpSize;
  uint32_t r[4];
  if constexpr (kTrans) {
    tessera::cuda::ldmatrix_x4(
        r, tile + swizzled<kMmaTileK>(col + lane % 8 + lane / 16 * 8, k / kChunk + lane / 8 % 2));
  } else {
    tessera::cuda::ldmatrix_x4_trans(
        r, tile + swizzled<kTileN>(k + lane % 16, col / kChunk + lane / 16));
  }
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

template <class T, bool kTransA, bool kTransB>
__global__ void __launch_bounds__(kGemmBlock, 2)
    gemm_mma_kernel(const Matmul p, const GemmLaunch geometry) {
  T* const stages = tessera::cuda::dynamic_smem<T>();
  const TileOrigin origin = tile_origin(geometry);
  const Stored<T> a{shifted<T>(p.a, origin.batch * p.batch_stride_a), p.lda, kTransA ? p.k : p.m,
                    kTransA ? p.m : p.k, geometry.is_a_aligned};
  const Stored<T> b{shifted<T>(p.b, origin.batch * p.batch_stride_b), p.ldb, kTransB ? p.n : p.k,
                    kTransB ? p.k : p.n, geometry.is_b_aligned};
  const int64_t num_steps = tessera::cuda::ceil_div(p.k, kMmaTileK);
  const auto fetch = [&](int64_t step) {
    if (step < num_steps) {
      T* const tile_a = stages + step % kStages * kStageElements;
      T* const tile_b = tile_a + kTileM * kMmaTileK;
      const int64_t k = step * kMmaTileK;
      if constexpr (kTransA) {
        fetch_tile<kMmaTileK, kTileM>(tile_a, a, k, origin.row);
      } else {
        fetch_tile<kTileM, kMmaTileK>(tile_a, a, origin.row, k);
      }
      if constexpr (kTransB) {
        fetch_tile<kTileN, kMmaTileK>(tile_b, b, origin.col, k);
      } else {
        fetch_tile<kMmaTileK, kTileN>(tile_b, b, k, origin.col);
      }
    }
    tessera::cuda::cp_async_commit();  // a group a step, also an empty one: the waits count them
  };

  constexpr int kFragmentsM = kWarpM / 16, kFragmentsN = kWarpN / 8;
  const int warp = static_cast<int>(threadIdx.x) / tessera::cuda::kWarpSize;
  const int warp_row = warp / kWarpsN * kWarpM, warp_col = warp % kWarpsN * kWarpN;
  float sums[kFragmentsM][kFragmentsN][4] = {};
  for (int64_t step = 0; step < kStages - 1; ++step) fetch(step);
  for (int64_t step = 0; step < num_steps; ++step) {
    tessera::cuda::cp_async_wait<kStages - 2>();
    __syncthreads();  // this step's tiles are there, and nobody reads the previous step's
    fetch(step + kStages - 1);
    const T* const tile_a = stages + step % kStages * kStageElements;
    const T* const tile_b = tile_a + kTileM * kMmaTileK;
#pragma unroll
    for (int k = 0; k < kMmaTileK; k += 16) {
      uint32_t fragments_a[kFragmentsM][4], fragments_b[kFragmentsN / 2][2][2];
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        load_a<kTransA>(fragments_a[i], tile_a, warp_row + 16 * i, k);
      }
#pragma unroll
      for (int j = 0; j < kFragmentsN / 2; ++j) {
        load_b<kTransB>(fragments_b[j], tile_b, k, warp_col + 16 * j);
      }
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) {
          tessera::cuda::mma_m16n8k16<T>(sums[i][j], fragments_a[i], fragments_b[j / 2][j % 2],
                                         sums[i][j]);
        }
      }
    }
  }
  tessera::cuda::cp_async_wait<0>();
  __syncthreads();  // the stages become the tile of sums

  float* const tile = tessera::cuda::dynamic_smem<float>();
  const int lane = static_cast<int>(threadIdx.x) % tessera::cuda::kWarpSize;
#pragma unroll
  for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
      const int row = warp_row + 16 * i + lane / 4, col = warp_col + 8 * j + lane % 4 * 2;
      const float(&s)[4] = sums[i][j];
      tessera::cuda::store_vec(tile + row * kSumsStride + col,
                               tessera::cuda::Vec<float, 2>{{s[0], s[1]}});
      tessera::cuda::store_vec(tile + (row + 8) * kSumsStride + col,
                               tessera::cuda::Vec<float, 2>{{s[2], s[3]}});
    }
  }
  __syncthreads();
  write_tile<T>(p, origin, tile, geometry.is_c_aligned);
}

}  // namespace TESSERA_CUDA_BODY
}  // namespace tessera::kernels::cuda
