#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/formats/parquet/metadata.h"
#include "core/formats/parquet/values.h"

// Reading Parquet files (github.com/apache/parquet-format): columns of byte arrays, in any nesting,
// page by page. No file is trusted: what it says of itself is checked before it is used, and memory
// is asked for what bytes can hold.

namespace tessera::parquet {

struct Limits {
  int64_t max_page_nbytes = INT32_MAX;  ///< unpacked
};

/// An open file and its footer. Readers of its columns share it, also on several threads.
class File {
 public:
  /// InputError that begins with `path`: not a regular file, not Parquet, encrypted, damaged.
  explicit File(const std::string& path, const Limits& limits = {});
  /// Takes the descriptor, of a file that messages name by `path`.
  File(int descriptor, std::string path, const Limits& limits = {});
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  const Limits& limits() const { return limits_; }
  const Metadata& metadata() const { return *metadata_; }
  int64_t nbytes() const { return nbytes_; }
  /// The bytes at `offset`. InputError if they are not there any more.
  void read(int64_t offset, void* out, size_t nbytes) const;

 private:
  void read_footer();

  int descriptor_;
  std::string path_;
  Limits limits_;
  int64_t nbytes_ = 0;
  std::unique_ptr<const Metadata> metadata_;
};

/// Some values of a column, beside each other.
struct Batch {
  int64_t num_entries = 0;               ///< values, nulls and empty lists
  std::vector<uint8_t> def, rep;         ///< levels of each; empty if the largest is 0
  std::vector<std::string_view> values;  ///< those that are not null, as long as `owner` is held
  std::shared_ptr<const void> owner;
};

/// The byte arrays of one column in one row group, in order. InputError names the file, the column
/// and the row at which the page begins. Not to be used after an error.
class ColumnReader {
 public:
  /// `leaf` of the metadata, a BYTE_ARRAY. The file outlives the reader.
  ColumnReader(const File& file, const Node& leaf, size_t row_group);
  /// Up to 1024 entries of one page; false at the end.
  bool next(Batch& batch);
  int64_t num_packed_nbytes_read() const { return position_ - chunk_.begin; }

 private:
  std::string_view peek(int64_t nbytes);
  void advance(int64_t nbytes);
  PageHeader read_header();
  void read_page();
  void read_data_page(const PageHeader& header, std::string_view packed);
  std::string_view unpack_page(const PageHeader& header, std::string_view packed, size_t kept);
  HybridDecoder read_levels(std::string_view& page, int64_t nbytes, Encoding encoding, int max);
  [[noreturn]] void fail(std::string_view what) const;

  const File& file_;
  const Node& leaf_;
  const ColumnChunk& chunk_;
  int64_t first_row_ = 0, num_rows_ = 0;  // of the row group; begun
  int64_t position_;                      // in the file
  std::unique_ptr<char[]> window_;        // bytes from position_ on are in it
  size_t window_capacity_ = 0, window_begin_ = 0, window_end_ = 0;
  std::shared_ptr<Buffer> buffer_;
  std::shared_ptr<const Dictionary> dictionary_;
  ValueDecoder values_;
  HybridDecoder def_, rep_;
  int64_t num_left_in_page_ = 0, num_left_ = 0;
};

}  // namespace tessera::parquet
