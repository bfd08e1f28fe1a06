// Filters whose value is a text, a number or anything alone.

#include <charconv>
#include <cmath>
#include <cstdlib>

#include "apps/text/jinja/filters.h"
#include "apps/text/jinja/strings.h"
#include "apps/text/jinja/unicode.h"

namespace tessera::text::jinja {
namespace {

/// soft_str: a string stays what it is.
Value soft_string(const Value& value) {
  return value.is_string() ? value : Value(to_string(value));
}

template <std::string (*kFunction)(std::string_view)>
Value mapped(Interpreter&, const Args& args) {
  ArgReader reader(args, "filter");
  const Value text = soft_string(reader.required("s"));
  reader.finish();
  count_steps(static_cast<int64_t>(text.text().size() / 8));
  expect_nbytes(static_cast<int64_t>(text.text().size() * 3));
  return Value(kFunction(text.text()), text.is_markup());
}

/// Words begin behind white space and some signs; only their first letters are large.
std::string title(std::string_view text) {
  std::string out;
  bool is_begin = true;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_char(text, at);
    const bool is_between =
        c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || has_property(c, kIsSpace);
    if (is_between) {
      is_begin = true;
      out += text.substr(begin, at - begin);
      continue;
    }
    if (is_begin) {
      out += to_upper(text.substr(begin, at - begin));
      is_begin = false;
      // The rest of the word as a whole: what a sigma becomes depends on what is around it.
      size_t end = at;
      while (end < text.size()) {
        size_t next = end;
        const char32_t d = next_char(text, next);
        if (d == '-' || d == '(' || d == '{' || d == '[' || d == '<' || has_property(d, kIsSpace)) {
          break;
        }
        end = next;
      }
      out += to_lower(text.substr(at, end - at));
      at = end;
    }
  }
  return out;
}

Value trim(Interpreter&, const Args& args) {
  ArgReader reader(args, "trim");
  const Value text = soft_string(reader.required("value"));
  const Value chars = reader.optional("chars", Value::none());
  reader.finish();
  count_steps(static_cast<int64_t>(text.text().size() / 32));
  const std::string_view result =
      chars.is_none() ? strip(text.text())
                      : strip_chars(text.text(), to_text(chars, "strip arg"), StripSide::kBoth);
  return Value(std::string(result), text.is_markup());
}

Value replace_filter(Interpreter&, const Args& args) {
  ArgReader reader(args, "replace");
  const std::string text = to_string(reader.required("s"));
  const std::string old = to_string(reader.required("old"));
  const std::string by = to_string(reader.required("new"));
  const Value count = reader.optional("count", Value::none());
  reader.finish();
  return replace(text, old, by, count.is_none() ? -1 : to_index(count, "replace"));
}

Value default_value(Interpreter&, const Args& args) {
  ArgReader reader(args, "default");
  const Value value = reader.required("value");
  const Value otherwise = reader.optional("default_value", Value(""));
  const bool is_for_false = is_true(reader.optional("boolean", Value(false)));
  reader.finish();
  return value.is_undefined() || (is_for_false && !is_true(value)) ? otherwise : value;
}

Value string_filter(Interpreter&, const Args& args) {
  ArgReader reader(args, "string");
  const Value value = soft_string(reader.required("s"));
  reader.finish();
  return value;
}

Value safe(Interpreter&, const Args& args) {
  ArgReader reader(args, "safe");
  const Value value = reader.required("value");
  reader.finish();
  return Value(to_string(value), true);
}

template <bool kIsForced>
Value escape(Interpreter&, const Args& args) {
  ArgReader reader(args, "escape");
  const Value value = reader.required("s");
  reader.finish();
  if (value.is_markup() && !kIsForced) return value;
  const std::string text = to_string(value);
  expect_nbytes(static_cast<int64_t>(text.size() * 5));
  return Value(escape_html(text), true);
}

Value tojson(Interpreter&, const Args& args) {
  ArgReader reader(args, "tojson");
  const Value value = reader.required("x");
  JsonStyle style;
  style.ensure_ascii = is_true(reader.optional("ensure_ascii", Value(false)));
  const Value indent = reader.optional("indent", Value::none());
  const Value separators = reader.optional("separators", Value::none());
  style.sort_keys = is_true(reader.optional("sort_keys", Value(false)));
  reader.finish();
  if (!indent.is_none()) {
    style.is_indented = true;
    style.item_separator = ",";
    if (indent.is_string()) {
      style.indent = indent.text();
    } else {
      const int64_t count = to_index(indent, "indent");
      expect_nbytes(count);
      style.indent = std::string(static_cast<size_t>(std::max<int64_t>(0, count)), ' ');
    }
  }
  if (!separators.is_none()) {
    const std::vector<Value> both = to_vector(separators);
    if (both.size() != 2) fail("tojson: expected two separators, got {}", both.size());
    style.item_separator = to_text(both[0], "separator");
    style.key_separator = to_text(both[1], "separator");
  }
  return to_json(value, style);
}

Value indent(Interpreter&, const Args& args) {
  ArgReader reader(args, "indent");
  const Value text = reader.required("s");
  const Value width = reader.optional("width", Value(int64_t{4}));
  const bool first = is_true(reader.optional("first", Value(false)));
  const bool blank = is_true(reader.optional("blank", Value(false)));
  reader.finish();
  std::string margin;
  if (width.is_string()) {
    margin = width.text();
  } else {
    const int64_t count = std::max<int64_t>(0, to_index(width, "indent"));
    expect_nbytes(count);
    margin.assign(static_cast<size_t>(count), ' ');
  }
  const std::string whole = to_text(text, "indent") + "\n";
  const auto lines = split_lines(whole, false);
  expect_nbytes(product(static_cast<int64_t>(lines.size()), static_cast<int64_t>(margin.size())));
  std::string out = first ? margin : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += "\n";
    if (i > 0 && (blank || !lines[i].empty())) out += margin;
    out += lines[i];
  }
  return Value(std::move(out), text.is_markup());
}

