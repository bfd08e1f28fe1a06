#include "core/formats/parquet/metadata.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.h"
#include "core/formats/parquet/thrift.h"
#include "core/text.h"

namespace tessera::parquet {
namespace {

constexpr int kMaxLevel = 255;  // of definition and repetition: they fit into a byte

struct SchemaElement {
  std::optional<PhysicalType> type;
  int32_t repetition = 0;
  std::string name;
  int32_t num_children = 0;
  bool is_list = false;
};

SchemaElement parse_schema_element(ThriftReader& reader, ThriftType type) {
  constexpr int32_t kConvertedList = 3;
  constexpr int64_t kLogicalList = 3;  // field of the union
  SchemaElement element;
  reader.structure(type, [&](int64_t id, ThriftType field) {
    switch (id) {
      case 1:
        element.type = static_cast<PhysicalType>(reader.integer32(field));
        return true;
      case 3:
        element.repetition = reader.integer32(field);
        return true;
      case 4:
        element.name = reader.binary(field);
        return true;
      case 5:
        element.num_children = reader.integer32(field);
        return true;
      case 6:
        element.is_list |= reader.integer32(field) == kConvertedList;
        return true;
      case 10:
        reader.structure(field, [&](int64_t kind, ThriftType) {
          element.is_list |= kind == kLogicalList;
          return false;
        });
        return true;
      default:
        return false;
    }
  });
  return element;
}

ColumnChunk parse_column(ThriftReader& reader, ThriftType type) {
  ColumnChunk column;
  int64_t packed_nbytes = 0, data_page = -1, dictionary_page = -1;
  bool is_elsewhere = false, has_metadata = false;
  reader.structure(type, [&](int64_t id, ThriftType field) {
    if (id == 1) is_elsewhere = !reader.binary(field).empty();
    if (id == 1) return true;
    if (id == 8) throw InputError("an encrypted column, expected none");
    if (id != 3) return false;
    has_metadata = true;
    reader.structure(field, [&](int64_t part, ThriftType value) {
      switch (part) {
        case 4:
          column.codec = static_cast<Codec>(reader.integer32(value));
          return true;
        case 5:
          column.num_values = reader.integer(value);
          return true;
        case 7:
          packed_nbytes = reader.integer(value);
          return true;
        case 9:
          data_page = reader.integer(value);
          return true;
        case 11:
          dictionary_page = reader.integer(value);
          return true;
        default:
          return false;
      }
    });
    return true;
  });
  if (is_elsewhere) throw InputError("a column in another file, expected it in this one");
  if (!has_metadata) throw InputError("a column without metadata, expected it");
  // Some writers say 0 where there is no dictionary.
  column.begin = dictionary_page > 0 ? std::min(dictionary_page, data_page) : data_page;
  if (__builtin_add_overflow(column.begin, packed_nbytes, &column.end)) column.end = -1;
  return column;
}

RowGroup parse_row_group(ThriftReader& reader, ThriftType type) {
  RowGroup group;
  reader.structure(type, [&](int64_t id, ThriftType field) {
    if (id == 1) {
      reader.list(
          field, [&](ThriftType column) { group.columns.push_back(parse_column(reader, column)); });
      return true;
    }
    if (id == 3) return group.num_rows = reader.integer(field), true;
    return false;
  });
  return group;
}

/// The tree of a list in which each group stands before its children.
class SchemaTree {
 public:
  SchemaTree(const std::deque<SchemaElement>& elements, Metadata& metadata)
      : elements_(elements), metadata_(metadata) {}

  void build() {
    if (elements_.empty()) throw InputError("a schema without elements, expected a root");
    fill(metadata_.root, 0);
    if (next_ != elements_.size()) {
      throw InputError(fmt::format("a schema of {} elements, expected {} as its groups say",
                                   elements_.size(), next_));
    }
  }

