#include "core/elementary/kernel.h"

namespace tessera::kernels {

int64_t span_nbytes(const Shape& shape, const Strides& strides, DType dtype) {
  int64_t last = 0;
  for (int i = 0; i < shape.num_dims(); ++i) {
    if (shape[i] == 0) return 0;
    last += (shape[i] - 1) * strides[i];
  }
  return (last + 1) * static_cast<int64_t>(size_of(dtype));
}

Cost Copy::cost() const {
  return Cost(accumulate ? static_cast<double>(shape.numel()) : 0)
      .read(src, span_nbytes(shape, src_strides, src_dtype))
      .write_or_accumulate(dst, span_nbytes(shape, dst_strides, dst_dtype), accumulate);
}

Cost Fill::cost() const {
  return Cost().write(dst, span_nbytes(shape, strides, dtype));
}

TESSERA_DEFINE_KERNEL(copy, Copy);
TESSERA_DEFINE_KERNEL(fill, Fill);

}  // namespace tessera::kernels
