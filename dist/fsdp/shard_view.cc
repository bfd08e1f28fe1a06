#include "dist/fsdp/shard_view.h"

#include "dist/fsdp/parts.h"

namespace tessera::dist {

ShardView::ShardView(const Fsdp& fsdp) : parts_(parts_of(fsdp)) {
  for (size_t u = 0; u < parts_.units.size(); ++u) {
    Unit& unit = *parts_.units[u];
    const bool stays = unit.plan().residence == Residence::kKeep;
    for (size_t k = 0; k < unit.groups().size(); ++k) {
      const Group& g = unit.groups()[k];
      groups_.push_back({u, k, unit.name(), g.layout, unit.shard_begin(g), g.shard_numel,
                         unit.own_begin(g), unit.own_numel(g), g.values(),
                         g.has_low_copy() ? g.shard : Tensor(), stays, g.coded.get()});
    }
  }
}

int ShardView::num_units() const {
  return static_cast<int>(parts_.units.size());
}
int64_t ShardView::num_parameters() const {
  int64_t count = 0;
  for (const UnitPlan& unit : parts_.plan.units) count += unit.num_parameters();
  return count;
}
std::string ShardView::unit_of(const nn::Module& module) const {
  return parts_.hooks->unit_of(module);
}
std::string ShardView::program() const {
  return parts_.runtime.program().to_string();
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
Tensor ShardView::gathered(const HeldGroup& g) const {
  Unit& unit = *parts_.units[g.unit];
  return unit.gathered.values(unit.groups()[g.group]);
}
Comm& ShardView::comm() const {
  return parts_.scalars.comm();
}

}  // namespace tessera::dist
