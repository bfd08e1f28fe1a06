#pragma once

#include "core/dtype.h"
#include "core/runtime/dispatch.h"

namespace tessera::kernels {

/// y[r, :] = weight[ids[r], :]. All contiguous. R = number of ids.
struct EmbeddingFwd {
  void* y;
  const void* ids;
  const void* weight;
  DType dtype, ids_dtype;
  int64_t rows, cols, vocab;
  Cost cost() const;  // the range of `weight` is all of it, though R rows are read
};
TESSERA_DECLARE_KERNEL(embedding_fwd, EmbeddingFwd);

/// dw[v, :] = sum of dy[r, :] over the r with ids[r] == v, in order; or += with `accumulate`.
/// dw may be row-strided, the rest is contiguous.
/// `order`: vocab + rows i32, scratch (ends of the rows' runs, then positions sorted by id).
struct EmbeddingBwd {
  void* dw;
  int32_t* order;
  const void* dy;
  const void* ids;
  DType dw_dtype, dtype, ids_dtype;
  int64_t rows, cols, vocab, dw_stride;
  bool accumulate = false;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(embedding_bwd, EmbeddingBwd);

}  // namespace tessera::kernels
