// What a model costs in memory, and what would cost less.
#include "dist/fsdp/memory.h"

#include <algorithm>
#include <array>
#include <set>

#include "dist/fsdp/flat_bytes.h"
#include "dist/fsdp/parts.h"

namespace tessera::dist {
namespace {

constexpr int64_t kGranule = 512;       // of the allocator
constexpr size_t kMostUnits = 5;        // that an advice lists
constexpr double kAdamWStateBytes = 8;  // an element, if no optimizer is there yet

int64_t counted(int64_t nbytes) {
  return (nbytes + kGranule - 1) / kGranule * kGranule;
}

/// States of a model on a rank under some strategy, by the layout of its units.
struct Estimate {
  int64_t shards = 0, gathered = 0;
  double states = 0;  // of the optimizer
  int64_t total() const { return shards + gathered + static_cast<int64_t>(states); }
};

/// What a rank keeps of a unit's shards in device memory, by what it is for.
struct UnitBytes {
  int64_t shards = 0, masters = 0, gradients = 0, whole_gradients = 0;
};

UnitBytes bytes_of(const UnitPlan& unit, const Policy& policy) {
  UnitBytes bytes;
  for (const GroupPlan& g : unit.groups) {
    const DType dtype = g.layout.dtype;
    // Parameters that stay are one piece, of which the shard is a part.
    if (!policy.offloads_parameters()) {
      bytes.shards +=
          counted(dist::nbytes_of(unit.has_own_memory ? g.layout.numel : g.shard_numel, dtype));
    }
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
  for (const std::string& name : parts.policy.options.ignored)
    add(parts.root.parameter(name).tensor);
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
  int64_t shards = 0, masters = 0, gradients = 0, whole = 0, unreduced = 0, leaves = 0;
  int64_t kept_parts = 0;
  for (const auto& unit : parts.units) {
    const UnitBytes own = bytes_of(unit->plan(), policy);
    shards += own.shards, masters += own.masters;
    gradients += own.gradients, whole += own.whole_gradients;
    int64_t gathered = 0;
    for (const Group& g : unit->groups()) {
      gathered += dist::nbytes_of(g.layout.numel, g.layout.dtype);
      if (policy.part_size > 1) {
        kept_parts += counted(dist::nbytes_of(g.layout.numel / policy.part_size, g.layout.dtype));
      }
      if (g.unreduced.is_defined()) unreduced += counted(g.unreduced.nbytes());
      leaves += g.leaves.num_buffers() * counted(dist::nbytes_of(unit->own_numel(g), kF32));
    }
    plan.units.push_back(
        {unit->name(), own.shards + own.masters, own.gradients + own.whole_gradients, gathered});
  }
  add(policy.mesh.shard_size == 1                        ? "parameters"
      : policy.options.strategy == Strategy::kShardOptim ? "parameters, whole"
                                                         : "parameter shards",
      MemoryClass::kParameters, shards);
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

std::string memory_advice(const FsdpParts& parts, const OutOfMemory& oom) {
  const Policy& policy = parts.policy;
  const FsdpOptions& options = policy.options;
  const std::vector<UnitPlan>& units = parts.plan.units;
  std::array<int64_t, kNumMemoryClasses> now = oom.stats.allocated_by_class;
  now[static_cast<size_t>(oom.memory_class)] += oom.nbytes;
  const auto of = [&now](MemoryClass c) { return now[static_cast<size_t>(c)]; };
  int64_t trainable = 0, trainable_shard = 0;
  for (const UnitPlan& unit : units) {
    for (const GroupPlan& g : unit.groups) {
      if (!g.layout.is_trainable) continue;
      trainable += g.layout.numel;
      trainable_shard += g.shard_numel;
    }
  }
  const bool has_states =
      oom.stats.allocated_by_class[static_cast<size_t>(MemoryClass::kOptimizer)] > 0;
  const double state_bytes =
      has_states && oom.memory_class != MemoryClass::kOptimizer && trainable_shard > 0
          ? static_cast<double>(of(MemoryClass::kOptimizer)) / static_cast<double>(trainable_shard)
          : kAdamWStateBytes;
  const int world_size = policy.world_size, depth = policy.prefetch_depth();
  // Under `strategy` in shard groups of `shard_size` ranks, with a ring of `depth` + 1 slots.
  const auto estimate = [&](Strategy strategy, int shard_size, bool keeps_full_grad, int ring_depth,
                            Offload offload, bool is_bf16) {
    Estimate e;
    const bool reshards = strategy == Strategy::kFullShard || strategy == Strategy::kHybridShard;
    const bool is_whole = strategy == Strategy::kShardOptim || shard_size == 1;
    int64_t largest[2] = {}, largest_grad[2] = {}, largest_shard = 0;
    for (const UnitPlan& unit : units) {
      int64_t gathered = 0, gradient = 0;
      for (const GroupPlan& g : unit.groups) {
        const int64_t item = is_bf16 ? 2 : static_cast<int64_t>(size_of(g.layout.dtype));
        const int64_t shard = g.layout.numel / shard_size;
        gathered += g.layout.numel * item;
        if (offload != Offload::kParamsAndOptimizer) {
          e.shards += (is_whole ? g.layout.numel : shard) * item;
        }
        if (!g.layout.is_trainable) continue;
        largest_shard = std::max(largest_shard, shard);
        if (item < 4 && offload == Offload::kNone) e.shards += 4 * shard;
        if (offload != Offload::kParamsAndOptimizer) e.shards += 4 * shard;
        if (keeps_full_grad) e.shards += 4 * g.layout.numel;
        gradient += g.layout.numel * (is_bf16 ? 2 : static_cast<int64_t>(size_of(g.grad_dtype)));
        if (offload == Offload::kNone) e.states += state_bytes * static_cast<double>(shard);
      }
      const int is_block = unit.is_block ? 1 : 0;
      largest[is_block] = std::max(largest[is_block], gathered);
      largest_grad[is_block] = std::max(largest_grad[is_block], gradient);
      if (shard_size > 1 && !reshards && !is_whole) e.gathered += gathered;
    }
    if ((reshards && shard_size > 1) || offload == Offload::kParamsAndOptimizer) {
      e.gathered += largest[0] + (ring_depth + 1) * largest[1];
    }
    if (offload != Offload::kNone) {  // windows of states, and of masters and gradients
      const double parts = state_bytes + (offload == Offload::kParamsAndOptimizer ? 12 : 4);
      e.states += kOffloadWindows * parts *
                  static_cast<double>(std::min(options.offload_window, largest_shard));
    }
    if (!keeps_full_grad && world_size > 1) e.gathered += largest_grad[0] + 2 * largest_grad[1];
    return e;
  };
  const bool keeps_full_grad = policy.keeps_whole_gradients();
  const Offload offload = options.offload;
  const Estimate mine =
      estimate(options.strategy, policy.mesh.shard_size, keeps_full_grad, depth, offload, false);
  const int64_t activations = of(MemoryClass::kActivations);
  const int64_t states =
      std::max(mine.total(), of(MemoryClass::kParameters) + of(MemoryClass::kGradients) +
                                 of(MemoryClass::kOptimizer) + of(MemoryClass::kGathered));

  std::string text;
  const auto propose = [&text](std::string_view setting, int64_t less) {
    if (less > 0) text += fmt::format("    {:<48} about {} less\n", setting, format_nbytes(less));
  };
  const auto propose_states = [&] {
    text += fmt::format(
        "  {} for parameters, gradients, optimizer states and gathered units; less "
        "with\n",
        format_nbytes(states));
    if (world_size > 1 &&
        (policy.mesh.shard_size < world_size || !policy.reshards_after_forward())) {
      propose("fsdp.strategy=full_shard",
              mine.total() -
                  estimate(Strategy::kFullShard, world_size, false, depth, offload, false).total());
    } else {
      propose(
          fmt::format("{} ranks instead of {}{}", 2 * world_size, world_size,
                      options.strategy == Strategy::kFullShard ? "" : ", fsdp.strategy=full_shard"),
          mine.total() - estimate(Strategy::kFullShard, 2 * policy.mesh.shard_size, false, depth,
                                  offload, false)
                             .total());
    }
    if (keeps_full_grad && options.strategy != Strategy::kShardOptim) {
      propose("fsdp.sync_every_micro_batch=true", 4 * trainable);
    }
    for (const Offload more : {Offload::kOptimizer, Offload::kParamsAndOptimizer}) {
      if (more <= offload) continue;
      propose(fmt::format("fsdp.offload={}", name_of(more)),
              mine.total() - estimate(options.strategy, policy.mesh.shard_size, keeps_full_grad,
                                      depth, more, false)
                                 .total());
    }
    if (depth > 0) {
      propose("fsdp.prefetch_forward=0, fsdp.prefetch_backward=0",
              mine.total() - estimate(options.strategy, policy.mesh.shard_size, keeps_full_grad, 0,
                                      offload, false)
                                 .total());
    }
    if (options.precision.param_dtype == kF32) {
      propose("precision.param_dtype=bf16",
              mine.total() - estimate(options.strategy, policy.mesh.shard_size, keeps_full_grad,
                                      depth, offload, true)
                                 .total());
    }
    std::vector<const UnitPlan*> largest;
    for (const UnitPlan& unit : units) largest.push_back(&unit);
    std::stable_sort(largest.begin(), largest.end(), [](const UnitPlan* a, const UnitPlan* b) {
      return a->num_parameters() > b->num_parameters();
    });
    if (units.size() == 1 || largest[0]->gathered_nbytes * 2 > mine.gathered) {
      text += fmt::format("    {:<48} slots are as large as the largest unit, {}\n",
                          "fsdp.wrap: smaller units", format_nbytes(largest[0]->gathered_nbytes));
    }
    text += fmt::format("  {:<24} {:>12} {:>12} {:>12}\n", "unit", "parameters", "gradients",
                        "gathered");
    for (size_t i = 0; i < std::min(kMostUnits, largest.size()); ++i) {
      int64_t parameters = 0, gradients = 0;
      for (const GroupPlan& g : largest[i]->groups) {
        const int64_t numel =
            options.strategy == Strategy::kShardOptim ? g.layout.numel : g.shard_numel;
        parameters += dist::nbytes_of(numel, g.layout.dtype);
        if (!g.layout.is_trainable) continue;
        if (g.layout.dtype != kF32) parameters += dist::nbytes_of(g.shard_numel, kF32);
        gradients += dist::nbytes_of(g.shard_numel, kF32);
        if (keeps_full_grad) gradients += dist::nbytes_of(g.layout.numel, g.grad_dtype);
      }
      text += fmt::format("  {:<24} {:>12} {:>12} {:>12}\n", largest[i]->name,
                          format_nbytes(parameters), format_nbytes(gradients),
                          format_nbytes(largest[i]->gathered_nbytes));
    }
    if (largest.size() > kMostUnits) {
      text += fmt::format("  and {} more\n", largest.size() - kMostUnits);
    }
  };
  const auto propose_activations = [&] {
    text += fmt::format("  {} for activations; less with\n", format_nbytes(activations));
    propose("train.micro_batch, half of it", activations / 2);
    text += "    recompute.policy=full, or selective              what blocks keep for backward\n";
    propose("model.context, half of it", activations / 2);
    if (options.precision.param_dtype == kF32) {
      propose("precision.param_dtype=bf16", activations / 2);
    }
  };
  // Both where both matter, what takes more first.
  if (activations > states) {
    propose_activations();
    if (states > activations / 3) propose_states();
  } else {
    propose_states();
    if (activations > states / 3) propose_activations();
  }
  return text;
}

}  // namespace tessera::dist
