#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

// Text to token ids and back. A tokenizer is saved beside the model as `tokenizer.json`.

namespace tessera::apps {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual std::string_view name() const = 0;  ///< "byte", "char"
  virtual int64_t vocab_size() const = 0;
  /// InputError that names the place of what the vocabulary lacks.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  /// InputError for an id outside the vocabulary.
  virtual std::string decode(const std::vector<int32_t>& ids) const = 0;
  /// As JSON text that `parse_tokenizer` reads.
  virtual std::string to_json() const = 0;
  /// The same for transformers, files by name: tokenizer.json of Hugging Face and its companion,
  /// which give every text the same ids.
  virtual std::map<std::string, std::string> hf_files() const = 0;
};

/// What a model has generated as text: an id outside the tokenizer's vocabulary (the model's may be
/// padded to a larger one) becomes U+FFFD.
std::string decode_generated(const Tokenizer& tokenizer, const std::vector<int32_t>& ids);

/// Ids 0 to 255 are the bytes themselves.
std::unique_ptr<Tokenizer> make_byte_tokenizer();

/// One id for each character (code point) that occurs in `text`, in the order of code points.
/// InputError with the offset of the first byte that is not UTF-8.
std::unique_ptr<Tokenizer> make_char_tokenizer(std::string_view text);

/// From what `to_json` wrote; `name` stands for the file in messages. InputError if it is not that:
/// not JSON, another type, a character twice, one that is not UTF-8.
std::unique_ptr<Tokenizer> parse_tokenizer(std::string_view json, const std::string& name);
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path);

}  // namespace tessera::apps
