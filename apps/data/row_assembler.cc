#include "apps/data/json_line.h"
#include "apps/data/parquet_files.h"
#include "core/check.h"
#include "core/text.h"

namespace tessera::apps {

using parquet::Node;

/// The entries of a column, one after the other.
class RowAssembler::Cursor {
 public:
  Cursor(const parquet::File& file, const Node& leaf, size_t row_group)
      : leaf_(leaf), reader_(file, leaf, row_group) {}

  bool has() {
    while (entry_ == batch_.num_entries) {
      batch_.num_entries = entry_ = value_ = 0;
      if (!reader_.next(batch_)) return false;
    }
    return true;
  }
  int def() const { return batch_.def.empty() ? 0 : batch_.def[static_cast<size_t>(entry_)]; }
  int rep() const { return batch_.rep.empty() ? 0 : batch_.rep[static_cast<size_t>(entry_)]; }
  std::string_view value() const { return batch_.values[static_cast<size_t>(value_)]; }
  void advance() {
    value_ += def() == leaf_.max_def ? 1 : 0;
    ++entry_;
  }

 private:
  const Node& leaf_;
  parquet::ColumnReader reader_;
  parquet::Batch batch_;
  int64_t entry_ = 0, value_ = 0;
};

RowAssembler::RowAssembler(const parquet::File& file, const std::vector<const Node*>& columns,
                           size_t row_group)
    : file_(file), columns_(columns), cursors_(file.metadata().leaves.size()) {
  const auto open = [&](const auto& self, const Node& node) -> void {
    if (node.is_leaf()) {
      cursors_[static_cast<size_t>(node.leaf)] = std::make_unique<Cursor>(file, node, row_group);
    }
    for (const Node& child : node.children) self(self, child);
  };
  for (const Node* column : columns) open(open, *column);
}

RowAssembler::~RowAssembler() = default;

bool RowAssembler::next(std::string& json) {
  json.clear();
  if (columns_.empty() || !first(*columns_[0]).has()) return false;
  emit_fields(columns_, json);
  // The next entry of every column begins a row.
  for (size_t i = 0; i < cursors_.size(); ++i) {
    if (cursors_[i] != nullptr && cursors_[i]->has() && cursors_[i]->rep() != 0) {
      fail(*file_.metadata().leaves[i]);
    }
  }
  return true;
}

void RowAssembler::fail(const Node& node) const {
  throw InputError(
      fmt::format("{}: column \"{}\": its levels do not make rows with those beside it, "
                  "expected them to",
                  file_.path(), shorten(node.path)));
}

/// At the next entry of the first column in `node`.
RowAssembler::Cursor& RowAssembler::first(const Node& node) {
  const Node* leaf = &node;
  while (!leaf->is_leaf()) leaf = &leaf->children[0];
  return *cursors_[static_cast<size_t>(leaf->leaf)];
}

void RowAssembler::leave_out(const Node& node) {
  for (const Node& child : node.children) leave_out(child);
  if (!node.is_leaf()) return;
  Cursor& cursor = first(node);
  if (!cursor.has()) fail(node);
  cursor.advance();
}

void RowAssembler::emit(const Node& node, std::string& json) {
  if (node.is_repeated) return emit_list(node, node, json);
  Cursor& cursor = first(node);
  if (!cursor.has()) fail(node);
  if (node.is_optional && cursor.def() < node.max_def) {
    json += "null";
    return leave_out(node);
  }
  if (node.is_list && node.children.size() == 1 && node.children[0].is_repeated) {
    return emit_list(node, node.children[0], json);
  }
  emit_value(node, json);
}

void RowAssembler::emit_list(const Node& list, const Node& repeated, std::string& json) {
  Cursor& cursor = first(repeated);
  if (!cursor.has()) fail(repeated);
  if (cursor.def() < repeated.max_def) {
    json += "[]";
    return leave_out(repeated);
  }
  json += '[';
  emit_element(list, repeated, json);
  while (cursor.has() && cursor.rep() >= repeated.max_rep) {
    if (cursor.rep() > repeated.max_rep) fail(repeated);
    json += ", ";
    emit_element(list, repeated, json);
  }
  json += ']';
}

/// In the usual form the repeated group holds the element alone; older writers repeat the element
/// itself (LogicalTypes.md of apache/parquet-format, "Lists").
void RowAssembler::emit_element(const Node& list, const Node& repeated, std::string& json) {
  const bool is_element = &list == &repeated || repeated.is_leaf() ||
                          repeated.children.size() != 1 || repeated.name == "array" ||
                          repeated.name == list.name + "_tuple";
  if (is_element) return emit_value(repeated, json);
  emit(repeated.children[0], json);
}

void RowAssembler::emit_value(const Node& node, std::string& json) {
  if (node.is_leaf()) {
    Cursor& cursor = first(node);
    if (!cursor.has() || cursor.def() != node.max_def) fail(node);
    append_json_string(json, cursor.value());
    return cursor.advance();
  }
  std::vector<const Node*> fields;
  for (const Node& child : node.children) fields.push_back(&child);
  emit_fields(fields, json);
}

void RowAssembler::emit_fields(const std::vector<const Node*>& fields, std::string& json) {
  json += '{';
  for (const Node* field : fields) {
    if (field != fields[0]) json += ", ";
    append_json_string(json, field->name);
    json += ": ";
    emit(*field, json);
  }
  json += '}';
}

}  // namespace tessera::apps
