#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/config.h"
#include "core/fatal_signals.h"
#include "dist/checkpoint/writer.h"
#include "dist/comm/world.h"
#include "dist/fsdp/first_steps.h"
#include "dist/fsdp/groups.h"

// When a run ends early, and which steps count. [Note: Signals]
// Whatever asks a process to end asks a training for a preemption: SIGTERM, Ctrl-C (SIGINT), a
// terminal that closes (SIGHUP), processor time that is used up (SIGXCPU), a batch system's SIGUSR1
// (which mpirun passes on to all ranks), and an output that nobody reads any more. The ranks agree
// on it at the end of the step, save, and end with status 0. SIGTERM and SIGINT also have the
// watchdog say what is in flight and the status file say "failed", in case the end of the step is
// never reached: that is how a launcher ends the ranks when one of them is gone. One of the two, or
// SIGUSR1, for a second time ends the process at once; SIGHUP and SIGXCPU come several times by
// themselves (from the kernel and the shell; once a second). Before the first step there is nothing
// to save, and a process that is blocked in a read would not notice: it ends at once, as it does
// everywhere of a signal it cannot survive ([Note: Death by a signal]). A SIGHUP that whoever
// started the process had it ignore (nohup) stays ignored. A signal that comes when the run is over
// has come too late to ask for anything, and the exit status stays 0. Files that reach a limit (SIGXFSZ) are
// errors of the write.

namespace tessera::apps {

/// While alive, the process handles signals as above. One at a time.
class SignalHandlers {
 public:
  SignalHandlers();
  ~SignalHandlers();
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;

  /// The first step is about to begin: from here on the end of a step follows a signal.
  static void begin_steps();
  /// The run is over, with all that a signal could ask for: until the process exits (its ranks may
  /// still part from each other) a first signal changes nothing. The handlers outlive this object.
  static void end_run();

 private:
  FatalSignalHandlers fatal_;
};

/// What a signal does; any thread, and async-signal-safe. `cause` lives for ever.
void request_preemption(const char* cause = "");
bool is_preemption_requested();
/// What asked for it in this process: "SIGTERM". Empty if that was another rank.
std::string preemption_cause();
void forget_preemption();

/// What most often makes a loss or gradient norm non-finite under this configuration, and what to
/// change; `lr` is that of the step.
std::string nonfinite_advice(const Config& config, double lr);

/// Host decisions at the end of each step: one exchange of a few bytes, which carries the news of
/// the checkpoint writer as well.
class RunControl {
 public:
  RunControl(const TrainConfig& config, dist::World& world);

  /// What all ranks do next.
  struct Decision {
    bool is_preempted = false;
    bool is_out_of_time = false;
    bool is_save_due = false;  ///< by the clock of rank 0
    bool has_failed = false;   ///< a rank has an error to tell when the state is saved
    std::vector<dist::CheckpointWriter::State> writers;  ///< by rank
    std::vector<double> waited_ms;                       ///< by rank
  };
  /// `waited_ms`: of this rank for others, in the last step that is over.
  Decision poll(dist::CheckpointWriter::State writer, bool is_save_due = false,
                bool has_failed = false, double waited_ms = 0);

 private:
  dist::World& world_;
  std::chrono::steady_clock::time_point start_;
  double max_seconds_;
};

/// Which rank the others wait for, step after step: all ranks take the same time for a step, and
/// the slowest is the one that waits least.
class SlowRank {
 public:
  static constexpr size_t kWindow = 16;  ///< steps

  /// Milliseconds that each rank has waited in a step, and what the step took.
  void add(const std::vector<double>& waited_ms, double step_ms);

  /// A rank that the others wait for.
  struct Finding {
    int rank = 0;
    double behind_ms = 0;        ///< how much longer the others waited in a step, on average
    bool is_persistent = false;  ///< in 7 of 8 steps of a full window, and for a tenth of a step
  };
  /// The rank with the largest `behind_ms` in the window; nothing for one rank or no steps.
  std::optional<Finding> find() const;

 private:
  struct Step {
    std::vector<double> waited_ms;
    double step_ms;
  };
  std::deque<Step> steps_;
};

/// Of the losses of the first steps of a training, that they have not fallen: "the loss stays flat: 4.158
/// (mean of steps 1 to 16), 4.161 (of steps 35 to 50)"; empty if they have. Of a new model the fall of
/// the means of the first and the last third is compared with twice its standard error, taken from
/// the differences of neighbours; one that is trained already may stand still: of it only a loss that
/// is the same number all along. Steps whose loss is not finite do not count.
std::string flat_loss(std::span<const double> losses, bool is_new);

/// What of the parameters of a training's first steps is worth a warning, one text each: groups of
/// which none has a gradient, by their pattern, then single parameters.
std::vector<std::string> dead_parameters(const dist::FirstSteps::Found& found,
                                         const std::vector<dist::ParameterGroup>& groups,
                                         const std::vector<std::string>& trained);

/// Whether a loss is far above those before it: more than `spike_z` standard deviations above the
/// mean of the last `spike_window` losses that were not.
class SpikeGuard {
 public:
  explicit SpikeGuard(const GuardConfig& config) : config_(config) {}

  bool is_on() const { return config_.spike != SpikeAction::kOff; }
  bool rewinds() const { return config_.spike == SpikeAction::kRewind; }
  /// Standard deviations above the mean; nothing until the window is full.
  std::optional<double> score(double loss) const;
  bool is_spike(double loss) const;  ///< beyond `spike_z` of the last losses
  void add(double loss);             ///< of a step that was applied

 private:
  GuardConfig config_;
  std::deque<double> losses_;
};

}  // namespace tessera::apps
