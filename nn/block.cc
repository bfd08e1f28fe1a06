#include "nn/block.h"

namespace tessera::nn {

Tensor Block::forward(const Tensor& x_BTC, const AttentionInput& input) {
  if (recompute_ == Recompute::kNothing || !grad_mode()) return body(x_BTC, input);
  if (recompute_ == Recompute::kCheap) return selective_body(x_BTC, input);
  return recompute(
      [this, input](const std::vector<Tensor>& inputs) { return body(inputs[0], input); }, {x_BTC});
}

}  // namespace tessera::nn
