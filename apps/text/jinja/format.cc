// "%s" % x and "{}".format(x) of Python.

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>

#include "apps/text/jinja/function.h"
#include "apps/text/jinja/strings.h"
#include "apps/text/jinja/unicode.h"

namespace tessera::text::jinja {
namespace {

constexpr int64_t kMaxPrecision = 1000;

/// How one value is to be written, in the words of Python's format specifications.
struct Spec {
  std::string fill = " ";
  char align = '\0';  ///< < > ^ =
  char sign = '-';
  bool is_alternate = false;
  int64_t width = 0;
  char grouping = '\0';
  int64_t precision = -1;
  char type = '\0';
};

int64_t read_number(std::string_view text, size_t& at) {
  int64_t value = 0;
  for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
    value = value * 10 + (text[at] - '0');
    if (value > 1'000'000'000) fail("a width or precision that is too large");
  }
  return value;
}

std::string c_format(double value, int64_t precision, char type, bool is_alternate) {
  if (precision > kMaxPrecision) fail("a precision beyond {}", kMaxPrecision);
  const std::string format = std::string("%") + (is_alternate ? "#" : "") + ".*" + type;
  char buffer[1500];
  const int nbytes =
      std::snprintf(buffer, sizeof(buffer), format.c_str(), static_cast<int>(precision), value);
  return {buffer, static_cast<size_t>(nbytes)};
}

/// Digits without a sign, for a value that is not negative.
std::string float_digits(double value, const Spec& spec) {
  const bool is_upper = spec.type == 'F' || spec.type == 'E' || spec.type == 'G';
  if (!std::isfinite(value)) {
    const std::string text = std::isnan(value) ? "nan" : "inf";
    return (is_upper ? to_upper(text) : text) + (spec.type == '%' ? "%" : "");
  }
  switch (spec.type) {
    case '%':
      return c_format(value * 100, spec.precision < 0 ? 6 : spec.precision, 'f', false) + "%";
    case '\0': {
      if (spec.precision < 0) return repr_of_float(value);
      std::string text = c_format(value, std::max<int64_t>(1, spec.precision), 'g', false);
      return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
    }
    case 'n':
      return c_format(value, spec.precision < 0 ? 6 : spec.precision, 'g', spec.is_alternate);
    default:
      return c_format(value, spec.precision < 0 ? 6 : spec.precision, spec.type, spec.is_alternate);
  }
}

std::string integer_digits(uint64_t value, char type) {
  if (type == 'b') {
    std::string text;
    do {
      text += static_cast<char>('0' + (value & 1));
      value >>= 1;
    } while (value != 0);
    std::reverse(text.begin(), text.end());
    return text;
  }
  return type == 'o'   ? fmt::format("{:o}", value)
         : type == 'x' ? fmt::format("{:x}", value)
         : type == 'X' ? fmt::format("{:X}", value)
                       : fmt::format("{}", value);
}

std::string grouped(const std::string& digits, char separator, size_t group) {
  const size_t whole = std::min(digits.find_first_not_of("0123456789abcdefABCDEF"), digits.size());
  std::string out = digits.substr(0, whole);
  for (size_t at = whole; at > group; at -= group) out.insert(at - group, 1, separator);
  return out + digits.substr(whole);
}

/// Sign, prefix and digits in the width that is asked for.
std::string padded_number(bool is_negative, const std::string& prefix, std::string digits,
                          const Spec& spec) {
  if (spec.grouping != '\0') {
    const bool is_binary =
        spec.type == 'b' || spec.type == 'o' || spec.type == 'x' || spec.type == 'X';
    digits = grouped(digits, spec.grouping, is_binary ? 4 : 3);
  }
  const std::string sign = is_negative ? "-" : spec.sign == '-' ? "" : std::string(1, spec.sign);
  const std::string head = sign + prefix;
  if (spec.align == '=') {
    const int64_t width = spec.width - static_cast<int64_t>(head.size());
    return head + align(digits, width, spec.fill, Align::kRight);
  }
  return align(head + digits, spec.width, spec.fill,
               spec.align == '<'   ? Align::kLeft
               : spec.align == '^' ? Align::kCenter
                                   : Align::kRight);
}

std::string format_float(double value, const Spec& spec) {
  const bool is_negative = std::signbit(value) && !std::isnan(value);
  return padded_number(is_negative, "", float_digits(std::fabs(value), spec), spec);
}

std::string format_integer(int64_t value, Spec spec) {
  if (spec.type != '\0' && std::string_view("eEfFgG%").find(spec.type) != std::string::npos) {
    return format_float(static_cast<double>(value), spec);
  }
  if (spec.precision >= 0) fail("Precision not allowed in integer format specifier");
  if (spec.type == 'c') {
    if (value < 0 || value > 0x10ffff) fail("%c arg not in range(0x110000)");
    std::string text;
    append_char(text, static_cast<char32_t>(value));
    return align(text, spec.width, spec.fill, spec.align == '>' ? Align::kRight : Align::kLeft);
  }
  const uint64_t size = value < 0 ? 0 - static_cast<uint64_t>(value) : static_cast<uint64_t>(value);
  const bool has_base =
      spec.type == 'b' || spec.type == 'o' || spec.type == 'x' || spec.type == 'X';
  const std::string prefix = spec.is_alternate && has_base ? std::string("0") + spec.type : "";
  return padded_number(value < 0, prefix, integer_digits(size, spec.type), spec);
}

/// The first `precision` characters in the width that is asked for.
std::string format_text(std::string_view text, const Spec& spec) {
  if (spec.precision >= 0) {
    text = text.substr(0, byte_of_char(text, static_cast<size_t>(spec.precision), false));
  }
  return align(text, spec.width, spec.fill,
               spec.align == '>'   ? Align::kRight
               : spec.align == '^' ? Align::kCenter
                                   : Align::kLeft);
}

Spec parse_spec(std::string_view text) {
  Spec spec;
  size_t at = 0;
  const auto is_align = [](char c) { return c == '<' || c == '>' || c == '^' || c == '='; };
  const auto peek = [&] { return at < text.size() ? text[at] : '\0'; };
  if (!text.empty()) {
    size_t behind = 0;
    next_char(text, behind);
    if (behind < text.size() && is_align(text[behind])) {
      spec.fill = text.substr(0, behind);
      spec.align = text[behind];
      at = behind + 1;
    } else if (is_align(text[0])) {
      spec.align = text[at++];
    }
  }
  if (peek() == '+' || peek() == '-' || peek() == ' ') spec.sign = text[at++];
  if (peek() == '#') {
    spec.is_alternate = true;
    ++at;
  }
  if (peek() == '0') {
    if (spec.align == '\0') {
      spec.fill = "0";
      spec.align = '=';
    }
    ++at;
  }
  spec.width = read_number(text, at);
  if (peek() == ',' || peek() == '_') spec.grouping = text[at++];
  if (peek() == '.') {
    ++at;
    const size_t begin = at;
    spec.precision = read_number(text, at);
    if (at == begin) fail("Format specifier missing precision");
  }
  if (at < text.size()) spec.type = text[at++];
  if (at < text.size()) fail("Invalid format specifier");
  return spec;
}

std::string format_value(const Value& value, const std::string& spec_text) {
  if (spec_text.empty()) return to_string(value);
  Spec spec = parse_spec(spec_text);
  const auto check_type = [&](std::string_view types) {
    if (spec.type != '\0' && types.find(spec.type) == std::string_view::npos) {
      fail("Unknown format code '{}' for object of type '{}'", spec.type, type_name(value));
    }
  };
  if (value.is_string()) {
    check_type("s");
    if (spec.align == '=') {
      if (spec_text.find('=') != std::string::npos) {
        fail("'=' alignment not allowed in string format specifier");
      }
      spec.align = '<';
    }
    if (spec.sign != '-') fail("Sign not allowed in string format specifier");
    return format_text(value.text(), spec);
  }
  if (value.is_integral()) {
    check_type("bcdoxXneEfFgG%");
    return format_integer(value.integer(), spec);
  }
  if (value.is(Kind::kFloat)) {
    check_type("eEfFgGn%");
    return format_float(value.number(), spec);
  }
  fail("unsupported format string passed to {}.__format__", type_name(value));
}

/// The fields of str.format.
class BraceFormatter {
 public:
  explicit BraceFormatter(const Args& args) : args_(args) {}

