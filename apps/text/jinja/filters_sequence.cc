// Filters of sequences. Those that give an iterator do nothing before it is asked, and no more than
// it is asked for, as in Jinja: an error in an item that nobody reads is none.

#include <algorithm>
#include <functional>

#include "apps/text/jinja/filters.h"
#include "apps/text/jinja/unicode.h"

namespace tessera::text::jinja {
namespace {

Value ignore_case(const Value& value) {
  count_steps(value.is_string() ? 4 + static_cast<int64_t>(value.text().size() / 8) : 4);
  return value.is_string() ? Value(to_lower(value.text()), value.is_markup()) : value;
}

/// "a.0.b" or 3 as the keys of what is in one another.
class AttributePath {
 public:
  explicit AttributePath(const Value& attribute) {
    if (attribute.is_none()) return;
    if (!attribute.is_string()) {
      keys_.push_back(attribute);
      return;
    }
    const std::string& text = attribute.text();
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find('.', begin), text.size());
      keys_.push_back(key_of(text.substr(begin, end - begin)));
      begin = end + 1;
    }
  }

  Value of(Value item, const Value& otherwise = Value::none()) const {
    for (const Value& key : keys_) {
      item = get_item(item, key);
      if (item.is_undefined() && !otherwise.is_none()) item = otherwise;
    }
    return item;
  }

 private:
  static Value key_of(const std::string& text) {
    const bool is_number =
        !text.empty() && text.size() < 18 &&
        std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
    return is_number ? Value(int64_t{std::stoll(text)}) : Value(text);
  }

  std::vector<Value> keys_;
};

/// An iterator over what `make` gives, which runs when the first item is asked for.
template <class Make>
class LazyIterator : public Iterator {
 public:
  explicit LazyIterator(Make make) : make_(std::move(make)) {}
  bool next(Value& item) override {
    if (next_ == nullptr) next_ = make_();
    count_steps(1);
    return next_(item);
  }

 private:
  Make make_;
  std::function<bool(Value&)> next_;
};

/// One that holds `held`.
template <class Make>
Value lazy(const std::vector<Value>& held, Make make) {
  return make_iterator(std::make_unique<LazyIterator<Make>>(std::move(make)), held);
}

std::vector<Value> values_in(const Args& args) {
  std::vector<Value> values = args.positional;
  for (const auto& [name, value] : args.keyword) values.push_back(value);
  return values;
}

using Next = std::function<bool(Value&)>;
const Next kEmpty = [](Value&) { return false; };

Value length_filter(Interpreter&, const Args& args) {
  ArgReader reader(args, "length");
  const Value value = reader.required_positional();
  reader.finish();
  return length(value);
}

Value list_filter(Interpreter&, const Args& args) {
  ArgReader reader(args, "list");
  const Value value = reader.required("value");
  reader.finish();
  return Value::list(to_vector(value));
}

Value first(Interpreter&, const Args& args) {
  ArgReader reader(args, "first");
  const Value value = reader.required("seq");
  reader.finish();
  Value item;
  if (iterate(value)->next(item)) return item;
  return Value::undefined("No first item, sequence was empty.");
}

/// What reversed() takes: not iterators.
bool is_reversible(const Value& value) {
  return is_iterable(value) && !value.is(Kind::kIterator) && !value.is(Kind::kLoop);
}

Value last(Interpreter&, const Args& args) {
  ArgReader reader(args, "last");
  const Value value = reader.required("seq");
  reader.finish();
  if (!is_reversible(value)) fail("'{}' object is not reversible", type_name(value));
  if (length(value) == 0) return Value::undefined("No last item, sequence was empty.");
  if (value.is_string() || value.is_sequence() || value.is(Kind::kRange)) {
    return get_item(value, Value(int64_t{-1}));
  }
  return to_vector(value).back();
}

Value reverse(Interpreter&, const Args& args) {
  ArgReader reader(args, "reverse");
  const Value value = reader.required("value");
  reader.finish();
  if (value.is_string()) return slice(value, Value::none(), Value::none(), Value(int64_t{-1}));
  if (!is_iterable(value)) fail("argument must be iterable");
  std::vector<Value> items = to_vector(value);
  std::reverse(items.begin(), items.end());
  Value list = Value::list(std::move(items));
  if (!is_reversible(value)) return list;
  return make_iterator(iterate(list), {list}, "list_reverseiterator");
}

