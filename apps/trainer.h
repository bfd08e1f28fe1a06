#pragma once

#include <optional>
#include <string>
#include <vector>

#include "apps/config.h"
#include "apps/options.h"
#include "apps/saved_model.h"
#include "dist/comm/world.h"

namespace tessera::apps {

struct TrainResult {
  int64_t steps = 0;
  double loss = 0;  ///< of the last step
  std::optional<double> val_loss;
  bool is_preempted = false;  ///< asked to end; the checkpoint is complete
};

/// A whole training run on the ranks of `world`; all call it. Makes `output.dir` with
///   config.toml        the resolved configuration
///   metrics.jsonl      one object a step (metrics.h)
///   status.json        running, finished, preempted or failed, and why; step, time, loss, process
///   model.safetensors  at the end: f32 parameters under their full names
///   tokenizer.json     if there are texts, with what came beside it
///   token_cache/       tokens of texts (token_cache.h)
///   step-NNNNNNNN/     checkpoints (checkpoint.*)
///   run.lock           held by the run while it lives (run_dir.h)
/// and prints a line a step on rank 0. What one rank alone sees wrong ends all ranks with the same
/// error.
/// Errors   ConfigError, InputError, CheckpointError, NumericsError (non-finite loss or gradient
///          norm, with step, rank and samples; that step changes nothing), IoError
TrainResult train(const Config& config, dist::World& world);

/// `tessera-train` with the arguments after the program's name.
int train_command(const std::vector<std::string>& arguments, dist::World& world);

}  // namespace tessera::apps
