#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// What a Parquet file says of itself (parquet.thrift of apache/parquet-format), as far as columns of
// text need it.

namespace tessera::parquet {

enum class PhysicalType : int32_t {
  kBoolean = 0,
  kInt32 = 1,
  kInt64 = 2,
  kInt96 = 3,
  kFloat = 4,
  kDouble = 5,
  kByteArray = 6,
  kFixedLenByteArray = 7,
};

enum class Codec : int32_t {
  kNone = 0,
  kSnappy = 1,
  kGzip = 2,
  kLzo = 3,
  kBrotli = 4,
  kLz4 = 5,
  kZstd = 6,
  kLz4Raw = 7,
};

enum class Encoding : int32_t {
  kPlain = 0,
  kPlainDictionary = 2,
  kRle = 3,
  kBitPacked = 4,
  kDeltaBinaryPacked = 5,
  kDeltaLengthByteArray = 6,
  kDeltaByteArray = 7,
  kRleDictionary = 8,
  kByteStreamSplit = 9,
};

/// Names of the format: "SNAPPY", "RLE_DICTIONARY", "BYTE_ARRAY"; "codec 99" for others.
std::string name_of(Codec codec);
std::string name_of(Encoding encoding);
std::string name_of(PhysicalType type);

/// A node of the schema: a leaf, which has a column, or a group.
struct Node {
  std::string name;
  std::string path;  ///< "messages.list.element.role"
  bool is_optional = false, is_repeated = false, is_list = false;
  int max_def = 0, max_rep = 0;                  ///< levels of a value here
  int leaf = -1;                                 ///< index of its column, of a leaf
  PhysicalType type = PhysicalType::kByteArray;  ///< of a leaf
  std::deque<Node> children;

  bool is_leaf() const { return leaf >= 0; }
};

/// The bytes of a column in a row group.
struct ColumnChunk {
  Codec codec = Codec::kNone;
  int64_t num_values = 0;  ///< nulls and empty lists count
  int64_t begin = 0, end = 0;
};

struct RowGroup {
  int64_t num_rows = 0;
  std::deque<ColumnChunk> columns;  ///< of each leaf
};

struct Metadata {
  Node root;  ///< its children are the columns that people know
  std::vector<const Node*> leaves;
  std::deque<RowGroup> row_groups;
  int64_t num_rows = 0;
};

/// From the bytes of a footer. `data_end`: where it begins in the file, which the bytes of columns
/// lie before. InputError, without the name of the file, for what cannot be.
std::unique_ptr<const Metadata> parse_metadata(std::string_view footer, int64_t data_end);

enum class PageType : int32_t { kData = 0, kIndex = 1, kDictionary = 2, kDataV2 = 3 };

struct PageHeader {
  PageType type = PageType::kData;
  int32_t nbytes = 0, packed_nbytes = 0;  ///< of the page without its header
  std::optional<uint32_t> crc;            ///< of the packed bytes
  int32_t num_values = 0;                 ///< nulls count
  Encoding encoding = Encoding::kPlain;
  Encoding def_encoding = Encoding::kRle, rep_encoding = Encoding::kRle;  ///< version 1
  int32_t def_nbytes = 0, rep_nbytes = 0;                                 ///< version 2
  bool is_packed = true;                                                  ///< version 2
  int32_t header_nbytes = 0;
};

/// From the bytes at its beginning; ThriftEnd if there are too few.
PageHeader parse_page_header(std::string_view bytes);

}  // namespace tessera::parquet
