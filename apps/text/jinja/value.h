#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/text/jinja/meter.h"

// The values of a template: those of Python that chat templates meet. All are immutable; only
// namespaces change. Strings are UTF-8 and count in characters (code points).

namespace tessera::text::jinja {

class Value;

/// What lies on the heap: a string, list, dict, function ... Its bytes count against the limit of
/// the rendering that made it.
struct Object {
  explicit Object(int64_t nbytes) : charge(nbytes) {}
  virtual ~Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  Charge charge;
  /// How many objects lie in one another, which are walked and freed by recursion.
  int depth = 0;
};

/// Where text of a generation block lies, in bytes, and which of the blocks it is.
struct MarkedSpan {
  size_t begin, end;
  int64_t block;
};

struct StringObject : Object {
  StringObject(std::string text, bool is_markup);
  const std::string text;
  const bool is_markup;  ///< of `safe` and `escape`: what is added to it gets escaped
  size_t num_chars;
  std::vector<MarkedSpan> spans;  ///< of a captured output
  bool is_ascii() const { return num_chars == text.size(); }
};

enum class Kind : uint8_t {
  kMissing,  ///< a variable without a value; never seen by a template
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kDict,
  kRange,
  kDictView,
  kIterator,  ///< of a filter such as map: used up when it was iterated
  kNamespace,
  kLoop,
  kFunction,
};

struct ListObject;
struct DictObject;
struct UndefinedObject;

class Value {
 public:
  Value() = default;
  static Value none() { return Value(Kind::kNone); }
  Value(bool b) : kind_(Kind::kBool) { scalar_.b = b; }
  Value(int64_t i) : kind_(Kind::kInt) { scalar_.i = i; }
  Value(double d) : kind_(Kind::kFloat) { scalar_.d = d; }
  Value(std::string text, bool is_markup = false);
  Value(std::string_view text) : Value(std::string(text)) {}
  Value(const char* text) : Value(std::string(text)) {}
  Value(Kind kind, std::shared_ptr<const Object> object)
      : kind_(kind), object_(std::move(object)) {}
  static Value list(std::vector<Value> items);
  static Value tuple(std::vector<Value> items);
  /// Undefined with what an operation on it says.
  static Value undefined(std::string message);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool is_none() const { return kind_ == Kind::kNone; }
  bool is_missing() const { return kind_ == Kind::kMissing; }
  bool is_undefined() const { return kind_ == Kind::kUndefined; }
  bool is_string() const { return kind_ == Kind::kString; }
  /// bool is an int in Python.
  bool is_integral() const { return kind_ == Kind::kInt || kind_ == Kind::kBool; }
  bool is_number() const { return is_integral() || kind_ == Kind::kFloat; }
  bool is_sequence() const { return kind_ == Kind::kList || kind_ == Kind::kTuple; }

  bool boolean() const { return scalar_.b; }
  int64_t integer() const { return kind_ == Kind::kBool ? (scalar_.b ? 1 : 0) : scalar_.i; }
  double number() const {
    return kind_ == Kind::kFloat ? scalar_.d : static_cast<double>(integer());
  }
  const StringObject& string() const { return static_cast<const StringObject&>(*object_); }
  const std::string& text() const { return string().text; }
  bool is_markup() const { return is_string() && string().is_markup; }
  const std::vector<Value>& items() const;  ///< of a list or tuple
  const DictObject& dict() const;
  template <class T>
  const T& as() const {
    return static_cast<const T&>(*object_);
  }
  template <class T>
  std::shared_ptr<const T> share() const {
    return std::static_pointer_cast<const T>(object_);
  }
  const Object* object() const { return object_.get(); }

 private:
  explicit Value(Kind kind) : kind_(kind) {}

  Kind kind_ = Kind::kMissing;
  union {
    bool b;
    int64_t i;
    double d;
  } scalar_ = {};
  std::shared_ptr<const Object> object_;
};

struct ListObject : Object {
  explicit ListObject(std::vector<Value> items);
  const std::vector<Value> items;
  const std::vector<std::string>* names = nullptr;  ///< of a named tuple
};

struct UndefinedObject : Object {
  explicit UndefinedObject(std::string text)
      : Object(static_cast<int64_t>(sizeof(*this) + text.size())), message(std::move(text)) {}
  const std::string message;
};

/// In the order of insertion; a key that comes again keeps its place.
struct DictObject : Object {
  DictObject();
  const Value* find(const Value& key) const;
  const Value* find(std::string_view key) const;
  void set(const Value& key, Value value);  ///< while it is made
  std::vector<std::pair<Value, Value>> items;

 private:
  size_t slot_of(const Value& key, size_t hash) const;
  void rehash();
  std::vector<uint32_t> table_;  ///< open addressing, of indices + 1; empty for few items
};

struct RangeObject : Object {
  RangeObject(int64_t begin, int64_t end, int64_t by);
  int64_t start, stop, step, num_items;
};

enum class DictPart : uint8_t { kKeys, kValues, kItems };

struct DictViewObject : Object {
  DictViewObject(std::shared_ptr<const DictObject> of, DictPart which);
  std::shared_ptr<const DictObject> dict;
  DictPart part;
};

class Iterator {
 public:
  virtual ~Iterator() = default;
  virtual bool next(Value& item) = 0;
};

struct IteratorObject : Object {
  IteratorObject(std::unique_ptr<Iterator> of, std::string type_name)
      : Object(256), iterator(std::move(of)), name(std::move(type_name)) {}
  mutable std::unique_ptr<Iterator> iterator;
  std::string name;  ///< "generator", "list_reverseiterator"
};

struct NamespaceObject : Object {
  NamespaceObject() : Object(sizeof(*this)) {}
  const Value* find(std::string_view name) const;
  void set(std::string_view name, Value value) const;
  mutable std::vector<std::pair<std::string, Value>> attributes;
};

Value make_dict(std::shared_ptr<DictObject> dict);
/// One that holds `held`.
Value make_iterator(std::unique_ptr<Iterator> iterator, const std::vector<Value>& held,
                    std::string type_name = "generator");
/// The depth of an object that holds these. An error if that is too large.
int depth_over(const std::vector<Value>& held);

/// The name of the type as Python's errors give it: "str", "list", "NoneType".
std::string type_name(const Value& value);

bool is_true(const Value& value);
bool equal(const Value& a, const Value& b);
/// As Python's hash: equal values have the same. TypeError (TemplateError) for lists and dicts.
size_t hash_of(const Value& value);
/// -1, 0, 1; an error that names the operator where Python has no order.
int compare(const Value& a, const Value& b, std::string_view op);
/// `item in container`.
bool contains(const Value& container, const Value& item);

/// str() and repr() of Python.
std::string to_string(const Value& value);
std::string to_repr(const Value& value);
/// The same, appended; stops with an error at the limit of memory.
void append_repr(std::string& out, const Value& value);
std::string repr_of_string(std::string_view text);
std::string repr_of_float(double value);

/// len(); -1 where there is none.
int64_t length_or_none(const Value& value);
int64_t length(const Value& value);

std::unique_ptr<Iterator> iterate(const Value& value);
std::vector<Value> to_vector(const Value& value);
bool is_iterable(const Value& value);

}  // namespace tessera::text::jinja
