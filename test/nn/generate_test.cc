#include "nn/generate.h"

#include <algorithm>
#include <limits>
#include <map>

#include "core/autograd.h"
#include "nn/bloom/bloom.h"
#include "nn/gpt2/gpt2.h"
#include "nn/llama/llama.h"
#include "test/testing.h"

namespace tessera::nn {
namespace {

using testing::error_of;

std::map<int32_t, int> histogram(const std::vector<double>& logits, const SamplingOptions& options,
                                 int num_draws) {
  std::map<int32_t, int> counts;
  for (int i = 0; i < num_draws; ++i) {
    ++counts[sample_token(logits, options, static_cast<uint64_t>(i))];
  }
  return counts;
}

TEST_CASE("sample_token: temperature 0 takes the most likely, the lower of equals", "[generate]") {
  SamplingOptions greedy;
  greedy.temperature = 0;
  CHECK(sample_token(std::vector<double>{1, 3, 2, 3}, greedy, 0) == 1);
  SamplingOptions one;
  one.top_k = 1;
  CHECK(sample_token(std::vector<double>{1, 3, 2, 3}, one, 5) == 1);
  SamplingOptions narrow;
  narrow.top_p = 1e-9;
  CHECK(sample_token(std::vector<double>{1, 3, 2, 3}, narrow, 7) == 1);
}

TEST_CASE("sample_token: frequencies are the probabilities", "[generate]") {
  const std::vector<double> logits{std::log(0.1), std::log(0.6), std::log(0.3)};
  auto counts = histogram(logits, {}, 20000);
  CHECK(std::abs(counts[0] / 20000.0 - 0.1) < 0.01);
  CHECK(std::abs(counts[1] / 20000.0 - 0.6) < 0.015);
  CHECK(std::abs(counts[2] / 20000.0 - 0.3) < 0.015);

  SamplingOptions two;
  two.top_k = 2;
  counts = histogram(logits, two, 20000);
  CHECK(counts[0] == 0);
  CHECK(std::abs(counts[1] / 20000.0 - 2.0 / 3) < 0.015);

  SamplingOptions most;
  most.top_p = 0.6;
  CHECK(histogram(logits, most, 100) == std::map<int32_t, int>{{1, 100}});
  most.top_p = 0.61;
  CHECK(histogram(logits, most, 1000).size() == 2);

  SamplingOptions hot;
  hot.temperature = 0.5;
  counts = histogram(logits, hot, 20000);
  CHECK(std::abs(counts[1] / 20000.0 - 0.36 / 0.46) < 0.015);
}

TEST_CASE("sample_token: min_p keeps what is not far less likely than the likeliest",
          "[generate]") {
  const std::vector<double> logits{std::log(0.1), std::log(0.6), std::log(0.3)};
  SamplingOptions options;
  options.min_p = 0.51;
  CHECK(histogram(logits, options, 1000) == std::map<int32_t, int>{{1, 1000}});
  options.min_p = 0.49;
  auto counts = histogram(logits, options, 20000);
  CHECK(counts[0] == 0);
  CHECK(std::abs(counts[1] / 20000.0 - 2.0 / 3) < 0.015);
  // Of what top_p keeps; top_p's share is that of all.
  options.top_p = 0.95;
  CHECK(histogram(logits, options, 1000).size() == 2);
}

TEST_CASE("sample_token: of many tokens the ranking is that of a full sort", "[generate]") {
  std::vector<double> logits(5000);
  for (size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<double>(i * 7919 % 5000) / 500.0;  // each value once
  }
  for (const auto& [top_k, top_p] : {std::pair<int64_t, double>{100, 1.0}, {0, 0.5}, {700, 0.9}}) {
    std::vector<double> sorted = logits;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    if (top_k > 0) sorted.resize(static_cast<size_t>(top_k));
    double all = 0, kept = 0;
    for (const double logit : sorted) all += std::exp(logit);
    size_t num_kept = 0;
    while (kept < top_p * all && num_kept < sorted.size()) kept += std::exp(sorted[num_kept++]);
    SamplingOptions options;
    options.top_k = top_k, options.top_p = top_p;
    double lowest = 1e9;
    for (const auto& [token, count] : histogram(logits, options, 20000)) {
      lowest = std::min(lowest, logits[static_cast<size_t>(token)]);
    }
    CHECK(lowest >= sorted[num_kept - 1]);
    CHECK(lowest < sorted[num_kept - 1] + 0.5);
  }
}

TEST_CASE("penalize_repetition: each token of the text once, away from zero", "[generate]") {
  std::vector<double> logits{3, -3, 1, 0};
  penalize_repetition(logits, std::vector<int32_t>{0, 1, 0, 3, 9}, 1.5);
  CHECK(logits == std::vector<double>{2, -4.5, 1, 0});
  // The first id beyond the vocabulary, as padded ones are.
  std::vector<double> row{3, -3, 1, 5};
  penalize_repetition(std::span(row).first(3), std::vector<int32_t>{-1, 3}, 1.5);
  CHECK(row == std::vector<double>{3, -3, 1, 5});
}

TEST_CASE("sample_token: the seed and the index decide", "[generate]") {
  const std::vector<double> logits(100, 0.0);
  SamplingOptions a, b;
  b.seed = 1;
  int num_equal = 0;
  for (uint64_t i = 0; i < 100; ++i) {
    CHECK(sample_token(logits, a, i) == sample_token(logits, a, i));
    num_equal += sample_token(logits, a, i) == sample_token(logits, b, i);
  }
  CHECK(num_equal < 20);
}

TEST_CASE("sample_token: options out of range, no finite logit", "[generate]") {
  const std::vector<double> logits{0, 1};
  const auto error = [&](auto change) {
    SamplingOptions options;
    change(options);
    return error_of([&] { sample_token(logits, options, 0); });
  };
  CHECK(error([](auto& o) {
          o.temperature = -1;
        }).starts_with("sample_token: temperature must be >= 0, got -1"));
  CHECK(
      error([](auto& o) { o.top_k = -1; }).starts_with("sample_token: top_k must be >= 0, got -1"));
  CHECK(error([](auto& o) {
          o.top_p = 0;
        }).starts_with("sample_token: top_p must be in (0, 1], got 0"));
  CHECK(error([](auto& o) {
          o.min_p = 1.5;
        }).starts_with("sample_token: min_p must be in [0, 1], got 1.5"));
  std::vector<double> penalized = logits;
  CHECK(error_of([&] {
          penalize_repetition(penalized, {}, 0);
        }).starts_with("penalize_repetition: the penalty must be > 0, got 0"));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> none{nan, -std::numeric_limits<double>::infinity()};
  CHECK(error_of([&] {
          sample_token(none, {}, 0);
        }).starts_with("sample_token: none of 2 logits is finite"));
  CHECK(sample_token(std::vector<double>{nan, 0, nan}, {}, 0) == 1);
}

Llama tiny_llama() {
  LlamaConfig c;
  c.vocab_size = 31;
  c.context_length = 12;
  c.num_layers = 2;
  c.num_heads = 2;
  c.num_kv_heads = 1;
  c.width = 8;
  c.ffn_width = 12;
  c.init_stddev = 0.5;
  return Llama(c);
}

Gpt2 tiny_gpt2() {
  Gpt2Config c;
  c.vocab_size = 31;
  c.context_length = 12;
  c.num_layers = 2;
  c.num_heads = 2;
  c.width = 8;
  c.dropout = 0.5;
  c.init_stddev = 0.5;
  return Gpt2(c);
}

/// The most likely next token of a row, without a cache.
int32_t next_token(LanguageModel& model, std::span<const int32_t> row) {
  NoGrad no_grad;
  const auto T = static_cast<int64_t>(row.size());
  ForwardOptions last;
  last.last_only = true;
  const std::vector<double> logits = model.logits(from_values(row, {1, T}), last).to_vector();
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

/// The same with a window of 4 in the first layer and soft-caps.
Llama windowed_llama() {
  LlamaConfig c = tiny_llama().config();
  c.window = 4, c.window_layers = "wf";
  c.attn_softcap = 1, c.logit_softcap = 2;
  return Llama(c);
}

void check_greedy(LanguageModel& model) {
  model.initialize(4);
  GenerateOptions options;
  options.num_tokens = 9;
  options.sampling.temperature = 0;
  const std::vector<int32_t> prompt{3, 7, 30};
  const std::vector<int32_t> text = generate(model, prompt, options);
  CHECK(model.is_training());
  REQUIRE(text.size() == 9);
  model.train(false);
  std::vector<int32_t> row = prompt;
  for (const int32_t token : text) {
    CHECK(token == next_token(model, row));
    row.push_back(token);
  }
}

TEST_CASE("generate: greedy text is that of repeated forwards without a cache", "[generate]") {
  Llama llama = tiny_llama();
  check_greedy(llama);
  Llama windowed = windowed_llama();
  check_greedy(windowed);
  Gpt2 gpt2 = tiny_gpt2();
  check_greedy(gpt2);
}

TEST_CASE("generate: a full context starts over with its last half", "[generate]") {
  Gpt2 model = tiny_gpt2();
  model.initialize(4);
  GenerateOptions options;
  options.num_tokens = 40;
  options.sampling.temperature = 0;
  std::vector<int32_t> row{1, 2, 3};
  const std::vector<int32_t> text = generate(model, row, options);
  REQUIRE(text.size() == 40);
  model.train(false);
  size_t window = 0;  // where the cache began
  for (const int32_t token : text) {
    if (row.size() - window > 12) window = row.size() - 6;
    CHECK(token == next_token(model, std::span<const int32_t>(row).subspan(window)));
    row.push_back(token);
  }
  // A prompt longer than the context: its end is what counts.
  std::vector<int32_t> prompt(50, 5);
  prompt[49] = 6;
  options.num_tokens = 1;
  CHECK(generate(model, prompt, options)[0] ==
        next_token(model, std::span<const int32_t>(prompt).last(6)));
}

TEST_CASE("generate: stops at a token or when told", "[generate]") {
  Llama model = tiny_llama();
  model.initialize(4);
  const std::vector<int32_t> prompt{1};
  GenerateOptions options;
  options.num_tokens = 30;
  const std::vector<int32_t> text = generate(model, prompt, options);
  REQUIRE(text.size() == 30);
  CHECK(generate(model, prompt, options) == text);
  options.sampling.seed = 1;
  CHECK(generate(model, prompt, options) != text);
  options.sampling.seed = 0;

  options.stop_tokens = {1000, text[5]};
  const auto stop = std::find(text.begin(), text.end(), text[5]) + 1;
  CHECK(generate(model, prompt, options) == std::vector<int32_t>(text.begin(), stop));
  options.stop_tokens.clear();

  std::vector<int32_t> seen;
  options.on_token = [&](int64_t prompt, int32_t token) {
    CHECK(prompt == 0);
    seen.push_back(token);
    return seen.size() < 4;
  };
  CHECK(generate(model, prompt, options).size() == 4);
  CHECK(seen == std::vector<int32_t>(text.begin(), text.begin() + 4));
  CHECK(error_of([&] {
          generate(model, std::span<const int32_t>(), options);
        }).starts_with("generate: the prompt has no token"));
  options.max_batch = 0;
  CHECK(error_of([&] {
          generate(model, prompt, options);
        }).starts_with("generate: max_batch must be > 0, got 0"));
}

Bloom tiny_bloom() {
  BloomConfig c;
  c.vocab_size = 31;
  c.context_length = 12;
  c.num_layers = 2;
  c.num_heads = 2;
  c.width = 8;
  c.init_stddev = 0.5;
  return Bloom(c);
}

/// The texts of prompts decoded together are those of each alone, whatever the batch.
void check_batches(LanguageModel& model) {
  model.initialize(4);
  const std::vector<std::vector<int32_t>> prompts{
      {1, 2, 3}, {4}, {1, 2, 3}, {5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}, {18, 19}};
  GenerateOptions options;
  options.num_tokens = 20;  // beyond the context
  options.sampling.seed = 40;
  options.sampling.repetition_penalty = 1.1;
  options.stop_tokens = {7};
  std::vector<std::vector<int32_t>> alone;
  for (size_t i = 0; i < prompts.size(); ++i) {
    GenerateOptions one = options;
    one.sampling.seed += i;
    alone.push_back(generate(model, prompts[i], one));
  }
  CHECK(alone[0] != alone[2]);
  for (const int64_t batch : {1, 2, 3, 16}) {
    options.max_batch = batch;
    std::vector<std::vector<int32_t>> streamed(prompts.size());
    options.on_token = [&](int64_t prompt, int32_t token) {
      streamed[static_cast<size_t>(prompt)].push_back(token);
      return true;
    };
    CHECK(generate(model, prompts, options) == alone);
    CHECK(streamed == alone);
  }
}

TEST_CASE("generate: a text does not depend on the batch that it is decoded in", "[generate]") {
  Llama llama = tiny_llama();
  check_batches(llama);
  Llama windowed = windowed_llama();
  check_batches(windowed);
  Gpt2 gpt2 = tiny_gpt2();
  check_batches(gpt2);
  Bloom bloom = tiny_bloom();
  check_batches(bloom);
  const ParameterDtype bf16(kBF16);
  Llama rounded = tiny_llama();
  check_batches(rounded);
}

TEST_CASE("generate: asks before each forward whether any rank needs one", "[generate]") {
  Llama model = tiny_llama();
  model.initialize(4);
  GenerateOptions options;
  options.num_tokens = 3;
  options.max_batch = 2;
  std::vector<bool> asked;
  options.any_is_busy = [&](bool is_busy) {
    asked.push_back(is_busy);
    return asked.size() < 8;
  };
  const std::vector<std::vector<int32_t>> prompts{{1}, {2, 3}};
  const auto texts = generate(model, prompts, options);
  CHECK(asked == std::vector<bool>{true, true, true, true, false, false, false, false});
  options.any_is_busy = {};
  CHECK(generate(model, prompts, options) == texts);
  CHECK(generate(model, std::vector<std::vector<int32_t>>{}, options).empty());
}

}  // namespace
}  // namespace tessera::nn
