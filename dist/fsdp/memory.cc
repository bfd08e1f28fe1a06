// What a model costs in memory, and what would cost less.
#include "dist/fsdp/memory.h"

#include <algorithm>
#include <array>
#include <set>

#include "dist/fsdp/flat_bytes.h"
#include "dist/fsdp/schedule.h"

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

MemoryPlan Scheduler::memory_plan() const {
  MemoryPlan plan;
  const auto add = [&plan](std::string what, MemoryClass c, int64_t nbytes) {
    if (nbytes > 0) plan.entries.push_back({std::move(what), c, nbytes});
  };
  int64_t shards = 0, masters = 0, gradients = 0, whole = 0, unreduced = 0, leaves = 0, parts = 0;
  int64_t ring = 0;
  const bool on_host = lanes_.offloads_parameters();
  for (const auto& unit : units_) {
    MemoryPlan::UnitBytes bytes{unit->name(), 0, 0, 0};
    int64_t own_shards = 0, own_masters = 0, own_gradients = 0, own_whole = 0;
    for (const Group& g : unit->groups()) {
      const DType dtype = g.layout.dtype;
      // Parameters that stay are one piece, of which the shard is a part.
      if (!on_host) {
        own_shards += counted(
            dist::nbytes_of(unit->has_own_memory() ? g.layout.numel : g.shard_numel, dtype));
      }
      bytes.gathered += dist::nbytes_of(g.layout.numel, dtype);
      if (lanes_.part_comm != nullptr) {
        parts += counted(dist::nbytes_of(g.layout.numel / lanes_.part_size, dtype));
      }
      if (!g.layout.is_trainable) continue;
      if (dtype != kF32 && lanes_.offloader == nullptr) {
        own_masters += counted(dist::nbytes_of(g.shard_numel, kF32));
      }
      if (g.host_grad == nullptr) own_gradients += counted(dist::nbytes_of(g.shard_numel, kF32));
      ring = std::max(ring,
                      g.host_grad != nullptr ? counted(dist::nbytes_of(g.shard_numel, kF32)) : 0);
      if (lanes_.sync == GradSync::kLast) {
        own_whole += counted(dist::nbytes_of(g.layout.numel, g.grad_dtype));
      }
      if (g.unreduced.is_defined()) unreduced += counted(g.unreduced.nbytes());
      leaves += g.leaves.num_buffers() * counted(dist::nbytes_of(unit->own_numel(g), kF32));
    }
    bytes.parameters = own_shards + own_masters;
    bytes.gradients = own_gradients + own_whole;
    shards += own_shards, masters += own_masters;
    gradients += own_gradients, whole += own_whole;
    plan.units.push_back(std::move(bytes));
  }
  add(lanes_.shard_size == 1                       ? "parameters"
      : options_.strategy == Strategy::kShardOptim ? "parameters, whole"
                                                   : "parameter shards",
      MemoryClass::kParameters, shards);
  add("f32 masters", MemoryClass::kParameters, masters);
  add("buffers and ignored parameters", MemoryClass::kParameters, nbytes_outside_units());
  add("f32 gradient shards", MemoryClass::kGradients, gradients);
  add("whole f32 gradients (sync_every_micro_batch = false)", MemoryClass::kGradients, whole);
  add("gradients that no_sync keeps", MemoryClass::kGradients, unreduced);
  add("sums of micro-batches (reproducible)", MemoryClass::kGradients, leaves);
  add("ring of gradient shards whose place is on the host", MemoryClass::kGradients,
      kHostGradientSlots * ring);
  for (const auto& pool : pools_) {
    const int num_slots = step_ > 0 ? pool->num_materialized() : pool->num_slots();
    add(fmt::format("{} x {}", num_slots, format_nbytes(pool->nbytes())), MemoryClass::kGathered,
        num_slots * counted(pool->nbytes()));
  }
  add("parts of the parameters that stay after forward", MemoryClass::kGathered, parts);
  for (const auto& [what, tensor] :
       {std::pair{"staging of reduces", &lanes_.reduce_staging},
        std::pair{"staging of reduces over replicas", &lanes_.replicate_staging},
        std::pair{"gradients in wire_dtype", &lanes_.wire_buffer},
        std::pair{"a shard between the sums in the group and over replicas",
                  &lanes_.partial_shard}}) {
    if (tensor->is_defined()) add(what, MemoryClass::kGathered, counted(tensor->nbytes()));
  }
  return plan;
}

/// Of the allocator's class kParameters.
int64_t Scheduler::nbytes_outside_units() const {
  std::set<const Storage*> seen;
  int64_t sum = 0;
  const auto add = [&](const Tensor& tensor) {
    if (!seen.insert(tensor.storage().get()).second || !tensor.storage()->is_materialized()) return;
    sum += counted(static_cast<int64_t>(tensor.storage()->nbytes()));
  };
  for (const nn::NamedBuffer& b : root_->named_buffers()) add(b.buffer->tensor);
  for (const std::string& name : options_.ignored) add(root_->parameter(name).tensor);
  return sum;
}

