#include "apps/evaluation/scorer.h"

#include <algorithm>
#include <cmath>

#include "apps/data.h"
#include "core/autograd.h"
#include "core/runtime/cpu/math.h"

namespace tessera::apps {
namespace {

size_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first -
                             a.begin());
}

/// log(sum exp) of finite logits.
double log_sum_exp(std::span<const double> logits) {
  const double highest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double logit : logits) sum += cpu::exp(static_cast<float>(logit - highest));
  return highest + std::log(sum);
}

}  // namespace

Scorer::Scorer(nn::LanguageModel& model) : model_(model) {
  TESSERA_CHECK_AS(ConfigError, model.shape().is_causal,
                   "evaluation: {} predicts masked tokens, expected a model that predicts the next "
                   "one",
                   model.kind());
}

std::vector<double> Scorer::continue_prefix(const std::vector<ScoredTokens>& sequences,
                                            size_t prefix, int64_t width) {
  const auto num_rows = std::ssize(sequences);
  const auto length = static_cast<int64_t>(prefix);
  nn::KvCache rows = model_.make_cache(num_rows, length + width);
  for (size_t layer = 0; layer < rows.layers.size() && length > 0; ++layer) {
    const auto spread = [&](Tensor& to, const Tensor& from) {
      for (int64_t row = 0; row < num_rows; ++row) {
        to.narrow(0, row, 1).narrow(1, 0, length).copy_(from.narrow(1, 0, length));
      }
    };
    spread(rows.layers[layer].k_BSGD, cache_.layers[layer].k_BSGD);
    spread(rows.layers[layer].v_BSGD, cache_.layers[layer].v_BSGD);
  }
  rows.length = length;
  std::vector<int32_t> ids;
  for (const ScoredTokens& s : sequences) {
    ids.insert(ids.end(), s.ids.begin() + length, s.ids.end() - 1);
    ids.resize((ids.size() + static_cast<size_t>(width) - 1) / static_cast<size_t>(width) *
               static_cast<size_t>(width));  // what stands behind is seen by nobody
  }
  nn::ForwardOptions forward;
  forward.cache = &rows;
  return model_.logits(from_values(std::span<const int32_t>(ids), {num_rows, width}), forward)
      .to_vector();
}

std::vector<TokensScore> Scorer::score(const std::vector<ScoredTokens>& sequences) {
  TESSERA_CHECK(!sequences.empty(), "Scorer: no sequences");
  // Of what they share all is computed once but the token that predicts the first scored one.
  const std::vector<int32_t>& first = sequences[0].ids;
  size_t prefix = first.size();
  size_t longest = 0;
  for (const ScoredTokens& s : sequences) {
    TESSERA_CHECK(s.num_scored > 0 && s.num_scored < std::ssize(s.ids),
                  "Scorer: {} of {} tokens, expected one before them", s.num_scored, s.ids.size());
    prefix = std::min(prefix, common_prefix(first, s.ids));
    prefix = std::min(prefix, s.ids.size() - static_cast<size_t>(s.num_scored) - 1);
    longest = std::max(longest, s.ids.size());
  }
  NoGrad no_grad;
  if (prefix > 0) {
    const std::span<const int32_t> shared = std::span(first).first(prefix);
    if (cache_.layers.empty()) cache_ = model_.make_cache(1);
    const size_t held = std::min(common_prefix(cached_, shared), prefix - 1);
    cached_.clear();  // should the forward fail
    cache_.length = static_cast<int64_t>(held);
    nn::ForwardOptions forward;
    forward.cache = &cache_;
    forward.last_only = true;
    const std::span<const int32_t> fed = shared.subspan(held);
    model_.logits(from_values(fed, {1, std::ssize(fed)}), forward);
    cached_.assign(shared.begin(), shared.end());
  } else {
    idle(1);
  }
  const auto width = static_cast<int64_t>(longest - 1 - prefix);
  const std::vector<double> logits = continue_prefix(sequences, prefix, width);
  const size_t V = logits.size() / (sequences.size() * static_cast<size_t>(width));
  std::vector<TokensScore> scores;
  for (size_t row = 0; row < sequences.size(); ++row) {
    const ScoredTokens& s = sequences[row];
    TokensScore score{.is_greedy = true};
    for (size_t at = s.ids.size() - static_cast<size_t>(s.num_scored); at < s.ids.size(); ++at) {
      const size_t position = row * static_cast<size_t>(width) + at - 1 - prefix;
      const std::span<const double> of_token = std::span(logits).subspan(position * V, V);
      const auto token = static_cast<size_t>(s.ids[at]);
      score.log_probability += of_token[token] - log_sum_exp(of_token);
      const auto likeliest = std::max_element(of_token.begin(), of_token.end()) - of_token.begin();
      score.is_greedy = score.is_greedy && static_cast<size_t>(likeliest) == token;
    }
    scores.push_back(score);
  }
  return scores;
}

double Scorer::loss(const ScoredTokens& sequence) {
  NoGrad no_grad;
  const int64_t length = std::ssize(sequence.ids) - 1;
  std::vector<int32_t> targets(sequence.ids.begin() + 1, sequence.ids.end());
  std::fill(targets.begin(), targets.end() - sequence.num_scored, kIgnoredTarget);
  LinearCrossEntropyOptions options;
  options.ignore_index = kIgnoredTarget;
  const Tensor ids =
      from_values(std::span(sequence.ids).first(static_cast<size_t>(length)), {1, length});
  return model_.loss(ids, from_values(std::span<const int32_t>(targets), {1, length}), {}, options)
      .sum.to_vector()[0];
}

void Scorer::idle(int num_forwards) {
  NoGrad no_grad;
  for (int i = 0; i < num_forwards; ++i) {
    nn::ForwardOptions forward;
    forward.last_only = true;
    model_.logits(from_values({0}, {1, 1}), forward);
  }
}

}  // namespace tessera::apps