 private:
  void fill(Node& node, int depth) {
    if (next_ == elements_.size())
      throw InputError("a schema that ends early, expected its columns");
    if (depth > 100) throw InputError("a schema of more than 100 levels, expected fewer");
    const SchemaElement& element = elements_[next_++];
    const bool is_root = depth == 0;
    node.name = element.name;
    if (!is_root) {
      node.path += node.path.empty() ? "" : ".";
      node.path += shorten(element.name);
      if (element.repetition < 0 || element.repetition > 2) {
        throw InputError(fmt::format("column \"{}\" with repetition {}, expected 0, 1 or 2",
                                     shorten(node.path), element.repetition));
      }
      node.is_optional = element.repetition == 1;
      node.is_repeated = element.repetition == 2;
      node.max_def += node.is_optional || node.is_repeated ? 1 : 0;
      node.max_rep += node.is_repeated ? 1 : 0;
      if (node.max_def > kMaxLevel) throw InputError("more than 255 levels, expected fewer");
    }
    node.is_list = element.is_list;
    if (element.num_children == 0 && !is_root) {
      if (!element.type) {
        throw InputError(
            fmt::format("column \"{}\" without a type, expected one", shorten(node.path)));
      }
      node.type = *element.type;
      node.leaf = static_cast<int>(metadata_.leaves.size());
      metadata_.leaves.push_back(&node);
      return;
    }
    if (element.num_children < 0) {
      throw InputError(fmt::format("column \"{}\" with {} children, expected 0 or more",
                                   shorten(node.path), element.num_children));
    }
    for (int32_t i = 0; i < element.num_children; ++i) {
      Node& child = node.children.emplace_back();
      child.path = node.path;
      child.max_def = node.max_def, child.max_rep = node.max_rep;
      fill(child, depth + 1);
    }
  }

