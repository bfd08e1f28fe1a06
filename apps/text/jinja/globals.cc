// What templates find besides their variables: functions, `loop`, cycler and joiner.

#include <chrono>
#include <limits>
#include <optional>

#include "apps/text/jinja/evaluate.h"

namespace tessera::text::jinja {
namespace {

constexpr int64_t kMaxRange = 100'000;  ///< of jinja2's sandbox

class Loop : public LoopObject, public std::enable_shared_from_this<Loop> {
 public:
  Loop(const Stmt& node, Value iterable, std::unique_ptr<Iterator> iterator, ScopePtr scope,
       int64_t depth0)
      : node_(node),
        iterable_(std::move(iterable)),
        iterator_(std::move(iterator)),
        scope_(std::move(scope)),
        depth0_(depth0) {
    depth = depth_over({iterable_});
  }

  bool next(Value& item) {
    if (after_) {
      item = *std::exchange(after_, std::nullopt);
    } else if (!iterator_->next(item)) {
      return false;
    }
    ++index0_;
    before_ = std::exchange(current_, item);
    return true;
  }

  int64_t length() const override {
    if (length_ >= 0) return length_;
    length_ = length_or_none(iterable_);
    if (length_ >= 0) return length_;
    Value rest = Value::list(remaining());
    length_ = jinja::length(rest) + index0_ + 1 + (after_ ? 1 : 0);
    iterator_ = iterate(rest);
    return length_;
  }

  Value attribute(std::string_view name) const override {
    if (name == "index0") return index0_;
    if (name == "index") return index0_ + 1;
    if (name == "first") return Value(index0_ == 0);
    if (name == "last") return Value(!peek());
    if (name == "length") return length();
    if (name == "revindex0") return length() - index0_ - 1;
    if (name == "revindex") return length() - index0_;
    if (name == "depth0") return depth0_;
    if (name == "depth") return depth0_ + 1;
    if (name == "previtem") {
      return index0_ == 0 ? Value::undefined("there is no previous item") : before_;
    }
    if (name == "nextitem") {
      return peek() ? *after_ : Value::undefined("there is no next item");
    }
    if (name == "cycle") return method("cycle", &Loop::cycle);
    if (name == "changed") return method("changed", &Loop::changed);
    return {};
  }

  Value call(Interpreter& interpreter, Args args) const override {
    if (!node_.is_recursive) {
      fail("The loop must have the 'recursive' marker to be called recursively.");
    }
    ArgReader reader(args, "loop");
    const Value& iterable = reader.required("iterable");
    reader.finish();
    return interpreter.run_recursive(node_, iterable, scope_, depth0_ + 1);
  }

 private:
  using Method = Value (Loop::*)(const Args&) const;

  struct MethodObject : FunctionObject {
    MethodObject(std::string of, Value in, Method to)
        : FunctionObject(std::move(of)), loop(std::move(in)), method(to) {
      depth = depth_over({loop});
    }
    Value call(Interpreter&, Args args) const override { return (loop.as<Loop>().*method)(args); }
    Value loop;
    Method method;
  };

  Value method(std::string name, Method to) const {
    return {Kind::kFunction, std::make_shared<MethodObject>(
                                 std::move(name), Value(Kind::kLoop, shared_from_this()), to)};
  }

  Value cycle(const Args& args) const {
    if (args.positional.empty()) fail("no items for cycling given");
    if (!args.keyword.empty()) fail("cycle() takes no keyword arguments");
    return args.positional[static_cast<size_t>(index0_) % args.positional.size()];
  }

  Value changed(const Args& args) const {
    if (!args.keyword.empty()) fail("changed() takes no keyword arguments");
    const Value values = Value::tuple(args.positional);
    if (!last_changed_.is_missing() && equal(last_changed_, values)) return Value(false);
    last_changed_ = values;
    return Value(true);
  }

  bool peek() const {
    Value item;
    if (!after_ && iterator_->next(item)) after_ = item;
    return after_.has_value();
  }

  std::vector<Value> remaining() const {
    std::vector<Value> items;
    Charge charge(0);
    for (Value item; iterator_->next(item);) {
      count_steps(1);
      charge.grow(3 * sizeof(Value));
      items.push_back(item);
    }
    return items;
  }

