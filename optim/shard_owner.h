#pragma once

namespace tessera::optim {

struct FlatShard;

/// Who completes the gradients of a shard, and gives the updated shard to whom needs it. An
/// optimizer asks it before it writes.
class ShardOwner {
 public:
  virtual ~ShardOwner() = default;
  /// An update of `shard` begins; `is_scaled`: it multiplies gradients by a factor.
  /// Errors   Error that names the shard and the call that is missing: its gradients are not
  ///          complete, it was updated already, they need a factor, or its owner has ended
  virtual void begin_update(const FlatShard& shard, bool is_scaled) = 0;
};

}  // namespace tessera::optim
