#include "nn/block.h"

namespace tessera::nn {

Tensor Block::forward(const Tensor& x_BTC, const AttentionInput& input) {
  const Recompute what = recompute_.what;
  if (what == Recompute::kNothing || !grad_mode()) return body(x_BTC, input);
  if (what == Recompute::kCheap) return selective_body(x_BTC, input);
  return recompute(
      [this, input](const std::vector<Tensor>& inputs) { return body(inputs[0], input); }, {x_BTC},
      recompute_.host.get());
}

}  // namespace tessera::nn
