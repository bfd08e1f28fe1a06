#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/text/json_node.h"

namespace tessera::text {

/// What makes a text uniform before it is cut. Time linear in the text, but for Replace with a
/// regular expression (regex.h).
class Normalizer {
 public:
  virtual ~Normalizer() = default;
  /// The text may be changed in place.
  virtual void apply(std::string& text) const = 0;
  /// Whether the text surely stays as it is, which saves a copy.
  virtual bool keeps(std::string_view text) const = 0;
  /// Whether a text cut before an ASCII letter behind a line break that follows a visible ASCII
  /// character gives, in two parts, the same as in one.
  virtual bool is_local() const { return false; }
};

/// Of tokenizer.json's "normalizer": BertNormalizer, Lowercase, NFC, NFD, NFKC, NFKD, Prepend,
/// Replace, Sequence, Strip, StripAccents; nullptr for null.
/// Errors   InputError that names the key of what is not known
std::unique_ptr<Normalizer> parse_normalizer(const JsonNode& node);

/// The content of a "pattern": {"String": ...} or {"Regex": ...} as a function that finds all its matches.
using FindAll = std::function<std::vector<std::pair<size_t, size_t>>(std::string_view)>;
FindAll parse_pattern(const JsonNode& node);

/// The text with what is found replaced.
void replace_all(std::string& text, const FindAll& find, std::string_view content);

}  // namespace tessera::text
