#pragma once

#include "core/dtype.h"
#include "core/runtime/dispatch.h"
#include "core/shape.h"

// All of them compute in f32 (f64 for f64) and round once. Strides count elements.

namespace tessera::kernels {

/// dst = factor * x, or dst += factor * x with `accumulate`.
struct Scale {
  void* dst;
  const void* x;
  DType dst_dtype, dtype;
  double factor;
  int64_t rows, cols, dst_stride, x_stride;
  bool accumulate = false;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(scale, Scale);

enum class Activation : unsigned char { kRelu, kSilu, kGeluTanh, kGeluExact };

/// y = activation(x); y is contiguous.
struct ActivationFwd {
  void* y;
  const void* x;
  DType dtype;
  Activation activation;
  int64_t rows, cols, x_stride;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(activation_fwd, ActivationFwd);

/// dx = dy * activation'(x), or += with `accumulate`. For relu x may be the output.
struct ActivationBwd {
  void* dx;
  const void* dy;
  const void* x;
  DType dx_dtype, dtype;
  Activation activation;
  int64_t rows, cols, dx_stride, dy_stride, x_stride;
  bool accumulate = false;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(activation_bwd, ActivationBwd);

/// y = silu(gate) * up; y is contiguous.
struct SwigluFwd {
  void* y;
  const void* gate;
  const void* up;
  DType dtype;
  int64_t rows, cols, gate_stride, up_stride;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(swiglu_fwd, SwigluFwd);

/// dgate = dy * up * silu'(gate), dup = dy * silu(gate); null: not wanted.
struct SwigluBwd {
  void* dgate;
  void* dup;
  const void* dy;
  const void* gate;
  const void* up;
  DType dgate_dtype, dup_dtype, dtype;
  int64_t rows, cols, dgate_stride, dup_stride, dy_stride, gate_stride, up_stride;
  bool accumulate_dgate = false, accumulate_dup = false;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(swiglu_bwd, SwigluBwd);

}  // namespace tessera::kernels
