#include "core/settings.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "core/text.h"

namespace tessera {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string range_text(const Setting& setting) {
  const Range& r = setting.range;
  const bool is_integer = setting.is_integer();
  const auto end = [&](double value) {
    return is_integer ? fmt::format("{:.0f}", value) : fmt::format("{}", value);
  };
  if (r.high == kInfinity || r.high == kMaxCount) {
    return fmt::format("{} {}", r.low_open ? ">" : ">=", end(r.low));
  }
  return fmt::format("in {}{}, {}{}", r.low_open ? '(' : '[', end(r.low), end(r.high),
                     r.high_open ? ')' : ']');
}

/// What is expected, for a value above the range, whose end `expected_text` leaves out where nobody
/// comes near it.
std::string expected_below_text(const Setting& setting) {
  if (setting.range.high == kInfinity) {
    return fmt::format("a finite number {}", range_text(setting));
  }
  if (setting.range.high != kMaxCount) return setting.expected_text();
  return fmt::format("{} and <= {:.0f}", setting.expected_text(), kMaxCount);
}

[[noreturn]] void fail(const Setting& setting, const std::string& found,
                       const std::string& expected) {
  throw ConfigError(fmt::format("{} = {}, expected {}", setting.key, shorten(found), expected));
}

void check_range(const Setting& setting, double value, const std::string& found) {
  const Range& r = setting.range;
  const bool low = r.low_open ? value > r.low : value >= r.low;
  const bool high = r.high_open ? value < r.high : value <= r.high;
  if (low && !high) fail(setting, found, expected_below_text(setting));
  if (!low) fail(setting, found, setting.expected_text());  // NaN fails both
}

/// Text that files and messages can hold.
void check_text(const Setting& setting, const std::string& value) {
  for (size_t i = 0; i < value.size();) {
    const size_t nbytes = utf8_length(value, i);
    const auto byte = static_cast<unsigned char>(value[i]);
    const bool is_control = byte == 0 || (setting.is_one_line && (byte < 0x20 || byte == 0x7f));
    if (nbytes == 0 || is_control) {
      throw ConfigError(fmt::format("{} = \"{}\": byte {:#04x} at {}, expected {}", setting.key,
                                    shorten(printable(value)), byte, i,
                                    nbytes == 0 ? "UTF-8" : "no control character"));
    }
    i += nbytes;
  }
  const auto& choices = setting.choices;
  if (choices.empty() || std::find(choices.begin(), choices.end(), value) != choices.end()) return;
  throw ConfigError(fmt::format("{} = {}, expected {} (nearest: {})", setting.key,
                                shorten(toml_text(value)), setting.expected_text(),
                                nearest_name(value, choices)));
}

}  // namespace

std::string Setting::expected_text() const {
  if (!expected.empty()) return std::string(expected);
  if (is_flag()) return "true or false";
  if (is_text()) {
    return choices.empty() ? "a string" : fmt::format("one of {}", fmt::join(choices, ", "));
  }
  return fmt::format("{} {}", is_integer() ? "an integer" : "a number", range_text(*this));
}

std::string Setting::value_text() const {
  const SettingValue value = get();
  if (const auto* text = std::get_if<std::string>(&value)) return toml_text(*text);
  if (const auto* number = std::get_if<double>(&value)) return number_text(*number);
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  return fmt::format("{}", std::get<int64_t>(value));
}

void Setting::check() const {
  const SettingValue value = get();
  if (const auto* integer = std::get_if<int64_t>(&value)) {
    check_range(*this, static_cast<double>(*integer), value_text());
  } else if (const auto* number = std::get_if<double>(&value)) {
    check_range(*this, *number, value_text());
  }
}

void Setting::set(const SettingValue& value, const std::string& found) const {
  const SettingValue now = get();
  const auto* integer = std::get_if<int64_t>(&value);
  const bool is_widened = integer != nullptr && std::holds_alternative<double>(now);
  if (value.index() != now.index() && !is_widened) fail(*this, found, expected_text());
  if (integer != nullptr) check_range(*this, static_cast<double>(*integer), found);
  if (const auto* number = std::get_if<double>(&value)) check_range(*this, *number, found);
  const auto* text = std::get_if<std::string>(&value);
  if (text != nullptr) check_text(*this, *text);
  try {
    assign(value);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{}: {}", key, shorten(error.what())));
  }
}

std::string toml_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\r':
        out += "\\r";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        } else {
          out += c;
        }
    }
  }
  return out + '"';
}

std::string number_text(double value) {
  std::string text = fmt::format("{}", value);
  const bool is_integer = text.find_first_not_of("-0123456789") == std::string::npos;
  return is_integer ? text + ".0" : text;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  constexpr size_t kMaxName = 100;
  a = a.substr(0, kMaxName), b = b.substr(0, kMaxName);
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

std::string_view nearest_name(std::string_view word, std::span<const std::string_view> candidates) {
  std::string_view best;
  size_t best_distance = std::numeric_limits<size_t>::max();
  for (const std::string_view candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace tessera
