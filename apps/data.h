#pragma once

#include <any>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/config.h"
#include "apps/data/documents.h"
#include "apps/data/permutation.h"
#include "apps/text/tokenizer.h"
#include "core/files.h"

// Training data. Text or token shards become arrays of token ids; a sample is a window of `context`
// inputs with the token after each as its target. Which tokens a sample has depends on (seed,
// global sample index) only, so ranks, accumulation and a resumed run do not change it.
//
// Masked language modelling (Devlin et al. 2019, arXiv:1810.04805): of each sample num_masked tokens,
// drawn by (seed, global sample index), are the targets; as inputs 80 % of them are the mask token,
// 10 % any token, 10 % stay as they are.

namespace tessera::apps {

/// Token ids in memory of 1, 2 or 4 bytes each, possibly a mapped file. A value that shares it.
class TokenArray {
 public:
  TokenArray() = default;
  /// `data` is in `file`.
  TokenArray(std::shared_ptr<const MappedFile> file, const void* data, int bytes_per_token,
             int64_t num_tokens, std::string name);
  /// Owns a compact copy of `ids`.
  TokenArray(const std::vector<int32_t>& ids, std::string name);

  int64_t num_tokens() const { return num_tokens_; }
  const std::string& name() const { return name_; }  ///< the file, for messages
  int64_t first() const { return first_; }           ///< where token 0 is in the file
  int64_t operator[](int64_t i) const;
  /// The largest id of [begin, end); -1 if that is empty.
  int64_t largest(int64_t begin, int64_t end) const;
  bool is_mapped() const { return file_ != nullptr; }
  /// Tokens [begin, end) as they are in memory.
  std::string_view bytes(int64_t begin, int64_t end) const {
    return {reinterpret_cast<const char*>(data_ + begin * bytes_per_token_),
            static_cast<size_t>((end - begin) * bytes_per_token_)};
  }
  TokenArray slice(int64_t begin, int64_t num_tokens) const;  ///< shares the memory
  /// After reading: MappedFile::check of the file that it is in, if any. InputError.
  void check() const;

