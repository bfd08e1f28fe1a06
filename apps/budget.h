#pragma once

#include <string>

#include "apps/config.h"

// How long a run is and how large a step, as people say it: in epochs, tokens and shares.

namespace tessera::apps {

/// What is known when the data and the ranks are.
struct BudgetFacts {
  int64_t samples_per_epoch = 1;
  int64_t tokens_per_sample = 1;
  int64_t world_size = 1;
};

/// Gives the keys their values that others stand for: `train.global_batch` by `global_batch_tokens`,
/// `train.steps` by `epochs` or `tokens`, `optim.warmup_steps` by `warmup_ratio`; and
/// `samples_per_epoch`, `samples_per_step`. Returns what it has resolved, a line each, for the log; empty
/// without any.
///   steps = tokens / (tokens of a step);  ceil(epochs samples_per_epoch / samples of a step)
///   warmup_steps = ceil(warmup_ratio steps)
/// Errors   ConfigError with the place, the numbers and the nearest values that fit, for tokens that
///          steps or passes do not divide, and for more evaluations or checkpoints an epoch than it has
///          steps
std::string resolve_budget(Config& config, const BudgetFacts& facts);

/// Whether `step`, counted from 1, completes one of `parts` equal parts of an epoch: of any epoch, from
/// the start of the run on. `parts` = 0: never.
bool completes_part_of_epoch(const Config& config, int64_t parts, int64_t step);

}  // namespace tessera::apps
