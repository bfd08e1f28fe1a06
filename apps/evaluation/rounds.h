#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/config.h"
#include "apps/evaluation/evaluate.h"
#include "apps/metrics.h"
#include "dist/fsdp/fully_shard.h"

namespace tessera::apps {

/// Section eval: tasks that judge a model again and again while it is trained.
class TaskRounds {
 public:
  /// Reads and encodes them. `data_tokenizer` (or null) is of the data, in place of eval.tokenizer; the
  /// model has `context_length` positions and `vocab_size` tokens. Collective.
  /// Errors   those of load_task and check_task; ConfigError without a tokenizer, for one of more tokens
  ///          than the model has, and for ranks that read other rows
  TaskRounds(const Config& config, std::shared_ptr<const text::Tokenizer> data_tokenizer,
             int64_t context_length, int64_t vocab_size, dist::World& world);

  /// All tasks on the model as it is, which stays as it was. Empty if `is_to_end` said so on a rank.
  /// Collective; the same on all ranks.
  std::vector<TaskResult> run(nn::LanguageModel& model, dist::Fsdp& fsdp, dist::World& world,
                              const std::function<bool()>& is_to_end) const;
  /// "piqa 1838, choice=a.jsonl 20": items of each.
  std::string summary() const;

 private:
  std::vector<EvalTask> tasks_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  EvaluateOptions options_;
};

/// "eval.piqa.acc" and "eval.piqa.acc_stderr" for metrics.jsonl.
Figures figures_of(const std::vector<TaskResult>& results);
/// "eval.piqa (1838 items)  acc 0.5000 +- 0.0117  acc_norm ...", a line a task.
std::string lines_of(const std::vector<TaskResult>& results);

}  // namespace tessera::apps
