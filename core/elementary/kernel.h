#pragma once

#include "core/dtype.h"
#include "core/runtime/dispatch.h"
#include "core/shape.h"

// The kernels a tensor cannot live without.

namespace tessera::kernels {

/// dst = src, or dst += src with `accumulate` (in f32; f64 if either is f64); converts between any
/// two dtypes (floats round to nearest even; floats to integers truncate). Strides in elements.
struct Copy {
  void* dst;
  const void* src;
  DType dst_dtype, src_dtype;
  Shape shape;
  Strides dst_strides, src_strides;
  bool accumulate = false;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(copy, Copy);

/// dst[...] = value. Strides in elements.
struct Fill {
  void* dst;
  DType dtype;
  Shape shape;
  Strides strides;
  double value;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(fill, Fill);

/// The bytes of a strided range, from its first to its last element.
int64_t span_nbytes(const Shape& shape, const Strides& strides, DType dtype);

}  // namespace tessera::kernels
