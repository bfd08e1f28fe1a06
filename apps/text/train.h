#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "apps/text/tokenizer.h"

namespace tessera::text {

struct TrainBpeOptions {
  int64_t vocab_size = 8192;     ///< special tokens and the 256 bytes included
  std::string pattern = "gpt4";  ///< a name (pretokenize.h) or a regular expression
  std::vector<std::string> special_tokens = {"<|endoftext|>"};
  int64_t min_frequency = 0;  ///< of a pair that is merged
};

/// Learns a byte-level BPE (Sennrich et al. 2016): words are counted, then the pair of neighbours
/// that occurs most often (of equals the one of the lower ids) becomes a token, again and again.
/// The merges are those that Hugging Face's BpeTrainer finds on the same words, with all bytes as
/// its alphabet and the special tokens in front.
/// Memory   the different words and their parts, not the text
class BpeTrainer {
 public:
  /// Errors   ConfigError for a vocabulary without room for bytes and special tokens, one of more
  ///          than 1,048,576, or a special token twice; InputError for the regular expression
  explicit BpeTrainer(TrainBpeOptions options);
  ~BpeTrainer();

  /// Counts the words of a text.
  /// Errors   InputError for one that is not UTF-8
  void add(std::string_view text);
  /// What another has counted as well, for threads that have one each.
  void add(const BpeTrainer& other);
  int64_t num_words() const;  ///< different ones

  /// The tokenizer, with its tokenizer.json. `progress` is told the number of tokens now and then.
  std::unique_ptr<Tokenizer> train(const std::function<void(int64_t)>& progress = {});

 private:
  struct Words;
  TrainBpeOptions options_;
  std::unique_ptr<Words> words_;
};

}  // namespace tessera::text
