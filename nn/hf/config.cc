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

FamilyConfig hf_config_of(const LanguageModel& model) {
  const auto config = model.family_config();
  if (config != nullptr) return *config;
  throw ConfigError(fmt::format("export: transformers has no counterpart of {}", model.kind()));
}

std::map<std::string, HfParameter> hf_parameters_of(Module& root) {
  std::map<std::string, HfParameter> all;
  for (const NamedModule& entry : root.named_modules()) {
    const auto* const model = dynamic_cast<const LanguageModel*>(entry.module);
    const auto config = model == nullptr ? nullptr : model->family_config();
    if (config == nullptr) continue;
    const std::string prefix = entry.name.empty() ? "" : entry.name + ".";
    const HfLayout layout = config->hf_layout();
    for (HfParameter& p : config->hf_parameters()) {
      if (config->is_tied() && p.sources[0].name == layout.embedding) {
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
