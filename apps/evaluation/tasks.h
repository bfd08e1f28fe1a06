#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/enum_names.h"

// Tasks that language models are judged by: files of JSON lines in the shape in which each data set
// is published, and what the model is asked of a row, by the rules of lm-evaluation-harness 0.4
// (Gao et al.): prompts, few-shot examples, and what is scored.

namespace tessera::apps {

enum class TaskForm : unsigned char {
  kHellaswag,
  kArc,
  kMmlu,
  kPiqa,
  kLambada,
  kWinogrande,
  kChoice,    ///< any multiple choice: {"prompt", "choices", "answer"}
  kGenerate,  ///< the exact answer, written: {"prompt", "answer"}
  kText,      ///< the likelihood of texts: {"text"}
};
constexpr auto enum_names(TaskForm) {
  return std::to_array<EnumName<TaskForm>>({{TaskForm::kHellaswag, "hellaswag"},
                                            {TaskForm::kArc, "arc"},
                                            {TaskForm::kMmlu, "mmlu"},
                                            {TaskForm::kPiqa, "piqa"},
                                            {TaskForm::kLambada, "lambada"},
                                            {TaskForm::kWinogrande, "winogrande"},
                                            {TaskForm::kChoice, "choice"},
                                            {TaskForm::kGenerate, "generate"},
                                            {TaskForm::kText, "text"}});
}

/// A continuation whose likelihood after a context is asked for.
struct Continuation {
  std::string context, text;
  int64_t num_chars = 0;  ///< of the choice as it is written, which acc_norm divides by
};

/// What is asked of one row.
struct EvalItem {
  std::string where;                        ///< "tasks.jsonl: line 3"
  std::vector<Continuation> continuations;  ///< kText: one, without a context
  int64_t gold = 0;                         ///< the right one
  std::string prompt;                       ///< kGenerate
  std::vector<std::string> answers, until;  ///< kGenerate
};

struct EvalTask {
  TaskForm form = TaskForm::kChoice;
  std::string name;  ///< of the form, or what it is called
  std::vector<EvalItem> items;

  /// Has acc_norm beside acc.
  bool has_norm() const;
};

struct TaskOptions {
  int64_t num_fewshot = 0;
  /// Where examples come from; empty: the task's own file, without the row that is asked.
  std::string fewshot_path;
  /// Examples are drawn as Python's random.Random(seed).sample does, row after row; those of MMLU
  /// are the first ones.
  uint32_t seed = 1234;
  int64_t limit = 0;  ///< rows; 0: all
};

/// A form and the file of its rows, as people write them.
struct TaskFile {
  TaskForm form = TaskForm::kChoice;
  std::string path;
  std::string name;  ///< the form's, or all of it if another one has the same form
};
/// Of "FORM=FILE" each. ConfigError that begins with the subject for what is not, and for one that is there
/// twice.
std::vector<TaskFile> parse_tasks(const std::vector<std::string>& texts,
                                  std::string_view subject = "command line: --task=");
/// Of "FORM=FILE,FORM=FILE", eval.tasks.
std::vector<TaskFile> parse_tasks(std::string_view list);

/// The items of a file.
/// Errors   InputError of one line that names the file and the line: what is not JSON or not of the
///          form's shape, an answer that is none of the choices, an empty choice; no rows; fewer
///          examples than are asked for
EvalTask load_task(TaskForm form, const std::string& path, const TaskOptions& options = {});

}  // namespace tessera::apps
