#include "core/row_gradients.h"

namespace tessera {

RowGradSink* row_sink(const Tensor& leaf) {
  if (!leaf.is_defined() || !leaf.is_leaf()) return nullptr;
  auto* const sink = dynamic_cast<RowGradSink*>(leaf.impl()->grad_sink.get());
  return sink != nullptr && sink->takes_rows(leaf) ? sink : nullptr;
}

}  // namespace tessera
