#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

// A file of named tensors behind a header: what safetensors and GGUF have in common.

namespace tessera {

/// Writes a file tensor by tensor in any order, so that no more than one needs to be in memory. It is
/// made under `path`.tmp and gets its name by `finish`; without that nothing is left. IoError with the
/// system's reason.
class TensorFileWriter {
 public:
  struct Entry {
    std::string name;
    int64_t offset = 0;  ///< in the file
    int64_t nbytes = 0;
  };
  /// `format` is what messages call the kind of file. Gaps between and behind the entries, up to
  /// `nbytes` of the file, are zeros.
  TensorFileWriter(std::string format, const std::string& path, std::string_view header,
                   std::vector<Entry> entries, int64_t nbytes);
  ~TensorFileWriter();
  TensorFileWriter(const TensorFileWriter&) = delete;
  TensorFileWriter& operator=(const TensorFileWriter&) = delete;

  /// Error for an unknown name.
  size_t index_of(std::string_view name) const;
  /// The whole of one entry. Error for an unknown name, another size, or one written before.
  void write(std::string_view name, const void* data, int64_t nbytes);
  /// Flushes to the disk and renames. Error if a tensor was not written.
  void finish();

 private:
  void write_bytes(int64_t offset, const void* data, int64_t nbytes);
  [[noreturn]] void fail(std::string_view what) const;

  std::string format_, path_;
  std::vector<Entry> entries_;
  std::vector<bool> is_written_;
  std::unordered_map<std::string_view, size_t> by_name_;
  int fd_ = -1;
};

}  // namespace tessera
