#include "apps/evaluation/evaluate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "apps/evaluation/scorer.h"
#include "apps/text/stop_strings.h"
#include "core/log.h"
#include "core/text.h"
#include "core/utf8.h"
#include "nn/generate.h"

namespace tessera::apps {
namespace {

constexpr std::string_view kWhiteSpace = " \t\n\r\f\v";

/// How far it is and how long it will take, every ten seconds.
class EvalProgress {
 public:
  EvalProgress(std::string what, int64_t num_items, bool reports)
      : what_(std::move(what)), num_items_(num_items), reports_(reports) {}
  void add(int64_t done) {
    const auto now = std::chrono::steady_clock::now();
    if (!reports_ || now - last_ < std::chrono::seconds(10) || done == 0) return;
    last_ = now;
    const double seconds = std::chrono::duration<double>(now - start_).count();
    log_info("{}: {} of {} items, {:.0f} s left", what_, std::min(done, num_items_), num_items_,
             seconds / static_cast<double>(done) * static_cast<double>(num_items_ - done));
  }

 private:
  std::string what_;
  int64_t num_items_;
  bool reports_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now(), last_ = start_;
};

/// Whether the ranks are to stop, asked by all of them at the same places.
class Cut {
 public:
  Cut(dist::World& world, const std::function<bool()>& is_to_end)
      : world_(world), is_to_end_(is_to_end) {}
  bool poll() {
    if (is_to_end_ && !is_cut_) is_cut_ = world_.control().max(is_to_end_() ? 1 : 0) != 0;
    return is_cut_;
  }
  bool is_cut() const { return is_cut_; }

 private:
  dist::World& world_;
  const std::function<bool()>& is_to_end_;
  bool is_cut_ = false;
};

/// The model in evaluation mode for a scope.
class EvaluationMode {
 public:
  explicit EvaluationMode(nn::Module& module)
      : module_(module), was_training_(module.is_training()) {
    module_.train(false);
  }
  ~EvaluationMode() { module_.train(was_training_); }

 private:
  nn::Module& module_;
  bool was_training_;
};

/// Texts of items as tokens.
class Encoding {
 public:
  Encoding(const text::Tokenizer& tokenizer, int64_t context, int32_t prefix_token)
      : tokenizer_(tokenizer), context_(context), prefix_token_(prefix_token) {}

  std::vector<int32_t> encode(const std::string& text) const {
    return tokenizer_.encode(text, {.add_special_tokens = true});
  }

  /// White space at the end of the context belongs to the continuation; tokens are those of the
  /// whole behind as many as the context alone has.
  ScoredTokens continuation(const EvalItem& item, const Continuation& c) const {
    const size_t end = c.context.find_last_not_of(kWhiteSpace) + 1;
    const std::string context = c.context.substr(0, end);
    std::vector<int32_t> before;
    ScoredTokens scored;
    if (context.empty()) {
      if (prefix_token_ < 0) {
        throw InputError(
            fmt::format("{}: an empty context, and no token begins a text", item.where));
      }
      before = {prefix_token_};
      scored.ids = encode(c.context + c.text);
      if (scored.ids.empty() || scored.ids[0] != prefix_token_) {
        scored.ids.insert(scored.ids.begin(), prefix_token_);
      }
    } else {
      before = encode(context);
      scored.ids = encode(c.context + c.text);
    }
    scored.num_scored = std::ssize(scored.ids) - std::ssize(before);
    if (scored.num_scored < 1 || before.empty()) {
      throw InputError(fmt::format("{}: \"{}\" behind \"{}\" has no token of its own", item.where,
                                   shorten(c.text), shorten(c.context)));
    }
    if (std::ssize(scored.ids) - 1 > context_) {
      throw InputError(fmt::format(
          "{}: a prompt with its choice of {} tokens, expected at most {}: the context and one "
          "more",
          item.where, scored.ids.size(), context_ + 1));
    }
    return scored;
  }

  std::vector<ScoredTokens> windows(const EvalItem& item) const {
    std::vector<int32_t> ids = encode(item.continuations[0].text);
    if (prefix_token_ >= 0 && (ids.empty() || ids[0] != prefix_token_)) {
      ids.insert(ids.begin(), prefix_token_);
    }
    if (ids.size() < 2) {
      throw InputError(fmt::format("{}: a text of {} tokens, expected some that are predicted",
                                   item.where, ids.size()));
    }
    std::vector<ScoredTokens> windows;
    const auto total = std::ssize(ids);
    for (int64_t begin = 1; begin < total; begin += context_) {  // of what is predicted
      const int64_t end = std::min(begin + context_, total);
      const int64_t first = std::max<int64_t>(0, end - 1 - context_);
      windows.push_back({{ids.begin() + first, ids.begin() + end}, end - begin});
    }
    return windows;
  }

