#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "apps/config.h"
#include "dist/checkpoint/writer.h"
#include "dist/comm/world.h"

// When a run ends early, and which steps count. [Note: Signals]
// SIGTERM to a rank, or SIGUSR1 (which mpirun passes on to all ranks), asks for a preemption: the
// ranks agree on it at the end of the step, save, and end with status 0. The same signal again ends
// the process at once. SIGTERM also has the watchdog say what is in flight and the status file say
// "failed", in case the end of the step is never reached: that is how a launcher ends the ranks
// when one of them is gone.

namespace tessera::apps {

/// While alive, the process handles the two signals as above.
class SignalHandlers {
 public:
  SignalHandlers();
  ~SignalHandlers();
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;

  /// A signal has come twice: whoever notices ends the process.
  static bool ends_at_once();
  /// Ends the process by the signal that came twice, so that who started it sees why.
  static void end_by_signal();
};

/// What a signal does; any thread.
void request_preemption();
bool is_preemption_requested();
void forget_preemption();

/// What most often makes a loss or gradient norm non-finite under this configuration, and what to
/// change; `lr` is that of the step.
std::string nonfinite_advice(const Config& config, double lr);

/// Host decisions at the end of each step: one exchange of a few bytes, which carries the news of
/// the checkpoint writer as well.
class RunControl {
 public:
  RunControl(const TrainConfig& config, dist::World& world);

  struct Decision {
    bool is_preempted = false;
    bool is_out_of_time = false;
    bool is_save_due = false;  ///< by the clock of rank 0
    bool has_failed = false;   ///< a rank has an error to tell when the state is saved
    std::vector<dist::CheckpointWriter::State> writers;  ///< by rank
  };
  Decision poll(dist::CheckpointWriter::State writer, bool is_save_due = false,
                bool has_failed = false);

 private:
  dist::World& world_;
  std::chrono::steady_clock::time_point start_;
  double max_seconds_;
};

/// Whether a loss is far above those before it: more than `spike_z` standard deviations above the
/// mean of the last `spike_window` losses that were not.
class SpikeGuard {
 public:
  explicit SpikeGuard(const GuardConfig& config) : config_(config) {}

  bool is_on() const { return config_.spike != "off"; }
  bool skips() const { return config_.spike == "skip"; }
  bool rewinds() const { return config_.spike == "rewind"; }
  /// Standard deviations above the mean; nothing until the window is full.
  std::optional<double> score(double loss) const;
  bool is_spike(double loss) const;
  void add(double loss);

 private:
  GuardConfig config_;
  std::deque<double> losses_;
};

}  // namespace tessera::apps
