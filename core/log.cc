#include "core/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>
#include <string>

#include "core/text.h"

namespace tessera {
namespace {

std::atomic<int> log_rank{-1};

[[gnu::constructor]] void at_start() {
  open_standard_descriptors();
}

}  // namespace

void set_log_rank(int rank) {
  log_rank = rank;
}

void open_standard_descriptors() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) != -1) continue;
    const int opened = ::open("/dev/null", O_RDWR);  // the lowest number that is free: fd
    if (opened > fd) ::close(opened);
  }
}

void log_line(std::string_view level, std::string_view message) {
  const int rank = log_rank;
  const std::string prefix = rank < 0 ? "" : fmt::format("[rank {}] ", rank);
  const std::string label = level == "info" ? "" : fmt::format("{}: ", level);
  const std::string line = fmt::format("{}{}{}\n", prefix, label, presentable(message));
  // One write(2), so that the lines of ranks that share a terminal stay whole.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

void log_once(std::string_view level, std::string_view message) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> seen;
  if (log_rank > 0) return;
  {
    const std::lock_guard lock(mutex);
    if (!seen.emplace(message).second) return;
  }
  log_line(level, message);
}

}  // namespace tessera
