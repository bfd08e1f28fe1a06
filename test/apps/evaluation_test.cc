#include <cmath>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>

#include "apps/evaluation/evaluate.h"
#include "apps/evaluation/python_random.h"
#include "apps/evaluation/scorer.h"
#include "apps/model_command.h"
#include "dist/comm/local.h"
#include "nn/llama/llama.h"
#include "test/golden/golden.h"
#include "test/temp_dir.h"
#include "test/testing.h"

namespace tessera::apps {
namespace {

using testing::error_of;

std::string eval_dir() {
  return testing::golden_dir() + "/eval";
}

nlohmann::json golden_results() {
  std::ifstream file(eval_dir() + "/results.json");
  return nlohmann::json::parse(file);
}

TaskForm form_of(const std::string& name) {
  for (const auto& entry : kEnumNames<TaskForm>) {
    if (entry.name == name) return entry.value;
  }
  FAIL("no form " << name);
  return TaskForm::kText;
}

/// The items that lm-eval was given, with as many examples.
EvalTask golden_task(const nlohmann::json& golden) {
  const std::string name = golden["form"];
  TaskOptions options;
  options.num_fewshot = golden["fewshot"];
  const std::string path = eval_dir() + "/" + name + ".jsonl";
  // There the examples of these two are of another split, which has the same rows.
  if (name == "arc" || name == "mmlu") options.fewshot_path = path;
  return load_task(form_of(name), path, options);
}

/// All results of the golden tasks on some ranks, of rank 0.
std::vector<TaskResult> evaluate_on(int ranks) {
  std::vector<TaskResult> results;
  std::mutex mutex;
  dist::run_ranks(ranks, {}, [&](dist::World& world) {
    ShardedModel model = load_sharded(eval_dir() + "/model", kF32, world);
    EvaluateOptions options;
    options.prefix_token = prefix_token_of(model.saved.config, model.saved.tokenizer.get());
    options.end_tokens = end_tokens_of(model.saved.config, model.saved.tokenizer.get());
    options.max_tokens = 24;
    options.max_batch = 2;
    for (const nlohmann::json& golden : golden_results()) {
      TaskResult result = evaluate_task(golden_task(golden), *model.saved.model,
                                        *model.saved.tokenizer, world, options);
      model.fsdp->end_forward();
      const std::lock_guard lock(mutex);
      if (world.rank() == 0) results.push_back(std::move(result));
    }
  });
  return results;
}

void check_item(const ItemResult& item, const nlohmann::json& expected, int64_t gold) {
  if (expected.contains("text")) {
    CHECK(item.text == expected["text"]);
    return;
  }
  const std::vector<double> log_probabilities = expected["log_probabilities"];
  REQUIRE(item.log_probabilities.size() == log_probabilities.size());
  for (size_t i = 0; i < log_probabilities.size(); ++i) {
    CHECK(std::abs(item.log_probabilities[i] - log_probabilities[i]) <
          1e-5 * std::abs(log_probabilities[i]) + 1e-4);
  }
  if (!expected.contains("is_greedy")) return;
  CHECK(item.is_greedy == expected["is_greedy"][static_cast<size_t>(gold)].get<bool>());
}

TEST_CASE("evaluation: item by item what lm-eval makes of it, the same bits on 1, 2 and 3 ranks",
          "[evaluation]") {
  const nlohmann::json goldens = golden_results();
  const std::vector<TaskResult> alone = evaluate_on(1);
  REQUIRE(alone.size() == goldens.size());
  bool has_greedy = false;
  for (size_t t = 0; t < goldens.size(); ++t) {
    const nlohmann::json& golden = goldens[t];
    CAPTURE(golden["form"], golden["fewshot"]);
    const TaskResult& result = alone[t];
    const EvalTask task = golden_task(golden);
    REQUIRE(result.items.size() == golden["items"].size());
    for (size_t i = 0; i < result.items.size(); ++i) {
      CAPTURE(i);
      check_item(result.items[i], golden["items"][i], task.items[i].gold);
      has_greedy = has_greedy || result.items[i].is_greedy;
    }
    int num_compared = 0;
    for (const auto& [name, metric] : result.metrics) {
      if (!golden["metrics"].contains(name)) continue;
      CAPTURE(name);
      ++num_compared;
      const double expected = golden["metrics"][name];
      CHECK(std::abs(metric.value - expected) <= 1e-5 * std::abs(expected));
      if (!golden["metrics"].contains(name + "_stderr")) continue;
      REQUIRE(metric.standard_error);
      CHECK(std::abs(*metric.standard_error - golden["metrics"][name + "_stderr"].get<double>()) <
            1e-12);
    }
    CHECK(num_compared > 0);
  }
  CHECK(has_greedy);
  for (const int ranks : {2, 3}) {
    CAPTURE(ranks);
    const std::vector<TaskResult> shared = evaluate_on(ranks);
    for (size_t t = 0; t < goldens.size(); ++t) {
      CAPTURE(goldens[t]["form"], goldens[t]["fewshot"]);
      for (const auto& [name, metric] : alone[t].metrics) {
        CHECK(shared[t].metrics.at(name).value == metric.value);
        CHECK(shared[t].metrics.at(name).standard_error == metric.standard_error);
      }
      for (size_t i = 0; i < alone[t].items.size(); ++i) {
        CHECK(shared[t].items[i].log_probabilities == alone[t].items[i].log_probabilities);
        CHECK(shared[t].items[i].text == alone[t].items[i].text);
      }
    }
  }
}

TEST_CASE("evaluation: bits a byte are those that the losses say", "[evaluation]") {
  const testing::TempDir dir;
  const std::string path = dir.path() + "/text.jsonl";
  std::ofstream(path) << R"({"text": "hold the café"})"
                      << "\n"
                      << R"({"text": "a"})"
                      << "\n";
  dist::run_ranks(1, {}, [&](dist::World& world) {
    const SavedModel saved = load_model(eval_dir() + "/model");
    const EvalTask task = load_task(TaskForm::kText, path);
    double log_probability = 0, tokens = 0;
    for (const int32_t prefix : {0, -1}) {  // <|endoftext|>, or nothing before a text
      TaskResult result;
      EvaluateOptions options;
      options.prefix_token = prefix;
      if (prefix < 0) {  // a text of one token has none that is predicted
        CHECK(error_of([&] {
                evaluate_task(task, *saved.model, *saved.tokenizer, world, options);
              }).starts_with(path + ": line 2: a text of 1 tokens, expected some"));
        continue;
      }
      result = evaluate_task(task, *saved.model, *saved.tokenizer, world, options);
      for (const ItemResult& item : result.items) {
        log_probability += item.log_probabilities[0];
        tokens += item.num_tokens[0];
      }
      CHECK(result.metrics.at("loss").value == -log_probability / tokens);
      CHECK(std::abs(result.metrics.at("bits_per_byte").value +
                     log_probability / std::log(2.0) / (14 + 1)) < 1e-12);
      CHECK(std::abs(result.metrics.at("perplexity").value - std::exp(-log_probability / tokens)) <
            1e-9);
    }
  });
}

TEST_CASE("PythonRandom: the samples of Python's random", "[evaluation]") {
  PythonRandom random(1234);
  CHECK(random.sample(10, 3) == std::vector<size_t>{7, 1, 0});
  CHECK(random.sample(1000, 4) == std::vector<size_t>{92, 932, 965, 961});
  CHECK(random.sample(100, 7) == std::vector<size_t>{74, 4, 85, 88, 10, 12, 98});
  CHECK(random.sample(30, 7) == std::vector<size_t>{11, 7, 0, 27, 25, 26, 29});
}

std::string task_error(TaskForm form, const std::string& text, const TaskOptions& options = {}) {
  const testing::TempDir dir;
  const std::string path = dir.path() + "/t.jsonl";
  std::ofstream(path) << text;
  std::string error = error_of([&] { load_task(form, path, options); });
  return error.starts_with(path) ? error.substr(path.size()) : error;
}

TEST_CASE("tasks: a file of another shape is one line that names the row", "[evaluation]") {
  CHECK(task_error(TaskForm::kHellaswag, R"({"goal": "a"})")
            .starts_with(R"(: line 1: no "activity_label", expected a row of hellaswag: )"
                         R"({"activity_label", "ctx_a", "ctx_b", "endings", "label"})"));
  CHECK(task_error(TaskForm::kPiqa, "\n[1]\n")
            .starts_with(": line 2: [1], expected a row of piqa: {\"goal\""));
  CHECK(task_error(TaskForm::kPiqa, R"({"goal": 3, "sol1": "", "sol2": "", "label": 0})")
            .starts_with(R"(: line 1: "goal" is 3, expected)"));
  CHECK(task_error(TaskForm::kPiqa, R"({"goal": "a", "sol1": "b", "sol2": " ", "label": 0})")
            .starts_with(": line 1: choice 1 is empty, expected"));
  CHECK(task_error(TaskForm::kPiqa, R"({"goal": "a", "sol1": "b", "sol2": "c", "label": "2"})")
            .starts_with(": line 1: the answer is choice 2 of 2 (the first is 0), expected"));
  CHECK(task_error(TaskForm::kPiqa, R"({"goal": "a", "sol1": "b", "sol2": "c", "label": "x"})")
            .starts_with(R"(: line 1: "label" is "x", expected)"));
  CHECK(task_error(
            TaskForm::kArc,
            R"({"question": "a", "choices": {"text": ["b"], "label": ["A"]}, "answerKey": "B"})")
            .starts_with(R"(: line 1: "answerKey" is "B", expected)"));
  CHECK(task_error(TaskForm::kChoice, R"({"prompt": "a", "choices": [], "answer": 0})")
            .starts_with(R"(: line 1: "choices" is [], expected)"));
  CHECK(task_error(TaskForm::kWinogrande,
                   R"({"sentence": "a", "option1": "b", "option2": "c", "answer": "1"})")
            .starts_with(R"(: line 1: a "sentence" without _, expected)"));
  CHECK(task_error(TaskForm::kWinogrande,
                   R"({"sentence": "a _ b", "option1": "b", "option2": "c", "answer": "3"})")
            .starts_with(R"(: line 1: "answer" is 3, expected)"));
  CHECK(task_error(TaskForm::kWinogrande,
                   R"({"sentence": "a _", "option1": "b", "option2": "c", "answer": "1"})")
            .starts_with(": line 1: nothing behind the _, expected"));
  CHECK(task_error(TaskForm::kLambada, R"({"text": "word"})")
            .starts_with(R"(: line 1: a "text" of one word, expected)"));
  CHECK(task_error(TaskForm::kText, "{").find(": line 1") != std::string::npos);
  CHECK(task_error(TaskForm::kText, "\n").starts_with(": no rows, expected JSON lines"));
  TaskOptions shots;
  shots.num_fewshot = 1;
  CHECK(task_error(TaskForm::kLambada, R"({"text": "two words"})", shots)
            .starts_with(": 1 rows, expected at least 2 for 1 examples beside the row"));
  CHECK(task_error(TaskForm::kLambada,
                   R"({"text": "two words"})"
                   "\n"
                   R"({"text": "two words"})",
                   shots)
            .starts_with(": 0 other rows than "));
  CHECK(task_error(TaskForm::kText, R"({"text": "two words"})", shots)
            .starts_with(": 1 examples before a text, expected none"));
}

TEST_CASE("evaluation: what does not fit the model is one line that names the row",
          "[evaluation]") {
  const testing::TempDir dir;
  const std::string path = dir.path() + "/t.jsonl";
  const auto error = [&](TaskForm form, const nlohmann::json& row, int32_t prefix_token) {
    std::ofstream(path) << row.dump();
    std::string found;
    dist::run_ranks(1, {}, [&](dist::World& world) {
      const SavedModel saved = load_model(eval_dir() + "/model");
      EvaluateOptions options;
      options.prefix_token = prefix_token;
      found = error_of([&] {
        evaluate_task(load_task(form, path), *saved.model, *saved.tokenizer, world, options);
      });
    });
    return found;
  };
  std::string many = "x";
  for (int i = 0; i < 300; ++i) many += " x";
  const nlohmann::json choices = {"a", "b"};
  CHECK(error(TaskForm::kChoice, {{"prompt", many}, {"choices", choices}, {"answer", 0}}, -1)
            .find(": line 1: a prompt with its choice of ") != std::string::npos);
  CHECK(error(TaskForm::kChoice, {{"prompt", many}, {"choices", choices}, {"answer", 0}}, -1)
            .ends_with("tokens, expected at most 257: the context and one more"));
  CHECK(error(TaskForm::kGenerate, {{"prompt", many}, {"answer", "a"}}, -1)
            .find("tokens, expected at most 255: the context without one for the answer") !=
        std::string::npos);
  CHECK(error(TaskForm::kGenerate, {{"prompt", ""}, {"answer", "a"}}, -1)
            .starts_with(path + ": line 1: an empty prompt, expected some text"));
  CHECK(error(TaskForm::kChoice, {{"prompt", " "}, {"choices", choices}, {"answer", 0}}, -1)
            .starts_with(path + ": line 1: an empty context, and no token begins a text"));
  // With a token that begins a text it has one.
  CHECK(error(TaskForm::kChoice, {{"prompt", " "}, {"choices", choices}, {"answer", 2}}, 0)
            .starts_with(path + ": line 1: the answer is choice 2 of 2"));
}

TEST_CASE("Scorer: the scores of a whole forward, and of what was scored before", "[evaluation]") {
  nn::LlamaConfig config;
  config.vocab_size = 31, config.context_length = 40, config.num_layers = 2;
  config.num_heads = 2, config.num_kv_heads = 1, config.width = 8, config.ffn_width = 12;
  config.init_stddev = 0.5;
  nn::Llama model(config);
  model.initialize(3);
  model.train(false);
  const auto expected = [&](const ScoredTokens& s) {
    const auto length = std::ssize(s.ids) - 1;
    const Tensor ids = from_values(std::span(s.ids).first(s.ids.size() - 1), {1, length});
    const std::vector<double> logits = model.logits(ids).to_vector();
    double sum = 0;
    for (size_t at = s.ids.size() - static_cast<size_t>(s.num_scored); at < s.ids.size(); ++at) {
      double all = 0;
      for (size_t v = 0; v < 31; ++v) all += std::exp(logits[(at - 1) * 31 + v]);
      sum += logits[(at - 1) * 31 + static_cast<size_t>(s.ids[at])] - std::log(all);
    }
    return sum;
  };
  Scorer scorer(model);
  const std::vector<ScoredTokens> first{{{1, 2, 3, 4, 5, 6}, 2}, {{1, 2, 3, 4, 7}, 1}};
  const std::vector<ScoredTokens> second{{{1, 2, 9, 8, 7, 6, 5}, 3}, {{1, 2, 9, 8, 30}, 1}};
  const std::vector<ScoredTokens> third{{{5, 6}, 1}, {{7, 8, 9}, 2}};  // nothing in common
  const std::vector<TokensScore> once = Scorer(model).score(second);
  for (const auto& sequences : {first, second, third}) {
    const std::vector<TokensScore> scores = scorer.score(sequences);
    for (size_t i = 0; i < scores.size(); ++i) {
      CHECK(std::abs(scores[i].log_probability - expected(sequences[i])) < 1e-5);
      CHECK(std::abs(scorer.loss(sequences[i]) + expected(sequences[i])) < 1e-5);
    }
    if (sequences.size() == second.size() && sequences[0].ids == second[0].ids) {
      CHECK(scores[0].log_probability == once[0].log_probability);
      CHECK(scores[1].log_probability == once[1].log_probability);
    }
  }
  CHECK(error_of([&] {
          scorer.score({{{1, 2}, 2}});
        }).starts_with("Scorer: 2 of 2 tokens, expected one before them"));
}

}  // namespace
}  // namespace tessera::apps
