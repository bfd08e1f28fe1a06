// Iteration, indices and slices of Python.

#include <algorithm>

#include "apps/text/jinja/function.h"
#include "apps/text/jinja/unicode.h"
#include "apps/text/jinja/value.h"

namespace tessera::text::jinja {
namespace {

class ListIterator : public Iterator {
 public:
  explicit ListIterator(std::shared_ptr<const ListObject> list) : list_(std::move(list)) {}
  bool next(Value& item) override {
    if (at_ == list_->items.size()) return false;
    item = list_->items[at_++];
    return true;
  }

 private:
  std::shared_ptr<const ListObject> list_;
  size_t at_ = 0;
};

class StringIterator : public Iterator {
 public:
  explicit StringIterator(std::shared_ptr<const StringObject> string)
      : string_(std::move(string)) {}
  bool next(Value& item) override {
    if (at_ == string_->text.size()) return false;
    const size_t begin = at_;
    next_char(string_->text, at_);
    item = Value(string_->text.substr(begin, at_ - begin), string_->is_markup);
    return true;
  }

 private:
  std::shared_ptr<const StringObject> string_;
  size_t at_ = 0;
};

class DictIterator : public Iterator {
 public:
  DictIterator(std::shared_ptr<const DictObject> dict, DictPart part)
      : dict_(std::move(dict)), part_(part) {}
  bool next(Value& item) override {
    if (at_ == dict_->items.size()) return false;
    const auto& [key, value] = dict_->items[at_++];
    item = part_ == DictPart::kKeys     ? key
           : part_ == DictPart::kValues ? value
                                        : Value::tuple({key, value});
    return true;
  }

 private:
  std::shared_ptr<const DictObject> dict_;
  DictPart part_;
  size_t at_ = 0;
};

class RangeIterator : public Iterator {
 public:
  explicit RangeIterator(std::shared_ptr<const RangeObject> range) : range_(std::move(range)) {}
  bool next(Value& item) override {
    if (at_ == range_->num_items) return false;
    item = Value(range_->start + at_++ * range_->step);
    return true;
  }

 private:
  std::shared_ptr<const RangeObject> range_;
  int64_t at_ = 0;
};

/// The rest of one that others iterate as well.
class SharedIterator : public Iterator {
 public:
  explicit SharedIterator(std::shared_ptr<const IteratorObject> of) : of_(std::move(of)) {}
  bool next(Value& item) override { return of_->iterator->next(item); }

