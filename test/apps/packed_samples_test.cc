#include "apps/packed_samples.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "nn/gpt2/gpt2.h"
#include "nn/llama/llama.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;

namespace {

constexpr int32_t kSeparator = 9;

TokenSource source_of(std::vector<int32_t> ids, double weight = 0) {
  return {"s", weight, {find_documents(TokenArray(ids, "s.bin"), kSeparator)}};
}

std::shared_ptr<const std::vector<TokenSource>> list(std::vector<TokenSource> sources) {
  return std::make_shared<std::vector<TokenSource>>(std::move(sources));
}

SampleOptions options(int64_t context, int64_t separator = kSeparator) {
  SampleOptions o;
  o.context = context, o.vocab_size = 1000, o.seed = 1, o.separator = separator;
  o.restart_positions = true;
  return o;
}

/// Documents of 1 to 40 tokens that all differ.
std::vector<int32_t> many_documents(int32_t count, int32_t first) {
  std::vector<int32_t> ids;
  for (int32_t d = 0; d < count; ++d) {
    ids.push_back(kSeparator);
    for (int32_t i = 0; i < 1 + d * d % 40; ++i) ids.push_back(10 + (first + d * 7 + i) % 900);
  }
  return ids;
}

/// (input, target) of every position that counts.
std::map<std::pair<int32_t, int32_t>, int> count_pairs(const Samples& samples, int64_t end) {
  std::map<std::pair<int32_t, int32_t>, int> counts;
  for (int64_t i = 0; i < end; ++i) {
    const Batch batch = samples.batch(i, 1);
    for (size_t t = 0; t < batch.inputs.size(); ++t) {
      if (batch.targets[t] != kIgnoredTarget) ++counts[{batch.inputs[t], batch.targets[t]}];
    }
  }
  return counts;
}

}  // namespace

TEST_CASE("packed samples: documents are what stands between separators", "[packed]") {
  const auto documents = find_documents(TokenArray({9, 1, 2, 9, 9, 3, 9, 4, 5, 6}, "a"), 9);
  CHECK(documents.begins == std::vector<int64_t>{1, 5, 7});
  CHECK(documents.ends == std::vector<int64_t>{3, 6, 10});
  CHECK(find_documents(TokenArray({9, 9}, "a"), 9).count() == 0);
  CHECK(find_documents(TokenArray({1, 2}, "a"), 9).count() == 1);
}

TEST_CASE("packed samples: rows have documents side by side, each with its separators",
          "[packed]") {
  const PackedSamples samples(list({source_of({9, 1, 2, 3, 4, 9, 5, 6})}), options(10), 0,
                              SplitPart::kTrain);
  REQUIRE(samples.num_samples() == 1);
  CHECK(samples.num_positions() == 8);
  const Batch batch = samples.batch(0, 1);
  CHECK(batch.inputs == std::vector<int32_t>{9, 1, 2, 3, 4, 9, 5, 6, 0, 0});
  const int32_t none = kIgnoredTarget;
  CHECK(batch.targets == std::vector<int32_t>{1, 2, 3, 4, 9, 5, 6, 9, none, none});
  CHECK(batch.document_starts == std::vector<int32_t>{0, 0, 0, 0, 0, 5, 5, 5, 8, 8});
  CHECK(batch.positions == std::vector<int32_t>{0, 1, 2, 3, 4, 0, 1, 2, 0, 1});
  CHECK(batch.num_valid == 8);
}

TEST_CASE("packed samples: what begins a document may be another token than what ends it",
          "[packed]") {
  SampleOptions o = options(10);
  o.document_begin = 8;
  const PackedSamples samples(list({source_of({9, 1, 2, 3, 9, 5, 6})}), o, 0, SplitPart::kTrain);
  REQUIRE(samples.num_samples() == 1);
  const Batch batch = samples.batch(0, 1);
  CHECK(batch.inputs == std::vector<int32_t>{8, 1, 2, 3, 8, 5, 6, 0, 0, 0});
  const int32_t none = kIgnoredTarget;
  CHECK(batch.targets == std::vector<int32_t>{1, 2, 3, 9, 5, 6, 9, none, none, none});
}

