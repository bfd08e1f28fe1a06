#include "apps/text/gguf_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "apps/text/pretokenize.h"
#include "apps/text/tokenizer.h"
#include "core/check.h"
#include "core/log.h"

namespace tessera::text {
namespace {

using nlohmann::json;

/// tokenizer.ggml.token_type.
enum TokenType : int32_t { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

[[noreturn]] void refuse(std::string_view what) {
  throw ConfigError(fmt::format(
      "export: llama.cpp has no tokenizer like this one: {}, it would give a text other ids",
      what));
}

std::string type_of(const json& object) {
  return object.is_object() ? object.value("type", "") : "";
}

/// A component, or those of a sequence, in their order.
std::vector<json> components(const json& file, const char* key, const char* members) {
  const auto found = file.find(key);
  if (found == file.end() || found->is_null()) return {};
  if (type_of(*found) != "Sequence") return {*found};
  return found->at(members).get<std::vector<json>>();
}

/// What llama.cpp calls the pattern that cuts a text into words. Each name there says too whether a word
/// that is a token is taken without its merges.
std::string name_of_pattern(const json& file, bool ignores_merges, bool has_merges) {
  std::optional<KnownPattern> pattern;
  bool is_byte_level = false;
  for (const json& part : components(file, "pre_tokenizer", "pretokenizers")) {
    const std::string type = type_of(part);
    if (type == "ByteLevel") {
      is_byte_level = true;
      if (part.value("add_prefix_space", true)) refuse("a space is put before a text");
      if (part.value("use_regex", true)) pattern = KnownPattern{KnownPattern::kGpt2};
    } else if (type == "Split" && part.at("pattern").contains("Regex")) {
      pattern = known_pattern(part.at("pattern").at("Regex").get<std::string>());
      if (!pattern) refuse("words are cut by a pattern of its own");
    } else {
      refuse(fmt::format("its pre_tokenizer has {}", type));
    }
  }
  if (!is_byte_level) refuse("its BPE is over characters, not bytes");
  if (!pattern) {  // each byte is a token
    if (has_merges) refuse("words are not cut before they are merged");
    return "gpt-2";
  }
  std::string name;
  bool its_ignores_merges = false;
  if (pattern->family == KnownPattern::kGpt2) {
    name = "gpt-2";
  } else if (pattern->family == KnownPattern::kGpt4) {
    if (pattern->max_digits == 1) {
      name = "qwen2";
    } else {
      its_ignores_merges = ignores_merges;  // the pattern has a name for each
      name = ignores_merges ? "llama-bpe" : "smaug-bpe";
    }
  } else {
    its_ignores_merges = !pattern->contractions;
    name = pattern->contractions ? "gpt-4o" : "tekken";
  }
  if (has_merges && its_ignores_merges != ignores_merges) {
    refuse(fmt::format("ignore_merges is {}, that of {} is {}", ignores_merges, name,
                       its_ignores_merges));
  }
  return name;
}

/// Whether the post-processor puts a token before a text.
bool adds_begin(const json& file) {
  for (const json& part : components(file, "post_processor", "processors")) {
    if (type_of(part) != "TemplateProcessing") continue;
    const json& single = part.at("single");
    return !single.empty() && single.front().contains("SpecialToken");
  }
  return false;
}

struct Vocabulary {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
};

Vocabulary read_vocabulary(const json& file, int64_t vocab_size) {
  Vocabulary v;
  const auto set = [&](int64_t id, const std::string& token, TokenType type) {
    TESSERA_CHECK_AS(ConfigError, id >= 0 && id < vocab_size,
                     "export: token {} has id {}, the model's vocabulary is {}", token, id,
                     vocab_size);
    v.tokens[static_cast<size_t>(id)] = token, v.types[static_cast<size_t>(id)] = type;
  };
  for (int64_t id = 0; id < vocab_size; ++id) {
    v.tokens.push_back(fmt::format("[PAD{}]", id));
    v.types.push_back(kUnused);
  }
  const json& model = file.at("model");
  const std::string unknown =
      model.contains("unk_token") && model["unk_token"].is_string() ? model["unk_token"] : json("");
  const bool has_bytes = model.value("byte_fallback", false);
  for (const auto& [token, id] : model.at("vocab").items()) {
    const bool is_byte =
        has_bytes && token.size() == 6 && token.starts_with("<0x") && token.ends_with(">");
    set(id.get<int64_t>(), token,
        is_byte                                ? kByte
        : !unknown.empty() && token == unknown ? kUnknown
                                               : kNormal);
  }
  for (const json& added : file.value("added_tokens", json::array())) {
    const auto content = added.at("content").get<std::string>();
    if (has_bytes && content == unknown) continue;
    set(added.at("id").get<int64_t>(), content,
        added.value("special", false) ? kControl : kUserDefined);
  }
  return v;
}

std::pair<std::string, std::string> merge_of(const json& merge) {
  if (merge.is_array()) return {merge.at(0).get<std::string>(), merge.at(1).get<std::string>()};
  const auto text = merge.get<std::string>();
  const size_t space = text.find(' ', 1);
  return {text.substr(0, space), text.substr(space + 1)};
}

void add_byte_level(GgufFields& fields, const json& file) {
  for (const json& part : components(file, "normalizer", "normalizers")) {
    if (type_of(part) != "NFC") refuse(fmt::format("its normalizer has {}", type_of(part)));
  }
  const json& model = file.at("model");
  const json& merges = model.at("merges");
  fields.emplace_back("tokenizer.ggml.model", std::string("gpt2"));
  fields.emplace_back("tokenizer.ggml.pre",
                      name_of_pattern(file, model.value("ignore_merges", false), !merges.empty()));
  std::vector<std::string> texts;
  for (const json& merge : merges) {
    const auto [left, right] = merge_of(merge);
    texts.push_back(left + " " + right);
  }
  fields.emplace_back("tokenizer.ggml.merges", std::move(texts));
}

void add_byte_fallback(GgufFields& fields, const json& file, const Vocabulary& v) {
  bool has_prefix = false;
  for (const json& part : components(file, "normalizer", "normalizers")) {
    const std::string type = type_of(part);
    if (type == "Prepend") {
      has_prefix = true;
    } else if (type != "Replace") {
      refuse(fmt::format("its normalizer has {}", type));
    }
  }
  for (const json& part : components(file, "pre_tokenizer", "pretokenizers")) {
    if (type_of(part) != "Metaspace") {
      refuse(fmt::format("its pre_tokenizer has {}", type_of(part)));
    }
    has_prefix = has_prefix || part.value("prepend_scheme", "always") != "never";
    if (part.value("split", true)) refuse("words are cut before they are merged");
  }
  std::map<std::string, float> scores;
  float rank = 0;
  for (const json& merge : file.at("model").at("merges")) {
    const auto [left, right] = merge_of(merge);
    scores.emplace(left + right, -(++rank));
  }
  std::vector<float> of_tokens;
  for (const std::string& token : v.tokens) {
    const auto found = scores.find(token);
    of_tokens.push_back(found == scores.end() ? 0 : found->second);
  }
  fields.emplace_back("tokenizer.ggml.model", std::string("llama"));
  fields.emplace_back("tokenizer.ggml.pre", std::string("default"));
  fields.emplace_back("tokenizer.ggml.scores", std::move(of_tokens));
  fields.emplace_back("tokenizer.ggml.add_space_prefix", has_prefix);
}

json parse_file(const std::map<std::string, std::string>& files, const char* name) {
  const auto found = files.find(name);
  return found == files.end() ? json::object() : json::parse(found->second);
}

/// A text of tokenizer_config.json, or of a token there with its flags; empty if there is none.
std::string text_of(const json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end()) return {};
  if (found->is_object()) return found->value("content", "");
  return found->is_string() ? found->get<std::string>() : std::string();
}

/// The ids of the model, or that of the token which the tokenizer's configuration names, or `usual` (-1:
/// none).
std::vector<int64_t> ids_or_token(const std::vector<int64_t>& ids, const json& config,
                                  const char* key, const Vocabulary& v, int64_t usual) {
  if (!ids.empty()) return ids;
  const std::string token = text_of(config, key);
  const auto found = std::find(v.tokens.begin(), v.tokens.end(), token);
  if (!token.empty() && found != v.tokens.end()) return {found - v.tokens.begin()};
  if (usual < 0) return {};
  return {usual};
}

}  // namespace

GgufFields gguf_tokenizer(const std::map<std::string, std::string>& files, const GgufTokenIds& ids,
                          int64_t vocab_size) {
  GgufFields fields;
  const json file = parse_file(files, "tokenizer.json");
  const json config = parse_file(files, "tokenizer_config.json");
  const std::string type = file.contains("model") ? type_of(file["model"]) : "";
  if (type != "BPE") {
    log_warning("export: llama.cpp has no tokenizer like {}: the file has none",
                type.empty() ? "this model, which has none" : "one of type " + type);
    fields.emplace_back("tokenizer.ggml.model", std::string("none"));
    return fields;
  }
  Vocabulary v = read_vocabulary(file, vocab_size);
  if (file["model"].value("byte_fallback", false)) {
    add_byte_fallback(fields, file, v);
  } else {
    add_byte_level(fields, file);
  }
  const bool has_begin = adds_begin(file);
  const DocumentTokens usual =
      document_tokens(*parse_tokenizer(files.at("tokenizer.json"), "tokenizer.json"));
  const std::vector<int64_t> bos = ids_or_token(ids.bos, config, "bos_token", v,
                                                has_begin ? usual.begin : -1),
                             eos = ids_or_token(ids.eos, config, "eos_token", v, usual.end),
                             pad = ids_or_token(ids.pad, config, "pad_token", v, -1);
  fields.emplace_back("tokenizer.ggml.tokens", std::move(v.tokens));
  fields.emplace_back("tokenizer.ggml.token_type", std::move(v.types));
  const auto add_id = [&](const char* key, const std::vector<int64_t>& of_kind, size_t index) {
    if (index < of_kind.size()) fields.emplace_back(key, static_cast<uint32_t>(of_kind[index]));
  };
  add_id("tokenizer.ggml.bos_token_id", bos, 0);
  add_id("tokenizer.ggml.eos_token_id", eos, 0);
  add_id("tokenizer.ggml.eot_token_id", eos, 1);  // what ends a turn, of models that have both
  add_id("tokenizer.ggml.padding_token_id", pad, 0);
  fields.emplace_back("tokenizer.ggml.add_bos_token", has_begin);
  fields.emplace_back("tokenizer.ggml.add_eos_token", false);
  const auto chat = files.find("chat_template.jinja");
  std::string text = chat != files.end() ? chat->second : text_of(config, "chat_template");
  if (!text.empty()) fields.emplace_back("tokenizer.chat_template", std::move(text));
  return fields;
}

}  // namespace tessera::text
