// Matrix products and bias gradients on CUDA. A product goes to cuBLASLt (cublaslt.h) if that is
// there and offers it, else to the kernels below.
//
//   s = op(a) op(b) + bias + residual (+ c),  c = activation(s)
// Layout           row-major, either operand stored transposed; tiles of op(a) and op(b) keep the
//                  stored orientation in shared memory and ldmatrix transposes where needed
// bf16, f16        a block makes 128 x 128 of c in steps of 32 of k: four stages of cp.async, eight
//                  warps of 64 x 32, mma.m16n8k16 with f32 accumulators in registers
// f32              128 x 128 in steps of 8, 8 x 8 sums a thread in full f32, the next step's
//                  operands on their way in registers
// Odd shapes       16-byte chunks where a stored row starts at 16 bytes, element by element where
// it
//                  does not and at the ragged ends; what lies outside counts as 0
// Determinism      k is not split: an element of c is one sum in one order, whatever the shape of c
//
// Bias gradient: columns summed over runs of rows, then the runs in order; the runs are those of
// the workspace, so the grid does not matter.

#include "core/runtime/cuda/reduce.cuh"
#include "kernels/matmul/backend.h"
#include "kernels/matmul/cublaslt.h"
#include "kernels/matmul/cuda.h"
#include "kernels/matmul/gemm.cuh"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::dynamic_smem;
using tessera::cuda::grid_blocks;
using tessera::cuda::is_aligned16;
using tessera::cuda::kVec;
using tessera::cuda::kWarpSize;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;
using tessera::cuda::load_vec;
using tessera::cuda::store_vec;
using tessera::cuda::to_float;
using tessera::cuda::Vec;
using tessera::cuda::visit_device_float;

// ---- Tensor cores

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

/// A stored matrix and how much of it there is.
template <class T>
struct Stored {
  const T* data;
  int64_t ld, rows, cols;
  bool is_aligned;
};

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
      Vec<T> vec;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) vec[j].bits = j < count ? source[j].bits : uint16_t{0};
      store_vec(to, vec);
    }
  }
}

/// A fragment of 16 x 16 of op(a) from its tile ([kTileM, kMmaTileK], or transposed).
template <bool kTrans, class T>
__device__ void load_a(uint32_t (&a)[4], const T* tile, int row, int k) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
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
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
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
  T* const stages = dynamic_smem<T>();
  const TileOrigin origin = tile_origin(geometry);
  const Stored<T> a{shifted<T>(p.a, origin.batch * p.batch_stride_a), p.lda, kTransA ? p.k : p.m,
                    kTransA ? p.m : p.k, geometry.is_a_aligned};
  const Stored<T> b{shifted<T>(p.b, origin.batch * p.batch_stride_b), p.ldb, kTransB ? p.n : p.k,
                    kTransB ? p.k : p.n, geometry.is_b_aligned};
  const int64_t num_steps = ceil_div(p.k, kMmaTileK);
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
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
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

  float* const tile = dynamic_smem<float>();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
      const int row = warp_row + 16 * i + lane / 4, col = warp_col + 8 * j + lane % 4 * 2;
      const float(&s)[4] = sums[i][j];
      store_vec(tile + row * kSumsStride + col, Vec<float, 2>{{s[0], s[1]}});
      store_vec(tile + (row + 8) * kSumsStride + col, Vec<float, 2>{{s[2], s[3]}});
    }
  }
  __syncthreads();
  write_tile<T>(p, origin, tile, geometry.is_c_aligned);
}

// ---- f32

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
      store_vec(tile + k * kF32Stride + outer, values[i]);
    }
  }
}

/// Thread (y, x) of 16 x 16 sums rows 4y + {0..3, 64..67} and columns 4x + {0..3, 64..67}.
template <bool kTransA, bool kTransB>
__global__ void __launch_bounds__(kGemmBlock, 2)
    gemm_f32_kernel(const Matmul p, const GemmLaunch geometry) {
  float* const smem = dynamic_smem<float>();
  const TileOrigin origin = tile_origin(geometry);
  const Stored<float> a{shifted<float>(p.a, origin.batch * p.batch_stride_a), p.lda,
                        kTransA ? p.k : p.m, kTransA ? p.m : p.k, geometry.is_a_aligned};
  const Stored<float> b{shifted<float>(p.b, origin.batch * p.batch_stride_b), p.ldb,
                        kTransB ? p.n : p.k, kTransB ? p.k : p.n, geometry.is_b_aligned};
  const int64_t num_steps = ceil_div(p.k, kF32TileK);
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
      const auto a0 = load_vec<4>(tile_a + k * kF32Stride + y);
      const auto a1 = load_vec<4>(tile_a + k * kF32Stride + y + kTileM / 2);
      const auto b0 = load_vec<4>(tile_b + k * kF32Stride + x);
      const auto b1 = load_vec<4>(tile_b + k * kF32Stride + x + kTileN / 2);
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
      store_vec(smem + row * kSumsStride + x + j / 4 * (kTileN / 2),
                Floats<4>{{sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]}});
    }
  }
  __syncthreads();
  write_tile<float>(p, origin, smem, geometry.is_c_aligned);
}

// ---- Bias gradient

constexpr int kBiasLanes = 8;  // side by side: 128 bytes of a row
constexpr int kBiasRows = kGemmBlock / kBiasLanes;

template <class T>
constexpr int kBiasCols = kBiasLanes* kVec<T>;

