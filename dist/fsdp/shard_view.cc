#include "dist/fsdp/shard_view.h"

#include "dist/fsdp/parts.h"

namespace tessera::dist {

ShardView::ShardView(const Fsdp& fsdp) : parts_(parts_of(fsdp)) {
  const bool stays = parts_.policy.residence == Residence::kKeep;
  for (size_t u = 0; u < parts_.units.size(); ++u) {
    Unit& unit = *parts_.units[u];
    for (const Group& g : unit.groups()) {
      HeldGroup held{static_cast<int>(u),
                     unit.name(),
                     g.layout,
                     unit.shard_begin(g),
                     g.shard_numel,
                     unit.own_begin(g),
                     unit.own_numel(g),
                     g.values(),
                     {},
                     {}};
      if (g.has_low_copy()) held.low = g.shard;
      if (stays) held.gathered = view_of_storage(g.full, 0, {g.layout.numel}, g.layout.dtype);
      groups_.push_back(std::move(held));
    }
  }
}

int ShardView::shard_size() const {
  return parts_.policy.mesh.shard_size;
}
int ShardView::num_replicas() const {
  return parts_.policy.mesh.replicate_size;
}
bool ShardView::is_first() const {
  return parts_.policy.mesh.shard_rank == 0 && parts_.policy.mesh.replicate_rank == 0;
}
bool ShardView::is_gathered(int unit) const {
  return parts_.units[static_cast<size_t>(unit)]->gathered.is_there();
}
Comm& ShardView::comm() const {
  return parts_.scalars.comm();
}

}  // namespace tessera::dist
