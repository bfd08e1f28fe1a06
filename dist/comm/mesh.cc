#include "dist/comm/mesh.h"

namespace tessera::dist {

Mesh Mesh::make(int world_size, int rank, int shard_size) {
  TESSERA_CHECK_AS(ConfigError, shard_size >= 1 && shard_size <= world_size,
                   "Mesh: shard_size: expected 1 to {} (the world size), got {}", world_size,
                   shard_size);
  TESSERA_CHECK_AS(ConfigError, world_size % shard_size == 0,
                   "Mesh: shard_size: {} does not divide the world size {}", shard_size,
                   world_size);
  Mesh mesh;
  mesh.replicate_size = world_size / shard_size;
  mesh.shard_size = shard_size;
  mesh.replicate_rank = rank / shard_size;
  mesh.shard_rank = rank % shard_size;
  return mesh;
}

std::unique_ptr<Comm> Mesh::split_shard(Comm& world) const {
  return world.split(replicate_rank, shard_rank);
}

std::unique_ptr<Comm> Mesh::split_replicate(Comm& world) const {
  return world.split(shard_rank, replicate_rank);
}

}  // namespace tessera::dist
