#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tessera::optim {

class ShardExchange;
class ShardOwner;
class ShardStore;

/// A part of one parameter inside a flat shard: elements [begin, end) of the shard.
struct Segment {
  std::string parameter;
  int64_t begin = 0, end = 0;
  float lr_scale = 1;  ///< multiplies the learning rate
  bool decay = true;   ///< weight decay applies
  int64_t offset = 0;  ///< `begin` is this element of the parameter
  /// In place of the optimizer's weight decay, whatever `decay` says.
  std::optional<float> weight_decay = std::nullopt;
};

/// A parameter of the group of parameters that a shard is a part of, whole.
struct WholeParameter {
  std::string name;
  Shape shape;
  int64_t begin = 0;  ///< element of the group
  /// Rows of the blocks that an optimizer of matrices takes apart (queries, keys, values); empty: one.
  std::vector<int64_t> row_blocks = {};
  float lr_scale = 1;  ///< as of its segments
};

/// What an optimizer updates: this rank's flat part of one group of parameters. Elements outside
/// the segments are padding and are never read or written.
struct FlatShard {
  std::string name;
  Tensor master;  ///< f32 [numel]
  Tensor grad;    ///< f32 [numel]
  Tensor low;     ///< undefined, or [numel] in param_dtype: the rounded copy that is gathered
  std::vector<Segment> segments;
  std::shared_ptr<ShardStore> store = nullptr;  ///< null: device memory, states too
  std::shared_ptr<ShardOwner> owner = nullptr;  ///< asked before each update; null: nobody
  std::string optimizer = {};  ///< which of several updates it (`OptimizerSet`); empty: the default
  // For optimizers that look at whole parameters.
  std::vector<WholeParameter> parameters = {};        ///< of the group, in ascending order
  int64_t begin = 0;                                  ///< of the shard in the group
  std::shared_ptr<ShardExchange> exchange = nullptr;  ///< null: this rank has all of the group
};

}  // namespace tessera::optim