Value join(Interpreter&, const Args& args) {
  ArgReader reader(args, "join");
  const Value value = reader.required("value");
  const std::string between = to_string(reader.optional("d", Value("")));
  const Value attribute = reader.optional("attribute", Value::none());
  reader.finish();
  const AttributePath path(attribute);
  std::string text;
  bool is_first = true;
  const auto items = iterate(value);
  for (Value item; items->next(item);) {
    if (!is_first) text += between;
    is_first = false;
    text += to_string(path.of(item));
    count_steps(1);
    expect_growing(text.size());
  }
  return text;
}

Value items_filter(Interpreter&, const Args& args) {
  ArgReader reader(args, "items");
  const Value value = reader.required("value");
  reader.finish();
  return lazy(values_in(args), [value]() -> Next {
    if (value.is_undefined()) return kEmpty;
    if (!value.is(Kind::kDict)) fail("Can only get item pairs from a mapping.");
    return [value, at = size_t{0}](Value& item) mutable {
      if (at == value.dict().items.size()) return false;
      const auto& [key, each] = value.dict().items[at++];
      item = Value::tuple({key, each});
      return true;
    };
  });
}

/// `f` of each item; nothing for what is false, also where that is no sequence.
template <class MakeFunction>
Value map_lazily(const Args& args, MakeFunction make_function) {
  return lazy(values_in(args), [value = args.positional[0], make_function]() -> Next {
    if (!is_true(value)) return kEmpty;
    auto function = make_function();
    std::shared_ptr<Iterator> items = iterate(value);
    return [function, items](Value& item) {
      while (items->next(item)) {
        count_steps(1);
        if (function(item)) return true;
      }
      return false;
    };
  });
}

Value map_filter(Interpreter& interpreter, const Args& args) {
  if (args.positional.empty()) fail("map() missing required positional argument: 'value'");
  return map_lazily(args, [&interpreter, args] {
    std::function<bool(Value&)> function;
    if (args.positional.size() == 1) {
      ArgReader reader(args, "map");
      reader.required_positional();
      const Value attribute = reader.keyword_only("attribute", Value());
      const Value otherwise = reader.keyword_only("default", Value::none());
      if (attribute.is_missing()) fail("map requires a filter argument");
      reader.finish();
      function = [path = AttributePath(attribute), otherwise](Value& item) {
        item = path.of(item, otherwise);
        return true;
      };
      return function;
    }
    const std::string& name = to_text(args.positional[1], "map");
    const Callback filter = find_filter(name);
    if (filter == nullptr) fail("No filter named '{}'.", name);
    Args inner = args;
    inner.positional.erase(inner.positional.begin() + 1);
    function = [&interpreter, filter, inner](Value& item) {
      Args each = inner;
      each.positional[0] = item;
      const Level level(*Meter::current());
      item = filter(interpreter, each);
      return true;
    };
    return function;
  });
}

template <bool kHasAttribute, bool kIsRejecting>
Value select(Interpreter& interpreter, const Args& args) {
  if (args.positional.empty()) fail("select() missing required positional argument: 'value'");
  return map_lazily(args, [&interpreter, args] {
    const size_t num_before = kHasAttribute ? 2 : 1;
    if (args.positional.size() < num_before) fail("Missing parameter for attribute name");
    const AttributePath path(kHasAttribute ? args.positional[1] : Value::none());
    Callback test = nullptr;
    Args inner = args;
    if (args.positional.size() > num_before) {
      const std::string& name = to_text(args.positional[num_before], "select");
      test = find_test(name);
      if (test == nullptr) fail("No test named '{}'.", name);
      inner.positional.erase(inner.positional.begin() + 1,
                             inner.positional.begin() + static_cast<int64_t>(num_before) + 1);
    }
    return [&interpreter, path, test, inner](Value& item) {
      const Value value = path.of(item);
      bool holds = false;
      if (test == nullptr) {
        holds = is_true(value);
      } else {
        Args each = inner;
        each.positional[0] = value;
        holds = is_true(test(interpreter, each));
      }
      return holds != kIsRejecting;
    };
  });
}

/// Sorts by keys of the same length; stable, also in reverse.
void sort_by(std::vector<std::pair<Value, Value>>& keyed, bool is_reverse) {
  // Errors of comparisons must not leave std::stable_sort's buffer in between.
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return is_reverse ? compare(b.first, a.first, "<") < 0 : compare(a.first, b.first, "<") < 0;
  });
}

std::vector<Value> values_of(std::vector<std::pair<Value, Value>> keyed) {
  std::vector<Value> values;
  for (auto& [key, value] : keyed) values.push_back(std::move(value));
  return values;
}

