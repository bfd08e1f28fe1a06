#pragma once

#include "core/dtype.h"
#include "core/runtime/dispatch.h"

namespace tessera::kernels {

/// y[r, :] = weight[ids[r], :]. All contiguous. R = number of ids. An id outside of [0, vocab) is
/// an error of the task on the CPU; on CUDA its row is NaN, and its gradient goes nowhere.
struct EmbeddingFwd {
  void* y;
  const void* ids;
  const void* weight;
  DType dtype, ids_dtype;
  int64_t rows, cols, vocab;
  Cost cost() const;  // the range of `weight` is all of it, though R rows are read
};
TESSERA_DECLARE_KERNEL(embedding_fwd, EmbeddingFwd);

/// dw[v, :] = sum of dy[r, :] over the r with ids[r] == first + v, in order; or += with
/// `accumulate`: rows of the table from `first` on. dw may be row-strided, the rest is contiguous.
/// `order`: order_numel i32, scratch (ends of the rows' runs, then positions sorted by id, which
/// are sorted from one half into the other on CUDA).
struct EmbeddingBwd {
  void* dw;
  int32_t* order;
  const void* dy;
  const void* ids;
  DType dw_dtype, dtype, ids_dtype;
  int64_t rows, cols;
  int64_t vocab;  ///< rows of dw
  int64_t dw_stride;
  bool accumulate = false;
  int64_t first = 0;  ///< ids outside of [first, first + vocab) go nowhere
  static int64_t order_numel(DeviceType device, int64_t vocab, int64_t rows) {
    return vocab + (device == DeviceType::kCuda ? 2 : 1) * rows;
  }
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(embedding_bwd, EmbeddingBwd);

}  // namespace tessera::kernels
