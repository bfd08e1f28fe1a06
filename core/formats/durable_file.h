#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

/// A file that appears under its name complete and on the disk, or not at all: it is written under
/// `path`.tmp, and `commit` flushes it, renames it and flushes the directory. Without `commit`
/// nothing is left. Short writes and interrupted calls go on where they ended. Large blocks go past
/// the page cache where the file system can: no processor copies them, and no file that somebody
/// reads is thrown out for them. Elsewhere the disk begins with each block at once, so that
/// `commit` finds little left to flush. IoError names the path and the system's reason; where the
/// disk is full, also the bytes needed and free.
class DurableFile {
 public:
  /// A block can go past the page cache if its address, and its place in the file, are multiples.
  static constexpr int64_t kDirectNbytes = 4096;

  /// `nbytes` that will be written, for messages.
  DurableFile(std::string path, int64_t nbytes);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  /// Appends.
  void write(const void* data, int64_t nbytes);
  void commit();

 private:
  int64_t choose_way(const void* data, int64_t nbytes);
  [[noreturn]] void fail(int error) const;

  std::string path_;
  int64_t nbytes_;
  int64_t offset_ = 0;  // what is written so far
  int fd_ = -1;
  bool is_direct_ = false, can_be_direct_ = true;
};

/// The same for a text that is in memory.
void write_durably(const std::string& path, std::string_view text);

/// Makes a directory, and those above it, and flushes its entry; fine if it is there. IoError.
void make_directory_durably(const std::string& path);

/// Gives the complete directory `from` the name `to`; what had that name is called `from` after it.
/// At once where the file system can exchange names. The entries are flushed. IoError.
void replace_directory(const std::string& from, const std::string& to);

/// Flushes the entries of a directory. IoError.
void sync_directory(const std::string& path);

/// "checkpoint: the system's reason", with bytes needed and free where the disk is full.
std::string describe_io_error(const std::string& path, int error, int64_t nbytes_needed);

}  // namespace tessera
