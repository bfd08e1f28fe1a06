#include "core/formats/strict_json.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/check.h"
#include "core/text.h"

namespace tessera {
namespace {

using nlohmann::json;

/// What stands for NaN and the infinities in the text that the parser sees: strings that no file
/// has a reason to hold.
constexpr std::pair<std::string_view, double> kPythonNumbers[] = {
    {"-Infinity", -std::numeric_limits<double>::infinity()},
    {"Infinity", std::numeric_limits<double>::infinity()},
    {"NaN", std::numeric_limits<double>::quiet_NaN()}};
constexpr std::string_view kMark = "\x01python:";

/// The text with the literals of Python outside of strings as marked strings.
std::string mark_python_numbers(std::string_view text) {
  std::string out;
  out.reserve(text.size() + 64);
  bool in_string = false;
  for (size_t i = 0; i < text.size();) {
    if (in_string && text[i] == '\\' && i + 1 < text.size()) {
      out.append(text, i, 2);
      i += 2;
      continue;
    }
    if (text[i] == '"') in_string = !in_string;
    const auto* literal = std::find_if(
        std::begin(kPythonNumbers), std::end(kPythonNumbers),
        [&](const auto& each) { return !in_string && text.substr(i).starts_with(each.first); });
    if (literal == std::end(kPythonNumbers)) {
      out += text[i++];
      continue;
    }
    out += fmt::format("\"\\u0001python:{}\"", literal->first);
    i += literal->first.size();
  }
  return out;
}

/// The value with numbers in place of their marks.
void restore_python_numbers(json& value) {
  if (value.is_structured()) {
    for (json& each : value) restore_python_numbers(each);
    return;
  }
  if (!value.is_string()) return;
  const std::string_view text = value.get_ref<const std::string&>();
  if (!text.starts_with(kMark)) return;
  for (const auto& [name, number] : kPythonNumbers) {
    if (text.substr(kMark.size()) != name) continue;
    value = number;
    return;
  }
}

/// Looks at a text without keeping its values: depth, keys given twice, what would take far more
/// memory than the text. Time grows with the text alone (a parser with a callback looks at all
/// members of an object again after each one).
class Inspector : public json::json_sax_t {
 public:
  Inspector(std::string_view what, size_t nbytes, const JsonRules& rules, bool has_marks)
      : what_(what),
        nbytes_(nbytes),
        max_elements_(nbytes / 16 + rules.num_free_elements),
        max_members_(nbytes / rules.nbytes_each_member + rules.num_free_elements),
        max_containers_(nbytes / 8 + rules.num_free_elements),
        max_depth_(rules.max_depth),
        has_marks_(has_marks) {}

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
    if (has_marks_ && name.starts_with(kMark)) return false;  // a number is no name
    count_element("an object", max_members_);
    if (open_.back().keys.insert(name).second) return true;
    throw InputError(
        fmt::format("{} has {} twice, expected each name once", what_, json_text(name)));
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
    if (!open_.empty() && open_.back().is_array) count_element("an array", max_elements_);
    return true;
  }
  /// An element costs an array 16 bytes, and twice that while it grows; an object some more.
  void count_element(std::string_view where, size_t max) {
    if (++open_.back().num_elements > max) {
      fail_count(fmt::format("{} of more than {} elements", where, max));
    }
  }
  bool open(bool is_array) {
    if (static_cast<int>(open_.size()) > max_depth_) fail_depth();
    if (++num_containers_ > max_containers_) {
      fail_count(fmt::format("more than {} arrays and objects", max_containers_));
    }
    open_.push_back({{}, is_array, 0});
    return true;
  }
  bool close() {
    open_.pop_back();
    return add_value();
  }
  [[noreturn]] void fail_count(const std::string& found) const {
    throw InputError(fmt::format("{} of {} bytes has {}, expected fewer", what_, nbytes_, found));
  }
  [[noreturn]] void fail_depth() const {
    throw InputError(fmt::format("{} nested too deep, expected {}", what_, max_depth_));
  }

  const std::string_view what_;
  const size_t nbytes_, max_elements_, max_members_, max_containers_;
  const int max_depth_;
  const bool has_marks_;
  size_t num_containers_ = 0;
  std::vector<Open> open_;
};

}  // namespace

