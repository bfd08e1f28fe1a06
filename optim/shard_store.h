#pragma once

#include <functional>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "optim/flat_shard.h"

namespace tessera::optim {

/// How many values a state has for `numel` elements, if one is that of `block` of them.
constexpr int64_t state_numel(int64_t numel, int64_t block) {
  return (numel + block - 1) / block;
}

/// A state: value k belongs to elements [k block, (k + 1) block).
struct BlockState {
  Tensor values;  ///< f32 | u8
  int64_t block = 1;
};

/// A shard and its states, in the order of `Optimizer::state`.
struct ShardParts {
  const FlatShard* shard;
  std::vector<BlockState> states;
  bool with_master = true;  ///< the update writes master and low-precision copy
  bool with_grad = true;    ///< the update reads the gradient
};

/// The elements [first, first + numel) of a shard and its states, where kernels can work on them.
struct ShardWindow {
  Tensor master, grad, low;    ///< as in FlatShard
  std::vector<Tensor> states;  ///< of its elements
  int64_t first = 0;
};

/// Where the shards of an optimizer are kept if not in device memory. Implemented where the world
/// is known.
class ShardStore {
 public:
  using Update = std::function<void(size_t index, const ShardWindow& window)>;

  virtual ~ShardStore() = default;
  /// A zeroed state of `numel` values in the store's memory.
  virtual Tensor make_state(int64_t numel, DType dtype) = 0;
  /// Calls `update` with windows that cover each of `parts` once; what it submits to the current
  /// stream finds the window's values there, and its results replace them. What the caller submits
  /// to the current stream afterwards finds the shards and states as updated.
  virtual void for_each_window(std::span<const ShardParts> parts, const Update& update) = 0;
};

}  // namespace tessera::optim
