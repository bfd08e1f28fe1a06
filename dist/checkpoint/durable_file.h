#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::dist {

/// A file that appears under its name complete and on the disk, or not at all: it is written under
/// `path`.tmp, and `commit` flushes it, renames it and flushes the directory. Without `commit`
/// nothing is left. Short writes and interrupted calls go on where they ended. IoError names the
/// path and the system's reason; where the disk is full, also the bytes needed and free.
class DurableFile {
 public:
  /// `nbytes` that will be written, for messages.
  DurableFile(std::string path, int64_t nbytes);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  /// Appends.
  void write(const void* data, int64_t nbytes);
  void commit();

 private:
  [[noreturn]] void fail(int error) const;

  std::string path_;
  int64_t nbytes_;
  int fd_ = -1;
};

/// The same for a text that is in memory.
void write_durably(const std::string& path, std::string_view text);

/// Makes a directory, and those above it, and flushes its entry; fine if it is there. IoError.
void make_directory_durably(const std::string& path);

/// Flushes the entries of a directory. IoError.
void sync_directory(const std::string& path);

/// "checkpoint: the system's reason", with bytes needed and free where the disk is full.
std::string describe_io_error(const std::string& path, int error, int64_t nbytes_needed);

}  // namespace tessera::dist
