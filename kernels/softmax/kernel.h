#pragma once

#include "core/runtime/dispatch.h"
#include "kernels/rows.h"

// Softmax over rows of `cols` elements. Sums in f32 (f64 for f64).

namespace tessera::kernels {

/// softmax: y = exp(x - max) / sum(exp(x - max));  log_softmax: y = x - max - log(sum(...)).
struct SoftmaxFwd {
  void* y;  ///< contiguous
  const void* x;
  DType dtype;
  int64_t rows, cols;
  RowLayout x_rows;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(softmax_fwd, SoftmaxFwd);
TESSERA_DECLARE_KERNEL(log_softmax_fwd, SoftmaxFwd);

/// softmax: dx = y * (dy - sum(dy * y));  log_softmax: dx = dy - exp(y) * sum(dy).
struct SoftmaxBwd {
  void* dx;
  const void* dy;  ///< contiguous
  const void* y;   ///< contiguous
  DType dtype;
  bool accumulate;
  int64_t rows, cols;
  RowLayout dx_rows;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(softmax_bwd, SoftmaxBwd);
TESSERA_DECLARE_KERNEL(log_softmax_bwd, SoftmaxBwd);

}  // namespace tessera::kernels