TEST_CASE("packed samples: without a separator a document predicts its own tokens alone",
          "[packed]") {
  TokenSource source = source_of({9, 1, 2, 3, 4, 9, 5, 9, 6, 7});
  const PackedSamples samples(list({source}), options(4, -1), 0, SplitPart::kTrain);
  CHECK(samples.num_positions() == 4);
  const auto pairs = count_pairs(samples, samples.num_samples());
  CHECK(pairs == std::map<std::pair<int32_t, int32_t>, int>{
                     {{1, 2}, 1}, {{2, 3}, 1}, {{3, 4}, 1}, {{6, 7}, 1}});
}

TEST_CASE("packed samples: what is not to be learned stays so in packed windows", "[packed]") {
  // Documents of several lengths; of each token its number, which says whether it is a target.
  const auto is_target = [](int32_t id) { return id % 3 == 0; };
  TokenDocuments documents;
  std::vector<int32_t> ids, targets;
  int64_t expected = 0;
  for (int32_t d = 0; d < 50; ++d) {
    documents.begins.push_back(static_cast<int64_t>(ids.size()));
    for (int32_t i = 0; i < 2 + d * d % 30; ++i) {
      ids.push_back(static_cast<int32_t>(ids.size()));
      targets.push_back(is_target(ids.back()) ? 1 : 0);
      if (i > 0) expected += targets.back();
    }
    documents.ends.push_back(static_cast<int64_t>(ids.size()));
  }
  documents.tokens = TokenArray(ids, "chats");
  documents.is_target = TokenArray(targets, "targets");
  // Windows longer than every document, and ones that cut them.
  for (const int64_t context : {40, 7}) {
    const PackedSamples samples(list({{"s", 0, {documents}}}), options(context, -1), 0,
                                SplitPart::kTrain);
    std::map<int32_t, int> count;
    int64_t total = 0;
    for (int64_t w = 0; w < samples.num_samples(); ++w) {
      const Batch batch = samples.batch(w, 1);
      int64_t num_valid = 0;
      for (size_t t = 0; t < batch.targets.size(); ++t) {
        if (batch.targets[t] == kIgnoredTarget) continue;
        ++num_valid;
        ++count[batch.targets[t]];
        CHECK(is_target(batch.targets[t]));
        CHECK(batch.inputs[t] + 1 == batch.targets[t]);
        const auto start = static_cast<size_t>(batch.document_starts[t]);
        CHECK(batch.positions[t] == static_cast<int32_t>(t - start));
        if (context == 40) {
          CHECK(std::count(documents.begins.begin(), documents.begins.end(), batch.inputs[start]) ==
                1);
        }
      }
      CHECK(batch.num_valid == num_valid);
      CHECK(samples.num_targets(w, 1) == num_valid);
      total += num_valid;
    }
    CHECK(total == expected);
    CHECK(static_cast<int64_t>(count.size()) == expected);  // each once
  }
}

