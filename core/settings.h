#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/dtype.h"
#include "core/enum_names.h"

// Option structs as tables: a row binds a field to the name under which people set it, the values
// it may have and its words. The default is what the struct holds when it is made. Where the values
// come from (a file, a command line) and where they go (a listing, --help) is the reader's affair.
//
//   SettingTable<> table;
//   table.add("optim.beta2", options.beta2, kFraction, "decay rate of the second moment");
//   table.add("fsdp.offload", options.offload, "shards kept in host memory");  // names of the enum
//   table.rows()[0].set(0.99, "0.99");                                         // options.beta2

namespace tessera {

/// ConfigError "FsdpOptions::shard_size: 3 does not divide the 4 ranks" unless `is_right`: an option
/// that cannot be used, in the terms of the library that takes it. An application that has a name of
/// its own for the field can say that one.
template <class... Args>
void check_option(bool is_right, std::string_view field, fmt::format_string<Args...> problem,
                  Args&&... args) {
  if (is_right) return;
  throw ConfigError(
      fmt::format("{}: {}", field, fmt::format(problem, std::forward<Args>(args)...)));
}

/// Allowed numbers: from `low` to `high`, ends included unless open.
struct Range {
  double low, high;
  bool low_open = false, high_open = false;
};

inline constexpr double kMaxCount = 1e12;  ///< of steps, tokens, ...: nobody comes near it
inline constexpr Range kAnyNumber{-std::numeric_limits<double>::infinity(),
                                  std::numeric_limits<double>::infinity()};
inline constexpr Range kFraction{0, 1, false, true};
inline constexpr Range kF32Positive{1e-30, 1e30};  ///< becomes an f32, neither 0 nor infinity
inline constexpr Range kPositive{0, std::numeric_limits<double>::infinity(), true, true};
inline constexpr Range kNotNegative{0, std::numeric_limits<double>::infinity(), false, true};
constexpr Range at_least(double low) {
  return {low, kMaxCount};
}

/// What a setting is written as: a flag, an integer, a number, or text (also names of an enum).
using SettingValue = std::variant<bool, int64_t, double, std::string>;

/// One row.
struct Setting {
  std::string_view key;  ///< "optim.beta2"
  std::string_view doc;  ///< one line that can be read alone
  Range range = kAnyNumber;
  std::vector<std::string_view> choices = {};  ///< of text; empty: any
  std::string_view expected = {};  ///< what it accepts, in words; empty: by type, range, choices
  bool is_one_line = false;        ///< text without control characters
  std::function<SettingValue()> get = {};
  std::function<void(const SettingValue&)> assign = {};  ///< without a check

  bool is_text() const { return std::holds_alternative<std::string>(get()); }
  bool is_integer() const { return std::holds_alternative<int64_t>(get()); }
  bool is_flag() const { return std::holds_alternative<bool>(get()); }
  bool is_number() const { return std::holds_alternative<double>(get()); }

  /// "an integer in [1, 4096]", "one of auto, cpu, cuda", "true or false".
  std::string expected_text() const;
  /// The value as TOML: "full_shard" in quotes, 2.0, true.
  std::string value_text() const;
  /// ConfigError "optim.eps = 0.0, expected a number > 0" if the number that the field holds, from
  /// elsewhere than `set`, is out of range.
  void check() const;
  /// Checks and assigns. The alternative of `get`; a number may be an integer.
  /// Errors   ConfigError "optim.eps = 0, expected a number > 0" for a value out of range or of
  ///          another type, with `found`, the value as it was written
  void set(const SettingValue& value, const std::string& found) const;
};

/// `"text"` with the escapes of TOML.
std::string toml_text(std::string_view text);
/// The shortest text of a number that is no integer's: 2.0, 1e-05.
std::string number_text(double value);
/// The candidate with the smallest edit distance to `word`.
std::string_view nearest_name(std::string_view word, std::span<const std::string_view> candidates);
/// Of two names; of a text that is none, its beginning counts.
size_t edit_distance(std::string_view a, std::string_view b);

/// The values that a setting of a type may have, by name. Of dtypes those of parameters and
/// gradients.
template <class E>
std::vector<E> setting_values() {
  if constexpr (std::is_same_v<E, DType>) {
    return {kF32, kBF16, kF16};
  } else {
    std::vector<E> values;
    for (const auto& entry : kEnumNames<E>) values.push_back(entry.value);
    return values;
  }
}

template <class T>
concept PlainNumber = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;
template <class E>
concept NamedValue = NamedEnum<E> || std::is_same_v<E, DType>;

/// Rows bound to the fields of structs, which outlive the table. `Row` is Setting, or derived from
/// it to say more. Each `add` returns the new row.
template <class Row = Setting>
class SettingTable {
 public:
  Row& add(std::string_view key, bool& value, std::string_view doc) {
    return bind(
        key, doc, [&value] { return SettingValue(value); },
        [&value](const SettingValue& v) { value = std::get<bool>(v); });
  }

