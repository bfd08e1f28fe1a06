// Methods of Python's str, list, tuple, dict and numbers.

#include <algorithm>
#include <limits>

#include "apps/text/jinja/function.h"
#include "apps/text/jinja/strings.h"
#include "apps/text/jinja/unicode.h"

namespace tessera::text::jinja {
namespace {

using Method = Value (*)(const Value& self, const Args& args);

struct MethodObject : FunctionObject {
  MethodObject(std::string of, Value object, Method to)
      : FunctionObject(std::move(of)), self(std::move(object)), method(to) {
    depth = depth_over({self});
  }
  Value call(Interpreter&, Args args) const override {
    count_steps(self.is_string() ? static_cast<int64_t>(self.text().size() / 8) : 1);
    return method(self, args);
  }
  std::string describe() const override {
    return fmt::format("<built-in method {} of {} object at 0x0>", name, type_name(self));
  }
  Value self;
  Method method;
};

/// The result as the kind of string that `self` is.
Value same(const Value& self, std::string text) {
  return Value(std::move(text), self.is_markup());
}

template <std::string (*kFunction)(std::string_view)>
Value mapped(const Value& self, const Args& args) {
  ArgReader(args, "str method").finish();
  expect_nbytes(static_cast<int64_t>(self.text().size() * 3));
  return same(self, kFunction(self.text()));
}

template <StripSide kSide>
Value strip_method(const Value& self, const Args& args) {
  ArgReader reader(args, "strip");
  const Value chars = reader.positional_only(Value::none());
  reader.finish();
  if (chars.is_none()) return same(self, std::string(strip(self.text(), kSide)));
  return same(self, std::string(strip_chars(self.text(), to_text(chars, "strip arg"), kSide)));
}

template <bool kIsRight>
Value split_method(const Value& self, const Args& args) {
  ArgReader reader(args, "split");
  const Value separator = reader.optional("sep", Value::none());
  const int64_t max_splits = to_index(reader.optional("maxsplit", Value(int64_t{-1})), "split");
  reader.finish();
  const std::string* text = separator.is_none() ? nullptr : &to_text(separator, "must be str");
  if (text != nullptr && text->empty()) fail("empty separator");
  std::vector<Value> parts;
  Charge charge(0);
  for (const std::string_view part : split(self.text(), text, max_splits, kIsRight)) {
    charge.grow(3 * sizeof(Value));
    parts.push_back(same(self, std::string(part)));
  }
  return Value::list(std::move(parts));
}

Value splitlines_method(const Value& self, const Args& args) {
  ArgReader reader(args, "splitlines");
  const bool keeps = is_true(reader.optional("keepends", Value(false)));
  reader.finish();
  std::vector<Value> lines;
  Charge charge(0);
  for (const std::string_view line : split_lines(self.text(), keeps)) {
    charge.grow(3 * sizeof(Value));
    lines.push_back(same(self, std::string(line)));
  }
  return Value::list(std::move(lines));
}

/// The part [start, end) that find, count, startswith ... look at; false if start is behind it all.
bool window(const Value& self, ArgReader& reader, std::string_view& text, size_t& first_byte) {
  const auto bound = [&](int64_t otherwise) {
    const Value value = reader.positional_only(Value::none());
    const auto count = static_cast<int64_t>(self.string().num_chars);
    int64_t at = value.is_none() ? otherwise : to_index(value, "slice indices");
    if (at < 0) at = std::max<int64_t>(0, at + count);
    return at;
  };
  const auto count = static_cast<int64_t>(self.string().num_chars);
  const int64_t begin = bound(0), end = std::min(bound(count), count);
  if (begin > count || begin > end) return false;
  const bool is_ascii = self.string().is_ascii();
  first_byte = byte_of_char(self.text(), static_cast<size_t>(begin), is_ascii);
  const size_t last_byte = byte_of_char(self.text(), static_cast<size_t>(end), is_ascii);
  text = std::string_view(self.text()).substr(first_byte, last_byte - first_byte);
  return true;
}

template <bool kIsEnd>
Value starts_or_ends(const Value& self, const Args& args) {
  ArgReader reader(args, kIsEnd ? "endswith" : "startswith");
  const Value what = reader.required_positional();
  std::string_view text;
  size_t first_byte = 0;
  const bool is_inside = window(self, reader, text, first_byte);
  reader.finish();
  const auto matches = [&](const Value& each) {
    const std::string& affix = to_text(each, kIsEnd ? "endswith arg" : "startswith arg");
    return is_inside && (kIsEnd ? text.ends_with(affix) : text.starts_with(affix));
  };
  if (!what.is(Kind::kTuple)) return Value(matches(what));
  return Value(std::any_of(what.items().begin(), what.items().end(), matches));
}

/// The index of the first or last occurrence in characters; -1 if there is none.
template <bool kIsLast, bool kIsIndex>
Value find_method_text(const Value& self, const Args& args) {
  ArgReader reader(args, kIsIndex ? "index" : "find");
  const std::string what = to_text(reader.required_positional(), "must be str");
  std::string_view text;
  size_t first_byte = 0;
  size_t found = std::string_view::npos;
  if (window(self, reader, text, first_byte))
    found = kIsLast ? rfind_text(text, what) : jinja::find_text(text, what);
  reader.finish();
  if (found == std::string_view::npos) {
    if (kIsIndex) fail("substring not found");
    return int64_t{-1};
  }
  return static_cast<int64_t>(
      count_chars(std::string_view(self.text()).substr(0, first_byte + found)));
}

Value count_text(const Value& self, const Args& args) {
  ArgReader reader(args, "count");
  const std::string what = to_text(reader.required_positional(), "must be str");
  std::string_view text;
  size_t first_byte = 0;
  const bool is_inside = window(self, reader, text, first_byte);
  reader.finish();
  if (!is_inside) return int64_t{0};
  if (what.empty()) return static_cast<int64_t>(count_chars(text) + 1);
  int64_t count = 0;
  for (size_t at = jinja::find_text(text, what); at != std::string_view::npos;
       at = jinja::find_text(text, what, at + what.size())) {
    ++count;
  }
  return count;
}

Value replace_method(const Value& self, const Args& args) {
  ArgReader reader(args, "replace");
  const std::string old = to_text(reader.required_positional(), "replace arg 1");
  const std::string by = to_text(reader.required_positional(), "replace arg 2");
  const int64_t count = to_index(reader.positional_only(Value(int64_t{-1})), "replace");
  reader.finish();
  return same(self, replace(self.text(), old, by, count));
}

Value join_method(const Value& self, const Args& args) {
  ArgReader reader(args, "join");
  const Value items = reader.required_positional();
  reader.finish();
  std::string text;
  bool is_first = true;
  const auto iterator = iterate(items);
  for (Value item; iterator->next(item);) {
    if (!item.is_string()) {
      fail("sequence item: expected str instance, {} found", type_name(item));
    }
    if (!is_first) text += self.text();
    is_first = false;
    text += item.text();
    count_steps(1 + static_cast<int64_t>(item.text().size() / 32));
    expect_growing(text.size());
  }
  return same(self, std::move(text));
}

template <Align kAlign>
Value align_method(const Value& self, const Args& args) {
  ArgReader reader(args, "center");
  const int64_t width = to_index(reader.required_positional(), "width");
  const std::string fill = to_text(reader.positional_only(Value(" ")), "fill character");
  reader.finish();
  if (count_chars(fill) != 1) fail("The fill character must be exactly one character long");
  return same(self, align(self.text(), width, fill, kAlign));
}

Value zfill_method(const Value& self, const Args& args) {
  ArgReader reader(args, "zfill");
  const int64_t width = to_index(reader.required_positional(), "width");
  reader.finish();
  const std::string& text = self.text();
  const bool has_sign = text.starts_with('+') || text.starts_with('-');
  const std::string sign = text.substr(0, has_sign ? 1 : 0);
  return same(self, sign + align(text.substr(sign.size()),
                                 width - static_cast<int64_t>(sign.size()), "0", Align::kRight));
}

template <bool kIsSuffix>
Value remove_affix(const Value& self, const Args& args) {
  ArgReader reader(args, kIsSuffix ? "removesuffix" : "removeprefix");
  const std::string affix = to_text(reader.required_positional(), "must be str");
  reader.finish();
  const std::string& text = self.text();
  if (kIsSuffix && !affix.empty() && text.ends_with(affix)) {
    return same(self, text.substr(0, text.size() - affix.size()));
  }
  return same(self, !kIsSuffix && text.starts_with(affix) ? text.substr(affix.size()) : text);
}

template <bool kIsLast>
Value partition_method(const Value& self, const Args& args) {
  ArgReader reader(args, "partition");
  const std::string separator = to_text(reader.required_positional(), "must be str");
  reader.finish();
  if (separator.empty()) fail("empty separator");
  const std::string& text = self.text();
  const size_t at = kIsLast ? rfind_text(text, separator) : jinja::find_text(text, separator);
  if (at == std::string::npos) {
    const Value empty = same(self, "");
    return kIsLast ? Value::tuple({empty, empty, self}) : Value::tuple({self, empty, empty});
  }
  return Value::tuple({same(self, text.substr(0, at)), same(self, separator),
                       same(self, text.substr(at + separator.size()))});
}

template <int kProperties>
Value all_chars(const Value& self, const Args& args) {
  ArgReader(args, "str method").finish();
  const std::string& text = self.text();
  for (size_t at = 0; at < text.size();) {
    if (!has_property(next_char(text, at), kProperties)) return Value(false);
  }
  return Value(!text.empty() || kProperties == kIsPrintable);
}

template <bool kIsUpperCase>
Value is_case(const Value& self, const Args& args) {
  ArgReader(args, "str method").finish();
  return Value(has_case(self.text(), kIsUpperCase));
}

Value is_title(const Value& self, const Args& args) {
  ArgReader(args, "istitle").finish();
  bool is_in_word = false, has_cased = false;
  for (size_t at = 0; at < self.text().size();) {
    const uint16_t properties = properties_of(next_char(self.text(), at));
    const bool is_large = (properties & (kIsUpper | kIsTitle)) != 0;
    const bool is_small = (properties & kIsLower) != 0;
    if ((is_large && is_in_word) || (is_small && !is_in_word)) return Value(false);
    is_in_word = is_large || is_small;
    has_cased = has_cased || is_in_word;
  }
  return Value(has_cased);
}

Value is_ascii(const Value& self, const Args& args) {
  ArgReader(args, "isascii").finish();
  return Value(self.string().is_ascii());
}

Value is_identifier(const Value& self, const Args& args) {
  ArgReader(args, "isidentifier").finish();
  bool holds = !self.text().empty();
  for (size_t at = 0; at < self.text().size() && holds;) {
    const bool is_first = at == 0;
    holds = has_property(next_char(self.text(), at), is_first ? kIsIdStart : kIsIdContinue);
  }
  return Value(holds);
}

Value expand_tabs(const Value& self, const Args& args) {
  ArgReader reader(args, "expandtabs");
  const int64_t width = to_index(reader.optional("tabsize", Value(int64_t{8})), "expandtabs");
  reader.finish();
  const auto num_tabs = std::count(self.text().begin(), self.text().end(), '\t');
  expect_nbytes(product(num_tabs, width));
  std::string out;
  int64_t column = 0;
  for (size_t at = 0; at < self.text().size();) {
    const char32_t c = next_char(self.text(), at);
    if (c == '\t') {
      const int64_t count = width > 0 ? width - column % width : 0;
      out.append(static_cast<size_t>(count), ' ');
      column += count;
    } else {
      append_char(out, c);
      column = c == '\n' || c == '\r' ? 0 : column + 1;
    }
  }
  return same(self, std::move(out));
}

Value format_method(const Value& self, const Args& args) {
  return same(self, format_braces(self.text(), args));
}

Value format_map_method(const Value& self, const Args& args) {
  ArgReader reader(args, "format_map");
  const Value map = reader.required_positional();
  reader.finish();
  if (!map.is(Kind::kDict)) fail("format_map() argument must be a mapping");
  Args named;
  for (const auto& [key, value] : map.dict().items) {
    if (key.is_string()) named.keyword.emplace_back(key.text(), value);
  }
  return same(self, format_braces(self.text(), named));
}

Value unsupported(const Value& self, const Args&) {
  fail("a method of {} that is not supported", type_name(self));
}

Value list_count(const Value& self, const Args& args) {
  ArgReader reader(args, "count");
  const Value what = reader.required_positional();
  reader.finish();
  int64_t count = 0;
  const auto items = iterate(self);
  for (Value item; items->next(item);) count += equal(item, what) ? 1 : 0;
  return count;
}

Value list_index(const Value& self, const Args& args) {
  ArgReader reader(args, "index");
  const Value what = reader.required_positional();
  int64_t begin = to_index(reader.positional_only(Value(int64_t{0})), "index");
  int64_t end =
      to_index(reader.positional_only(Value(std::numeric_limits<int64_t>::max())), "index");
  reader.finish();
  const int64_t count = length(self);
  if (begin < 0) begin = std::max<int64_t>(0, begin + count);
  if (end < 0) end += count;
  int64_t at = 0;
  const auto items = iterate(self);
  for (Value item; items->next(item) && at < end; ++at) {
    if (at >= begin && equal(item, what)) return at;
  }
  fail("{} is not in {}", to_repr(what), type_name(self));
}

Value copy(const Value& self, const Args& args) {
  ArgReader(args, "copy").finish();
  return self;
}

Value dict_get(const Value& self, const Args& args) {
  ArgReader reader(args, "get");
  const Value key = reader.required_positional();
  const Value otherwise = reader.positional_only(Value::none());
  reader.finish();
  const Value* value = self.dict().find(key);
  return value == nullptr ? otherwise : *value;
}

template <DictPart kPart>
Value dict_view(const Value& self, const Args& args) {
  ArgReader(args, "items").finish();
  return {Kind::kDictView, std::make_shared<DictViewObject>(self.share<DictObject>(), kPart)};
}

Value dict_fromkeys(const Value&, const Args& args) {
  ArgReader reader(args, "fromkeys");
  const Value keys = reader.required_positional();
  const Value value = reader.positional_only(Value::none());
  reader.finish();
  auto dict = std::make_shared<DictObject>();
  for (const Value& key : to_vector(keys)) dict->set(key, value);
  return make_dict(std::move(dict));
}

Value bit_length(const Value& self, const Args& args) {
  ArgReader(args, "bit_length").finish();
  const int64_t value = self.integer();
  uint64_t bits = value < 0 ? 0 - static_cast<uint64_t>(value) : static_cast<uint64_t>(value);
  int64_t count = 0;
  for (; bits != 0; bits >>= 1) ++count;
  return count;
}

Value is_integer(const Value& self, const Args& args) {
  ArgReader(args, "is_integer").finish();
  const double d = self.number();
  return Value(d - d == 0 && static_cast<double>(static_cast<int64_t>(d)) == d);
}

struct Entry {
  std::string_view name;
  Method method;
};

constexpr Entry kStrMethods[] = {
    {"capitalize", mapped<capitalize>},
    {"casefold", mapped<to_casefold>},
    {"center", align_method<Align::kCenter>},
    {"count", count_text},
    {"encode", unsupported},
    {"endswith", starts_or_ends<true>},
    {"expandtabs", expand_tabs},
    {"find", find_method_text<false, false>},
    {"format", format_method},
    {"format_map", format_map_method},
    {"index", find_method_text<false, true>},
    {"isalnum", all_chars<kIsAlnum>},
    {"isalpha", all_chars<kIsAlpha>},
    {"isascii", is_ascii},
    {"isdecimal", all_chars<kIsDecimal>},
    {"isdigit", all_chars<kIsDigit>},
    {"isidentifier", is_identifier},
    {"islower", is_case<false>},
    {"isnumeric", all_chars<kIsNumeric>},
    {"isprintable", all_chars<kIsPrintable>},
    {"isspace", all_chars<kIsSpace>},
    {"istitle", is_title},
    {"isupper", is_case<true>},
    {"join", join_method},
    {"ljust", align_method<Align::kLeft>},
    {"lower", mapped<to_lower>},
    {"lstrip", strip_method<StripSide::kLeft>},
    {"maketrans", unsupported},
    {"partition", partition_method<false>},
    {"removeprefix", remove_affix<false>},
    {"removesuffix", remove_affix<true>},
    {"replace", replace_method},
    {"rfind", find_method_text<true, false>},
    {"rindex", find_method_text<true, true>},
    {"rjust", align_method<Align::kRight>},
    {"rpartition", partition_method<true>},
    {"rsplit", split_method<true>},
    {"rstrip", strip_method<StripSide::kRight>},
    {"split", split_method<false>},
    {"splitlines", splitlines_method},
    {"startswith", starts_or_ends<false>},
    {"strip", strip_method<StripSide::kBoth>},
    {"swapcase", mapped<swap_case>},
    {"title", mapped<to_title>},
    {"translate", unsupported},
    {"upper", mapped<to_upper>},
    {"zfill", zfill_method},
};
constexpr Entry kListMethods[] = {{"count", list_count}, {"index", list_index}, {"copy", copy}};
constexpr Entry kTupleMethods[] = {{"count", list_count}, {"index", list_index}};
constexpr Entry kDictMethods[] = {{"get", dict_get},
                                  {"items", dict_view<DictPart::kItems>},
                                  {"keys", dict_view<DictPart::kKeys>},
                                  {"values", dict_view<DictPart::kValues>},
                                  {"copy", copy},
                                  {"fromkeys", dict_fromkeys}};
constexpr Entry kIntMethods[] = {{"bit_length", bit_length}};
constexpr Entry kFloatMethods[] = {{"is_integer", is_integer}};
/// What would change a value: not there for templates, but undefined even where a dict has the key.
constexpr std::string_view kListChanges[] = {"append", "clear",  "extend",  "insert",
                                             "pop",    "remove", "reverse", "sort"};
constexpr std::string_view kDictChanges[] = {"clear", "pop", "popitem", "setdefault", "update"};

template <class Entries>
Value bound(const Value& object, std::string_view name, const Entries& entries) {
  for (const Entry& entry : entries) {
    if (entry.name == name) {
      return {Kind::kFunction,
              std::make_shared<MethodObject>(std::string(name), object, entry.method)};
    }
  }
  return {};
}

template <class Names>
Value bound_or_unsafe(const Value& object, std::string_view name, const Value& method,
                      const Names& changes) {
  if (std::find(std::begin(changes), std::end(changes), name) == std::end(changes)) return method;
  return Value::undefined(
      fmt::format("access to attribute '{}' of '{}' object is unsafe.", name, type_name(object)));
}

Value number_attribute(const Value& object, std::string_view name) {
  const bool is_float = object.is(Kind::kFloat);
  const Value whole = is_float ? object : Value(object.integer());
  if (name == "real") return whole;
  if (name == "imag") return is_float ? Value(0.0) : Value(int64_t{0});
  if (!is_float && name == "numerator") return whole;
  if (!is_float && name == "denominator") return int64_t{1};
  return is_float ? bound(object, name, kFloatMethods) : bound(object, name, kIntMethods);
}

Value tuple_attribute(const Value& object, std::string_view name) {
  const auto& tuple = object.as<ListObject>();
  for (size_t i = 0; tuple.names != nullptr && i < tuple.names->size(); ++i) {
    if ((*tuple.names)[i] == name) return tuple.items[i];
  }
  return bound(object, name, kTupleMethods);
}

Value range_attribute(const Value& object, std::string_view name) {
  const auto& range = object.as<RangeObject>();
  if (name == "start") return range.start;
  if (name == "stop") return range.stop;
  if (name == "step") return range.step;
  return bound(object, name, kTupleMethods);
}

}  // namespace

Value find_method(const Value& object, std::string_view name) {
  switch (object.kind()) {
    case Kind::kString:
      return bound(object, name, kStrMethods);
    case Kind::kList:
      return bound_or_unsafe(object, name, bound(object, name, kListMethods), kListChanges);
    case Kind::kTuple:
      return tuple_attribute(object, name);
    case Kind::kDict:
      return bound_or_unsafe(object, name, bound(object, name, kDictMethods), kDictChanges);
    case Kind::kRange:
      return range_attribute(object, name);
    case Kind::kBool:
    case Kind::kInt:
    case Kind::kFloat:
      return number_attribute(object, name);
    default:
      return {};
  }
}

}  // namespace tessera::text::jinja
