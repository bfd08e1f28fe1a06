#include "core/formats/parquet/hybrid.h"

namespace tessera::parquet {
namespace {

std::string_view take(std::string_view& bytes, uint64_t nbytes, std::string_view what) {
  if (nbytes > bytes.size()) {
    throw InputError(fmt::format("{} end after {} bytes, expected {}", what, bytes.size(), nbytes));
  }
  const std::string_view taken = bytes.substr(0, nbytes);
  bytes.remove_prefix(nbytes);
  return taken;
}

}  // namespace

uint64_t read_varint(std::string_view& bytes) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const auto part =
        static_cast<uint64_t>(static_cast<unsigned char>(take(bytes, 1, "values")[0]));
    value |= (part & 0x7fu) << shift;
    if (part < 0x80) return value;
  }
  throw InputError("an integer of more than 10 bytes, expected at most 10");
}

void HybridDecoder::begin_run() {
  while (num_left_ == 0) {
    const uint64_t head = read_varint(bytes_);
    is_repeated_ = (head & 1u) == 0;
    if (is_repeated_) {
      num_left_ = head >> 1;
      const std::string_view value =
          take(bytes_, static_cast<uint64_t>((width_ + 7) / 8), "run-length values");
      value_ = 0;
      std::memcpy(&value_, value.data(), value.size());
      if (width_ < 32 && value_ >> width_ != 0) {
        throw InputError(fmt::format("a run of {}, expected a value of {} bits", value_, width_));
      }
    } else {
      const uint64_t groups = head >> 1;
      if (groups > (uint64_t{1} << 58)) {
        throw InputError(fmt::format("{} groups of packed values, expected fewer", groups));
      }
      packed_ = take(bytes_, groups * static_cast<uint64_t>(width_), "bit-packed values");
      num_left_ = groups * 8;
      index_ = 0;
    }
    // Empty runs are allowed, as long as there are bytes for them.
  }
}

DeltaDecoder::DeltaDecoder(std::string_view bytes) : bytes_(bytes) {
  const uint64_t block_size = read_varint(bytes_);
  num_miniblocks_ = read_varint(bytes_);
  count_ = read_varint(bytes_);
  const uint64_t first = read_varint(bytes_);
  value_ = static_cast<int64_t>(first >> 1) ^ -static_cast<int64_t>(first & 1u);
  constexpr uint64_t kMaxBlock = 1 << 20;
  const bool is_right = block_size > 0 && block_size <= kMaxBlock && block_size % 128 == 0 &&
                        num_miniblocks_ > 0 && block_size % num_miniblocks_ == 0 &&
                        (block_size / num_miniblocks_) % 32 == 0;
  if (!is_right) {
    throw InputError(
        fmt::format("blocks of {} differences in {} parts, expected a multiple of 128 "
                    "in parts of a multiple of 32",
                    block_size, num_miniblocks_));
  }
  miniblock_size_ = block_size / num_miniblocks_;
  miniblock_ = num_miniblocks_;  // none is begun
  index_ = miniblock_size_;
}

void DeltaDecoder::begin_block() {
  const uint64_t delta = read_varint(bytes_);
  min_delta_ = static_cast<int64_t>(delta >> 1) ^ -static_cast<int64_t>(delta & 1u);
  widths_ = take(bytes_, num_miniblocks_, "widths of differences");
  miniblock_ = 0;
}

void DeltaDecoder::begin_miniblock() {
  if (miniblock_ == num_miniblocks_) begin_block();
  width_ = static_cast<unsigned char>(widths_[miniblock_++]);
  if (width_ > 64)
    throw InputError(fmt::format("differences of {} bits, expected at most 64", width_));
  packed_ = take(bytes_, miniblock_size_ / 8 * static_cast<uint64_t>(width_), "differences");
  index_ = 0;
}

int64_t DeltaDecoder::next() {
  if (num_read_ == count_) throw InputError(fmt::format("{} differences, expected more", count_));
  if (num_read_++ == 0) return value_;
  if (index_ == miniblock_size_) begin_miniblock();
  const uint64_t delta = packed_bits(packed_, index_++, width_) + static_cast<uint64_t>(min_delta_);
  value_ = static_cast<int64_t>(static_cast<uint64_t>(value_) + delta);
  return value_;
}

std::string_view DeltaDecoder::behind() {
  while (num_read_ < count_) next();
  return bytes_;
}

}  // namespace tessera::parquet
