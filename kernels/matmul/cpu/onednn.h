#pragma once

#include <cstdint>

#include "core/dtype.h"

// The only door to oneDNN; onednn.cc also hides the difference between its 2.x and 3.x APIs.

namespace tessera::kernels::cpu {

/// c = op(a) op(b) + bias, or c += ... with `accumulate`; row-major, `num_batches` times. m, n and
/// k are at least 1. f32 or bf16 operands (bf16 needs `onednn_has_bf16()`), c of the same dtype or
/// f32, bias f32 or of the operands' dtype.
struct OnednnMatmul {
  void* c;
  const void* a;
  const void* b;
  const void* bias;  // [n] or null
  DType dtype, c_dtype, bias_dtype;
  bool trans_a, trans_b, accumulate;
  int64_t m, n, k, lda, ldb, ldc;
  int64_t num_batches, batch_stride_a, batch_stride_b, batch_stride_c;
  bool one_thread = false;  // also where the calling worker may use more
};

/// Runs on the threads that the calling worker may use (one, if the product is tiny). Primitives
/// are made once a shape and kept by the calling thread, the last kMaxPrimitives of them; they
/// share a scratchpad of the thread, which only grows. A row of the result has the same bits
/// whatever the number of threads and of other rows.
void onednn_matmul(const OnednnMatmul& call);
/// The same inside of parallel regions, which errors may not leave: false if oneDNN failed.
bool try_onednn_matmul(const OnednnMatmul& call) noexcept;
inline constexpr int kMaxPrimitives = 256;

/// The processor multiplies bf16 in hardware (AVX512-BF16 or AMX); oneDNN emulates it slowly or
/// not at all on others.
bool onednn_has_bf16();

/// c = op(a) b (+ c): f32, row-major, on the calling thread alone. False if it failed.
bool onednn_sgemm(float* c, const float* a, const float* b, bool trans_a, bool accumulate,
                  int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc);

}  // namespace tessera::kernels::cpu
