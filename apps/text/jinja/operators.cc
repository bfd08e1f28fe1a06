// The arithmetic operators of Python. Integers have 64 bits; what goes beyond is an error.

#include <cmath>

#include "apps/text/jinja/function.h"
#include "apps/text/jinja/value.h"

namespace tessera::text::jinja {
namespace {

constexpr std::string_view kSymbols[] = {"+", "-", "*", "/", "//", "%", "**"};

[[noreturn]] void fail_overflow() {
  fail("an integer beyond 64 bits");
}

[[noreturn]] void fail_operands(BinaryOp op, const Value& a, const Value& b) {
  fail("unsupported operand type(s) for {}: '{}' and '{}'", kSymbols[static_cast<size_t>(op)],
       type_name(a), type_name(b));
}

int64_t floor_divide(int64_t a, int64_t b) {
  if (b == -1) {
    int64_t result = 0;
    if (__builtin_sub_overflow(int64_t{0}, a, &result)) fail_overflow();
    return result;
  }
  return a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}

int64_t modulo(int64_t a, int64_t b) {
  if (b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

Value power(int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) fail("0.0 cannot be raised to a negative power");
    return std::pow(static_cast<double>(base), static_cast<double>(exponent));
  }
  int64_t result = 1;
  while (exponent > 0) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) fail_overflow();
    exponent >>= 1;
    if (exponent > 0 && __builtin_mul_overflow(base, base, &base)) fail_overflow();
  }
  return result;
}

Value integer_op(BinaryOp op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflows = false;
  switch (op) {
    case BinaryOp::kAdd:
      overflows = __builtin_add_overflow(a, b, &result);
      break;
    case BinaryOp::kSub:
      overflows = __builtin_sub_overflow(a, b, &result);
      break;
    case BinaryOp::kMul:
      overflows = __builtin_mul_overflow(a, b, &result);
      break;
    case BinaryOp::kPow:
      return power(a, b);
    default:
      if (b == 0) {
        fail("{}",
             op == BinaryOp::kDiv ? "division by zero" : "integer division or modulo by zero");
      }
      if (op == BinaryOp::kDiv) return static_cast<double>(a) / static_cast<double>(b);
      return op == BinaryOp::kFloorDiv ? floor_divide(a, b) : modulo(a, b);
  }
  if (overflows) fail_overflow();
  return result;
}

double float_modulo(double a, double b) {
  double rest = std::fmod(a, b);
  if (rest == 0) return std::copysign(0.0, b);
  if ((b < 0) != (rest < 0)) rest += b;
  return rest;
}

double float_floor_divide(double a, double b) {
  const double quotient = (a - float_modulo(a, b)) / b;
  if (quotient == 0) return std::copysign(0.0, a / b);
  double whole = std::floor(quotient);
  if (quotient - whole > 0.5) whole += 1;
  return whole;
}

Value float_op(BinaryOp op, double a, double b) {
  switch (op) {
    case BinaryOp::kAdd:
      return a + b;
    case BinaryOp::kSub:
      return a - b;
    case BinaryOp::kMul:
      return a * b;
    case BinaryOp::kPow: {
      if (a == 0 && b < 0) fail("0.0 cannot be raised to a negative power");
      if (a < 0 && std::isfinite(a) && std::isfinite(b) && std::floor(b) != b) {
        fail("a power that is a complex number");
      }
      const double result = std::pow(a, b);
      if (std::isinf(result) && std::isfinite(a) && std::isfinite(b)) {
        fail("(34, 'Numerical result out of range')");
      }
      return result;
    }
    default:
      if (b == 0) fail("float division or modulo by zero");
      if (op == BinaryOp::kDiv) return a / b;
      return op == BinaryOp::kFloorDiv ? float_floor_divide(a, b) : float_modulo(a, b);
  }
}

Value concatenate(const Value& a, const Value& b) {
  expect_nbytes(static_cast<int64_t>(a.text().size() + b.text().size()));
  if (a.is_markup() || b.is_markup()) {
    const auto part = [](const Value& value) {
      return value.is_markup() ? value.text() : escape_html(value.text());
    };
    return Value(part(a) + part(b), true);
  }
  return Value(a.text() + b.text());
}

Value join_lists(const Value& a, const Value& b) {
  expect_nbytes(product(length(a) + length(b), sizeof(Value)));
  std::vector<Value> items = a.items();
  items.insert(items.end(), b.items().begin(), b.items().end());
  return a.is(Kind::kList) ? Value::list(std::move(items)) : Value::tuple(std::move(items));
}

Value repeat(const Value& value, int64_t count) {
  if (count < 0) count = 0;
  if (value.is_string()) {
    expect_nbytes(product(static_cast<int64_t>(value.text().size()), count));
    std::string out;
    if (!value.text().empty()) {
      out.reserve(value.text().size() * static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) out += value.text();
    }
    return Value(std::move(out), value.is_markup());
  }
  const int64_t num_items = product(length(value), count);
  expect_nbytes(product(num_items, sizeof(Value)));
  std::vector<Value> items;
  items.reserve(static_cast<size_t>(num_items));
  for (int64_t i = 0; i < count && num_items > 0; ++i) {
    items.insert(items.end(), value.items().begin(), value.items().end());
  }
  return value.is(Kind::kList) ? Value::list(std::move(items)) : Value::tuple(std::move(items));
}

bool is_repeatable(const Value& value) {
  return value.is_string() || value.is_sequence();
}

}  // namespace

Value binary(BinaryOp op, const Value& a, const Value& b) {
  count_steps(1);
  if (a.is_undefined()) throw TemplateError(a.as<UndefinedObject>().message);
  if (op == BinaryOp::kMod && a.is_string()) {
    return Value(format_percent(a.text(), b), a.is_markup());
  }
  if (b.is_undefined()) throw TemplateError(b.as<UndefinedObject>().message);
  if (a.is_integral() && b.is_integral()) return integer_op(op, a.integer(), b.integer());
  if (a.is_number() && b.is_number()) return float_op(op, a.number(), b.number());
  if (op == BinaryOp::kAdd) {
    if (a.is_string() && b.is_string()) return concatenate(a, b);
    if (a.is_sequence() && a.kind() == b.kind()) return join_lists(a, b);
  }
  if (op == BinaryOp::kMul) {
    if (is_repeatable(a) && b.is_integral()) return repeat(a, b.integer());
    if (is_repeatable(b) && a.is_integral()) return repeat(b, a.integer());
  }
  fail_operands(op, a, b);
}

Value negate(const Value& value) {
  if (value.is_undefined()) throw TemplateError(value.as<UndefinedObject>().message);
  if (value.is_integral()) return integer_op(BinaryOp::kSub, 0, value.integer());
  if (value.is(Kind::kFloat)) return -value.number();
  fail("bad operand type for unary -: '{}'", type_name(value));
}

Value plus(const Value& value) {
  if (value.is_undefined()) throw TemplateError(value.as<UndefinedObject>().message);
  if (value.is_integral()) return value.integer();
  if (value.is(Kind::kFloat)) return value;
  fail("bad operand type for unary +: '{}'", type_name(value));
}

}  // namespace tessera::text::jinja
