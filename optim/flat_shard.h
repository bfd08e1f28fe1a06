#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tessera::optim {

class ShardOwner;
class ShardStore;

/// A part of one parameter inside a flat shard: elements [begin, end) of the shard.
struct Segment {
  std::string parameter;
  int64_t begin = 0, end = 0;
  float lr_scale = 1;  ///< multiplies the learning rate
  bool decay = true;   ///< weight decay applies
  int64_t offset = 0;  ///< `begin` is this element of the parameter
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
};

}  // namespace tessera::optim
