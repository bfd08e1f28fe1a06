#include "apps/data/parquet_files.h"

#include <algorithm>

#include "core/check.h"
#include "core/files.h"
#include "core/text.h"
#include "core/utf8.h"

namespace tessera::apps {
namespace {

using parquet::Node;
using parquet::PhysicalType;

bool is_text(const Node& node) {
  if (node.is_leaf()) return node.type == PhysicalType::kByteArray;
  return std::all_of(node.children.begin(), node.children.end(), is_text);
}

/// What all Parquet readers share: row groups, and where they are.
class ParquetReader : public FileReader {
 public:
  ParquetReader(std::unique_ptr<const parquet::File> file, const DocumentOptions& options)
      : file_(std::move(file)), options_(options) {
    if (file_->metadata().num_rows == 0) {
      throw InputError(fmt::format("{}: 0 rows, expected at least one", file_->path()));
    }
  }

  void seek(const DocumentPosition& position) override {
    if (position.byte != 0 || position.row < 0 || position.row > file_->metadata().num_rows) {
      throw InputError(fmt::format("{}: {} rows, expected at least {} as before", file_->path(),
                                   file_->metadata().num_rows, position.row));
    }
    const auto& groups = file_->metadata().row_groups;
    int64_t row = 0;
    for (group_ = 0; group_ < groups.size() && row + groups[group_].num_rows <= position.row;) {
      row += groups[group_++].num_rows;
    }
    row_ = row;
    close_group();
    while (row_ < position.row && skip_row()) ++row_;
  }
  DocumentPosition position() const override { return {.file = 0, .row = row_, .byte = 0}; }
  int64_t num_null() const override { return num_null_; }
  int64_t nbytes_read() const override {
    const double part = static_cast<double>(row_) / static_cast<double>(file_->metadata().num_rows);
    return static_cast<int64_t>(part * static_cast<double>(file_->nbytes()));
  }

 protected:
  virtual void open_group(size_t group) = 0;
  virtual void close_group() = 0;
  virtual bool skip_row() = 0;  ///< false at the end

  /// After the last row of a row group: the next one is opened. False after the last.
  bool next_group() {
    const auto& groups = file_->metadata().row_groups;
    int64_t end = 0;
    for (size_t i = 0; i < group_; ++i) end += groups[i].num_rows;
    if (group_ > 0 && row_ != end) {
      throw InputError(fmt::format("{}: row group {}: ends at row {}, expected {}", file_->path(),
                                   group_ - 1, row_, end));
    }
    if (group_ == groups.size()) return false;
    open_group(group_++);
    return true;
  }
  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw InputError(fmt::format("{}: row {}: {}", file_->path(), row_ + 1,
                                 fmt::format(format, std::forward<Args>(args)...)));
  }
  /// Gives `text`, of the next row, checked for UTF-8.
  void give(std::string_view text, std::shared_ptr<const void> owner, std::string_view column,
            Document& document) {
    if (text.size() > static_cast<size_t>(options_.max_document_nbytes)) {
      fail("{} bytes, expected at most {}", text.size(), options_.max_document_nbytes);
    }
    if (const size_t bad = find_invalid_utf8(text); bad < text.size()) {
      if (options_.invalid == InvalidText::kError) {
        fail("byte {} of {} (0x{:02x}) is in no character, expected UTF-8", bad, column,
             static_cast<unsigned char>(text[bad]));
      }
      const auto mended = std::make_shared<std::string>(replace_invalid_utf8(text));
      text = *mended;
      owner = mended;
    }
    document.text = text;
    document.position.row = row_;
    document.position.byte = 0;
    document.owner = std::move(owner);
  }

  std::unique_ptr<const parquet::File> file_;
  DocumentOptions options_;
  size_t group_ = 0;  // that is opened next
  int64_t row_ = 0, num_null_ = 0;
};

/// The text of a column that is in no list.
class TextColumnReader : public ParquetReader {
 public:
  TextColumnReader(std::unique_ptr<const parquet::File> file, const DocumentOptions& options)
      : ParquetReader(std::move(file), options), leaf_(find_leaf()) {}

