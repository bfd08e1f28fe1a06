#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace tessera::apps {

/// `tessera-checkpoint` with the arguments after the program's name; the exit status. Output goes
/// to `out`.
/// Errors   ConfigError for the command line; CheckpointError, IoError
int checkpoint_command(const std::vector<std::string>& arguments, std::FILE* out = stdout);

}  // namespace tessera::apps
