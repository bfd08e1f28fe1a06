#pragma once

#include <span>

#include "core/tensor.h"

namespace tessera {

/// Columns [first, first + count) of a linear layer's output, which one adapter adds to.
struct LoraColumns {
  int64_t first = 0, count = 0;
};

struct LoraAddOptions {
  int64_t rank = 0;  ///< of each adapter
  double scale = 1;
  double dropout = 0;  ///< probability, of the adapters' input
};

/// Low-rank adapters of a linear layer (Hu et al. 2021, arXiv:2106.09685), added to its output. Of
/// adapter p with columns [c, c + n) of y, rows [p r, (p + 1) r) of a and the next n rows of b:
///   y[..., c:c+n] += scale (dropout(x) a_p^T) b_p^T
/// All adapters have one input, so that one product reads it for all, and one mask of dropout.
/// Shapes   y [..., N], x [..., K] with the same leading dimensions, a [P r, K], b [sum of n, r]
///          -> y's memory; y itself is of no use after that. y is row-strided; x too, else copied
/// Dtypes   f32 | bf16 | f16 | f64, the same for all; sums in f32 (f64); x a^T is rounded before and
///          after it is scaled, y once more
/// Random   as `dropout`; with p = 0 no mask is drawn
/// Saves    x, a, b and scale (dropout(x) a^T), [..., P r]; backward draws the mask again
/// Grads    dy goes on as it is; with h = scale (dropout(x) a^T), dh = scale (dy b):
///          da = dh^T dropout(x), db = dy^T h, dx = dropout'(dh a)
/// Streams  current stream; never synchronizes
/// Errors   ShapeError if the shapes, or columns that overlap or are out of order, do not fit;
///          DtypeError if the dtypes differ; Error unless 0 <= dropout < 1
Tensor lora_add_(const Tensor& y, const Tensor& x, const Tensor& a, const Tensor& b,
                 std::span<const LoraColumns> columns, const LoraAddOptions& options);

}  // namespace tessera
