#include "apps/text/jinja/value.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "apps/text/jinja/function.h"
#include "apps/text/jinja/strings.h"
#include "apps/text/jinja/unicode.h"

namespace tessera::text::jinja {
namespace {

constexpr int kMaxObjectDepth = 250;
constexpr size_t kHeapNbytes = 48;  ///< of an allocation or two besides what is asked for
constexpr size_t kMaxSearched = 8;  ///< items of a dict that are compared one by one

int depth_of(const Value& value) {
  return value.object() == nullptr ? 0 : value.object()->depth;
}

int deeper(int depth) {
  if (depth >= kMaxObjectDepth) fail("values nest deeper than {} levels", kMaxObjectDepth);
  return depth + 1;
}

int64_t nbytes_of(const std::vector<Value>& items) {
  return static_cast<int64_t>(sizeof(ListObject) + kHeapNbytes + items.capacity() * sizeof(Value));
}

size_t combine(size_t seed, size_t hash) {
  return seed ^ (hash + 0x9e3779b97f4a7c15ull + (seed << 6) + (seed >> 2));
}

bool is_text(const Value& value, std::string_view text) {
  return value.is_string() && value.text() == text;
}

bool equal_dicts(const DictObject& a, const DictObject& b) {
  if (a.items.size() != b.items.size()) return false;
  return std::all_of(a.items.begin(), a.items.end(), [&](const auto& item) {
    const Value* other = b.find(item.first);
    return other != nullptr && equal(item.second, *other);
  });
}

bool equal_numbers(const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) return a.integer() == b.integer();
  if (a.is(Kind::kFloat) && b.is(Kind::kFloat)) return a.number() == b.number();
  // An int beyond 2^53 is not its double.
  const double d = a.is(Kind::kFloat) ? a.number() : b.number();
  const int64_t i = a.is(Kind::kFloat) ? b.integer() : a.integer();
  return d >= -0x1p63 && d < 0x1p63 && std::floor(d) == d && static_cast<int64_t>(d) == i;
}

}  // namespace

StringObject::StringObject(std::string text_in, bool markup)
    : Object(static_cast<int64_t>(sizeof(StringObject) + kHeapNbytes + text_in.size())),
      text(std::move(text_in)),
      is_markup(markup),
      num_chars(count_chars(text)) {}

ListObject::ListObject(std::vector<Value> values)
    : Object(nbytes_of(values)), items(std::move(values)) {
  depth = depth_over(items);
}

DictObject::DictObject() : Object(sizeof(DictObject)) {
  depth = 1;
}

size_t DictObject::slot_of(const Value& key, size_t hash) const {
  size_t slot = hash & (table_.size() - 1);
  while (table_[slot] != 0 && !equal(items[table_[slot] - 1].first, key)) {
    slot = (slot + 1) & (table_.size() - 1);
  }
  return slot;
}

const Value* DictObject::find(const Value& key) const {
  const size_t hash = hash_of(key);
  if (!table_.empty()) {
    const uint32_t index = table_[slot_of(key, hash)];
    return index == 0 ? nullptr : &items[index - 1].second;
  }
  for (const auto& [each, value] : items) {
    if (equal(each, key)) return &value;
  }
  return nullptr;
}

const Value* DictObject::find(std::string_view key) const {
  if (!table_.empty()) return find(Value(key));
  for (const auto& [each, value] : items) {
    if (is_text(each, key)) return &value;
  }
  return nullptr;
}

void DictObject::rehash() {
  table_.assign(std::max<size_t>(32, table_.size() * 2), 0);
  for (size_t i = 0; i < items.size(); ++i) {
    table_[slot_of(items[i].first, hash_of(items[i].first))] = static_cast<uint32_t>(i + 1);
  }
}

void DictObject::set(const Value& key, Value value) {
  if (const Value* old = find(key)) {
    for (auto& item : items) {
      if (&item.second == old) item.second = value;
    }
  } else {
    charge.grow(5 * sizeof(Value));  // key, value and table, in vectors that grow
    items.emplace_back(key, value);
    if (!table_.empty() && items.size() * 2 <= table_.size()) {
      table_[slot_of(key, hash_of(key))] = static_cast<uint32_t>(items.size());
    } else if (items.size() > kMaxSearched) {
      rehash();
    }
  }
  depth = std::max({depth, deeper(depth_of(key)), deeper(depth_of(value))});
}

