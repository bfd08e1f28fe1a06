#pragma once

#include <initializer_list>

#include "core/tensor.h"

namespace tessera {

/// Rows of the last dimension of tensors of one shape, as row-wise kernels take them. Tensors that
/// are all contiguous are one long row.
struct Rows {
  int64_t rows = 0, cols = 0;

  explicit Rows(std::initializer_list<Tensor> tensors) {
    const Tensor& first = *tensors.begin();
    bool flat = true;
    for (const Tensor& t : tensors) flat = flat && t.is_contiguous();
    const int64_t numel = first.numel();
    cols = flat || first.num_dims() == 0 ? numel : first.dim(-1);
    rows = numel == 0 ? 0 : numel / cols;
  }
  /// Elements between rows of one of the tensors.
  int64_t stride(const Tensor& t) const { return rows <= 1 ? cols : t.row_stride(); }
};

/// Row-wise kernels can address it.
inline bool is_row_addressable(const Tensor& x) {
  return x.is_contiguous() || x.is_row_strided();
}

/// Itself if row-wise kernels can read it, else a contiguous copy.
inline Tensor row_addressable(const Tensor& x) {
  return is_row_addressable(x) ? x : x.contiguous();
}

}  // namespace tessera
