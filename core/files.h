#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/fault_guard.h"

namespace tessera {

/// A descriptor of the regular file, open for reading; the caller closes it. Never waits: what is
/// no regular file (a FIFO, a device, a socket, a directory) is refused by its kind. Every reader
/// of a file that a user names goes through this. InputError that begins with `path`.
int open_regular_file(const std::string& path);

/// The whole of a regular file, for small ones. InputError, also for more than `max_nbytes`.
std::string read_regular_file(const std::string& path, int64_t max_nbytes);

/// A whole file, memory-mapped for reading. InputError if it cannot be: missing, not a regular
/// file. Where the file is cut short meanwhile, or its disk fails, what is gone reads as zeros:
/// whoever has read says `check()` before the bytes count.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  const uint8_t* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }
  std::string_view text() const {
    return {reinterpret_cast<const char*>(data_), static_cast<size_t>(nbytes_)};
  }
  /// InputError with the path if bytes that were read since it was opened are not those of the
  /// file: it has become shorter, or could not be read. A microsecond.
  void check() const;

 private:
  std::string path_;
  const uint8_t* data_ = nullptr;
  int64_t nbytes_ = 0;
  uint64_t device_ = 0, inode_ = 0;
  std::unique_ptr<FaultGuard> guard_;
};

/// A new file, open for writing: what a killed process left under that name, or a link, is replaced
/// and not written into; a directory stays. Never a standard descriptor, also where those are
/// closed: what is logged would go into the file. -1 with errno.
int open_new_file(const std::string& path);

/// Replaces the file at once (a reader sees the old text or the new): writes `path`.tmp, by
/// open_new_file, and renames. IoError with the system's reason.
void write_file_atomically(const std::string& path, std::string_view text);

/// The same for a short text that has to be there: where the disk has no room for a second file
/// beside it, the text goes over that of the file, into the blocks that it has (a reader may see
/// some of both for a moment). IoError.
void write_short_file(const std::string& path, std::string_view text);
/// For that: the file's first `nbytes` open for writing, if it has blocks for as many; else -1. Half
/// a text, where the blocks end, would be worse than the one before. Async-signal-safe.
int open_to_overwrite(const char* path, size_t nbytes) noexcept;
/// All of the text, whatever interrupts; 0 or errno. Async-signal-safe.
int write_all(int fd, std::string_view text) noexcept;

}  // namespace tessera
