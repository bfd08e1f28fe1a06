#pragma once

#include "core/runtime/dispatch.h"
#include "kernels/rows.h"

// Normalization over rows of `cols` elements. Statistics and sums in f32 (f64 for f64).

namespace tessera::kernels {

/// s = x, or x + residual rounded to the dtype;  y = (s - mean) * rstd * w + b.
/// `mean` and `rstd` ([rows], f32 or f64) are what the backward needs. y and sum are contiguous.
struct NormFwd {
  void* y;
  void* sum;   ///< s; absent without a residual
  void* mean;  ///< absent for rms_norm
  void* rstd;
  const void* x;
  const void* residual;  ///< absent, or same rows as x
  const void* w;         ///< [cols]
  const void* b;         ///< [cols] or absent; always absent for rms_norm
  DType dtype;           ///< of x, residual, y and sum
  DType w_dtype;         ///< of w and b: dtype or f32
  int64_t rows, cols;
  RowLayout x_rows, residual_rows;
  float eps;
  Cost cost() const;
};
/// mean = mean(s), rstd = 1 / sqrt(mean((s - mean)^2) + eps); the variance in a corrected second
/// pass, so that a large common offset does not cancel.
TESSERA_DECLARE_KERNEL(layer_norm_fwd, NormFwd);
/// mean = 0, rstd = 1 / sqrt(mean(s^2) + eps).
TESSERA_DECLARE_KERNEL(rms_norm_fwd, NormFwd);

/// With xhat = (x - mean) * rstd and g = dy * w:
///   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + d_sum      (rms_norm: without mean(g))
///   dw = sum over rows of dy * xhat,   db = sum over rows of dy
/// Each output may be absent. dw and db go through `partials`: one row (of dw, then one of db for
/// layer_norm) for each of num_chunks(rows) runs of rows, added in order; on CUDA one for each
/// block, of which there are as many as `partials` has rows at most.
struct NormBwd {
  void* dx;
  void* dw;
  void* db;           ///< absent for rms_norm
  void* partials;     ///< partial_rows() x (1 or 2) x cols of f32 (f64); absent without dw and db
  const void* dy;     ///< contiguous
  const void* d_sum;  ///< contiguous gradient added to dx, or absent
  const void* x;
  const void* w;
  const void* mean;  ///< absent for rms_norm
  const void* rstd;
  DType dtype;               ///< of x, dy, d_sum and dx
  DType w_dtype;             ///< of w: dtype or f32
  DType dw_dtype, db_dtype;  ///< any floating dtype
  bool accumulate_dx, accumulate_dw, accumulate_db;
  int64_t rows, cols;
  RowLayout x_rows, dx_rows;
  int64_t num_partials = 0;  ///< rows of `partials`; 0: num_chunks(rows)

  static int64_t num_chunks(int64_t rows) { return std::clamp<int64_t>((rows + 15) / 16, 1, 64); }
  /// Rows that `partials` should have on a device.
  static int64_t num_chunks(int64_t rows, DeviceType device) {
    return device == DeviceType::kCuda ? std::clamp<int64_t>(rows, 1, 512) : num_chunks(rows);
  }
  int64_t partial_rows() const { return num_partials > 0 ? num_partials : num_chunks(rows); }
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(layer_norm_bwd, NormBwd);
TESSERA_DECLARE_KERNEL(rms_norm_bwd, NormBwd);

}  // namespace tessera::kernels
