#pragma once

#include <cstdint>
#include <string>

#include "dist/checkpoint/reader.h"

namespace tessera::dist {

/// The same checkpoint in `out_dir`/step-NNNNNNNN as `num_ranks` files of about the same size, by
/// one process through a buffer of a few MiB. Returns its directory. IoError, or ConfigError if
/// there is a checkpoint of this step already.
std::string reshard_checkpoint(const CheckpointReader& reader, const std::string& out_dir,
                               int64_t num_ranks);

}  // namespace tessera::dist
