#include "apps/text/json_node.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/check.h"
#include "core/formats/strict_json.h"
#include "core/text.h"

namespace tessera::text {
namespace {

const nlohmann::json& null_value() {
  static const nlohmann::json value;
  return value;
}

}  // namespace

void JsonNode::fail(std::string_view expected) const {
  throw InputError(fmt::format("{} = {}, expected {}", place(), json_text(*value_), expected));
}

JsonNode JsonNode::operator[](const std::string& key) const {
  if (!value_->is_object()) fail("an object");
  const auto found = value_->find(key);
  const std::string path = path_.empty() ? key : path_ + "." + shorten(key);
  return {found == value_->end() ? null_value() : *found, file_, path};
}

JsonNode JsonNode::at(size_t index) const {
  return {value_->at(index), file_, fmt::format("{}[{}]", path_, index)};
}

size_t JsonNode::size() const {
  if (!value_->is_array()) fail("an array");
  return value_->size();
}

void JsonNode::check_keys(std::initializer_list<std::string_view> known) const {
  if (!value_->is_object()) fail("an object");
  for (const auto& [key, value] : value_->items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      (*this)[key].fail("none of that name, one of " + join_few(known, ", ", 16));
    }
  }
}

std::string JsonNode::text() const {
  if (!value_->is_string()) fail("a string");
  return value_->get<std::string>();
}
std::string JsonNode::text_or(std::string_view otherwise) const {
  return is_null() ? std::string(otherwise) : text();
}
std::optional<std::string> JsonNode::optional_text() const {
  if (is_null()) return std::nullopt;
  return text();
}
bool JsonNode::flag() const {
  if (!value_->is_boolean()) fail("true or false");
  return value_->get<bool>();
}
bool JsonNode::flag_or(bool otherwise) const {
  return is_null() ? otherwise : flag();
}
int64_t JsonNode::integer(int64_t low, int64_t high) const {
  const int64_t number = json_size(*value_);
  if (number < 0 || number < low || number > high) fail(fmt::format("{} to {}", low, high));
  return number;
}
size_t JsonNode::one_of(std::initializer_list<std::string_view> names) const {
  const std::string name = value_->is_string() ? value_->get<std::string>() : std::string();
  const auto* const found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) fail("one of " + join_few(names, ", ", 20));
  return static_cast<size_t>(found - names.begin());
}

}  // namespace tessera::text
