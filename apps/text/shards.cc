#include "apps/text/shards.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>

#include "core/check.h"
#include "core/files.h"
#include "core/formats/durable_file.h"

namespace tessera::text {

ShardWriter::ShardWriter(std::string directory, int bits, int64_t max_tokens, int64_t first_shard)
    : directory_(std::move(directory)), bits_(bits), max_tokens_(max_tokens), shard_(first_shard) {}

ShardWriter::~ShardWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink((path_ + ".tmp").c_str());
}

std::string ShardWriter::path_of(const std::string& directory, int64_t shard) {
  return fmt::format("{}/tokens_{:06}.bin", directory, shard);
}

void ShardWriter::fail(int error) const {
  throw IoError(describe_io_error(path_ + ".tmp", error, max_tokens_ * bits_ / 8));
}

void ShardWriter::open() {
  path_ = path_of(directory_, shard_);
  fd_ = open_new_file(path_ + ".tmp");
  if (fd_ < 0) fail(errno);
  const std::array<int32_t, 256> header = {};  // the count is known at the end
  write(header.data(), sizeof header);
}

void ShardWriter::write(const void* data, size_t nbytes) {
  const auto* p = static_cast<const char*>(data);
  while (nbytes > 0) {
    const ssize_t written = ::write(fd_, p, nbytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail(written == 0 ? ENOSPC : errno);
    p += written;
    nbytes -= static_cast<size_t>(written);
  }
}

int64_t ShardWriter::add(const int32_t* ids, int64_t count) {
  if (count == 0) return 0;
  if (fd_ < 0) open();
  const int64_t taken = std::min(count, max_tokens_ - count_);
  if (bits_ == 16) {
    narrow_.assign(ids, ids + taken);
    write(narrow_.data(), static_cast<size_t>(taken) * 2);
  } else {
    write(ids, static_cast<size_t>(taken) * 4);
  }
  count_ += taken;
  if (count_ == max_tokens_) complete();
  return taken;
}

void ShardWriter::complete() {
  std::array<int32_t, 256> header = {};
  header[0] = bits_ == 16 ? 20240520 : 20240801;
  header[1] = bits_ == 16 ? 1 : 7;
  header[2] = static_cast<int32_t>(count_);
  if (::pwrite(fd_, header.data(), sizeof header, 0) != static_cast<ssize_t>(sizeof header) ||
      ::fsync(fd_) != 0) {
    fail(errno);
  }
  ::close(fd_);
  fd_ = -1;
  if (std::rename((path_ + ".tmp").c_str(), path_.c_str()) != 0) fail(errno);
  sync_directory(directory_);
  ++shard_;
  count_ = 0;
}

void ShardWriter::finish() {
  if (fd_ >= 0) complete();
}

}  // namespace tessera::text
