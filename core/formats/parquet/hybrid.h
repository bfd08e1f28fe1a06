#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/check.h"

// Integers of a few bits each, as Parquet packs them (Encodings.md of apache/parquet-format).

namespace tessera::parquet {

/// LEB128, at most 10 bytes; advances `bytes`. InputError, without the name of a file, if they end.
uint64_t read_varint(std::string_view& bytes);

/// The `index`-th integer of `width` bits (at most 64), lowest bits first, of bytes that have it.
inline uint64_t packed_bits(std::string_view bytes, uint64_t index, int width) {
  const uint64_t bit = index * static_cast<uint64_t>(width);
  const size_t first = bit / 8;
  const auto shift = static_cast<int>(bit % 8);
  uint64_t word = 0;
  std::memcpy(&word, bytes.data() + first, std::min<size_t>(8, bytes.size() - first));
  uint64_t value = word >> shift;
  if (shift + width > 64) {
    value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[first + 8])) << (64 - shift);
  }
  return width == 64 ? value : value & ((uint64_t{1} << width) - 1);
}

/// Runs of one value and bit-packed groups of 8 in turns: levels, and indices into a dictionary.
class HybridDecoder {
 public:
  HybridDecoder() = default;
  /// `width` in bits, at most 32.
  HybridDecoder(std::string_view bytes, int width) : bytes_(bytes), width_(width) {}

  /// InputError, without the name of a file, if the bytes end.
  uint32_t next() {
    if (num_left_ == 0) begin_run();
    --num_left_;
    if (is_repeated_) return value_;
    return static_cast<uint32_t>(packed_bits(packed_, index_++, width_));
  }
  /// The same `count` times.
  template <class T>
  void read(T* values, int64_t count) {
    while (count > 0) {
      if (num_left_ == 0) begin_run();
      const int64_t here =
          static_cast<int64_t>(std::min<uint64_t>(num_left_, static_cast<uint64_t>(count)));
      if (is_repeated_) {
        for (int64_t i = 0; i < here; ++i) values[i] = static_cast<T>(value_);
      } else {
        for (int64_t i = 0; i < here; ++i) {
          values[i] = static_cast<T>(packed_bits(packed_, index_++, width_));
        }
      }
      num_left_ -= static_cast<uint64_t>(here);
      values += here, count -= here;
    }
  }

 private:
  void begin_run();

  std::string_view bytes_, packed_;
  int width_ = 0;
  bool is_repeated_ = false;
  uint32_t value_ = 0;
  uint64_t num_left_ = 0, index_ = 0;  // of the run
};

/// DELTA_BINARY_PACKED: each value as a difference to the one before, in blocks.
class DeltaDecoder {
 public:
  DeltaDecoder() = default;
  /// At the beginning of `bytes`. InputError, without the name of a file, for what is not that.
  explicit DeltaDecoder(std::string_view bytes);
  uint64_t count() const { return count_; }
  /// The next; InputError after the last or if the bytes end.
  int64_t next();
  /// What lies behind the last value. Reads on.
  std::string_view behind();

 private:
  void begin_block();
  void begin_miniblock();

  std::string_view bytes_;
  uint64_t count_ = 0, num_read_ = 0;
  uint64_t num_miniblocks_ = 0, miniblock_size_ = 0;
  std::string_view widths_, packed_;
  uint64_t miniblock_ = 0, index_ = 0;
  int width_ = 0;
  int64_t value_ = 0, min_delta_ = 0;
};

}  // namespace tessera::parquet