Value center(Interpreter&, const Args& args) {
  ArgReader reader(args, "center");
  const Value text = soft_string(reader.required("value"));
  const int64_t width = to_index(reader.optional("width", Value(int64_t{80})), "center");
  reader.finish();
  return Value(align(text.text(), width, " ", Align::kCenter), text.is_markup());
}

Value truncate(Interpreter&, const Args& args) {
  ArgReader reader(args, "truncate");
  const Value value = reader.required("s");
  const int64_t max = to_index(reader.optional("length", Value(int64_t{255})), "truncate");
  const bool kills_words = is_true(reader.optional("killwords", Value(false)));
  const std::string end = to_text(reader.optional("end", Value("...")), "truncate");
  const Value leeway_value = reader.optional("leeway", Value::none());
  const int64_t leeway = leeway_value.is_none() ? 5 : to_index(leeway_value, "truncate");
  reader.finish();
  const auto end_length = static_cast<int64_t>(count_chars(end));
  if (max < end_length) fail("expected length >= {}, got {}", end_length, max);
  if (leeway < 0) fail("expected leeway >= 0, got {}", leeway);
  if (length(value) <= max + leeway) return value;  // whatever has a length
  const std::string& text = to_text(value, "truncate");
  count_steps(static_cast<int64_t>(text.size() / 32));
  std::string kept = text.substr(
      0, byte_of_char(text, static_cast<size_t>(max - end_length), value.string().is_ascii()));
  if (!kills_words && kept.rfind(' ') != std::string::npos) kept.resize(kept.rfind(' '));
  return Value(kept + end, value.is_markup());
}

Value wordcount(Interpreter&, const Args& args) {
  ArgReader reader(args, "wordcount");
  const Value text = soft_string(reader.required("s"));
  reader.finish();
  int64_t count = 0;
  bool is_in_word = false;
  count_steps(static_cast<int64_t>(text.text().size() / 8));
  for (size_t at = 0; at < text.text().size();) {
    const char32_t c = next_char(text.text(), at);
    const bool is_word = c == '_' || has_property(c, kIsAlnum);
    if (is_word && !is_in_word) ++count;
    is_in_word = is_word;
  }
  return count;
}

Value format_filter(Interpreter&, const Args& args) {
  if (args.positional.empty()) fail("format() missing required positional argument: 'value'");
  const Value text = soft_string(args.positional[0]);
  if (args.positional.size() > 1 && !args.keyword.empty()) {
    fail("can't handle positional and keyword arguments at the same time");
  }
  if (args.keyword.empty()) {
    return Value(format_percent(text.text(),
                                Value::tuple({args.positional.begin() + 1, args.positional.end()})),
                 text.is_markup());
  }
  auto dict = std::make_shared<DictObject>();
  for (const auto& [key, value] : args.keyword) dict->set(Value(key), value);
  return Value(format_percent(text.text(), make_dict(std::move(dict))), text.is_markup());
}

