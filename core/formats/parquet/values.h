#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/formats/parquet/hybrid.h"
#include "core/formats/parquet/metadata.h"

namespace tessera::parquet {

/// Bytes that are not filled with zeros first.
struct Buffer {
  explicit Buffer(size_t nbytes) : bytes(new uint8_t[nbytes]), capacity(nbytes) {}
  std::string_view text(size_t nbytes) const {
    return {reinterpret_cast<const char*>(bytes.get()), nbytes};
  }
  std::unique_ptr<uint8_t[]> bytes;
  size_t capacity;
};

/// The values of a dictionary page, by index. They lie in its bytes.
class Dictionary {
 public:
  /// InputError, without the name of a file, unless `page` is `count` byte arrays.
  Dictionary(std::shared_ptr<const Buffer> owner, std::string_view page, int64_t count);
  int64_t num_values() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  std::string_view operator[](uint32_t i) const {
    return page_.substr(offsets_[i] + 4, offsets_[i + 1] - offsets_[i] - 4);
  }
  const std::shared_ptr<const Buffer>& owner() const { return owner_; }

 private:
  std::shared_ptr<const Buffer> owner_;
  std::string_view page_;
  std::vector<uint32_t> offsets_;  // of each length, and the end
};

/// The byte arrays of a data page, one after the other, in any of the encodings that they come in:
/// PLAIN, PLAIN_DICTIONARY and RLE_DICTIONARY, DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY.
class ValueDecoder {
 public:
  ValueDecoder() = default;
  /// `values` lies in `owner`. InputError, without the name of a file, for another encoding or
  /// where there should be a dictionary.
  ValueDecoder(std::shared_ptr<const Buffer> owner, std::string_view values, Encoding encoding,
               std::shared_ptr<const Dictionary> dictionary);

  /// Appends `count` values. They live as long as `owner` does. InputError, as above, if they end.
  void read(std::vector<std::string_view>& out, int64_t count, std::shared_ptr<const void>& owner);
  /// The most that should be read at once, as far as memory goes.
  int64_t max_count() const;

 private:
  void read_plain(std::vector<std::string_view>& out, int64_t count);
  void read_indexed(std::vector<std::string_view>& out, int64_t count);
  void read_delta_length(std::vector<std::string_view>& out, int64_t count);
  std::shared_ptr<const void> read_delta(std::vector<std::string_view>& out, int64_t count);
  std::string_view take(int64_t nbytes);

  Encoding encoding_ = Encoding::kPlain;
  std::shared_ptr<const Buffer> owner_;
  std::shared_ptr<const Dictionary> dictionary_;
  std::string_view rest_;
  HybridDecoder indices_;
  DeltaDecoder lengths_, prefixes_;
  std::string previous_;  // of DELTA_BYTE_ARRAY
  size_t page_nbytes_ = 0;
};

}  // namespace tessera::parquet
