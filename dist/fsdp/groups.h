#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "nn/module.h"

namespace tessera::dist {

/// Parameters by name, and what is another for them.
struct ParameterGroup {
  /// Patterns of full names (core/glob.h), separated by commas, such as "*.norm.*, *.bias".
  std::string match;
  double lr_scale = 1;  ///< multiplies the learning rate
  /// In place of the optimizer's; not given: the optimizer's, of matrices that are no norm's.
  std::optional<double> weight_decay = std::nullopt;
  std::string optimizer = {};  ///< empty: as without a group
  bool frozen = false;         ///< not trained: no gradient, no states
};

/// How one parameter is optimized.
struct ParameterSettings {
  std::string optimizer;  ///< `FlatShard::optimizer`
  double lr_scale = 1;
  std::optional<double> weight_decay;
  std::vector<int64_t> row_blocks;  ///< `WholeParameter::row_blocks`
  bool is_coded = false;            ///< kept as codes ([Note: Coded groups] in coded.h)
};
using ParameterTable = std::map<const nn::Parameter*, ParameterSettings>;

/// What `parameter_table` needs to know beside the groups.
struct ParameterRules {
  std::vector<ParameterGroup> groups;
  /// The optimizer of a parameter whose group names none; null: the default one, "".
  std::function<std::string(const nn::NamedParameter&)> optimizer;
  /// `ParameterSettings::row_blocks`; null: none.
  std::function<std::vector<int64_t>(const nn::NamedParameter&)> row_blocks;
  /// Whether a parameter, which must be frozen, is kept as NF4 codes; null: none.
  std::function<bool(const nn::NamedParameter&)> quantize;
};

/// The settings of each parameter of the model. Sets `requires_grad` of frozen ones to false.
/// Errors   ConfigError "FsdpOptions::parameters: ..." for a pattern that no parameter matches, a
///          parameter that two groups match, a negative lr_scale or weight_decay, one that is
///          quantized and trained, or if no parameter is left to train
ParameterTable parameter_table(nn::Module& root, const ParameterRules& rules);

/// Tensors and elements by group and optimizer, one line each.
///   parameters               optimizer  lr x  weight decay  tensors  elements
///   *.norm.*                 adamw      1     0                   9       576
///   others                   adamw      1     of matrices        12     98304
std::string describe_groups(nn::Module& root, const ParameterRules& rules,
                            const std::string& default_optimizer);

}  // namespace tessera::dist
