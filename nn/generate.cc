#include "nn/generate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/autograd.h"
#include "core/random.h"
#include "kernels/matmul/matmul.h"

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

void check(const SamplingOptions& o) {
  TESSERA_CHECK(o.temperature >= 0, "sample_token: temperature must be >= 0, got {}",
                o.temperature);
  TESSERA_CHECK(o.top_k >= 0, "sample_token: top_k must be >= 0, got {}", o.top_k);
  TESSERA_CHECK(o.top_p > 0 && o.top_p <= 1, "sample_token: top_p must be in (0, 1], got {}",
                o.top_p);
  TESSERA_CHECK(o.min_p >= 0 && o.min_p <= 1, "sample_token: min_p must be in [0, 1], got {}",
                o.min_p);
}

/// Tokens in the order of their likelihood, sorted no further than they are asked for.
class Ranking {
 public:
  Ranking(std::span<const double> logits, std::vector<int32_t> tokens)
      : logits_(logits), tokens_(std::move(tokens)) {}

  double logit(size_t rank) {
    sort_to(rank + 1);
    return logits_[static_cast<size_t>(tokens_[rank])];
  }
  int32_t operator[](size_t rank) {
    sort_to(rank + 1);
    return tokens_[rank];
  }
  size_t num_tokens() const { return tokens_.size(); }
  void keep(size_t num_tokens) {
    sort_to(num_tokens);
    tokens_.resize(num_tokens);
  }
  const std::vector<int32_t>& tokens() const { return tokens_; }

 private:
  void sort_to(size_t end) {
    if (end <= num_sorted_) return;
    const size_t upto = std::min(tokens_.size(), std::max<size_t>(64, 8 * end));
    const auto at = [&](size_t i) { return tokens_.begin() + static_cast<std::ptrdiff_t>(i); };
    std::partial_sort(at(num_sorted_), at(upto), tokens_.end(), [&](int32_t a, int32_t b) {
      const double x = logits_[static_cast<size_t>(a)], y = logits_[static_cast<size_t>(b)];
      return x != y ? x > y : a < b;
    });
    num_sorted_ = upto;
  }

  std::span<const double> logits_;
  std::vector<int32_t> tokens_;
  size_t num_sorted_ = 0;
};

}  // namespace

int32_t sample_token(std::span<const double> logits, const SamplingOptions& options,
                     uint64_t draw_index) {
  check(options);
  size_t likeliest = logits.size();
  double highest = -std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > highest && std::isfinite(logits[i])) highest = logits[likeliest = i];
  }
  TESSERA_CHECK_AS(NumericsError, likeliest < logits.size(),
                   "sample_token: none of {} logits is finite", logits.size());
  if (options.temperature == 0) return static_cast<int32_t>(likeliest);

  std::vector<int32_t> tokens;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isfinite(logits[i])) tokens.push_back(static_cast<int32_t>(i));
  }
  const auto weight_of = [&](double logit) {
    return std::exp((logit - highest) / options.temperature);
  };
  Ranking ranking(logits, std::move(tokens));
  if (options.top_k > 0 && options.top_k < static_cast<int64_t>(ranking.num_tokens())) {
    ranking.keep(static_cast<size_t>(options.top_k));
  }
  std::vector<double> weights;
  double total = 0;  // of the weights that are kept
  if (options.top_p < 1) {
    double all = 0;
    for (const int32_t token : ranking.tokens())
      all += weight_of(logits[static_cast<size_t>(token)]);
    size_t kept = 0;
    while (kept < ranking.num_tokens() && (kept == 0 || total < options.top_p * all)) {
      total += weight_of(ranking.logit(kept++));
    }
    ranking.keep(kept);
  }
  total = 0;
  for (const int32_t token : ranking.tokens()) {
    const double weight = weight_of(logits[static_cast<size_t>(token)]);
    weights.push_back(weight < options.min_p ? 0 : weight);
    total += weights.back();
  }
  const auto words = philox(make_key(options.seed, hash_name("generate")), 0, draw_index);
  double remaining = total * static_cast<double>(uniform_from_bits(words[0]));
  size_t last = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0) continue;
    last = i;
    remaining -= weights[i];
    if (remaining < 0) break;
  }
  return ranking.tokens()[last];
}

