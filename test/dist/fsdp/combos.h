#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include "test/dist/fsdp/harness.h"

// Combinations of settings that must not change a bit of the result at one world size.

namespace tessera::testing {

inline constexpr std::array kAllStrategies = {
    dist::Strategy::kFullShard, dist::Strategy::kShardGradOp, dist::Strategy::kShardOptim,
    dist::Strategy::kNoShard,   dist::Strategy::kHybridShard, dist::Strategy::kHybridShardZero2};

enum class Precision { kF32, kMixed, kBF16 };  ///< mixed: bf16 parameters, f32 gradients

/// Ranks in a shard group of the hybrid strategies: the largest proper divisor, else all.
inline int hybrid_shard_size(int world_size) {
  for (int size = world_size / 2; size > 1; --size) {
    if (world_size % size == 0) return size;
  }
  return world_size;
}

/// One value a setting, each an index: strategy, prefetch, recompute, communicators, offload,
/// reshard (as the strategy says or into groups of ranks).
struct Combo {
  static constexpr std::array<int, 6> kNumValues = {6, 3, 2, 2, 3, 2};
  std::array<int, 6> values{};

  dist::Strategy strategy() const { return kAllStrategies[static_cast<size_t>(values[0])]; }
  int prefetch() const { return values[1]; }
  bool recompute() const { return values[2] == 1; }
  int communicators() const { return 2 - values[3]; }
  dist::Offload offload() const { return static_cast<dist::Offload>(values[4]); }
  bool reshards_into_groups() const { return values[5] == 1; }
  /// Only what reshards can do it into groups.
  bool is_valid() const {
    return !reshards_into_groups() || strategy() == dist::Strategy::kFullShard ||
           strategy() == dist::Strategy::kHybridShard;
  }

  std::string to_string() const {
    return fmt::format("{}, prefetch {}, recompute {}, {} communicators, offload {}, groups {}",
                       name_of(strategy()), prefetch(), recompute(), communicators(), values[4],
                       reshards_into_groups());
  }
};

inline void set_precision(FsdpRun& run, Precision precision) {
  if (precision == Precision::kF32) return;
  run.fsdp.precision.param_dtype = kBF16;
  run.fsdp.precision.reduce_dtype = precision == Precision::kMixed ? kF32 : kBF16;
}

inline FsdpRun make_run(const Combo& combo, int world_size, Precision precision) {
  FsdpRun run;
  run.samples_per_step = world_size % 2 == 0 ? 8 : 2 * world_size;
  run.fsdp.strategy = combo.strategy();
  if (combo.strategy() >= dist::Strategy::kHybridShard) {
    run.fsdp.shard_size = hybrid_shard_size(world_size);
  }
  run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = combo.prefetch();
  run.fsdp.communicators = combo.communicators();
  run.fsdp.offload = combo.offload();
  run.fsdp.offload_window = 256;  // several windows a shard
  if (combo.reshards_into_groups()) {
    const bool is_hybrid = combo.strategy() == dist::Strategy::kHybridShard;
    run.fsdp.reshard_after_forward =
        hybrid_shard_size(is_hybrid ? run.fsdp.shard_size : world_size);
  }
  if (combo.recompute()) run.recompute.kind = nn::RecomputePolicy::Kind::kFull;
  set_precision(run, precision);
  return run;
}

/// All of them.
inline std::vector<Combo> every_combo() {
  std::vector<Combo> all;
  int count = 1;
  for (const int n : Combo::kNumValues) count *= n;
  for (int i = 0; i < count; ++i) {
    Combo combo;
    int rest = i;
    for (size_t k = 0; k < combo.values.size(); ++k) {
      combo.values[k] = rest % Combo::kNumValues[k];
      rest /= Combo::kNumValues[k];
    }
    if (combo.is_valid()) all.push_back(combo);
  }
  return all;
}

/// Few combinations in which any two settings take every pair of their values (greedy).
inline std::vector<Combo> pair_covering_combos() {
  struct Pair {
    size_t i, j;
    int a, b;
  };
  const auto covers = [](const Combo& c, const Pair& p) {
    return c.values[p.i] == p.a && c.values[p.j] == p.b;
  };
  const std::vector<Combo> all = every_combo();
  std::vector<Pair> open;
  for (size_t i = 0; i < Combo::kNumValues.size(); ++i) {
    for (size_t j = i + 1; j < Combo::kNumValues.size(); ++j) {
      for (int a = 0; a < Combo::kNumValues[i]; ++a) {
        for (int b = 0; b < Combo::kNumValues[j]; ++b) {
          const Pair pair{i, j, a, b};
          const auto has = [&](const Combo& c) { return covers(c, pair); };
          if (std::any_of(all.begin(), all.end(), has)) open.push_back(pair);
        }
      }
    }
  }
  std::vector<Combo> chosen;
  while (!open.empty()) {
    const auto gain = [&](const Combo& c) {
      return std::count_if(open.begin(), open.end(), [&](const Pair& p) { return covers(c, p); });
    };
    chosen.push_back(*std::max_element(
        all.begin(), all.end(), [&](const Combo& x, const Combo& y) { return gain(x) < gain(y); }));
    std::erase_if(open, [&](const Pair& p) { return covers(chosen.back(), p); });
  }
  return chosen;
}

}  // namespace tessera::testing