std::string url_quote(std::string_view text, bool is_query) {
  constexpr std::string_view kSafe =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-~";
  std::string out;
  count_steps(static_cast<int64_t>(text.size()));
  for (const char c : text) {
    if (kSafe.find(c) != std::string_view::npos || (c == '/' && !is_query)) {
      out += c;
    } else if (c == ' ' && is_query) {
      out += '+';
    } else {
      out += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
  return out;
}

Value urlencode(Interpreter&, const Args& args) {
  ArgReader reader(args, "urlencode");
  const Value value = reader.required("value");
  reader.finish();
  if (value.is_string() || !is_iterable(value)) {
    const std::string text = to_string(value);
    expect_nbytes(static_cast<int64_t>(text.size() * 3));
    return url_quote(text, false);
  }
  std::string out;
  const auto add = [&](const Value& key, const Value& each) {
    if (!out.empty()) out += '&';
    out += url_quote(to_string(key), true) + "=" + url_quote(to_string(each), true);
    expect_nbytes(static_cast<int64_t>(out.size()));
  };
  if (value.is(Kind::kDict)) {
    for (const auto& [key, each] : value.dict().items) add(key, each);
    return out;
  }
  for (const Value& item : to_vector(value)) {
    const std::vector<Value> pair = to_vector(item);
    if (pair.size() != 2) fail("urlencode: expected pairs, got {} values", pair.size());
    add(pair[0], pair[1]);
  }
  return out;
}

Value xmlattr(Interpreter&, const Args& args) {
  ArgReader reader(args, "xmlattr");
  const Value dict = reader.required("d");
  const bool has_space = is_true(reader.optional("autospace", Value(true)));
  reader.finish();
  if (!dict.is(Kind::kDict)) fail("xmlattr: expected dict, got {}", type_name(dict));
  std::string out;
  for (const auto& [key, value] : dict.dict().items) {
    if (value.is_none() || value.is_undefined()) continue;
    const std::string& name = to_text(key, "xmlattr");
    if (name.find_first_of(" \t\n\r\f\v/>=") != std::string::npos) {
      fail("Invalid character in attribute name: {}", repr_of_string(name));
    }
    const std::string text = value.is_markup() ? value.text() : escape_html(to_string(value));
    out += (out.empty() ? "" : " ") + escape_html(name) + "=\"" + text + "\"";
    expect_nbytes(static_cast<int64_t>(out.size()));
  }
  return has_space && !out.empty() ? " " + out : out;
}

Value filesizeformat(Interpreter&, const Args& args);

Value attr(Interpreter&, const Args& args) {
  ArgReader reader(args, "attr");
  const Value object = reader.required("obj");
  const std::string name = to_text(reader.required("name"), "attr");
  reader.finish();
  // Attributes only: a dict's keys are none.
  if (!object.is(Kind::kDict)) return get_attribute(object, name);
  const Value method = find_method(object, name);
  if (!method.is_missing()) return method;
  return Value::undefined(fmt::format("'dict object' has no attribute '{}'", name));
}

/// What float() takes of a text: digits with single underscores between them, a sign, infinities.
bool parse_float(std::string_view text, double& value) {
  count_steps(static_cast<int64_t>(text.size() / 8));
  text = strip(text);
  std::string digits;
  char before = '\0';
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, at);
    const int digit = decimal_value(c);
    if (c == '_') {
      const bool has_digit_behind = at < text.size() && text[at] >= '0' && text[at] <= '9';
      if (before < '0' || before > '9' || !has_digit_behind) return false;
      continue;
    }
    if (digit < 0 && c >= 0x80) return false;
    before = digit >= 0 ? static_cast<char>('0' + digit) : static_cast<char>(c);
    digits += before;
  }
  const size_t sign = !digits.empty() && (digits[0] == '+' || digits[0] == '-') ? 1 : 0;
  const std::string word = to_lower(std::string_view(digits).substr(sign));
  const bool is_word = word == "inf" || word == "infinity" || word == "nan";
  if (word.empty()) return false;
  if (!is_word && word.find_first_not_of("0123456789.e+-") != std::string::npos) return false;
  char* end = nullptr;
  value = std::strtod(digits.c_str(), &end);
  return end == digits.c_str() + digits.size();
}