  std::vector<int32_t> prompt(const EvalItem& item) const {
    std::vector<int32_t> ids = encode(item.prompt);
    if (ids.empty()) {
      throw InputError(fmt::format("{}: an empty prompt, expected some text", item.where));
    }
    if (std::ssize(ids) >= context_) {
      throw InputError(
          fmt::format("{}: a prompt of {} tokens, expected at most {}: the context "
                      "without one for the answer",
                      item.where, ids.size(), context_ - 1));
    }
    return ids;
  }

 private:
  const text::Tokenizer& tokenizer_;
  int64_t context_;
  int32_t prefix_token_;
};

/// The results of all ranks, in the items' order.
std::vector<ItemResult> gather_items(const std::vector<ItemResult>& mine, size_t num_items,
                                     dist::World& world) {
  nlohmann::json rows = nlohmann::json::array();
  for (const ItemResult& r : mine) {
    rows.push_back({r.log_probabilities, r.num_tokens, r.is_greedy, r.text});
  }
  const std::vector<std::string> texts = world.control().all_gather(
      rows.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  std::vector<ItemResult> all(num_items);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const nlohmann::json of_rank = nlohmann::json::parse(texts[rank]);
    for (size_t i = 0; i < of_rank.size(); ++i) {
      const nlohmann::json& row = of_rank[i];
      all[rank + i * texts.size()] = {row[0].get<std::vector<double>>(),
                                      row[1].get<std::vector<double>>(), row[2].get<bool>(),
                                      row[3].get<std::string>()};
    }
  }
  return all;
}

std::vector<ItemResult> score_items(const EvalTask& task, nn::LanguageModel& model,
                                    const Encoding& encoding, dist::World& world, Cut& cut,
                                    EvalProgress& progress) {
  const auto num_items = std::ssize(task.items);
  const int64_t ranks = world.world_size();
  // What a rank cannot take it says before anybody has waited for it.
  std::vector<std::vector<ScoredTokens>> sequences_of;  // this rank's items
  world.control().verdict([&] {
    for (int64_t i = world.rank(); i < num_items; i += ranks) {
      const EvalItem& item = task.items[static_cast<size_t>(i)];
      std::vector<ScoredTokens>& sequences = sequences_of.emplace_back();
      for (const Continuation& c : item.continuations) {
        sequences.push_back(encoding.continuation(item, c));
      }
    }
  });
  Scorer scorer(model);
  std::vector<ItemResult> mine;
  for (int64_t begin = 0; begin < num_items && !cut.poll(); begin += ranks) {
    const int64_t index = begin + world.rank();
    if (index >= num_items) {
      scorer.idle(Scorer::kScoreForwards);
      continue;
    }
    const EvalItem& item = task.items[static_cast<size_t>(index)];
    const std::vector<ScoredTokens>& sequences = sequences_of[mine.size()];
    const std::vector<TokensScore> scores = scorer.score(sequences);
    ItemResult result;
    for (size_t i = 0; i < scores.size(); ++i) {
      result.log_probabilities.push_back(scores[i].log_probability);
      result.num_tokens.push_back(static_cast<double>(sequences[i].num_scored));
    }
    result.is_greedy = scores[static_cast<size_t>(item.gold)].is_greedy;
    mine.push_back(std::move(result));
    progress.add(begin + ranks);
  }
  return mine;
}

std::vector<ItemResult> score_texts(const EvalTask& task, nn::LanguageModel& model,
                                    const Encoding& encoding, dist::World& world, Cut& cut,
                                    EvalProgress& progress) {
  Scorer scorer(model);
  const auto num_items = std::ssize(task.items);
  const int64_t ranks = world.world_size();
  std::vector<ItemResult> mine;
  for (int64_t begin = 0; begin < num_items && !cut.poll(); begin += ranks) {
    const int64_t index = begin + world.rank();
    std::vector<ScoredTokens> windows;
    world.control().verdict([&] {
      if (index < num_items) windows = encoding.windows(task.items[static_cast<size_t>(index)]);
    });
    const int64_t num_windows = world.control().max(std::ssize(windows));
    ItemResult result;
    result.log_probabilities = result.num_tokens = {0};
    for (int64_t i = 0; i < num_windows; ++i) {
      if (i >= std::ssize(windows)) {
        scorer.idle(Scorer::kLossForwards);
        continue;
      }
      const ScoredTokens& window = windows[static_cast<size_t>(i)];
      result.log_probabilities[0] -= scorer.loss(window);
      result.num_tokens[0] += static_cast<double>(window.num_scored);
    }
    if (index < num_items) mine.push_back(std::move(result));
    progress.add(begin + ranks);
  }
  return mine;
}

std::vector<ItemResult> generate_items(const EvalTask& task, nn::LanguageModel& model,
                                       const text::Tokenizer& tokenizer, const Encoding& encoding,
                                       dist::World& world, const EvaluateOptions& options, Cut& cut,
                                       EvalProgress& progress) {
  std::vector<std::vector<int32_t>> prompts;
  std::vector<const EvalItem*> items;
  world.control().verdict([&] {
    for (size_t i = static_cast<size_t>(world.rank()); i < task.items.size();
         i += static_cast<size_t>(world.world_size())) {
      items.push_back(&task.items[i]);
      prompts.push_back(encoding.prompt(task.items[i]));
    }
  });
  std::vector<ItemResult> mine(items.size());
  std::vector<text::StreamDecoder> decoders;
  std::vector<text::StopStrings> stops;
  std::vector<int64_t> num_tokens(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    decoders.emplace_back(tokenizer, prompts[i]);
    stops.emplace_back(items[i]->until);
  }
  int64_t num_done = 0;
  nn::GenerateOptions generate;
  generate.num_tokens = options.max_tokens;
  generate.max_batch = options.max_batch;
  generate.sampling.temperature = 0;
  generate.on_token = [&](int64_t prompt, int32_t token) {
    const auto i = static_cast<size_t>(prompt);
    const std::vector<int32_t>& ends = options.end_tokens;
    bool is_over = std::find(ends.begin(), ends.end(), token) != ends.end();
    if (!is_over) mine[i].text += stops[i].add(decoders[i].add(token));
    ++num_tokens[i];
    is_over = is_over || stops[i].is_found() || num_tokens[i] == options.max_tokens ||
              std::ssize(prompts[i]) + num_tokens[i] >= model.shape().context_length;
    if (is_over) progress.add(++num_done * world.world_size());
    return !is_over;
  };
  generate.any_is_busy = [&](bool is_busy) {
    return world.control().max(is_busy ? 1 : 0) != 0 && !cut.poll();
  };
  nn::generate(model, prompts, generate);
  for (size_t i = 0; i < items.size(); ++i) {
    if (!stops[i].is_found()) {
      mine[i].text += stops[i].add(decoders[i].finish());
      mine[i].text += stops[i].finish();
    }
    mine[i].text = replace_invalid_utf8(mine[i].text);
  }
  return mine;
}

/// The mean of figures of the items, with its standard error.
Metric mean_of(const std::vector<double>& values) {
  const auto n = static_cast<double>(values.size());
  double sum = 0, squares = 0;
  for (const double value : values) sum += value;
  const double mean = sum / n;
  for (const double value : values) squares += (value - mean) * (value - mean);
  Metric metric{mean, std::nullopt};
  if (values.size() > 1) metric.standard_error = std::sqrt(squares / (n - 1)) / std::sqrt(n);
  return metric;
}

bool is_argmax(const std::vector<double>& values, int64_t index) {
  return std::max_element(values.begin(), values.end()) - values.begin() == index;
}

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kWhiteSpace);
  if (begin == std::string_view::npos) return "";
  return text.substr(begin, text.find_last_not_of(kWhiteSpace) - begin + 1);
}

