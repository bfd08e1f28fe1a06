#include "nn/hf/config.h"

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/formats/strict_json.h"
#include "core/log.h"
#include "core/text.h"
#include "nn/hf/keys.h"

namespace tessera::nn {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 16;

constexpr std::string_view kClassifies = "ForSequenceClassification";

/// "X" of "XForMaskedLM".
std::string_view base_of(std::string_view architecture) {
  for (const std::string_view end : {"ForCausalLM", "LMHeadModel", "ForMaskedLM"}) {
    if (architecture.ends_with(end))
      return architecture.substr(0, architecture.size() - end.size());
  }
  return architecture;
}

/// The names of classes in a config.json; transformers has two where it says nothing.
std::vector<std::string> classes_of(const std::string& path, HfKeys& keys, const json& object) {
  keys.ignore("label2id");
  keys.ignore("num_labels");
  keys.ignore("classifier_dropout");
  keys.ignore("id2label");
  const auto problem = object.find("problem_type");
  keys.ignore("problem_type");
  if (problem != object.end() && !problem->is_null() && *problem != "single_label_classification") {
    throw InputError(fmt::format("{}: problem_type = {}, expected single_label_classification",
                                 path, shorten(problem->dump())));
  }
  const auto names = object.find("id2label");
  if (names == object.end() || names->is_null()) return {"LABEL_0", "LABEL_1"};
  std::vector<std::string> classes;
  const auto fail = [&] {
    throw InputError(fmt::format("{}: id2label = {}, expected names of \"0\", \"1\", ...", path,
                                 shorten(names->dump())));
  };
  if (!names->is_object() || names->size() < 2) fail();
  for (size_t i = 0; i < names->size(); ++i) {
    const auto name = names->find(std::to_string(i));
    if (name == names->end() || !name->is_string()) fail();
    classes.push_back(*name);
  }
  return classes;
}

/// The architecture of a config.json, and the family that it is of.
std::pair<const Family*, std::string> architecture_of(const std::string& path, const json& object) {
  std::vector<std::pair<HfArchitecture, const Family*>> known;
  for (const Family* family : families()) {
    for (const HfArchitecture& each : family->architectures) known.emplace_back(each, family);
  }
  std::string found;
  const auto names = object.find("architectures");
  if (names != object.end() && names->is_array() && names->size() == 1 && (*names)[0].is_string()) {
    found = (*names)[0];
    for (const auto& [each, family] : known) {
      if (found == each.name) return {family, found};
      if (found.ends_with(kClassifies) && each.name != base_of(each.name) &&
          base_of(each.name) ==
              std::string_view(found).substr(0, found.size() - kClassifies.size())) {
        return {family, std::string(each.name)};
      }
    }
  }
  const auto type = object.find("model_type");
  if (type != object.end() && type->is_string()) {
    for (const auto& [each, family] : known) {
      // Names that end in "Model": the same weights without a head's name.
      const bool is_headless = found.empty() || found.ends_with("Model");
      if (*type == each.model_type && is_headless) return {family, std::string(each.name)};
    }
    if (found.empty()) found = type->get<std::string>();
  }
  std::vector<std::string> expected;
  for (const auto& entry : known) expected.emplace_back(entry.first.name);
  throw InputError(fmt::format("{}: architecture {}, expected one of {}", path,
                               found.empty() ? "missing" : shorten(found), join_few(expected)));
}

json parse_object(const std::string& path, std::string_view text) {
  json object = parse_strict_json(path, text, {.max_depth = kMaxDepth, .python_numbers = true},
                                  "the object of a model");
  if (object.is_object()) return object;
  throw InputError(fmt::format("{}: no object, expected the object of a model", path));
}

void add_ids(json& object, const HfTokenIds& ids) {
  const auto add = [&](const char* key, const std::vector<int64_t>& values) {
    if (values.size() == 1) object[key] = values.front();
    if (values.size() > 1) object[key] = values;
  };
  add("bos_token_id", ids.bos);
  add("eos_token_id", ids.eos);
  add("pad_token_id", ids.pad);
}

std::string_view torch_name(DType dtype) {
  return dtype == kBF16 ? "bfloat16" : dtype == kF16 ? "float16" : "float32";
}

}  // namespace

