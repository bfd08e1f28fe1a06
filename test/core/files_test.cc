#include "core/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "core/check.h"
#include "test/temp_dir.h"
#include "test/testing.h"

namespace tessera {
namespace {

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

/// What all three ways to read a file say about it.
std::string error_of_readers(const std::string& path) {
  const std::string error = error_of([&] { open_regular_file(path); });
  CHECK(error_of([&] { read_regular_file(path, 100); }) == error);
  CHECK(error_of([&] { MappedFile file(path); }) == error);
  return error;
}

}  // namespace

TEST_CASE("files: what is no regular file is refused by its kind, without waiting", "[files]") {
  const testing::TempDir dir;
  REQUIRE(::mkfifo((dir / "fifo").c_str(), 0600) == 0);
  CHECK(error_of_readers(dir / "fifo") == dir / "fifo: a FIFO, expected a regular file");
  CHECK(error_of_readers(dir.path()) == dir.path() + ": a directory, expected a regular file");
  CHECK(error_of_readers("/dev/null") == "/dev/null: a device, expected a regular file");
  const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
  ::sockaddr_un address{};
  address.sun_family = AF_UNIX;
  (dir / "socket").copy(address.sun_path, sizeof(address.sun_path) - 1);
  REQUIRE(::bind(fd, reinterpret_cast<::sockaddr*>(&address), sizeof(address)) == 0);
  CHECK(error_of_readers(dir / "socket") == dir / "socket: a socket, expected a regular file");
  ::close(fd);
  CHECK(error_of_readers(dir / "none") == dir / "none: No such file or directory, expected a file");
  REQUIRE(::symlink("fifo", (dir / "link").c_str()) == 0);
  CHECK(error_of_readers(dir / "link") == dir / "link: a FIFO, expected a regular file");
}

TEST_CASE("files: a whole file is read up to a limit", "[files]") {
  const testing::TempDir dir;
  const std::string bytes("a\0b\n", 4);
  dir.write("file", bytes);
  CHECK(read_regular_file(dir / "file", 4) == bytes);
  CHECK(error_of([&] { read_regular_file(dir / "file", 3); }) ==
        dir / "file: 4 bytes, expected at most 3");
  CHECK(read_regular_file(dir.write("empty", ""), 0).empty());
  // Files of /proc say that they have no bytes.
  CHECK(read_regular_file("/proc/self/status", 1 << 20).starts_with("Name:"));
  CHECK(error_of([&] {
          read_regular_file("/proc/self/status", 4);
        }).ends_with("bytes, expected at most 4"));
}

TEST_CASE("files: a mapped file has the bytes of the file", "[files]") {
  const testing::TempDir dir;
  const MappedFile file(dir.write("file", "text"));
  CHECK(file.text() == "text");
  CHECK(file.nbytes() == 4);
  CHECK(MappedFile(dir.write("empty", "")).nbytes() == 0);
}

TEST_CASE("files: a link with the name of a temporary file is replaced, not followed", "[files]") {
  const testing::TempDir dir;
  const std::string other = dir.write("other", "of somebody else");
  REQUIRE(::symlink(other.c_str(), (dir / "a.tmp").c_str()) == 0);
  write_file_atomically(dir / "a", "text");
  CHECK(testing::read_file(dir / "a") == "text");
  CHECK_FALSE(std::filesystem::is_symlink(dir / "a"));
  REQUIRE(::link(other.c_str(), (dir / "a.tmp").c_str()) == 0);  // a second name of the same file
  write_file_atomically(dir / "a", "next");
  CHECK(testing::read_file(dir / "a") == "next");
  dir.write("a.tmp", "left by a process that was killed");
  write_file_atomically(dir / "a", "last");
  CHECK(testing::read_file(dir / "a") == "last");
  CHECK(testing::read_file(other) == "of somebody else");
}

TEST_CASE("files: a write that cannot begin leaves what has the name of its temporary file",
          "[files]") {
  const testing::TempDir dir;
  std::filesystem::create_directory(dir / "a.tmp");
  std::string error;
  try {
    write_file_atomically(dir / "a", "text");
  } catch (const IoError& e) {
    error = e.what();
  }
  CHECK(error == dir / "a: cannot be written: Is a directory");
  CHECK(std::filesystem::is_directory(dir / "a.tmp"));
  CHECK_FALSE(std::filesystem::exists(dir / "a"));
}

TEST_CASE("files: a mapped file that is cut gives zeros and says so, with its name", "[files]") {
  const testing::TempDir dir;
  const std::string path = dir.write("file", std::string(5 * 4096 + 100, 'x'));
  const auto sum = [](const MappedFile& file) {
    int64_t total = 0;
    for (const char c : file.text()) total += c;
    return total;
  };
  {
    const MappedFile file(path);
    file.check();
    REQUIRE(::truncate(path.c_str(), 5 * 4096 + 50) == 0);  // inside of the last page: no fault
    CHECK(sum(file) == 'x' * (5 * 4096 + 50));
    CHECK(error_of([&] { file.check(); }) ==
          path + ": cut to 20530 bytes while it was read, expected 20580 as before");
  }
  {
    const MappedFile file(path), same(path);
    REQUIRE(::truncate(path.c_str(), 4096) == 0);
    CHECK(sum(file) == 'x' * 4096);
    CHECK(error_of([&] { file.check(); }) ==
          path + ": cut to 4096 bytes while it was read, expected 20530 as before");
    // What was read stays wrong whatever the file becomes.
    REQUIRE(::truncate(path.c_str(), 30000) == 0);
    CHECK(error_of([&] { file.check(); }) ==
          path +
              ": some of its 20530 bytes could not be read, expected a file that stays as it was");
    same.check();
  }
  // A file of that name in its place is another file.
  const MappedFile file(path);
  REQUIRE(::rename(dir.write("new", "y").c_str(), path.c_str()) == 0);
  CHECK(sum(file) == 'x' * 4096);
  file.check();
}

TEST_CASE("files: several threads read a file while it is cut", "[files]") {
  const testing::TempDir dir;
  const std::string path = dir.write("file", std::string(256 * 4096, 'x'));
  const MappedFile file(path);
  std::atomic<int> num_ready{0};
  std::atomic<bool> is_cut{false};
  std::vector<std::string> errors(4);
  std::vector<std::thread> threads;
  for (std::string& error : errors) {
    threads.emplace_back([&] {
      ++num_ready;
      bool was_cut = false;
      int64_t total = 0;
      while (!was_cut) {  // once more after the cut
        was_cut = is_cut;
        for (const char c : file.text()) total += c;
      }
      error = total > 0 ? error_of([&] { file.check(); }) : "nothing read";
    });
  }
  while (num_ready < 4) std::this_thread::yield();
  REQUIRE(::truncate(path.c_str(), 4096) == 0);
  is_cut = true;
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) {
    CHECK(error == path + ": cut to 4096 bytes while it was read, expected 1048576 as before");
  }
}

