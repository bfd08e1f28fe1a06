#include "dist/fsdp/plan.h"

#include <algorithm>

#include "dist/fsdp/flat_bytes.h"

namespace tessera::dist {
namespace {

constexpr int kGradientSlots = 2;        // one is written while the other is reduced
constexpr int64_t kSmallUnit = 8;        // below 1/8 of the largest of its class: a slot of its own
constexpr int64_t kSlotAlignment = 512;  // of groups inside a slot, bytes

bool is_small(int64_t nbytes, int64_t largest) {
  return nbytes * kSmallUnit < largest;
}

UnitPlan plan_unit(const UnitSpec& spec, const Policy& policy) {
  UnitPlan unit;
  unit.name = spec.name;
  unit.is_block = spec.is_block;
  unit.is_tied = spec.is_tied;
  const PrecisionOptions& precision = policy.options.precision;
  for (GroupLayout& layout : make_layout(spec, precision, policy.num_layout_chunks())) {
    GroupPlan g;
    g.shard_numel = layout.numel / policy.mesh.shard_size;
    const bool is_f32 = layout.dtype == kF32;
    g.grad_dtype = policy.keeps_whole_gradients() || is_f32 ? kF32 : policy.reduce_dtype;
    // A group that is kept in f32 beside low ones reduces in f32; where all are f32 the setting is
    // about them.
    const bool is_kept_f32 = is_f32 && precision.param_dtype != kF32;
    g.wire_dtype = is_kept_f32 ? kF32 : policy.wire_dtype;
    g.slot_offset = unit.gathered_nbytes;
    unit.gathered_nbytes += round_up(nbytes_of(layout.numel, layout.dtype), kSlotAlignment);
    if (layout.is_trainable) {
      g.grad_slot_offset = unit.gradient_nbytes;
      unit.gradient_nbytes += round_up(nbytes_of(layout.numel, g.grad_dtype), kSlotAlignment);
    }
    g.layout = std::move(layout);
    unit.groups.push_back(std::move(g));
  }
  unit.has_own_memory = policy.residence == Residence::kWhole ||
                        (policy.residence == Residence::kKeep && policy.gathers_in_place());
  return unit;
}

/// Gives the units of one class their slots.
void plan_pools(Plan& plan, const Policy& policy, bool is_block) {
  int64_t gathered = 0, gradient = 0;  // of the largest
  for (const UnitPlan& u : plan.units) {
    if (u.is_block != is_block) continue;
    gathered = std::max(gathered, u.gathered_nbytes);
    gradient = std::max(gradient, u.gradient_nbytes);
  }
  const auto make = [&plan](int64_t nbytes, int num_slots, bool is_gathered) {
    plan.pools.push_back({nbytes, num_slots, is_gathered});
    return static_cast<int>(plan.pools.size()) - 1;
  };
  int shared_gathered = -1, shared_gradient = -1;
  for (UnitPlan& u : plan.units) {
    if (u.is_block != is_block) continue;
    if (policy.residence == Residence::kReshard) {
      if (u.is_tied || is_small(u.gathered_nbytes, gathered)) {
        u.gathered_pool = make(u.gathered_nbytes, 1, true);
      } else {
        if (shared_gathered < 0) {
          shared_gathered = make(gathered, is_block ? policy.prefetch_depth() + 1 : 1, true);
        }
        u.gathered_pool = shared_gathered;
      }
    } else if (!u.has_own_memory) {
      u.gathered_pool = make(u.gathered_nbytes, 1, true);
    }
    if (policy.keeps_whole_gradients() || u.gradient_nbytes == 0) continue;
    if (u.is_tied || is_small(u.gradient_nbytes, gradient)) {
      u.gradient_pool = make(u.gradient_nbytes, 1, false);
    } else {
      if (shared_gradient < 0)
        shared_gradient = make(gradient, is_block ? kGradientSlots : 1, false);
      u.gradient_pool = shared_gradient;
    }
  }
}

ScratchPlan plan_scratch(const Plan& plan, const Policy& policy, const StagingNbytes& in_group,
                         const StagingNbytes& over_replicas) {
  const Mesh& mesh = policy.mesh;
  ScratchPlan scratch;
  for (const UnitPlan& u : plan.units) {
    for (const GroupPlan& g : u.groups) {
      if (!g.layout.is_trainable) continue;
      if (g.wire_dtype != g.grad_dtype && (policy.world_size > 1 || policy.is_reproducible())) {
        scratch.wire_nbytes =
            std::max(scratch.wire_nbytes, nbytes_of(g.layout.numel, g.wire_dtype));
      }
      if (mesh.shard_size > 1) {
        scratch.staging_nbytes =
            std::max(scratch.staging_nbytes, in_group(g.shard_numel, g.wire_dtype));
      }
      if (mesh.replicate_size == 1) continue;
      const DType outer = mesh.shard_size > 1 ? kF32 : g.wire_dtype;
      scratch.replicate_staging_nbytes =
          std::max(scratch.replicate_staging_nbytes,
                   over_replicas(g.shard_numel / mesh.replicate_size, outer));
      if (mesh.shard_size > 1)
        scratch.partial_numel = std::max(scratch.partial_numel, g.shard_numel);
    }
  }
  // With kShard only a backward after the last micro-batch needs it.
  scratch.has_partial = scratch.partial_numel > 0 && policy.sync != GradSync::kShard;
  return scratch;
}

}  // namespace

bool UnitPlan::is_trainable() const {
  return std::any_of(groups.begin(), groups.end(),
                     [](const GroupPlan& g) { return g.layout.is_trainable; });
}

int64_t UnitPlan::num_parameters() const {
  int64_t count = 0;
  for (const GroupPlan& g : groups) {
    for (const Placement& p : g.layout.placements) count += p.numel;
  }
  return count;
}

std::vector<UnitUse> Plan::uses(const Policy& policy) const {
  std::vector<UnitUse> uses;
  for (const UnitPlan& u : units) {
    uses.push_back({policy.residence, u.gathered_pool, u.is_trainable(), policy.part_size > 1,
                    u.gathered_nbytes, u.gradient_nbytes});
  }
  return uses;
}

std::vector<int> Plan::num_gathered_slots() const {
  std::vector<int> slots;
  for (const PoolPlan& pool : pools) slots.push_back(pool.is_gathered ? pool.num_slots : 0);
  return slots;
}

Plan make_plan(const std::vector<UnitSpec>& specs, const Policy& policy,
               const StagingNbytes& in_group, const StagingNbytes& over_replicas) {
  Plan plan;
  for (const UnitSpec& spec : specs) plan.units.push_back(plan_unit(spec, policy));
  for (const bool is_block : {false, true}) plan_pools(plan, policy, is_block);
  plan.scratch = plan_scratch(plan, policy, in_group, over_replicas);
  if (policy.offloads_gradients()) {
    for (const UnitPlan& u : plan.units) {
      for (const GroupPlan& g : u.groups) {
        if (g.layout.is_trainable) {
          plan.host_gradient_numel = std::max(plan.host_gradient_numel, g.shard_numel);
        }
      }
    }
  }
  return plan;
}

}  // namespace tessera::dist
