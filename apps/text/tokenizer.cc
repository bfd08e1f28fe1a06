#include "apps/text/tokenizer.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "apps/text/hf_tokenizer.h"
#include "apps/text/simple.h"
#include "core/check.h"
#include "core/files.h"
#include "core/formats/strict_json.h"

namespace tessera::text {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxFileNbytes = int64_t{64} << 20;  // larger than all that are in use
constexpr int64_t kMaxCompanionNbytes = int64_t{16} << 20;

nlohmann::json parse_json(std::string_view text, const std::string& name,
                          std::string_view expected) {
  constexpr JsonRules kRules{.max_depth = 16, .num_free_elements = 0x110000};
  return parse_strict_json(name, text, kRules, expected);
}

/// What transformers keeps beside tokenizer.json, as far as it is there.
std::map<std::string, std::string> read_companions(const fs::path& directory) {
  std::map<std::string, std::string> files;
  for (const char* name : kCompanionFiles) {
    std::error_code ignored;
    const fs::path path = directory / name;
    if (fs::exists(path, ignored)) {
      files.emplace(name, read_regular_file(path.string(), kMaxCompanionNbytes));
    }
  }
  return files;
}

/// That of tokenizer_config.json; -1 if it names none that there is.
int32_t eos_token(const Tokenizer& tokenizer) {
  const auto files = tokenizer.files();
  const auto found = files.find("tokenizer_config.json");
  if (found == files.end()) return -1;
  const auto config = nlohmann::json::parse(found->second, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object() || !config.contains("eos_token")) return -1;
  const nlohmann::json& eos = config["eos_token"];
  const nlohmann::json content = eos.is_object() && eos.contains("content") ? eos["content"] : eos;
  return content.is_string() ? tokenizer.id_of(content.get<std::string>()) : -1;
}

std::unique_ptr<HfTokenizer> parse_hf(const JsonNode& root, std::string_view json) {
  return std::make_unique<HfTokenizer>(root, std::string(json));
}

}  // namespace

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  std::vector<int32_t> ids;
  encode(text, ids, options);
  return ids;
}

const std::vector<AddedToken>& Tokenizer::added_tokens() const {
  static const std::vector<AddedToken> none;
  return none;
}

size_t Tokenizer::next_cut(std::string_view text, size_t) const {
  return text.size();
}

DocumentTokens document_tokens(const Tokenizer& tokenizer) {
  DocumentTokens tokens;
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>",
                           "<\uff5cend\u2581of\u2581sentence\uff5c>", "[SEP]"}) {
    if (tokens.end < 0) tokens.end = tokenizer.id_of(name);
  }
  if (tokens.end < 0) tokens.end = eos_token(tokenizer);
  // A text of [CLS] and [SEP], or of a token of the beginning and perhaps one of the end.
  const std::vector<int32_t> around = tokenizer.encode("", {.add_special_tokens = true});
  if (around.empty() || around.front() == tokens.end) {
    tokens.begin = tokens.end;
  } else {
    tokens.begin = around.front();
  }
  return tokens;
}

std::string decode_generated(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  std::string text;
  std::vector<int32_t> known;
  const auto flush = [&] {
    text += tokenizer.decode(known);
    known.clear();
  };
  for (const int32_t id : ids) {
    if (id < 0 || (id < tokenizer.vocab_size() && !tokenizer.token(id).empty())) {
      known.push_back(id);
      continue;
    }
    flush();
    text += "\xef\xbf\xbd";
  }
  flush();
  return text;
}

namespace {

/// The text ends with the beginning of a character.
bool ends_inside_character(std::string_view text) {
  for (size_t behind = 1; behind <= std::min<size_t>(text.size(), 3); ++behind) {
    const auto byte = static_cast<unsigned char>(text[text.size() - behind]);
    if ((byte & 0xc0u) == 0x80u) continue;
    const size_t nbytes = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    return nbytes > behind;
  }
  return false;
}

}  // namespace

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, const std::vector<int32_t>& before)
    : tokenizer_(tokenizer) {
  constexpr size_t kMaxBefore = 16;
  ids_.assign(before.end() - static_cast<std::ptrdiff_t>(std::min(before.size(), kMaxBefore)),
              before.end());
  num_shown_ = ids_.size();
  shown_ = decode_generated(tokenizer_, ids_);
}

std::string StreamDecoder::add(int32_t id) {
  ids_.push_back(id);
  const std::string all = decode_generated(tokenizer_, ids_);
  // What is shown stays: where this token changes it (a space before a comma), more may follow.
  if (!all.starts_with(shown_) || ends_inside_character(all)) return "";
  std::string added = all.substr(shown_.size());
  // From now on only what this call has shown stands before.
  ids_.erase(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(num_shown_));
  num_shown_ = ids_.size();
  shown_ = decode_generated(tokenizer_, ids_);
  return added;
}

std::string StreamDecoder::finish() {
  const std::string all = decode_generated(tokenizer_, ids_);
  num_shown_ = ids_.size();
  std::string added = all.substr(std::min(all.size(), shown_.size()));
  shown_ = all;
  return added;
}

std::unique_ptr<Tokenizer> parse_tokenizer(std::string_view json, const std::string& name) {
  const nlohmann::json parsed = parse_json(json, name, "a saved tokenizer");
  const auto fail = [&](const std::string& found, std::string_view expected) {
    throw InputError(fmt::format("{}: {}, expected {}", name, found, expected));
  };
  if (!parsed.is_object()) fail("not a JSON object", "a saved tokenizer");
  const JsonNode root(parsed, name);
  if (!root["model"].is_null()) return parse_hf(root, json);
  if (root["type"].is_null()) {
    fail("neither type nor model", "\"type\": \"byte\" or \"char\", or \"model\": {...}");
  }
  if (root["type"].one_of({"byte", "char"}) == 0) return make_byte_tokenizer();
  return parse_char_tokenizer(root);
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
  std::error_code ignored;
  fs::path file(path);
  if (fs::is_directory(file, ignored)) {
    for (const auto& [merges, encoder] :
         {std::pair("vocab.bpe", "encoder.json"), std::pair("merges.txt", "vocab.json")}) {
      if (fs::exists(file / "tokenizer.json", ignored) || !fs::exists(file / merges, ignored)) {
        continue;
      }
      const std::string encoder_path = (file / encoder).string();
      return parse_gpt2(read_regular_file((file / merges).string(), kMaxFileNbytes),
                        fs::exists(encoder_path, ignored)
                            ? read_regular_file(encoder_path, kMaxFileNbytes)
                            : std::string(),
                        (file / merges).string());
    }
    file /= "tokenizer.json";
  }
  const std::string text = read_regular_file(file.string(), kMaxFileNbytes);
  if (file.extension() == ".bpe") return parse_gpt2(text, "", file.string());
  auto tokenizer = parse_tokenizer(text, file.string());
  if (auto* hf = dynamic_cast<HfTokenizer*>(tokenizer.get())) {
    hf->set_companions(read_companions(file.parent_path()));
  }
  return tokenizer;
}

}  // namespace tessera::text
