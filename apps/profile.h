#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "apps/config.h"
#include "apps/profile_table.h"
#include "dist/comm/world.h"
#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/task_labels.h"

namespace tessera::apps {

/// Steps counted from 1, both included; none: `last` is 0.
struct StepRange {
  int64_t first = 1, last = 0;
  bool is_empty() const { return last == 0; }
};
/// "10..13", "7", or "" for none. ConfigError for anything else.
StepRange parse_step_range(const std::string& text);

/// Of some steps of a training: one timeline of all ranks, a table of what took their time, and what
/// to change. All ranks make the same calls. Lives no longer than the model and the Fsdp.
class Profile {
 public:
  /// `next`: the observer of operations that the run has anyway; or null. `print`: on rank 0. A run
  /// from step `first_step` on that has none of the steps is warned of.
  Profile(const Config& config, int64_t first_step, dist::World& world, nn::Module& model,
          const dist::Fsdp& fsdp, OpObserver* next, std::function<void(const std::string&)> print);
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  /// Before the step is submitted: begins with the first of the range and ends after the last.
  /// Collective, like what it calls.
  void before_step(int64_t step);
  /// What is submitted from here on is of this phase ("" and -1: of no step).
  void enter(int64_t step, const char* phase);
  /// Who observes the operations of a step.
  OpObserver* observer();
  /// The run ends: whatever there is is written. IoError on all ranks if it cannot be.
  void finish();

 private:
  void begin();
  Tuning tuning() const;
  void report();
  void write_trace(int64_t origin_ns);

  const Config& config_;
  dist::World& world_;
  const dist::Fsdp& fsdp_;
  const std::function<void(const std::string&)> print_;
  const StepRange range_;
  OpObserver* const next_;
  std::unique_ptr<dist::TaskLabels> labels_;
  bool is_recording_ = false;
  int64_t clock_ahead_ns_ = 0;
};

}  // namespace tessera::apps