TEST_CASE("packed samples: an epoch and validation have each position once", "[packed]") {
  const auto sources = list({source_of(many_documents(90, 0)), source_of(many_documents(7, 300))});
  for (const double fraction : {0.0, 0.2}) {
    const PackedSamples train(sources, options(16), fraction, SplitPart::kTrain);
    const PackedSamples val(sources, options(16), fraction, SplitPart::kVal);
    CHECK((fraction > 0) == (val.num_samples() > 0));
    std::map<std::pair<int32_t, int32_t>, int> expected;
    for (const TokenSource& source : *sources) {
      for (const TokenDocuments& shard : source.shards) {
        for (size_t d = 0; d < shard.begins.size(); ++d) {
          int32_t before = kSeparator;
          for (int64_t i = shard.begins[d]; i <= shard.ends[d]; ++i) {
            const auto id = i < shard.ends[d] ? static_cast<int32_t>(shard.tokens[i]) : kSeparator;
            ++expected[{before, id}];
            before = id;
          }
        }
      }
    }
    auto found = count_pairs(train, train.num_samples());
    for (const auto& [pair, count] : count_pairs(val, val.num_samples())) found[pair] += count;
    CHECK(found == expected);
    // Behind its end validation has padding, training the next epoch.
    if (fraction > 0) CHECK(val.batch(val.num_samples(), 2).num_valid == 0);
    CHECK(train.batch(train.num_samples(), 2).num_valid > 0);
    // What a step divides its loss by, before its rows are read.
    for (int64_t first = 0; first < train.num_samples(); first += 11) {
      CHECK(train.num_targets(first, 11) == train.batch(first, 11).num_valid);
    }
    CHECK(val.num_targets(0, 1000) == val.batch(0, 1000).num_valid);
  }
}

/// Logits of the tokens 20 to 24 at `at` in a window of 12, other documents around them.
std::vector<double> logits_of_document(nn::LanguageModel& model, int32_t at, int32_t first,
                                       int32_t last) {
  constexpr int32_t kCount = 5;
  std::vector<int32_t> inputs(12), starts(12), positions(12);
  for (int32_t t = 0; t < 12; ++t) {
    const auto i = static_cast<size_t>(t);
    const bool is_before = t < at, is_inside = !is_before && t < at + kCount;
    starts[i] = is_before ? 0 : is_inside ? at : at + kCount;
    positions[i] = t - starts[i];
    inputs[i] = (is_before ? first : is_inside ? 20 : last) + positions[i];
  }
  nn::ForwardOptions options;
  const Shape shape{1, 12};
  options.document_starts = from_values(std::span<const int32_t>(starts), shape);
  options.positions = from_values(std::span<const int32_t>(positions), shape);
  const std::vector<double> all =
      model.logits(from_values(std::span<const int32_t>(inputs), shape), options).to_vector();
  const auto V = static_cast<int64_t>(all.size()) / 12;
  return {all.begin() + at * V, all.begin() + (at + kCount) * V};
}

TEST_CASE(
    "packed samples: logits of a document are bitwise the same whatever is beside it, and near "
    "at another place",
    "[packed]") {
  const NoGrad no_grad;
  for (const DType dtype : {kF32, kBF16}) {
    const nn::ParameterDtype parameters(dtype);
    nn::Gpt2Config gpt2;
    gpt2.num_layers = 2, gpt2.num_heads = 2, gpt2.width = 32, gpt2.vocab_size = 64;
    gpt2.context_length = 12;
    nn::LlamaConfig llama;
    llama.num_layers = 2, llama.num_heads = 2, llama.width = 32, llama.vocab_size = 64;
    llama.context_length = 12, llama.ffn_width = 64;
    std::vector<std::unique_ptr<nn::LanguageModel>> models;
    models.push_back(std::make_unique<nn::Gpt2>(gpt2));
    models.push_back(std::make_unique<nn::Llama>(llama));
    for (const auto& model : models) {
      model->initialize(1);
      const std::vector<double> expected = logits_of_document(*model, 3, 1, 30);
      double largest = 0;
      for (const double x : expected) largest = std::max(largest, std::abs(x));
      CHECK(largest > 0);
      CHECK(logits_of_document(*model, 3, 5, 30) == expected);
      CHECK(logits_of_document(*model, 3, 1, 40) == expected);
      CHECK(logits_of_document(*model, 3, 50, 2) == expected);
      for (const int32_t at : {0, 1, 6, 7}) {
        const std::vector<double> moved = logits_of_document(*model, at, 1, 30);
        for (size_t i = 0; i < moved.size(); ++i) {
          CHECK(std::abs(moved[i] - expected[i]) <= largest * testing::tol(dtype, 32));
        }
      }
    }
  }
}

