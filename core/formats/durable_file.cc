#include "core/formats/durable_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/check.h"
#include "core/files.h"

namespace tessera {
namespace {

std::string parent_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

constexpr int64_t kEarlyNbytes = int64_t{1} << 20;  // the disk begins with blocks of this size

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
  fd_ = open_new_file(path_ + ".tmp");
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
    const int64_t count = choose_way(next, nbytes);
    const ssize_t written = ::write(fd_, next, static_cast<size_t>(count));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && is_direct_ && (errno == EINVAL || errno == EFAULT)) {
      can_be_direct_ = false;  // larger blocks on this disk, or memory of a device's driver
      continue;
    }
    if (written < 0) fail(errno);
    // Advice: what goes wrong with it, fsync reports.
    if (!is_direct_ && written >= kEarlyNbytes) {
      ::sync_file_range(fd_, offset_, written, SYNC_FILE_RANGE_WRITE);
    }
    next += written;
    offset_ += written;
    nbytes -= written;
  }
}

/// Past the page cache or not; how many bytes may go in one call.
int64_t DurableFile::choose_way(const void* data, int64_t nbytes) {
  const bool is_direct = can_be_direct_ && nbytes >= kDirectNbytes &&
                         offset_ % kDirectNbytes == 0 &&
                         reinterpret_cast<uintptr_t>(data) % kDirectNbytes == 0;
  if (is_direct != is_direct_) {
    const int flags = ::fcntl(fd_, F_GETFL);
    const int wanted = is_direct ? flags | O_DIRECT : flags & ~O_DIRECT;
    if (flags >= 0 && ::fcntl(fd_, F_SETFL, wanted) == 0) {
      is_direct_ = is_direct;
    } else {
      can_be_direct_ = false;
    }
  }
  return is_direct_ ? nbytes / kDirectNbytes * kDirectNbytes : nbytes;
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

void replace_directory(const std::string& from, const std::string& to) {
  const auto rename = [](const std::string& a, const std::string& b, unsigned flags = 0) {
    return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), flags) == 0 ? 0 : errno;
  };
  int error = rename(from, to, RENAME_EXCHANGE);
  if (error == ENOENT) error = rename(from, to, RENAME_NOREPLACE);
  if (error == EINVAL || error == ENOSYS) {  // a file system that only has the simple rename
    const std::string aside = from + ".old";
    struct stat status {};
    const bool is_there = ::lstat(to.c_str(), &status) == 0;
    error = is_there ? rename(to, aside) : 0;
    if (error == 0) error = rename(from, to);
    if (error == 0 && is_there) error = rename(aside, from);
  }
  if (error != 0) {
    throw IoError(fmt::format("{}: cannot get the name {}: {}", from, to, std::strerror(error)));
  }
  sync_directory(parent_of(to));
}

void sync_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) throw IoError(describe_io_error(path, errno, 0));
  const int error = flush(fd);
  ::close(fd);
  if (error != 0) throw IoError(describe_io_error(path, error, 0));
}

}  // namespace tessera
