#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "optim/optimizer.h"

namespace tessera::optim {

/// Several optimizers for the shards of one model: each updates those that name it
/// (`FlatShard::optimizer`). Step count, learning rate, scale and skipped steps are the same for all;
/// `step()` takes the rate of the last one by name.
/// States   those of all, by name: one state of two optimizers of which each has its own shards
/// Errors   ConfigError that names the shard and the optimizer that there is none of
class OptimizerSet final : public Optimizer {
 public:
  using Make = std::function<std::unique_ptr<Optimizer>(std::vector<FlatShard>)>;
  /// Makes those that a shard names.
  OptimizerSet(std::vector<FlatShard> shards, const std::map<std::string, Make>& makers);

  std::vector<NamedState> state() const override;
  std::vector<WholeState> whole_state() const override;
  bool has_stochastic_rounding() const override;
  void round_low() override;

 private:
  struct Part {
    std::unique_ptr<Optimizer> optimizer;
    std::vector<size_t> shards;  // its i-th shard is this one of ours
  };
  void update(const StepScalars& step) override;

  std::vector<Part> parts_;
};

}  // namespace tessera::optim
