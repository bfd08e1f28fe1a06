#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <vector>

// The command lines of all programs: --help with defaults, --version, and one style of errors.

namespace tessera::apps {

/// "tessera-train 0.1.0 (commit 1a2b3c)" and a line with the compiler and what is built in: MPI,
/// CUDA, oneDNN.
std::string version_text(const std::string& program);

/// CLI11's App with the two flags; a default is the value that an option's variable has.
class CommandLine : public CLI::App {
 public:
  CommandLine(const std::string& what, const std::string& program);

  /// Reads the arguments after the program's name. 0 if --help or --version was asked for, whose
  /// text goes to `out` (none: nowhere); nothing if the program is to go on.
  /// Errors   ConfigError "command line: ..." (status 2) for what is not understood
  std::optional<int> read(const std::vector<std::string>& arguments, std::FILE* out = stdout);
  std::optional<int> read(int argc, char** argv) { return read({argv + 1, argv + argc}); }
};

/// A number of `low` to `high`, both included; without `high` as large as the type allows.
template <class T>
CLI::Range in_range(T low, std::optional<T> high = std::nullopt) {
  const std::string text = high ? fmt::format("{} to {}", low, *high) : fmt::format(">= {}", low);
  return CLI::Range(low, high.value_or(std::numeric_limits<T>::max()), text);
}

}  // namespace tessera::apps
