#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "test/temp_dir.h"

namespace tessera::testing {

/// What goes to stderr while `f` runs.
inline std::string stderr_of(const std::function<void()>& f) {
  const TempDir dir;
  const int saved = ::dup(STDERR_FILENO);
  const int fd = ::open(dir.write("stderr", "").c_str(), O_WRONLY);
  ::dup2(fd, STDERR_FILENO);
  f();
  ::dup2(saved, STDERR_FILENO);
  ::close(fd);
  ::close(saved);
  return read_file(dir / "stderr");
}

}  // namespace tessera::testing
