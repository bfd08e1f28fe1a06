#include "apps/text/jinja/evaluate.h"

#include <algorithm>
#include <set>

namespace tessera::text::jinja {
namespace {

Scope& scope_at(const ScopePtr& scope, const Place& place) {
  Scope* each = scope.get();
  for (int i = 0; i < place.num_out; ++i) each = each->parent.get();
  return *each;
}

Value& variable_at(const ScopePtr& scope, const Place& place) {
  return scope_at(scope, place).slots[static_cast<size_t>(place.slot)];
}

/// The items of a for statement that pass its test.
class TestedIterator : public Iterator {
 public:
  TestedIterator(Interpreter& interpreter, const Stmt& node, Value iterable, ScopePtr scope)
      : interpreter_(interpreter),
        node_(node),
        iterable_(std::move(iterable)),
        scope_(std::move(scope)) {}

  bool next(Value& item) override {
    if (items_ == nullptr) items_ = iterate(iterable_);
    while (items_->next(item)) {
      count_steps(1);
      const ScopePtr inner = interpreter_.enter(node_.test_frame, scope_);
      interpreter_.assign(*node_.test_target, item, inner);
      if (!is_true(interpreter_.evaluate(*node_.test, inner))) continue;
      item = target_value(*node_.test_target, inner);
      return true;
    }
    return false;
  }

 private:
  static Value target_value(const Expr& target, const ScopePtr& scope) {
    if (target.kind == ExprKind::kName) return variable_at(scope, target.place);
    std::vector<Value> items;
    for (const ExprPtr& child : target.children) items.push_back(target_value(*child, scope));
    return Value::tuple(std::move(items));
  }

  Interpreter& interpreter_;
  const Stmt& node_;
  Value iterable_;
  ScopePtr scope_;
  std::unique_ptr<Iterator> items_;
};

struct MacroObject : FunctionObject {
  MacroObject(const Stmt& of, ScopePtr in)
      : FunctionObject(of.text), node(of), scope(std::move(in)) {}

  std::string_view type() const override { return "Macro"; }
  std::string describe() const override {
    return name.empty() ? "<Macro anonymous>" : "<Macro " + repr_of_string(name) + ">";
  }

  Value attribute(std::string_view key) const override {
    const MacroParts& macro = *node.macro;
    if (key == "name") return name.empty() ? Value::none() : Value(name);
    if (key == "caller") return Value(macro.caller_slot >= 0 || macro.has_explicit_caller);
    if (key == "catch_kwargs") return Value(macro.kwargs_slot >= 0);
    if (key == "catch_varargs") return Value(macro.varargs_slot >= 0);
    if (key != "arguments") return {};
    std::vector<Value> names;
    for (const ExprPtr& each : macro.parameters) names.emplace_back(each->text);
    return Value::tuple(std::move(names));
  }

  Value call(Interpreter& interpreter, Args args) const override {
    const ScopePtr inner = interpreter.enter(node.frame, scope);
    bind(std::move(args), *inner);
    const MacroParts& macro = *node.macro;
    const size_t num_without = macro.parameters.size() - macro.defaults.size();
    for (size_t i = 0; i < macro.parameters.size(); ++i) {
      Value& value = inner->slots[static_cast<size_t>(macro.parameter_slots[i])];
      if (!value.is_missing()) continue;
      value = i >= num_without ? interpreter.evaluate(*macro.defaults[i - num_without], inner)
                               : Value::undefined(fmt::format("parameter '{}' was not provided",
                                                              macro.parameters[i]->text));
    }
    return interpreter.capture(node.body, inner);
  }

  const Stmt& node;
  ScopePtr scope;

 private:
  static Value take_keyword(Args& args, std::string_view key) {
    for (size_t i = 0; i < args.keyword.size(); ++i) {
      if (args.keyword[i].first != key) continue;
      Value value = args.keyword[i].second;
      args.keyword.erase(args.keyword.begin() + static_cast<int64_t>(i));
      return value;
    }
    return {};
  }

