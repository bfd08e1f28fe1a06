#include "nn/hf/peft.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/check.h"
#include "core/formats/strict_json.h"
#include "nn/hf/config.h"
#include "nn/hf/keys.h"
#include "nn/linear.h"

namespace tessera::nn {
namespace {

using nlohmann::json;

constexpr std::string_view kPrefix = "base_model.model.";

/// Keys that say nothing about what the adapters compute.
constexpr const char* kIgnored[] = {"auto_mapping",
                                    "base_model_name_or_path",
                                    "inference_mode",
                                    "peft_version",
                                    "revision",
                                    "task_type",
                                    "megatron_core",
                                    "qalora_group_size",
                                    "fan_in_fan_out",
                                    "exclude_modules",
                                    "ensure_weight_tying",
                                    "runtime_config",
                                    "layers_to_transform",
                                    "layers_pattern",
                                    "eva_config",
                                    "bias_dropout_fusion"};

/// A list of names as a text, or "" if there is none.
std::string names_text(HfKeys& keys, std::string_view key) {
  std::string text;
  for (const json& name : keys.array(key)) {
    if (!name.is_string() || name.get<std::string>().find(',') != std::string::npos) {
      keys.fail(key, "a list of names");
    }
    text += (text.empty() ? "" : ",") + name.get<std::string>();
  }
  return text;
}

/// A number in [low, high), or absent.
double number_in(HfKeys& keys, const json& object, std::string_view key, double fallback,
                 double low, double high, std::string_view expected) {
  keys.ignore(key);
  if (!keys.has(key)) return fallback;
  const json& value = object.at(std::string(key));
  const double number = value.is_number() ? value.get<double>() : std::nan("");
  if (!(number >= low && number < high)) keys.fail(key, expected);
  return number;
}

/// Which values of init_lora_weights leave the base as it is: the others subtract from it what the
/// adapters began with.
void check_init(HfKeys& keys, const json& object) {
  constexpr std::string_view kKey = "init_lora_weights";
  keys.ignore(kKey);
  if (!keys.has(kKey)) return;
  const json& value = object.at(std::string(kKey));
  const bool is_known =
      value.is_boolean() || value == "gaussian" || value == "orthogonal" || value == "eva";
  if (!is_known) keys.fail(kKey, "true, false, \"gaussian\", \"orthogonal\" or \"eva\"");
}

/// What the layers are called in transformers.
struct LayerNames {
  std::set<std::string> all, adapted;
};
LayerNames layer_names(Module& root) {
  LayerNames names;
  for (const LoraLayer& layer : lora_layers(root)) {
    for (const LoraPart& part : layer.parts) names.all.insert(part.name);
    if (layer.linear->lora() == nullptr) continue;
    for (const LoraPart& part : layer.linear->lora()->parts()) names.adapted.insert(part.name);
  }
  return names;
}

/// The shortest names that mean the adapted layers and no others: last components, where all that
/// are called so are meant.
std::set<std::string> target_modules(const LayerNames& names) {
  std::set<std::string> targets;
  for (const std::string& name : names.adapted) {
    const std::string last = name.substr(name.rfind('.') + 1);
    const bool is_shared =
        std::any_of(names.all.begin(), names.all.end(), [&](const std::string& other) {
          return (other == last || other.ends_with("." + last)) && !names.adapted.contains(other);
        });
    targets.insert(is_shared ? name : last);
  }
  return targets;
}

std::string parent_of(std::string_view path) {
  return std::string(path.substr(0, path.rfind('.')));
}

/// A and B of one layer.
void add_adapters(HfParameterList& list, const LoraLayer& layer,
                  const std::map<std::string, HfParameter>& hf) {
  const auto found = hf.find(layer.name + ".weight");
  TESSERA_CHECK_AS(ConfigError, found != hf.end(),
                   "adapters of {}: transformers has no such layer, expected one of a model of a "
                   "family",
                   layer.name);
  const Lora& lora = *layer.linear->lora();
  std::vector<HfParameterList::Part> a, b;
  std::vector<std::vector<HfRows>> b_rows;
  int64_t first = 0;
  for (const LoraPart& part : lora.parts()) {
    const std::string name = std::string(kPrefix) + part.name;
    a.push_back({name + ".lora_A.weight", lora.rank()});
    b.push_back({name + ".lora_B.weight", part.rows.count});
    for (const HfTensor& source : found->second.sources) {
      if (source.name != part.name + ".weight") continue;
      b_rows.push_back(source.rows);
      for (HfRows& run : b_rows.back()) run.row += first - part.rows.first;
    }
    first += part.rows.count;
  }
  list.matrix(layer.name + ".lora.A", layer.linear->num_inputs(), a);
  list.matrix(layer.name + ".lora.B", lora.rank(), b);
  for (size_t i = 0; i < b.size(); ++i) list.set_rows(b_rows[i], i);
}

}  // namespace

PeftConfig parse_peft_config(const std::string& path, std::string_view text) {
  constexpr int kMaxDepth = 8;
  const json object = parse_strict_json(path, text, kMaxDepth, "the object of an adapter");
  if (!object.is_object()) {
    throw InputError(fmt::format("{}: no object, expected the object of an adapter", path));
  }
  HfKeys keys(path, object);
  if (keys.text("peft_type", "") != "LORA") keys.fail("peft_type", "\"LORA\"");
  PeftConfig config;
  LoraOptions& o = config.options;
  o.rank = keys.count({"r"}, 8, 1 << 16);
  o.alpha = keys.number("lora_alpha", 8);
  o.rslora = keys.flag("use_rslora", false);
  o.dropout = number_in(keys, object, "lora_dropout", 0, 0, 1, "a number in [0, 1)");
  config.has_pattern = object.contains("target_modules") && object["target_modules"].is_string() &&
                       object["target_modules"] != "all-linear";
  if (config.has_pattern) {
    keys.ignore("target_modules");
  } else if (keys.has("target_modules") && object["target_modules"].is_string()) {
    o.targets = keys.text("target_modules", "");
  } else {
    o.targets = names_text(keys, "target_modules");
    if (o.targets.empty()) keys.fail("target_modules", "a list of names, or a pattern");
  }
  o.modules_to_save = names_text(keys, "modules_to_save");
  keys.require("bias", "none");
  for (const char* key : {"use_dora", "lora_bias", "use_qalora"}) keys.require(key, false);
  for (const char* key : {"rank_pattern", "alpha_pattern"}) keys.require(key, json::object());
  check_init(keys, object);
  for (const char* key : kIgnored) keys.ignore(key);
  keys.check_nothing_else("adapters");
  return config;
}

std::string peft_config_json(Module& root, const LoraOptions& options, const std::string& base) {
  const std::map<std::string, HfParameter> hf = hf_parameters_of(root);
  const auto* const model = dynamic_cast<const LanguageModel*>(&root);
  const bool is_causal = model != nullptr && model->shape().is_causal;
  std::set<std::string> saved;
  bool is_tied = false;
  for (const HfParameter& p : peft_parameters(root)) {
    int64_t num_rows = 0;
    for (const HfTensor& t : p.sources) {
      for (const HfRows& run : t.rows) num_rows += run.num_rows;
      if (!peft_layer_of(t.name).empty()) continue;
      saved.insert(parent_of(std::string_view(t.name).substr(kPrefix.size())));
    }
    is_tied |= num_rows > p.shape[0];
  }
  bool has_conv1d = false;
  for (const LoraLayer& layer : lora_layers(root)) {
    const auto found = hf.find(layer.name + ".weight");
    if (layer.linear->lora() == nullptr || found == hf.end()) continue;
    has_conv1d |= found->second.sources[0].is_transposed;
  }
  json object = {{"peft_type", "LORA"},
                 {"auto_mapping", nullptr},
                 {"base_model_name_or_path", base},
                 {"bias", "none"},
                 {"ensure_weight_tying", is_tied},
                 {"fan_in_fan_out", has_conv1d},
                 {"inference_mode", true},
                 {"init_lora_weights", true},
                 {"lora_alpha", options.alpha},
                 {"lora_dropout", options.dropout},
                 {"modules_to_save", nullptr},
                 {"r", options.rank},
                 {"target_modules", target_modules(layer_names(root))},
                 {"task_type", nullptr},
                 {"use_dora", false},
                 {"use_rslora", options.rslora}};
  if (!saved.empty()) object["modules_to_save"] = saved;
  if (is_causal) object["task_type"] = "CAUSAL_LM";
  if (model != nullptr && model->classifier() != nullptr) object["task_type"] = "SEQ_CLS";
  const auto whole = static_cast<int64_t>(options.alpha);
  if (static_cast<double>(whole) == options.alpha) object["lora_alpha"] = whole;
  return object.dump(2) + "\n";
}

std::string peft_layer_of(std::string_view tensor) {
  if (!tensor.starts_with(kPrefix)) return "";
  tensor.remove_prefix(kPrefix.size());
  for (const std::string_view end : {".lora_A.weight", ".lora_B.weight"}) {
    if (tensor.ends_with(end)) return std::string(tensor.substr(0, tensor.size() - end.size()));
  }
  return "";
}

std::vector<HfParameter> peft_parameters(Module& root) {
  const std::map<std::string, HfParameter> hf = hf_parameters_of(root);
  HfParameterList adapters;
  for (const LoraLayer& layer : lora_layers(root)) {
    if (layer.linear->lora() != nullptr) add_adapters(adapters, layer, hf);
  }
  std::vector<HfParameter> all = adapters.take();
  std::map<const Parameter*, size_t> saved;  // where in `all`
  for (const NamedParameter& p : root.named_parameters(/*with_ties=*/true)) {
    if (is_lora(p) || !p.parameter->tensor.requires_grad()) continue;
    const auto found = hf.find(p.name);
    if (found == hf.end() && saved.contains(p.parameter)) continue;  // the head of a classifier
    TESSERA_CHECK_AS(ConfigError, found != hf.end(),
                     "modules_to_save: {}: transformers has no such parameter", p.name);
    const auto [at, is_new] = saved.emplace(p.parameter, all.size());
    if (is_new) all.push_back({p.name, found->second.shape, {}});
    // A tied one is there under both names.
    for (HfTensor source : found->second.sources) {
      source.name.insert(0, kPrefix);
      all[at->second].sources.push_back(std::move(source));
    }
  }
  return all;
}

}  // namespace tessera::nn
