#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/formats/event_file.h"
#include "core/runtime/memory_timeline.h"

// What a run tells: a line a step, a progress bar on a terminal, `metrics.jsonl` in the output
// directory and, if asked for, an event file of TensorBoard there. One rank writes them.

namespace tessera::apps {

/// Names and values of what a task measures.
using Figures = std::vector<std::pair<std::string, double>>;

/// What is known of a step: a line of metrics.jsonl. Times in milliseconds, memory in bytes.
struct StepMetrics {
  int64_t step = 0;      ///< counted from 1
  double loss = 0;       ///< mean over the step's targets of all ranks
  double grad_norm = 0;  ///< before clipping
  double lr = 0;
  double tokens_per_second = 0;  ///< of all ranks, over the last steps
  int64_t peak_bytes = 0;        ///< of this rank's device allocator since the start
  int64_t reserved_bytes = 0;    ///< that it holds of the system's now, cached ones too
  /// At the moment of `peak_bytes`, what they were for.
  std::array<int64_t, kNumMemoryClasses> peak_by_class{};
  int64_t tokens = 0;  ///< trained on so far
  double step_ms = 0;
  std::optional<double> mfu;         ///< model FLOPs utilization, 1 = peak
  std::optional<double> loss_scale;  ///< of this step, where there is one
  std::optional<int64_t> skipped;    ///< steps that changed nothing so far, where they may
  /// How long compute waited for gathers and reduces in this step, milliseconds of this rank.
  std::optional<double> exposed_gather_ms, exposed_reduce_ms;
  std::optional<double> exposed;  ///< the share of step_ms that this is, over the same steps
  /// How long compute has waited for a unit's collectives.
  struct ExposedUnit {
    std::string unit;
    double gather_ms = 0, reduce_ms = 0;
  };
  std::vector<ExposedUnit> exposed_units;  ///< waited for longest, with `debug.exposed_units`
  /// The rank that the others have waited for most in the last steps, and how much longer than it
  /// they have waited in a step, milliseconds; `is_slow`: in nearly all of them, and for long.
  std::optional<int> slowest_rank;
  double slowest_behind_ms = 0;
  bool is_slow = false;
  /// Of one step a life of the run: bytes by class in the course of it.
  std::shared_ptr<const MemoryTimeline::Result> memory_over_step;
  /// Gradient norm of each unit before clipping, with `output.unit_norms`.
  std::vector<std::pair<std::string, double>> unit_norms;
  std::optional<double> val_loss;
  /// Of preferences: beta (log p - log p of the reference), and how often the chosen answer has more.
  struct Rewards {
    double chosen = 0, rejected = 0;  ///< means over the step's pairs
    double accuracy = 0;              ///< share of pairs whose chosen answer has the larger one
  };
  std::optional<Rewards> rewards;  ///< of preferences
  /// What an evaluation found beside val_loss, by the names of the file; the printed line has those that
  /// begin with "val_".
  Figures figures;
};

/// Speed and waits over the last steps, since the host sees steps end in bursts. What happens
/// between steps (an evaluation) is left out by `restart` after it.
class StepRate {
 public:
  /// A moment of the clock that steps are measured by.
  using TimePoint = std::chrono::steady_clock::time_point;

  void restart(TimePoint now);  ///< what came before does not count
  /// A step has ended, during which compute waited for `exposed_ms`.
  void add(TimePoint now, std::optional<double> exposed_ms);
  double step_ms() const;
  /// The share of the time that compute waited, in [0, 1]; nothing without waits that are measured.
  std::optional<double> exposed() const;