namespace {

volatile sig_atomic_t num_seen = 0;

/// The signal that ends a child which does `body`, or 0.
int signal_of(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGALRM, SIG_DFL);
    ::alarm(60);
    body();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

}  // namespace

TEST_CASE("files: a fault that is not of a mapped file goes on to whom it concerns", "[files]") {
  const testing::TempDir dir;
  const std::string path = dir.write("file", std::string(2 * 4096, 'x'));
  const MappedFile guarded(path);
  const std::string other = dir.write("other", std::string(2 * 4096, 'x'));
  const int fd = ::open(other.c_str(), O_RDONLY | O_CLOEXEC);
  const auto* mapped =
      static_cast<const volatile char*>(::mmap(nullptr, 2 * 4096, PROT_READ, MAP_PRIVATE, fd, 0));
  ::close(fd);
  REQUIRE(mapped != MAP_FAILED);
  REQUIRE(::truncate(other.c_str(), 0) == 0);
  CHECK(signal_of([&] { num_seen = mapped[4096]; }) == SIGBUS);
  CHECK(signal_of([&] { ::raise(SIGBUS); }) == SIGBUS);
  // A handler that came later asks for help.
  CHECK(signal_of([&] {
          struct sigaction action {};
          action.sa_flags = SA_SIGINFO;
          action.sa_sigaction = [](int, siginfo_t* info, void*) {
            if (mend_mapped_fault(info->si_addr)) return;
            ::_exit(1);
          };
          ::sigaction(SIGBUS, &action, nullptr);
          if (::truncate(path.c_str(), 0) != 0) ::_exit(1);
          num_seen = guarded.text()[4096];
          ::raise(num_seen == 0 ? SIGUSR2 : SIGUSR1);
        }) == SIGUSR2);
  ::munmap(const_cast<char*>(mapped), 2 * 4096);
}

}  // namespace tessera
