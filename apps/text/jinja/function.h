#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/text/jinja/value.h"

// What can be called, and how arguments are read.

namespace tessera::text::jinja {

struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keyword;
};

class Interpreter;

struct FunctionObject : Object {
  explicit FunctionObject(std::string of) : Object(128), name(std::move(of)) {}
  virtual Value call(Interpreter& interpreter, Args args) const = 0;
  virtual std::string_view type() const { return "builtin_function_or_method"; }
  virtual std::string describe() const;
  virtual bool is_callable() const { return true; }
  /// `object.name`; missing if there is no such attribute.
  virtual Value attribute(std::string_view) const { return {}; }
  std::string name;
};

/// `loop` in a for statement.
struct LoopObject : Object {
  LoopObject() : Object(256) {}
  virtual int64_t length() const = 0;
  virtual Value attribute(std::string_view name) const = 0;
  virtual Value call(Interpreter& interpreter, Args args) const = 0;
};

/// Reads arguments by position or name, in the order of the parameters, as Python binds them.
class ArgReader {
 public:
  ArgReader(const Args& args, std::string_view function);
  /// The next parameter; an error if it is not given.
  const Value& required(std::string_view parameter);
  /// The next parameter, or what stands for it.
  Value optional(std::string_view parameter, Value otherwise);
  /// Only by name, or only by position.
  Value keyword_only(std::string_view parameter, Value otherwise);
  Value positional_only(Value otherwise);
  const Value& required_positional();
  /// An error if arguments are left.
  void finish() const;

 private:
  const Value* take(std::string_view parameter);

  const Args& args_;
  std::string function_;
  size_t num_taken_ = 0;
  std::vector<bool> is_used_;
};

int64_t to_index(const Value& value, std::string_view what);  ///< an int (or bool), else an error
const std::string& to_text(const Value& value, std::string_view what);  ///< of a str, else an error

using Callback = Value (*)(Interpreter&, const Args&);
Value make_function(std::string name, Callback callback);

/// Calls what can be called.
Value call(Interpreter& interpreter, const Value& function, Args args);
bool is_callable(const Value& value);

/// `object.name` and `object[key]` of templates: one falls back to the other, and what is not there
/// is undefined.
Value get_attribute(const Value& object, std::string_view name);
Value get_item(const Value& object, const Value& key);
/// Python's object[start:stop:step].
Value slice(const Value& object, const Value& start, const Value& stop, const Value& step);

enum class BinaryOp : uint8_t { kAdd, kSub, kMul, kDiv, kFloorDiv, kMod, kPow };
Value binary(BinaryOp op, const Value& a, const Value& b);
Value negate(const Value& value);
Value plus(const Value& value);

/// A method of Python's str, list, dict ...; missing if there is none of that name.
Value find_method(const Value& object, std::string_view name);
/// "%s ..." % values
std::string format_percent(std::string_view format, const Value& values);
/// "{} ...".format(...)
std::string format_braces(std::string_view format, const Args& args);

/// Filters and tests by name; null if there is none.
Callback find_filter(std::string_view name);
Callback find_test(std::string_view name);
/// A filter of Jinja that does not exist here.
bool is_unsupported_filter(std::string_view name);

/// `text` with <, >, &, ' and " as entities.
std::string escape_html(std::string_view text);

struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  bool is_indented = false;
  std::string indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
std::string to_json(const Value& value, const JsonStyle& style);

}  // namespace tessera::text::jinja
