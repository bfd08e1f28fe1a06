// tessera-bench-parquet: a column of text out of Parquet files, beside what the library of their
// codec alone takes for the same pages (without one: a copy of them). CPU seconds of one thread, in
// turns, from memory once the files have been read; the sizes of values are summed on both sides.

#include <fmt/format.h>
#include <time.h>

#include <nlohmann/json.hpp>

#include "apps/bench/bench.h"
#include "apps/command_line.h"
#include "apps/program.h"
#include "core/check.h"
#include "core/formats/parquet/codec.h"
#include "core/formats/parquet/file.h"

namespace tessera::apps {
namespace {

using parquet::Codec;
using parquet::PageType;

/// A page as it is in the file.
struct Page {
  std::vector<char> packed;
  size_t kept = 0;  // levels in front that are not packed
  size_t nbytes = 0;
  bool is_packed = true;
};

struct Column {
  Codec codec = Codec::kNone;
  std::vector<Page> pages;
  int64_t nbytes = 0, packed_nbytes = 0;
  size_t largest = 0;
};

const parquet::Node& find_leaf(const parquet::File& file, const std::string& name) {
  for (const parquet::Node* leaf : file.metadata().leaves) {
    if (leaf->path == name) return *leaf;
  }
  throw InputError(fmt::format("{}: no column \"{}\", expected it", file.path(), name));
}

Column read_pages(const parquet::File& file, const parquet::Node& leaf) {
  Column column;
  for (const parquet::RowGroup& group : file.metadata().row_groups) {
    const parquet::ColumnChunk& chunk = group.columns[static_cast<size_t>(leaf.leaf)];
    column.codec = chunk.codec;
    std::vector<char> bytes(static_cast<size_t>(chunk.end - chunk.begin));
    file.read(chunk.begin, bytes.data(), bytes.size());
    std::string_view rest(bytes.data(), bytes.size());
    int64_t num_left = chunk.num_values;
    while (num_left > 0) {
      const parquet::PageHeader header = parquet::parse_page_header(rest);
      rest.remove_prefix(static_cast<size_t>(header.header_nbytes));
      const std::string_view packed = rest.substr(0, static_cast<size_t>(header.packed_nbytes));
      rest.remove_prefix(packed.size());
      const bool is_data = header.type == PageType::kData || header.type == PageType::kDataV2;
      if (is_data) num_left -= header.num_values;
      const bool is_v2 = header.type == PageType::kDataV2;
      column.pages.push_back({.packed = {packed.begin(), packed.end()},
                              .kept = is_v2 ? static_cast<size_t>(header.def_nbytes) +
                                                  static_cast<size_t>(header.rep_nbytes)
                                            : 0,
                              .nbytes = static_cast<size_t>(header.nbytes),
                              .is_packed = header.is_packed});
      column.nbytes += header.nbytes, column.packed_nbytes += header.packed_nbytes;
      column.largest = std::max(column.largest, static_cast<size_t>(header.nbytes));
    }
  }
  return column;
}

double cpu_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

/// Unpacks all pages; a sum that the compiler cannot leave out.
int64_t unpack_pages(const Column& column, parquet::Buffer& buffer) {
  int64_t sum = 0;
  for (const Page& page : column.pages) {
    const std::string_view packed(page.packed.data(), page.packed.size());
    parquet::unpack(page.is_packed ? column.codec : Codec::kNone, packed.substr(page.kept),
                    buffer.bytes.get(), page.nbytes - page.kept);
    sum += buffer.bytes[page.nbytes / 2];
  }
  return sum;
}

int64_t read_values(const parquet::File& file, const parquet::Node& leaf) {
  int64_t nbytes = 0;
  for (size_t group = 0; group < file.metadata().row_groups.size(); ++group) {
    parquet::ColumnReader reader(file, leaf, group);
    for (parquet::Batch batch; reader.next(batch);) {
      for (const std::string_view value : batch.values)
        nbytes += static_cast<int64_t>(value.size());
    }
  }
  return nbytes;
}

void measure(const std::string& path, const std::string& name, int runs, bool as_json) {
  const parquet::File file(path);
  const parquet::Node& leaf = find_leaf(file, name);
  const Column column = read_pages(file, leaf);
  parquet::Buffer buffer(column.largest + 1);
  std::vector<double> codec_ms, reader_ms;
  int64_t sum = 0, value_nbytes = 0;
  for (int run = -1; run < runs; ++run) {  // the first is not counted
    const double begin = cpu_ms();
    sum += unpack_pages(column, buffer);
    const double middle = cpu_ms();
    value_nbytes = read_values(file, leaf);
    const double end = cpu_ms();
    if (run < 0) continue;
    codec_ms.push_back(middle - begin), reader_ms.push_back(end - middle);
  }
  const double codec = summarize(codec_ms).median_ms, reader = summarize(reader_ms).median_ms;
  const auto rate = [&](double ms) { return static_cast<double>(column.nbytes) / ms * 1e-6; };
  if (as_json) {
    fmt::print("{}\n", nlohmann::json{{"bench", "parquet"},
                                      {"file", path},
                                      {"column", name},
                                      {"codec", parquet::name_of(column.codec)},
                                      {"pages", column.pages.size()},
                                      {"nbytes", column.nbytes},
                                      {"packed_nbytes", column.packed_nbytes},
                                      {"value_nbytes", value_nbytes},
                                      {"codec_gb_per_s", rate(codec)},
                                      {"reader_gb_per_s", rate(reader)},
                                      {"ratio", codec / reader},
                                      {"check", sum}}
                           .dump());
    return;
  }
  fmt::print(
      "{}: {} pages, {:.1f} MB from {:.1f} MB of {}: codec alone {:.2f} GB/s, all {:.2f} GB/s, "
      "{:.2f} of it\n",
      path, column.pages.size(), static_cast<double>(column.nbytes) * 1e-6,
      static_cast<double>(column.packed_nbytes) * 1e-6, parquet::name_of(column.codec), rate(codec),
      rate(reader), codec / reader);
}

int run(int argc, char** argv) {
  CommandLine app("A column of text out of Parquet files, beside its codec's library alone.",
                  "tessera-bench-parquet");
  std::vector<std::string> files;
  std::string column = "text";
  int runs = 5;
  bool as_json = false;
  app.add_option("files", files, "Parquet files")->required();
  app.add_option("--column", column,
                 "path of the column, such as text or messages.list.element.role");
  app.add_option("--runs", runs, "of which the median is printed")
      ->check(in_range(1, std::optional(1000)));
  app.add_flag("--json", as_json, "a JSON object for each file instead of text");
  if (const auto status = app.read(argc, argv)) return *status;
  for (const std::string& file : files) measure(file, column, runs, as_json);
  return 0;
}

}  // namespace
}  // namespace tessera::apps

int main(int argc, char** argv) {
  return tessera::apps::run_program([&] { return tessera::apps::run(argc, argv); });
}
