#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "apps/evaluation/tasks.h"
#include "apps/text/tokenizer.h"
#include "dist/comm/world.h"
#include "nn/transformer.h"

namespace tessera::apps {

/// A figure of a task over its items.
struct Metric {
  double value = 0;
  std::optional<double> standard_error;
};

/// What the model made of an item.
struct ItemResult {
  std::vector<double> log_probabilities;  ///< of the continuations
  std::vector<double> num_tokens;         ///< of each
  bool is_greedy = false;                 ///< the right continuation is what greedy decoding writes
  std::string text;                       ///< kGenerate: what it wrote
};

struct TaskResult {
  std::string name;
  int64_t num_items = 0;
  std::map<std::string, Metric> metrics;
  std::vector<ItemResult> items;
};

struct EvaluateOptions {
  /// Before a text, and in place of an empty context; -1: the first token is then not predicted.
  int32_t prefix_token = -1;
  std::vector<int32_t> end_tokens = {};  ///< end what is generated
  int64_t max_tokens = 256;              ///< of it
  int64_t max_batch = 16;                ///< items that are generated together
  bool reports = true;                   ///< progress, on rank 0
  /// Asked on each rank before each item: once any says yes, there is no result.
  std::function<bool()> is_to_end = {};
};

/// Encodes all that a task asks, ranks their shares: what would not fit the model is said before it
/// has learned anything. Collective. Errors as evaluate_task.
void check_task(const EvalTask& task, int64_t context_length, const text::Tokenizer& tokenizer,
                dist::World& world, const EvaluateOptions& options);

/// The figures of a task; collective, the same on all ranks and, on the CPU, for any number of them:
/// rank r takes items r, r + ranks, ... The model is in evaluation mode meanwhile.
///   acc          share of items whose likeliest continuation (the first of equals) is the right one;
///                of kLambada those whose continuation is greedy
///   acc_norm     the same with log p divided by the choice's characters
///   perplexity   of kLambada exp(-mean log p of a continuation), of kText exp(loss)
///   loss         of kText -log p a token; bits_per_byte = -log2 p a byte of what is predicted
///   exact_match  share of items whose text (up to a string of `until`, without white space around
///                it) is one of the answers
/// Standard errors are those of a mean of the items: sample deviation / sqrt(items).
/// A text longer than the context is taken in windows, each of which begins behind the last and sees
/// one token before it; the last one as much as fits.
/// Nothing if it was to end.
/// Errors   InputError that names file and line: a prompt with its choice longer than the context, a
///          choice without a token of its own, an empty context without a prefix token
std::optional<TaskResult> evaluate_unless_ended(const EvalTask& task, nn::LanguageModel& model,
                                                const text::Tokenizer& tokenizer,
                                                dist::World& world, const EvaluateOptions& options);
/// The same, to its end.
TaskResult evaluate_task(const EvalTask& task, nn::LanguageModel& model,
                         const text::Tokenizer& tokenizer, dist::World& world,
                         const EvaluateOptions& options = {});

}  // namespace tessera::apps
