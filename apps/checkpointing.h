#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/config.h"
#include "apps/data.h"
#include "dist/checkpoint/choose.h"
#include "dist/checkpoint/writer.h"
#include "dist/comm/world.h"

namespace tessera::apps {

/// A short text that differs for other data, found at once: the lengths of the shards, hashes of
/// what is in memory, and of the first and last 65,536 tokens of what is in a file. That a file has
/// other tokens between those is seen when it is read (TokenCheck::content).
std::string fingerprint(const Corpus& corpus);
/// The same of what an evaluation goes through.
std::string validation_id(const Corpus& corpus, const Config& config);

/// `precision.param_dtype` of the checkpoint that `checkpoint.resume` means, if the configuration
/// leaves it to that; empty without one that can be read. Collective.
std::optional<DType> stored_param_dtype(const Config& config, dist::World& world);

/// What a run must have in common with the checkpoint it goes on from.
struct RunIdentity {
  std::string data_id;
  uint64_t seed = 0;
  int64_t samples_per_step = 0;
};

/// The checkpoints of one run: where they are, what it resumes from, when to save, and what becomes
/// of a save that fails. All ranks make the same calls.
class Checkpointing {
 public:
  /// `print` gets lines for the log, on rank 0.
  using Print = std::function<void(const std::string& line)>;

  /// The directories are held (RunDir); nothing is written before the first save.
  Checkpointing(const Config& config, dist::World& world);

  /// Loads what `checkpoint.resume` names into `state`; nothing for "none" and for "auto" without
  /// checkpoints, unless the run there began with one elsewhere: then that. Then saves are of this
  /// state.
  /// Errors   CheckpointError if there is no whole checkpoint or it does not fit; ConfigError if
  ///          its data, seed or batch are not those of `identity`, or settings are not the run's
  ///          (resume_keys.h), and `checkpoint.resume_override` is not set; with it, and for
  ///          settings that may change, `print` gets what differs
  std::optional<dist::Progress> start(const dist::TrainingState& state, const RunIdentity& identity,
                                      Print print);

  /// Whether the state after `step` is to be saved.
  bool is_due(int64_t step) const;
  bool is_on() const { return config_.checkpoint.every > 0 || config_.checkpoint.per_epoch > 0; }
  /// Whether the last one is older than `checkpoint.every_minutes`, by this rank's clock.
  bool is_late() const;
  /// Begins to save, unless this step was. A save that is not over is waited for first.
  void save(const dist::Progress& progress);
  dist::CheckpointWriter::State state() const { return writer_->state(); }
  /// The validation loss of the state whose save is complete, which was not known then.
  void add_val_loss(const dist::Progress& progress);
  /// What the ranks know of each other's writers (RunControl::poll).
  void advance(std::span<const dist::CheckpointWriter::State> states);
  /// Waits for the save that was begun; true if the last one is complete.
  bool finish();

  const std::string& dir() const { return dir_; }
  const std::string& run() const { return run_; }
  /// Once they are known, the hashes of all data against those of the checkpoint it goes on from:
  /// Errors   ConfigError if the run was trained on other tokens, without resume_override; the same
  ///          on all ranks
  void check_content(const std::string& data_content) const;
  /// The checkpoint that `start` has loaded; empty: none.
  const std::string& resumed_from() const { return resumed_from_; }

 private:
  void open_origin(dist::ChosenCheckpoint& chosen);
  void set_aside(const std::vector<std::string>& damaged) const;
  void report(const std::optional<dist::SaveResult>& result);
  void check_identity(const dist::CheckpointReader& reader, const RunIdentity& identity) const;
  void print_changes(const dist::CheckpointReader& reader) const;

  const Config& config_;
  dist::World& world_;
  std::string dir_, run_, resumed_from_, resumed_content_;
  std::chrono::steady_clock::time_point last_begin_ = std::chrono::steady_clock::now();
  Print print_;
  std::unique_ptr<dist::CheckpointWriter> writer_;
  bool adopts_run_ = false;  // the directory does not say of which run its checkpoints are
  int64_t last_step_ = -1, last_sample_ = -1;  // that was saved or loaded
  int64_t num_errors_ = 0;                     // in a row
};

}  // namespace tessera::apps