void summarize_choices(const EvalTask& task, TaskResult& result) {
  std::vector<double> acc, acc_norm;
  for (size_t i = 0; i < task.items.size(); ++i) {
    const EvalItem& item = task.items[i];
    std::vector<double> scores = result.items[i].log_probabilities;
    acc.push_back(is_argmax(scores, item.gold) ? 1 : 0);
    for (size_t c = 0; c < scores.size(); ++c) {
      scores[c] /= static_cast<double>(item.continuations[c].num_chars);
    }
    acc_norm.push_back(is_argmax(scores, item.gold) ? 1 : 0);
  }
  result.metrics["acc"] = mean_of(acc);
  if (task.has_norm()) result.metrics["acc_norm"] = mean_of(acc_norm);
}

void summarize_texts(const EvalTask& task, const std::vector<int64_t>& num_bytes,
                     TaskResult& result) {
  double log_probability = 0, tokens = 0, bytes = 0;
  for (size_t i = 0; i < task.items.size(); ++i) {
    log_probability += result.items[i].log_probabilities[0];
    tokens += result.items[i].num_tokens[0];
    bytes += static_cast<double>(num_bytes[i]);
  }
  result.metrics["loss"] = {-log_probability / tokens, std::nullopt};
  result.metrics["perplexity"] = {std::exp(-log_probability / tokens), std::nullopt};
  result.metrics["bits_per_byte"] = {-log_probability / bytes / std::numbers::ln2, std::nullopt};
}

