#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/matmul/kernel.h"

// The only door to cuBLASLt. The library is opened at the first product, so a binary built with it
// starts where it is not installed; the build needs its header only.
//
// [Note: Row-major products by a column-major library]
// c = op(a) op(b) in rows is c^T = op(b)^T op(a)^T in columns, and a row-major matrix is its own
// transpose in columns: the library's A is b, its B is a, its rows are n and its columns m. An
// operand is transposed for the library exactly if it is for us, and a bias of [n] is the library's
// bias of rows.
//
// What is called, all of it:
//   cublasLtCreate, cublasLtGetVersion, cublasLtGetStatusString,
//   cublasLtMatmulDesc{Create, SetAttribute, Destroy} (compute and scale type f32; TRANSA, TRANSB,
//     EPILOGUE, BIAS_POINTER, EPILOGUE_AUX_POINTER, EPILOGUE_AUX_LD),
//   cublasLtMatrixLayout{Create, SetAttribute, Destroy} (BATCH_COUNT, STRIDED_BATCH_OFFSET),
//   cublasLtMatmulPreference{Create, SetAttribute, Destroy} (MAX_WORKSPACE_BYTES,
//     REDUCTION_SCHEME_MASK, MIN_ALIGNMENT_{A, B, C, D}_BYTES),
//   cublasLtMatmulAlgoGetHeuristic, cublasLtMatmulAlgoCheck, cublasLtMatmul (host alpha = 1, beta =
//     0 or 1; C is D unless a residual is added),
//   epilogues DEFAULT, BIAS, GELU, GELU_BIAS, GELU_AUX, GELU_AUX_BIAS, BGRADB.
// Descriptors are changed between calls: what a submitted product needs of them is read by the
// call.

namespace tessera::kernels::cuda {

/// Why cuBLASLt cannot be used in this process, one clause; empty if it can.
const std::string& cublaslt_problem();

/// As cublasLtGetVersion() has it; 0 without one.
int64_t cublaslt_version();

/// Whether cuBLASLt computes all of `p`, epilogue included. Asks its heuristic once a shape,
/// layout, alignment and epilogue; the answer is kept. Products without terms (k = 0) are not
/// offered.
bool cublaslt_supports(const Matmul& p);

/// How to compute what cuBLASLt supports.
enum class GemmWay : unsigned char {
  kFused,  ///< by cublaslt_matmul
  kApart,  ///< its epilogue's activation, or sums of rows, by a pass of our own
  kOwn,    ///< by our own kernel
};
/// What the current Tuning has chosen for `p` (tune.h); kFused if that is nothing.
GemmWay cublaslt_way(const Matmul& p);

/// Says in the log that own kernels compute `p`, which cuBLASLt does not: once that there is no
/// library, or once which product it was that it did not take. Nothing for f64 and products without
/// terms, which are never offered.
void tell_not_taken(const Matmul& p);

// For tune.cc. An algorithm is a line of text: its bytes of workspace and the library's own bytes in
// hexadecimal, which mean the same to the same version of the library.

/// Those that the heuristic offers for all of `p`, its favourite first.
std::vector<std::string> cublaslt_algorithms(const Matmul& p, int max_count);
/// Whether the library takes the algorithm for `p`.
bool cublaslt_takes(const Matmul& p, const std::string& algorithm);
/// Submits `p` with the algorithm; false if the library refuses.
bool cublaslt_try(CUstream_st* stream, const Matmul& p, const std::string& algorithm);

/// Bytes of `Matmul::workspace` that the chosen algorithm needs, at most kCublasLtMaxWorkspace; 0
/// for a product that is not supported.
int64_t cublaslt_workspace_nbytes(const Matmul& p);
inline constexpr int64_t kCublasLtMaxWorkspace = int64_t{32} << 20;

/// Submits `p`, which is supported and has the workspace asked for.
/// Errors   CudaError with the library's words and the sizes
void cublaslt_matmul(CUstream_st* stream, const Matmul& p);

/// From now on each product is also given to `observer`, one at a time, when it is submitted; null
/// ends it. For benches: one observer in a process.
void observe_cublaslt(std::function<void(const Matmul&)> observer);

}  // namespace tessera::kernels::cuda