 private:
  std::shared_ptr<const IteratorObject> of_;
};

class EmptyIterator : public Iterator {
 public:
  bool next(Value&) override { return false; }
};

struct Bounds {
  int64_t start, count, step;
};

/// Python's slice.indices, as a first index, a number of items and a step.
Bounds bounds_of(int64_t num_items, const Value& start_value, const Value& stop_value,
                 const Value& step_value) {
  const auto index = [](const Value& value, int64_t otherwise) {
    if (value.is_none()) return otherwise;
    if (value.is_undefined()) throw TemplateError(value.as<UndefinedObject>().message);
    if (!value.is_integral()) {
      fail("slice indices must be integers or None or have an __index__ method");
    }
    return value.integer();
  };
  int64_t step = index(step_value, 1);
  if (step == 0) fail("slice step cannot be zero");
  step = std::clamp<int64_t>(step, -(num_items + 1), num_items + 1);  // more makes no difference
  const int64_t lowest = step > 0 ? 0 : -1, highest = step > 0 ? num_items : num_items - 1;
  const auto place = [&](const Value& value, int64_t otherwise) {
    if (value.is_none()) return otherwise;
    const int64_t at = index(value, 0);
    if (at < 0) return std::max(at < -num_items ? lowest : at + num_items, lowest);
    return std::min(at, highest);
  };
  const int64_t start = place(start_value, step > 0 ? lowest : highest);
  const int64_t stop = place(stop_value, step > 0 ? highest : lowest);
  int64_t count = 0;
  if (step > 0 && start < stop) count = (stop - start - 1) / step + 1;
  if (step < 0 && start > stop) count = (start - stop - 1) / -step + 1;
  return {start, count, step};
}

Value slice_string(const Value& value, const Bounds& bounds) {
  const StringObject& string = value.string();
  const std::string& text = string.text;
  count_steps(static_cast<int64_t>(text.size() / 32));
  if (bounds.step == 1) {
    const size_t begin = byte_of_char(text, static_cast<size_t>(bounds.start), string.is_ascii());
    const size_t nbytes = byte_of_char(std::string_view(text).substr(begin),
                                       static_cast<size_t>(bounds.count), string.is_ascii());
    return Value(text.substr(begin, nbytes), string.is_markup);
  }
  expect_nbytes(static_cast<int64_t>(text.size() * 8));
  std::vector<uint32_t> starts;
  starts.reserve(string.num_chars);
  for (size_t at = 0; at < text.size(); next_char(text, at)) {
    starts.push_back(static_cast<uint32_t>(at));
  }
  std::string out;
  for (int64_t i = 0; i < bounds.count; ++i) {
    size_t at = starts[static_cast<size_t>(bounds.start + i * bounds.step)];
    append_char(out, next_char(text, at));
  }
  return Value(std::move(out), string.is_markup);
}

/// items[index], where it is an int within them; missing otherwise.
template <class F>
Value at_index(int64_t num_items, const Value& key, const F& get) {
  if (!key.is_integral()) return {};
  const int64_t index = key.integer();
  if (index >= num_items || index < -num_items) return {};
  return get(index < 0 ? index + num_items : index);
}

/// Python's object[key] without errors of type and look-up, which are missing here.
Value subscript(const Value& object, const Value& key) {
  switch (object.kind()) {
    case Kind::kString: {
      const StringObject& string = object.string();
      return at_index(static_cast<int64_t>(string.num_chars), key, [&](int64_t index) {
        if (!string.is_ascii()) count_steps(index / 32);
        size_t at = byte_of_char(string.text, static_cast<size_t>(index), string.is_ascii());
        const size_t begin = at;
        next_char(string.text, at);
        return Value(string.text.substr(begin, at - begin), string.is_markup);
      });
    }
    case Kind::kList:
    case Kind::kTuple:
      return at_index(static_cast<int64_t>(object.items().size()), key,
                      [&](int64_t index) { return object.items()[static_cast<size_t>(index)]; });
    case Kind::kRange: {
      const auto& range = object.as<RangeObject>();
      return at_index(range.num_items, key,
                      [&](int64_t index) { return Value(range.start + index * range.step); });
    }
    case Kind::kDict: {
      if (key.is(Kind::kList) || key.is(Kind::kDict)) return {};  // not hashable
      const Value* value = object.dict().find(key);
      return value == nullptr ? Value() : *value;
    }
    case Kind::kUndefined:
      throw TemplateError(object.as<UndefinedObject>().message);
    default:
      return {};
  }
}

Value undefined_attribute(const Value& object, const Value& key) {
  if (key.is_string()) {
    return Value::undefined(
        fmt::format("'{} object' has no attribute {}", type_name(object), to_repr(key)));
  }
  return Value::undefined(
      fmt::format("{} object has no element {}", type_name(object), to_repr(key)));
}

/// What every object of Python has, and templates may not have.
bool is_internal_name(std::string_view name) {
  static const std::string_view kNames[] = {
      "__class__",     "__dict__",   "__doc__",          "__init__",
      "__new__",       "__repr__",   "__str__",          "__eq__",
      "__ne__",        "__lt__",     "__le__",           "__gt__",
      "__ge__",        "__hash__",   "__getattribute__", "__setattr__",
      "__delattr__",   "__dir__",    "__format__",       "__reduce__",
      "__reduce_ex__", "__sizeof__", "__subclasshook__", "__init_subclass__",
      "__module__"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

/// getattr() of Python; missing if there is no such attribute.
Value python_attribute(const Value& object, std::string_view name) {
  if (is_internal_name(name) && !object.is(Kind::kNamespace)) {
    return Value::undefined(
        fmt::format("access to attribute '{}' of '{}' object is unsafe.", name, type_name(object)));
  }
  if (object.is_undefined()) throw TemplateError(object.as<UndefinedObject>().message);
  if (object.is(Kind::kNamespace)) {
    const Value* value = object.as<NamespaceObject>().find(name);
    return value == nullptr ? Value() : *value;
  }
  if (object.is(Kind::kLoop)) return object.as<LoopObject>().attribute(name);
  if (object.is(Kind::kFunction)) return object.as<FunctionObject>().attribute(name);
  return find_method(object, name);
}

}  // namespace

std::unique_ptr<Iterator> iterate(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
      return std::make_unique<EmptyIterator>();
    case Kind::kString:
      return std::make_unique<StringIterator>(value.share<StringObject>());
    case Kind::kList:
    case Kind::kTuple:
      return std::make_unique<ListIterator>(value.share<ListObject>());
    case Kind::kDict:
      return std::make_unique<DictIterator>(value.share<DictObject>(), DictPart::kKeys);
    case Kind::kRange:
      return std::make_unique<RangeIterator>(value.share<RangeObject>());
    case Kind::kDictView: {
      const auto& view = value.as<DictViewObject>();
      return std::make_unique<DictIterator>(view.dict, view.part);
    }
    case Kind::kIterator:
      return std::make_unique<SharedIterator>(value.share<IteratorObject>());
    default:
      fail("'{}' object is not iterable", type_name(value));
  }
}

bool is_iterable(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kRange:
    case Kind::kDictView:
    case Kind::kIterator:
    case Kind::kLoop:
      return true;
    default:
      return false;
  }
}

std::vector<Value> to_vector(const Value& value) {
  if (value.is_sequence()) {
    expect_nbytes(product(length(value), sizeof(Value)));
    return value.items();
  }
  std::vector<Value> items;
  Charge charge(0);
  const auto iterator = iterate(value);
  for (Value item; iterator->next(item);) {
    count_steps(1);
    charge.grow(3 * sizeof(Value));  // a vector that grows
    items.push_back(std::move(item));
  }
  return items;
}

Value get_item(const Value& object, const Value& key) {
  count_steps(1);
  Value value = subscript(object, key);
  if (value.is_missing() && key.is_string()) value = python_attribute(object, key.text());
  return value.is_missing() ? undefined_attribute(object, key) : value;
}

Value get_attribute(const Value& object, std::string_view name) {
  count_steps(1);
  Value value = python_attribute(object, name);
  if (value.is_missing() && object.is(Kind::kDict)) {
    if (const Value* found = object.dict().find(name)) value = *found;
  }
  return value.is_missing() ? undefined_attribute(object, Value(name)) : value;
}

Value slice(const Value& object, const Value& start, const Value& stop, const Value& step) {
  switch (object.kind()) {
    case Kind::kUndefined:
      throw TemplateError(object.as<UndefinedObject>().message);
    case Kind::kString:
      return slice_string(object, bounds_of(length(object), start, stop, step));
    case Kind::kList:
    case Kind::kTuple: {
      const Bounds bounds = bounds_of(length(object), start, stop, step);
      expect_nbytes(product(bounds.count, sizeof(Value)));
      std::vector<Value> items;
      items.reserve(static_cast<size_t>(bounds.count));
      for (int64_t i = 0; i < bounds.count; ++i) {
        items.push_back(object.items()[static_cast<size_t>(bounds.start + i * bounds.step)]);
      }
      return object.is(Kind::kList) ? Value::list(std::move(items))
                                    : Value::tuple(std::move(items));
    }
    case Kind::kRange: {
      const auto& range = object.as<RangeObject>();
      const Bounds bounds = bounds_of(range.num_items, start, stop, step);
      const int64_t first = range.start + bounds.start * range.step;
      const int64_t by = range.step * bounds.step;
      return {Kind::kRange, std::make_shared<RangeObject>(first, first + bounds.count * by, by)};
    }
    case Kind::kDict:
      fail("unhashable type: 'slice'");
    default:
      fail("'{}' object is not subscriptable", type_name(object));
  }
}

}  // namespace tessera::text::jinja
