#include "dist/fsdp/options.h"

#include <array>
#include <utility>

namespace tessera::dist {
namespace {

constexpr std::array<std::pair<Strategy, std::string_view>, 6> kStrategies = {{
    {Strategy::kFullShard, "full_shard"},
    {Strategy::kShardGradOp, "shard_grad_op"},
    {Strategy::kShardOptim, "shard_optim"},
    {Strategy::kNoShard, "no_shard"},
    {Strategy::kHybridShard, "hybrid_shard"},
    {Strategy::kHybridShardZero2, "hybrid_shard_zero2"},
}};
constexpr std::array<std::pair<GradSync, std::string_view>, 3> kGradSyncs = {{
    {GradSync::kEveryMicroBatch, "true"},
    {GradSync::kShard, "shard"},
    {GradSync::kLast, "false"},
}};

constexpr std::array<std::pair<Offload, std::string_view>, 3> kOffloads = {{
    {Offload::kNone, "none"},
    {Offload::kOptimizer, "optimizer"},
    {Offload::kParamsAndOptimizer, "params_and_optimizer"},
}};

template <class Table, class E>
std::string_view name_in(const Table& table, E value) {
  for (const auto& [v, name] : table) {
    if (v == value) return name;
  }
  return "?";
}

template <class Table>
auto value_in(const Table& table, std::string_view key, std::string_view name) {
  std::string known;
  for (const auto& [v, n] : table) {
    if (n == name) return v;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", n);
  }
  throw ConfigError(fmt::format("{}: \"{}\" is not one of {}", key, name, known));
}

}  // namespace

std::string_view name_of(Strategy strategy) {
  return name_in(kStrategies, strategy);
}
Strategy strategy_from_name(std::string_view name) {
  return value_in(kStrategies, "fsdp.strategy", name);
}
std::string_view name_of(GradSync sync) {
  return name_in(kGradSyncs, sync);
}
GradSync grad_sync_from_name(std::string_view name) {
  return value_in(kGradSyncs, "fsdp.sync_every_micro_batch", name);
}
std::string_view name_of(Offload offload) {
  return name_in(kOffloads, offload);
}
Offload offload_from_name(std::string_view name) {
  return value_in(kOffloads, "fsdp.offload", name);
}

}  // namespace tessera::dist
