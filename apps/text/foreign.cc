// Vocabularies in other files than tokenizer.json: GPT-2's and tiktoken's, made one of those.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/text/bpe.h"
#include "apps/text/byte_level_file.h"
#include "apps/text/pretokenize.h"
#include "apps/text/tokenizer.h"
#include "apps/text/unicode.h"
#include "apps/text/word_cache.h"
#include "core/check.h"
#include "core/formats/strict_json.h"
#include "core/text.h"

namespace tessera::text {
namespace {

using nlohmann::json;

/// The lines of a text with their numbers from 1; the last may end without a line break.
template <class F>
void for_each_line(std::string_view text, F&& f) {
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    if (line.ends_with('\r')) line.remove_suffix(1);
    f(line, ++number);
    begin = end + 1;
  }
}

[[noreturn]] void fail_line(const std::string& name, size_t line, std::string_view found,
                            std::string_view expected) {
  throw InputError(fmt::format("{}:{}: '{}', expected {}", name, line, shorten(found), expected));
}

std::string characters_of(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) text += byte_character(static_cast<unsigned char>(c));
  return text;
}

/// Standard base64 with its padding; false if it is not that.
bool decode_base64(std::string_view text, std::string& out) {
  const auto digit = [](char c) {
    return c >= 'A' && c <= 'Z'   ? c - 'A'
           : c >= 'a' && c <= 'z' ? c - 'a' + 26
           : c >= '0' && c <= '9' ? c - '0' + 52
           : c == '+'             ? 62
           : c == '/'             ? 63
                                  : -1;
  };
  if (text.size() % 4 != 0) return false;
  size_t num_pads = 0;
  while (num_pads < 2 && text.ends_with('=')) {
    text.remove_suffix(1);
    ++num_pads;
  }
  out.clear();
  uint32_t bits = 0;
  int num_bits = 0;
  for (const char c : text) {
    const int value = digit(c);
    if (value < 0) return false;
    bits = bits << 6 | static_cast<uint32_t>(value);
    num_bits += 6;
    if (num_bits < 8) continue;
    num_bits -= 8;
    out += static_cast<char>(bits >> num_bits & 255u);
  }
  return (bits & ((1u << num_bits) - 1)) == 0;
}

}  // namespace

std::unique_ptr<Tokenizer> parse_gpt2(std::string_view merges_text, std::string_view encoder,
                                      const std::string& name) {
  json merges = json::array();
  std::vector<std::string> tokens;  // in the order of their ids, should there be no encoder
  for (const bool is_itself : {true, false}) {
    for (unsigned byte = 0; byte < 256; ++byte) {
      const std::string& character = byte_character(static_cast<unsigned char>(byte));
      const char32_t code = utf8_decode(character.data());
      if ((code == byte) == is_itself) tokens.push_back(character);
    }
  }
  if (const size_t at = find_invalid_utf8(merges_text); at < merges_text.size()) {
    throw InputError(fmt::format("{}: byte {} is not UTF-8 text, expected UTF-8", name, at));
  }
  for_each_line(merges_text, [&](std::string_view line, size_t number) {
    if (line.empty() || line.starts_with("#version")) return;
    const size_t space = line.find(' ');
    if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos) {
      fail_line(name, number, line, "two tokens with a space between them");
    }
    const std::string left(line.substr(0, space)), right(line.substr(space + 1));
    merges.push_back({left, right});
    tokens.push_back(left + right);
  });
  json vocab = json::object();
  if (encoder.empty()) {
    tokens.emplace_back("<|endoftext|>");
    for (size_t id = 0; id < tokens.size(); ++id) vocab.emplace(tokens[id], id);
  } else {
    vocab = parse_strict_json(name + "'s vocabulary", encoder,
                              JsonRules{.max_depth = 1, .num_free_elements = 0x110000},
                              "an object of tokens and their ids");
  }
  json added = json::array();
  const auto end = vocab.is_object() ? vocab.find("<|endoftext|>") : vocab.end();
  if (end != vocab.end() && json_size(*end) >= 0) {
    added.push_back(special_token_json(static_cast<int32_t>(json_size(*end)), "<|endoftext|>"));
  }
  return make_byte_level(std::move(vocab), std::move(merges), byte_level_json(true),
                         std::move(added), false, name);
}

std::unique_ptr<Tokenizer> parse_tiktoken(std::string_view ranks_text, std::string_view pattern,
                                          const std::map<std::string, int32_t>& special,
                                          const std::string& name) {
  std::vector<std::string> tokens;  // as bytes, by rank
  Vocabulary ranks;
  std::string bytes;
  for_each_line(ranks_text, [&](std::string_view line, size_t number) {
    if (line.empty()) return;
    const size_t space = line.find(' ');
    if (space == std::string_view::npos || !decode_base64(line.substr(0, space), bytes) ||
        bytes.empty() || line.substr(space + 1) != std::to_string(tokens.size())) {
      fail_line(name, number, line, fmt::format("a token in base64 and rank {}", tokens.size()));
    }
    if (ranks.id_of(bytes) >= 0) fail_line(name, number, line, "each token once");
    ranks.add(bytes, static_cast<int32_t>(tokens.size()));
    tokens.push_back(bytes);
  });
  json vocab = json::object(), merges = json::array(), added = json::array();
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    const std::string& token = tokens[rank];
    vocab.emplace(characters_of(token), rank);
    // Any two tokens that make this one are merged to it.
    std::vector<std::pair<int32_t, int32_t>> pairs;
    for (size_t at = 1; at < token.size(); ++at) {
      const int32_t left = ranks.id_of(std::string_view(token).substr(0, at));
      const int32_t right = ranks.id_of(std::string_view(token).substr(at));
      if (left >= 0 && right >= 0) pairs.emplace_back(left, right);
    }
    std::sort(pairs.begin(), pairs.end());
    for (const auto& [left, right] : pairs) {
      merges.push_back({characters_of(tokens[static_cast<size_t>(left)]),
                        characters_of(tokens[static_cast<size_t>(right)])});
    }
  }
  std::vector<std::pair<int32_t, std::string>> by_id;
  for (const auto& [content, id] : special) {
    if (id < 0)
      throw InputError(fmt::format("{}: id {} of '{}', expected 0 or more", name, id, content));
    by_id.emplace_back(id, content);
  }
  std::sort(by_id.begin(), by_id.end());
  for (const auto& [id, content] : by_id) {
    vocab.emplace(content, static_cast<uint32_t>(id));  // ids may have gaps
    added.push_back(special_token_json(id, content));
  }
  return make_byte_level(std::move(vocab), std::move(merges), split_by_regex(pattern),
                         std::move(added), true, name);
}

}  // namespace tessera::text
