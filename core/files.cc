#include "core/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

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
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int close() {
    const int result = ::close(fd_);
    fd_ = -1;
    return result;
  }

 private:
  int fd_;
};

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) throw InputError(fmt::format("{}: {}, expected a file", path, system_error()));
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    throw InputError(fmt::format("{}: not a regular file, expected a file", path));
  }
  nbytes_ = status.st_size;
  if (nbytes_ == 0) return;
  void* mapped = ::mmap(nullptr, static_cast<size_t>(nbytes_), PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (mapped == MAP_FAILED) {
    throw InputError(fmt::format("{}: cannot be mapped: {}", path, system_error()));
  }
  data_ = static_cast<const uint8_t*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(nbytes_));
}

void write_file_atomically(const std::string& path, std::string_view text) {
  const std::string temporary = path + ".tmp";
  Descriptor fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  bool good = fd.get() >= 0;
  while (good && !text.empty()) {
    const ssize_t written = ::write(fd.get(), text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    good = written >= 0;
    if (good) text.remove_prefix(static_cast<size_t>(written));
  }
  good = good && fd.close() == 0 && ::rename(temporary.c_str(), path.c_str()) == 0;
  if (!good) {
    const std::string reason = system_error();
    ::unlink(temporary.c_str());
    throw IoError(fmt::format("{}: cannot be written: {}", path, reason));
  }
}

}  // namespace tessera
