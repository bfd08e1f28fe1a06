#include "core/files.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <functional>

#include "core/check.h"
#include "test/temp_dir.h"

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

TEST_CASE("files: a write that cannot begin leaves what has the name of its temporary file",
          "[files]") {
  const testing::TempDir dir;
  const std::string temporary = dir / "a.tmp";
  REQUIRE(::symlink((dir / "none/x").c_str(), temporary.c_str()) == 0);
  std::string error;
  try {
    write_file_atomically(dir / "a", "text");
  } catch (const IoError& e) {
    error = e.what();
  }
  CHECK(error == dir / "a: cannot be written: No such file or directory");
  CHECK(std::filesystem::is_symlink(temporary));
}

}  // namespace tessera
