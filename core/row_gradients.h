#pragma once

#include <cstdint>
#include <functional>

#include "core/autograd.h"

// [Note: Gradients by rows]
// The gradient of a large table (an embedding, a head) can be more bytes than all else that a step
// needs at once, and it is read once. So its owner may want a function of rows in place of the
// whole: it calls the function piece by piece, when and where it has room for a piece, and whoever
// has computed nothing yet keeps no more than what the function needs (ids and dy, not dw).
//
//   if (RowGradSink* sink = row_sink(weight)) {
//     return sink->add_rows(weight, [ids, dy](const GradDst& dw, int64_t begin) { ... });
//   }
//   ... the whole, into g.destination(0) ...

namespace tessera {

/// Writes (or adds) rows [begin, begin + dst.view.dim(0)) of a gradient [V, C] to `dst.view`, which is
/// contiguous, by tasks of the current stream. An element's bits do not depend on how the rows are cut:
/// they are those of the whole, unless a library's matrix product rounds otherwise for fewer rows.
using GradRows = std::function<void(const GradDst& dst, int64_t begin)>;

/// A sink that can take the gradient of a matrix as a function of its rows.
class RowGradSink : public GradSink {
 public:
  /// Whether it takes the next contribution so; if not, it has a `destination` for it.
  virtual bool takes_rows(const Tensor& leaf) = 0;
  /// The gradient is the sum so far plus `rows`, which is called before the backward is over, for all
  /// rows, some of them maybe twice, without grad mode and while the leaf can be read; no more after
  /// an exception.
  virtual void add_rows(const Tensor& leaf, GradRows rows) = 0;
};

/// The sink of a leaf, if there is one that takes rows now; else null.
RowGradSink* row_sink(const Tensor& leaf);

}  // namespace tessera
