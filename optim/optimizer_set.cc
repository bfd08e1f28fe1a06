#include "optim/optimizer_set.h"

#include <algorithm>

namespace tessera::optim {

OptimizerSet::OptimizerSet(std::vector<FlatShard> shards, const std::map<std::string, Make>& makers)
    : Optimizer(std::move(shards)) {
  std::map<std::string, std::vector<size_t>> uses;
  for (size_t i = 0; i < shards_.size(); ++i) {
    TESSERA_CHECK_AS(ConfigError, makers.contains(shards_[i].optimizer),
                     "OptimizerSet: shard {} is of optimizer \"{}\", which is not there",
                     shards_[i].name, shards_[i].optimizer);
    uses[shards_[i].optimizer].push_back(i);
  }
  for (auto& [name, indices] : uses) {
    std::vector<FlatShard> own;
    own.reserve(indices.size());
    for (const size_t i : indices) own.push_back(shards_[i]);
    parts_.push_back({makers.at(name)(std::move(own)), std::move(indices)});
    parts_.back().optimizer->step_count_ = step_count_;
    lr_ = parts_.back().optimizer->lr_;
  }
}

void OptimizerSet::update(const StepScalars& step) {
  for (const Part& part : parts_) part.optimizer->update(step);
}

bool OptimizerSet::has_stochastic_rounding() const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return part.optimizer->has_stochastic_rounding(); });
}

void OptimizerSet::round_low() {
  for (const Part& part : parts_) part.optimizer->round_low();
}

std::vector<NamedState> OptimizerSet::state() const {
  std::vector<NamedState> all;
  for (const Part& part : parts_) {
    for (const NamedState& own : part.optimizer->state()) {
      auto at = std::find_if(all.begin(), all.end(),
                             [&](const NamedState& s) { return s.name == own.name; });
      if (at == all.end()) {
        at = all.insert(all.end(), {own.name, std::vector<Tensor>(shards_.size()), own.block});
      }
      TESSERA_CHECK_AS(InternalError, at->block == own.block,
                       "OptimizerSet: two states \"{}\" of another form", own.name);
      for (size_t i = 0; i < own.tensors.size(); ++i) at->tensors[part.shards[i]] = own.tensors[i];
    }
  }
  return all;
}

std::vector<WholeState> OptimizerSet::whole_state() const {
  std::vector<WholeState> all;
  for (const Part& part : parts_) {
    for (WholeState& own : part.optimizer->whole_state()) all.push_back(std::move(own));
  }
  return all;
}

}  // namespace tessera::optim