  const Stmt& node_;
  Value iterable_;
  mutable std::unique_ptr<Iterator> iterator_;
  ScopePtr scope_;
  int64_t depth0_;
  int64_t index0_ = -1;
  mutable int64_t length_ = -1;
  mutable std::optional<Value> after_;
  Value before_, current_;
  mutable Value last_changed_;
};

/// An object with functions of its own, such as cycler(...).
struct CyclerObject : FunctionObject, std::enable_shared_from_this<CyclerObject> {
  explicit CyclerObject(std::vector<Value> of) : FunctionObject("Cycler"), items(std::move(of)) {
    depth = depth_over(items);
  }
  std::string_view type() const override { return "Cycler"; }
  std::string describe() const override { return "<jinja2.utils.Cycler object at 0x0>"; }
  bool is_callable() const override { return false; }
  Value call(Interpreter&, Args) const override { return {}; }
  Value attribute(std::string_view key) const override;
  std::vector<Value> items;
  mutable size_t position = 0;
};

struct CyclerMethod : FunctionObject {
  CyclerMethod(std::shared_ptr<const CyclerObject> of, bool next)
      : FunctionObject(next ? "next" : "reset"), cycler(std::move(of)), is_next(next) {
    depth = cycler->depth + 1;
  }
  Value call(Interpreter&, Args args) const override {
    ArgReader(args, name).finish();
    const Value item = cycler->items[cycler->position];
    cycler->position = is_next ? (cycler->position + 1) % cycler->items.size() : 0;
    return is_next ? item : Value::none();
  }
  std::shared_ptr<const CyclerObject> cycler;
  bool is_next;
};

Value CyclerObject::attribute(std::string_view key) const {
  if (key == "current") return items[position];
  if (key == "items") return Value::tuple(items);
  if (key == "pos") return static_cast<int64_t>(position);
  if (key != "next" && key != "reset") return {};
  return {Kind::kFunction, std::make_shared<CyclerMethod>(shared_from_this(), key == "next")};
}

struct JoinerObject : FunctionObject {
  explicit JoinerObject(Value of) : FunctionObject("Joiner"), separator(std::move(of)) {
    depth = depth_over({separator});
  }
  std::string_view type() const override { return "Joiner"; }
  std::string describe() const override { return "<jinja2.utils.Joiner object at 0x0>"; }
  Value call(Interpreter&, Args args) const override {
    ArgReader(args, name).finish();
    if (std::exchange(is_used, true)) return separator;
    return "";
  }
  Value attribute(std::string_view key) const override {
    return key == "sep" ? separator : key == "used" ? Value(is_used) : Value();
  }
  Value separator;
  mutable bool is_used = false;
};

Value range(Interpreter&, const Args& args) {
  ArgReader reader(args, "range");
  const Value first = reader.required_positional();
  const Value second = reader.positional_only(Value::none());
  const Value third = reader.positional_only(Value(int64_t{1}));
  reader.finish();
  const bool has_one = args.positional.size() == 1;
  const int64_t start = has_one ? 0 : to_index(first, "range");
  const int64_t stop = to_index(has_one ? first : second, "range");
  const int64_t step = to_index(third, "range");
  if (step == 0) fail("range() arg 3 must not be zero");
  auto object = std::make_shared<RangeObject>(start, stop, step);
  if (object->num_items > kMaxRange) {
    fail("Range too big. The sandbox blocks ranges larger than MAX_RANGE ({}).", kMaxRange);
  }
  return {Kind::kRange, std::move(object)};
}

/// dict(...) and what namespace(...) begins with.
std::shared_ptr<DictObject> dict_of(const Args& args, std::string_view function) {
  auto dict = std::make_shared<DictObject>();
  if (args.positional.size() > 1) {
    fail("{} expected at most 1 argument, got {}", function, args.positional.size());
  }
  if (!args.positional.empty() && args.positional[0].is(Kind::kDict)) {
    for (const auto& [key, value] : args.positional[0].dict().items) dict->set(key, value);
  } else if (!args.positional.empty()) {
    for (const Value& item : to_vector(args.positional[0])) {
      const std::vector<Value> pair = to_vector(item);
      if (pair.size() != 2) {
        fail("dictionary update sequence element has length {}; 2 is required", pair.size());
      }
      dict->set(pair[0], pair[1]);
    }
  }
  for (const auto& [key, value] : args.keyword) dict->set(Value(key), value);
  return dict;
}

Value make_dict_value(Interpreter&, const Args& args) {
  return make_dict(dict_of(args, "dict"));
}

Value make_namespace(Interpreter& interpreter, const Args& args) {
  const auto attributes = dict_of(args, "namespace");
  Value space = interpreter.make_namespace();
  for (const auto& [key, value] : attributes->items) {
    const std::string& name = to_text(key, "namespace");
    if (name.starts_with('_')) {
      fail("Chat templates cannot store underscore-prefixed attributes on a namespace: {}", name);
    }
    space.as<NamespaceObject>().set(name, value);
  }
  return space;
}

Value cycler(Interpreter&, const Args& args) {
  if (!args.keyword.empty()) fail("cycler() takes no keyword arguments");
  if (args.positional.empty()) fail("at least one item has to be provided");
  return {Kind::kFunction, std::make_shared<CyclerObject>(args.positional)};
}

Value joiner(Interpreter&, const Args& args) {
  ArgReader reader(args, "joiner");
  const Value separator = reader.optional("sep", Value(", "));
  reader.finish();
  return {Kind::kFunction, std::make_shared<JoinerObject>(separator)};
}

Value raise_exception(Interpreter&, const Args& args) {
  ArgReader reader(args, "raise_exception");
  const std::string message = to_string(reader.required("message"));
  reader.finish();
  throw RaisedError(message, message);
}

Value strftime_now(Interpreter& interpreter, const Args& args) {
  ArgReader reader(args, "strftime_now");
  const std::string format = to_text(reader.required("format"), "strftime_now");
  reader.finish();
  const Now now = interpreter.options().now();
  // What Python replaces itself: a time without a zone has no %z and %Z.
  std::string own;
  for (size_t i = 0; i < format.size(); ++i) {
    const char kind = format[i] == '%' && i + 1 < format.size() ? format[i + 1] : '\0';
    if (kind == 'f') own += fmt::format("{:06}", now.microsecond);
    if (kind != 'f' && kind != 'z' && kind != 'Z') {
      own += format[i];
      if (kind == '\0') continue;
      own += kind;
    }
    ++i;
  }
  constexpr size_t kMaxExpansion = 64;
  expect_nbytes(product(static_cast<int64_t>(own.size()), kMaxExpansion));
  std::string text(own.size() * kMaxExpansion + 1, '\0');
  own += ' ';  // that an empty result is no failure
  const size_t nbytes = std::strftime(text.data(), text.size(), own.c_str(), &now.local);
  text.resize(nbytes == 0 ? 0 : nbytes - 1);
  return text;
}

}  // namespace

Now system_now() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  Now result;
  ::localtime_r(&seconds, &result.local);
  result.microsecond = static_cast<int>(
      std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count() %
      1'000'000);
  return result;
}

Value find_global(std::string_view name) {
  static const auto* const kGlobals = [] {
    const Unmetered outlives_the_rendering;
    return new std::vector<std::pair<std::string_view, Value>>{
        {"range", make_function("range", range)},
        {"dict", make_function("dict", make_dict_value)},
        {"namespace", make_function("namespace", make_namespace)},
        {"cycler", make_function("cycler", cycler)},
        {"joiner", make_function("joiner", joiner)},
        {"raise_exception", make_function("raise_exception", raise_exception)},
        {"strftime_now", make_function("strftime_now", strftime_now)},
    };
  }();
  for (const auto& [each, value] : *kGlobals) {
    if (each == name) return value;
  }
  return {};
}

std::shared_ptr<LoopObject> make_loop(const Stmt& node, const Value& iterable,
                                      std::unique_ptr<Iterator> iterator, const ScopePtr& scope,
                                      int64_t depth0) {
  return std::make_shared<Loop>(node, iterable, std::move(iterator), scope, depth0);
}

bool next_item(LoopObject& loop, Value& item) {
  return static_cast<Loop&>(loop).next(item);
}

}  // namespace tessera::text::jinja