namespace {

[[noreturn]] void fail_no_json(std::string_view what, std::string_view text,
                               std::string_view expected) {
  throw InputError(
      fmt::format("{} of {} bytes is not JSON, expected {}", what, text.size(), expected));
}

constexpr std::string_view kSpace = " \t\r\n";

size_t after_space(std::string_view text, size_t i) {
  return std::min(text.find_first_not_of(kSpace, i), text.size());
}

/// Behind the string that begins at `i`.
size_t after_string(std::string_view text, size_t i) {
  for (++i; i < text.size() && text[i] != '"'; ++i) {
    if (text[i] == '\\') ++i;
  }
  return std::min(i + 1, text.size());
}

/// Behind the value that begins at `i`.
size_t after_value(std::string_view text, size_t i) {
  size_t depth = 0;
  do {
    switch (text[i]) {
      case '"':
        i = after_string(text, i);
        break;
      case '{':
      case '[':
        ++depth, ++i;
        break;
      case '}':
      case ']':
        --depth, ++i;
        break;
      default:  // what is between them, or a number or a word
        i = std::min(text.find_first_of(depth > 0 ? "\"{}[]" : ",]} \t\r\n", i), text.size());
    }
  } while (depth > 0 && i < text.size());
  return i;
}

/// The parts of `text` between the brackets, each of which `take` reads from its begin to what is
/// behind it; false if it does not begin with `bracket`.
template <class Take>
bool for_each_part(std::string_view text, char bracket, const Take& take) {
  constexpr std::string_view kMarkOfUtf8 = "\xef\xbb\xbf";
  size_t i = after_space(text, text.starts_with(kMarkOfUtf8) ? kMarkOfUtf8.size() : 0);
  if (i == text.size() || text[i] != bracket) return false;
  for (i = after_space(text, i + 1); i < text.size() && text[i] != '}' && text[i] != ']';) {
    i = after_space(text, take(i));
    if (i < text.size() && text[i] == ',') i = after_space(text, i + 1);
  }
  return true;
}

}  // namespace

void check_strict_json(std::string_view what, std::string_view text, const JsonRules& rules,
                       std::string_view expected) {
  Inspector inspector(what, text.size(), rules, /*has_marks=*/false);
  if (!json::sax_parse(text.begin(), text.end(), &inspector)) fail_no_json(what, text, expected);
}

bool for_each_member(
    std::string_view text,
    const std::function<void(const std::string& name, std::string_view value)>& f) {
  return for_each_part(text, '{', [&](size_t begin) {
    const size_t name_end = after_string(text, begin);
    const size_t value = after_space(text, after_space(text, name_end) + 1);
    const size_t end = after_value(text, value);
    f(json::parse(text.substr(begin, name_end - begin)).get<std::string>(),
      text.substr(value, end - value));
    return end;
  });
}

bool for_each_element(std::string_view text, const std::function<void(std::string_view value)>& f) {
  return for_each_part(text, '[', [&](size_t begin) {
    const size_t end = after_value(text, begin);
    f(text.substr(begin, end - begin));
    return end;
  });
}

json parse_strict_json(std::string_view what, std::string_view text, const JsonRules& rules,
                       std::string_view expected) {
  const bool has_marks = rules.python_numbers && (text.find("NaN") != std::string_view::npos ||
                                                  text.find("Infinity") != std::string_view::npos);
  const std::string marked = has_marks ? mark_python_numbers(text) : std::string();
  const std::string_view seen = has_marks ? std::string_view(marked) : text;
  Inspector inspector(what, text.size(), rules, has_marks);
  if (json::sax_parse(seen.begin(), seen.end(), &inspector)) {
    json value = json::parse(seen.begin(), seen.end());
    if (has_marks) restore_python_numbers(value);
    return value;
  }
  fail_no_json(what, text, expected);
}

json parse_strict_json(std::string_view what, std::string_view text, int max_depth,
                       std::string_view expected) {
  return parse_strict_json(what, text, JsonRules{.max_depth = max_depth}, expected);
}

int64_t json_size(const json& value) {
  if (!value.is_number_unsigned()) return -1;
  const uint64_t number = value.get<uint64_t>();
  return number > uint64_t{INT64_MAX} ? -1 : static_cast<int64_t>(number);
}

std::string json_text(const json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    const double number = value.get<double>();
    return std::isnan(number) ? "NaN" : number > 0 ? "Infinity" : "-Infinity";
  }
  return shorten(value.dump(-1, ' ', false, json::error_handler_t::replace));
}

}  // namespace tessera