 private:
  std::deque<TimePoint> ends_;     // of the start and of each step
  std::deque<double> exposed_ms_;  // of the steps between them
};

/// One JSON object, without a line end. Numbers have the fewest digits that read back as the same
/// double; what JSON has no number for (NaN, infinity) is null.
std::string to_json(const StepMetrics& metrics);
/// Every number of that object by the tag that it has in TensorBoard, "loss/train",
/// "memory/activations", "unit_norms/blocks.0"; of the
/// evaluation alone with `only_evaluation`.
std::vector<EventScalar> to_scalars(const StepMetrics& metrics, bool only_evaluation = false);
/// "step   100/2000  loss 2.4531  grad_norm 0.812  lr 1.00e-03  12.3k tok/s  peak 0.12 GiB".
std::string to_line(const StepMetrics& metrics, int64_t num_steps);
/// "[=====>    ]  50%  step 100/200  loss 2.4531  0:42 left", `width` characters at most: on a
/// narrow terminal without the loss, then without the time.
std::string progress_bar(const StepMetrics& metrics, int64_t num_steps, double seconds_left,
                         int width);

/// Columns of the terminal that the output ends up on (of mpirun's under Open MPI), else of the
/// environment's COLUMNS, else 80.
int terminal_width();

/// Whether what this process prints ends up on a terminal. Under a launcher that passes output on,
/// the launcher's own output decides.
bool prints_to_terminal();

/// The log of one run. IoError if a file cannot be written.
class MetricsLog {
 public:
  /// Where it writes, and what of it is printed.
  struct Options {
    std::string dir;
    int64_t num_steps = 0;
    int64_t log_every = 1;  ///< steps a printed line; evaluations and the last always
    bool progress_bar = false;
    std::FILE* out = stdout;
    int64_t first_step = 0;  ///< steps done before: their lines stay
    /// Called once when nobody reads `out` any more. A terminal that is gone is none of these: the
    /// system says so by SIGHUP, unless the run is meant to go on without it.
    std::function<void()> on_out_closed = {};
    bool has_events = false;  ///< writes an event file of TensorBoard too
  };

  /// Starts `metrics.jsonl` anew, but for the lines of steps up to `first_step`. An event file is a
  /// new one; what earlier ones say of later steps is taken back.
  explicit MetricsLog(const Options& options);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  /// Whole lines or none: what cannot be written leaves the file as it was, and an IoError.
  void add(const StepMetrics& metrics);
  /// The line of the file alone, of what no later step will tell again; `add` of the same step
  /// then completes it with its validation loss, and prints.
  void record(const StepMetrics& metrics);
  /// What an evaluation found of the last step of a run that went on from there, which had ended before
  /// it was known: completes the step's line, if it has nothing of one, and prints.
  void add_evaluation(int64_t step, std::optional<double> val_loss, const Figures& figures = {});
  /// Lines of text, above the progress bar. What names in them would do to a terminal is escaped,
  /// each line is cut to `kMaxLineShown` (core/text.h).
  void print(const std::string& lines);
  /// Text of any length, escaped.
  void print_text(const std::string& text);
  /// A text that the model wrote after `step`.
  void add_sample(int64_t step, const std::string& text);
  /// The resolved configuration, and of it what the user has set: of the event file alone.
  void add_config(const std::string& text,
                  const std::vector<std::pair<std::string, SettingValue>>& settings);

 private:
  void clear_bar();
  void append(std::string_view line);
  void write_at(int64_t offset, std::string_view text);
  void complete_line(std::optional<double> val_loss, const Figures& figures);
  void add_events(const StepMetrics& metrics, bool only_evaluation);
  [[noreturn]] void fail(int error) const;
  void write_out(const std::string& text);

  Options options_;
  int fd_ = -1;
  int64_t nbytes_ = 0;                // of whole lines
  bool is_recorded_ = false;          // the last line is of the step that `add` will be called for
  std::optional<int64_t> open_step_;  // of the last line of an earlier life, without an evaluation
  std::unique_ptr<EventFile> events_;
  std::chrono::steady_clock::time_point start_;
  int64_t first_step_ = 0, last_step_ = 0;
  bool bar_is_shown_ = false, is_out_gone_ = false;
};

}  // namespace tessera::apps
