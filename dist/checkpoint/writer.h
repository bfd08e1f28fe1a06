#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dist/checkpoint/manifest.h"
#include "dist/checkpoint/state.h"
#include "dist/comm/world.h"

namespace tessera::dist {

/// Where checkpoints go, and which of them stay.
struct CheckpointOptions {
  std::string dir;        ///< of the step directories
  std::string run;        ///< Manifest::run
  int64_t keep = 3;       ///< newest ones that stay
  bool keep_best = true;  ///< and the one with the lowest validation loss
  /// Directories that are neither removed nor replaced, and do not count: they could not be read.
  std::vector<std::string> leave_alone = {};
};

/// How a save ended, the same on all ranks.
struct SaveResult {
  int64_t step = 0;
  std::string error;   ///< empty: the checkpoint is complete
  double seconds = 0;  ///< since it began
  int64_t nbytes = 0;  ///< of all files
};

/// Saves checkpoints while training goes on. `begin` enqueues a copy into host memory; a thread of
/// each rank writes and flushes the rank's file; when all ranks have heard of each other that they
/// are done (a byte each, in `poll`'s exchange), rank 0's thread writes the manifest, gives the
/// directory its name and removes old checkpoints; then the save is complete. No collective waits
/// for a disk: ranks exchange states, never results that are not there. All ranks make the same
/// calls in the same order; errors of the disk are results, not exceptions.
///
/// "Old" is what was saved earlier: after a step back (guard.spike=rewind) that is not a lower
/// step, and a step may be saved twice, the second in place of the first. Only checkpoints of
/// `run` are removed, see remove_checkpoint; those of higher steps that were there before this
/// writer neither count nor go. No rank begins to write the next checkpoint before rank 0 is
/// through with the removal. Memory   this rank's part of the state once more, in host memory
class CheckpointWriter {
 public:
  /// What `exchange` carries from each rank.
  enum class State : uint8_t { kIdle, kBusy, kDone, kFailed };

  CheckpointWriter(World& world, const TrainingState& state, CheckpointOptions options);
  ~CheckpointWriter();  ///< ends what its thread has begun
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Saves the state as the compute stream has it after what was submitted so far. A save that is
  /// not over is waited for; its result is returned.
  std::optional<SaveResult> begin(const Progress& progress);
  bool is_saving() const { return phase_ != Phase::kIdle; }

  /// This rank's news for an exchange that the caller makes, and what to do with all ranks' news.
  State state() const;
  /// Goes on as far as all ranks have come; the result of a save that this completes.
  std::optional<SaveResult> advance(std::span<const State> states);
  /// Both with an exchange of its own; cheap, for the end of each step.
  std::optional<SaveResult> poll();
  /// Waits for the save that was begun; empty if there is none.
  std::optional<SaveResult> finish();

 private:
  class Thread;
  enum class Phase : uint8_t { kIdle, kFiles, kManifest, kCleanup };

  RankRecord write_file(const Progress& progress) const;
  struct Known;
  void commit(Manifest manifest);
  void prune(const Manifest& saved, std::vector<Known> known) const;
  std::vector<Known> known_checkpoints(const Progress& saved) const;
  void check_place() const;
  bool is_left_alone(const std::string& dir) const;
  std::string final_dir() const;
  std::string partial_dir() const;
  SaveResult end(std::string error);

  World& world_;
  TrainingState state_;
  CheckpointOptions options_;
  std::unique_ptr<Snapshot> snapshot_;
  Phase phase_ = Phase::kIdle;
  Progress progress_;  // of the save in progress
  std::string error_;  // of the save that is being cleaned up
  int64_t nbytes_ = 0;
  int64_t begin_ns_ = 0;
  RankRecord record_;           // written by the thread before it is done
  int64_t first_sequence_ = 0;  // of this writer's saves; 0: none yet. Rank 0's thread
  std::unique_ptr<Thread> thread_;
};

/// A checkpoint and its validation loss, if it has one.
struct CheckpointRank {
  int64_t step = 0;
  std::optional<double> val_loss;
};
/// Which of `checkpoints` (newest first) go: all but the newest `keep` and, with `keep_best`, the best.
std::vector<size_t> superfluous_checkpoints(std::span<const CheckpointRank> checkpoints,
                                            int64_t keep, bool keep_best);

}  // namespace tessera::dist