void summarize_task(const EvalTask& task, const std::vector<int64_t>& num_bytes,
                    TaskResult& result) {
  std::vector<double> values;
  switch (task.form) {
    case TaskForm::kText:
      return summarize_texts(task, num_bytes, result);
    case TaskForm::kLambada: {
      for (const ItemResult& item : result.items) values.push_back(item.log_probabilities[0]);
      result.metrics["perplexity"] = {std::exp(-mean_of(values).value), std::nullopt};
      values.clear();
      for (const ItemResult& item : result.items) values.push_back(item.is_greedy ? 1 : 0);
      result.metrics["acc"] = mean_of(values);
      return;
    }
    case TaskForm::kGenerate:
      for (size_t i = 0; i < task.items.size(); ++i) {
        const auto& answers = task.items[i].answers;
        const bool is_right = std::any_of(answers.begin(), answers.end(), [&](const auto& answer) {
          return trimmed(answer) == trimmed(result.items[i].text);
        });
        values.push_back(is_right ? 1 : 0);
      }
      result.metrics["exact_match"] = mean_of(values);
      return;
    default:
      return summarize_choices(task, result);
  }
}

}  // namespace

void check_task(const EvalTask& task, int64_t context_length, const text::Tokenizer& tokenizer,
                dist::World& world, const EvaluateOptions& options) {
  const Encoding encoding(tokenizer, context_length, options.prefix_token);
  world.control().verdict([&] {
    for (size_t i = static_cast<size_t>(world.rank()); i < task.items.size();
         i += static_cast<size_t>(world.world_size())) {
      const EvalItem& item = task.items[i];
      if (task.form == TaskForm::kText) {
        encoding.windows(item);
      } else if (task.form == TaskForm::kGenerate) {
        encoding.prompt(item);
      } else {
        for (const Continuation& c : item.continuations) encoding.continuation(item, c);
      }
    }
  });
}

std::optional<TaskResult> evaluate_unless_ended(const EvalTask& task, nn::LanguageModel& model,
                                                const text::Tokenizer& tokenizer,
                                                dist::World& world,
                                                const EvaluateOptions& options) {
  const Encoding encoding(tokenizer, model.shape().context_length, options.prefix_token);
  EvalProgress progress(task.name, std::ssize(task.items), options.reports && world.rank() == 0);
  const EvaluationMode mode(model);
  std::vector<ItemResult> mine;
  std::vector<int64_t> num_bytes;
  Cut cut(world, options.is_to_end);
  if (task.form == TaskForm::kText) {
    mine = score_texts(task, model, encoding, world, cut, progress);
    for (const EvalItem& item : task.items) {
      const std::string& text = item.continuations[0].text;
      // The first token is not predicted if nothing stands before it.
      int64_t unpredicted = 0;
      if (options.prefix_token < 0) {
        unpredicted = std::ssize(tokenizer.decode({encoding.encode(text)[0]}));
      }
      num_bytes.push_back(std::ssize(text) - unpredicted);
    }
  } else if (task.form == TaskForm::kGenerate) {
    mine = generate_items(task, model, tokenizer, encoding, world, options, cut, progress);
  } else {
    mine = score_items(task, model, encoding, world, cut, progress);
  }
  if (cut.is_cut()) return std::nullopt;
  TaskResult result;
  result.name = task.name;
  result.num_items = std::ssize(task.items);
  result.items = gather_items(mine, task.items.size(), world);
  summarize_task(task, num_bytes, result);
  return result;
}

TaskResult evaluate_task(const EvalTask& task, nn::LanguageModel& model,
                         const text::Tokenizer& tokenizer, dist::World& world,
                         const EvaluateOptions& options) {
  EvaluateOptions to_its_end = options;
  to_its_end.is_to_end = nullptr;
  return *evaluate_unless_ended(task, model, tokenizer, world, to_its_end);
}

}  // namespace tessera::apps
