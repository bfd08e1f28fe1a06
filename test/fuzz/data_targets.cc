#include <cstdlib>
#include <nlohmann/json.hpp>

#include "apps/data/json_line.h"
#include "apps/data/parquet_files.h"
#include "core/check.h"
#include "core/utf8.h"
#include "test/fuzz/targets.h"

namespace tessera::fuzz {
namespace {

/// What a page may ask for, so that an allocation is never much larger than the input.
constexpr parquet::Limits kLimits{.max_page_nbytes = 60 << 10};

void run_parquet(std::string_view bytes) {
  const parquet::File file(as_file(bytes), kLimits);
  std::vector<const parquet::Node*> columns;
  for (const parquet::Node& node : file.metadata().root.children) columns.push_back(&node);
  const size_t num_groups = std::min<size_t>(file.metadata().row_groups.size(), 4);
  std::string problem;
  for (const parquet::Node* leaf : file.metadata().leaves) {
    for (size_t group = 0; group < num_groups; ++group) {
      try {
        parquet::ColumnReader reader(file, *leaf, group);
        parquet::Batch batch;
        // A run of nulls is a few bytes, whatever its length.
        for (int i = 0; i < 1000 && reader.next(batch); ++i) {
          if (static_cast<int64_t>(batch.values.size()) > batch.num_entries) std::abort();
          for (const std::string_view value : batch.values) {
            touch(value.data(), static_cast<int64_t>(value.size()));
          }
        }
      } catch (const InputError& error) {
        problem = error.what();  // the other columns are read as well
      }
    }
  }
  for (size_t group = 0; group < num_groups; ++group) {
    apps::RowAssembler rows(file, columns, group);
    std::string json;
    for (int i = 0; i < 100 && rows.next(json); ++i) {
      if (nlohmann::json::parse(replace_invalid_utf8(json), nullptr, false).is_discarded()) {
        std::abort();
      }
    }
  }
  if (!problem.empty()) throw InputError(problem);
}

std::vector<std::string> seeds_parquet() {
  // A footer alone: a schema of one column, which is text and may be null, and no row.
  const std::string footer(
      "\x15\x02\x19\x2c\x48\x01r\x15\x02\x00\x15\x0c\x25\x02\x18\x04text\x00\x16\x00\x19\x0c\x00",
      26);
  std::string file = "PAR1" + footer;
  file += static_cast<char>(footer.size());
  return {file + std::string(3, '\0') + "PAR1"};
}

std::vector<std::string> words_parquet() {
  return {"PAR1",
          "\x15\x02",
          "\x15\x06",
          "\x15\x10",
          "\x19\x1c",
          "\x16\x02",
          "\x2c\x15",
          "\x15\x0c",
          "\xff\xff\xff\xff\x0f",
          "\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"};
}

/// One that an f64 may not hold, which the other parser refuses.
bool has_huge_number(std::string_view line) {
  int digits = 0;
  bool is_exponent = false;
  for (const char c : line) {
    const bool is_digit = c >= '0' && c <= '9';
    digits = is_digit ? digits + 1 : 0;
    is_exponent = c == 'e' || c == 'E' || (is_exponent && (is_digit || c == '+' || c == '-'));
    if (digits >= (is_exponent ? 3 : 300)) return true;
  }
  return false;
}

void run_json_line(std::string_view bytes) {
  const std::string line = replace_invalid_utf8(bytes);
  std::string copy = line;
  const apps::JsonString found = apps::json_string_field(copy.data(), copy.size(), "text", false);
  if (find_invalid_utf8(found.text) != found.text.size()) std::abort();
  // What was taken is JSON for others as well, with the same string.
  if (line.find("NaN") != std::string::npos || line.find("Infinity") != std::string::npos) return;
  const auto json = nlohmann::json::parse(line, nullptr, false);
  if (json.is_discarded() && has_huge_number(line)) return;
  if (json.is_discarded()) std::abort();
  if (found.is_null ? !json["text"].is_null() : json["text"].get<std::string>() != found.text) {
    std::abort();
  }
}

std::vector<std::string> seeds_json_line() {
  return {
      R"({"text": "one"})",
      R"({"id": 17, "meta": {"a": [1, -2.5e+3, true, null, "x"]}, "text": "two\n\u20ac\ud83d\ude00\"\\"})",
      R"({"te\u0078t":null,"b":[[],{}]})"};
}

std::vector<std::string> words_json_line() {
  return {R"("text")", R"(\ud83d)", R"(\ude00)", R"(\u0000)", R"(\n)", R"(\")",        R"(\\)",
          "null",      "true",      "NaN",       "Infinity",  "1e5",   R"({"text": ")"};
}

}  // namespace

std::vector<Target> data_targets() {
  return {{"parquet", run_parquet, seeds_parquet, words_parquet},
          {"json_line", run_json_line, seeds_json_line, words_json_line}};
}

}  // namespace tessera::fuzz