TEST_CASE("packed samples: sources are paths with or without weights", "[packed]") {
  using Sources = std::vector<std::pair<std::string, double>>;
  CHECK(parse_sources("a/*.bin: 0.7, b/*.bin:3") == Sources{{"a/*.bin", 0.7}, {"b/*.bin", 3}});
  CHECK(parse_sources("a.txt,c:/b.txt") == Sources{{"a.txt", 0}, {"c:/b.txt", 0}});
  const auto error = [](const std::string& text) { return error_of([&] { parse_sources(text); }); };
  CHECK(error("a: 0") == "= \"a: 0\": weight 0, expected a number > 0");
  CHECK(error("a: 1, b") == "= \"a: 1, b\": weights of some, expected one of each source or none");
  CHECK(error("a,,b") == "= \"a,,b\": an empty path, expected PATH or PATH: WEIGHT between commas");
}

TEST_CASE("packed samples: sources are read as their names say", "[packed]") {
  const testing::TempDir dir;
  Config config;
  config.data.sources =
      dir.write("a.jsonl", "{\"text\": \"one\"}\n{\"text\": \"\"}\n{\"text\": \"two\"}\n") +
      ": 1, " + dir.write("b.txt", "three") + ": 2";
  const Data data = load_data(config);
  REQUIRE(data.sources != nullptr);
  CHECK(data.tokenizer->name() == "byte");
  CHECK(data.vocab_size == 256);
  CHECK(data.train.num_tokens() == 11);
  REQUIRE(data.sources->size() == 2);
  CHECK((*data.sources)[0].shards[0].begins == std::vector<int64_t>{0, 3});  // not the empty one
  CHECK((*data.sources)[1].weight == 2);
  const PackedSamples samples(data.sources, options(8, -1), 0, SplitPart::kTrain);
  CHECK(sources_text(*samples.plan(), *data.sources, 0)
            .find("source " + dir / "b.txt" + ": 1 documents, 0.00 passes") != std::string::npos);
  config.data.sources = dir.write("c.bin", "");
  CHECK(error_of([&] { load_data(config); })
            .ends_with("data.sources with token shards, expected data.separator, the token between "
                       "documents, to be set"));
  config.data.sources = dir / "none*.txt";
  CHECK(error_of([&] { load_data(config); }) ==
        "data.sources = " + dir / "none*.txt" +
            ": no file matches, expected token shards or documents");
}

TEST_CASE("packed samples: [[data.source]] is data.sources", "[packed]") {
  const auto config = [](const std::string& text) { return parse_config(text, "c.toml"); };
  CHECK(
      config("[[data.source]]\npath = \"a.txt\"\nweight = 0.5\n[[data.source]]\npath = \"b.txt\"\n"
             "weight = 2\n")
          .data.sources == "a.txt: 0.5, b.txt: 2");
  const auto error = [&](const std::string& text) { return error_of([&] { config(text); }); };
  CHECK(error("[[data.source]]\npat = \"a\"\n") ==
        "c.toml:1: data.source: pat = \"a\", expected path, a text, and weight, a number");
  CHECK(error("[[data.source]]\nweight = 1\n") ==
        "c.toml:1: data.source: path \"\", expected a path or a glob without a comma");
  CHECK(error("[data]\nsource = 3\n") == "c.toml:2: data.source, expected tables: [[data.source]]");
  CHECK(
      error("data.sources = \"a: 1, b\"") ==
      "c.toml:1: data.sources = \"a: 1, b\": weights of some, expected one of each source or none");
  CHECK(error("data.sources = \"a\"\ndata.val_tokens = \"b\"") ==
        "c.toml:2: data.val_tokens with data.sources, expected data.tokens");
}