void penalize_repetition(std::span<double> logits, std::span<const int32_t> text, double penalty) {
  TESSERA_CHECK(std::isfinite(penalty) && penalty > 0,
                "penalize_repetition: the penalty must be > 0, got {}", penalty);
  if (penalty == 1) return;
  std::vector<int32_t> tokens(text.begin(), text.end());
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  for (const int32_t token : tokens) {
    if (token < 0 || token >= std::ssize(logits)) continue;
    double& logit = logits[static_cast<size_t>(token)];
    logit = logit > 0 ? logit / penalty : logit * penalty;
  }
}

namespace {

/// A row of the batch: the text that is in it, and how much of it the cache has.
struct Row {
  int64_t prompt = -1;  // -1: none
  std::vector<int32_t> text;
  int64_t num_new = 0;
  int64_t num_cached = 0;
  bool is_to_prefill = false;
};

class Generator {
 public:
  Generator(LanguageModel& model, const std::vector<std::vector<int32_t>>& prompts,
            const GenerateOptions& options)
      : model_(model),
        prompts_(prompts),
        options_(options),
        context_(model.shape().context_length),
        results_(prompts.size()) {
    int64_t longest = 0;
    for (const std::vector<int32_t>& prompt : prompts) {
      longest = std::max(longest, std::min<int64_t>(std::ssize(prompt), context_));
    }
    const int64_t num_new = std::min(options.num_tokens, context_);
    const int64_t num_rows = std::min(std::ssize(prompts), options.max_batch);
    rows_.resize(static_cast<size_t>(num_rows));
    if (num_rows > 0) {
      cache_ =
          model.make_cache(num_rows, std::min(context_, std::max<int64_t>(1, longest + num_new)));
    }
  }

  std::vector<std::vector<int32_t>> run() {
    while (true) {
      for (Row& row : rows_) admit(row);
      const auto is_busy = [](const Row& row) { return row.prompt >= 0; };
      const bool any = std::any_of(rows_.begin(), rows_.end(), is_busy);
      if (options_.any_is_busy ? !options_.any_is_busy(any) : !any) break;
      const auto waiting = std::find_if(rows_.begin(), rows_.end(),
                                        [](const Row& row) { return row.is_to_prefill; });
      if (waiting != rows_.end()) {
        prefill(static_cast<size_t>(waiting - rows_.begin()));
      } else if (any) {
        decode();
      } else {
        idle();
      }
    }
    return std::move(results_);
  }

 private:
  /// The next prompt into a row that has none; a text that does not fit starts over.
  void admit(Row& row) {
    while (row.prompt < 0 && next_ < prompts_.size() && options_.num_tokens > 0) {
      row = {.prompt = static_cast<int64_t>(next_), .text = prompts_[next_], .is_to_prefill = true};
      ++next_;
    }
    if (row.prompt >= 0 && row.num_cached == context_) row.is_to_prefill = true;
  }

  void prefill(size_t index) {
    Row& row = rows_[index];
    const int64_t length = std::ssize(row.text);
    const int64_t kept =
        row.num_cached + length > context_ ? std::max<int64_t>(context_ / 2, 1) : length;
    const std::span<const int32_t> fed =
        std::span(row.text).last(static_cast<size_t>(std::min(kept, length)));
    KvCache cache = cache_.row(static_cast<int64_t>(index));
    const Tensor logits_RV = forward(fed, 1, &cache);
    row.num_cached = cache.length;
    row.is_to_prefill = false;
    take(row, logits_RV.select(0, 0));
  }