FamilyConfig parse_hf_config(const std::string& path, std::string_view text,
                             const std::vector<std::string>& ignored_keys) {
  const json object = parse_object(path, text);
  const auto [family, architecture] = architecture_of(path, object);
  HfKeys keys(path, object);
  FamilyConfig config = family->read_hf(keys, architecture);
  const auto names = object.find("architectures");
  if (names != object.end() && names->is_array() && names->size() == 1 && (*names)[0].is_string() &&
      (*names)[0].get<std::string>().ends_with(kClassifies)) {
    config.set_classifier(classes_of(path, keys, object));
  }
  const HfKeys::Names ignored(ignored_keys.begin(), ignored_keys.end());
  const std::vector<std::string> unknown = keys.check_all_read(architecture, ignored);
  if (!unknown.empty()) {
    constexpr size_t kMaxListed = 100, kMaxNbytes = 3000;
    log_once("warning",
             fmt::format("{}: keys that nothing is known of here are ignored: {} (no warning for "
                         "those in model.ignore_keys)",
                         path, join_few(unknown, ", ", kMaxListed, kMaxNbytes)));
  }
  return config;
}

HfTokenIds parse_hf_token_ids(const std::string& path, std::string_view text) {
  const json object = parse_object(path, text);
  const HfKeys keys(path, object);
  return {keys.token_ids("bos_token_id"), keys.token_ids("eos_token_id"),
          keys.token_ids("pad_token_id")};
}

std::string hf_config_json(const FamilyConfig& config, DType dtype, const HfTokenIds& ids) {
  json object = config.family().write_hf(config);
  if (const ClassifierConfig* c = config.classifier()) {
    const Pooling usual = config.family().is_causal ? Pooling::kLast : Pooling::kCls;
    if (c->pooling != usual) {
      throw ConfigError(
          fmt::format("export: model.pooling = {}, transformers' models of {} have {}",
                      name_of(c->pooling), config.family().name, name_of(usual)));
    }
    const std::string name = object["architectures"][0];
    object["architectures"] = {fmt::format("{}{}", base_of(name), kClassifies)};
    for (size_t i = 0; i < c->classes.size(); ++i) {
      object["id2label"][std::to_string(i)] = c->classes[i];
      object["label2id"][c->classes[i]] = i;
    }
  }
  add_ids(object, ids);
  object["torch_dtype"] = torch_name(dtype);
  object["use_cache"] = true;
  return object.dump(2) + "\n";
}

std::string hf_generation_json(const HfTokenIds& ids) {
  json object = json::object();
  add_ids(object, ids);
  return object.dump(2) + "\n";
}

std::string hf_generation_json(const HfTokenIds& ids, bool changes_ids, const std::string& path,
                               std::string_view source) {
  json object = parse_strict_json(path, source, kMaxDepth, "the object of a generation");
  if (!object.is_object()) {
    throw InputError(fmt::format("{}: no object, expected that of a generation", path));
  }
  if (changes_ids) {
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) object.erase(key);
    add_ids(object, ids);
  }
  return object.dump(2) + "\n";
}

namespace {

/// What a model is of, with its classes; null for one that is of no family.
std::unique_ptr<FamilyConfig> config_of(const LanguageModel& model) {
  std::unique_ptr<FamilyConfig> config = model.family_config();
  const ClassifierConfig* const classes = model.classifier();
  if (config != nullptr && classes != nullptr) {
    config->set_classifier(classes->classes, classes->pooling);
  }
  return config;
}

}  // namespace

FamilyConfig hf_config_of(const LanguageModel& model) {
  const auto config = config_of(model);
  if (config != nullptr) return *config;
  throw ConfigError(fmt::format("export: transformers has no counterpart of {}", model.kind()));
}

std::map<std::string, HfParameter> hf_parameters_of(Module& root) {
  std::map<std::string, HfParameter> all;
  for (const NamedModule& entry : root.named_modules()) {
    const auto* const model = dynamic_cast<const LanguageModel*>(entry.module);
    const auto config = model == nullptr ? nullptr : config_of(*model);
    if (config == nullptr) continue;
    const std::string prefix = entry.name.empty() ? "" : entry.name + ".";
    const HfLayout layout = config->hf_layout();
    for (HfParameter& p : config->hf_parameters()) {
      const bool has_head = config->classifier() == nullptr;
      if (has_head && config->is_tied() && p.sources[0].name == layout.embedding) {
        HfParameter head = p;
        head.name = "head.weight";
        head.sources[0].name = layout.head;
        all.emplace(prefix + head.name, std::move(head));
      }
      all.emplace(prefix + p.name, std::move(p));
    }
  }
  return all;
}

}  // namespace tessera::nn
