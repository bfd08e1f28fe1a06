#include "core/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/check.h"

namespace tessera {
namespace {

std::string system_error() {
  return std::strerror(errno);
}

/// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  int close() {
    const int result = ::close(fd_);
    fd_ = -1;
    return result;
  }

 private:
  int fd_;
};

std::string_view kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return "not a regular file";
}

struct OpenFile {
  Descriptor fd;
  int64_t nbytes = 0;
  uint64_t device = 0, inode = 0;
};

OpenFile open_regular(const std::string& path) {
  // Without O_NONBLOCK the open of a FIFO waits for a writer, and that of some devices for a line.
  OpenFile file{Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY))};
  const int error = errno;
  struct stat status {};
  const bool is_found =
      file.fd.get() < 0 ? ::stat(path.c_str(), &status) == 0 : ::fstat(file.fd.get(), &status) == 0;
  if (is_found && !S_ISREG(status.st_mode)) {  // a socket cannot even be opened
    throw InputError(fmt::format("{}: {}, expected a regular file", path, kind_of(status.st_mode)));
  }
  if (file.fd.get() < 0) {
    throw InputError(fmt::format("{}: {}, expected a file", path, std::strerror(error)));
  }
  file.nbytes = status.st_size;
  file.device = status.st_dev;
  file.inode = status.st_ino;
  return file;
}

}  // namespace

int open_regular_file(const std::string& path) {
  return open_regular(path).fd.release();
}

std::string read_regular_file(const std::string& path, int64_t max_nbytes) {
  const OpenFile file = open_regular(path);
  const auto check_size = [&](int64_t nbytes) {
    if (nbytes <= max_nbytes) return;
    throw InputError(fmt::format("{}: {} bytes, expected at most {}", path, nbytes, max_nbytes));
  };
  check_size(file.nbytes);
  // Files of /proc say that they have no bytes, and a file may grow: what is read counts.
  std::string text(static_cast<size_t>(file.nbytes) + 1, '\0');
  size_t length = 0;
  while (true) {
    if (length == text.size()) text.resize(2 * length);
    const ssize_t num_read = ::read(file.fd.get(), text.data() + length, text.size() - length);
    if (num_read < 0 && errno == EINTR) continue;
    if (num_read < 0) {
      throw InputError(fmt::format("{}: cannot be read: {}", path, system_error()));
    }
    if (num_read == 0) break;
    length += static_cast<size_t>(num_read);
    check_size(static_cast<int64_t>(length));
  }
  text.resize(length);
  return text;
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const OpenFile file = open_regular(path);
  nbytes_ = file.nbytes;
  if (nbytes_ == 0) return;
  void* mapped =
      ::mmap(nullptr, static_cast<size_t>(nbytes_), PROT_READ, MAP_PRIVATE, file.fd.get(), 0);
  if (mapped == MAP_FAILED) {
    throw InputError(fmt::format("{}: cannot be mapped: {}", path, system_error()));
  }
  data_ = static_cast<const uint8_t*>(mapped);
  device_ = file.device;
  inode_ = file.inode;
  guard_ = std::make_unique<FaultGuard>(mapped, nbytes_);
}

void MappedFile::check() const {
  // A file that is cut inside of a page reads as zeros there without a fault.
  struct stat now {};
  const bool is_same =
      ::stat(path_.c_str(), &now) == 0 && now.st_dev == device_ && now.st_ino == inode_;
  if (is_same && now.st_size < nbytes_) {
    throw InputError(fmt::format("{}: cut to {} bytes while it was read, expected {} as before",
                                 path_, now.st_size, nbytes_));
  }
  if (guard_ != nullptr && guard_->has_faulted()) {
    throw InputError(fmt::format(
        "{}: some of its {} bytes could not be read, expected a file that stays as it was", path_,
        nbytes_));
  }
}

MappedFile::~MappedFile() {
  guard_.reset();
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(nbytes_));
}

int open_new_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return -1;
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int moved = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  ::close(fd);
  errno = error;
  return moved;
}

int write_all(int fd, std::string_view text) noexcept {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : EIO;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

namespace {

/// 0 or errno.
int replace_file(const std::string& path, std::string_view text) {
  const std::string temporary = path + ".tmp";
  Descriptor fd(open_new_file(temporary));
  if (fd.get() < 0) return errno;
  int error = write_all(fd.get(), text);
  if (error == 0 && (fd.close() != 0 || ::rename(temporary.c_str(), path.c_str()) != 0)) {
    error = errno;
  }
  if (error != 0) ::unlink(temporary.c_str());
  return error;
}

[[noreturn]] void fail_to_write(const std::string& path, int error) {
  throw IoError(fmt::format("{}: cannot be written: {}", path, std::strerror(error)));
}

}  // namespace

int open_to_overwrite(const char* path, size_t nbytes) noexcept {
  constexpr int64_t kStatBlock = 512;
  const int fd = ::open(path, O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW);
  struct stat status {};
  if (fd >= 0 && ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
      static_cast<size_t>(status.st_blocks * kStatBlock) >= nbytes) {
    return fd;
  }
  if (fd >= 0) ::close(fd);
  return -1;
}

void write_file_atomically(const std::string& path, std::string_view text) {
  if (const int error = replace_file(path, text); error != 0) fail_to_write(path, error);
}

void write_short_file(const std::string& path, std::string_view text) {
  const int error = replace_file(path, text);
  if (error == 0) return;
  if (error == ENOSPC || error == EDQUOT) {
    const Descriptor fd(open_to_overwrite(path.c_str(), text.size()));
    if (fd.get() >= 0 && write_all(fd.get(), text) == 0 &&
        ::ftruncate(fd.get(), static_cast<off_t>(text.size())) == 0) {
      return;
    }
  }
  fail_to_write(path, error);
}

}  // namespace tessera
