#include "apps/parameter_groups.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <map>

#include "core/split.h"
#include "core/text.h"
#include "nn/attention.h"
#include "nn/linear.h"
#include "nn/mlp.h"

namespace tessera::apps {
namespace {

constexpr const char* kOptions = "lr_scale=X, weight_decay=X, optimizer=NAME or frozen";

std::vector<std::string_view> optimizer_names() {
  std::vector<std::string_view> names;
  for (const auto& entry : kEnumNames<OptimizerName>) names.push_back(entry.name);
  return names;
}

double number(std::string_view name, std::string_view text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || !(value >= 0) || value > kF32Positive.high) {
    throw ConfigError(fmt::format("{}={}, expected a number of at least 0", name, shorten(text)));
  }
  return value;
}

void set_option(dist::ParameterGroup& group, std::string_view option) {
  const size_t equals = option.find('=');
  const std::string_view name = trimmed(option.substr(0, equals));
  const auto fail = [option] {
    throw ConfigError(fmt::format("{}, expected {}", toml_text(shorten(option)), kOptions));
  };
  if (equals == std::string_view::npos) {
    if (name != "frozen") fail();
    group.frozen = true;
    return;
  }
  const std::string_view value = trimmed(option.substr(equals + 1));
  if (name == "lr_scale") {
    group.lr_scale = number(name, value);
  } else if (name == "weight_decay") {
    group.weight_decay = number(name, value);
  } else if (name == "optimizer") {
    const auto names = optimizer_names();
    if (std::find(names.begin(), names.end(), value) == names.end()) {
      throw ConfigError(
          fmt::format("optimizer={}, expected one of {}", shorten(value), fmt::join(names, ", ")));
    }
    group.optimizer = value;
  } else {
    fail();
  }
}

/// A matrix of a linear layer in one of a list of blocks: "blocks.3.attn.out.weight".
bool is_in_block(const nn::NamedParameter& p) {
  if (p.parameter->tensor.shape().num_dims() != 2) return false;
  if (dynamic_cast<const nn::Linear*>(p.owner) == nullptr) return false;
  const auto parts = split(p.name, '.');
  return std::any_of(parts.begin(), parts.end(), [](std::string_view part) {
    return !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
  });
}

/// Rows of the matrices in fused projections, by parameter.
std::map<std::string, std::vector<int64_t>> blocks_in(nn::Module& model, bool by_head) {
  std::map<std::string, std::vector<int64_t>> blocks;
  for (const nn::NamedModule& m : model.named_modules()) {
    const std::string prefix = m.name.empty() ? "" : m.name + ".";
    if (const auto* attention = dynamic_cast<const nn::Attention*>(m.module)) {
      const nn::AttentionConfig& c = attention->config();
      std::vector<int64_t>& rows = blocks[prefix + "qkv.weight"];
      for (const int64_t heads : {c.num_heads, c.num_kv_heads, c.num_kv_heads}) {
        if (by_head) {
          rows.insert(rows.end(), static_cast<size_t>(heads), c.head_width);
        } else {
          rows.push_back(heads * c.head_width);
        }
      }
    } else if (dynamic_cast<const nn::SwiGlu*>(m.module) != nullptr) {
      const int64_t rows = model.parameter(prefix + "gate_up.weight").tensor.shape()[0];
      blocks[prefix + "gate_up.weight"] = {rows / 2, rows / 2};
    }
  }
  return blocks;
}

}  // namespace

std::vector<dist::ParameterGroup> parse_groups(const std::string& text) {
  std::vector<dist::ParameterGroup> groups;
  if (trimmed(text).empty()) return groups;
  for (const std::string_view part : split(text, ';')) {
    const size_t colon = part.rfind(':');
    const std::string_view match = trimmed(part.substr(0, colon));
    if (colon == std::string_view::npos || match.empty()) {
      throw ConfigError(
          fmt::format("{}, expected PATTERN: {}", toml_text(shorten(part)), kOptions));
    }
    groups.push_back({.match = std::string(match)});
    for (const std::string_view option : split(part.substr(colon + 1))) {
      set_option(groups.back(), option);
    }
  }
  return groups;
}

std::string groups_text(const std::vector<dist::ParameterGroup>& groups) {
  std::vector<std::string> all;
  for (const dist::ParameterGroup& group : groups) {
    std::vector<std::string> options;
    if (group.lr_scale != 1) options.push_back(fmt::format("lr_scale={}", group.lr_scale));
    if (group.weight_decay) options.push_back(fmt::format("weight_decay={}", *group.weight_decay));
    if (!group.optimizer.empty()) options.push_back("optimizer=" + group.optimizer);
    if (group.frozen) options.push_back("frozen");
    if (options.empty()) options.push_back("lr_scale=1");
    all.push_back(fmt::format("{}: {}", group.match, fmt::join(options, ", ")));
  }
  return fmt::format("{}", fmt::join(all, "; "));
}

dist::ParameterRules parameter_rules(const Config& config, nn::Module& model) {
  const OptimConfig& optim = config.optim;
  const std::string main(name_of(optim.name)), adamw(name_of(OptimizerName::kAdamW));
  dist::ParameterRules rules;
  rules.groups = parse_groups(optim.groups);
  if (optim.name == OptimizerName::kMuon) {
    rules.optimizer = [main, adamw](const nn::NamedParameter& p) {
      return is_in_block(p) ? main : adamw;
    };
  } else if (optim.name == OptimizerName::kAdamW8bit) {
    rules.optimizer = [main, adamw](const nn::NamedParameter& p) {
      constexpr int64_t kLeast = 4096;
      return p.parameter->tensor.numel() < kLeast ? adamw : main;
    };
  } else {
    for (dist::ParameterGroup& group : rules.groups) {
      if (group.optimizer == main) group.optimizer.clear();
    }
  }
  if (optim.muon_blocks != MuonBlocks::kWhole) {
    rules.row_blocks = [blocks = blocks_in(model, optim.muon_blocks == MuonBlocks::kHeads)](
                           const nn::NamedParameter& p) {
      const auto found = blocks.find(p.name);
      return found == blocks.end() ? std::vector<int64_t>() : found->second;
    };
  }
  if (config.model.quantize == Quantize::kNf4) rules.quantize = is_in_block;
  return rules;
}

void check_quantized(const Config& config, nn::Module& model) {
  if (config.model.quantize == Quantize::kNone) return;
  bool is_any = false;
  for (const nn::NamedParameter& p : model.named_parameters()) {
    if (!is_in_block(p)) continue;
    is_any = true;
    TESSERA_CHECK_AS(ConfigError, !p.parameter->tensor.requires_grad(),
                     "{}: model.quantize = {}, but {} is trained, expected it frozen by "
                     "model.frozen, and others to train, such as adapters",
                     config.origin("model.quantize"), name_of(config.model.quantize), p.name);
  }
  TESSERA_CHECK_AS(ConfigError, is_any,
                   "{}: model.quantize = {}, but the model has no linear layer in a block",
                   config.origin("model.quantize"), name_of(config.model.quantize));
}

}  // namespace tessera::apps
