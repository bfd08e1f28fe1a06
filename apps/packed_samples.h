#pragma once

#include <memory>
#include <string>
#include <vector>

#include "apps/data.h"
#include "apps/data/packing.h"

// Documents of token shards and texts as samples: several sources, shuffled and packed into windows
// (apps/data/packing.h).

namespace tessera::apps {

/// Documents beside each other in an array of tokens, without the separators between them.
struct TokenDocuments {
  TokenArray tokens;
  std::vector<int64_t> begins, ends;
  TokenArray is_target;  ///< of each token 1 if it is to be predicted, or 0; empty: all are
  int64_t count() const { return static_cast<int64_t>(begins.size()); }
};

/// The documents of a shard in which `separator` stands before or behind each; none that is empty.
TokenDocuments find_documents(const TokenArray& tokens, int32_t separator);

struct TokenSource {
  std::string name;
  double weight = 0;  ///< 0: without weights
  std::vector<TokenDocuments> shards;
};

/// "a/*.bin: 0.7, b/*.bin: 0.3" or "a/*.bin, b/*.bin" as patterns and weights: a weight follows the
/// last colon if a number does. ConfigError that follows the key.
std::vector<std::pair<std::string, double>> parse_sources(const std::string& text);

/// A tokenizer of the characters that occur in texts. InputError as their documents.
std::shared_ptr<text::Tokenizer> char_tokenizer_of(const std::vector<TextSource>& sources);
/// The documents of texts, tokenized in memory; none without a token.
/// Errors   InputError with file, line or row
TokenDocuments encode_documents(const TextSource& source, const text::Tokenizer& tokenizer);

/// What data.sources names: token shards, and the `texts` (Texts::sources), from `caches` if they are
/// there. Without a `tokenizer` that of their characters is made.
/// Errors   InputError as files are, ConfigError for token shards without data.separator
std::shared_ptr<const std::vector<TokenSource>> load_sources(
    const Config& config, const std::vector<TextSource>& texts,
    const std::vector<std::string>& caches, std::shared_ptr<text::Tokenizer>& tokenizer);
/// The same of data.text with several documents.
std::shared_ptr<const std::vector<TokenSource>> load_documents(
    const TextSource& text, const std::vector<std::string>& caches,
    std::shared_ptr<text::Tokenizer>& tokenizer);

/// "source a/*.bin: 120 documents, 1.53 passes, 30.1 % of the positions", a line for each.
std::string sources_text(const PackPlan& plan, const std::vector<TokenSource>& sources,
                         int64_t num_windows);

enum class SplitPart { kTrain, kVal };

/// Windows of packed documents, padded at their ends. A position predicts the next token of its
/// document, if that is a target; with a separator also the first from it (or from what begins a
/// document, if that is another token) and it from the last.
/// Attention stays inside of a piece of a document (Batch::document_starts).
class PackedSamples : public Samples {
 public:
  /// Of each source the documents of a part (DocumentSplit). InputError as PackPlan; an empty part
  /// for validation is none.
  PackedSamples(std::shared_ptr<const std::vector<TokenSource>> sources,
                const SampleOptions& options, double val_fraction, SplitPart part);

  /// Of the first epoch; with weights as many as all positions fill. Rows after that are of the next
  /// epochs, or padding for validation.
  int64_t num_samples() const override { return num_samples_; }
  Batch batch(int64_t first_sample, int64_t B) const override;
  int64_t num_targets(int64_t first_sample, int64_t count) const override;
  int64_t num_positions() const { return plan_ == nullptr ? 0 : plan_->num_positions(); }
  const PackPlan* plan() const { return plan_.get(); }

 private:
  struct Source;
  void fill_row(Batch& batch, int64_t row, const std::vector<Piece>& pieces) const;
  int64_t num_targets(const Piece& piece) const;

  std::shared_ptr<const std::vector<TokenSource>> tokens_;
  std::vector<std::shared_ptr<const Source>> sources_;
  SampleOptions options_;
  SplitPart part_;
  std::unique_ptr<PackPlan> plan_;
  int64_t num_samples_ = 0;
};

}  // namespace tessera::apps