Value dictsort(Interpreter&, const Args& args) {
  ArgReader reader(args, "dictsort");
  const Value dict = reader.required("value");
  const bool is_case_sensitive = is_true(reader.optional("case_sensitive", Value(false)));
  const Value by = reader.optional("by", Value("key"));
  const bool is_reverse = is_true(reader.optional("reverse", Value(false)));
  reader.finish();
  const bool is_by_key = equal(by, Value("key"));
  if (!is_by_key && !equal(by, Value("value"))) {
    fail("You can only sort by either \"key\" or \"value\"");
  }
  if (dict.is_undefined()) throw TemplateError(dict.as<UndefinedObject>().message);
  if (!dict.is(Kind::kDict)) fail("'{}' object has no attribute 'items'", type_name(dict));
  std::vector<std::pair<Value, Value>> keyed;
  for (const auto& [key, value] : dict.dict().items) {
    const Value& sorted = is_by_key ? key : value;
    keyed.emplace_back(is_case_sensitive ? sorted : ignore_case(sorted),
                       Value::tuple({key, value}));
  }
  sort_by(keyed, is_reverse);
  return Value::list(values_of(std::move(keyed)));
}

Value sort(Interpreter&, const Args& args) {
  ArgReader reader(args, "sort");
  const Value value = reader.required("value");
  const bool is_reverse = is_true(reader.optional("reverse", Value(false)));
  const bool is_case_sensitive = is_true(reader.optional("case_sensitive", Value(false)));
  const Value attribute = reader.optional("attribute", Value::none());
  reader.finish();
  std::vector<AttributePath> paths;
  if (attribute.is_string()) {
    const std::string& text = attribute.text();
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(',', begin), text.size());
      paths.emplace_back(Value(text.substr(begin, end - begin)));
      begin = end + 1;
    }
  } else {
    paths.emplace_back(attribute);
  }
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : to_vector(value)) {
    std::vector<Value> key;
    for (const AttributePath& path : paths) {
      key.push_back(is_case_sensitive ? path.of(item) : ignore_case(path.of(item)));
    }
    keyed.emplace_back(Value::list(std::move(key)), item);
  }
  sort_by(keyed, is_reverse);
  return Value::list(values_of(std::move(keyed)));
}

Value unique(Interpreter&, const Args& args) {
  ArgReader reader(args, "unique");
  const Value value = reader.required("value");
  const bool is_case_sensitive = is_true(reader.optional("case_sensitive", Value(false)));
  const AttributePath path(reader.optional("attribute", Value::none()));
  reader.finish();
  return lazy(values_in(args), [value, is_case_sensitive, path]() -> Next {
    std::shared_ptr<Iterator> items = iterate(value);
    auto seen = std::make_shared<DictObject>();
    return [items, seen, is_case_sensitive, path](Value& item) {
      while (items->next(item)) {
        const Value key = is_case_sensitive ? path.of(item) : ignore_case(path.of(item));
        if (seen->find(key) != nullptr) continue;
        seen->set(key, Value::none());
        return true;
      }
      return false;
    };
  });
}

template <bool kIsMax>
Value extreme(Interpreter&, const Args& args) {
  ArgReader reader(args, kIsMax ? "max" : "min");
  const Value value = reader.required("value");
  const bool is_case_sensitive = is_true(reader.optional("case_sensitive", Value(false)));
  const AttributePath path(reader.optional("attribute", Value::none()));
  reader.finish();
  const auto items = iterate(value);
  Value best, best_key;
  for (Value item; items->next(item);) {
    const Value key = is_case_sensitive ? path.of(item) : ignore_case(path.of(item));
    const bool is_better = best.is_missing() || (kIsMax ? compare(key, best_key, ">") > 0
                                                        : compare(key, best_key, "<") < 0);
    if (!is_better) continue;
    best = item;
    best_key = key;
  }
  return best.is_missing() ? Value::undefined("No aggregated item, sequence was empty.") : best;
}

Value sum(Interpreter&, const Args& args) {
  ArgReader reader(args, "sum");
  const Value value = reader.required("iterable");
  const AttributePath path(reader.optional("attribute", Value::none()));
  Value total = reader.optional("start", Value(int64_t{0}));
  reader.finish();
  if (total.is_string()) fail("sum() can't sum strings [use ''.join(seq) instead]");
  const auto items = iterate(value);
  for (Value item; items->next(item);) total = binary(BinaryOp::kAdd, total, path.of(item));
  return total;
}

