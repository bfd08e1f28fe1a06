#pragma once

#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/ptx.cuh"
#include "kernels/float_vec.cuh"
#include "kernels/matmul/cuda/activation.cuh"
#include "kernels/matmul/kernel.h"

// What the tensor-core and the f32 product share: the tiles of c, and their way from shared memory
// to c with everything that is added on it.
//
// A block makes a tile of kTileM x kTileN of c with kGemmBlock threads. Its sums are laid down in
// shared memory in f32; then each warp writes whole rows of the tile, four elements a lane, so that
// all accesses to c, residual, bias and pre_activation are coalesced whatever the layout of the
// accumulators.

namespace tessera::kernels::cuda {
inline namespace TESSERA_CUDA_BODY {

constexpr int kGemmBlock = 256;
constexpr int kTileM = 128, kTileN = 128;
/// Elements between rows of sums. 136 = 8 mod 32: the eight-byte stores of mma fragments (row g,
/// columns 2t and 2t + 1) of half a warp fall into 32 different banks.
constexpr int kSumsStride = kTileN + 8;
constexpr int64_t kSumsNbytes = int64_t{kTileM} * kSumsStride * sizeof(float);

/// What a launch knows beside its arguments.
struct GemmLaunch {
  int64_t tiles_m, tiles_n;
  bool is_a_aligned, is_b_aligned;  ///< 16-byte vectors may be read along stored rows
  bool is_c_aligned;                ///< and of all that the epilogue touches
};

inline GemmLaunch gemm_launch(const Matmul& p) {
  using tessera::cuda::is_aligned16;
  // Every stored row starts at a multiple of 16 bytes (8 elements of two bytes, 4 of f32).
  const auto has_vectors = [](const void* data, DType dtype, int64_t ld, int64_t batch_stride) {
    const int64_t width = 16 / static_cast<int64_t>(size_of(dtype));
    return data == nullptr || (is_aligned16(data) && ld % width == 0 && batch_stride % width == 0);
  };
  return {.tiles_m = tessera::cuda::ceil_div(p.m, kTileM),
          .tiles_n = tessera::cuda::ceil_div(p.n, kTileN),
          .is_a_aligned = has_vectors(p.a, p.dtype, p.lda, p.batch_stride_a),
          .is_b_aligned = has_vectors(p.b, p.dtype, p.ldb, p.batch_stride_b),
          .is_c_aligned = has_vectors(p.c, p.c_dtype, p.ldc, p.batch_stride_c) &&
                          has_vectors(p.residual, p.c_dtype, p.ld_residual, 0) &&
                          has_vectors(p.pre_activation, p.c_dtype, p.n, 0) &&
                          has_vectors(p.bias, p.bias_dtype, 0, 0)};
}
/// A block for each tile of each batch.
inline tessera::cuda::LaunchConfig gemm_config(const Matmul& p, int64_t smem_nbytes,
                                               cudaStream_t stream) {
  const GemmLaunch geometry = gemm_launch(p);
  const int64_t tiles = geometry.tiles_m * geometry.tiles_n * p.num_batches;
  return {.grid = dim3(tessera::cuda::grid_blocks(tiles)),
          .block = dim3(kGemmBlock),
          .smem_bytes = static_cast<size_t>(smem_nbytes),
          .stream = stream};
}

/// The first row and column of a tile, and its batch.
struct TileOrigin {
  int64_t row, col, batch;
};

/// Blocks walk the tiles of a batch in bands of kBand rows of tiles, down each column of a band:
/// blocks that run together share columns of b and rows of a in the L2 cache.
__device__ inline TileOrigin tile_origin(const GemmLaunch& geometry) {
  constexpr int64_t kBand = 8;
  const int64_t tiles = geometry.tiles_m * geometry.tiles_n;
  const int64_t batch = static_cast<int64_t>(blockIdx.x) / tiles;
  const int64_t index = static_cast<int64_t>(blockIdx.x) % tiles;
  const int64_t band = index / (kBand * geometry.tiles_n);
  const int64_t in_band = index % (kBand * geometry.tiles_n);
  const int64_t rest = geometry.tiles_m - band * kBand;
  const int64_t height = rest < kBand ? rest : kBand;
  return {(band * kBand + in_band % height) * kTileM, in_band / height * kTileN, batch};
}

/// A stored matrix and how much of it there is.
template <class T>
struct Stored {
  const T* data;
  int64_t ld, rows, cols;
  bool is_aligned;
};

/// Four neighbours of a row of which `count` exist; the others are 0.
template <class T>
__device__ inline Floats<4> load4(const T* from, int64_t count, bool is_aligned) {
  if (is_aligned && count >= 4) return load_floats<4>(from);
  Floats<4> values;
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = i < count ? tessera::cuda::to_float(from[i]) : 0.0f;
  return values;
}
template <class T>
__device__ inline void store4(T* to, const Floats<4>& values, int64_t count, bool is_aligned) {
  if (is_aligned && count >= 4) return store_floats(to, values);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) to[i] = tessera::cuda::from_float<T>(values[i]);
  }
}

