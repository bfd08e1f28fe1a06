#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace tessera::apps {

/// tessera-tokenize: arguments without the program's name; its exit status. What is asked for goes
/// to `out`, progress to stderr.
/// Errors   ConfigError for the command line, InputError for files, IoError
int tokenize_command(const std::vector<std::string>& arguments, std::FILE* out = stdout);

}  // namespace tessera::apps
