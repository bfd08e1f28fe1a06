#include "apps/model_from.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "apps/config_table.h"
#include "apps/text/tokenizer.h"
#include "core/text.h"
#include "dist/checkpoint/huggingface.h"
#include "dist/checkpoint/peft.h"

namespace tessera::apps {
namespace {

/// Makes `config` what was found, but for what may change in the course of a training.
void take(nn::FamilyConfig& config, const nn::FamilyConfig& found) {
  nn::FamilyConfig before = config;
  config = found;
  const nn::ModelSettings old_rows = before.settings(), rows = config.settings();
  for (size_t i = 0; i < rows.rows().size(); ++i) {
    if (rows.rows()[i].may_change) rows.rows()[i].assign(old_rows.rows()[i].get());
  }
}

std::string text_of(const Field& field) {
  return std::visit([](const auto& value) { return fmt::format("{}", value); }, field.get());
}

/// A text becomes ids by the model's own tokenizer, unless data.tokenizer names a file.
void take_tokenizer(Config& config) {
  DataConfig& data = config.data;
  if (!data.tokens.empty()) return;
  const std::string key = !data.chat.empty()         ? "data.chat"
                          : !data.preference.empty() ? "data.preference"
                          : !data.classify.empty()   ? "data.classify"
                          : !data.text.empty()       ? "data.text"
                                                     : "data.sources";
  const bool is_given = config.is_given("data.tokenizer");
  if (is_given && data.tokenizer != "byte" && data.tokenizer != "char") return;
  std::string name;
  try {
    name = text::load_tokenizer(config.model.from)->name();
  } catch (const InputError& error) {
    // Sources may all be token shards; if they are not, this is said when they are read.
    if (!data.sources.empty() && !is_given) {
      data.tokenizer = config.model.from;
      return;
    }
    throw ConfigError(fmt::format(
        "{}: {} with model.from = {}, whose tokenizer cannot be used ({}): a text would become "
        "other ids than the model knows; expected data.tokenizer, the path of the model's, or "
        "data.tokens, shards of its ids",
        config.origin(key), key, config.model.from, error.what()));
  }
  if (is_given && data.tokenizer != name) {
    throw ConfigError(fmt::format("{}: data.tokenizer = {}, expected {} of {}",
                                  config.origin("data.tokenizer"), data.tokenizer, name,
                                  config.model.from));
  }
  data.tokenizer = config.model.from;
}

}  // namespace

std::vector<std::string> ignored_keys(const ModelConfig& config) {
  std::vector<std::string> keys;
  std::istringstream words(config.ignore_keys);
  for (std::string word; std::getline(words, word, ',');) {
    word.erase(0, word.find_first_not_of(' '));
    word.erase(word.find_last_not_of(' ') + 1);
    if (!word.empty()) keys.push_back(std::move(word));
  }
  return keys;
}

void take_model_from(Config& config) {
  if (config.model.from.empty()) return;
  const std::string path = config.model.from + "/config.json";
  const auto [found, ids] = dist::read_hf_model(config.model.from, ignored_keys(config.model));
  Config taken = config;
  taken.model.kind = found.family().name;
  take(taken.model.selected(), found);
  taken.model.vocab = found.vocab_size();
  if (const nn::ClassifierConfig* classifier = found.classifier()) {
    for (const std::string& name : classifier->classes) {
      if (name.find(',') == std::string::npos) continue;
      throw ConfigError(fmt::format("{}: id2label has \"{}\", expected names without commas", path,
                                    shorten(name)));
    }
    taken.model.classes = fmt::format("{}", fmt::join(classifier->classes, ","));
  }
  taken.model.context = found.context_length();
  // Nothing is computed with these: other ones may be given.
  const auto set_ids = [&](const char* key, std::string& text, const std::vector<int64_t>& values) {
    if (!config.origins.contains(key)) text = fmt::format("{}", fmt::join(values, ","));
  };
  set_ids("model.bos_ids", taken.model.bos_ids, ids.bos);
  set_ids("model.eos_ids", taken.model.eos_ids, ids.eos);
  set_ids("model.pad_ids", taken.model.pad_ids, ids.pad);
  if (!config.origins.contains("model.source")) taken.model.source = config.model.from;
  // What is trained on may be shorter; the model's own limit stays.
  taken.model.max_positions = taken.model.context;
  if (config.origins.contains("model.context")) {
    taken.model.context = std::min(taken.model.context, config.model.context);
  }
  const auto given = config_fields(config), fields = config_fields(taken);
  for (const Field& field : fields) {
    if (!field.key.starts_with("model.")) continue;
    try {
      field.check();
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("{}: {}", path, error.what()));
    }
  }
  for (size_t i = 0; i < fields.size(); ++i) {
    if (!fields[i].key.starts_with("model.") || !config.origins.contains(fields[i].key)) continue;
    if (text_of(given[i]) == text_of(fields[i])) continue;
    throw ConfigError(fmt::format("{}: {} = {}, expected {} of {}", config.origin(fields[i].key),
                                  fields[i].key, text_of(given[i]), text_of(fields[i]), path));
  }
  for (const Field& field : fields) {
    if (!field.key.starts_with("model.")) continue;
    config.origins.try_emplace(std::string(field.key), path);
  }
  config.model = taken.model;
  take_tokenizer(config);
}

void take_lora_from(Config& config) {
  LoraConfig& lora = config.lora;
  if (lora.from.empty()) return;
  const std::string path = fmt::format("{}/{}", lora.from, dist::PeftReader::kConfigName);
  Config taken = config;
  taken.lora.options = dist::PeftReader(lora.from).options();
  if (config.is_given("lora.dropout")) taken.lora.options.dropout = lora.options.dropout;
  const auto given = config_fields(config), fields = config_fields(taken);
  for (size_t i = 0; i < fields.size(); ++i) {
    const std::string_view key = fields[i].key;
    if (!key.starts_with("lora.")) continue;
    if (!config.is_given(key)) {
      config.origins.emplace(key, path);
    } else if (text_of(given[i]) != text_of(fields[i])) {
      throw ConfigError(fmt::format("{}: {} = {}, expected {} of {}", config.origin(key), key,
                                    shorten(text_of(given[i])), shorten(text_of(fields[i])), path));
    }
  }
  lora.options = taken.lora.options;
}

}  // namespace tessera::apps
