#include "dist/fsdp/groups.h"

#include <algorithm>

#include "core/glob.h"
#include "core/split.h"

namespace tessera::dist {
namespace {

constexpr const char* kOption = "FsdpOptions::parameters";

/// The group of each parameter, in the order of `parameters`; -1: none.
std::vector<int> groups_of(const std::vector<nn::NamedParameter>& parameters,
                           const std::vector<ParameterGroup>& groups) {
  std::vector<int> of(parameters.size(), -1);
  for (int k = 0; k < static_cast<int>(groups.size()); ++k) {
    const ParameterGroup& group = groups[static_cast<size_t>(k)];
    TESSERA_CHECK_AS(ConfigError, group.lr_scale >= 0,
                     "{}: lr_scale of \"{}\" must be at least 0, got {}", kOption, group.match,
                     group.lr_scale);
    TESSERA_CHECK_AS(ConfigError, group.weight_decay.value_or(0) >= 0,
                     "{}: weight_decay of \"{}\" must be at least 0, got {}", kOption, group.match,
                     group.weight_decay.value_or(0));
    for (const std::string_view pattern : split(group.match)) {
      bool is_found = false;
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (!matches_glob(parameters[i].name, pattern)) continue;
        is_found = true;
        TESSERA_CHECK_AS(ConfigError, of[i] < 0 || of[i] == k,
                         "{}: {} is in two groups, \"{}\" and \"{}\", expected one", kOption,
                         parameters[i].name, groups[static_cast<size_t>(std::max(of[i], 0))].match,
                         group.match);
        of[i] = k;
      }
      TESSERA_CHECK_AS(ConfigError, is_found,
                       "{}: no parameter is called \"{}\", expected a name such as {} or {}",
                       kOption, pattern, parameters.front().name, parameters.back().name);
    }
  }
  return of;
}

}  // namespace

ParameterTable parameter_table(nn::Module& root, const ParameterRules& rules) {
  const std::vector<nn::NamedParameter> parameters = root.named_parameters();
  const std::vector<int> of = groups_of(parameters, rules.groups);
  ParameterTable table;
  bool is_any_trained = rules.groups.empty();
  for (size_t i = 0; i < parameters.size(); ++i) {
    ParameterSettings settings;
    if (of[i] >= 0) {
      const ParameterGroup& group = rules.groups[static_cast<size_t>(of[i])];
      settings.optimizer = group.optimizer;
      settings.lr_scale = group.lr_scale;
      settings.weight_decay = group.weight_decay;
      if (group.frozen) parameters[i].parameter->tensor.set_requires_grad(false);
    }
    if (settings.optimizer.empty() && rules.optimizer) {
      settings.optimizer = rules.optimizer(parameters[i]);
    }
    if (rules.row_blocks) settings.row_blocks = rules.row_blocks(parameters[i]);
    const bool is_trained = parameters[i].parameter->tensor.requires_grad();
    settings.is_coded = rules.quantize && rules.quantize(parameters[i]);
    TESSERA_CHECK_AS(ConfigError, !settings.is_coded || !is_trained,
                     "{}: {} is quantized and trained, expected it frozen, and adapters (LoRA) to "
                     "train",
                     kOption, parameters[i].name);
    is_any_trained |= is_trained;
    table[parameters[i].parameter] = std::move(settings);
  }
  TESSERA_CHECK_AS(ConfigError, is_any_trained,
                   "{}: the groups leave no parameter to train, expected at least one", kOption);
  return table;
}

std::string describe_groups(nn::Module& root, const ParameterRules& rules,
                            const std::string& default_optimizer) {
  struct Row {
    std::string match, optimizer, lr, decay;
    int64_t tensors = 0, elements = 0;
  };
  std::vector<Row> rows;
  const std::vector<nn::NamedParameter> parameters = root.named_parameters();
  const std::vector<int> of = groups_of(parameters, rules.groups);
  const auto add = [&](int k) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (of[i] != k) continue;
      const ParameterGroup none{.match = "others"};
      const ParameterGroup& group = k < 0 ? none : rules.groups[static_cast<size_t>(k)];
      std::string optimizer = group.optimizer;
      if (optimizer.empty() && rules.optimizer) optimizer = rules.optimizer(parameters[i]);
      if (optimizer.empty()) optimizer = default_optimizer;
      Row row{group.match, optimizer, fmt::format("{}", group.lr_scale),
              group.weight_decay ? fmt::format("{}", *group.weight_decay) : "of matrices"};
      if (!parameters[i].parameter->tensor.requires_grad()) {
        row.optimizer = "frozen", row.lr = row.decay = "-";
      }
      auto at = std::find_if(rows.begin(), rows.end(), [&](const Row& r) {
        return r.match == row.match && r.optimizer == row.optimizer;
      });
      if (at == rows.end()) at = rows.insert(rows.end(), std::move(row));
      ++at->tensors;
      at->elements += parameters[i].parameter->tensor.numel();
    }
  };
  for (int k = 0; k < static_cast<int>(rules.groups.size()); ++k) add(k);
  add(-1);
  size_t width = 10, optimizer_width = 9;
  for (const Row& row : rows) {
    width = std::max(width, row.match.size());
    optimizer_width = std::max(optimizer_width, row.optimizer.size());
  }
  std::string text =
      fmt::format("{:<{}}  {:<{}}  {:<5} {:<12} {:>8} {:>12}", "parameters", width, "optimizer",
                  optimizer_width, "lr x", "weight decay", "tensors", "elements");
  for (const Row& row : rows) {
    text +=
        fmt::format("\n{:<{}}  {:<{}}  {:<5} {:<12} {:>8} {:>12}", row.match, width, row.optimizer,
                    optimizer_width, row.lr, row.decay, row.tensors, row.elements);
  }
  return text;
}

}  // namespace tessera::dist
