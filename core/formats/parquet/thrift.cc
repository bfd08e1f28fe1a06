#include "core/formats/parquet/thrift.h"

#include <limits>

namespace tessera::parquet {

void ThriftReader::expect(ThriftType type, ThriftType expected) {
  if (type == expected) return;
  throw InputError(fmt::format("metadata: a value of Thrift type {}, expected {}",
                               static_cast<int>(type), static_cast<int>(expected)));
}

uint8_t ThriftReader::byte() {
  return static_cast<uint8_t>(take(1)[0]);
}

std::string_view ThriftReader::take(uint64_t nbytes) {
  if (nbytes > bytes_.size() - position_) {
    throw ThriftEnd(fmt::format("metadata: ends after {} bytes, expected {} more", bytes_.size(),
                                nbytes - (bytes_.size() - position_)));
  }
  const std::string_view taken = bytes_.substr(position_, nbytes);
  position_ += nbytes;
  return taken;
}

uint64_t ThriftReader::varint() {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const uint64_t part = byte();
    value |= (part & 0x7fu) << shift;
    if (part < 0x80) return value;
  }
  throw InputError("metadata: an integer of more than 10 bytes, expected at most 10");
}

int64_t ThriftReader::zigzag() {
  const uint64_t value = varint();
  return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1u);
}

int64_t ThriftReader::integer(ThriftType type) {
  if (type == ThriftType::kI8) return static_cast<int8_t>(byte());
  if (type == ThriftType::kI16 || type == ThriftType::kI32) return zigzag();
  expect(type, ThriftType::kI64);
  return zigzag();
}

int32_t ThriftReader::integer32(ThriftType type) {
  const int64_t value = integer(type);
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    throw InputError(fmt::format("metadata: {}, expected an integer of 32 bits", value));
  }
  return static_cast<int32_t>(value);
}

bool ThriftReader::flag(ThriftType type) {
  if (type != ThriftType::kFalse) expect(type, ThriftType::kTrue);
  return type == ThriftType::kTrue;
}

std::string_view ThriftReader::binary(ThriftType type) {
  expect(type, ThriftType::kBinary);
  return take(varint());
}

std::pair<ThriftType, uint64_t> ThriftReader::list_head() {
  const uint8_t head = byte();
  const uint64_t count = (head >> 4) == 15 ? varint() : static_cast<uint64_t>(head >> 4);
  // Each element has a byte at least, so that a number cannot be made up.
  if (count > bytes_.size() - position_) {
    throw ThriftEnd(
        fmt::format("metadata: a list of {} elements, expected at most the {} bytes "
                    "that are left",
                    count, bytes_.size() - position_));
  }
  return {static_cast<ThriftType>(head & 0x0fu), count};
}

void ThriftReader::skip_element(ThriftType type) {
  if (type == ThriftType::kTrue || type == ThriftType::kFalse) {
    byte();  // in a list they are bytes
  } else {
    skip(type);
  }
}

void ThriftReader::skip(ThriftType type) {
  const Level level(*this);
  switch (type) {
    case ThriftType::kTrue:
    case ThriftType::kFalse:
      return;
    case ThriftType::kI8:
      byte();
      return;
    case ThriftType::kI16:
    case ThriftType::kI32:
    case ThriftType::kI64:
      varint();
      return;
    case ThriftType::kDouble:
      take(8);
      return;
    case ThriftType::kBinary:
      take(varint());
      return;
    case ThriftType::kUuid:
      take(16);
      return;
    case ThriftType::kList:
    case ThriftType::kSet: {
      const auto [element, count] = list_head();
      for (uint64_t i = 0; i < count; ++i) skip_element(element);
      return;
    }
    case ThriftType::kMap: {
      const uint64_t count = varint();
      if (count == 0) return;
      const uint8_t types = byte();
      for (uint64_t i = 0; i < count; ++i) {
        skip_element(static_cast<ThriftType>(types >> 4));
        skip_element(static_cast<ThriftType>(types & 0x0fu));
      }
      return;
    }
    case ThriftType::kStruct:
      structure(type, [](int64_t, ThriftType) { return false; });
      return;
    default:
      throw InputError(
          fmt::format("metadata: Thrift type {}, expected one of 1 to 13", static_cast<int>(type)));
  }
}

}  // namespace tessera::parquet
