#include "core/log.h"

#include <unistd.h>

#include <atomic>
#include <string>

namespace tessera {
namespace {
std::atomic<int> log_rank{-1};
}

void set_log_rank(int rank) {
  log_rank = rank;
}

void log_line(std::string_view level, std::string_view message) {
  const int rank = log_rank;
  const std::string prefix = rank < 0 ? "" : fmt::format("[rank {}] ", rank);
  const std::string label = level == "info" ? "" : fmt::format("{}: ", level);
  const std::string line = fmt::format("{}{}{}\n", prefix, label, message);
  // One write(2), so that the lines of ranks that share a terminal stay whole.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace tessera
