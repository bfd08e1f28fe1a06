#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/data.h"
#include "apps/loss.h"
#include "apps/metrics.h"
#include "apps/packed_samples.h"
#include "apps/text/chat.h"
#include "core/runtime/staging.h"

// Tuning on preferences: pairs of answers to one prompt, and the losses that are made of their
// log-probabilities under the model and under a reference that stays as it is.

namespace tessera::apps {

/// Pairs as tokens: sequence 2 i is prompt and chosen answer of pair i, 2 i + 1 the rejected one's.
struct PreferencePairs {
  TokenArray tokens;
  TokenArray is_target;         ///< of each token 1 if it is of the answer, or 0
  std::vector<int64_t> begins;  ///< of each sequence, and the end of the last
  int64_t count() const { return std::max<int64_t>(std::ssize(begins) - 1, 0) / 2; }
};

struct LoadedPreferences {
  std::shared_ptr<const PreferencePairs> pairs;
  std::shared_ptr<const text::ChatTemplate> chat_template;
  std::string summary;  ///< "pairs: 120 of 2 files, ...": how many were cut or left out
};

/// What data.preference names, as `open_chats`. A sequence of more than model.context + 1 tokens is cut
/// to these, or its pair is left out (data.long_chats); so is a pair of which an answer has no token left.
/// Errors   InputError with file and row as parse_preference, ChatTemplate::render and tokenize, if no
///          pair is left, and without a chat template
LoadedPreferences load_preferences(const Config& config,
                                   std::shared_ptr<const text::Tokenizer> tokenizer,
                                   const std::string& dir);

/// Pairs as samples: rows 2 i and 2 i + 1 of a batch are the two sequences of a pair, as long as the
/// longest in it, in steps of 16. Sample g of the run is pair P(g mod n) of epoch g / n, as TrainSamples.
class PreferenceSamples : public Samples {
 public:
  PreferenceSamples(std::shared_ptr<const PreferencePairs> pairs, const SampleOptions& options,
                    double val_fraction, SplitPart part);
  int64_t num_samples() const override;
  Batch batch(int64_t first_sample, int64_t B) const override;
  /// Pairs: what losses are the mean of.
  int64_t num_targets(int64_t first_sample, int64_t count) const override;
  int64_t num_tokens() const;
  /// Log-probabilities of all sequences, in their order, for the batches to come.
  void set_references(std::shared_ptr<const std::vector<float>> references) {
    references_ = std::move(references);
  }

 private:
  int64_t pair_of(int64_t sample) const;

  std::shared_ptr<const PreferencePairs> pairs_;
  SampleOptions options_;
  DocumentSplit split_;
  SplitPart part_;
  std::shared_ptr<const std::vector<float>> references_;
};

/// The batch of pairs `indices`; -1: a pair of padding, which does not count.
Batch pair_batch(const PreferencePairs& pairs, const std::vector<int64_t>& indices,
                 const SampleOptions& options);

/// Of a batch of pairs what the loss adds up, and the rewards beta (log p - log p_reference) of the
/// sequences, [pairs, 2], f32, without history.
struct PreferenceSum {
  LossSum loss;
  Tensor rewards;
};

/// log p of each sequence's answer, f32 [2 * pairs]; with `is_mean` a token's on average.
Tensor sequence_log_probs(nn::LanguageModel& model, const Batch& batch);

/// Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290). With d the rewards of a
/// pair's chosen answer minus those of the rejected one, e the label smoothing (Mitchell 2023):
///   sigmoid   -(1 - e) log sigmoid(d) - e log sigmoid(-d)
///   ipo       (d' - 1 / (2 beta))^2, d' the same difference of log p - log p_reference, a token's on
///             average (Azar et al. 2023, arXiv:2310.12036)
PreferenceSum preference_loss(nn::LanguageModel& model, const Batch& batch,
                              const PreferenceConfig& config);

/// Of a step's micro-batches of `micro_batch` pairs on all ranks, whose rewards this rank has as `mine`:
/// added in the order of samples, so that they are the same on any number of ranks. Collective.
StepMetrics::Rewards mean_rewards(const std::vector<HostCopy>& mine, int64_t micro_batch,
                                  dist::World& world);

/// What the reference of a configuration is made of: names, sizes and times of the files of a model, or
/// the seed; settings of the model; the dtype that computes.
std::string reference_identity(const Config& config);

/// Log-probabilities of all sequences under the model as it is after `load`, by micro-batches of
/// `micro_batch` pairs in the order of the data, dealt to ranks: the same on any number of them. Read
/// from `path`, without `load`, if what is there has been computed for the same `key`, else kept
/// there. Collective, and so may `load` be.
/// Errors   IoError if the file cannot be written
std::shared_ptr<const std::vector<float>> find_references(
    nn::LanguageModel& model, dist::Fsdp& fsdp, dist::World& world, const PreferencePairs& pairs,
    const SampleOptions& options, int64_t micro_batch, const std::string& path, uint64_t key,
    const std::function<void()>& load);

}  // namespace tessera::apps
