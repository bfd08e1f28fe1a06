#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "apps/data.h"
#include "apps/loss.h"
#include "apps/packed_samples.h"
#include "core/runtime/staging.h"

// Classification of texts: JSON lines or Parquet files with a text and a label a row.

namespace tessera::apps {

/// Texts as tokens, one behind the other, each with a class.
struct LabelledTexts {
  TokenArray tokens;
  std::vector<int64_t> begins;  ///< of each text, and the end of the last
  std::vector<int32_t> labels;  ///< index of its class
  std::vector<std::string> classes;
  int64_t count() const { return std::ssize(labels); }
};

struct LoadedTexts {
  std::shared_ptr<const LabelledTexts> texts;
  std::string summary;  ///< "texts: 120 of 2 files, 3 classes: neg 50, ..."
};

/// The names in `model.classes`, separated by commas. ConfigError that follows the key for one that is
/// empty or comes twice, and for a single one.
std::vector<std::string> parse_classes(const std::string& text);

/// What data.classify names, with the special tokens that the tokenizer puts around a text; one of more
/// than model.context tokens is cut to these, or left out (data.long_chats). Classes are those of
/// model.classes, where a whole number that is no name counts as an index, else the labels that there are:
/// whole numbers in their order, or texts sorted.
/// Errors   InputError with file and row for a row without text or label, a text without tokens, a label
///          that is none of the classes; for fewer than two classes
LoadedTexts load_labelled_texts(const Config& config, const text::Tokenizer& tokenizer);

/// Texts as samples, in the order of TrainSamples: a row of a batch is a text, as long as the longest, in
/// steps of 16.
class TextSamples : public Samples {
 public:
  TextSamples(std::shared_ptr<const LabelledTexts> texts, const SampleOptions& options,
              double val_fraction, SplitPart part);
  int64_t num_samples() const override;
  Batch batch(int64_t first_sample, int64_t B) const override;
  /// Texts: what losses are the mean of.
  int64_t num_targets(int64_t first_sample, int64_t count) const override;
  int64_t num_tokens() const;

 private:
  int64_t text_of(int64_t sample) const;  // -1: padding

  std::shared_ptr<const LabelledTexts> texts_;
  SampleOptions options_;
  DocumentSplit split_;
  SplitPart part_;
};

/// Cross entropy of the classes of a batch of texts, and their logits [B, classes] without history.
struct ClassSum {
  LossSum loss;
  Tensor logits;
};
ClassSum class_loss(nn::LanguageModel& model, const Batch& batch, const LossTerms& terms = {});

/// Right and wrong predictions of an evaluation.
class ClassScores {
 public:
  struct Scores {
    double accuracy = 0, f1 = 0;
  };
  explicit ClassScores(int64_t num_classes);
  /// The host is at most two batches behind.
  void add(const Tensor& logits, const Batch& batch);
  /// Share of right predictions, and the mean over the classes that there are or that are predicted of
  ///   F1 = 2 right / (targets + predictions)
  /// over all ranks. Collective.
  Scores finish(dist::World& world);

 private:
  struct Pending {
    HostCopy logits;
    std::vector<int32_t> labels;
  };
  void take();

  std::vector<int64_t> right_, targets_, predictions_;  // of each class
  std::deque<Pending> pending_;
};

}  // namespace tessera::apps
