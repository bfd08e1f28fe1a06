#include "dist/checkpoint/strict_json.h"

#include <string>
#include <unordered_set>
#include <vector>

#include "core/check.h"

namespace tessera::dist {
namespace {

using nlohmann::json;

/// Looks at a text without keeping its values: depth, keys given twice, arrays that would take far
/// more memory than the text. Time grows with the text alone (a parser with a callback looks at all
/// members of an object again after each one).
class Inspector : public json::json_sax_t {
 public:
  Inspector(std::string_view what, size_t nbytes, int max_depth)
      : what_(what), nbytes_(nbytes), max_depth_(max_depth) {}

  bool null() override { return add_value(); }
  bool boolean(bool) override { return add_value(); }
  bool number_integer(number_integer_t) override { return add_value(); }
  bool number_unsigned(number_unsigned_t) override { return add_value(); }
  bool number_float(number_float_t, const string_t&) override { return add_value(); }
  bool string(string_t&) override { return add_value(); }
  bool binary(binary_t&) override { return add_value(); }
  bool start_object(size_t) override { return open(false); }
  bool start_array(size_t) override { return open(true); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (open_.back().keys.insert(name).second) return true;
    throw InputError(
        fmt::format("{} has {} twice, expected each name once", what_, json(name).dump()));
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  struct Open {
    std::unordered_set<std::string> keys;  // of an object
    bool is_array = false;
    size_t num_elements = 0;
  };

  bool add_value() {
    // A value may be as deep as the innermost object or array that is allowed.
    if (static_cast<int>(open_.size()) > max_depth_) fail_depth();
    if (open_.empty() || !open_.back().is_array) return true;
    // An element costs an array 16 bytes, and twice that while it grows.
    const size_t max_elements = nbytes_ / 16 + 1024;
    if (++open_.back().num_elements <= max_elements) return true;
    throw InputError(
        fmt::format("{} of {} bytes has an array of more than {} elements, expected fewer", what_,
                    nbytes_, max_elements));
  }
  bool open(bool is_array) {
    if (static_cast<int>(open_.size()) > max_depth_) fail_depth();
    open_.push_back({{}, is_array, 0});
    return true;
  }
  bool close() {
    open_.pop_back();
    return add_value();
  }
  [[noreturn]] void fail_depth() const {
    throw InputError(fmt::format("{} nested too deep, expected {}", what_, max_depth_));
  }

  const std::string_view what_;
  const size_t nbytes_;
  const int max_depth_;
  std::vector<Open> open_;
};

}  // namespace

json parse_strict_json(std::string_view what, std::string_view text, int max_depth,
                       std::string_view expected) {
  Inspector inspector(what, text.size(), max_depth);
  if (json::sax_parse(text.begin(), text.end(), &inspector)) {
    return json::parse(text.begin(), text.end());
  }
  throw InputError(
      fmt::format("{} of {} bytes is not JSON, expected {}", what, text.size(), expected));
}

int64_t json_size(const json& value) {
  if (!value.is_number_unsigned()) return -1;
  const uint64_t number = value.get<uint64_t>();
  return number > uint64_t{INT64_MAX} ? -1 : static_cast<int64_t>(number);
}

}  // namespace tessera::dist
