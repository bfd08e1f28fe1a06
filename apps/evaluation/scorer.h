#pragma once

#include <cstdint>
#include <vector>

#include "nn/transformer.h"

namespace tessera::apps {

/// Tokens of which the last ones are scored.
struct ScoredTokens {
  std::vector<int32_t> ids;
  int64_t num_scored = 0;  ///< at least 1, and at least one token is before them
};

struct TokensScore {
  double log_probability = 0;  ///< sum of log p(token | those before it), natural
  bool is_greedy = false;      ///< each is the most likely one (the lower of equals)
};

/// Likelihoods by a model, without gradients. Keys and values of what sequences have in common at
/// their beginning, and of what the last ones had (the examples of a task), are computed once.
/// Under sharding each call makes a fixed number of forwards, and all ranks have to make it: those
/// without work call `idle` in its place.
class Scorer {
 public:
  explicit Scorer(nn::LanguageModel& model);

  static constexpr int kScoreForwards = 2, kLossForwards = 1;
  /// Of sequences that are scored together (the choices of a question): two forwards. Error for one
  /// that does not fit the context: ids.size() - 1 positions.
  std::vector<TokensScore> score(const std::vector<ScoredTokens>& sequences);
  /// The sum of -log p of the scored tokens of one sequence: one forward, which holds no logits.
  double loss(const ScoredTokens& sequence);
  void idle(int num_forwards);

 private:
  std::vector<double> continue_prefix(const std::vector<ScoredTokens>& sequences, size_t prefix,
                                      int64_t width);

  nn::LanguageModel& model_;
  nn::KvCache cache_;            // one row
  std::vector<int32_t> cached_;  // the tokens that it holds
};

}  // namespace tessera::apps
