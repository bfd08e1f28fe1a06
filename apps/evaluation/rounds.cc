#include "apps/evaluation/rounds.h"

#include "apps/agreement.h"
#include "apps/saved_model.h"
#include "core/text.h"
#include "dist/checkpoint/manifest.h"

namespace tessera::apps {
namespace {

/// Of all that is asked.
std::string hash_of_tasks(const std::vector<EvalTask>& tasks) {
  dist::Hasher hasher;
  const auto add = [&](const std::string& text) {
    hasher.update(text.c_str(), std::ssize(text) + 1);
  };
  for (const EvalTask& task : tasks) {
    add(task.name);
    for (const EvalItem& item : task.items) {
      add(item.prompt);
      add(std::to_string(item.gold));
      for (const Continuation& c : item.continuations) add(c.context), add(c.text);
      for (const auto* texts : {&item.answers, &item.until}) {
        add(std::to_string(texts->size()));
        for (const std::string& text : *texts) add(text);
      }
    }
  }
  return fmt::format("{:016x}", hasher.digest());
}

}  // namespace

TaskRounds::TaskRounds(const Config& config, std::shared_ptr<const text::Tokenizer> data_tokenizer,
                       int64_t context_length, int64_t vocab_size, dist::World& world)
    : tokenizer_(std::move(data_tokenizer)) {
  const EvalConfig& e = config.eval;
  world.control().verdict([&] {
    if (!e.tokenizer.empty()) tokenizer_ = text::load_tokenizer(e.tokenizer);
    if (tokenizer_ == nullptr) {
      throw ConfigError(fmt::format(
          "{}: eval.tasks with token shards alone, expected eval.tokenizer, the one of their ids",
          config.origin("eval.tasks")));
    }
    if (tokenizer_->vocab_size() > vocab_size) {
      throw ConfigError(
          fmt::format("{}: eval.tokenizer = {} has {} tokens, expected at most the "
                      "model's {}",
                      config.origin("eval.tokenizer"), shorten(e.tokenizer),
                      tokenizer_->vocab_size(), vocab_size));
    }
    const TaskOptions options{.num_fewshot = e.fewshot,
                              .fewshot_path = e.fewshot_file,
                              .seed = static_cast<uint32_t>(e.fewshot_seed),
                              .limit = e.limit};
    for (const TaskFile& file : parse_tasks(e.tasks)) {
      tasks_.push_back(load_task(file.form, file.path, options));
      tasks_.back().name = file.name;
    }
  });
  check_agreement(world.control(),
                  {{"the rows of eval.tasks", hash_of_tasks(tasks_), config.origin("eval.tasks")}});
  options_.prefix_token = prefix_token_of(config, tokenizer_.get());
  options_.end_tokens = end_tokens_of(config, tokenizer_.get());
  options_.max_tokens = e.max_tokens;
  for (const EvalTask& task : tasks_) {
    check_task(task, context_length, *tokenizer_, world, options_);
  }
}

std::vector<TaskResult> TaskRounds::run(nn::LanguageModel& model, dist::Fsdp& fsdp,
                                        dist::World& world,
                                        const std::function<bool()>& is_to_end) const {
  EvaluateOptions options = options_;
  options.is_to_end = is_to_end;
  std::vector<TaskResult> results;
  for (const EvalTask& task : tasks_) {
    auto result = evaluate_unless_ended(task, model, *tokenizer_, world, options);
    fsdp.end_forward();
    if (!result) return {};
    results.push_back(std::move(*result));
  }
  return results;
}

std::string TaskRounds::summary() const {
  std::string text;
  for (const EvalTask& task : tasks_) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", shorten(task.name), task.items.size());
  }
  return text;
}

Figures figures_of(const std::vector<TaskResult>& results) {
  Figures figures;
  for (const TaskResult& result : results) {
    for (const auto& [name, metric] : result.metrics) {
      const std::string key = fmt::format("eval.{}.{}", result.name, name);
      figures.emplace_back(key, metric.value);
      if (metric.standard_error) figures.emplace_back(key + "_stderr", *metric.standard_error);
    }
  }
  return figures;
}

std::string lines_of(const std::vector<TaskResult>& results) {
  std::string lines;
  for (const TaskResult& result : results) {
    lines += fmt::format("{}eval.{} ({} items)", lines.empty() ? "" : "\n", result.name,
                         result.num_items);
    for (const auto& [name, metric] : result.metrics) {
      lines += fmt::format("  {} {:.4f}", name, metric.value);
      if (metric.standard_error) lines += fmt::format(" +- {:.4f}", *metric.standard_error);
    }
  }
  return lines;
}

}  // namespace tessera::apps
