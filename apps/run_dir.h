#pragma once

#include <fcntl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/config.h"
#include "dist/comm/world.h"

// The directory of a run: who holds it, how far the run in it came, and what a start may do to it.

namespace tessera::apps {

enum class RunState { kRunning, kFinished, kPreempted, kFailed };

/// `status.json`: how far a run is. Time, host and process are those of the last change.
struct RunStatus {
  RunState state = RunState::kRunning;
  int64_t step = 0;
  std::string why;
  std::optional<double> loss;  ///< of that step
  std::string time;            ///< UTC: "2026-11-30T04:05:06Z"
  std::string host;
  int64_t pid = 0;
};

/// Replaces `dir`/status.json: {"state": "failed", "step": 12, "why": "...", "loss": 2.5, "time":
/// "...", "host": "...", "pid": 1234}. IoError.
void write_status(const std::string& dir, RunState state, int64_t step, const std::string& why = "",
                  std::optional<double> loss = std::nullopt);
/// The text of that file for a death at any time, with the marks of FatalReport.
std::string fatal_status_text();
/// None where there is none, or something else has that name.
std::optional<RunStatus> read_status(const std::string& dir);
std::optional<RunStatus> parse_status(std::string_view text);

/// The run whose files are in `dir` (`run.json`); empty if it does not say.
std::string read_run(const std::string& dir);
std::string parse_run(std::string_view text);
/// The checkpoint elsewhere that the run in `dir` began with; empty: none. Until it has one of its
/// own, it goes on from there.
std::string read_origin(const std::string& dir);
void write_run(const std::string& dir, const std::string& run, const std::string& origin = "");

/// Of the process that holds a directory.
struct RunHolder {
  std::string host;
  int64_t pid = 0;
};

/// [Note: Run lock]
/// A run holds its directory by a lock of the operating system on the file `run.lock` in it, byte 0
/// for the process that writes the run's files and byte 1, shared, for its other ranks. The lock
/// belongs to the open file (F_OFD_SETLK): it goes with the process whatever ends it, so there is
/// nothing to clean up after a kill -9, and a status "running" that nobody holds is of a run that
/// died. NFS passes these locks to its server. The file stays; what it says is for messages.
class RunLock {
 public:
  using Call = int (*)(int fd, int command, struct flock* lock);  ///< fcntl, but for tests

  /// Holds `dir`; null if another process does, or ranks of one that is gone do for `wait_s` more
  /// seconds. Warns where the file system has no locks: then nobody is kept out. IoError if
  /// `run.lock` cannot be written.
  static std::unique_ptr<RunLock> try_hold(const std::string& dir, double wait_s = 10,
                                           Call call = nullptr);
  /// Says that this rank belongs to who holds `dir`; null where that is not possible.
  static std::unique_ptr<RunLock> share(const std::string& dir);
  /// Who holds `dir` now, if anybody does. Without locks: whom `run.lock` names, unless that was a
  /// process of this host that is gone.
  static std::optional<RunHolder> holder(const std::string& dir, Call call = nullptr);

  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  explicit RunLock(int fd) : fd_(fd) {}
  int fd_;
};

/// What DIR and DIR/latest mean: the directory of a run.
std::string run_dir_of(const std::string& path);

/// "finished at step 20", "preempted at step 7", "failed at step 5: why", "is at step 12 (process 4
/// on host)", "died at step 12 (process 4 on host)". Empty if there is no run in `dir`. Who holds
/// it
/// (`is_mine`) asks for the run before.
std::string describe_run(const std::string& dir, bool is_mine = false);

/// The same of a run that has not finished, by what a reader of its states was given (DIR or
/// DIR/latest); else empty.
std::string describe_unfinished(const std::string& path);

/// ConfigError if an export may not be put into `target`, a directory that need not exist: it is a
/// run's, or a checkpoint.
void check_export_target(const std::string& target);

/// The directories of one run (`output.dir` and `checkpoint.dir`) for its life. All ranks make the
/// same calls.
class RunDir {
 public:
  /// Makes and holds the directories. Where no run has left anything, this one begins in them at
  /// once; what an earlier one left is not touched.
  /// Errors   ConfigError if a directory cannot be made or written, is in use, is that of
  ///          `model.from`, has files of the names to be written that no run made, or has a run,
  ///          which is neither resumed nor to be overwritten
  RunDir(const Config& config, dist::World& world);

  /// From here on the directories are this run's: after `step`, from checkpoint `from` (empty: from
  /// the start). What is newer of the run there goes if `output.overwrite` says so. Errors
  /// ConfigError if there is a newer state and it does not; CheckpointError if there is a model but
  /// no checkpoint to go on from
  void begin(int64_t step, const std::string& from, const std::string& run);

  /// The files are this run's: its status may be written.
  bool is_begun() const { return is_begun_; }

 private:
  struct Place {
    std::string key, dir;
    std::unique_ptr<RunLock> lock;
  };
  void hold();
  void check_place(const Place& place) const;
  void check_earlier();
  bool resumes_in_place() const;
  int64_t newest_step() const;
  void remove_newer(int64_t step) const;

  const Config& config_;
  dist::World& world_;
  std::vector<Place> places_;  // output.dir first
  bool has_earlier_ = false, is_begun_ = false;
};

/// Where the timeline of a run goes: profile.trace, or trace.json of its directory.
std::string trace_path(const Config& config);
/// ConfigError if the timeline cannot be written there at the end: no directory, no right to write, a
/// directory, another file of the run, or a file with something else in it.
void check_trace_path(const Config& config);

}  // namespace tessera::apps
