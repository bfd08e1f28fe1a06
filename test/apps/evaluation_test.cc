#include <cmath>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>

#include "apps/evaluation/evaluate.h"
#include "apps/evaluation/python_random.h"
#include "apps/evaluation/rounds.h"
#include "apps/evaluation/scorer.h"
#include "apps/model_command.h"
#include "apps/options.h"
#include "dist/comm/local.h"
#include "nn/llama/llama.h"
#include "test/apps/runs.h"
#include "test/golden/golden.h"
#include "test/temp_dir.h"
#include "test/testing.h"

namespace tessera::apps {
namespace {

using testing::error_of;
using testing::read_metrics;
using testing::TempDir;

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

TEST_CASE("tasks: what names them is said, and each has a name of its own", "[evaluation]") {
  const std::vector<TaskFile> files = parse_tasks("piqa=a.jsonl, arc=b=c.jsonl,piqa=d.jsonl");
  REQUIRE(files.size() == 3);
  CHECK(files[0].name == "piqa=a.jsonl");
  CHECK(files[1].form == TaskForm::kArc);
  CHECK(files[1].path == "b=c.jsonl");
  CHECK(files[1].name == "arc");
  CHECK(files[2].name == "piqa=d.jsonl");
  const std::string forms =
      "expected FORM=FILE with one of hellaswag, arc, mmlu, piqa, lambada, winogrande, choice, "
      "generate, text";
  for (const char* wrong : {"", "piqa", "piqa=", "=a", "boolq=a"}) {
    CHECK(error_of([&] { parse_tasks(std::vector<std::string>{wrong}); }) ==
          fmt::format("command line: --task={}, {}", wrong, forms));
    CHECK(error_of([&] { parse_tasks(wrong); }) == fmt::format("eval.tasks: {}, {}", wrong, forms));
  }
  CHECK(error_of([&] { parse_tasks("arc=a,piqa=a,arc=a"); }) ==
        "eval.tasks: arc=a, expected each task once");
}

/// The golden's model, trained or not.
Config rounds_config(const TempDir& dir, const std::string& out,
                     const std::vector<std::string>& extra) {
  std::string text;
  for (int i = 0; i < 200; ++i) text += fmt::format("line {} of a text\n", i * i);
  std::vector<std::string> overrides = {"--data.text=" + dir.write("text.txt", text),
                                        "--model.from=" + eval_dir() + "/model",
                                        "--model.context=16",
                                        "--output.dir=" + dir / out,
                                        "--device=cpu",
                                        "--precision.param_dtype=f32",
                                        "--train.steps=4",
                                        "--train.micro_batch=1",
                                        "--train.global_batch=12",
                                        "--train.log_every=1000",
                                        "--optim.lr=1e-3"};
  overrides.insert(overrides.end(), extra.begin(), extra.end());
  return load_config("", overrides);
}

std::string rounds_keys() {
  std::string tasks;
  for (const char* form :
       {"hellaswag", "arc", "piqa", "winogrande", "lambada", "generate", "text"}) {
    tasks += fmt::format("{}{}={}/{}.jsonl", tasks.empty() ? "" : ",", form, eval_dir(), form);
  }
  return tasks;
}

/// Keys of evaluations in a line.
nlohmann::json rounds_in(const nlohmann::json& line) {
  nlohmann::json found = nlohmann::json::object();
  for (const auto& [key, value] : line.items()) {
    if (key.starts_with("eval.")) found[key] = value;
  }
  return found;
}

TEST_CASE("evaluation: in the loop lm-eval's figures, the same bits on 1, 2 and 3 ranks",
          "[evaluation]") {
  const TempDir dir;
  const std::vector<std::string> keys = {"--eval.tasks=" + rounds_keys(), "--eval.every=2",
                                         "--eval.max_tokens=24", "--optim.lr=0",
                                         "--optim.final_lr=0"};
  nlohmann::json alone;
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    const std::string out = std::to_string(ranks);
    testing::train_on(ranks, rounds_config(dir, out, keys));
    const auto steps = read_metrics(dir / out);
    REQUIRE(steps.size() == 4);
    if (ranks == 1) alone = rounds_in(steps[1]);
    for (size_t i = 0; i < 4; ++i) {
      CHECK(rounds_in(steps[i]) == (i % 2 == 1 ? alone : nlohmann::json::object()));
    }
  }
  int num_compared = 0;
  for (const nlohmann::json& golden : golden_results()) {
    if (golden["fewshot"] != 0) continue;
    for (const auto& [name, expected] : golden["metrics"].items()) {
      const std::string key = fmt::format("eval.{}.{}", golden["form"].get<std::string>(), name);
      if (!alone.contains(key)) continue;
      CAPTURE(key);
      ++num_compared;
      CHECK(alone[key].get<double>() == Approx(expected.get<double>()).epsilon(1e-5));
    }
  }
  CHECK(num_compared >= 12);
}

TEST_CASE("evaluation: rounds leave the training as it is, and come when they are due",
          "[evaluation]") {
  const TempDir dir;
  const std::string task = "--eval.tasks=choice=" + eval_dir() + "/choice.jsonl";
  const auto run = [&](const std::string& out, const std::vector<std::string>& extra) {
    testing::train_on(2, rounds_config(dir, out, extra));
    return read_metrics(dir / out);
  };
  const auto plain = run("plain", {});
  const auto check = [&](const std::vector<nlohmann::json>& steps,
                         const std::vector<int64_t>& expected) {
    REQUIRE(steps.size() == plain.size());
    std::vector<int64_t> found;
    for (size_t i = 0; i < steps.size(); ++i) {
      CHECK(steps[i]["loss"] == plain[i]["loss"]);
      CHECK(steps[i]["grad_norm"] == plain[i]["grad_norm"]);
      if (!rounds_in(steps[i]).empty()) found.push_back(steps[i]["step"]);
    }
    CHECK(found == expected);
  };
  check(run("end", {task}), {4});
  const auto often = run("often", {task, "--eval.every=3", "--eval.limit=5"});
  check(often, {3, 4});
  CHECK(testing::read_file(dir / "often/model.safetensors") ==
        testing::read_file(dir / "plain/model.safetensors"));
  // Of the parameters after the step: those of tessera-eval.
  const TaskResult of_end = [&] {
    TaskResult result;
    dist::run_ranks(1, {}, [&](dist::World& world) {
      const ShardedModel model = load_sharded(dir / "often", kF32, world);
      TaskOptions small;
      small.limit = 5;
      const EvalTask items = load_task(TaskForm::kChoice, eval_dir() + "/choice.jsonl", small);
      EvaluateOptions options;
      options.prefix_token = prefix_token_of(model.saved.config, model.saved.tokenizer.get());
      result = evaluate_task(items, *model.saved.model, *model.saved.tokenizer, world, options);
      model.fsdp->end_forward();
    });
    return result;
  }();
  CHECK(of_end.num_items == 5);
  CHECK(rounds_in(often[3]).size() == figures_of({of_end}).size());
  for (const auto& [name, value] : figures_of({of_end})) {
    CHECK(often[3].at(name).get<double>() == value);
  }
  // Of parts of an epoch, each of about two steps; and the end.
  const Config config = rounds_config(dir, "x", {});
  const Data data = load_data(config);
  const int64_t N = TrainSamples(data.train, sample_options(config, data)).num_samples();
  const int64_t parts = N / 24;
  REQUIRE(parts >= 2);
  std::vector<int64_t> expected;
  for (int64_t step = 1; step <= 4; ++step) {
    if (step == 4 || step * 12 * parts / N > (step - 1) * 12 * parts / N) expected.push_back(step);
  }
  CHECK(expected.size() < 4);
  check(run("parts", {task, fmt::format("--eval.per_epoch={}", parts)}), expected);
}

TEST_CASE("evaluation: what is wrong with tasks of a training is said before its first step",
          "[evaluation]") {
  const TempDir dir;
  const std::string good = "choice=" + eval_dir() + "/choice.jsonl";
  const auto error = [&](const std::vector<std::string>& extra) {
    const std::string text =
        error_of([&] { testing::train_on(2, rounds_config(dir, "out", extra)); });
    CHECK(text.find('\n') == std::string::npos);
    CHECK_FALSE(std::filesystem::exists(dir / "out/metrics.jsonl"));
    return text;
  };
  CHECK(
      error({"--eval.tasks=arc"}).starts_with("command line: eval.tasks: arc, expected FORM=FILE"));
  const std::string other = dir.write("other.jsonl", R"({"goal": "a"})");
  CHECK(error({"--eval.tasks=arc=" + other})
            .starts_with(other + ": line 1: no \"question\", expected a row of arc: "));
  const std::string empty =
      dir.write("empty.jsonl", R"({"prompt": "a", "choices": ["b", " "], "answer": 0})");
  CHECK(error({"--eval.tasks=choice=" + empty})
            .starts_with(empty + ": line 1: choice 1 is empty, expected a row of choice"));
  std::string many = "x";
  for (int i = 0; i < 300; ++i) many += " x";
  for (const char* form : {"choice", "generate"}) {
    const std::string path =
        dir.write("long.jsonl",
                  nlohmann::json{{"prompt", many}, {"choices", {"a", "b"}}, {"answer", 0}}.dump());
    const std::string answer =
        dir.write("answer.jsonl", nlohmann::json{{"prompt", many}, {"answer", "a"}}.dump());
    const std::string& file = *form == 'c' ? path : answer;
    CHECK(error({fmt::format("--eval.tasks={},{}={}", good, form, file)})
              .starts_with(file + ": line 1: a prompt "));
  }
  CHECK(
      error({"--eval.tasks=" + good, "--eval.fewshot=9"})
          .starts_with(eval_dir() + "/choice.jsonl: 8 rows, expected at least 10 for 9 examples"));
  CHECK(error({"--eval.tasks=" + good, "--eval.tokenizer=" + dir / "none"})
            .starts_with(dir / "none"));
  const std::string large = dir / "large";
  std::filesystem::create_directories(large);
  for (const auto& [name, content] : text::make_byte_tokenizer()->hf_files()) {
    std::ofstream(large + "/" + name) << content;
  }
  CHECK(error_of([&] {
          std::string small_text;
          for (int i = 0; i < 20; ++i) small_text += "a text, ";
          const std::vector<std::string> small = {"--data.text=" + dir.write("t.txt", small_text),
                                                  "--data.tokenizer=char",
                                                  "--model.context=4",
                                                  "--model.width=8",
                                                  "--device=cpu",
                                                  "--output.dir=" + dir / "out",
                                                  "--eval.tasks=" + good,
                                                  "--eval.tokenizer=" + large};
          testing::train_on(1, load_config("", small));
        }) == fmt::format("command line: eval.tokenizer = {} has 256 tokens, expected at most the "
                          "model's 6",
                          large));
  // Ranks with other files: here a file that another rank finds changed.
  const std::string path = dir / "differs.jsonl";
  const auto row = [](const char* prompt) {
    return nlohmann::json{{"prompt", prompt}, {"choices", {"a", "b"}}, {"answer", 0}}.dump() + "\n";
  };
  std::ofstream(path) << row("one");
  std::ofstream(path + "1") << row("another");
  const Config config = rounds_config(dir, "out", {"--eval.tasks=choice=" + path});
  const Config differs = rounds_config(dir, "out", {"--eval.tasks=choice=" + path + "1"});
  CHECK_THAT(error_of([&] {
               dist::run_ranks(2, {}, [&](dist::World& world) {
                 const auto tokenizer =
                     std::shared_ptr<const text::Tokenizer>(text::make_byte_tokenizer());
                 const TaskRounds rounds(world.rank() == 0 ? config : differs, tokenizer, 256, 320,
                                         world);
               });
             }),
             Catch::Contains("the ranks disagree: ") && Catch::Contains("the rows of eval.tasks"));
}

TEST_CASE("evaluation: a round ends where the run is to end", "[evaluation]") {
  dist::run_ranks(3, {}, [&](dist::World& world) {
    ShardedModel model = load_sharded(eval_dir() + "/model", kF32, world);
    for (const char* form : {"choice", "text", "generate"}) {
      CAPTURE(form);
      const EvalTask task = load_task(form_of(form), fmt::format("{}/{}.jsonl", eval_dir(), form));
      int num_asked = 0;
      EvaluateOptions options;
      options.prefix_token = 0;
      options.max_tokens = 4;
      options.is_to_end = [&] { return world.rank() == 1 && ++num_asked == 2; };
      CHECK_FALSE(
          evaluate_unless_ended(task, *model.saved.model, *model.saved.tokenizer, world, options));
      model.fsdp->end_forward();
      CHECK(num_asked == (world.rank() == 1 ? 2 : 0));
      options.is_to_end = [] { return false; };
      CHECK(
          evaluate_unless_ended(task, *model.saved.model, *model.saved.tokenizer, world, options));
      model.fsdp->end_forward();
    }
  });
}

TEST_CASE("evaluation: adapters beside a sharded model are those beside a whole one",
          "[evaluation]") {
  const TempDir dir;
  const std::string base = dir / "base", adapter = testing::golden_dir() + "/lora/qwen3";
  std::filesystem::copy(testing::golden_dir() + "/hf/qwen3", base);
  for (const auto& [name, content] : text::make_byte_tokenizer()->hf_files()) {
    std::ofstream(base + "/" + name) << content;
  }
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    dist::run_ranks(ranks, {}, [&](dist::World& world) {
      const NoGrad no_grad;
      const Tensor ids_BT = from_values({3, 1, 4, 1, 5, 9, 2, 6}, {1, 8});
      const auto logits = [&](ShardedModel& model) {
        model.saved.model->train(false);
        std::vector<double> values = model.saved.model->logits(ids_BT).to_vector();
        model.fsdp->end_forward();
        return values;
      };
      const SavedModel whole = load_model(base, kF32, adapter);
      whole.model->train(false);
      const std::vector<double> expected = whole.model->logits(ids_BT).to_vector();
      ShardedModel with = load_sharded(base, kF32, world, adapter);
      ShardedModel without = load_sharded(base, kF32, world);
      CHECK(logits(with) == expected);
      CHECK(logits(without) != expected);
      const std::string error = error_of([&] { load_sharded(base, kF32, world, dir / "none"); });
      CHECK(error.find("none/adapter_config.json") != std::string::npos);
    });
  }
}

}  // namespace
}  // namespace tessera::apps