 private:
  std::shared_ptr<const MappedFile> file_;  // or
  std::shared_ptr<const void> owner_;
  const uint8_t* data_ = nullptr;
  int bytes_per_token_ = 1;
  int64_t num_tokens_ = 0, first_ = 0;
  std::string name_;
};

/// One shard in the .bin format of llm.c: 256 int32 of header {20240520, 1, number of tokens} and
/// uint16 tokens, or {20240801, 7, number of tokens} and uint32 tokens. Memory-mapped. InputError,
/// with counts, for another magic or version or a size that does not fit the header.
TokenArray load_token_shard(const std::string& path);

/// Tokens of one split, on the disk or in memory.
struct Corpus {
  std::vector<TokenArray> shards;   ///< samples do not cross shards
  std::vector<TokenArray> targets;  ///< which of their tokens are predicted, where not all are
  int64_t num_tokens() const;
};

/// "data: 2 of 3 shards have fewer than model.context + 1 = 65 tokens and are not trained on:
/// a.bin, b.bin"; empty without any.
std::string short_shards(const Corpus& corpus, int64_t context);

struct TokenSource;      // apps/packed_samples.h
struct ChatSource;       // apps/chats.h
struct PreferencePairs;  // apps/preferences.h
struct LabelledTexts;    // apps/classification.h

/// What the section data of a configuration names, opened and split.
struct Data {
  Corpus train, val;              ///< val is empty for val_fraction = 0
  std::vector<TokenArray> files;  ///< whole, as they are on the disk; what is in memory is not
  size_t num_train_files = 0;     ///< of these; the rest is data.val_tokens
  std::shared_ptr<text::Tokenizer> tokenizer;  ///< none for token shards
  std::shared_ptr<const std::vector<TokenSource>>
      sources;  ///< of data.sources, data.chat or several documents; train has them too
  std::shared_ptr<const PreferencePairs> pairs;  ///< of data.preference; train has their tokens too
  std::shared_ptr<const LabelledTexts> texts;    ///< of data.classify; train has their tokens too
  std::string chats;          ///< of data.chat, for the log: how many there are and are trained on
  std::string chat_template;  ///< data.chat_template, which goes with the model; or empty
  /// Validation is of rows of the same data, which train has all of.
  bool is_split_by_rows() const {
    return sources != nullptr || pairs != nullptr || texts != nullptr;
  }
  text::DocumentTokens document_tokens;  ///< around documents of texts, for data.document_tokens
  int64_t vocab_size = 0;                ///< model.vocab, or the tokenizer's size
};

/// Texts that `data.text` names, or one of `data.sources`.
struct TextSource {
  std::string name;  ///< the glob
  std::vector<std::string> paths;
  DocumentOptions documents;  ///< how they are read
  bool is_one_text = false;   ///< a single file that is a single document
};
/// Whether texts of a configuration are documents, as far as their names say: one file that is given by
/// its name is one text, unless it has rows.
bool may_have_documents(const DataConfig& config);

/// What a run tokenizes, and by what.
struct Texts {
  /// Of data.text one, of each of data.sources with files that are no shards one.
  std::vector<TextSource> sources;
  std::shared_ptr<const ChatSource> chats;  ///< of data.chat
  /// data.tokenizer, with sources or chats; none for char, which the texts themselves make.
  std::shared_ptr<text::Tokenizer> tokenizer;
  /// Whether the tokens are worth keeping: not where the bytes of a file are the tokens, nor those of
  /// characters.
  bool has_caches() const;
};
/// Errors   ConfigError if there is no such tokenizer; InputError as `files_of_globs`, load_tokenizer
///          and open_chats
Texts open_texts(const Config& config);

/// What the configuration names, split: of one text the last val_fraction of its tokens, of shards
/// data.val_tokens or the last part of the last ones; with data.val_split = interleave the ends of
/// up to 64 pieces of each. Several texts, or rows of .jsonl and .parquet, are documents
/// (`Data::sources`), which are split by document. `caches` are of make_token_caches; without them
/// `texts` are tokenized in memory.
/// Errors   InputError for missing or empty files and for texts, with file, line or row; ConfigError
///          for a vocabulary that is too small
Data load_data(const Config& config, Texts texts, const std::vector<std::string>& caches,
               int threads = 1);
inline Data load_data(const Config& config) {
  return load_data(config, open_texts(config), {});
}

/// Rows of a model call, row-major [B, T] each. A padded row has only ignored targets.
struct Batch {
  int64_t B = 0, T = 0;
  std::vector<int32_t> inputs;
  std::vector<int32_t> targets;          ///< kIgnoredTarget where there is none
  std::vector<int32_t> document_starts;  ///< position of the first token of the document; or empty
  std::vector<int32_t> positions;        ///< if they restart with each document; or empty
  int64_t num_valid = 0;                 ///< targets that count
  /// Of pairs of rows (preferences.h): how many of them are no padding, and the log-probability of each
  /// row's targets under the reference.
  int64_t num_pairs = 0;
  std::vector<float> references;
  std::any own;  ///< what samples of a program's own have besides or instead (trainer.h)
  /// Of texts with a class (classification.h): the class of each row, kIgnoredTarget for padding, and
  /// how many tokens it has.
  std::vector<int32_t> labels;
  std::vector<int64_t> lengths;
  int64_t num_counted() const;  ///< what a loss is the mean of
};
/// A target that is none: it has no loss.
inline constexpr int32_t kIgnoredTarget = -100;

/// How samples are cut from tokens.
struct SampleOptions {
  int64_t context = 1;
  int64_t vocab_size = 1;  ///< larger ids are errors
  uint64_t seed = 0;
  int64_t separator = -1;       ///< ends a document (as a target) and begins the next (as an input)
  int64_t document_begin = -1;  ///< of packed documents: begins each in place of the separator
  bool restart_positions = false;
  int64_t mask_token = -1;         ///< what masked tokens become; -1: the next token is the target
  double mask_probability = 0.15;  ///< share of a row's tokens that are predicted
};

/// Targets of a row of `length` tokens whose masked ones are predicted: the rounded share, at least
/// one.
int64_t num_masked(int64_t length, double probability);

/// Rows for a model, by their index in the run or in a split. Several threads may ask.
class Samples {
 public:
  virtual ~Samples() = default;
  virtual int64_t num_samples() const = 0;  ///< in an epoch
  /// Rows for samples [first, first + B). InputError for an id outside the vocabulary.
  virtual Batch batch(int64_t first_sample, int64_t B) const = 0;
  /// Targets that count in samples [first, first + count) of the run, without reading them.
  virtual int64_t num_targets(int64_t first_sample, int64_t count) const = 0;
};

/// The id of token `i`. InputError, with its place in the file, if it is not below `vocab_size`.
int32_t checked_id(const TokenArray& shard, int64_t i, int64_t vocab_size);

/// Shuffled windows for training. Sample g of the run is window P(g mod n) of epoch g / n, where n
/// is the number of windows and P a permutation of its own for each epoch, so that each window
/// comes once an epoch, however samples are dealt to ranks. The windows of later epochs are shifted
/// by what the shards have left over.
class TrainSamples : public Samples {
 public:
  /// InputError with the counts if no shard has context + 1 tokens.
  TrainSamples(Corpus corpus, const SampleOptions& options);
  int64_t num_samples() const override { return first_sample_.back(); }  ///< in an epoch
  /// The window that global sample g is, in [0, num_samples).
  int64_t window_of(int64_t global_sample) const;
  /// Rows for global samples [first, first + B). InputError for an id outside the vocabulary.
  Batch batch(int64_t first_global_sample, int64_t B) const override;
  int64_t num_targets(int64_t first_global_sample, int64_t count) const override;

 private:
  Corpus corpus_;
  SampleOptions options_;
  std::vector<int64_t> first_sample_;  // of each shard, and the total
};

/// Every target of a split once, in order: windows, the last one of a shard padded.
class EvalSamples : public Samples {
 public:
  EvalSamples(Corpus corpus, const SampleOptions& options);
  int64_t num_samples() const override { return first_sample_.back(); }
  /// Rows for samples [first, first + B); rows after the last are padding.
  Batch batch(int64_t first_sample, int64_t B) const override;
  int64_t num_targets(int64_t first_sample, int64_t count) const override {
    return batch(first_sample, count).num_valid;
  }

 private:
  Corpus corpus_;
  SampleOptions options_;
  std::vector<int64_t> first_sample_;
};

}  // namespace tessera::apps
