// str(), repr() and json.dumps() of Python.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "apps/text/jinja/function.h"
#include "apps/text/jinja/unicode.h"
#include "apps/text/jinja/value.h"

namespace tessera::text::jinja {
namespace {

void check_growth(const std::string& out) {
  count_steps(1);
  expect_growing(out.size());
}

/// The shortest digits that read back as `value` (finite, not negative), and where the decimal
/// point stands among them.
std::string shortest_digits(double value, int& point) {
  char buffer[40];
  const auto result =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  const std::string_view text(buffer, static_cast<size_t>(result.ptr - buffer));
  const size_t e = text.find('e');
  std::string digits;
  for (const char c : text.substr(0, e)) {
    if (c != '.') digits += c;
  }
  point = 1;
  int exponent = 0;
  const bool is_plus = text[e + 1] == '+';
  std::from_chars(text.data() + e + (is_plus ? 2 : 1), text.data() + text.size(), exponent);
  point += exponent;
  return digits;
}

void append_items(std::string& out, const std::vector<Value>& items) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out += ", ";
    append_repr(out, items[i]);
  }
}

void append_pair(std::string& out, const Value& key, const Value& value, std::string_view between) {
  append_repr(out, key);
  out += between;
  append_repr(out, value);
}

void append_view(std::string& out, const DictViewObject& view, const std::string& name) {
  out += name + "([";
  bool is_first = true;
  for (const auto& [key, value] : view.dict->items) {
    if (!is_first) out += ", ";
    is_first = false;
    if (view.part == DictPart::kItems) {
      out += '(';
      append_pair(out, key, value, ", ");
      out += ')';
    } else {
      append_repr(out, view.part == DictPart::kKeys ? key : value);
    }
  }
  out += "])";
}

void append_range(std::string& out, const RangeObject& range) {
  out += fmt::format("range({}, {}", range.start, range.stop);
  out += range.step == 1 ? ")" : fmt::format(", {})", range.step);
}

/// A namespace may hold itself: inside of itself it is only named.
void append_namespace(std::string& out, const NamespaceObject& space) {
  thread_local std::vector<const NamespaceObject*> shown;
  if (std::find(shown.begin(), shown.end(), &space) != shown.end()) {
    out += "<Namespace {...}>";
    return;
  }
  shown.push_back(&space);
  struct Pop {
    ~Pop() { shown.pop_back(); }
  } pop;
  out += "<Namespace {";
  bool is_first = true;
  for (const auto& [name, value] : space.attributes) {
    if (!is_first) out += ", ";
    is_first = false;
    append_pair(out, Value(name), value, ": ");
  }
  out += "}>";
}

}  // namespace

std::string repr_of_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  const std::string sign = std::signbit(value) ? "-" : "";
  int point = 0;
  std::string digits = shortest_digits(std::fabs(value), point);
  if (value == 0) point = 1;
  const int count = static_cast<int>(digits.size());
  if (point > 16 || point <= -4) {
    const int exponent = point - 1;
    if (count > 1) digits.insert(1, ".");
    return fmt::format("{}{}e{}{:02}", sign, digits, exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (point <= 0) return sign + "0." + std::string(static_cast<size_t>(-point), '0') + digits;
  if (point >= count) {
    return sign + digits + std::string(static_cast<size_t>(point - count), '0') + ".0";
  }
  digits.insert(static_cast<size_t>(point), ".");
  return sign + digits;
}

std::string repr_of_string(std::string_view text) {
  const bool is_double =
      text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  const char quote = is_double ? '"' : '\'';
  std::string out(1, quote);
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_char(text, at);
    const auto code = static_cast<uint32_t>(c);
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (has_property(c, kIsPrintable)) {
      out += text.substr(begin, at - begin);
    } else if (c < 0x100) {
      out += fmt::format("\\x{:02x}", code);
    } else {
      out += c < 0x10000 ? fmt::format("\\u{:04x}", code) : fmt::format("\\U{:08x}", code);
    }
  }
  return out + quote;
}

void append_repr(std::string& out, const Value& value) {
  check_growth(out);
  std::optional<Level> level;  // namespaces lie in one another without end
  if (Meter* meter = Meter::current()) level.emplace(*meter);
  switch (value.kind()) {
    case Kind::kMissing:
      out += "missing";
      break;
    case Kind::kUndefined:
      out += "Undefined";
      break;
    case Kind::kNone:
      out += "None";
      break;
    case Kind::kBool:
      out += value.boolean() ? "True" : "False";
      break;
    case Kind::kInt:
      out += std::to_string(value.integer());
      break;
    case Kind::kFloat:
      out += repr_of_float(value.number());
      break;
    case Kind::kString:
      count_steps(static_cast<int64_t>(value.text().size() / 16));
      out += value.is_markup() ? "Markup(" + repr_of_string(value.text()) + ")"
                               : repr_of_string(value.text());
      break;
    case Kind::kList:
      out += '[';
      append_items(out, value.items());
      out += ']';
      break;
    case Kind::kTuple:
      out += '(';
      append_items(out, value.items());
      out += value.items().size() == 1 ? ",)" : ")";
      break;
    case Kind::kDict: {
      out += '{';
      bool is_first = true;
      for (const auto& [key, each] : value.dict().items) {
        if (!is_first) out += ", ";
        is_first = false;
        append_pair(out, key, each, ": ");
      }
      out += '}';
      break;
    }
    case Kind::kRange:
      append_range(out, value.as<RangeObject>());
      break;
    case Kind::kDictView:
      append_view(out, value.as<DictViewObject>(), type_name(value));
      break;
    case Kind::kIterator:
      out += "<" + type_name(value) + " object at 0x0>";
      break;
    case Kind::kNamespace:
      append_namespace(out, value.as<NamespaceObject>());
      break;
    case Kind::kLoop: {
      const auto& loop = value.as<LoopObject>();
      out += fmt::format("<LoopContext {}/{}>", loop.attribute("index").integer(), loop.length());
      break;
    }
    case Kind::kFunction:
      out += value.as<FunctionObject>().describe();
      break;
  }
}

