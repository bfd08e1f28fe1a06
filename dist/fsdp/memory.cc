// What a model costs in memory.
#include "dist/fsdp/memory.h"

#include <algorithm>
#include <set>

#include "dist/fsdp/flat_bytes.h"
#include "dist/fsdp/parts.h"

namespace tessera::dist {
namespace {

constexpr int64_t kGranule = 512;  // of the allocator

int64_t counted(int64_t nbytes) {
  return (nbytes + kGranule - 1) / kGranule * kGranule;
}

/// What a rank keeps of a unit's shards in device memory, by what it is for.
struct UnitBytes {
  int64_t shards = 0, scales = 0, masters = 0, gradients = 0, whole_gradients = 0;
};

UnitBytes bytes_of(const UnitPlan& unit, const Policy& policy) {
  UnitBytes bytes;
  for (const GroupPlan& g : unit.groups) {
    const DType dtype = g.layout.dtype;
    // Parameters that stay are one piece, of which the shard is a part.
    if (!policy.offloads_parameters()) {
      bytes.shards +=
          counted(g.layout.shard_nbytes(g.has_own_memory ? g.layout.numel : g.shard_numel));
    }
    if (g.layout.is_coded) bytes.scales += counted(dist::nbytes_of(num_scales(g.layout), kF32));
    if (!g.layout.is_trainable) continue;
    const int64_t shard_f32 = counted(dist::nbytes_of(g.shard_numel, kF32));
    if (dtype != kF32 && !policy.offloads()) bytes.masters += shard_f32;
    if (!policy.offloads_gradients()) bytes.gradients += shard_f32;
    if (policy.keeps_whole_gradients()) {
      bytes.whole_gradients += counted(dist::nbytes_of(g.layout.numel, g.grad_dtype));
    }
  }
  return bytes;
}

/// Buffers and ignored parameters, of the allocator's class kParameters.
int64_t nbytes_outside_units(const FsdpParts& parts) {
  std::set<const Storage*> seen;
  int64_t sum = 0;
  const auto add = [&](const Tensor& tensor) {
    if (!seen.insert(tensor.storage().get()).second || !tensor.storage()->is_materialized()) return;
    sum += counted(static_cast<int64_t>(tensor.storage()->nbytes()));
  };
  for (const nn::NamedBuffer& b : parts.root.named_buffers()) add(b.buffer->tensor);
  for (const nn::NamedParameter& p : parts.ignored) add(p.parameter->tensor);
  return sum;
}

}  // namespace

int64_t MemoryPlan::nbytes_of(MemoryClass memory_class) const {
  int64_t sum = 0;
  for (const Entry& e : entries) sum += e.memory_class == memory_class ? e.nbytes : 0;
  return sum;
}

std::string MemoryPlan::to_string() const {
  std::string text;
  for (const Entry& e : entries) {
    text += fmt::format("  {:<15} {:>12}  {}\n", tessera::name_of(e.memory_class),
                        format_nbytes(e.nbytes), e.what);
  }
  return text;
}

MemoryPlan memory_plan(const FsdpParts& parts) {
  const Policy& policy = parts.policy;
  MemoryPlan plan;
  const auto add = [&plan](std::string what, MemoryClass c, int64_t nbytes) {
    if (nbytes > 0) plan.entries.push_back({std::move(what), c, nbytes});
  };
  int64_t shards = 0, scales = 0, masters = 0, gradients = 0, whole = 0, unreduced = 0, leaves = 0;
  int64_t kept_parts = 0;
  for (const auto& unit : parts.units) {
    const UnitBytes own = bytes_of(unit->plan(), policy);
    shards += own.shards, scales += own.scales, masters += own.masters;
    gradients += own.gradients, whole += own.whole_gradients;
    int64_t gathered = 0;
    for (const Group& g : unit->groups()) {
      gathered += dist::nbytes_of(g.layout.numel, g.layout.dtype);
      if (policy.part_size > 1) {
        kept_parts += counted(g.layout.shard_nbytes(g.layout.numel / policy.part_size));
      }
      if (g.unreduced.is_defined()) unreduced += counted(g.unreduced.nbytes());
      leaves += g.leaves.num_buffers() * counted(dist::nbytes_of(unit->own_numel(g), kF32));
    }
    plan.units.push_back({unit->name(), own.shards + own.scales + own.masters,
                          own.gradients + own.whole_gradients, gathered});
  }
  add(policy.mesh.shard_size == 1                        ? "parameters"
      : policy.options.strategy == Strategy::kShardOptim ? "parameters, whole"
                                                         : "parameter shards",
      MemoryClass::kParameters, shards);
  if (parts.lanes.nf4_map.is_defined()) scales += counted(parts.lanes.nf4_map.nbytes());
  add("scales of 16,384 codes each (NF4)", MemoryClass::kParameters, scales);
  add("f32 masters", MemoryClass::kParameters, masters);
  add("buffers and ignored parameters", MemoryClass::kParameters, nbytes_outside_units(parts));
  add("f32 gradient shards", MemoryClass::kGradients, gradients);
  add("whole f32 gradients (sync_every_micro_batch = false)", MemoryClass::kGradients, whole);
  add("gradients that no_sync keeps", MemoryClass::kGradients, unreduced);
  add("sums of micro-batches (reproducible)", MemoryClass::kGradients, leaves);
  add("ring of gradient shards whose place is on the host", MemoryClass::kGradients,
      kHostGradientSlots * counted(dist::nbytes_of(parts.plan.host_gradient_numel, kF32)));
  for (const auto& pool : parts.pools) {
    const int num_slots = parts.runtime.step() > 0 ? pool->num_materialized() : pool->num_slots();
    add(fmt::format("{} x {}", num_slots, format_nbytes(pool->nbytes())), MemoryClass::kGathered,
        num_slots * counted(pool->nbytes()));
  }
  add("parts of the parameters that stay after forward", MemoryClass::kGathered, kept_parts);
  for (const auto& [what, tensor] :
       {std::pair{"staging of reduces", &parts.lanes.reduce_staging},
        std::pair{"staging of reduces over replicas", &parts.lanes.replicate_staging},
        std::pair{"gradients in wire_dtype", &parts.lanes.wire_buffer},
        std::pair{"a shard between the sums in the group and over replicas",
                  &parts.lanes.partial_shard}}) {
    if (tensor->is_defined()) add(what, MemoryClass::kGathered, counted(tensor->nbytes()));
  }
  return plan;
}

}  // namespace tessera::dist