/// What int() takes of a text.
bool parse_integer(std::string_view text, int64_t base, int64_t& value) {
  if (base != 0 && (base < 2 || base > 36)) fail("int() base must be >= 2 and <= 36, or 0");
  count_steps(static_cast<int64_t>(text.size() / 8));
  text = strip(text);
  std::string digits;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, at);
    const int digit = decimal_value(c);
    if (digit < 0 && c >= 0x80) return false;
    digits += digit >= 0 ? static_cast<char>('0' + digit) : static_cast<char>(c);
  }
  std::string_view rest = digits;
  const bool is_negative = rest.starts_with('-');
  if (rest.starts_with('-') || rest.starts_with('+')) rest.remove_prefix(1);
  const char mark = rest.size() > 2 && rest[0] == '0' ? static_cast<char>(rest[1] | 0x20) : '\0';
  const int64_t marked = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
  bool has_prefix = false;
  if (marked != 0 && (base == 0 || base == marked)) {
    rest.remove_prefix(2);
    base = marked;
    has_prefix = true;
  }
  if (base == 0) {
    if (rest.starts_with('0') && rest.find_first_not_of("0_") != std::string_view::npos)
      return false;
    base = 10;
  }
  uint64_t size = 0;
  bool is_too_large = false, may_have_underscore = has_prefix, is_digit_last = false;
  for (const char c : rest) {
    if (c == '_') {
      if (!may_have_underscore) return false;
      may_have_underscore = is_digit_last = false;
      continue;
    }
    const int digit = c >= '0' && c <= '9'                     ? c - '0'
                      : (c | 0x20) >= 'a' && (c | 0x20) <= 'z' ? (c | 0x20) - 'a' + 10
                                                               : 99;
    if (digit >= base) return false;
    is_too_large = is_too_large ||
                   __builtin_mul_overflow(size, static_cast<uint64_t>(base), &size) ||
                   __builtin_add_overflow(size, static_cast<uint64_t>(digit), &size);
    may_have_underscore = is_digit_last = true;
  }
  if (!is_digit_last) return false;
  const uint64_t limit = static_cast<uint64_t>(INT64_MAX) + (is_negative ? 1 : 0);
  if (is_too_large || size > limit) fail("an integer beyond 64 bits");
  value = static_cast<int64_t>(is_negative ? 0 - size : size);
  return true;
}

/// int() of a float; false where Python cannot.
bool truncate_float(double d, int64_t& value) {
  if (std::isnan(d) || std::isinf(d)) return false;
  if (!(d >= -0x1p63 && d < 0x1p63)) fail("an integer beyond 64 bits");
  value = static_cast<int64_t>(d);
  return true;
}

Value int_filter(Interpreter&, const Args& args) {
  ArgReader reader(args, "int");
  const Value value = reader.required("value");
  const Value otherwise = reader.optional("default", Value(int64_t{0}));
  const int64_t base = to_index(reader.optional("base", Value(int64_t{10})), "int");
  reader.finish();
  if (value.is_undefined()) throw TemplateError(value.as<UndefinedObject>().message);
  int64_t result = 0;
  double d = 0;
  if (value.is_integral()) return value.integer();
  if (value.is(Kind::kFloat)) {
    if (std::isinf(value.number())) fail("cannot convert float infinity to integer");
    return truncate_float(value.number(), result) ? Value(result) : otherwise;
  }
  if (!value.is_string()) return otherwise;
  if (parse_integer(value.text(), base, result)) return result;
  return parse_float(value.text(), d) && truncate_float(d, result) ? Value(result) : otherwise;
}

Value float_filter(Interpreter&, const Args& args) {
  ArgReader reader(args, "float");
  const Value value = reader.required("value");
  const Value otherwise = reader.optional("default", Value(0.0));
  reader.finish();
  if (value.is_undefined()) throw TemplateError(value.as<UndefinedObject>().message);
  double d = 0;
  if (value.is_number()) return value.number();
  return value.is_string() && parse_float(value.text(), d) ? Value(d) : otherwise;
}

