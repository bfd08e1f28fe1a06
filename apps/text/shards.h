#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::text {

/// Token files in the .bin format of llm.c, one behind the other: DIR/tokens_000000.bin, ... of at
/// most `max_tokens` each (256 int32 of header {20240520, 1, number of tokens} and uint16 tokens, or
/// {20240801, 7, ...} and uint32 tokens). A file has its name when it is complete and on the disk;
/// until then it is `name`.tmp.
class ShardWriter {
 public:
  /// Goes on behind `first_shard` complete files.
  ShardWriter(std::string directory, int bits, int64_t max_tokens, int64_t first_shard);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  /// Appends up to as many tokens as the file has room for, and completes a full one; how many.
  /// Errors   IoError with the path and the system's reason
  int64_t add(const int32_t* ids, int64_t count);
  /// Completes the last file, if it has a token.
  void finish();
  int64_t num_complete() const { return shard_; }
  int64_t num_in_shard() const { return count_; }

  static std::string path_of(const std::string& directory, int64_t shard);

 private:
  void open();
  void write(const void* data, size_t nbytes);
  void complete();
  [[noreturn]] void fail(int error) const;

  std::string directory_, path_;
  int bits_;
  int64_t max_tokens_, shard_, count_ = 0;
  int fd_ = -1;
  std::vector<uint16_t> narrow_;
};

}  // namespace tessera::text
