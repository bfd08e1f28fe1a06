#pragma once

#include <memory>

#include "dist/comm/comm.h"

namespace tessera::dist {

/// Ranks as a matrix, replicate x shard: rank = replicate_rank * shard_size + shard_rank. A shard
/// group (neighbours, so that it fits a node) holds one copy of the states; a replicate group holds
/// the ranks with the same shard.
struct Mesh {
  int replicate_size = 1, shard_size = 1;
  int replicate_rank = 0, shard_rank = 0;

  /// ConfigError (naming fsdp.shard_size) unless shard_size is in [1, world_size] and divides it.
  static Mesh make(int world_size, int rank, int shard_size);

  /// The ranks of this shard group, in order of shard_rank. Collective over all of `world`.
  std::unique_ptr<Comm> split_shard(Comm& world) const;
  /// The ranks that hold the same shard, in order of replicate_rank. Collective over `world`.
  std::unique_ptr<Comm> split_replicate(Comm& world) const;
};

}  // namespace tessera::dist
