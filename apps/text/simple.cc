// The byte and the char tokenizer.

#include "apps/text/simple.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>

#include "apps/text/bpe.h"
#include "apps/text/tokenizer.h"
#include "apps/text/unicode.h"
#include "core/check.h"
#include "core/formats/strict_json.h"
#include "core/text.h"

namespace tessera::text {
namespace {

/// The characters of a text in order. InputError, with `what` in front, where it is not UTF-8.
template <class F>
void for_each_char(std::string_view text, std::string_view what, F&& f) {
  for (size_t offset = 0; offset < text.size();) {
    const size_t nbytes = utf8_length(text, offset);
    if (nbytes == 0) {
      throw InputError(
          fmt::format("{}: byte {} is not UTF-8 text, expected UTF-8 for the char "
                      "tokenizer (the byte tokenizer takes anything)",
                      what, offset));
    }
    f(text.substr(offset, nbytes), offset);
    offset += nbytes;
  }
}

void check_id(int32_t id, int64_t vocab_size) {
  if (id < 0 || id >= vocab_size) {
    throw InputError(fmt::format("tokenizer: id {}, expected one in [0, {})", id, vocab_size));
  }
}

/// The tokenizer.json of Hugging Face's tokenizers for a tokenizer that cuts with `pre_tokenizer`
/// and looks the pieces up, with `model` and `decoder`; and what else transformers wants to know.
std::map<std::string, std::string> hf_files_of(const nlohmann::ordered_json& pre_tokenizer,
                                               const nlohmann::ordered_json& decoder,
                                               const nlohmann::ordered_json& model) {
  const nlohmann::ordered_json tokenizer = {{"version", "1.0"},
                                            {"truncation", nullptr},
                                            {"padding", nullptr},
                                            {"added_tokens", nlohmann::ordered_json::array()},
                                            {"normalizer", nullptr},
                                            {"pre_tokenizer", pre_tokenizer},
                                            {"post_processor", nullptr},
                                            {"decoder", decoder},
                                            {"model", model}};
  const nlohmann::ordered_json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                         {"clean_up_tokenization_spaces", false}};
  return {{"tokenizer.json", tokenizer.dump(1) + "\n"},
          {"tokenizer_config.json", config.dump(2) + "\n"}};
}

class ByteTokenizer : public Tokenizer {
 public:
  std::string_view name() const override { return "byte"; }
  int64_t vocab_size() const override { return 256; }
  void encode(std::string_view text, std::vector<int32_t>& ids,
              const EncodeOptions&) const override {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(text.data());
    ids.insert(ids.end(), bytes, bytes + text.size());
  }
  std::string decode(const std::vector<int32_t>& ids, const DecodeOptions&) const override {
    std::string text;
    for (const int32_t id : ids) {
      check_id(id, vocab_size());
      text += static_cast<char>(id);
    }
    return text;
  }
  std::string token(int32_t id) const override {
    return id >= 0 && id < 256 ? std::string(1, static_cast<char>(id)) : std::string();
  }
  int32_t id_of(std::string_view token) const override {
    return token.size() == 1 ? static_cast<unsigned char>(token[0]) : -1;
  }
  size_t next_cut(std::string_view text, size_t from) const override {
    return std::min(from + 1, text.size());
  }
  std::string to_json() const override { return nlohmann::json{{"type", "byte"}}.dump() + "\n"; }
  std::map<std::string, std::string> hf_files() const override {
    const nlohmann::ordered_json byte_level = {{"type", "ByteLevel"},
                                               {"add_prefix_space", false},
                                               {"trim_offsets", false},
                                               {"use_regex", false}};
    nlohmann::ordered_json vocab = nlohmann::ordered_json::object();
    for (int id = 0; id < 256; ++id) vocab[byte_character(static_cast<unsigned char>(id))] = id;
    const nlohmann::ordered_json model = {{"type", "BPE"},
                                          {"dropout", nullptr},
                                          {"unk_token", nullptr},
                                          {"continuing_subword_prefix", nullptr},
                                          {"end_of_word_suffix", nullptr},
                                          {"fuse_unk", false},
                                          {"byte_fallback", false},
                                          {"ignore_merges", false},
                                          {"vocab", std::move(vocab)},
                                          {"merges", nlohmann::ordered_json::array()}};
    return hf_files_of(byte_level, byte_level, model);
  }
};

class CharTokenizer : public Tokenizer {
 public:
  /// `chars` are distinct characters in UTF-8; the position is the id.
  explicit CharTokenizer(std::vector<std::string> chars) : chars_(std::move(chars)) {
    for (const std::string& c : chars_) {
      ids_.emplace(c, static_cast<int32_t>(ids_.size()));
    }
  }
  std::string_view name() const override { return "char"; }
  int64_t vocab_size() const override { return static_cast<int64_t>(chars_.size()); }
  void encode(std::string_view text, std::vector<int32_t>& ids,
              const EncodeOptions&) const override {
    for_each_char(text, "tokenizer", [&](std::string_view c, size_t offset) {
      const auto found = ids_.find(std::string(c));
      if (found == ids_.end()) {
        throw InputError(
            fmt::format("tokenizer: character '{}' at byte {} is not in the vocabulary of {}", c,
                        offset, chars_.size()));
      }
      ids.push_back(found->second);
    });
  }
  std::string decode(const std::vector<int32_t>& ids, const DecodeOptions&) const override {
    std::string text;
    for (const int32_t id : ids) {
      check_id(id, vocab_size());
      text += chars_[static_cast<size_t>(id)];
    }
    return text;
  }
  std::string token(int32_t id) const override {
    return id >= 0 && id < vocab_size() ? chars_[static_cast<size_t>(id)] : std::string();
  }
  int32_t id_of(std::string_view token) const override {
    const auto found = ids_.find(std::string(token));
    return found == ids_.end() ? -1 : found->second;
  }
  size_t next_cut(std::string_view text, size_t from) const override {
    size_t at = std::min(from + 1, text.size());
    while (at < text.size() && (text[at] & 0xc0) == 0x80) ++at;
    return at;
  }
  std::string to_json() const override {
    return nlohmann::json{{"type", "char"}, {"chars", chars_}}.dump() + "\n";
  }
  std::map<std::string, std::string> hf_files() const override {
    nlohmann::ordered_json vocab = nlohmann::ordered_json::object();
    auto& members = vocab.get_ref<nlohmann::ordered_json::object_t&>();
    // Appended without a search for the key: they are distinct.
    for (size_t id = 0; id < chars_.size(); ++id) members.emplace_back(chars_[id], id);
    // A token that the vocabulary lacks: another character is an error there as here.
    return hf_files_of({{"type", "Split"},
                        {"pattern", {{"Regex", "[\\s\\S]"}}},
                        {"behavior", "Isolated"},
                        {"invert", false}},
                       nlohmann::ordered_json::object({{"type", "Fuse"}}),
                       {{"type", "WordLevel"}, {"vocab", vocab}, {"unk_token", "<unknown>"}});
  }

