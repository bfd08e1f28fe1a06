#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::apps {

enum class Compression { kNone, kGzip, kZstd };

/// By the end of the name: .gz, .zst.
Compression compression_of_name(std::string_view path);
/// The name without it.
std::string_view name_without_compression(std::string_view path);

/// The bytes of a regular file, unpacked, from its beginning to its end. A gzip file may have any
/// number of members, a zstd file any number of frames. InputError with the path, and the byte of
/// the file on the disk about where it happened, for what is cut short, damaged (checksums are
/// compared) or in another format.
class ByteStream {
 public:
  static std::unique_ptr<ByteStream> open(const std::string& path, Compression compression);
  virtual ~ByteStream() = default;

  /// Up to `capacity` bytes, more than 0; 0 at the end.
  virtual size_t read(char* out, size_t capacity) = 0;
  /// Leaves bytes out. InputError if there are fewer.
  virtual void skip(int64_t nbytes);
  virtual int64_t nbytes_read() const = 0;  ///< of the file on the disk
  const std::string& path() const { return path_; }

 protected:
  explicit ByteStream(std::string path) : path_(std::move(path)) {}

 private:
  std::string path_;
};

/// A descriptor of a file without a name that has the unpacked bytes, to read anywhere in it; the
/// caller closes it. It lies where temporary files do. InputError as above, IoError if it cannot be
/// written.
int unpack_to_temporary(ByteStream& stream);

}  // namespace tessera::apps
