#include "nn/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/autograd.h"
#include "core/random.h"

namespace tessera::nn {
namespace {

/// Evaluation mode for a scope.
class Evaluation {
 public:
  explicit Evaluation(Module& module) : module_(module), was_training_(module.is_training()) {
    module_.train(false);
  }
  ~Evaluation() { module_.train(was_training_); }

 private:
  Module& module_;
  bool was_training_;
};

}  // namespace

int32_t sample_token(std::span<const double> logits, const SamplingOptions& options,
                     uint64_t draw_index) {
  TESSERA_CHECK(options.temperature >= 0, "sample_token: temperature must be >= 0, got {}",
                options.temperature);
  TESSERA_CHECK(options.top_k >= 0, "sample_token: top_k must be >= 0, got {}", options.top_k);
  TESSERA_CHECK(options.top_p > 0 && options.top_p <= 1,
                "sample_token: top_p must be in (0, 1], got {}", options.top_p);
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isfinite(logits[i])) tokens.push_back(static_cast<int32_t>(i));
  }
  TESSERA_CHECK_AS(NumericsError, !tokens.empty(), "sample_token: none of {} logits is finite",
                   logits.size());
  const auto logit = [&](int32_t token) { return logits[static_cast<size_t>(token)]; };
  const auto is_likelier = [&](int32_t a, int32_t b) {
    return logit(a) != logit(b) ? logit(a) > logit(b) : a < b;
  };
  if (options.temperature == 0) return *std::min_element(tokens.begin(), tokens.end(), is_likelier);

  std::sort(tokens.begin(), tokens.end(), is_likelier);
  if (options.top_k > 0 && options.top_k < static_cast<int64_t>(tokens.size())) {
    tokens.resize(static_cast<size_t>(options.top_k));
  }
  std::vector<double> weights;
  for (const int32_t token : tokens) {
    weights.push_back(std::exp((logit(token) - logit(tokens[0])) / options.temperature));
  }
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  double kept = 0;
  size_t num_kept = 0;
  while (num_kept < weights.size() && (num_kept == 0 || kept < options.top_p * all)) {
    kept += weights[num_kept++];
  }
  const auto words = philox(make_key(options.seed, hash_name("generate")), 0, draw_index);
  double remaining = kept * static_cast<double>(uniform_from_bits(words[0]));
  for (size_t i = 0; i < num_kept; ++i) {
    remaining -= weights[i];
    if (remaining < 0) return tokens[i];
  }
  return tokens[num_kept - 1];
}

std::vector<int32_t> generate(LanguageModel& model, std::span<const int32_t> prompt,
                              const GenerateOptions& options) {
  TESSERA_CHECK(!prompt.empty(), "generate: the prompt has no token");
  TESSERA_CHECK_AS(
      ConfigError, model.shape().is_causal,
      "generate: {} predicts masked tokens, expected a model that predicts the next one",
      model.kind());
  NoGrad no_grad;
  Evaluation evaluation(model);
  const size_t context = static_cast<size_t>(model.shape().context_length);
  std::vector<int32_t> text(prompt.begin(), prompt.end());
  KvCache cache = model.make_cache(1);
  size_t num_seen = 0;  // tokens of the text that went through the model or were dropped
  while (static_cast<int64_t>(text.size() - prompt.size()) < options.num_tokens) {
    if (static_cast<size_t>(cache.length) + (text.size() - num_seen) > context) {
      cache.length = 0;
      num_seen = text.size() - std::min(text.size(), std::max<size_t>(context / 2, 1));
    }
    const std::span<const int32_t> fed = std::span(text).subspan(num_seen);
    const Tensor ids_BT = from_values(fed, {1, static_cast<int64_t>(fed.size())});
    ForwardOptions forward;
    forward.cache = &cache;
    forward.last_only = true;
    const std::vector<double> logits = model.logits(ids_BT, forward).to_vector();
    const uint64_t draw_index = text.size() - prompt.size();
    num_seen = text.size();
    text.push_back(sample_token(logits, options.sampling, draw_index));
    if (options.on_token && !options.on_token(text.back())) break;
    if (text.back() == options.stop_token) break;
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

}  // namespace tessera::nn