DictViewObject::DictViewObject(std::shared_ptr<const DictObject> of, DictPart which)
    : Object(sizeof(DictViewObject)), dict(std::move(of)), part(which) {
  depth = deeper(dict->depth);
}

int depth_over(const std::vector<Value>& held) {
  int inner = 0;
  for (const Value& item : held) inner = std::max(inner, depth_of(item));
  return deeper(inner);
}

RangeObject::RangeObject(int64_t begin, int64_t end, int64_t by)
    : Object(sizeof(RangeObject)), start(begin), stop(end), step(by), num_items(0) {
  const auto distance = [](int64_t from, int64_t to) {
    return static_cast<uint64_t>(to) - static_cast<uint64_t>(from);
  };
  uint64_t count = 0;
  if (step > 0 && start < stop) {
    count = (distance(start, stop) - 1) / static_cast<uint64_t>(step) + 1;
  } else if (step < 0 && start > stop) {
    count = (distance(stop, start) - 1) / (0 - static_cast<uint64_t>(step)) + 1;
  }
  num_items = static_cast<int64_t>(std::min<uint64_t>(count, std::numeric_limits<int64_t>::max()));
}

Value::Value(std::string text, bool is_markup) : kind_(Kind::kString) {
  count_steps(static_cast<int64_t>(text.size() / 32));
  object_ = std::make_shared<StringObject>(std::move(text), is_markup);
}

Value Value::list(std::vector<Value> items) {
  count_steps(static_cast<int64_t>(items.size() / 8));
  return {Kind::kList, std::make_shared<ListObject>(std::move(items))};
}

Value Value::tuple(std::vector<Value> items) {
  count_steps(static_cast<int64_t>(items.size() / 8));
  return {Kind::kTuple, std::make_shared<ListObject>(std::move(items))};
}

Value Value::undefined(std::string message) {
  return {Kind::kUndefined, std::make_shared<UndefinedObject>(std::move(message))};
}

const std::vector<Value>& Value::items() const {
  return as<ListObject>().items;
}

const DictObject& Value::dict() const {
  return as<DictObject>();
}

const Value* NamespaceObject::find(std::string_view name) const {
  for (const auto& [each, value] : attributes) {
    if (each == name) return &value;
  }
  return nullptr;
}

void NamespaceObject::set(std::string_view name, Value value) const {
  for (auto& [each, old] : attributes) {
    if (each != name) continue;
    old = std::move(value);
    return;
  }
  attributes.emplace_back(name, std::move(value));
}

Value make_dict(std::shared_ptr<DictObject> dict) {
  return {Kind::kDict, std::move(dict)};
}

Value make_iterator(std::unique_ptr<Iterator> iterator, const std::vector<Value>& held,
                    std::string type_name) {
  auto object = std::make_shared<IteratorObject>(std::move(iterator), std::move(type_name));
  object->depth = depth_over(held);
  return {Kind::kIterator, std::move(object)};
}

std::string type_name(const Value& value) {
  switch (value.kind()) {
    case Kind::kMissing:
      return "missing";
    case Kind::kUndefined:
      return "Undefined";
    case Kind::kNone:
      return "NoneType";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return value.is_markup() ? "Markup" : "str";
    case Kind::kList:
      return "list";
    case Kind::kTuple:
      return "tuple";
    case Kind::kDict:
      return "dict";
    case Kind::kRange:
      return "range";
    case Kind::kDictView: {
      const DictPart part = value.as<DictViewObject>().part;
      return part == DictPart::kKeys     ? "dict_keys"
             : part == DictPart::kValues ? "dict_values"
                                         : "dict_items";
    }
    case Kind::kIterator:
      return value.as<IteratorObject>().name;
    case Kind::kNamespace:
      return "Namespace";
    case Kind::kLoop:
      return "LoopContext";
    case Kind::kFunction:
      return std::string(value.as<FunctionObject>().type());
  }
  return "object";
}

int64_t length_or_none(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
      return 0;
    case Kind::kString:
      return static_cast<int64_t>(value.string().num_chars);
    case Kind::kList:
    case Kind::kTuple:
      return static_cast<int64_t>(value.items().size());
    case Kind::kDict:
      return static_cast<int64_t>(value.dict().items.size());
    case Kind::kRange:
      return value.as<RangeObject>().num_items;
    case Kind::kDictView:
      return static_cast<int64_t>(value.as<DictViewObject>().dict->items.size());
    case Kind::kLoop:
      return value.as<LoopObject>().length();
    default:
      return -1;
  }
}

