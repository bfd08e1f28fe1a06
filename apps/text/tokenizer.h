#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/text/added_tokens.h"

// Text to token ids and back. A tokenizer is saved beside the model as `tokenizer.json`.

namespace tessera::text {

/// Options of `Tokenizer::encode`.
struct EncodeOptions {
  /// What the post-processor puts around a text: [CLS] and [SEP], a token of the beginning.
  bool add_special_tokens = false;
};

/// Options of `Tokenizer::decode`.
struct DecodeOptions {
  bool skip_special_tokens = false;
};

/// Files that transformers keeps beside tokenizer.json, and that say how it is used: special tokens,
/// the template of conversations, and what ends a generated text.
inline constexpr std::array kCompanionFiles = {"tokenizer_config.json", "special_tokens_map.json",
                                               "added_tokens.json",     "chat_template.jinja",
                                               "chat_template.json",    "generation_config.json"};

/// Threads  any number may use one at a time; `encode` then takes turns only to find a cache
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// "byte", "char", or the type of a tokenizer.json's model: "BPE", "WordPiece", "WordLevel".
  virtual std::string_view name() const = 0;
  /// One more than the largest id.
  virtual int64_t vocab_size() const = 0;
  /// Appends the ids of a text.
  /// Errors   InputError that names the place of what the vocabulary lacks, or of the first byte
  ///          that is not UTF-8 (the byte tokenizer takes anything)
  virtual void encode(std::string_view text, std::vector<int32_t>& ids,
                      const EncodeOptions& options = {}) const = 0;
  /// The ids of a text, with the same errors.
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  /// Errors   InputError for an id that no token has
  virtual std::string decode(const std::vector<int32_t>& ids,
                             const DecodeOptions& options = {}) const = 0;

  /// The token as its file writes it (an added one normalized); empty if none has the id.
  virtual std::string token(int32_t id) const = 0;
  /// The id of a token as its file writes it, or -1.
  virtual int32_t id_of(std::string_view token) const = 0;
  virtual const std::vector<AddedToken>& added_tokens() const;

  /// Where a text can be cut between `from` and its end so that both parts give together the ids of
  /// the whole: the first such place after `from`, or its end.
  virtual size_t next_cut(std::string_view text, size_t from) const;

  /// As JSON text that `parse_tokenizer` reads.
  virtual std::string to_json() const = 0;
  /// What is kept beside a model, by name: tokenizer.json as `to_json`, and what came with it
  /// (`kCompanionFiles`).
  virtual std::map<std::string, std::string> files() const {
    return {{"tokenizer.json", to_json()}};
  }
  /// The same for transformers, files by name: tokenizer.json of Hugging Face and its companion,
  /// which give every text the same ids.
  virtual std::map<std::string, std::string> hf_files() const = 0;
};

/// What models of a tokenizer see around a document; -1: nothing.
struct DocumentTokens {
  int32_t begin = -1, end = -1;
};
/// `end` is the token that usually ends a text (`<|endoftext|>`, `</s>` ...), which a conversation's end
/// of a turn is not; else the eos_token of tokenizer_config.json. `begin` is what the post-processor
/// puts before a text; `end` where it puts nothing there.
DocumentTokens document_tokens(const Tokenizer& tokenizer);

/// What a model has generated as text: an id that no token has (the model's vocabulary may be padded
/// to a larger one) becomes U+FFFD.
std::string decode_generated(const Tokenizer& tokenizer, const std::vector<int32_t>& ids);

/// The text of tokens that come one by one, as that of all would have it: a decoder treats the first
/// token of a text apart, and a token may be a part of a character.
class StreamDecoder {
 public:
  /// `before` are the tokens that the text continues.
  explicit StreamDecoder(const Tokenizer& tokenizer, const std::vector<int32_t>& before = {});

  /// What the token adds; nothing while a character is not whole, which comes with the rest of it.
  std::string add(int32_t id);
  /// What is left.
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  std::vector<int32_t> ids_;  // some that are shown, and those that are not
  size_t num_shown_ = 0;      // of these
  std::string shown_;         // their text
};

/// Ids 0 to 255 are the bytes themselves.
std::unique_ptr<Tokenizer> make_byte_tokenizer();

/// One id for each character (code point) that occurs in `text`, in the order of code points.
/// InputError with the offset of the first byte that is not UTF-8.
std::unique_ptr<Tokenizer> make_char_tokenizer(std::string_view text);

/// From a tokenizer.json: what `to_json` wrote, or one of Hugging Face's with a model of type BPE,
/// WordPiece or WordLevel; `name` stands for the file in messages. Its truncation and padding are
/// left alone, as transformers does: they are settings of a call.
/// Errors   InputError that names the file and the key of what is damaged or not known
std::unique_ptr<Tokenizer> parse_tokenizer(std::string_view json, const std::string& name);
/// The file, or the tokenizer.json in a directory (or vocab.bpe and encoder.json, or merges.txt and
/// vocab.json of GPT-2).
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path);

/// From GPT-2's vocab.bpe (merges.txt); `encoder` is its encoder.json (vocab.json), or empty: then
/// the ids are the bytes', the merges' and that of <|endoftext|>.
std::unique_ptr<Tokenizer> parse_gpt2(std::string_view merges, std::string_view encoder,
                                      const std::string& name);

/// From a rank file of tiktoken (lines of a token in base64 and its rank), cut by the regular
/// expression `pattern`; `special` are tokens with their ids.
std::unique_ptr<Tokenizer> parse_tiktoken(std::string_view ranks, std::string_view pattern,
                                          const std::map<std::string, int32_t>& special,
                                          const std::string& name);

}  // namespace tessera::text