  const std::deque<SchemaElement>& elements_;
  Metadata& metadata_;
  size_t next_ = 0;
};

void check_row_group(const RowGroup& group, size_t index, size_t num_leaves, int64_t data_end) {
  const auto fail = [&](std::string_view what, int64_t found, const std::string& expected) {
    throw InputError(fmt::format("row group {}: {} {}, expected {}", index, what, found, expected));
  };
  if (group.num_rows < 0) fail("number of rows", group.num_rows, "0 or more");
  if (group.columns.size() != num_leaves) {
    fail("number of columns", static_cast<int64_t>(group.columns.size()),
         fmt::format("{} as in the schema", num_leaves));
  }
  for (const ColumnChunk& column : group.columns) {
    if (column.num_values < 0) fail("number of values", column.num_values, "0 or more");
    if (column.begin < 4 || column.end < column.begin || column.end > data_end) {
      fail("a column at byte", column.begin,
           fmt::format("it to lie in the {} bytes before the footer, with its length", data_end));
    }
  }
}

void parse_data_header(ThriftReader& reader, ThriftType type, PageHeader& header) {
  const bool is_dictionary = header.type == PageType::kDictionary;  // whose third field is a flag
  reader.structure(type, [&](int64_t id, ThriftType field) {
    if (is_dictionary && id > 2) return false;
    switch (id) {
      case 1:
        header.num_values = reader.integer32(field);
        return true;
      case 2:
        header.encoding = static_cast<Encoding>(reader.integer32(field));
        return true;
      case 3:
        header.def_encoding = static_cast<Encoding>(reader.integer32(field));
        return true;
      case 4:
        header.rep_encoding = static_cast<Encoding>(reader.integer32(field));
        return true;
      default:
        return false;
    }
  });
}

void parse_data_header_v2(ThriftReader& reader, ThriftType type, PageHeader& header) {
  reader.structure(type, [&](int64_t id, ThriftType field) {
    switch (id) {
      case 1:
        header.num_values = reader.integer32(field);
        return true;
      case 4:
        header.encoding = static_cast<Encoding>(reader.integer32(field));
        return true;
      case 5:
        header.def_nbytes = reader.integer32(field);
        return true;
      case 6:
        header.rep_nbytes = reader.integer32(field);
        return true;
      case 7:
        header.is_packed = reader.flag(field);
        return true;
      default:
        return false;
    }
  });
}

template <size_t N>
std::string name_in(const std::array<std::string_view, N>& names, int32_t value,
                    std::string_view what) {
  const bool is_known = value >= 0 && value < static_cast<int32_t>(N);
  if (is_known && !names[static_cast<size_t>(value)].empty()) {
    return std::string(names[static_cast<size_t>(value)]);
  }
  return fmt::format("{} {}", what, value);
}

}  // namespace

std::string name_of(Codec codec) {
  constexpr std::array<std::string_view, 8> kNames = {"UNCOMPRESSED", "SNAPPY", "GZIP", "LZO",
                                                      "BROTLI",       "LZ4",    "ZSTD", "LZ4_RAW"};
  return name_in(kNames, static_cast<int32_t>(codec), "codec");
}

std::string name_of(Encoding encoding) {
  constexpr std::array<std::string_view, 10> kNames = {"PLAIN",
                                                       "",
                                                       "PLAIN_DICTIONARY",
                                                       "RLE",
                                                       "BIT_PACKED",
                                                       "DELTA_BINARY_PACKED",
                                                       "DELTA_LENGTH_BYTE_ARRAY",
                                                       "DELTA_BYTE_ARRAY",
                                                       "RLE_DICTIONARY",
                                                       "BYTE_STREAM_SPLIT"};
  return name_in(kNames, static_cast<int32_t>(encoding), "encoding");
}

std::string name_of(PhysicalType type) {
  constexpr std::array<std::string_view, 8> kNames = {
      "BOOLEAN", "INT32",  "INT64",      "INT96",
      "FLOAT",   "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"};
  return name_in(kNames, static_cast<int32_t>(type), "type");
}

std::unique_ptr<const Metadata> parse_metadata(std::string_view footer, int64_t data_end) {
  auto metadata = std::make_unique<Metadata>();
  std::deque<SchemaElement> schema;
  ThriftReader reader(footer);
  reader.structure(ThriftType::kStruct, [&](int64_t id, ThriftType field) {
    switch (id) {
      case 2:
        reader.list(field, [&](ThriftType element) {
          schema.push_back(parse_schema_element(reader, element));
        });
        return true;
      case 3:
        metadata->num_rows = reader.integer(field);
        return true;
      case 4:
        reader.list(field, [&](ThriftType group) {
          metadata->row_groups.push_back(parse_row_group(reader, group));
        });
        return true;
      case 8:
        throw InputError("an encrypted file, expected a plain one");
      default:
        return false;
    }
  });
  SchemaTree(schema, *metadata).build();
  int64_t num_rows = 0;
  for (size_t i = 0; i < metadata->row_groups.size(); ++i) {
    const RowGroup& group = metadata->row_groups[i];
    check_row_group(group, i, metadata->leaves.size(), data_end);
    if (__builtin_add_overflow(num_rows, group.num_rows, &num_rows)) num_rows = -1;
    if (num_rows < 0) break;
  }
  if (num_rows != metadata->num_rows) {
    throw InputError(fmt::format("{} rows in its row groups, expected {} as its footer says",
                                 num_rows, metadata->num_rows));
  }
  return metadata;
}

PageHeader parse_page_header(std::string_view bytes) {
  PageHeader header;
  ThriftReader reader(bytes);
  bool has_data = false, has_dictionary = false, has_data_v2 = false;
  reader.structure(ThriftType::kStruct, [&](int64_t id, ThriftType field) {
    switch (id) {
      case 1:
        header.type = static_cast<PageType>(reader.integer32(field));
        return true;
      case 2:
        header.nbytes = reader.integer32(field);
        return true;
      case 3:
        header.packed_nbytes = reader.integer32(field);
        return true;
      case 4:
        header.crc = static_cast<uint32_t>(reader.integer(field));
        return true;
      case 5:
        parse_data_header(reader, field, header), has_data = true;
        return true;
      case 7:
        parse_data_header(reader, field, header), has_dictionary = true;
        return true;
      case 8:
        parse_data_header_v2(reader, field, header), has_data_v2 = true;
        return true;
      default:
        return false;
    }
  });
  const bool is_complete = (header.type == PageType::kData && has_data) ||
                           (header.type == PageType::kDictionary && has_dictionary) ||
                           (header.type == PageType::kDataV2 && has_data_v2) ||
                           header.type == PageType::kIndex;
  if (!is_complete) {
    throw InputError(fmt::format("a page of type {}, expected one of 0 to 3 with its header",
                                 static_cast<int32_t>(header.type)));
  }
  if (header.nbytes < 0 || header.packed_nbytes < 0 || header.num_values < 0) {
    throw InputError(
        fmt::format("a page of {} bytes ({} packed) and {} values, expected no less "
                    "than 0",
                    header.nbytes, header.packed_nbytes, header.num_values));
  }
  header.header_nbytes = static_cast<int32_t>(reader.position());
  return header;
}

}  // namespace tessera::parquet
