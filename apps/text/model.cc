#include "apps/text/model.h"

#include <fmt/format.h>

#include "apps/text/bpe.h"
#include "apps/text/unicode.h"
#include "apps/text/wordpiece.h"
#include "core/check.h"
#include "core/formats/strict_json.h"
#include "core/text.h"

namespace tessera::text {
namespace {

class BpeModel : public Model {
 public:
  BpeModel(const Vocabulary& vocabulary, const std::vector<Bpe::Merge>& merges, BpeRules rules,
           bool is_byte_level)
      : vocabulary_(vocabulary),
        merges_(merges),
        is_whole_(rules.ignore_merges || !rules.prefix.empty() || !rules.suffix.empty()),
        bpe_(vocabulary, merges, std::move(rules), is_byte_level) {}
  void encode(std::string_view word, std::vector<int32_t>& ids) const override {
    bpe_.encode(word, ids);
  }
  bool is_byte_level() const override { return bpe_.is_byte_level(); }
  bool can_cut_at(std::string_view mark) const override {
    if (is_whole_ || vocabulary_.id_of(mark) < 0) return false;
    for (const Bpe::Merge& merge : merges_) {
      const std::string& token = *vocabulary_.token(merge.both);
      for (size_t at = token.find(mark, 1); at != std::string::npos;
           at = token.find(mark, at + 1)) {
        if (token.compare(at - std::min(at, mark.size()), mark.size(), mark) != 0) return false;
      }
    }
    return true;
  }

 private:
  const Vocabulary& vocabulary_;
  std::vector<Bpe::Merge> merges_;
  bool is_whole_;
  Bpe bpe_;
};

class WordPieceModel : public Model {
 public:
  WordPieceModel(const Vocabulary& vocabulary, WordPiece::Rules rules)
      : model_(vocabulary, std::move(rules)) {}
  void encode(std::string_view word, std::vector<int32_t>& ids) const override {
    model_.encode(word, ids);
  }

 private:
  WordPiece model_;
};

class WordLevelModel : public Model {
 public:
  WordLevelModel(const Vocabulary& vocabulary, std::string unk_token)
      : vocabulary_(vocabulary), unk_token_(std::move(unk_token)) {}
  void encode(std::string_view word, std::vector<int32_t>& ids) const override {
    int32_t id = vocabulary_.id_of(word);
    if (id < 0) id = vocabulary_.id_of(unk_token_);
    if (id < 0) {
      throw InputError(
          fmt::format("tokenizer: '{}' is not in the vocabulary, and neither is "
                      "model.unk_token = '{}'",
                      shorten(word), unk_token_));
    }
    ids.push_back(id);
  }

