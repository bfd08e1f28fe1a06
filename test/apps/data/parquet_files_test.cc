#include <filesystem>
#include <nlohmann/json.hpp>

#include "apps/data/documents.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using nlohmann::json;
using tessera::testing::error_of;

namespace {

const std::string kFolder = std::string(TESSERA_GOLDEN_DIR) + "/parquet/";

std::vector<std::string> all_files() {
  std::vector<std::string> paths;
  for (const std::string codec : {"none", "snappy", "gzip", "zstd", "lz4"}) {
    for (const std::string version : {"1", "2"}) {
      paths.push_back(kFolder + codec + "_v" + version + ".parquet");
    }
  }
  return paths;
}

json golden_rows() {
  return json::parse(testing::read_file(kFolder + "rows.json"));
}

std::vector<std::string> read(const std::string& path, const DocumentOptions& options) {
  DocumentReader reader({path}, options);
  std::vector<std::string> texts;
  for (Document document; reader.next(document);) {
    CHECK(reader.where(document.position) ==
          fmt::format("{}: row {}", path, document.position.row + 1));
    texts.emplace_back(document.text);
  }
  CHECK(reader.nbytes_read() == reader.nbytes());
  return texts;
}

std::string failure(const std::string& path, const DocumentOptions& options) {
  const std::string error = error_of([&] { read(path, options); });
  REQUIRE(error.starts_with(path + ": "));
  return error.substr(path.size() + 2);
}

DocumentOptions column(const std::string& name, NullText null = NullText::kError) {
  DocumentOptions options;
  options.field = name;
  options.null = null;
  return options;
}

}  // namespace

TEST_CASE("parquet files: a column's texts are those that pyarrow wrote", "[parquet]") {
  const json rows = golden_rows();
  for (const std::string& path : all_files()) {
    for (const std::string name : {"plain", "dict", "delta_length", "delta"}) {
      for (const std::string end : {"", "_null"}) {
        INFO(path << " " << name << end);
        std::vector<std::string> expected;
        for (const json& row : rows) {
          if (!row[name + end].is_null()) expected.push_back(row[name + end]);
        }
        CHECK(read(path, column(name + end, NullText::kSkip)) == expected);
      }
    }
  }
}

TEST_CASE("parquet files: rows as JSON are those that pyarrow wrote, in any nesting", "[parquet]") {
  const json rows = golden_rows();
  DocumentOptions options;
  options.whole_rows = true;
  for (const std::string& path : all_files()) {
    INFO(path);
    json all = json::array();
    for (const std::string& row : read(path, options)) all.push_back(json::parse(row));
    CHECK(all == rows);
  }
  options.columns = {"messages", "tools"};
  const std::vector<std::string> some = read(kFolder + "zstd_v2.parquet", options);
  REQUIRE(some.size() == rows.size());
  for (size_t i = 0; i < some.size(); ++i) {
    CHECK(json::parse(some[i]) == json({{"messages", rows[i]["messages"]}}));
  }
}

TEST_CASE("parquet files: a restart at any row goes on with the same ones", "[parquet]") {
  const std::string path = kFolder + "snappy_v2.parquet";
  for (const bool whole_rows : {false, true}) {
    DocumentOptions options = column("plain_null", NullText::kSkip);
    options.whole_rows = whole_rows;
    const std::vector<std::string> all = read(path, options);
    DocumentReader reader({path}, options);
    Document document;
    for (size_t done = 0; done <= all.size(); ++done) {
      DocumentReader again({path}, options);
      again.seek(reader.position());
      std::vector<std::string> rest;
      for (Document next; again.next(next);) rest.emplace_back(next.text);
      CHECK(rest == std::vector(all.begin() + static_cast<int64_t>(done), all.end()));
      CHECK(reader.next(document) == (done < all.size()));
    }
  }
  DocumentReader reader({path}, column("plain"));
  reader.seek({.file = 0, .row = 99});
  Document document;
  CHECK(error_of([&] { reader.next(document); }) ==
        path + ": 37 rows, expected at least 99 as before");
}

TEST_CASE("parquet files: a packed file is read like a plain one", "[parquet]") {
  // Stored, not deflated: header, one block, checksum and length.
  const testing::TempDir dir;
  const std::string bytes = testing::read_file(kFolder + "defaults.parquet");
  std::string packed("\x1f\x8b\x08\0\0\0\0\0\0\x03\x01", 11);
  const auto add = [&](uint32_t value, int nbytes) {
    for (int i = 0; i < nbytes; ++i) packed += static_cast<char>(value >> (8 * i));
  };
  add(static_cast<uint32_t>(bytes.size()), 2), add(~static_cast<uint32_t>(bytes.size()), 2);
  packed += bytes;
  uint32_t crc = ~0u;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0xedb88320u : 0u);
  }
  add(~crc, 4), add(static_cast<uint32_t>(bytes.size()), 4);
  CHECK(read(dir.write("a.parquet.gz", packed), column("text")) ==
        read(kFolder + "defaults.parquet", column("text")));
}

TEST_CASE("parquet files: a column that is missing, no text or null is named", "[parquet]") {
  const std::string path = kFolder + "none_v1.parquet", other = kFolder + "defaults.parquet";
  CHECK(failure(other, column("txt")) ==
        "no column \"txt\", expected one with the text (of strings there is text)");
  CHECK(failure(other, column("id")) == "column \"id\" is INT64, expected strings (BYTE_ARRAY)");
  CHECK(failure(path, column("tags.list.element")) ==
        "column \"tags.list.element\" is in a list, expected strings (BYTE_ARRAY)");
  const json rows = golden_rows();
  size_t first = 0;
  while (!rows[first]["plain_null"].is_null()) ++first;
  CHECK(failure(path, column("plain_null")) ==
        fmt::format("row {}: column \"plain_null\" is null, expected a string", first + 1));
  CHECK(read(path, column("nothing", NullText::kSkip)).empty());
  DocumentOptions options;
  options.whole_rows = true;
  options.columns = {"messages"};
  CHECK(failure(other, options) == "no column of messages, expected at least one");
  options.columns = {"id"};
  CHECK(failure(other, options) == "column \"id\", row 1: INT64 values, expected BYTE_ARRAY");
}

TEST_CASE("parquet files: a value that is not UTF-8 is named by its row, or replaced",
          "[parquet]") {
  const testing::TempDir dir;
  std::string bytes = testing::read_file(kFolder + "none_v1.parquet");
  const size_t at = bytes.find("tessera");  // the first column is PLAIN
  REQUIRE(at != std::string::npos);
  bytes[at] = '\xff';
  const std::string path = dir.write("a.parquet", bytes);
  const std::string error = failure(path, column("plain"));
  CHECK(error.starts_with("row "));
  CHECK(error.ends_with(" of column \"plain\" (0xff) is in no character, expected UTF-8"));
  DocumentOptions options = column("plain");
  options.invalid = InvalidText::kReplace;
  size_t num_replaced = 0;
  for (const std::string& text : read(path, options)) {
    num_replaced += text.find(
                        "\xef\xbf\xbd"
                        "essera") != std::string::npos
                        ? 1
                        : 0;
  }
  CHECK(num_replaced == 1);
}
