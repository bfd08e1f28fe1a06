#include <fstream>

#include "core/formats/parquet/codec.h"
#include "core/formats/parquet/file.h"
#include "core/formats/parquet/thrift.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::parquet;
using tessera::testing::error_of;

namespace {

const std::string kFolder = std::string(TESSERA_GOLDEN_DIR) + "/parquet/";

/// All values of a column, without nulls, after each other.
std::string all_of(const File& file, const std::string& path) {
  std::string text;
  for (const parquet::Node* leaf : file.metadata().leaves) {
    if (leaf->path != path) continue;
    for (size_t group = 0; group < file.metadata().row_groups.size(); ++group) {
      ColumnReader reader(file, *leaf, group);
      for (Batch batch; reader.next(batch);) {
        for (const std::string_view value : batch.values) text += value, text += '|';
      }
    }
  }
  return text;
}

std::string bits(std::initializer_list<int> bytes) {
  std::string text;
  for (const int byte : bytes) text += static_cast<char>(byte);
  return text;
}

std::vector<uint32_t> levels(std::string_view bytes, int width, int64_t count) {
  std::vector<uint32_t> values(static_cast<size_t>(count));
  HybridDecoder(bytes, width).read(values.data(), count);
  return values;
}

/// What reading every column of `bytes` says.
std::string failure(const std::string& bytes) {
  const testing::TempDir dir;
  const std::string path = dir.write("a.parquet", bytes);
  const std::string error = error_of([&] {
    const File file(path);
    for (const parquet::Node* leaf : file.metadata().leaves) all_of(file, leaf->path);
  });
  CHECK(error.find('\n') == std::string::npos);
  REQUIRE(error.starts_with(path + ": "));
  return error.substr(path.size() + 2);
}

std::string read_golden(const std::string& name) {
  return testing::read_file(kFolder + name);
}

std::string replace(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("parquet: the schema gives each leaf its path and levels", "[parquet]") {
  const File file(kFolder + "zstd_v1.parquet");
  std::vector<std::string> leaves;
  for (const parquet::Node* leaf : file.metadata().leaves) {
    leaves.push_back(fmt::format("{} {} {}", leaf->path, leaf->max_def, leaf->max_rep));
    CHECK(leaf->type == PhysicalType::kByteArray);
  }
  CHECK(leaves == std::vector<std::string>{
                      "plain 0 0", "dict 0 0", "delta_length 0 0", "delta 0 0", "plain_null 1 0",
                      "dict_null 1 0", "delta_length_null 1 0", "delta_null 1 0", "nothing 1 0",
                      "messages.list.element.role 3 1", "messages.list.element.content 4 1",
                      "tags.list.element 3 1", "nested.list.element.list.element 5 2",
                      "meta.source 2 0", "meta.title 1 0"});
  CHECK(file.metadata().num_rows == 37);
  CHECK(file.metadata().row_groups.size() == 3);
}

TEST_CASE("parquet: values of every encoding are the same in each codec and version", "[parquet]") {
  const File first(kFolder + "none_v1.parquet");
  for (const std::string codec : {"none", "snappy", "gzip", "zstd", "lz4"}) {
    for (const std::string version : {"1", "2"}) {
      const File file(kFolder + codec + "_v" + version + ".parquet");
      for (const parquet::Node* leaf : file.metadata().leaves) {
        INFO(codec << " " << version << " " << leaf->path);
        CHECK(all_of(file, leaf->path) == all_of(first, leaf->path));
      }
    }
  }
  CHECK(all_of(first, "plain").size() > 1000);
}

TEST_CASE("parquet: runs and packed groups are read bit by bit", "[parquet]") {
  // Encodings.md of apache/parquet-format: 0 to 7 in 3 bits each.
  CHECK(levels(bits({0x03, 0x88, 0xc6, 0xfa}), 3, 8) ==
        std::vector<uint32_t>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(levels(bits({0x08, 0x01, 0x00, 0x01, 0x03, 0xff}), 1, 6) ==
        std::vector<uint32_t>{1, 1, 1, 1, 1, 1});  // an empty run between
  CHECK(levels(bits({0x04, 0x34, 0x12}), 13, 2) == std::vector<uint32_t>{0x1234, 0x1234});
  CHECK(levels(bits({0x0a}), 0, 5) == std::vector<uint32_t>{0, 0, 0, 0, 0});
  CHECK(error_of([] {
          levels(bits({0x02, 0x01}), 1, 2);
        }) == "values end after 0 bytes, expected 1");
  CHECK(error_of([] {
          levels(bits({0x02, 0x02}), 1, 1);
        }) == "a run of 2, expected a value of 1 bits");
  CHECK(error_of([] {
          levels(bits({0x05, 0x02}), 8, 1);
        }) == "bit-packed values end after 1 bytes, expected 16");
  CHECK(error_of([] {
          levels(bits({0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01}), 8, 1);
        }).ends_with("groups of packed values, expected fewer"));
  CHECK(error_of([] { levels(std::string(10, '\xff'), 8, 1); }) ==
        "an integer of more than 10 bytes, expected at most 10");
}

TEST_CASE("parquet: differences in blocks add up", "[parquet]") {
  // Encodings.md: 7, 5, 3, 1, 2, 3, 4, 5 in blocks of 128, 4 parts: first 7, smallest difference -2.
  const std::string bytes =
      bits({0x80, 0x01, 0x04, 0x08, 0x0e, 0x03, 0x02, 0, 0, 0, 0xc0, 0x3f, 0, 0, 0, 0, 0, 0}) +
      "tail";
  DeltaDecoder decoder(bytes);
  CHECK(decoder.count() == 8);
  CHECK(DeltaDecoder(decoder).behind() == "tail");
  for (const int64_t expected : {7, 5, 3, 1, 2, 3, 4, 5}) CHECK(decoder.next() == expected);
  CHECK(error_of([&] { decoder.next(); }) == "8 differences, expected more");
  CHECK(
      error_of([] {
        DeltaDecoder(bits({0x80, 0x01, 0x03, 0x08, 0x0e}));
      }) ==
      "blocks of 128 differences in 3 parts, expected a multiple of 128 in parts of a multiple of "
      "32");
  CHECK(error_of([] {
          DeltaDecoder(bits({0x80, 0x01, 0x04, 0x08, 0x0e, 0x03, 65, 0, 0, 0})).behind();
        }) == "differences of 65 bits, expected at most 64");
  // 64 bits across nine bytes.
  const std::string wide = bits({0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0xff, 0x00});
  uint64_t expected = 0;
  for (int bit = 125; bit >= 63; --bit) {
    const auto byte =
        static_cast<unsigned char>(bit / 8 < 10 ? wide[static_cast<size_t>(bit / 8)] : 0);
    expected = 2 * expected + ((byte >> (bit % 8)) & 1u);
  }
  CHECK(packed_bits(wide + std::string(6, '\0'), 1, 63) == expected);
}

TEST_CASE("parquet: metadata that is nested without end is refused", "[parquet]") {
  const std::string deep(100, '\x1c');  // field 1: a structure
  ThriftReader reader(deep);
  CHECK(error_of([&] { reader.skip(ThriftType::kStruct); }) ==
        "metadata: more than 64 levels, expected fewer");
  const std::string many = bits({0xfc, 0xff, 0xff, 0xff, 0xff, 0x0f});
  ThriftReader list(many);
  CHECK(error_of([&] { list.skip(ThriftType::kList); }) ==
        "metadata: a list of 4294967295 elements, expected at most the 0 bytes that are left");
}

TEST_CASE("parquet: a page that is damaged is named with its column and row", "[parquet]") {
  // The values of the first column, uncompressed and without a checksum.
  const std::string none = read_golden("none_v1.parquet");
  const auto length_of = [&](const std::string& value) {
    const auto nbytes = static_cast<uint32_t>(value.size());
    return std::string(reinterpret_cast<const char*>(&nbytes), 4) + value;
  };
  const File file(kFolder + "none_v1.parquet");
  ColumnReader reader(file, *file.metadata().leaves[0], 0);
  Batch batch;
  REQUIRE(reader.next(batch));
  size_t i = 0;
  while (batch.values.at(i).size() < 5) ++i;
  std::string too_long = length_of(std::string(batch.values[i]));
  const std::string whole = too_long;
  too_long[2] = '\x7f';
  const std::string error = failure(replace(none, whole, too_long));
  CHECK(error.starts_with("column \"plain\", row 1: a value of "));
  CHECK(error.ends_with(" that are left"));
  // With a checksum, whatever the bytes are.
  const std::string v2 = read_golden("none_v2.parquet");
  CHECK(failure(replace(v2, whole, too_long))
            .starts_with("column \"plain\", row 1: a page with checksum "));
}

TEST_CASE("parquet: packed pages that are damaged are errors in every codec", "[parquet]") {
  for (const std::string codec : {"snappy", "gzip", "zstd", "lz4"}) {
    const std::string bytes = read_golden(codec + "_v1.parquet");
    int num_found = 0;
    for (size_t at = 40; at < 400; at += 7) {
      std::string damaged = bytes;
      damaged[at] = static_cast<char>(damaged[at] ^ 0x5a);
      const testing::TempDir dir;
      const std::string path = dir.write("a.parquet", damaged);
      try {
        const File file(path);
        all_of(file, "plain");
      } catch (const InputError& error) {
        ++num_found;
        CHECK(std::string_view(error.what()).starts_with(path + ": column \"plain\", row "));
      }
    }
    CHECK(num_found > 5);
  }
}

TEST_CASE("parquet: data of a codec that is not of its length is an error", "[parquet]") {
  uint8_t out[100];
  CHECK(error_of([&] { unpack(Codec::kNone, "abc", out, 4); }) ==
        "UNCOMPRESSED data: 3 bytes unpacked, expected 4 as its header says");
  CHECK(error_of([&] {
          unpack(Codec::kSnappy,
                 "\x03\x08"
                 "abc",
                 out, 4);
        }) == "SNAPPY data: 3 bytes unpacked, expected 4 as its header says");
  CHECK(error_of([&] {
          unpack(Codec::kSnappy,
                 "\x04\x08"
                 "abc",
                 out, 4);
        }) == "SNAPPY data: damaged, expected 4 bytes unpacked");
  CHECK(error_of([&] { unpack(Codec::kZstd, "no frame of it", out, 4); }) ==
        "ZSTD data: Unknown frame descriptor, expected a whole frame");
  CHECK(error_of([&] { unpack(Codec::kGzip, "abcd", out, 4); }) ==
        "GZIP data: incorrect header check, expected 4 bytes unpacked");
  CHECK(error_of([&] { unpack(Codec::kLz4Raw, "\xff", out, 4); }) ==
        "LZ4_RAW data: damaged, expected 4 bytes unpacked");
  CHECK(error_of([&] { unpack(Codec::kBrotli, "", out, 0); }) == "BROTLI, expected a known codec");
}

TEST_CASE("parquet: what is no whole file is refused by what it lacks", "[parquet]") {
  const std::string bytes = read_golden("defaults.parquet");
  CHECK(failure("PAR1") == "4 bytes, expected a Parquet file of at least 12");
  CHECK(failure("") == "0 bytes, expected a Parquet file of at least 12");
  CHECK(failure("text" + bytes.substr(4)) ==
        "does not begin with PAR1, expected a whole Parquet file");
  CHECK(failure(bytes.substr(0, bytes.size() / 2)) ==
        "does not end with PAR1, expected a whole Parquet file");
  CHECK(failure(bytes.substr(0, bytes.size() - 1) + "E") ==
        "an encrypted file, expected a plain one");
  CHECK(failure("PAR1" + bits({0xff, 0, 0, 0}) + "PAR1") ==
        "a footer of 255 bytes, expected at most 0");
  CHECK(failure("PAR1" + bits({0, 1, 0, 0, 0}) + "PAR1") ==
        "footer: a schema without elements, expected a root");
  CHECK(failure("PAR1" + bits({0x19, 1, 0, 0, 0}).substr(0, 1) + bits({1, 0, 0, 0}) + "PAR1")
            .starts_with("footer: metadata: "));
}

TEST_CASE("parquet: a column that is no byte array is named by its type", "[parquet]") {
  CHECK(failure(read_golden("defaults.parquet")) ==
        "column \"id\", row 1: INT64 values, expected BYTE_ARRAY");
  const File file(kFolder + "defaults.parquet");
  const File first(kFolder + "none_v1.parquet");
  CHECK(all_of(file, "text") == all_of(first, "plain"));
}