/// For the end of an out-of-memory error. Only of what does not change after set-up: the thread
/// that ran out may be any.
std::string Scheduler::advice(const OutOfMemory& oom) const {
  std::array<int64_t, kNumMemoryClasses> now = oom.stats.allocated_by_class;
  now[static_cast<size_t>(oom.memory_class)] += oom.nbytes;
  const auto of = [&now](MemoryClass c) { return now[static_cast<size_t>(c)]; };
  int64_t trainable = 0, trainable_shard = 0;
  for (const auto& unit : units_) {
    for (const Group& g : unit->groups()) {
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
  const int world_size = world_.world_size(),
            depth = std::max(options_.prefetch_forward, options_.prefetch_backward);
  // Under `strategy` in shard groups of `shard_size` ranks, with a ring of `depth` + 1 slots.
  const auto estimate = [&](Strategy strategy, int shard_size, bool keeps_full_grad, int ring_depth,
                            Offload offload, bool is_bf16) {
    Estimate e;
    const bool reshards = strategy == Strategy::kFullShard || strategy == Strategy::kHybridShard;
    const bool is_whole = strategy == Strategy::kShardOptim || shard_size == 1;
    int64_t largest[2] = {}, largest_grad[2] = {}, largest_shard = 0;
    for (const auto& unit : units_) {
      int64_t gathered = 0, gradient = 0;
      for (const Group& g : unit->groups()) {
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
      const int is_block = unit->spec().is_block ? 1 : 0;
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
                  static_cast<double>(std::min(options_.offload_window, largest_shard));
    }
    if (!keeps_full_grad && world_size > 1) e.gathered += largest_grad[0] + 2 * largest_grad[1];
    return e;
  };
  const bool keeps_full_grad = lanes_.sync == GradSync::kLast;
  const Offload offload = options_.offload;
  const Estimate mine =
      estimate(options_.strategy, lanes_.shard_size, keeps_full_grad, depth, offload, false);
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
    if (world_size > 1 && (lanes_.shard_size < world_size || !reshards_after_forward())) {
      propose("fsdp.strategy=full_shard",
              mine.total() -
                  estimate(Strategy::kFullShard, world_size, false, depth, offload, false).total());
    } else {
      propose(fmt::format(
                  "{} ranks instead of {}{}", 2 * world_size, world_size,
                  options_.strategy == Strategy::kFullShard ? "" : ", fsdp.strategy=full_shard"),
              mine.total() - estimate(Strategy::kFullShard, 2 * lanes_.shard_size, false, depth,
                                      offload, false)
                                 .total());
    }
    if (keeps_full_grad && options_.strategy != Strategy::kShardOptim) {
      propose("fsdp.sync_every_micro_batch=true", 4 * trainable);
    }
    for (const Offload more : {Offload::kOptimizer, Offload::kParamsAndOptimizer}) {
      if (more <= offload) continue;
      propose(fmt::format("fsdp.offload={}", name_of(more)),
              mine.total() - estimate(options_.strategy, lanes_.shard_size, keeps_full_grad, depth,
                                      more, false)
                                 .total());
    }
    if (depth > 0) {
      propose("fsdp.prefetch_forward=0, fsdp.prefetch_backward=0",
              mine.total() -
                  estimate(options_.strategy, lanes_.shard_size, keeps_full_grad, 0, offload, false)
                      .total());
    }
    if (options_.precision.param_dtype == kF32) {
      propose("precision.param_dtype=bf16",
              mine.total() - estimate(options_.strategy, lanes_.shard_size, keeps_full_grad, depth,
                                      offload, true)
                                 .total());
    }
    std::vector<Unit*> largest;
    for (const auto& unit : units_) largest.push_back(unit.get());
    std::stable_sort(largest.begin(), largest.end(), [](const Unit* a, const Unit* b) {
      return a->num_parameters() > b->num_parameters();
    });
    if (units_.size() == 1 || largest[0]->gathered_nbytes() * 2 > mine.gathered) {
      text += fmt::format("    {:<48} slots are as large as the largest unit, {}\n",
                          "fsdp.wrap: smaller units", format_nbytes(largest[0]->gathered_nbytes()));
    }
    text += fmt::format("  {:<24} {:>12} {:>12} {:>12}\n", "unit", "parameters", "gradients",
                        "gathered");
    for (size_t i = 0; i < std::min(kMostUnits, largest.size()); ++i) {
      int64_t parameters = 0, gradients = 0;
      for (const Group& g : largest[i]->groups()) {
        const int64_t numel =
            options_.strategy == Strategy::kShardOptim ? g.layout.numel : g.shard_numel;
        parameters += dist::nbytes_of(numel, g.layout.dtype);
        if (!g.layout.is_trainable) continue;
        if (g.layout.dtype != kF32) parameters += dist::nbytes_of(g.shard_numel, kF32);
        gradients += dist::nbytes_of(g.shard_numel, kF32);
        if (keeps_full_grad) gradients += dist::nbytes_of(g.layout.numel, g.grad_dtype);
      }
      text += fmt::format("  {:<24} {:>12} {:>12} {:>12}\n", largest[i]->name(),
                          format_nbytes(parameters), format_nbytes(gradients),
                          format_nbytes(largest[i]->gathered_nbytes()));
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
    if (options_.precision.param_dtype == kF32) {
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