  std::string run(std::string_view format, int depth) {
    if (depth > 2) fail("Max string recursion exceeded");
    std::string out;
    for (size_t at = 0; at < format.size();) {
      const char c = format[at];
      const bool is_double = at + 1 < format.size() && format[at + 1] == c;
      if ((c == '{' || c == '}') && is_double) {
        out += c;
        at += 2;
      } else if (c == '}') {
        fail("Single '}}' encountered in format string");
      } else if (c == '{') {
        out += field(format, at, depth);
      } else {
        out += c;
        ++at;
      }
      expect_growing(out.size());
    }
    return out;
  }

 private:
  std::string field(std::string_view format, size_t& at, int depth) {
    count_steps(1);
    size_t end = at + 1;
    int open = 1, brackets = 0;
    size_t colon = std::string_view::npos;
    for (; end < format.size() && open > 0; ++end) {
      const char c = format[end];
      if (c == '{') ++open;
      if (c == '}') --open;
      if (c == '[') ++brackets;
      if (c == ']') --brackets;
      if (c == ':' && brackets <= 0 && colon == std::string_view::npos) colon = end;
    }
    if (open > 0) fail("expected '}}' before end of string");
    const size_t close = end - 1;
    const size_t name_end = std::min(colon, close);
    std::string_view name = format.substr(at + 1, name_end - at - 1);
    const std::string_view spec =
        colon == std::string_view::npos ? "" : format.substr(colon + 1, close - colon - 1);
    at = end;
    char conversion = '\0';
    if (const size_t mark = name.rfind('!'); mark != std::string_view::npos) {
      if (mark + 2 != name.size()) fail("expected a conversion character after '!'");
      conversion = name.back();
      name = name.substr(0, mark);
    }
    if (name.find('{') != std::string_view::npos) fail("unexpected '{{' in field name");
    Value value = lookup(name);
    if (conversion == 's') value = Value(to_string(value));
    if (conversion == 'r') value = Value(to_repr(value));
    if (conversion != '\0' && conversion != 's' && conversion != 'r') {
      fail("Unknown conversion specifier '{}'", conversion);
    }
    return format_value(value, run(spec, depth + 1));
  }

