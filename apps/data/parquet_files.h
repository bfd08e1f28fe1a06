#pragma once

#include "apps/data/byte_stream.h"
#include "apps/data/documents.h"
#include "core/formats/parquet/file.h"

namespace tessera::apps {

/// Rows of a Parquet file: see FileReader. A packed one is unpacked to a temporary file first.
std::unique_ptr<FileReader> open_parquet(const std::string& path, Compression compression,
                                         const DocumentOptions& options);

/// Rows of some columns of a row group as JSON: objects for structs, arrays for lists, strings, and
/// null. Columns of a group are read together, entry by entry, as their levels say (Dremel; Melnik
/// et al. 2010).
class RowAssembler {
 public:
  /// `columns` are children of the root. The file outlives it.
  RowAssembler(const parquet::File& file, const std::vector<const parquet::Node*>& columns,
               size_t row_group);
  ~RowAssembler();
  /// The next row's object, in place of `json`; false at the end. InputError names the file.
  bool next(std::string& json);

 private:
  class Cursor;
  void emit(const parquet::Node& node, std::string& json);
  void emit_list(const parquet::Node& list, const parquet::Node& repeated, std::string& json);
  void emit_element(const parquet::Node& list, const parquet::Node& repeated, std::string& json);
  void emit_value(const parquet::Node& node, std::string& json);
  void emit_fields(const std::vector<const parquet::Node*>& fields, std::string& json);
  void leave_out(const parquet::Node& node);
  Cursor& first(const parquet::Node& node);
  [[noreturn]] void fail(const parquet::Node& node) const;

  const parquet::File& file_;
  std::vector<const parquet::Node*> columns_;
  std::vector<std::unique_ptr<Cursor>> cursors_;  // by leaf; none for those that are not read
};

}  // namespace tessera::apps
