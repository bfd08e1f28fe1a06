#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dist/checkpoint/reader.h"
#include "dist/comm/world.h"

namespace tessera::dist {

/// A checkpoint that all ranks have found whole.
struct ChosenCheckpoint {
  std::unique_ptr<CheckpointReader> reader;  ///< null: there is none
  std::vector<std::string> damaged;          ///< newer ones that were not; nobody has touched them
  std::vector<std::string> unreadable;       ///< newer ones that could not be read
};

/// The newest checkpoint in `dir` whose manifest, sizes and hashes are right, the bytes shared out
/// over the ranks, and which is of `run` (empty: any). Collective; what one rank alone sees wrong
/// counts for all. Each one passed over is a warning of rank 0 with file and tensor: damaged ones,
/// those of other runs and, if `skips_unreadable`, those that cannot be read.
/// Errors   on all ranks: UnreadableCheckpointError for one that cannot be read (see manifest.h);
///          CheckpointError if there are checkpoints but none can be used
ChosenCheckpoint choose_checkpoint(World& world, const std::string& dir, const std::string& run,
                                   bool skips_unreadable = false);

/// Opens one checkpoint and checks it in the same way; CheckpointError on all ranks.
std::unique_ptr<CheckpointReader> open_checkpoint(World& world, const std::string& dir);

}  // namespace tessera::dist
