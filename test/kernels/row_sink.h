#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "core/row_gradients.h"
#include "core/tensor.h"

namespace tessera::testing {

/// Takes the gradient of a matrix by rows, and keeps what it took.
class RowSink final : public RowGradSink {
 public:
  GradDst destination(const Tensor&) override { return {}; }
  void written(const Tensor&) override {}
  bool takes_rows(const Tensor&) override { return true; }
  void add_rows(const Tensor&, GradRows rows) override { rows_.push_back(std::move(rows)); }
  size_t num_added() const { return rows_.size(); }

  /// The gradient of `shape`, `at_once` rows after the other; NaN before it is written.
  Tensor gradient(const Shape& shape, DType dtype, int64_t at_once) const {
    const NoGrad no_grad;
    const Tensor whole = full(shape, NAN, dtype);
    for (int64_t begin = 0; begin < shape[0]; begin += at_once) {
      const int64_t count = std::min(at_once, shape[0] - begin);
      bool accumulate = false;
      for (const GradRows& rows : rows_) {
        rows({whole.narrow(0, begin, count), std::exchange(accumulate, true)}, begin);
      }
    }
    return whole;
  }

 private:
  std::vector<GradRows> rows_;
};

/// A sink of this kind, which `leaf` has from now on.
inline std::shared_ptr<RowSink> set_row_sink(const Tensor& leaf) {
  auto sink = std::make_shared<RowSink>();
  set_grad_sink(leaf, sink);
  return sink;
}

}  // namespace tessera::testing
