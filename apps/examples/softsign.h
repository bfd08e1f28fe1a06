#pragma once

#include <tessera/core/dtype.h>
#include <tessera/core/runtime/dispatch.h>
#include <tessera/core/runtime/stream.h>

// Kernels of an op of one's own: arguments without tensors, what they cost, and their declarations for
// both devices. Those of the CPU are in custom_op.cc, those of CUDA in softsign.cu.

namespace example {

/// y = x / (1 + |x|).
struct SoftsignFwd {
  void* y;
  const void* x;
  tessera::DType dtype;  ///< f32, or f64 on the CPU
  int64_t numel;
  tessera::Cost cost() const;
};
TESSERA_DECLARE_KERNEL(softsign_fwd, SoftsignFwd);

/// dx = dy / (1 + |x|)^2.
struct SoftsignBwd {
  void* dx;
  const void *dy, *x;
  tessera::DType dtype;
  int64_t numel;
  tessera::Cost cost() const;
};
TESSERA_DECLARE_KERNEL(softsign_bwd, SoftsignBwd);

}  // namespace example