int64_t length(const Value& value) {
  const int64_t count = length_or_none(value);
  if (count < 0) fail("object of type '{}' has no len()", type_name(value));
  return count;
}

bool is_true(const Value& value) {
  switch (value.kind()) {
    case Kind::kNone:
      return false;
    case Kind::kBool:
      return value.boolean();
    case Kind::kInt:
      return value.integer() != 0;
    case Kind::kFloat:
      return value.number() != 0;
    default:
      return length_or_none(value) != 0;
  }
}

bool equal(const Value& a, const Value& b) {
  count_steps(1);
  if (a.is_number() && b.is_number()) return equal_numbers(a, b);
  if (a.kind() != b.kind()) return false;
  if (a.object() != nullptr && a.object() == b.object()) return true;
  switch (a.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      count_steps(static_cast<int64_t>(std::min(a.text().size(), b.text().size()) / 32));
      return a.text() == b.text();
    case Kind::kList:
    case Kind::kTuple:
      return std::equal(a.items().begin(), a.items().end(), b.items().begin(), b.items().end(),
                        equal);
    case Kind::kDict:
      return equal_dicts(a.dict(), b.dict());
    case Kind::kRange: {
      const auto &x = a.as<RangeObject>(), &y = b.as<RangeObject>();
      return x.num_items == y.num_items && (x.num_items == 0 || x.start == y.start) &&
             (x.num_items < 2 || x.step == y.step);
    }
    default:
      return false;
  }
}

size_t hash_of(const Value& value) {
  switch (value.kind()) {
    case Kind::kBool:
    case Kind::kInt:
      return std::hash<int64_t>()(value.integer());
    case Kind::kFloat: {
      const double d = value.number();
      const bool is_whole = d >= -0x1p63 && d < 0x1p63 && std::floor(d) == d;
      return is_whole ? std::hash<int64_t>()(static_cast<int64_t>(d)) : std::hash<double>()(d);
    }
    case Kind::kString:
      return std::hash<std::string_view>()(value.text());
    case Kind::kTuple: {
      size_t hash = value.items().size();
      count_steps(static_cast<int64_t>(hash));
      for (const Value& item : value.items()) hash = combine(hash, hash_of(item));
      return hash;
    }
    case Kind::kList:
    case Kind::kDict:
    case Kind::kDictView:
      fail("unhashable type: '{}'", type_name(value));
    case Kind::kUndefined:
      return 1;
    case Kind::kNone:
      return 2;
    default:
      return std::hash<const void*>()(value.object());
  }
}

int compare(const Value& a, const Value& b, std::string_view op) {
  count_steps(1);
  if (a.is_integral() && b.is_integral()) {
    return a.integer() < b.integer() ? -1 : a.integer() > b.integer() ? 1 : 0;
  }
  if (a.is_number() && b.is_number()) {
    if (equal_numbers(a, b)) return 0;
    return a.number() < b.number() ? -1 : 1;
  }
  if (a.is_string() && b.is_string()) {  // UTF-8 sorts as the characters do
    count_steps(static_cast<int64_t>(std::min(a.text().size(), b.text().size()) / 32));
    const int order = a.text().compare(b.text());
    return order < 0 ? -1 : order > 0 ? 1 : 0;
  }
  if (a.is_sequence() && a.kind() == b.kind()) {
    const auto &x = a.items(), &y = b.items();
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!equal(x[i], y[i])) return compare(x[i], y[i], op);
    }
    return x.size() < y.size() ? -1 : x.size() > y.size() ? 1 : 0;
  }
  if (a.is_undefined()) throw TemplateError(a.as<UndefinedObject>().message);
  if (b.is_undefined()) throw TemplateError(b.as<UndefinedObject>().message);
  fail("'{}' not supported between instances of '{}' and '{}'", op, type_name(a), type_name(b));
}

bool contains(const Value& container, const Value& item) {
  switch (container.kind()) {
    case Kind::kString:
      if (!item.is_string()) {
        fail("'in <string>' requires string as left operand, not {}", type_name(item));
      }
      return find_text(container.text(), item.text()) != std::string::npos;
    case Kind::kDict:
      return container.dict().find(item) != nullptr;
    case Kind::kNone:
    case Kind::kBool:
    case Kind::kInt:
    case Kind::kFloat:
      fail("argument of type '{}' is not iterable", type_name(container));
    default:
      break;
  }
  const auto iterator = iterate(container);
  for (Value each; iterator->next(each);) {
    if (equal(each, item)) return true;
  }
  return false;
}

}  // namespace tessera::text::jinja