  Value lookup(std::string_view name) {
    const size_t first_end = std::min(name.find_first_of(".["), name.size());
    Value value = first(name.substr(0, first_end));
    for (size_t at = first_end; at < name.size();) {
      if (name[at] == '.') {
        const size_t end = std::min(name.find_first_of(".[", at + 1), name.size());
        value = get_attribute(value, name.substr(at + 1, end - at - 1));
        at = end;
      } else if (name[at] == '[') {
        const size_t end = name.find(']', at);
        if (end == std::string_view::npos) fail("Missing ']' in format string");
        value = get_item(value, key_of(name.substr(at + 1, end - at - 1)));
        at = end + 1;
      } else {
        fail("Only '.' or '[' may follow ']' in format field specifier");
      }
    }
    return value;
  }

  static Value key_of(std::string_view text) {
    if (text.empty()) fail("Empty attribute in format string");
    size_t at = 0;
    const int64_t number = read_number(text, at);
    return at == text.size() ? Value(number) : Value(text);
  }

  Value first(std::string_view name) {
    const bool is_automatic = name.empty();
    const Value key = is_automatic ? Value(next_++) : key_of(name);
    if (key.is_string()) {
      for (const auto& [each, value] : args_.keyword) {
        if (each == name) return value;
      }
      fail("str.format: no argument '{}'", name);
    }
    check_numbering(is_automatic);
    const int64_t index = key.integer();
    if (index >= static_cast<int64_t>(args_.positional.size())) {
      fail("Replacement index {} out of range for positional args tuple", index);
    }
    return args_.positional[static_cast<size_t>(index)];
  }

  void check_numbering(bool is_automatic) {
    const int now = is_automatic ? 1 : 2;
    if (manual_ != 0 && manual_ != now) {
      fail("cannot switch between manual field specification and automatic field numbering");
    }
    manual_ = now;
  }

  const Args& args_;
  int64_t next_ = 0;
  int manual_ = 0;  ///< 1: fields without numbers, 2: with them
};

/// The values of "%s %s" % values, in turn or by name.
class PercentValues {
 public:
  explicit PercentValues(const Value& values) : values_(values) {}

  const Value& next() {
    if (values_.is(Kind::kTuple)) {
      if (num_taken_ == values_.items().size()) fail("not enough arguments for format string");
      return values_.items()[num_taken_++];
    }
    if (num_taken_++ > 0) fail("not enough arguments for format string");
    return values_;
  }

  const Value& named(std::string_view name) {
    if (!values_.is(Kind::kDict)) fail("format requires a mapping");
    const Value* value = values_.dict().find(name);
    if (value == nullptr) fail("no value for the key '{}' of a format", name);
    return *value;
  }