/// Block (chunk, columns): partials[chunk][col] = sum of dy[row][col] over the chunk's rows.
template <class T>
__global__ void __launch_bounds__(kGemmBlock)
    bias_grad_partials_kernel(const BiasGrad p, int64_t chunks, int64_t column_blocks,
                              bool is_aligned) {
  constexpr int kWidth = kVec<T>;
  float* const rows = dynamic_smem<float>();  // [kBiasRows, kBiasCols]
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) / column_blocks;
  const int64_t first_col = static_cast<int64_t>(blockIdx.x) % column_blocks * kBiasCols<T>;
  const int lane = static_cast<int>(threadIdx.x) % kBiasLanes;
  const int group = static_cast<int>(threadIdx.x) / kBiasLanes;
  const int64_t col = first_col + lane * kWidth, count = p.n - col;
  const int64_t end = p.rows * (chunk + 1) / chunks;
  Floats<kWidth> sums{};
  if (is_aligned && count >= kWidth) {
#pragma unroll 4
    for (int64_t row = p.rows * chunk / chunks + group; row < end; row += kBiasRows) {
      const auto values = load_floats<kWidth>(shifted<T>(p.dy, row * p.ld_dy + col));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[i] += values[i];
    }
  } else {
    for (int64_t row = p.rows * chunk / chunks + group; row < end; row += kBiasRows) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (i < count) sums[i] += to_float(shifted<T>(p.dy, row * p.ld_dy + col)[i]);
      }
    }
  }
  store_floats(rows + group * kBiasCols<T> + lane * kWidth, sums);
  __syncthreads();
  const int own = static_cast<int>(threadIdx.x);
  if (own >= kBiasCols<T> || first_col + own >= p.n) return;
  float sum = 0;
  for (int i = 0; i < kBiasRows; ++i) sum += rows[i * kBiasCols<T> + own];
  static_cast<float*>(p.partials)[chunk * p.n + first_col + own] = sum;
}

/// One column a thread.
template <class D>
__global__ void __launch_bounds__(kGemmBlock)
    bias_grad_sum_kernel(const BiasGrad p, int64_t chunks) {
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kGemmBlock + threadIdx.x;
  if (col >= p.n) return;
  const float* const partials = static_cast<const float*>(p.partials) + col;
  float sum = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partials[chunk * p.n];
  D* const db = static_cast<D*>(p.db) + col;
  if (p.accumulate) sum += to_float(*db);
  *db = tessera::cuda::from_float<D>(sum);
}

// ---- Launchers

template <class T, bool kTransA, bool kTransB>
void launch_gemm(CUstream_st* stream, const Matmul& p) {
  const GemmLaunch geometry = gemm_launch(p);
  if constexpr (std::is_same_v<T, float>) {
    launch("matmul", &gemm_f32_kernel<kTransA, kTransB>, gemm_config(p, kF32SmemNbytes, stream), p,
           geometry);
  } else {
    launch("matmul", &gemm_mma_kernel<T, kTransA, kTransB>, gemm_config(p, kMmaSmemNbytes, stream),
           p, geometry);
  }
}

void own_matmul(CUstream_st* stream, const Matmul& p) {
  TESSERA_CHECK_AS(InternalError, p.row_sums == nullptr, "matmul: row_sums without cuBLASLt");
  visit_device_float(p.dtype, "matmul", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (p.trans_a) {
      p.trans_b ? launch_gemm<T, true, true>(stream, p) : launch_gemm<T, true, false>(stream, p);
    } else {
      p.trans_b ? launch_gemm<T, false, true>(stream, p) : launch_gemm<T, false, false>(stream, p);
    }
  });
}

bool goes_to_library(const Matmul& p) {
  if (gemm_backend() == GemmBackend::kOwn) return false;
  TESSERA_CHECK(gemm_backend() == GemmBackend::kAuto || cublaslt_problem().empty(),
                "matmul: the backend is cublaslt, but {}", cublaslt_problem());
  return cublaslt_supports(p);
}

}  // namespace

int64_t matmul_workspace_nbytes(const Matmul& p) {
  return goes_to_library(p) ? cublaslt_workspace_nbytes(p) : 0;
}

bool matmul_fuses_row_sums(const Matmul& p) {
  return p.row_sums != nullptr && goes_to_library(p);
}

void matmul(CUstream_st* stream, const Matmul& p) {
  if (p.m == 0 || p.n == 0 || p.num_batches == 0) return;
  goes_to_library(p) ? cublaslt_matmul(stream, p) : own_matmul(stream, p);
}

void bias_grad(CUstream_st* stream, const BiasGrad& p) {
  if (p.n == 0) return;
  const int64_t chunks = BiasGrad::num_chunks(p.rows);
  visit_device_float(p.dtype, "bias_grad", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t column_blocks = ceil_div(p.n, kBiasCols<T>);
    const bool is_aligned = is_aligned16(p.dy) && p.ld_dy % kVec<T> == 0;
    launch("bias_grad", &bias_grad_partials_kernel<T>,
           LaunchConfig{dim3(grid_blocks(column_blocks * chunks)), dim3(kGemmBlock),
                        kBiasRows * kBiasCols<T> * sizeof(float), stream},
           p, chunks, column_blocks, is_aligned);
  });
  visit_device_float(p.db_dtype, "bias_grad", [&](auto tag) {
    using D = typename decltype(tag)::type;
    launch("bias_grad", &bias_grad_sum_kernel<D>,
           LaunchConfig{dim3(grid_blocks(ceil_div(p.n, kGemmBlock))), dim3(kGemmBlock), 0, stream},
           p, chunks);
  });
}

}  // namespace tessera::kernels::cuda