  bool next(Document& document) override {
    document.owner.reset();
    while (has_entry()) {
      const bool is_null = is_null_entry();
      if (!is_null) {
        give(batch_.values[static_cast<size_t>(value_++)], batch_.owner,
             fmt::format("column \"{}\"", shorten(leaf_.path)), document);
      } else if (options_.null == NullText::kError) {
        fail("column \"{}\" is null, expected a string", shorten(leaf_.path));
      }
      ++entry_, ++row_;
      if (!is_null) return true;
      ++num_null_;
    }
    return false;
  }

 protected:
  void open_group(size_t group) override {
    reader_ = std::make_unique<parquet::ColumnReader>(*file_, leaf_, group);
  }
  void close_group() override {
    reader_.reset();
    batch_.num_entries = entry_ = value_ = 0;
  }
  bool skip_row() override {
    if (!has_entry()) return false;
    value_ += is_null_entry() ? 0 : 1;
    ++entry_;
    return true;
  }

 private:
  const Node& find_leaf() const {
    std::vector<std::string> texts;
    for (const Node* leaf : file_->metadata().leaves) {
      if (leaf->path == options_.field) {
        if (leaf->type == PhysicalType::kByteArray && leaf->max_rep == 0) return *leaf;
        throw InputError(fmt::format(
            "{}: column \"{}\" is {}, expected strings (BYTE_ARRAY)", file_->path(),
            shorten(leaf->path), leaf->max_rep > 0 ? "in a list" : parquet::name_of(leaf->type)));
      }
      if (leaf->max_rep == 0 && is_text(*leaf)) texts.push_back(leaf->path);
    }
    throw InputError(fmt::format(
        "{}: no column \"{}\", expected one with the text ({})", file_->path(),
        shorten(options_.field),
        texts.empty() ? "there is none of strings" : "of strings there is " + join_few(texts)));
  }
  bool has_entry() {
    while (entry_ == batch_.num_entries) {
      batch_.num_entries = entry_ = value_ = 0;
      if (reader_ != nullptr && reader_->next(batch_)) continue;
      if (!next_group()) return false;
    }
    return true;
  }
  bool is_null_entry() const {
    return !batch_.def.empty() && batch_.def[static_cast<size_t>(entry_)] != leaf_.max_def;
  }

  const Node& leaf_;
  std::unique_ptr<parquet::ColumnReader> reader_;
  parquet::Batch batch_;
  int64_t entry_ = 0, value_ = 0;  // of the batch, that come next
};

/// Whole rows as JSON.
class RowReader : public ParquetReader {
 public:
  RowReader(std::unique_ptr<const parquet::File> file, const DocumentOptions& options)
      : ParquetReader(std::move(file), options), columns_(find_columns()) {}

  bool next(Document& document) override {
    const auto json = std::make_shared<std::string>();
    if (!next_json(*json)) return false;
    give(*json, json, "the row as JSON", document);
    ++row_;
    return true;
  }

 protected:
  void open_group(size_t group) override {
    rows_ = std::make_unique<RowAssembler>(*file_, columns_, group);
  }
  void close_group() override { rows_.reset(); }
  bool skip_row() override {
    std::string json;
    return next_json(json);
  }

 private:
  bool next_json(std::string& json) {
    while (rows_ == nullptr || !rows_->next(json)) {
      if (!next_group()) return false;
    }
    return true;
  }
  std::vector<const Node*> find_columns() const {
    std::vector<const Node*> columns;
    for (const Node& node : file_->metadata().root.children) {
      const auto& wanted = options_.columns;
      if (std::find(wanted.begin(), wanted.end(), node.name) != wanted.end() ||
          (wanted.empty() && is_text(node))) {
        columns.push_back(&node);
      }
    }
    if (!columns.empty()) return columns;
    throw InputError(
        fmt::format("{}: no column of {}, expected at least one", file_->path(),
                    options_.columns.empty() ? "strings" : join_few(options_.columns)));
  }

  std::vector<const Node*> columns_;
  std::unique_ptr<RowAssembler> rows_;
};

}  // namespace

std::unique_ptr<FileReader> open_parquet(const std::string& path, Compression compression,
                                         const DocumentOptions& options) {
  auto file = compression == Compression::kNone
                  ? std::make_unique<const parquet::File>(path)
                  : std::make_unique<const parquet::File>(
                        unpack_to_temporary(*ByteStream::open(path, compression)), path);
  if (options.whole_rows) return std::make_unique<RowReader>(std::move(file), options);
  return std::make_unique<TextColumnReader>(std::move(file), options);
}

}  // namespace tessera::apps
