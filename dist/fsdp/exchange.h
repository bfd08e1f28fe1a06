#pragma once

#include "dist/fsdp/lanes.h"
#include "optim/exchange.h"

namespace tessera::dist {

/// Moves whole parameters between the shards of an Fsdp and the ranks of a shard group that own
/// them, with the communicators and on the streams that gather parameters and reduce gradients in a
/// step, which are idle while the optimizer works. Not called after `lanes` has ended, which has a
/// `gather_comm`.
class Exchange final : public optim::ShardExchange {
 public:
  explicit Exchange(Lanes& lanes) : lanes_(lanes) {}

  int num_owners() const override { return lanes_.policy.mesh.shard_size; }
  int owner() const override { return lanes_.policy.mesh.shard_rank; }
  Event gather_shards(const Tensor& whole, const Tensor& shard) override;
  Event scatter_sum(const Tensor& shard, const Tensor& whole) override;
  Event sum(const Tensor& values) override;

 private:
  /// Scratch of at least `nbytes` for the reducing stream; null for 0.
  void* staging(int64_t nbytes);

  Lanes& lanes_;
  Tensor staging_;
};

}  // namespace tessera::dist
