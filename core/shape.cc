#include "core/shape.h"

namespace tessera {

void Shape::push_back(int64_t dim) {
  TESSERA_CHECK_SHAPE(num_dims_ < kMaxDims, "Shape: at most 8 dimensions");
  dims_[static_cast<size_t>(num_dims_++)] = dim;
}

void Shape::fail_index(int i) const {
  throw ShapeError(fmt::format("Shape: dimension {} is out of range for {}", i, *this));
}

Strides contiguous_strides(const Shape& shape) {
  Strides strides = shape;
  int64_t stride = 1;
  for (int i = shape.num_dims() - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

Shape broadcast_shapes(const Shape& a, const Shape& b, const char* op) {
  const int n = std::max(a.num_dims(), b.num_dims());
  Shape out;
  for (int i = 0; i < n; ++i) {
    const int ia = i - (n - a.num_dims()), ib = i - (n - b.num_dims());
    const int64_t da = ia < 0 ? 1 : a[ia], db = ib < 0 ? 1 : b[ib];
    TESSERA_CHECK_SHAPE(da == db || da == 1 || db == 1, "{}: {} and {} do not broadcast", op, a, b);
    out.push_back(da == 1 ? db : da);
  }
  return out;
}

}  // namespace tessera
