// What would cost less memory, for the end of an out-of-memory error.
#include <algorithm>
#include <array>

#include "dist/fsdp/flat_bytes.h"
#include "dist/fsdp/parts.h"

namespace tessera::dist {
namespace {

constexpr size_t kMostUnits = 5;        // that an advice lists
constexpr double kAdamWStateBytes = 8;  // an element, if no optimizer is there yet

/// What an estimate tells apart. `depth`: of prefetch.
struct Choice {
  Strategy strategy;
  int shard_size;
  bool keeps_whole_gradients;
  int depth;
  Offload offload;
  bool gradient_pieces;
  bool is_bf16 = false;
};

class Advice {
 public:
  Advice(const FsdpParts& parts, const OutOfMemory& oom);
  std::string to_string();

 private:
  int64_t estimate(const Choice& choice) const;
  int64_t gradient_slots(const Choice& choice) const;
  void propose(const std::string& setting, int64_t less);
  /// A choice, by what it costs less than the one there is.
  void propose(const std::string& setting, const Choice& choice);
  void propose_states();
  void propose_activations();
  void list_units();
  int64_t now(MemoryClass c) const { return now_[static_cast<size_t>(c)]; }
  /// "FsdpOptions::offload=optimizer", in the application's words if it has any.
  std::string option(std::string_view name, std::string_view value) const {
    return fmt::format("{}={}", words(name), value);
  }
  std::string words(std::string_view name) const {
    return options_.name_option ? options_.name_option(name) : std::string(name);
  }

