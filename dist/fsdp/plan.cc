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

UnitPlan plan_unit(const UnitSpec& spec, const Policy& policy, const ParameterTable& table) {
  UnitPlan unit;
  unit.name = spec.name;
  unit.is_block = spec.is_block;
  unit.is_tied = spec.is_tied;
  const PrecisionOptions& precision = policy.options.precision;
  const bool has_own_memory = policy.residence == Residence::kWhole ||
                              (policy.residence == Residence::kKeep && policy.gathers_in_place());
  for (GroupLayout& layout : make_layout(spec, precision, policy.num_layout_chunks(), table)) {
    GroupPlan g;
    g.shard_numel = layout.numel / policy.mesh.shard_size;
    const bool is_f32 = layout.dtype == kF32;
    g.grad_dtype = policy.keeps_whole_gradients() || is_f32 ? kF32 : policy.reduce_dtype;
    // A group that is kept in f32 beside low ones reduces in f32; where all are f32 the setting is
    // about them.
    const bool is_kept_f32 = is_f32 && precision.param_dtype != kF32;
    g.wire_dtype = is_kept_f32 ? kF32 : policy.wire_dtype;
    const int64_t nbytes = round_up(nbytes_of(layout.numel, layout.dtype), kSlotAlignment);
    unit.gathered_nbytes += nbytes;
    unit.sent_nbytes += layout.is_coded ? layout.shard_nbytes(layout.numel) : nbytes;
    g.has_own_memory = has_own_memory && !layout.is_coded;
    if (!g.has_own_memory) {
      g.slot_offset = unit.slot_nbytes;
      unit.slot_nbytes += nbytes;
    }
    if (layout.is_coded && (policy.mesh.shard_size > 1 || policy.offloads_parameters())) {
      g.code_offset = unit.slot_nbytes;
      unit.slot_nbytes += round_up(layout.shard_nbytes(layout.numel), kSlotAlignment);
    }
    if (layout.is_trainable) {
      g.grad_slot_offset = unit.gradient_nbytes;
      unit.gradient_nbytes += round_up(nbytes_of(layout.numel, g.grad_dtype), kSlotAlignment);
    }
    g.layout = std::move(layout);
    unit.groups.push_back(std::move(g));
  }
  unit.piece_nbytes = unit.gradient_nbytes;
  // What is kept as codes has values in a slot alone.
  unit.residence = policy.residence == Residence::kWhole && unit.is_coded() ? Residence::kReshard
                                                                            : policy.residence;
  return unit;
}

/// A matrix that is more than one piece.
bool is_table(const Placement& p, DType grad_dtype, int64_t most_nbytes) {
  return p.shape.num_dims() == 2 && nbytes_of(p.numel, grad_dtype) > most_nbytes;
}

/// Cuts a rank's part of each group in `num_pieces`; what a piece then takes in a slot.
int64_t cut(UnitPlan& unit, int64_t num_pieces, const Policy& policy) {
  int64_t piece_nbytes = 0;
  for (GroupPlan& g : unit.groups) {
    if (!g.layout.is_trainable) continue;
    const int64_t own = g.layout.numel / policy.world_size;
    g.piece_numel = round_up((own + num_pieces - 1) / num_pieces, kLayoutBlock);
    int64_t widest = 0;  // row of a table
    for (size_t i = 0; i < g.layout.placements.size(); ++i) {
      if (g.kept_begin[i] < 0) widest = std::max(widest, g.layout.placements[i].shape[1]);
    }
    const int64_t margin = nbytes_of(round_up(widest, kLayoutBlock), g.grad_dtype);
    g.piece_offset = piece_nbytes + margin;
    piece_nbytes += round_up(
        2 * margin + nbytes_of(policy.world_size * g.piece_numel, g.grad_dtype), kSlotAlignment);
  }
  return piece_nbytes;
}

/// Has a unit's gradients in pieces of at most `most_nbytes`, if that is possible and less.
void plan_pieces(UnitPlan& unit, int64_t most_nbytes, const Policy& policy) {
  const UnitPlan whole = unit;
  bool has_table = false;
  int64_t kept_nbytes = 0, largest_own = 0;
  for (GroupPlan& g : unit.groups) {
    if (!g.layout.is_trainable) continue;
    int64_t kept = 0;
    for (const Placement& p : g.layout.placements) {
      const bool by_rows = is_table(p, g.grad_dtype, most_nbytes);
      g.kept_begin.push_back(by_rows ? -1 : kept);
      if (!by_rows) kept += round_up(p.numel, kLayoutBlock);
      has_table = has_table || by_rows;
    }
    g.grad_slot_offset = kept_nbytes;
    kept_nbytes += round_up(nbytes_of(kept, g.grad_dtype), kSlotAlignment);
    largest_own = std::max(largest_own, g.layout.numel / policy.world_size);
  }
  const int64_t most_pieces = largest_own / kLayoutBlock;
  if (has_table && cut(unit, most_pieces, policy) <= most_nbytes) {
    int64_t num_pieces = (unit.gradient_nbytes + most_nbytes - 1) / most_nbytes;
    for (; num_pieces <= most_pieces; ++num_pieces) {
      unit.piece_nbytes = cut(unit, num_pieces, policy);
      if (unit.piece_nbytes > most_nbytes) continue;
      // Pieces are whole blocks of elements: fewer of them may be enough.
      unit.num_pieces = 0;
      for (const GroupPlan& g : unit.groups) {
        if (!g.layout.is_trainable) continue;
        const int64_t own = g.layout.numel / policy.world_size;
        unit.num_pieces =
            std::max(unit.num_pieces, static_cast<int>((own + g.piece_numel - 1) / g.piece_numel));
      }
      unit.gradient_nbytes = kept_nbytes;
      return;
    }
  }
  unit = whole;
}

