#include "core/log.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "test/stderr_of.h"
#include "test/testing.h"

namespace tessera {

using testing::stderr_of;

TEST_CASE("log: a name in a message cannot forge a line or steer the terminal", "[log]") {
  CHECK(stderr_of([] { log_error("no tensor {}", "a\nerror: b\x1b[2J\xff"); }) ==
        "error: no tensor a\\nerror: b\\x1b[2J\\xff\n");
  CHECK(stderr_of([] { log_info("{}", "a\r\nwarning: b"); }) == "a\\r\\nwarning: b\n");
  // A table of ours.
  CHECK(stderr_of([] { log_error("out of memory\n  a 1\n  b 2\n"); }) ==
        "error: out of memory\n  a 1\n  b 2\n");
}

TEST_CASE("log: a message is bounded and keeps its end", "[log]") {
  const std::string line =
      stderr_of([] { log_error("{}: expected another", std::string(10'000'000, 'x')); });
  CHECK(line.size() < 5000);
  CHECK(line.starts_with("error: xxx"));
  CHECK(line.ends_with("xxx: expected another\n"));
  std::string lines = "many";
  for (int i = 0; i < 100'000; ++i) lines += "\n  line";
  CHECK(stderr_of([&] { log_error("{}", lines); }).size() < 70'000);
}

TEST_CASE("log: what all ranks see is said once", "[log]") {
  const auto both = [] {
    log_once("warning", "the same");
    log_once("warning", "the same");
  };
  CHECK(stderr_of([&] {
          set_log_rank(1);
          log_once("warning", "the same");
          set_log_rank(-1);
          both();
        }) == "warning: the same\n");
}

namespace {

/// 0 if the descriptors in `closed`, a bit each, are opened again and files get others.
int open_in_child(unsigned closed) {
  const pid_t child = ::fork();
  if (child == 0) {
    for (int fd = 0; fd <= 2; ++fd) {
      if ((closed >> fd & 1u) != 0) ::close(fd);
    }
    open_standard_descriptors();
    int problem = 0;
    for (int fd = 0; fd <= 2; ++fd) {
      if (::fcntl(fd, F_GETFD) == -1) problem |= 1;
      char byte = 0;
      const bool is_closed = (closed >> fd & 1u) != 0;
      if (is_closed && (::read(fd, &byte, 1) != 0 || ::write(fd, &byte, 1) != 1)) problem |= 2;
    }
    if (::open("/dev/zero", O_RDONLY) <= 2) problem |= 4;
    ::_exit(problem);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("log: standard descriptors that are closed are opened, so that no file becomes one",
          "[log]") {
  for (unsigned closed = 0; closed < 8; ++closed) {
    CAPTURE(closed);
    CHECK(open_in_child(closed) == 0);
  }
}

}  // namespace tessera