template <class T>
__device__ inline T* shifted(void* data, int64_t elements) {
  return static_cast<T*>(data) + elements;
}
template <class T>
__device__ inline const T* shifted(const void* data, int64_t elements) {
  return static_cast<const T*>(data) + elements;
}

/// c = activation(sums + bias + residual (+ c)) of a tile: T is the type of a and b, C that of c.
template <class T, class C>
__device__ inline void write_rows(const Matmul& p, const TileOrigin& origin, const float* sums,
                                  bool is_aligned) {
  const int warp = static_cast<int>(threadIdx.x) / tessera::cuda::kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % tessera::cuda::kWarpSize;
  const int64_t col = origin.col + 4 * lane, count = p.n - col;
  if (count <= 0) return;
  Floats<4> bias{};
  if (p.bias != nullptr) {
    bias = p.bias_dtype == kF32 ? load4(shifted<float>(p.bias, col), count, is_aligned)
                                : load4(shifted<T>(p.bias, col), count, is_aligned);
  }
#pragma unroll 1
  for (int r = warp; r < kTileM; r += kGemmBlock / tessera::cuda::kWarpSize) {
    const int64_t row = origin.row + r;
    if (row >= p.m) return;
    Floats<4> values = tessera::cuda::load_vec<4>(sums + r * kSumsStride + 4 * lane);
    C* const c = shifted<C>(p.c, origin.batch * p.batch_stride_c + row * p.ldc + col);
    Floats<4> added{};
    if (p.residual != nullptr) {
      added = load4(shifted<C>(p.residual, row * p.ld_residual + col), count, is_aligned);
    } else if (p.accumulate) {
      added = load4(static_cast<const C*>(c), count, is_aligned);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = values[i] + bias[i] + added[i];
    if (p.activate) {  // of the rounded sum
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = tessera::cuda::to_float(tessera::cuda::from_float<C>(values[i]));
      }
      if (p.pre_activation != nullptr) {
        store4(shifted<C>(p.pre_activation, row * p.n + col), values, count, is_aligned);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = activation_value(p.activation, values[i]);
    }
    store4(c, values, count, is_aligned);
  }
}

template <class T>
__device__ inline void write_tile(const Matmul& p, const TileOrigin& origin, const float* sums,
                                  bool is_aligned) {
  if constexpr (std::is_same_v<T, float>) {
    write_rows<float, float>(p, origin, sums, is_aligned);
  } else if (p.c_dtype == kF32) {
    write_rows<T, float>(p, origin, sums, is_aligned);
  } else {
    write_rows<T, T>(p, origin, sums, is_aligned);
  }
}

}  // namespace TESSERA_CUDA_BODY
}  // namespace tessera::kernels::cuda
