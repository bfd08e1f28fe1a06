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

namespace {

/// One range of bytes to another.
bool is_flat(const Copy& a) {
  const Strides dense = contiguous_strides(a.shape);
  return !a.accumulate && a.dst_dtype == a.src_dtype && a.dst_strides == dense &&
         a.src_strides == dense;
}

}  // namespace

void copy(const Stream& s, const Copy& a) {
  if (s.is_observed()) s.declare("copy", a.cost());
  if (s.device().type == DeviceType::kCpu) return s.submit("copy", [a] { cpu::copy(a); });
  if (a.shape.numel() == 0) return;
  if (is_flat(a)) {  // the copy engines, which also reach host memory at full speed
    const auto nbytes = static_cast<size_t>(a.shape.numel()) * size_of(a.dst_dtype);
    if (a.dst != a.src) s.impl()->copy_bytes("copy", a.dst, a.src, nbytes);
    return;
  }
  TESSERA_IF_CUDA(const CudaTask task(s, "copy"); cuda::copy(s.cuda(), a); return;)
  TESSERA_UNIMPLEMENTED("copy: no kernel for device {}", s.device());
}
TESSERA_DEFINE_KERNEL(fill, Fill);

}  // namespace tessera::kernels