  /// A flag by two names, of false and of true.
  Row& add(std::string_view key, bool& value, std::array<std::string_view, 2> names,
           std::string_view doc) {
    return add_text(
        key, {names[0], names[1]}, [&value, names] { return std::string(names[value ? 1 : 0]); },
        [&value, names](const std::string& text) { value = text == names[1]; }, doc);
  }

  template <PlainNumber T>
  Row& add(std::string_view key, T& value, Range range, std::string_view doc) {
    Row& row = bind(
        key, doc,
        [&value]() -> SettingValue {
          if constexpr (std::is_integral_v<T>) return static_cast<int64_t>(value);
          if constexpr (std::is_same_v<T, float>) return shortest_decimal(value);
          return static_cast<double>(value);
        },
        [&value](const SettingValue& v) {
          value = std::visit(
              [](const auto& x) {
                if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(x)>>)
                  return static_cast<T>(x);
                else
                  return T{};
              },
              v);
        });
    row.range = range;
    return row;
  }

  Row& add(std::string_view key, std::string& value, std::string_view doc) {
    return add(key, value, std::vector<std::string_view>{}, doc);
  }
  Row& add(std::string_view key, std::string& value, std::vector<std::string_view> choices,
           std::string_view doc) {
    return add_text(
        key, std::move(choices), [&value] { return value; },
        [&value](const std::string& text) { value = text; }, doc);
  }

  template <NamedValue E>
  Row& add(std::string_view key, E& value, std::string_view doc) {
    return add_text(
        key, names<E>(), [&value] { return std::string(name_of(value)); },
        [&value](const std::string& text) { value = *find<E>(text); }, doc);
  }

  /// `nothing` is the name of no value: "auto", "same".
  template <NamedValue E>
  Row& add(std::string_view key, std::optional<E>& value, std::string_view nothing,
           std::string_view doc) {
    std::vector<std::string_view> choices = names<E>();
    choices.insert(choices.begin(), nothing);
    return add_text(
        key, std::move(choices),
        [&value, nothing] { return std::string(value ? name_of(*value) : nothing); },
        [&value](const std::string& text) { value = find<E>(text); }, doc);
  }
  /// One that has to have a value, although its struct has a default without.
  template <NamedValue E>
  Row& add(std::string_view key, std::optional<E>& value, std::string_view doc) {
    return add_text(
        key, names<E>(), [&value] { return std::string(value ? name_of(*value) : ""); },
        [&value](const std::string& text) { value = find<E>(text); }, doc);
  }

  /// A field of another type, by its text: one of `choices`, or any if there are none. `set` may
  /// throw a ConfigError that follows the key.
  Row& add_text(std::string_view key, std::vector<std::string_view> choices,
                std::function<std::string()> get, std::function<void(const std::string&)> set,
                std::string_view doc) {
    Row& row = bind(
        key, doc, [get = std::move(get)] { return SettingValue(get()); },
        [set = std::move(set)](const SettingValue& v) { set(std::get<std::string>(v)); });
    row.choices = std::move(choices);
    return row;
  }

  const std::deque<Row>& rows() const { return rows_; }
  std::deque<Row>& rows() { return rows_; }

 private:
  Row& bind(std::string_view key, std::string_view doc, std::function<SettingValue()> get,
            std::function<void(const SettingValue&)> assign) {
    Row& row = rows_.emplace_back();
    row.key = key, row.doc = doc, row.get = std::move(get), row.assign = std::move(assign);
    return row;
  }
  template <class E>
  static std::vector<std::string_view> names() {
    std::vector<std::string_view> names;
    for (const E value : setting_values<E>()) names.push_back(name_of(value));
    return names;
  }
  template <class E>
  static std::optional<E> find(std::string_view name) {
    for (const E value : setting_values<E>()) {
      if (name_of(value) == name) return value;
    }
    return std::nullopt;
  }
  /// The f64 that has the shortest decimal of an f32: 1e-5f as 1e-05, not 9.99999974e-06.
  static double shortest_decimal(float value) { return std::stod(fmt::format("{}", value)); }

  std::deque<Row> rows_;  // rows stay where they are
};

}  // namespace tessera
