#include <algorithm>

#include "apps/text/jinja/evaluate.h"

namespace tessera::text::jinja {
namespace {

bool holds(CompareOp op, const Value& a, const Value& b) {
  switch (op) {
    case CompareOp::kEq:
      return equal(a, b);
    case CompareOp::kNe:
      return !equal(a, b);
    case CompareOp::kIn:
      return contains(b, a);
    case CompareOp::kNotIn:
      return !contains(b, a);
    default:
      break;
  }
  // NaN is in no order with anything.
  const auto is_nan = [](const Value& v) { return v.is(Kind::kFloat) && v.number() != v.number(); };
  constexpr std::string_view kSymbols[] = {"==", "!=", "<", "<=", ">", ">="};
  const int order = compare(a, b, kSymbols[static_cast<size_t>(op)]);
  if (is_nan(a) || is_nan(b)) return false;
  switch (op) {
    case CompareOp::kLt:
      return order < 0;
    case CompareOp::kLe:
      return order <= 0;
    case CompareOp::kGt:
      return order > 0;
    default:
      return order >= 0;
  }
}

}  // namespace

Value Interpreter::evaluate(const Expr& node, const ScopePtr& scope) {
  meter_.step(1);
  if (node.kind == ExprKind::kConst || node.kind == ExprKind::kText) return node.value;
  if (node.kind == ExprKind::kName) return evaluate_name(node, scope);
  const Level level(meter_);
  line_ = node.line;
  return evaluate_inner(node, scope);
}

Value Interpreter::evaluate_name(const Expr& node, const ScopePtr& scope) {
  const Scope* each = scope.get();
  for (int i = 0; i < node.place.num_out; ++i) each = each->parent.get();
  const Value& value = each->slots[static_cast<size_t>(node.place.slot)];
  if (!value.is_missing()) return value;
  return Value::undefined(fmt::format("'{}' is undefined", node.text));
}

std::vector<Value> Interpreter::evaluate_all(const std::vector<ExprPtr>& nodes,
                                             const ScopePtr& scope) {
  std::vector<Value> values;
  values.reserve(nodes.size());
  for (const ExprPtr& node : nodes) values.push_back(evaluate(*node, scope));
  return values;
}

Value Interpreter::evaluate_inner(const Expr& node, const ScopePtr& scope) {
  const auto child = [&](size_t i) { return evaluate(*node.children[i], scope); };
  switch (node.kind) {
    case ExprKind::kTuple:
      return Value::tuple(evaluate_all(node.children, scope));
    case ExprKind::kList:
      return Value::list(evaluate_all(node.children, scope));
    case ExprKind::kDict:
      return evaluate_dict(node, scope);
    case ExprKind::kCondition:
      if (is_true(child(0))) return child(1);
      if (node.children[2] != nullptr) return child(2);
      return Value::undefined(fmt::format(
          "the inline if-expression on line {} evaluated to false and no else section was defined.",
          node.line));
    case ExprKind::kOr: {
      Value left = child(0);
      return is_true(left) ? left : child(1);
    }
    case ExprKind::kAnd: {
      Value left = child(0);
      return is_true(left) ? child(1) : left;
    }
    case ExprKind::kNot:
      return Value(!is_true(child(0)));
    case ExprKind::kCompare:
      return evaluate_compare(node, scope);
    case ExprKind::kBinary: {
      const Value left = child(0);
      return binary(node.op, left, child(1));
    }
    case ExprKind::kNegate:
      return negate(child(0));
    case ExprKind::kPlus:
      return plus(child(0));
    case ExprKind::kConcat: {
      std::string text;
      for (const ExprPtr& each : node.children) {
        text += to_string(evaluate(*each, scope));
        count_steps(static_cast<int64_t>(text.size() / 256));
        expect_growing(text.size());
      }
      return Value(std::move(text));
    }
    case ExprKind::kAttribute:
      return get_attribute(child(0), node.text);
    case ExprKind::kItem:
      return evaluate_item(node, scope);
    case ExprKind::kFilter:
    case ExprKind::kTest:
      return evaluate_filter(node, scope);
    case ExprKind::kCall: {
      const Value function = child(0);
      Args args;
      add_arguments(args, *node.call, scope);
      Value result = call(*this, function, std::move(args));
      line_ = node.line;
      return result;
    }
    default:
      break;
  }
  fail("an expression that stands where it cannot");
}

Value Interpreter::evaluate_dict(const Expr& node, const ScopePtr& scope) {
  auto dict = std::make_shared<DictObject>();
  for (size_t i = 0; i < node.children.size(); i += 2) {
    const Value key = evaluate(*node.children[i], scope);
    dict->set(key, evaluate(*node.children[i + 1], scope));
  }
  return make_dict(std::move(dict));
}

Value Interpreter::evaluate_compare(const Expr& node, const ScopePtr& scope) {
  Value left = evaluate(*node.children[0], scope);
  for (size_t i = 0; i < node.ops.size(); ++i) {
    Value right = evaluate(*node.children[i + 1], scope);
    if (!holds(node.ops[i], left, right)) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

Value Interpreter::evaluate_item(const Expr& node, const ScopePtr& scope) {
  const Value object = evaluate(*node.children[0], scope);
  const Expr& key = *node.children[1];
  if (key.kind != ExprKind::kSlice) return get_item(object, evaluate(key, scope));
  Value parts[3] = {Value::none(), Value::none(), Value::none()};
  for (size_t i = 0; i < 3; ++i) {
    if (key.children[i] != nullptr) parts[i] = evaluate(*key.children[i], scope);
  }
  return slice(object, parts[0], parts[1], parts[2]);
}

Value Interpreter::evaluate_filter(const Expr& node, const ScopePtr& scope) {
  Args args;
  args.positional.push_back(node.children[0] != nullptr ? evaluate(*node.children[0], scope)
                                                        : *captured_);
  add_arguments(args, *node.call, scope);
  if (node.callback == nullptr) {
    fail("No {} named '{}' found.", node.kind == ExprKind::kFilter ? "filter" : "test", node.text);
  }
  line_ = node.line;
  return node.callback(*this, args);
}

void Interpreter::add_arguments(Args& args, const CallArguments& given, const ScopePtr& scope) {
  for (const ExprPtr& each : given.positional) args.positional.push_back(evaluate(*each, scope));
  if (given.star != nullptr) {
    for (Value& each : to_vector(evaluate(*given.star, scope))) {
      args.positional.push_back(std::move(each));
    }
  }
  for (const auto& [name, each] : given.keyword) {
    args.keyword.emplace_back(name, evaluate(*each, scope));
  }
  if (given.double_star == nullptr) return;
  const Value more = evaluate(*given.double_star, scope);
  if (!more.is(Kind::kDict)) {
    fail("argument after ** must be a mapping, not {}", type_name(more));
  }
  for (const auto& [key, value] : more.dict().items) {
    const std::string& name = to_text(key, "keywords");
    for (const auto& [other, ignored] : args.keyword) {
      if (other == name) fail("got multiple values for keyword argument '{}'", name);
    }
    args.keyword.emplace_back(name, value);
  }
}

}  // namespace tessera::text::jinja
