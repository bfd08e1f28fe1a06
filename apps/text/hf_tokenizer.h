#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "apps/text/added_tokens.h"
#include "apps/text/decode.h"
#include "apps/text/json_node.h"
#include "apps/text/model.h"
#include "apps/text/normalize.h"
#include "apps/text/pretokenize.h"
#include "apps/text/tokenizer.h"
#include "apps/text/word_cache.h"

namespace tessera::text {

/// A tokenizer of Hugging Face's kind: tokens that stand in the text as they are, then normalizer,
/// pre-tokenizer, model; and the way back.
class HfTokenizer : public Tokenizer {
 public:
  /// `root` is the content of a tokenizer.json, `text` its bytes, which are kept for `to_json`.
  HfTokenizer(const JsonNode& root, std::string text);

  /// Files that are written beside tokenizer.json, by name.
  void set_companions(std::map<std::string, std::string> files) { companions_ = std::move(files); }

  std::string_view name() const override { return name_; }
  int64_t vocab_size() const override { return vocab_size_; }
  using Tokenizer::encode;
  void encode(std::string_view text, std::vector<int32_t>& ids,
              const EncodeOptions& options) const override;
  std::string decode(const std::vector<int32_t>& ids, const DecodeOptions& options) const override;
  std::string token(int32_t id) const override;
  int32_t id_of(std::string_view token) const override;
  const std::vector<AddedToken>& added_tokens() const override { return added_; }
  size_t next_cut(std::string_view text, size_t from) const override;
  std::string to_json() const override { return text_; }
  std::map<std::string, std::string> files() const override;
  std::map<std::string, std::string> hf_files() const override;

 private:
  /// What one call of encode uses alone.
  struct Scratch {
    WordCache cache;
    std::vector<int32_t> word_ids;
    std::string normalized;
  };
  class Lease;

  void parse_added_tokens(const JsonNode& list);
  void parse_post_processor(const JsonNode& node);
  std::vector<int32_t> template_ids(const JsonNode& processor, const JsonNode& name) const;
  std::pair<std::vector<int32_t>, std::vector<int32_t>> template_sides(const JsonNode& processor,
                                                                       const JsonNode& parts) const;
  void set_cutting();

  void encode_segment(Scratch& scratch, std::string_view text, bool is_at_start,
                      std::vector<int32_t>& ids) const;
  void encode_normalized(Scratch& scratch, std::string_view text, bool is_at_start,
                         std::vector<int32_t>& ids) const;
  template <class Scanner>
  void encode_words(Scratch& scratch, std::string_view text, const Scanner& scanner,
                    std::vector<int32_t>& ids) const;
  void encode_long_word(Scratch& scratch, std::string_view word, std::vector<int32_t>& ids) const;

  std::string text_, name_;
  std::map<std::string, std::string> companions_;
  std::unique_ptr<Normalizer> normalizer_;
  PreTokenization pre_tokenization_;
  std::unique_ptr<Vocabulary> vocabulary_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Decoder> decoder_;
  std::vector<AddedToken> added_;  // in the order of the file
  std::map<int32_t, const AddedToken*> by_id_;
  std::map<int32_t, std::string> shown_;  // added tokens as they are sought, which is normalized
  std::map<std::string, int32_t, std::less<>> added_ids_;
  std::unique_ptr<AddedTokenFinder> plain_, in_normalized_;
  std::vector<int32_t> before_, behind_;  // of add_special_tokens
  int64_t vocab_size_ = 0;
  bool cuts_at_mark_ = false, can_cut_ = false;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> scratch_;
};

}  // namespace tessera::text
