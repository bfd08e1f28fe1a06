#include "dist/checkpoint/durable_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/check.h"

namespace tessera::dist {
namespace {

std::string parent_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

/// fsync, again if a signal came between. 0 or the error.
int flush(int fd) {
  while (::fsync(fd) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace

std::string describe_io_error(const std::string& path, int error, int64_t nbytes_needed) {
  std::string text = fmt::format("{}: cannot be written: {}", path, std::strerror(error));
  if (error != ENOSPC && error != EDQUOT) return text;
  struct statvfs disk {};
  if (::statvfs(parent_of(path).c_str(), &disk) != 0) return text;
  return text + fmt::format(" ({} bytes needed, {} free)", nbytes_needed,
                            static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize);
}

DurableFile::DurableFile(std::string path, int64_t nbytes)
    : path_(std::move(path)), nbytes_(nbytes) {
  fd_ = ::open((path_ + ".tmp").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail(errno);
}

DurableFile::~DurableFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink((path_ + ".tmp").c_str());
}

void DurableFile::write(const void* data, int64_t nbytes) {
  const char* next = static_cast<const char*>(data);
  while (nbytes > 0) {
    const ssize_t written = ::write(fd_, next, static_cast<size_t>(nbytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(errno);
    next += written;
    nbytes -= written;
  }
}

void DurableFile::commit() {
  if (const int error = flush(fd_)) fail(error);
  // Whatever close says, the descriptor is gone.
  int error = ::close(std::exchange(fd_, -1)) == 0 ? 0 : errno;
  if (error == 0 && ::rename((path_ + ".tmp").c_str(), path_.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink((path_ + ".tmp").c_str());
    fail(error);
  }
  sync_directory(parent_of(path_));
}

void DurableFile::fail(int error) const {
  throw IoError(describe_io_error(path_, error, nbytes_));
}

void write_durably(const std::string& path, std::string_view text) {
  DurableFile file(path, static_cast<int64_t>(text.size()));
  file.write(text.data(), static_cast<int64_t>(text.size()));
  file.commit();
}

void make_directory_durably(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return;
  const std::string parent = parent_of(path);
  if (parent != path) make_directory_durably(parent);
  if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) {
    throw IoError(describe_io_error(path, errno, 0));
  }
  sync_directory(parent);
}

void sync_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) throw IoError(describe_io_error(path, errno, 0));
  const int error = flush(fd);
  ::close(fd);
  if (error != 0) throw IoError(describe_io_error(path, error, 0));
}

}  // namespace tessera::dist