Value batch(Interpreter&, const Args& args) {
  ArgReader reader(args, "batch");
  const Value value = reader.required("value");
  const Value count = reader.required("linecount");
  const Value fill = reader.optional("fill_with", Value::none());
  reader.finish();
  return lazy(values_in(args), [value, count, fill]() -> Next {
    std::shared_ptr<Iterator> items = iterate(value);
    auto pending = std::make_shared<std::vector<Value>>();
    return [items, count, fill, pending](Value& batch) {
      for (Value item; items->next(item);) {
        count_steps(1);
        const bool is_full =
            count.is_number() && static_cast<double>(pending->size()) == count.number();
        std::vector<Value> done;
        if (is_full) done.swap(*pending);
        pending->push_back(item);
        expect_nbytes(static_cast<int64_t>(pending->size() * sizeof(Value)) / 32);
        if (!is_full) continue;
        batch = Value::list(std::move(done));
        return true;
      }
      if (pending->empty()) return false;
      const int64_t missing =
          fill.is_none() ? 0 : to_index(count, "batch") - static_cast<int64_t>(pending->size());
      expect_nbytes(product(std::max<int64_t>(0, missing), sizeof(Value)));
      for (int64_t i = 0; i < missing; ++i) pending->push_back(fill);
      batch = Value::list(std::exchange(*pending, {}));
      return true;
    };
  });
}

Value slice_filter(Interpreter&, const Args& args) {
  ArgReader reader(args, "slice");
  const Value value = reader.required("value");
  const Value num_slices = reader.required("slices");
  const Value fill = reader.optional("fill_with", Value::none());
  reader.finish();
  return lazy(values_in(args), [value, num_slices, fill]() -> Next {
    const Value list = Value::list(to_vector(value));
    const int64_t count = to_index(num_slices, "slice");
    if (count == 0) fail("integer division or modulo by zero");
    return [list, count, fill, number = int64_t{0}, begin = int64_t{0}](Value& part) mutable {
      if (number >= count) return false;
      const auto& all = list.items();
      const auto size = static_cast<int64_t>(all.size());
      const bool has_extra = number < size % count;
      const int64_t end = begin + size / count + (has_extra ? 1 : 0);
      std::vector<Value> items(all.begin() + begin, all.begin() + end);
      if (!fill.is_none() && !has_extra) items.push_back(fill);
      begin = end;
      ++number;
      part = Value::list(std::move(items));
      return true;
    };
  });
}

Value groupby(Interpreter&, const Args& args) {
  ArgReader reader(args, "groupby");
  const Value value = reader.required("value");
  const AttributePath path(reader.required("attribute"));
  const Value otherwise = reader.optional("default", Value::none());
  const bool is_case_sensitive = is_true(reader.optional("case_sensitive", Value(false)));
  reader.finish();
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : to_vector(value)) {
    const Value key = path.of(item, otherwise);
    keyed.emplace_back(is_case_sensitive ? key : ignore_case(key), item);
  }
  sort_by(keyed, false);
  static const std::vector<std::string> kNames = {"grouper", "list"};
  std::vector<Value> groups;
  for (size_t begin = 0; begin < keyed.size();) {
    size_t end = begin;
    std::vector<Value> items;
    while (end < keyed.size() && equal(keyed[end].first, keyed[begin].first)) {
      items.push_back(keyed[end++].second);
    }
    const Value key =
        is_case_sensitive ? keyed[begin].first : path.of(keyed[begin].second, otherwise);
    auto group =
        std::make_shared<ListObject>(std::vector<Value>{key, Value::list(std::move(items))});
    group->names = &kNames;
    groups.emplace_back(Kind::kTuple, std::move(group));
    begin = end;
  }
  return Value::list(std::move(groups));
}

constexpr NamedCallback kSequenceFilters[] = {
    {"batch", batch},
    {"count", length_filter},
    {"dictsort", dictsort},
    {"first", first},
    {"groupby", groupby},
    {"items", items_filter},
    {"join", join},
    {"last", last},
    {"length", length_filter},
    {"list", list_filter},
    {"map", map_filter},
    {"max", extreme<true>},
    {"min", extreme<false>},
    {"reject", select<false, true>},
    {"rejectattr", select<true, true>},
    {"reverse", reverse},
    {"select", select<false, false>},
    {"selectattr", select<true, false>},
    {"slice", slice_filter},
    {"sort", sort},
    {"sum", sum},
    {"unique", unique},
};

}  // namespace

std::span<const NamedCallback> sequence_filters() {
  return kSequenceFilters;
}

Callback find_filter(std::string_view name) {
  for (const auto filters : {text_filters(), sequence_filters()}) {
    for (const auto& [each, callback] : filters) {
      if (each == name) return callback;
    }
  }
  return nullptr;
}

bool is_unsupported_filter(std::string_view name) {
  for (const std::string_view each : {"pprint", "random", "striptags", "urlize", "wordwrap"}) {
    if (each == name) return true;
  }
  return false;
}

}  // namespace tessera::text::jinja
