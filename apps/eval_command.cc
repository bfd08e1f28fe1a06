#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/evaluation/evaluate.h"
#include "apps/model_command.h"
#include "core/files.h"
#include "core/text.h"

namespace tessera::apps {
namespace {

struct EvalCommand {
  ModelOptions model;
  std::vector<std::string> tasks;
  TaskOptions task;
  EvaluateOptions evaluate;
  std::string output, items;
};

nlohmann::ordered_json json_of(const TaskResult& result) {
  nlohmann::ordered_json json{{"items", result.num_items}};
  for (const auto& [name, metric] : result.metrics) {
    json[name] = metric.value;
    if (metric.standard_error) json[name + "_stderr"] = *metric.standard_error;
  }
  return json;
}

std::string table_of(const std::vector<TaskResult>& results) {
  std::string text = fmt::format("{:<24} {:>8}  {:<14} {:>10} {:>10}\n", "task", "items", "metric",
                                 "value", "stderr");
  for (const TaskResult& result : results) {
    for (const auto& [name, metric] : result.metrics) {
      text += fmt::format(
          "{:<24} {:>8}  {:<14} {:>10.4f} {:>10}\n", result.name, result.num_items, name,
          metric.value,
          metric.standard_error ? fmt::format("{:.4f}", *metric.standard_error) : std::string("-"));
    }
  }
  return text;
}

/// A JSON object an item.
void write_items(const std::string& path, const std::vector<EvalTask>& tasks,
                 const std::vector<TaskResult>& results) {
  std::string lines;
  for (size_t t = 0; t < tasks.size(); ++t) {
    for (size_t i = 0; i < tasks[t].items.size(); ++i) {
      const ItemResult& item = results[t].items[i];
      nlohmann::ordered_json row{{"task", tasks[t].name}, {"where", tasks[t].items[i].where}};
      if (tasks[t].form == TaskForm::kGenerate) {
        row["text"] = item.text;
      } else {
        row["log_probabilities"] = item.log_probabilities;
        row["tokens"] = item.num_tokens;
        row["gold"] = tasks[t].items[i].gold;
        row["is_greedy"] = item.is_greedy;
      }
      lines += row.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    }
  }
  write_file_atomically(path, lines);
}

void add_options(CommandLine& app, EvalCommand& command) {
  command.model.add_to(app);
  command.model.add_adapter_to(app);
  app.add_option("--task", command.tasks,
                 "FORM=FILE, several times: JSON lines in the shape of hellaswag, arc, mmlu, piqa, "
                 "lambada or winogrande, or of choice (prompt, choices, answer: a number from 0), "
                 "generate (prompt, answer) or text (text: loss, perplexity, bits a byte)")
      ->required();
  app.add_option("--fewshot", command.task.num_fewshot, "examples before each row")
      ->check(in_range<int64_t>(0, 1000));
  app.add_option("--fewshot-file", command.task.fewshot_path,
                 "where they come from; else the task's own file, without the row that is asked");
  app.add_option("--seed", command.task.seed, "of the examples that are drawn");
  app.add_option("--limit", command.task.limit, "rows of each file; 0: all")
      ->check(in_range<int64_t>(0));
  app.add_option("--max-tokens", command.evaluate.max_tokens, "of an answer of generate")
      ->check(in_range<int64_t>(1));
  app.add_option("--batch", command.evaluate.max_batch,
                 "rows of generate that are answered together")
      ->check(in_range<int64_t>(1, 65536));
  app.add_option("--output", command.output, "a JSON file for the figures");
  app.add_option("--items", command.items,
                 "a file of JSON lines for what the model made of each row");
}

}  // namespace

int eval_command(const std::vector<std::string>& arguments, dist::World& world) {
  EvalCommand command;
  CommandLine app(
      "Judges a model that tessera-train saved, or of Hugging Face, by the rules of "
      "lm-evaluation-harness. Under mpirun -n N its parameters are sharded and the rows shared; the "
      "figures are the same.",
      "tessera-eval");
  add_options(app, command);
  std::optional<int> status;
  std::vector<EvalTask> tasks;
  world.control().verdict([&] {
    status = app.read(arguments, world.rank() == 0 ? stdout : nullptr);
    if (status) return;
    for (const TaskFile& file : parse_tasks(command.tasks)) {
      tasks.push_back(load_task(file.form, file.path, command.task));
      tasks.back().name = file.name;
    }
  });
  if (status) return *status;
  std::shared_ptr<Context> context;
  world.control().verdict([&] { context = command.model.make_context(world); });
  const Context::Scope scope(context);
  ShardedModel model = load_sharded(command.model.checkpoint, command.model.param_dtype(), world,
                                    command.model.adapter);
  SavedModel& saved = model.saved;
  if (world.rank() == 0) log_model(saved, command.model.checkpoint);
  command.evaluate.prefix_token = prefix_token_of(saved.config, saved.tokenizer.get());
  command.evaluate.end_tokens = end_tokens_of(saved.config, saved.tokenizer.get());
  std::vector<TaskResult> results;
  for (const EvalTask& task : tasks) {
    results.push_back(evaluate_task(task, *saved.model, *saved.tokenizer, world, command.evaluate));
    model.fsdp->end_forward();
  }
  world.control().verdict([&] {
    if (world.rank() != 0) return;
    print_out(table_of(results));
    nlohmann::ordered_json figures{{"checkpoint", saved.path}, {"step", saved.step}};
    for (const TaskResult& result : results) figures["tasks"][result.name] = json_of(result);
    if (!command.output.empty()) write_file_atomically(command.output, figures.dump(2) + "\n");
    if (!command.items.empty()) write_items(command.items, tasks, results);
  });
  return 0;
}

}  // namespace tessera::apps
