// The tests of `is`.

#include "apps/text/jinja/function.h"
#include "apps/text/jinja/strings.h"

namespace tessera::text::jinja {
namespace {

template <bool (*kTest)(const Value&)>
Value unary(Interpreter&, const Args& args) {
  ArgReader reader(args, "test");
  const Value value = reader.required("value");
  reader.finish();
  return Value(kTest(value));
}

template <bool (*kTest)(const Value&, const Value&)>
Value with_other(Interpreter&, const Args& args) {
  ArgReader reader(args, "test");
  const Value value = reader.required_positional();
  const Value other = reader.required("other");
  reader.finish();
  return Value(kTest(value, other));
}

Value remainder(const Value& value, int64_t by) {
  return binary(BinaryOp::kMod, value, Value(by));
}

bool is_defined(const Value& v) {
  return !v.is_undefined();
}
bool is_undefined(const Value& v) {
  return v.is_undefined();
}
bool is_none(const Value& v) {
  return v.is_none();
}
bool is_boolean(const Value& v) {
  return v.is(Kind::kBool);
}
bool is_the_false(const Value& v) {
  return v.is(Kind::kBool) && !v.boolean();
}
bool is_the_true(const Value& v) {
  return v.is(Kind::kBool) && v.boolean();
}
bool is_integer(const Value& v) {
  return v.is(Kind::kInt);
}
bool is_float(const Value& v) {
  return v.is(Kind::kFloat);
}
bool is_number(const Value& v) {
  return v.is_number();
}
bool is_string(const Value& v) {
  return v.is_string();
}
bool is_mapping(const Value& v) {
  return v.is(Kind::kDict);
}
bool is_lower(const Value& v) {
  return has_case(to_string(v), false);
}
bool is_upper(const Value& v) {
  return has_case(to_string(v), true);
}
bool is_sequence(const Value& v) {
  return v.is_string() || v.is_sequence() || v.is(Kind::kDict) || v.is(Kind::kRange) ||
         v.is_undefined();
}
bool is_escaped(const Value& v) {
  return v.is_markup();
}
bool is_odd(const Value& v) {
  return equal(remainder(v, 2), Value(int64_t{1}));
}
bool is_even(const Value& v) {
  return equal(remainder(v, 2), Value(int64_t{0}));
}
bool is_filter(const Value& v) {
  hash_of(v);
  return v.is_string() && (find_filter(v.text()) != nullptr || is_unsupported_filter(v.text()));
}
bool is_test(const Value& v) {
  hash_of(v);
  return v.is_string() && find_test(v.text()) != nullptr;
}

bool is_in(const Value& value, const Value& all) {
  return contains(all, value);
}
bool is_equal(const Value& a, const Value& b) {
  return equal(a, b);
}
bool is_unequal(const Value& a, const Value& b) {
  return !equal(a, b);
}
bool is_greater(const Value& a, const Value& b) {
  return compare(a, b, ">") > 0;
}
bool is_greater_or_equal(const Value& a, const Value& b) {
  return compare(a, b, ">=") >= 0;
}
bool is_less(const Value& a, const Value& b) {
  return compare(a, b, "<") < 0;
}
bool is_less_or_equal(const Value& a, const Value& b) {
  return compare(a, b, "<=") <= 0;
}
/// `a is b` of Python, where small numbers and texts that are written in a template are one object.
bool is_same(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  if (a.object() != nullptr && !a.is_string()) return a.object() == b.object();
  return equal(a, b);
}

Value divisible_by(Interpreter&, const Args& args) {
  ArgReader reader(args, "divisibleby");
  const Value value = reader.required("value");
  const Value by = reader.required("num");
  reader.finish();
  return Value(equal(binary(BinaryOp::kMod, value, by), Value(int64_t{0})));
}

Value is_in_test(Interpreter&, const Args& args) {
  ArgReader reader(args, "in");
  const Value value = reader.required("value");
  const Value all = reader.required("seq");
  reader.finish();
  return Value(is_in(value, all));
}

}  // namespace

Callback find_test(std::string_view name) {
  static constexpr std::pair<std::string_view, Callback> kTests[] = {
      {"!=", with_other<is_unequal>},
      {"<", with_other<is_less>},
      {"<=", with_other<is_less_or_equal>},
      {"==", with_other<is_equal>},
      {">", with_other<is_greater>},
      {">=", with_other<is_greater_or_equal>},
      {"boolean", unary<is_boolean>},
      {"callable", unary<is_callable>},
      {"defined", unary<is_defined>},
      {"divisibleby", divisible_by},
      {"eq", with_other<is_equal>},
      {"equalto", with_other<is_equal>},
      {"escaped", unary<is_escaped>},
      {"even", unary<is_even>},
      {"false", unary<is_the_false>},
      {"filter", unary<is_filter>},
      {"float", unary<is_float>},
      {"ge", with_other<is_greater_or_equal>},
      {"greaterthan", with_other<is_greater>},
      {"gt", with_other<is_greater>},
      {"in", is_in_test},
      {"integer", unary<is_integer>},
      {"iterable", unary<is_iterable>},
      {"le", with_other<is_less_or_equal>},
      {"lessthan", with_other<is_less>},
      {"lower", unary<is_lower>},
      {"lt", with_other<is_less>},
      {"mapping", unary<is_mapping>},
      {"ne", with_other<is_unequal>},
      {"none", unary<is_none>},
      {"number", unary<is_number>},
      {"odd", unary<is_odd>},
      {"sameas", with_other<is_same>},
      {"sequence", unary<is_sequence>},
      {"string", unary<is_string>},
      {"test", unary<is_test>},
      {"true", unary<is_the_true>},
      {"undefined", unary<is_undefined>},
      {"upper", unary<is_upper>},
  };
  for (const auto& [each, callback] : kTests) {
    if (each == name) return callback;
  }
  return nullptr;
}

}  // namespace tessera::text::jinja
