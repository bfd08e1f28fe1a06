#pragma once

#include <functional>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "optim/flat_shard.h"

namespace tessera::optim {

/// A shard and its states, in the order of `Optimizer::state`.
struct ShardParts {
  const FlatShard* shard;
  std::vector<Tensor> states;  ///< f32 [numel] each
};

/// The elements [first, first + numel) of a shard and its states, where kernels can work on them.
struct ShardWindow {
  Tensor master, grad, low;  ///< as in FlatShard
  std::vector<Tensor> states;
  int64_t first = 0;
};

/// Where the shards of an optimizer are kept if not in device memory. Implemented where the world
/// is known.
class ShardStore {
 public:
  using Update = std::function<void(size_t index, const ShardWindow& window)>;

  virtual ~ShardStore() = default;
  /// A zeroed f32 state of `numel` elements in the store's memory.
  virtual Tensor make_state(int64_t numel) = 0;
  /// Calls `update` with windows that cover each of `parts` once; what it submits to the current
  /// stream finds the window's values there, and its results replace them. What the caller submits
  /// to the current stream afterwards finds the shards and states as updated.
  virtual void for_each_window(std::span<const ShardParts> parts, const Update& update) = 0;
};

}  // namespace tessera::optim
