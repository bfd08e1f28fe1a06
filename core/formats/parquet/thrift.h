#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "core/check.h"

// Thrift's compact protocol (thrift-compact-protocol.md of Apache Thrift), as far as Parquet's
// metadata has it. Everything is read from bytes in memory; nothing is allocated.

namespace tessera::parquet {

/// The bytes end too early: with more of them it may be well.
class ThriftEnd : public InputError {
 public:
  using InputError::InputError;
};

enum class ThriftType : uint8_t {
  kStop = 0,
  kTrue = 1,
  kFalse = 2,
  kI8 = 3,
  kI16 = 4,
  kI32 = 5,
  kI64 = 6,
  kDouble = 7,
  kBinary = 8,
  kList = 9,
  kSet = 10,
  kMap = 11,
  kStruct = 12,
  kUuid = 13,
};

/// A cursor. Every function throws InputError, without the name of a file, for what is not
/// well-formed, and ThriftEnd where the bytes end.
class ThriftReader {
 public:
  explicit ThriftReader(std::string_view bytes) : bytes_(bytes) {}
  size_t position() const { return position_; }

  /// The fields of a structure: `on_field(id, type)` reads the value and returns true, or reads
  /// nothing and returns false, which leaves it out.
  template <class F>
  void structure(ThriftType type, F&& on_field) {
    expect(type, ThriftType::kStruct);
    const Level level(*this);
    int64_t id = 0;
    while (true) {
      const uint8_t head = byte();
      const auto field = static_cast<ThriftType>(head & 0x0fu);
      if (field == ThriftType::kStop) return;
      id = (head >> 4) != 0 ? id + (head >> 4) : zigzag();
      if (!on_field(id, field)) skip(field);
    }
  }
  /// `on_element(type)` reads each.
  template <class F>
  void list(ThriftType type, F&& on_element) {
    expect(type, ThriftType::kList);
    const auto [element, count] = list_head();
    for (uint64_t i = 0; i < count; ++i) on_element(element);
  }
  int64_t integer(ThriftType type);  ///< of any width
  int32_t integer32(ThriftType type);
  bool flag(ThriftType type);
  std::string_view binary(ThriftType type);  ///< in the bytes
  void skip(ThriftType type);

 private:
  class Level {
   public:
    explicit Level(ThriftReader& reader) : reader_(reader) {
      constexpr int kMaxDepth = 64;
      if (++reader_.depth_ > kMaxDepth)
        throw InputError("metadata: more than 64 levels, expected fewer");
    }
    ~Level() { --reader_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    ThriftReader& reader_;
  };

  static void expect(ThriftType type, ThriftType expected);
  uint8_t byte();
  uint64_t varint();
  int64_t zigzag();
  std::string_view take(uint64_t nbytes);
  std::pair<ThriftType, uint64_t> list_head();
  void skip_element(ThriftType type);

  std::string_view bytes_;
  size_t position_ = 0;
  int depth_ = 0;
};

}  // namespace tessera::parquet
