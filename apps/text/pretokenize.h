#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/text/json_node.h"
#include "apps/text/scan.h"

namespace tessera::text {

/// A text that has been cut: pieces of `text`, none empty.
struct Pieces {
  struct Piece {
    size_t begin, end;
  };
  std::string text;
  std::vector<Piece> pieces;
  bool is_at_start = true;  ///< the first piece begins where the whole text does
  std::string_view view(const Piece& piece) const {
    return std::string_view(text).substr(piece.begin, piece.end - piece.begin);
  }
};

/// What cuts a text into words.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  virtual void apply(Pieces& pieces) const = 0;
};

/// The patterns that have a scanner of their own.
struct KnownPattern {
  enum Family { kGpt2, kGpt4, kGpt4o } family;
  int max_digits = 3;
  bool contractions = true;
};
/// What the regular expression is known as, if it is.
std::optional<KnownPattern> known_pattern(std::string_view regex);
/// The regular expression of a name: gpt2, gpt4 (or cl100k, llama3), qwen2, gpt4o (or o200k),
/// tekken; empty if there is none of that name.
std::string_view pattern_by_name(std::string_view name);

/// Calls f with the scanner.
template <class F>
auto with_scanner(const KnownPattern& pattern, F&& f) {
  switch (pattern.family) {
    case KnownPattern::kGpt2:
      return f(Gpt2Scanner());
    case KnownPattern::kGpt4:
      return f(Gpt4Scanner(pattern.max_digits));
    default:
      return f(Gpt4oScanner(pattern.max_digits, pattern.contractions));
  }
}

/// tokenizer.json's "pre_tokenizer", understood.
struct PreTokenization {
  std::vector<std::unique_ptr<PreTokenizer>> steps;
  bool is_byte_level = false;  ///< the last step maps bytes to characters; it is not in `steps`
  /// All of it is one scanner over the text as it stands: `steps` need not be run.
  std::optional<KnownPattern> pattern;
};

/// BertPreTokenizer, ByteLevel, CharDelimiterSplit, Digits, FixedLength, Metaspace, Punctuation,
/// Sequence, Split, Whitespace, WhitespaceSplit; nothing for null.
/// Errors   InputError that names the key of what is not known
PreTokenization parse_pre_tokenizer(const JsonNode& node);

/// Replaces the bytes of each piece by the characters that stand for them in a vocabulary.
void map_bytes(Pieces& pieces);

}  // namespace tessera::text