std::string to_repr(const Value& value) {
  std::string out;
  append_repr(out, value);
  return out;
}

std::string to_string(const Value& value) {
  if (value.is_string()) return value.text();
  if (value.is_undefined()) return "";
  return to_repr(value);
}

namespace {

void append_json_string(std::string& out, std::string_view text, bool ensure_ascii) {
  count_steps(static_cast<int64_t>(text.size() / 16));
  out += '"';
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_char(text, at);
    const auto code = static_cast<uint32_t>(c);
    switch (c) {
      case '"':
        out += "\\\"";
        continue;
      case '\\':
        out += "\\\\";
        continue;
      case '\n':
        out += "\\n";
        continue;
      case '\r':
        out += "\\r";
        continue;
      case '\t':
        out += "\\t";
        continue;
      case '\f':
        out += "\\f";
        continue;
      case '\b':
        out += "\\b";
        continue;
      default:
        break;
    }
    if (c < 0x20 || (ensure_ascii && c >= 0x7f && c < 0x10000)) {
      out += fmt::format("\\u{:04x}", code);
    } else if (ensure_ascii && c >= 0x10000) {
      out += fmt::format("\\u{:04x}\\u{:04x}", 0xd800 + ((code - 0x10000) >> 10),
                         0xdc00 + ((code - 0x10000) & 0x3ff));
    } else {
      out += text.substr(begin, at - begin);
    }
  }
  out += '"';
}

std::string json_number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  return repr_of_float(value);
}

/// The key of an object: str, or what json.dumps makes one of.
std::string json_key(const Value& key) {
  switch (key.kind()) {
    case Kind::kString:
      return key.text();
    case Kind::kNone:
      return "null";
    case Kind::kBool:
      return key.boolean() ? "true" : "false";
    case Kind::kInt:
      return std::to_string(key.integer());
    case Kind::kFloat:
      return json_number(key.number());
    default:
      fail("keys must be str, int, float, bool or None, not {}", type_name(key));
  }
}

class JsonWriter {
 public:
  explicit JsonWriter(const JsonStyle& style) : style_(style) {}

  void append(const Value& value) {
    check_growth(out_);
    switch (value.kind()) {
      case Kind::kNone:
        out_ += "null";
        break;
      case Kind::kBool:
        out_ += value.boolean() ? "true" : "false";
        break;
      case Kind::kInt:
        out_ += std::to_string(value.integer());
        break;
      case Kind::kFloat:
        out_ += json_number(value.number());
        break;
      case Kind::kString:
        append_json_string(out_, value.text(), style_.ensure_ascii);
        break;
      case Kind::kList:
      case Kind::kTuple:
        append_array(value.items());
        break;
      case Kind::kDict:
        append_object(value.dict());
        break;
      default:
        fail("Object of type {} is not JSON serializable", type_name(value));
    }
  }

  std::string take() { return std::move(out_); }

 private:
  void begin_item(bool is_first) {
    if (!is_first) out_ += style_.item_separator;
    break_line();
  }
  void break_line() {
    if (!style_.is_indented) return;
    expect_nbytes(static_cast<int64_t>(out_.size()) +
                  product(static_cast<int64_t>(style_.indent.size()), level_));
    out_ += '\n';
    for (int i = 0; i < level_; ++i) out_ += style_.indent;
  }

  void append_array(const std::vector<Value>& items) {
    if (items.empty()) {
      out_ += "[]";
      return;
    }
    out_ += '[';
    ++level_;
    for (size_t i = 0; i < items.size(); ++i) {
      begin_item(i == 0);
      append(items[i]);
    }
    --level_;
    break_line();
    out_ += ']';
  }

  void append_object(const DictObject& dict) {
    if (dict.items.empty()) {
      out_ += "{}";
      return;
    }
    std::vector<const std::pair<Value, Value>*> items;
    for (const auto& item : dict.items) items.push_back(&item);
    if (style_.sort_keys) {
      std::stable_sort(items.begin(), items.end(), [](const auto* a, const auto* b) {
        return compare(a->first, b->first, "<") < 0;
      });
    }
    out_ += '{';
    ++level_;
    bool is_first = true;
    for (const auto* item : items) {
      begin_item(is_first);
      is_first = false;
      append_json_string(out_, json_key(item->first), style_.ensure_ascii);
      out_ += style_.key_separator;
      append(item->second);
    }
    --level_;
    break_line();
    out_ += '}';
  }

  const JsonStyle& style_;
  std::string out_;
  int level_ = 0;
};

}  // namespace

std::string to_json(const Value& value, const JsonStyle& style) {
  JsonWriter writer(style);
  writer.append(value);
  return writer.take();
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '"':
        out += "&#34;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace tessera::text::jinja