  void decode() {
    std::vector<int32_t> ids;
    cache_.row_lengths.clear();
    for (const Row& row : rows_) {
      const bool is_busy = row.prompt >= 0;
      ids.push_back(is_busy ? row.text.back() : 0);
      cache_.row_lengths.push_back(is_busy ? static_cast<int32_t>(row.num_cached) : -1);
    }
    const Tensor logits_RV = [&] {
      const FewRows few;
      return forward(ids, std::ssize(rows_), &cache_);
    }();
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (rows_[i].prompt < 0) continue;
      rows_[i].num_cached += 1;
      take(rows_[i], logits_RV.select(0, static_cast<int64_t>(i)));
    }
  }

  /// For the other ranks' sake.
  void idle() {
    const int32_t token = 0;
    forward(std::span(&token, 1), 1, nullptr);
  }

  /// Logits of the last position of each row, f32 [num_rows, V].
  Tensor forward(std::span<const int32_t> ids, int64_t num_rows, KvCache* cache) {
    ForwardOptions forward;
    forward.cache = cache;
    forward.last_only = true;
    const Tensor ids_BT = from_values(ids, {num_rows, std::ssize(ids) / num_rows});
    const Tensor logits_B1V = model_.logits(ids_BT, forward);
    return logits_B1V.view({num_rows, logits_B1V.dim(2)}).to(kF32);
  }

  /// A row of logits on the host, in memory that is used again.
  std::span<double> on_host(const Tensor& logits_V) {
    if (logits_V.device().type != DeviceType::kCpu) {
      logits_ = logits_V.to_vector();
      return logits_;
    }
    current_stream().synchronize();
    const float* const values = logits_V.data<float>();
    logits_.assign(values, values + logits_V.numel());
    return logits_;
  }

  /// The row's next token.
  void take(Row& row, const Tensor& logits_V) {
    const std::span<double> logits = on_host(logits_V);
    SamplingOptions sampling = options_.sampling;
    sampling.seed += static_cast<uint64_t>(row.prompt);
    penalize_repetition(logits, row.text, sampling.repetition_penalty);
    const int32_t token = sample_token(logits, sampling, static_cast<uint64_t>(row.num_new));
    row.text.push_back(token);
    results_[static_cast<size_t>(row.prompt)].push_back(token);
    row.num_new += 1;
    bool is_over = row.num_new == options_.num_tokens;
    if (options_.on_token && !options_.on_token(row.prompt, token)) is_over = true;
    const std::vector<int32_t>& stops = options_.stop_tokens;
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) is_over = true;
    if (is_over) row = {};
  }

  LanguageModel& model_;
  const std::vector<std::vector<int32_t>>& prompts_;
  const GenerateOptions& options_;
  const int64_t context_;
  KvCache cache_;
  std::vector<Row> rows_;
  size_t next_ = 0;
  std::vector<double> logits_;
  std::vector<std::vector<int32_t>> results_;
};

}  // namespace

std::vector<std::vector<int32_t>> generate(LanguageModel& model,
                                           const std::vector<std::vector<int32_t>>& prompts,
                                           const GenerateOptions& options) {
  for (const std::vector<int32_t>& prompt : prompts) {
    TESSERA_CHECK(!prompt.empty(), "generate: the prompt has no token");
  }
  TESSERA_CHECK(options.max_batch > 0, "generate: max_batch must be > 0, got {}",
                options.max_batch);
  TESSERA_CHECK_AS(
      ConfigError, model.shape().is_causal,
      "generate: {} predicts masked tokens, expected a model that predicts the next one",
      model.kind());
  NoGrad no_grad;
  Evaluation evaluation(model);
  return Generator(model, prompts, options).run();
}

std::vector<int32_t> generate(LanguageModel& model, std::span<const int32_t> prompt,
                              const GenerateOptions& options) {
  const std::vector<std::vector<int32_t>> prompts{{prompt.begin(), prompt.end()}};
  return generate(model, prompts, options)[0];
}

}  // namespace tessera::nn
