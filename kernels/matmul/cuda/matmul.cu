// Matrix products and bias gradients on CUDA. A product goes to cuBLASLt (cublaslt.h) if that is
// there and offers it, else to the kernels below.
//
//   s = op(a) op(b) + bias + residual (+ c),  c = activation(s)
// Layout           row-major, either operand stored transposed
// Parallelization  a block a tile of c of 128 x 128 (gemm.cuh); bf16 and f16 on tensor cores
//                  (gemm_mma.cuh), f32 in full f32 (gemm_f32.cuh)
// Odd shapes       16-byte chunks where a stored row starts at 16 bytes, else, and at the ragged
//                  ends, element by element; what lies outside counts as 0
// Determinism      k is not split: an element of c is one sum in one order, whatever the shape of c
//
// Bias gradient: columns summed over runs of rows, then the runs in order; the runs are those of
// the workspace, so the grid does not matter.

#include "core/runtime/cuda/reduce.cuh"
#include "kernels/matmul/backend.h"
#include "kernels/matmul/cuda/cublaslt.h"
#include "kernels/matmul/cuda/gemm_f32.cuh"
#include "kernels/matmul/cuda/gemm_mma.cuh"
#include "kernels/matmul/cuda/matmul.h"

namespace tessera::kernels::cuda {
namespace {

using tessera::cuda::ceil_div;
using tessera::cuda::dynamic_smem;
using tessera::cuda::grid_blocks;
using tessera::cuda::is_aligned16;
using tessera::cuda::kVec;
using tessera::cuda::launch;
using tessera::cuda::LaunchConfig;
using tessera::cuda::to_float;
using tessera::cuda::visit_device_float;

// ---- Bias gradient

constexpr int kBiasLanes = 8;  // side by side: 128 bytes of a row
constexpr int kBiasRows = kGemmBlock / kBiasLanes;

template <class T>
constexpr int kBiasCols = kVec<T>* kBiasLanes;

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

/// Who computes a product. The library has one activation; it leaves the others to a pass of ours.
enum class Path : unsigned char { kOwn, kLibrary, kLibraryThenActivation };

Matmul without_activation(const Matmul& p) {
  Matmul linear = p;
  if (p.pre_activation != nullptr) linear.c = p.pre_activation, linear.ldc = p.n;
  linear.pre_activation = nullptr;
  linear.activate = false;
  return linear;
}

Path path_of(const Matmul& p) {
  if (gemm_backend() == GemmBackend::kOwn) return Path::kOwn;
  TESSERA_CHECK(gemm_backend() == GemmBackend::kAuto || cublaslt_problem().empty(),
                "matmul: the backend is cublaslt, but {}", cublaslt_problem());
  if (cublaslt_supports(p)) {
    const GemmWay way = cublaslt_way(p);
    if (way == GemmWay::kFused) return Path::kLibrary;
    // Sums of rows are no longer asked for then: `matmul_fuses_row_sums`.
    return way == GemmWay::kApart && p.activate ? Path::kLibraryThenActivation : Path::kOwn;
  }
  if (p.activate && cublaslt_supports(without_activation(p))) return Path::kLibraryThenActivation;
  tell_not_taken(p);
  return Path::kOwn;
}

}  // namespace

int64_t matmul_workspace_nbytes(const Matmul& p) {
  switch (path_of(p)) {
    case Path::kOwn:
      return 0;
    case Path::kLibrary:
      return cublaslt_workspace_nbytes(p);
    case Path::kLibraryThenActivation:
      break;
  }
  return cublaslt_workspace_nbytes(without_activation(p));
}

bool matmul_fuses_row_sums(const Matmul& p) {
  return p.row_sums != nullptr && path_of(p) == Path::kLibrary;
}

void matmul(CUstream_st* stream, const Matmul& p) {
  if (p.m == 0 || p.n == 0 || p.num_batches == 0) return;
  switch (path_of(p)) {
    case Path::kOwn:
      return own_matmul(stream, p);
    case Path::kLibrary:
      return cublaslt_matmul(stream, p);
    case Path::kLibraryThenActivation:
      break;
  }
  const Matmul linear = without_activation(p);
  cublaslt_matmul(stream, linear);
  activation_fwd(stream, {p.c, linear.c, p.c_dtype, p.activation, p.m, p.n, linear.ldc});
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
