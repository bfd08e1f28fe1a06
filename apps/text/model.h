#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "apps/text/json_node.h"
#include "apps/text/vocabulary.h"

namespace tessera::text {

/// What makes ids of words.
class Model {
 public:
  virtual ~Model() = default;
  /// Appends the ids of a word, which is not empty.
  /// Errors   InputError if it needs unk_token and the vocabulary lacks that
  virtual void encode(std::string_view word, std::vector<int32_t>& ids) const = 0;
  /// A word is its bytes, not the characters that stand for them.
  virtual bool is_byte_level() const { return false; }
  /// A word may be cut before a run of the character `mark` behind another one: no token spans it.
  virtual bool can_cut_at(std::string_view) const { return false; }
};

struct ParsedModel {
  std::string_view name;  ///< "BPE", "WordPiece", "WordLevel"
  std::unique_ptr<Vocabulary> vocabulary;
  std::unique_ptr<Model> model;
};

/// Of tokenizer.json's "model"; `is_byte_level`: words come as bytes.
/// Errors   InputError that names the key of what is damaged or not known
ParsedModel parse_model(const JsonNode& node, bool is_byte_level);

}  // namespace tessera::text