 private:
  std::vector<std::string> chars_;
  std::unordered_map<std::string, int32_t> ids_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer() {
  return std::make_unique<ByteTokenizer>();
}

std::unique_ptr<Tokenizer> make_char_tokenizer(std::string_view text) {
  // UTF-8 bytes compare like code points.
  std::set<std::string_view> distinct;
  for_each_char(text, "tokenizer", [&](std::string_view c, size_t) { distinct.insert(c); });
  return std::make_unique<CharTokenizer>(
      std::vector<std::string>(distinct.begin(), distinct.end()));
}

std::unique_ptr<Tokenizer> parse_char_tokenizer(const JsonNode& root) {
  const auto fail = [&](const std::string& found, std::string_view expected) {
    throw InputError(fmt::format("{}: {}, expected {}", root.file(), found, expected));
  };
  const JsonNode chars = root["chars"];
  if (!chars.value().is_array() || chars.value().empty()) {
    fail("no characters", "\"chars\": [...]");
  }
  std::vector<std::string> list;
  std::set<std::string> seen;
  for (const auto& entry : chars.value()) {
    const std::string text = entry.is_string() ? entry.get<std::string>() : "";
    if (text.empty() || utf8_length(text, 0) != text.size()) {
      fail(fmt::format("entry {} is {}", list.size(), json_text(entry)), "one character");
    }
    if (!seen.insert(text).second) {
      fail(fmt::format("character {} twice", json_text(entry)), "each once");
    }
    list.push_back(text);
  }
  return std::make_unique<CharTokenizer>(std::move(list));
}

}  // namespace tessera::text