  void bind(Args args, Scope& inner) const {
    const MacroParts& macro = *node.macro;
    const size_t count = macro.parameters.size();
    for (size_t i = 0; i < count; ++i) {
      inner.slots[static_cast<size_t>(macro.parameter_slots[i])] =
          i < args.positional.size() ? args.positional[i]
                                     : take_keyword(args, macro.parameters[i]->text);
    }
    if (macro.caller_slot >= 0) {
      Value caller = take_keyword(args, "caller");
      if (caller.is_missing() || caller.is_none()) caller = Value::undefined("No caller defined");
      inner.slots[static_cast<size_t>(macro.caller_slot)] = caller;
    }
    if (macro.kwargs_slot >= 0) {
      auto dict = std::make_shared<DictObject>();
      for (const auto& [key, value] : args.keyword) dict->set(Value(key), value);
      inner.slots[static_cast<size_t>(macro.kwargs_slot)] = make_dict(std::move(dict));
    } else if (!args.keyword.empty()) {
      fail("macro '{}' takes no keyword argument '{}'", name, args.keyword[0].first);
    }
    if (macro.varargs_slot >= 0) {
      const size_t begin = std::min(count, args.positional.size());
      inner.slots[static_cast<size_t>(macro.varargs_slot)] = Value::tuple(
          {args.positional.begin() + static_cast<int64_t>(begin), args.positional.end()});
    } else if (args.positional.size() > count) {
      fail("macro '{}' takes not more than {} argument(s)", name, count);
    }
  }
};

}  // namespace

void Output::write(const Value& value) {
  if (!value.is_string()) {
    const std::string shown = to_string(value);
    charge.grow(product(static_cast<int64_t>(shown.size()), 3));
    text += shown;
    return;
  }
  const StringObject& string = value.string();
  count_steps(1 + static_cast<int64_t>(string.text.size() / 32));
  charge.grow(product(static_cast<int64_t>(string.text.size()), 3));  // a text that grows
  for (const MarkedSpan& span : string.spans) {
    spans.push_back({text.size() + span.begin, text.size() + span.end, span.block});
  }
  text += string.text;
}

Value Output::take() {
  auto string = std::make_shared<StringObject>(std::move(text), false);
  string->spans = std::move(spans);
  return {Kind::kString, std::move(string)};
}

Interpreter::Interpreter(const TemplateTree& tree, const Value& variables,
                         const RenderOptions& options, Meter& meter)
    : tree_(tree), variables_(variables.dict()), options_(options), meter_(meter) {}

Interpreter::~Interpreter() {
  for (const auto& space : kept_namespaces_) space->attributes.clear();
  for (const ScopePtr& scope : kept_scopes_) scope->slots.clear();
}

Rendered Interpreter::render() {
  Output output;
  out_ = &output;
  try {
    run(tree_.body, enter(tree_.frame, nullptr));
  } catch (const RaisedError& error) {
    throw RaisedError(fmt::format("line {}: {}", line_, error.what()), error.message());
  } catch (const TemplateError& error) {
    throw TemplateError(fmt::format("line {}: {}", line_, error.what()));
  }
  Rendered result;
  result.text = std::move(output.text);
  std::set<int64_t> arrived;
  for (const MarkedSpan& span : output.spans) {
    arrived.insert(span.block);
    if (span.begin < span.end) result.generation.push_back({span.begin, span.end});
  }
  result.num_generation_blocks = num_blocks_;
  result.has_lost_generation = static_cast<int64_t>(arrived.size()) != num_blocks_;
  return result;
}

ScopePtr Interpreter::enter(const FrameLayout& layout, const ScopePtr& outer) {
  auto scope = std::make_shared<Scope>(outer, layout.variables.size());
  for (size_t i = 0; i < layout.variables.size(); ++i) {
    const VariableStart& start = layout.variables[i];
    if (start.kind == VariableStart::Kind::kContext) {
      const Value* given = variables_.find(std::string_view(start.name));
      scope->slots[i] = given != nullptr ? *given : find_global(start.name);
    } else if (start.kind == VariableStart::Kind::kCopy) {
      scope->slots[i] = variable_at(scope, start.copied);
    }
  }
  return scope;
}

Value Interpreter::make_namespace() {
  auto space = std::make_shared<NamespaceObject>();
  kept_namespaces_.push_back(space);
  return {Kind::kNamespace, std::move(space)};
}

void Interpreter::keep(const ScopePtr& scope) {
  if (kept_scopes_.empty() || kept_scopes_.back() != scope) kept_scopes_.push_back(scope);
}

Value Interpreter::make_macro(const Stmt& node, const ScopePtr& scope) {
  return {Kind::kFunction, std::make_shared<MacroObject>(node, scope)};
}

Value Interpreter::capture(const Block& body, const ScopePtr& scope) {
  Output captured;
  Output* const outer = std::exchange(out_, &captured);
  run(body, scope);
  out_ = outer;
  return captured.take();
}

void Interpreter::assign(const Expr& target, const Value& value, const ScopePtr& scope) {
  if (target.kind == ExprKind::kName) {
    variable_at(scope, target.place) = value;
    return;
  }
  if (target.kind == ExprKind::kNamespace) {
    if (target.attribute.starts_with('_')) {
      fail("Chat templates cannot store underscore-prefixed attributes on a namespace: {}",
           target.attribute);
    }
    variable_at(scope, target.place).as<NamespaceObject>().set(target.attribute, value);
    return;
  }
  if (!is_iterable(value)) fail("cannot unpack non-iterable {} object", type_name(value));
  const auto items = iterate(value);
  const size_t count = target.children.size();
  std::vector<Value> values;
  for (Value item; values.size() <= count && items->next(item);) values.push_back(item);
  if (values.size() > count) fail("too many values to unpack (expected {})", count);
  if (values.size() < count) {
    fail("not enough values to unpack (expected {}, got {})", count, values.size());
  }
  for (size_t i = 0; i < count; ++i) assign(*target.children[i], values[i], scope);
}

Interpreter::Flow Interpreter::run(const Block& block, const ScopePtr& scope) {
  for (const auto& stmt : block) {
    const Flow flow = run(*stmt, scope);
    if (flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run(const Stmt& node, const ScopePtr& scope) {
  const Level level(meter_);
  meter_.step(1);
  line_ = node.line;
  switch (node.kind) {
    case StmtKind::kOutput:
      for (const ExprPtr& each : node.exprs) {
        if (each->kind == ExprKind::kText) {
          out_->write(each->value);
        } else {
          out_->write(evaluate(*each, scope));
        }
      }
      return Flow::kNext;
    case StmtKind::kSet:
      run_set(node, scope);
      return Flow::kNext;
    case StmtKind::kIf:
      return run_if(node, scope);
    case StmtKind::kFor:
      if (node.is_recursive) {
        out_->write(run_recursive(node, evaluate(*node.value, scope), scope, 0));
        return Flow::kNext;
      }
      return run_for(node, evaluate(*node.value, scope), scope, 0);
    case StmtKind::kMacro:
      keep(scope);
      variable_at(scope, node.place) = make_macro(node, scope);
      return Flow::kNext;
    case StmtKind::kCallBlock:
      run_call_block(node, scope);
      return Flow::kNext;
    case StmtKind::kGeneration:
      run_generation(node, scope);
      return Flow::kNext;
    case StmtKind::kSetBlock:
    case StmtKind::kFilterBlock:
      return run_capture(node, scope);
    case StmtKind::kWith:
      return run_with(node, scope);
    case StmtKind::kBreak:
      return Flow::kBreak;
    case StmtKind::kContinue:
      return Flow::kContinue;
    case StmtKind::kLoader:
      break;
  }
  fail("no loader for this environment specified: '{}' of a template that is one file", node.text);
}

Interpreter::Flow Interpreter::run_if(const Stmt& node, const ScopePtr& scope) {
  if (is_true(evaluate(*node.value, scope))) return run(node.body, scope);
  for (const auto& other : node.elifs) {
    if (is_true(evaluate(*other->value, scope))) return run(other->body, scope);
  }
  return run(node.otherwise, scope);
}

Interpreter::Flow Interpreter::run_for(const Stmt& node, const Value& iterable,
                                       const ScopePtr& scope, int64_t depth0) {
  std::unique_ptr<Iterator> items;
  Value source = iterable;
  if (node.test != nullptr) {
    source =
        make_iterator(std::make_unique<TestedIterator>(*this, node, iterable, scope), {iterable});
  }
  items = iterate(source);
  std::shared_ptr<LoopObject> loop;
  // `loop` may be kept by the template, and holds the scope where it needs one.
  const bool holds_scope = node.is_recursive || node.test != nullptr;
  if (node.loop_slot >= 0 && holds_scope) keep(scope);
  if (node.loop_slot >= 0)
    loop = make_loop(node, source, std::move(items), holds_scope ? scope : nullptr, depth0);
  bool is_empty = true;
  ScopePtr inner;
  for (Value item; loop != nullptr ? next_item(*loop, item) : items->next(item);) {
    meter_.step(1);
    inner = enter(node.frame, scope);
    if (loop != nullptr) {
      inner->slots[static_cast<size_t>(node.loop_slot)] = Value(Kind::kLoop, loop);
    }
    assign(*node.target, item, inner);
    const Flow flow = run(node.body, inner);
    // What ends the body early has not seen its end, which is what `else` asks for.
    if (flow == Flow::kBreak) break;
    if (flow == Flow::kNext) is_empty = false;
    line_ = node.line;
  }
  if (!is_empty || node.otherwise.empty()) return Flow::kNext;
  return run(node.otherwise, enter(node.else_frame, scope));
}

Value Interpreter::run_recursive(const Stmt& node, const Value& iterable, const ScopePtr& scope,
                                 int64_t depth0) {
  Output captured;
  Output* const outer = std::exchange(out_, &captured);
  run_for(node, iterable, scope, depth0);
  out_ = outer;
  return captured.take();
}

void Interpreter::check_namespaces(const Expr& target, const ScopePtr& scope) {
  if (target.kind == ExprKind::kNamespace &&
      !variable_at(scope, target.place).is(Kind::kNamespace)) {
    fail("cannot assign attribute on non-namespace object");
  }
  for (const ExprPtr& child : target.children) check_namespaces(*child, scope);
}

void Interpreter::run_set(const Stmt& node, const ScopePtr& scope) {
  check_namespaces(*node.target, scope);
  assign(*node.target, evaluate(*node.value, scope), scope);
}

void Interpreter::run_call_block(const Stmt& node, const ScopePtr& scope) {
  keep(scope);
  const Value caller = make_macro(node, scope);
  const Expr& to = *node.value;
  const Value function = evaluate(*to.children[0], scope);
  Args args;
  add_arguments(args, *to.call, scope);
  args.keyword.emplace_back("caller", caller);
  write_string(call(*this, function, std::move(args)));
}

/// What a block gives is written as it is, and has to be a string.
void Interpreter::write_string(const Value& value) {
  if (!value.is_string()) {
    fail("a block gives {}, expected str", type_name(value));
  }
  out_->write(value);
}

void Interpreter::run_generation(const Stmt& node, const ScopePtr& scope) {
  const ScopePtr inner = enter(node.frame, scope);
  if (node.macro->caller_slot >= 0) {
    inner->slots[static_cast<size_t>(node.macro->caller_slot)] =
        Value::undefined("No caller defined");
  }
  const Value text = capture(node.body, inner);
  const size_t begin = out_->text.size();
  out_->write(text);
  out_->spans.push_back({begin, out_->text.size(), num_blocks_++});
}

Interpreter::Flow Interpreter::run_capture(const Stmt& node, const ScopePtr& scope) {
  const ScopePtr inner = enter(node.frame, scope);
  Output captured;
  Output* const outer = std::exchange(out_, &captured);
  const Flow flow = run(node.body, inner);
  out_ = outer;
  if (flow != Flow::kNext) return flow;  // out of the block, and of what it would have set
  Value text = captured.take();
  if (node.value != nullptr) {
    const Value* const before = std::exchange(captured_, &text);
    Value filtered = evaluate(*node.value, inner);
    captured_ = before;
    text = std::move(filtered);
  }
  if (node.kind == StmtKind::kFilterBlock) {
    write_string(text);
  } else {
    check_namespaces(*node.target, scope);
    assign(*node.target, text, scope);
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::run_with(const Stmt& node, const ScopePtr& scope) {
  const ScopePtr inner = enter(node.frame, scope);
  for (size_t i = 0; i < node.exprs.size(); i += 2) {
    assign(*node.exprs[i], evaluate(*node.exprs[i + 1], scope), inner);
  }
  return run(node.body, inner);
}

}  // namespace tessera::text::jinja