Value abs_filter(Interpreter&, const Args& args) {
  ArgReader reader(args, "abs");
  const Value value = reader.required_positional();
  reader.finish();
  if (value.is(Kind::kFloat)) return std::fabs(value.number());
  if (value.is_integral()) return value.integer() < 0 ? negate(value) : Value(value.integer());
  fail("bad operand type for abs(): '{}'", type_name(value));
}

/// Python's round(): the nearest decimal, of two the even one, exactly.
double round_to(double value, int64_t precision) {
  if (!std::isfinite(value) || precision > 330) return value;
  if (precision < 0) {
    const double power = std::pow(10.0, static_cast<double>(-precision));
    if (std::isinf(power)) return std::copysign(0.0, value);
    const double scaled = value / power;
    double whole = std::round(scaled);
    if (std::fabs(scaled - whole) == 0.5) whole = 2.0 * std::round(scaled / 2.0);
    return whole * power;
  }
  char buffer[700];
  std::snprintf(buffer, sizeof(buffer), "%.*f", static_cast<int>(precision), value);
  return std::strtod(buffer, nullptr);
}

Value round_filter(Interpreter&, const Args& args) {
  ArgReader reader(args, "round");
  const Value value = reader.required("value");
  const int64_t precision = to_index(reader.optional("precision", Value(int64_t{0})), "round");
  const std::string method = to_text(reader.optional("method", Value("common")), "round");
  reader.finish();
  if (method != "common" && method != "ceil" && method != "floor") {
    fail("method must be common, ceil or floor");
  }
  if (value.is_undefined()) throw TemplateError(value.as<UndefinedObject>().message);
  if (!value.is_number()) fail("type {} doesn't define __round__ method", type_name(value));
  if (method == "common") {
    if (value.is(Kind::kFloat)) return round_to(value.number(), precision);
    if (precision >= 0) return value.integer();
    return static_cast<int64_t>(round_to(value.number(), precision));
  }
  const double power = std::pow(10.0, static_cast<double>(precision));
  const double scaled = value.number() * power;
  if (!std::isfinite(scaled)) fail("cannot convert float infinity or NaN to integer");
  return (method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / power;
}

Value filesizeformat(Interpreter&, const Args& args) {
  ArgReader reader(args, "filesizeformat");
  const Value value = reader.required("value");
  const bool is_binary = is_true(reader.optional("binary", Value(false)));
  reader.finish();
  double size = 0;
  if (value.is_number()) {
    size = value.number();
  } else if (!value.is_string() || !parse_float(value.text(), size)) {
    fail("could not convert to float: {}", to_repr(value));
  }
  const double base = is_binary ? 1024 : 1000;
  if (size == 1) return "1 Byte";
  if (size < base) return fmt::format("{} Bytes", static_cast<int64_t>(size));
  double unit = base;
  std::string_view letter = "kMGTPEZY";
  for (;; letter.remove_prefix(1)) {
    unit *= base;
    if (size < unit || letter.size() == 1) break;
  }
  const std::string prefix = is_binary && letter[0] == 'k' ? "K" : std::string(letter.substr(0, 1));
  return fmt::format("{:.1f} {}{}", base * size / unit, prefix, is_binary ? "iB" : "B");
}

constexpr NamedCallback kTextFilters[] = {
    {"abs", abs_filter},
    {"attr", attr},
    {"capitalize", mapped<capitalize>},
    {"center", center},
    {"d", default_value},
    {"default", default_value},
    {"e", escape<false>},
    {"escape", escape<false>},
    {"filesizeformat", filesizeformat},
    {"float", float_filter},
    {"forceescape", escape<true>},
    {"format", format_filter},
    {"indent", indent},
    {"int", int_filter},
    {"lower", mapped<to_lower>},
    {"replace", replace_filter},
    {"round", round_filter},
    {"safe", safe},
    {"string", string_filter},
    {"title", mapped<title>},
    {"tojson", tojson},
    {"trim", trim},
    {"truncate", truncate},
    {"upper", mapped<to_upper>},
    {"urlencode", urlencode},
    {"wordcount", wordcount},
    {"xmlattr", xmlattr},
};

}  // namespace

std::span<const NamedCallback> text_filters() {
  return kTextFilters;
}

}  // namespace tessera::text::jinja