 private:
  const Vocabulary& vocabulary_;
  std::string unk_token_;
};

std::unique_ptr<Vocabulary> parse_vocabulary(const JsonNode& node) {
  if (!node.value().is_object()) node.fail("an object of tokens and their ids");
  auto vocabulary = std::make_unique<Vocabulary>();
  // Gaps cost memory; files have few.
  const auto max_id = static_cast<int64_t>(node.value().size()) * 2 + 1024;
  vocabulary->reserve(node.value().size());
  for (const auto& [token, value] : node.value().get_ref<const nlohmann::json::object_t&>()) {
    const int64_t id = json_size(value);
    if (id < 0 || id > max_id) {
      throw InputError(fmt::format("{}: the id of '{}' is {}, expected 0 to {} for {} tokens",
                                   node.place(), shorten(token), json_text(value), max_id,
                                   node.value().size()));
    }
    const auto own = static_cast<int32_t>(id);
    if (const std::string* other = vocabulary->token(own)) {
      throw InputError(fmt::format("{}: id {} of '{}' and of '{}', expected each once",
                                   node.place(), own, shorten(*other), shorten(token)));
    }
    vocabulary->add(token, own);
  }
  return vocabulary;
}

/// "a b", or ["a", "b"].
std::pair<std::string_view, std::string_view> parse_merge(const JsonNode& merges, size_t index) {
  const nlohmann::json& value = merges.value()[index];
  if (value.is_array() && value.size() == 2 && value[0].is_string() && value[1].is_string()) {
    return {value[0].get_ref<const std::string&>(), value[1].get_ref<const std::string&>()};
  }
  if (value.is_string()) {
    const std::string_view text = value.get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space != std::string_view::npos && text.find(' ', space + 1) == std::string_view::npos) {
      return {text.substr(0, space), text.substr(space + 1)};
    }
  }
  merges.at(index).fail("two tokens");
}

std::vector<Bpe::Merge> parse_merges(const JsonNode& node, const Vocabulary& vocabulary,
                                     const std::string& prefix) {
  std::vector<Bpe::Merge> merges;
  const size_t count = node.size();
  merges.reserve(count);
  std::string both;
  for (size_t i = 0; i < count; ++i) {
    const auto [left, right] = parse_merge(node, i);
    const auto id_of = [&](std::string_view token) {
      const int32_t id = vocabulary.id_of(token);
      if (id < 0) node.at(i).fail(fmt::format("'{}' in the vocabulary", shorten(token)));
      return id;
    };
    if (right.size() < prefix.size()) node.at(i).fail("the prefix before the second token");
    both = left;
    both += right.substr(prefix.size());
    merges.push_back({id_of(left), id_of(right), id_of(both), static_cast<uint32_t>(i)});
  }
  return merges;
}

ParsedModel parse_bpe(const JsonNode& node, bool is_byte_level) {
  node.check_keys({"type", "dropout", "unk_token", "continuing_subword_prefix",
                   "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges", "vocab",
                   "merges"});
  const nlohmann::json& dropout = node["dropout"].value();
  if (!dropout.is_null() && dropout != 0) node["dropout"].fail("null: ids that do not vary");
  BpeRules rules;
  rules.unk_token = node["unk_token"].optional_text();
  rules.prefix = node["continuing_subword_prefix"].text_or("");
  rules.suffix = node["end_of_word_suffix"].text_or("");
  rules.fuse_unk = node["fuse_unk"].flag_or(false);
  rules.byte_fallback = node["byte_fallback"].flag_or(false);
  rules.ignore_merges = node["ignore_merges"].flag_or(false);
  ParsedModel parsed{"BPE", parse_vocabulary(node["vocab"]), nullptr};
  const auto merges = parse_merges(node["merges"], *parsed.vocabulary, rules.prefix);
  // With these a word is no mere list of bytes.
  const bool is_plain = rules.prefix.empty() && rules.suffix.empty() && !rules.byte_fallback;
  parsed.model = std::make_unique<BpeModel>(*parsed.vocabulary, merges, std::move(rules),
                                            is_byte_level && is_plain);
  return parsed;
}

}  // namespace

ParsedModel parse_model(const JsonNode& node, bool is_byte_level) {
  if (node.is_null()) node.fail("a model");
  // Old files of BPE name no type.
  if (node["type"].is_null() && !node["merges"].is_null()) return parse_bpe(node, is_byte_level);
  switch (node["type"].one_of({"BPE", "WordPiece", "WordLevel"})) {
    case 0:
      return parse_bpe(node, is_byte_level);
    case 1: {
      node.check_keys(
          {"type", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab"});
      ParsedModel parsed{"WordPiece", parse_vocabulary(node["vocab"]), nullptr};
      WordPiece::Rules rules{node["unk_token"].text(), node["continuing_subword_prefix"].text(),
                             node["max_input_chars_per_word"].integer(0, INT32_MAX)};
      parsed.model = std::make_unique<WordPieceModel>(*parsed.vocabulary, std::move(rules));
      return parsed;
    }
    default:
      break;
  }
  node.check_keys({"type", "vocab", "unk_token"});
  ParsedModel parsed{"WordLevel", parse_vocabulary(node["vocab"]), nullptr};
  parsed.model = std::make_unique<WordLevelModel>(*parsed.vocabulary, node["unk_token"].text());
  return parsed;
}

}  // namespace tessera::text
