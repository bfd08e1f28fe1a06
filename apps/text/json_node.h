#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::text {

/// A value in a JSON file with its place there, which every error names:
/// "tokenizer.json: pre_tokenizer.pretokenizers[1].type = "X", expected ..." (InputError).
class JsonNode {
 public:
  JsonNode(const nlohmann::json& value, std::string file, std::string path = "")
      : value_(&value), file_(std::move(file)), path_(std::move(path)) {}

  const nlohmann::json& value() const { return *value_; }
  const std::string& file() const { return file_; }
  /// "tokenizer.json: model.vocab", as errors begin.
  std::string place() const { return path_.empty() ? file_ : file_ + ": " + path_; }
  [[noreturn]] void fail(std::string_view expected) const;

  bool is_null() const { return value_->is_null(); }
  /// A member of this object; null if it is not there.
  JsonNode operator[](const std::string& key) const;
  JsonNode at(size_t index) const;
  size_t size() const;  ///< of an array
  /// This is an object of no other members.
  void check_keys(std::initializer_list<std::string_view> known) const;

  std::string text() const;
  std::string text_or(std::string_view otherwise) const;
  std::optional<std::string> optional_text() const;
  bool flag_or(bool otherwise) const;
  bool flag() const;
  int64_t integer(int64_t low, int64_t high) const;
  /// One of the names; its index.
  size_t one_of(std::initializer_list<std::string_view> names) const;

 private:
  const nlohmann::json* value_;
  std::string file_, path_;
};

}  // namespace tessera::text