  void finish() const {
    const bool is_mapping = values_.is(Kind::kDict) || values_.is(Kind::kList) ||
                            values_.is(Kind::kRange) || values_.is_undefined();
    const size_t count = values_.is(Kind::kTuple) ? values_.items().size() : 1;
    if (!is_mapping && num_taken_ < count) {
      fail("not all arguments converted during string formatting");
    }
  }

 private:
  const Value& values_;
  size_t num_taken_ = 0;
};

std::string percent_integer(const Value& value, Spec spec) {
  int64_t number = 0;
  if (value.is_integral()) {
    number = value.integer();
  } else if (value.is(Kind::kFloat) && (spec.type == 'd')) {
    const double d = std::trunc(value.number());
    if (!(d >= -0x1p63 && d < 0x1p63)) fail("an integer beyond 64 bits");
    number = static_cast<int64_t>(d);
  } else {
    fail("%{} format: a real number is required, not {}", spec.type, type_name(value));
  }
  const int64_t min_digits = std::exchange(spec.precision, -1);
  if (min_digits < 0) return format_integer(number, spec);
  const uint64_t size =
      number < 0 ? 0 - static_cast<uint64_t>(number) : static_cast<uint64_t>(number);
  return padded_number(
      number < 0, "", align(integer_digits(size, spec.type), min_digits, "0", Align::kRight), spec);
}

std::string percent_value(const Value& value, Spec spec) {
  switch (spec.type) {
    case 's':
      return format_text(to_string(value), spec);
    case 'r':
    case 'a':
      return format_text(to_repr(value), spec);
    case 'i':
    case 'u':
      spec.type = 'd';
      [[fallthrough]];
    case 'd':
    case 'o':
    case 'x':
    case 'X':
      return percent_integer(value, spec);
    case 'c':
      if (value.is_string() && value.string().num_chars == 1)
        return format_text(value.text(), spec);
      if (!value.is_integral()) fail("%c requires int or char");
      spec.precision = -1;
      return format_integer(value.integer(), spec);
    case 'e':
    case 'E':
    case 'f':
    case 'F':
    case 'g':
    case 'G':
      if (!value.is_number()) fail("must be real number, not {}", type_name(value));
      return format_float(value.number(), spec);
    default:
      fail("unsupported format character '{}'", spec.type);
  }
}

}  // namespace

std::string format_braces(std::string_view format, const Args& args) {
  count_steps(static_cast<int64_t>(format.size() / 16));
  return BraceFormatter(args).run(format, 0);
}

std::string format_percent(std::string_view format, const Value& values) {
  count_steps(static_cast<int64_t>(format.size() / 16));
  PercentValues all(values);
  std::string out;
  for (size_t at = 0; at < format.size();) {
    if (format[at] != '%') {
      out += format[at++];
      continue;
    }
    count_steps(1);
    ++at;
    const auto peek = [&] { return at < format.size() ? format[at] : '\0'; };
    const Value* named = nullptr;
    if (peek() == '(') {
      const size_t close = format.find(')', at);
      if (close == std::string_view::npos) fail("incomplete format key");
      named = &all.named(format.substr(at + 1, close - at - 1));
      at = close + 1;
    }
    Spec spec;
    spec.align = '>';
    for (; std::string_view("+- #0").find(peek()) != std::string_view::npos && peek() != '\0';
         ++at) {
      if (peek() == '-') spec.align = '<';
      if (peek() == '+' || (peek() == ' ' && spec.sign != '+')) spec.sign = peek();
      if (peek() == '#') spec.is_alternate = true;
      if (peek() == '0' && spec.align != '<') spec.align = '=';
    }
    const auto number = [&]() -> int64_t {
      if (peek() != '*') return read_number(format, at);
      ++at;
      return to_index(all.next(), "* wants int");
    };
    spec.width = number();
    if (spec.width < 0) {
      spec.align = '<';
      spec.width = -spec.width;
    }
    if (peek() == '.') {
      ++at;
      spec.precision = std::max<int64_t>(0, number());
    }
    while (peek() == 'l' || peek() == 'h' || peek() == 'L') ++at;
    if (at == format.size()) fail("incomplete format");
    spec.type = format[at++];
    if (spec.type == '%') {
      out += '%';
      continue;
    }
    const bool is_text = std::string_view("srac").find(spec.type) != std::string_view::npos;
    if (spec.align == '=') {
      if (is_text) {
        spec.align = '>';
      } else {
        spec.fill = "0";
      }
    }
    out += percent_value(named != nullptr ? *named : all.next(), spec);
    expect_growing(out.size());
  }
  all.finish();
  return out;
}

}  // namespace tessera::text::jinja
