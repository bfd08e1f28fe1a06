#include "apps/data/byte_stream.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "core/check.h"
#include "core/files.h"

namespace tessera::apps {
namespace {

constexpr size_t kInputNbytes = 256 << 10;

class PlainStream : public ByteStream {
 public:
  explicit PlainStream(const std::string& path) : ByteStream(path), fd_(open_regular_file(path)) {}
  ~PlainStream() override { ::close(fd_); }

  size_t read(char* out, size_t capacity) override {
    while (true) {
      const ssize_t got = ::read(fd_, out, capacity);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) {
        throw InputError(fmt::format("{}: cannot be read: {}", path(), std::strerror(errno)));
      }
      nbytes_read_ += got;
      return static_cast<size_t>(got);
    }
  }
  void skip(int64_t nbytes) override {
    const off_t end = ::lseek(fd_, 0, SEEK_END);
    if (end < nbytes_read_ + nbytes) {
      throw InputError(fmt::format("{}: {} bytes, expected at least {} as before", path(), end,
                                   nbytes_read_ + nbytes));
    }
    nbytes_read_ += nbytes;
    ::lseek(fd_, nbytes_read_, SEEK_SET);
  }
  int64_t nbytes_read() const override { return nbytes_read_; }

 private:
  int fd_;
  int64_t nbytes_read_ = 0;
};

/// Packed bytes in a buffer, with what is not used yet.
class PackedStream : public ByteStream {
 public:
  explicit PackedStream(const std::string& path)
      : ByteStream(path), file_(path), buffer_(kInputNbytes) {}
  int64_t nbytes_read() const override {
    return file_.nbytes_read() - static_cast<int64_t>(unused_.size());
  }

 protected:
  /// Whether there are any.
  bool fill() {
    if (unused_.empty()) unused_ = {buffer_.data(), file_.read(buffer_.data(), buffer_.size())};
    return !unused_.empty();
  }
  [[noreturn]] void fail(std::string_view what, std::string_view expected) const {
    throw InputError(
        fmt::format("{}: byte {}: {}, expected {}", path(), nbytes_read(), what, expected));
  }
  std::string_view unused_;

 private:
  PlainStream file_;
  std::vector<char> buffer_;
};

class GzipStream : public PackedStream {
 public:
  explicit GzipStream(const std::string& path) : PackedStream(path) {
    constexpr int kGzipOnly = 16;
    TESSERA_CHECK(::inflateInit2(&state_, MAX_WBITS + kGzipOnly) == Z_OK, "gzip: out of memory");
  }
  ~GzipStream() override { ::inflateEnd(&state_); }

  size_t read(char* out, size_t capacity) override {
    state_.next_out = reinterpret_cast<Bytef*>(out);
    state_.avail_out = static_cast<uInt>(std::min<size_t>(capacity, UINT32_MAX));
    const uInt before = state_.avail_out;
    while (state_.avail_out == before) {
      if (!fill()) {
        if (is_inside_) fail("the file ends inside of a gzip member", "the rest of it");
        if (nbytes_read() == 0) fail("no byte", "a gzip member");
        break;
      }
      if (!is_inside_) ::inflateReset(&state_);
      is_inside_ = true;
      state_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(unused_.data()));
      state_.avail_in = static_cast<uInt>(unused_.size());
      const int status = ::inflate(&state_, Z_NO_FLUSH);
      unused_.remove_prefix(unused_.size() - state_.avail_in);
      if (status == Z_STREAM_END) is_inside_ = false;
      if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR) {
        fail(state_.msg != nullptr ? state_.msg : "damaged", "a whole gzip member");
      }
    }
    return before - state_.avail_out;
  }

 private:
  z_stream state_{};
  bool is_inside_ = false;  // of a member
};

class ZstdStream : public PackedStream {
 public:
  explicit ZstdStream(const std::string& path)
      : PackedStream(path), state_(::ZSTD_createDStream()) {
    TESSERA_CHECK(state_ != nullptr, "zstd: out of memory");
  }
  ~ZstdStream() override { ::ZSTD_freeDStream(state_); }

  size_t read(char* out, size_t capacity) override {
    ZSTD_outBuffer written{out, capacity, 0};
    while (written.pos == 0) {
      // A block may be decoded whose bytes did not fit: they come without any input.
      if (!fill() && !has_more_) {
        if (is_inside_) fail("the file ends inside of a zstd frame", "the rest of it");
        if (nbytes_read() == 0) fail("no byte", "a zstd frame");
        break;
      }
      ZSTD_inBuffer packed{unused_.data(), unused_.size(), 0};
      const size_t status = ::ZSTD_decompressStream(state_, &written, &packed);
      if (::ZSTD_isError(status)) fail(::ZSTD_getErrorName(status), "a whole zstd frame");
      unused_.remove_prefix(packed.pos);
      is_inside_ = status != 0;
      has_more_ = written.pos == capacity;
    }
    return written.pos;
  }

 private:
  ZSTD_DStream* state_;
  bool is_inside_ = false, has_more_ = false;
};

}  // namespace

Compression compression_of_name(std::string_view path) {
  if (path.ends_with(".gz")) return Compression::kGzip;
  return path.ends_with(".zst") ? Compression::kZstd : Compression::kNone;
}

std::string_view name_without_compression(std::string_view path) {
  return compression_of_name(path) == Compression::kNone ? path : path.substr(0, path.rfind('.'));
}

std::unique_ptr<ByteStream> ByteStream::open(const std::string& path, Compression compression) {
  switch (compression) {
    case Compression::kNone:
      return std::make_unique<PlainStream>(path);
    case Compression::kGzip:
      return std::make_unique<GzipStream>(path);
    case Compression::kZstd:
      return std::make_unique<ZstdStream>(path);
  }
  throw InternalError("byte stream: no such compression");
}

void ByteStream::skip(int64_t nbytes) {
  std::vector<char> buffer(kInputNbytes);
  for (int64_t left = nbytes; left > 0;) {
    const size_t got =
        read(buffer.data(), std::min<size_t>(buffer.size(), static_cast<size_t>(left)));
    if (got == 0) {
      throw InputError(fmt::format("{}: {} bytes, expected at least {} as before", path(),
                                   nbytes - left, nbytes));
    }
    left -= static_cast<int64_t>(got);
  }
}

int unpack_to_temporary(ByteStream& stream) {
  const std::string folder = std::filesystem::temp_directory_path();
  const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  const auto fail = [&] [[noreturn]] {
    const std::string reason = std::strerror(errno);
    if (fd >= 0) ::close(fd);
    throw IoError(fmt::format("{}: cannot be unpacked to {}: {}", stream.path(), folder, reason));
  };
  if (fd < 0) fail();
  std::vector<char> buffer(kInputNbytes);
  try {
    while (const size_t got = stream.read(buffer.data(), buffer.size())) {
      for (size_t done = 0; done < got;) {
        const ssize_t written = ::write(fd, buffer.data() + done, got - done);
        if (written < 0 && errno != EINTR) fail();
        if (written > 0) done += static_cast<size_t>(written);
      }
    }
  } catch (const InputError&) {
    ::close(fd);
    throw;
  }
  return fd;
}

}  // namespace tessera::apps
