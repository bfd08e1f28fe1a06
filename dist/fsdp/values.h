#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dist/fsdp/runtime.h"
#include "dist/fsdp/unit.h"
#include "nn/module.h"
#include "optim/optimizer.h"

namespace tessera::dist {

/// The values of a sharded model: given, changed and read as a whole, and whether there are any.
class Values {
 public:
  /// `missing`: sharded parameters that have none yet. What is given outlives this.
  Values(nn::Module& root, const std::vector<nn::NamedParameter>& ignored,
         const std::vector<std::unique_ptr<Unit>>& units, std::vector<std::string> missing,
         Issuer& issuer);

  /// `Fsdp::initialize`, `load_full` and `shards_changed`, without what follows for gathers.
  void initialize(uint64_t seed);
  void load_full(const std::function<Tensor(const std::string& name)>& values);
  void shards_changed(optim::Optimizer* optimizer);
  /// A placement was written from outside.
  void set_given(const std::string& name) { std::erase(missing_, name); }
  /// Error if a parameter has none: such a model would train on zeros.
  void check(const char* what);

  using OnFull = std::function<void(const std::string& name, const Tensor& full)>;
  /// `what`: Phase::kMaster or kGradient. What it gathers and drops are actions of the program.
  void for_each_full(Phase what, const OnFull& f);

 private:
  void for_each_full_of_unit(int unit, Phase what, const OnFull& f);

  nn::Module& root_;
  const std::vector<nn::NamedParameter>& ignored_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  std::vector<std::string> missing_;
  Issuer& issuer_;
  std::vector<nn::NamedParameter> empty_ignored_;  // had none when this was made
  bool is_complete_ = false;                       // nothing is missing
};

}  // namespace tessera::dist