void plan_pieces(Plan& plan, const Policy& policy) {
  if (!policy.options.gradient_pieces || policy.keeps_whole_gradients() ||
      policy.offloads_gradients()) {
    return;
  }
  int64_t most_nbytes = 0;
  for (const UnitPlan& u : plan.units) {
    if (u.is_block) most_nbytes = std::max(most_nbytes, u.gradient_nbytes);
  }
  if (most_nbytes == 0) return;
  for (UnitPlan& u : plan.units) {
    if (!u.is_block && u.gradient_nbytes > most_nbytes) plan_pieces(u, most_nbytes, policy);
  }
}

/// Gives the units of one class their slots.
void plan_pools(Plan& plan, const Policy& policy, bool is_block) {
  int64_t gathered = 0, gradient = 0;  // of the largest
  for (const UnitPlan& u : plan.units) {
    if (u.is_block != is_block) continue;
    gathered = std::max(gathered, u.slot_nbytes);
    if (u.num_pieces == 1) gradient = std::max(gradient, u.gradient_nbytes);
  }
  const auto make = [&plan](int64_t nbytes, int num_slots, bool is_gathered) {
    plan.pools.push_back({nbytes, num_slots, is_gathered});
    return static_cast<int>(plan.pools.size()) - 1;
  };
  int shared_gathered = -1, shared_gradient = -1;
  for (UnitPlan& u : plan.units) {
    if (u.is_block != is_block) continue;
    if (u.residence == Residence::kReshard) {
      if (u.is_tied || is_small(u.slot_nbytes, gathered)) {
        u.gathered_pool = make(u.slot_nbytes, 1, true);
      } else {
        if (shared_gathered < 0) {
          shared_gathered = make(gathered, is_block ? policy.prefetch_depth() + 1 : 1, true);
        }
        u.gathered_pool = shared_gathered;
      }
    } else if (u.slot_nbytes > 0) {
      u.gathered_pool = make(u.slot_nbytes, 1, true);
    }
    if (policy.keeps_whole_gradients() || u.gradient_nbytes == 0) continue;
    if (u.is_tied || u.num_pieces > 1 || is_small(u.gradient_nbytes, gradient)) {
      u.gradient_pool = make(u.gradient_nbytes, 1, false);
    } else {
      if (shared_gradient < 0)
        shared_gradient = make(gradient, is_block ? kGradientSlots : 1, false);
      u.gradient_pool = shared_gradient;
    }
  }
  if (!is_block) return;
  for (UnitPlan& u : plan.units) {
    if (u.num_pieces == 1) continue;
    if (shared_gradient < 0) shared_gradient = make(gradient, kGradientSlots, false);
    u.piece_pool = shared_gradient;
  }
}

ScratchPlan plan_scratch(const Plan& plan, const Policy& policy, const StagingNbytes& in_group,
                         const StagingNbytes& over_replicas) {
  const Mesh& mesh = policy.mesh;
  ScratchPlan scratch;
  for (const UnitPlan& u : plan.units) {
    for (const GroupPlan& g : u.groups) {
      if (!g.layout.is_trainable) continue;
      // What a rank of a shard group gets of a reduce.
      const int64_t shard = g.piece_numel > 0 ? g.piece_numel * mesh.replicate_size : g.shard_numel;
      if (g.wire_dtype != g.grad_dtype && (policy.world_size > 1 || policy.is_reproducible())) {
        scratch.wire_nbytes =
            std::max(scratch.wire_nbytes, nbytes_of(shard * mesh.shard_size, g.wire_dtype));
      }
      if (mesh.shard_size > 1) {
        scratch.staging_nbytes = std::max(scratch.staging_nbytes, in_group(shard, g.wire_dtype));
      }
      if (mesh.replicate_size == 1) continue;
      const DType outer = mesh.shard_size > 1 ? kF32 : g.wire_dtype;
      // Once a step all of the shard, with GradSync::kShard.
      const int64_t outer_shard = policy.sync == GradSync::kShard ? g.shard_numel : shard;
      scratch.replicate_staging_nbytes =
          std::max(scratch.replicate_staging_nbytes,
                   over_replicas(outer_shard / mesh.replicate_size, outer));
      if (mesh.shard_size > 1) scratch.partial_numel = std::max(scratch.partial_numel, shard);
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

bool UnitPlan::is_coded() const {
  return std::any_of(groups.begin(), groups.end(),
                     [](const GroupPlan& g) { return g.layout.is_coded; });
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
    uses.push_back({u.residence, u.gathered_pool, u.is_trainable(), policy.part_size > 1,
                    u.slot_nbytes > 0 ? u.slot_nbytes : u.gathered_nbytes, u.piece_nbytes,
                    u.num_pieces, u.sent_nbytes});
  }
  return uses;
}

std::vector<int> Plan::num_gathered_slots() const {
  std::vector<int> slots;
  for (const PoolPlan& pool : pools) slots.push_back(pool.is_gathered ? pool.num_slots : 0);
  return slots;
}

Plan make_plan(const std::vector<UnitSpec>& specs, const Policy& policy,
               const StagingNbytes& in_group, const StagingNbytes& over_replicas,
               const ParameterTable& table) {
  Plan plan;
  for (const UnitSpec& spec : specs) plan.units.push_back(plan_unit(spec, policy, table));
  plan_pieces(plan, policy);
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