  const Policy& policy_;
  const FsdpOptions& options_;
  const std::vector<UnitPlan>& units_;
  const std::vector<PoolPlan>& pools_;
  std::array<int64_t, kNumMemoryClasses> now_;  // with what could not be had
  double state_bytes_ = kAdamWStateBytes;       // of the optimizer, an element
  const Choice mine_;
  std::string text_;
};

Advice::Advice(const FsdpParts& parts, const OutOfMemory& oom)
    : policy_(parts.policy),
      options_(policy_.options),
      units_(parts.plan.units),
      pools_(parts.plan.pools),
      now_(oom.stats.allocated_by_class),
      mine_{options_.strategy,        policy_.mesh.shard_size, policy_.keeps_whole_gradients(),
            policy_.prefetch_depth(), options_.offload,        options_.gradient_pieces} {
  now_[static_cast<size_t>(oom.memory_class)] += oom.nbytes;
  int64_t trainable_shard = 0;
  for (const UnitPlan& unit : units_) {
    for (const GroupPlan& g : unit.groups) {
      if (g.layout.is_trainable) trainable_shard += g.shard_numel;
    }
  }
  // Once all of them are there.
  const int64_t states = oom.stats.allocated_by_class[static_cast<size_t>(MemoryClass::kOptimizer)];
  if (states > 0 && oom.memory_class != MemoryClass::kOptimizer && trainable_shard > 0) {
    state_bytes_ = static_cast<double>(states) / static_cast<double>(trainable_shard);
  }
}

/// Bytes of parameters, gradients, states and gathered units on a rank.
int64_t Advice::estimate(const Choice& choice) const {
  const bool reshards =
      choice.strategy == Strategy::kFullShard || choice.strategy == Strategy::kHybridShard;
  const bool is_whole = choice.strategy == Strategy::kShardOptim || choice.shard_size == 1;
  const bool keeps_on_device = choice.offload != Offload::kParamsAndOptimizer;
  const bool is_alone = choice.shard_size == 1 && keeps_on_device;
  int64_t shards = 0, slots = 0, largest_shard = 0;
  double states = 0;
  int64_t largest[2] = {};
  for (const UnitPlan& unit : units_) {
    int64_t in_slot = 0;  // of groups that have no memory of their own
    for (const GroupPlan& g : unit.groups) {
      const int64_t numel = g.layout.numel, shard = numel / choice.shard_size;
      const int64_t item = choice.is_bf16 ? 2 : static_cast<int64_t>(size_of(g.layout.dtype));
      if (g.layout.is_coded) {
        in_slot += numel * item + (is_alone ? 0 : g.layout.shard_nbytes(numel));
        shards += nbytes_of(num_scales(g.layout), kF32);
        if (keeps_on_device) shards += g.layout.shard_nbytes(shard);
        continue;
      }
      if (!is_whole || !keeps_on_device) in_slot += numel * item;
      if (keeps_on_device) shards += (is_whole ? numel : shard) * item;
      if (!g.layout.is_trainable) continue;
      largest_shard = std::max(largest_shard, shard);
      if (item < 4 && choice.offload == Offload::kNone) shards += 4 * shard;  // masters
      if (keeps_on_device) shards += 4 * shard;                               // gradients
      if (choice.keeps_whole_gradients) shards += 4 * numel;
      if (choice.offload == Offload::kNone) states += state_bytes_ * static_cast<double>(shard);
    }
    if (reshards || is_alone) {
      const int is_block = unit.is_block ? 1 : 0;
      largest[is_block] = std::max(largest[is_block], in_slot);
    } else {
      slots += in_slot;
    }
  }
  slots += largest[0] + (choice.depth + 1) * largest[1];
  if (!keeps_on_device) slots += kHostGradientSlots * 4 * largest_shard;
  if (choice.offload != Offload::kNone) {  // windows of states, and of masters and gradients
    states += kOffloadWindows * (state_bytes_ + (keeps_on_device ? 4 : 12)) *
              static_cast<double>(std::min(options_.offload_window, largest_shard));
  }
  if (!choice.keeps_whole_gradients && policy_.world_size > 1) {
    slots += gradient_slots(choice);
  }
  return shards + slots + static_cast<int64_t>(states);
}

/// Two of the largest block, and one of the largest of the others that has not its tables in pieces.
int64_t Advice::gradient_slots(const Choice& choice) const {
  struct Gradients {
    int64_t nbytes, largest_table;
  };
  const auto of_unit = [&choice](const UnitPlan& unit) {
    Gradients gradients{0, 0};
    for (const GroupPlan& g : unit.groups) {
      if (!g.layout.is_trainable) continue;
      const int64_t item = choice.is_bf16 ? 2 : static_cast<int64_t>(size_of(g.grad_dtype));
      gradients.nbytes += g.layout.numel * item;
      for (const Placement& p : g.layout.placements) {
        if (p.shape.num_dims() == 2) {
          gradients.largest_table = std::max(gradients.largest_table, p.numel * item);
        }
      }
    }
    return gradients;
  };
  int64_t block = 0, other = 0;
  for (const UnitPlan& unit : units_) {
    if (unit.is_block) block = std::max(block, of_unit(unit).nbytes);
  }
  for (const UnitPlan& unit : units_) {
    const Gradients gradients = of_unit(unit);
    const bool is_in_pieces = choice.gradient_pieces &&
                              choice.offload != Offload::kParamsAndOptimizer && block > 0 &&
                              gradients.largest_table > block;
    if (!unit.is_block && !is_in_pieces) other = std::max(other, gradients.nbytes);
  }
  return other + 2 * block;
}

void Advice::propose(const std::string& setting, int64_t less) {
  if (less > 0) text_ += fmt::format("    {:<48} about {} less\n", setting, format_nbytes(less));
}

void Advice::propose(const std::string& setting, const Choice& choice) {
  propose(setting, estimate(mine_) - estimate(choice));
}

void Advice::propose_states() {
  const auto with = [this](const auto& change) {
    Choice choice = mine_;
    change(choice);
    return choice;
  };
  const int world_size = policy_.world_size;
  const std::string full_shard = option("FsdpOptions::strategy", name_of(Strategy::kFullShard));
  const auto sharded_over = [&with](int num_ranks) {
    return with([&](Choice& c) {
      c.strategy = Strategy::kFullShard, c.shard_size = num_ranks, c.keeps_whole_gradients = false;
    });
  };
  if (world_size > 1 && (mine_.shard_size < world_size || !policy_.reshards_after_forward())) {
    propose(full_shard, sharded_over(world_size));
  } else {
    propose(fmt::format("{} ranks instead of {}{}", 2 * world_size, world_size,
                        mine_.strategy == Strategy::kFullShard ? "" : ", " + full_shard),
            sharded_over(2 * mine_.shard_size));
  }
  if (mine_.keeps_whole_gradients && mine_.strategy != Strategy::kShardOptim) {
    propose(option("FsdpOptions::sync_every_micro_batch", name_of(GradSync::kEveryMicroBatch)),
            with([](Choice& c) { c.keeps_whole_gradients = false; }));
  }
  if (!mine_.gradient_pieces && !mine_.keeps_whole_gradients && !policy_.offloads_gradients()) {
    propose(option("FsdpOptions::gradient_pieces", "true"),
            with([](Choice& c) { c.gradient_pieces = true; }));
  }
  for (const Offload more : {Offload::kOptimizer, Offload::kParamsAndOptimizer}) {
    if (more <= mine_.offload) continue;
    propose(option("FsdpOptions::offload", name_of(more)),
            with([more](Choice& c) { c.offload = more; }));
  }
  if (mine_.depth > 0) {
    propose(fmt::format("{}, {}", option("FsdpOptions::prefetch_forward", "0"),
                        option("FsdpOptions::prefetch_backward", "0")),
            with([](Choice& c) { c.depth = 0; }));
  }
  if (options_.precision.param_dtype == kF32) {
    propose(option("PrecisionOptions::param_dtype", "bf16"),
            with([](Choice& c) { c.is_bf16 = true; }));
  }
  list_units();
}

/// Bytes by unit, the largest first, and whether smaller ones would help.
void Advice::list_units() {
  std::vector<const UnitPlan*> largest;
  for (const UnitPlan& unit : units_) largest.push_back(&unit);
  std::stable_sort(largest.begin(), largest.end(), [](const UnitPlan* a, const UnitPlan* b) {
    return a->num_parameters() > b->num_parameters();
  });
  int64_t slots = 0;
  for (const PoolPlan& pool : pools_) {
    if (pool.is_gathered) slots += pool.num_slots * pool.nbytes;
  }
  if (policy_.residence == Residence::kReshard &&
      (units_.size() == 1 || largest[0]->gathered_nbytes * 2 > slots)) {
    text_ += fmt::format("    {:<48} slots are as large as the largest unit, {}\n",
                         words("FsdpOptions::wrap") + ": smaller units",
                         format_nbytes(largest[0]->gathered_nbytes));
  }
  text_ +=
      fmt::format("  {:<24} {:>12} {:>12} {:>12}\n", "unit", "parameters", "gradients", "gathered");
  for (size_t i = 0; i < std::min(kMostUnits, largest.size()); ++i) {
    int64_t parameters = 0, gradients = 0;
    for (const GroupPlan& g : largest[i]->groups) {
      const int64_t numel = mine_.strategy == Strategy::kShardOptim && !g.layout.is_coded
                                ? g.layout.numel
                                : g.shard_numel;
      parameters += g.layout.shard_nbytes(numel);
      if (!g.layout.is_trainable) continue;
      if (g.layout.dtype != kF32) parameters += nbytes_of(g.shard_numel, kF32);
      gradients += nbytes_of(g.shard_numel, kF32);
      if (mine_.keeps_whole_gradients) gradients += nbytes_of(g.layout.numel, g.grad_dtype);
    }
    text_ +=
        fmt::format("  {:<24} {:>12} {:>12} {:>12}\n", largest[i]->name, format_nbytes(parameters),
                    format_nbytes(gradients), format_nbytes(largest[i]->gathered_nbytes));
  }
  if (largest.size() > kMostUnits) {
    text_ += fmt::format("  and {} more\n", largest.size() - kMostUnits);
  }
}

void Advice::propose_activations() {
  const int64_t half = now(MemoryClass::kActivations) / 2;
  text_ += fmt::format("  {} for activations; less with\n",
                       format_nbytes(now(MemoryClass::kActivations)));
  propose(words("batch") + ", half of it", half);
  text_ += fmt::format("    {:<48} what blocks keep for backward\n",
                       option("RecomputePolicy::kind", "full, or selective"));
  text_ += fmt::format("    {:<48} what MLPs hold for all tokens at a time\n",
                       option("RecomputePolicy::mlp_tile", "1024"));
  propose(words("sequence") + ", half of it", half);
  if (options_.precision.param_dtype == kF32) {
    propose(option("PrecisionOptions::param_dtype", "bf16"), half);
  }
}

std::string Advice::to_string() {
  const int64_t activations = now(MemoryClass::kActivations);
  // What is planned may not be there yet.
  const int64_t states =
      std::max(estimate(mine_), now(MemoryClass::kParameters) + now(MemoryClass::kGradients) +
                                    now(MemoryClass::kOptimizer) + now(MemoryClass::kGathered));
  const auto advise_on_states = [&] {
    text_ += fmt::format(
        "  {} for parameters, gradients, optimizer states and gathered units; less with\n",
        format_nbytes(states));
    propose_states();
  };
  // Both where both matter, what takes more first.
  if (activations > states) {
    propose_activations();
    if (states > activations / 3) advise_on_states();
  } else {
    advise_on_states();
    if (activations > states / 3) propose_activations();
  }
  return text_;
}

}  // namespace

std::string memory_advice(const FsdpParts& parts, const OutOfMemory& oom) {
  return Advice(parts, oom).to_string();
}

}  // namespace tessera::dist
