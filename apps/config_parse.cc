#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

#include "apps/config.h"
#include "apps/config_table.h"
#include "apps/model_from.h"
#include "apps/parameter_groups.h"
#include "core/files.h"
#include "core/text.h"

// TOML and the command line, to the rows of the table and back.

namespace tessera::apps {
namespace {

std::string found_text(const toml::node& node) {
  if (const auto text = node.value_exact<std::string>()) return toml_text(*text);
  if (!node.is_value()) return node.is_array() ? "an array" : "a table";
  std::ostringstream text;
  text << toml::node_view<const toml::node>(node);
  return text.str();
}

/// Nothing for what no setting is: a date, a table.
std::optional<SettingValue> value_of(const toml::node& node) {
  if (node.is_boolean()) return *node.value<bool>();
  if (node.is_integer()) return *node.value<int64_t>();
  if (node.is_floating_point()) return *node.value<double>();
  if (node.is_string()) return *node.value<std::string>();
  return std::nullopt;
}

void set_from_toml(const Field& field, const toml::node& node) {
  const std::string found = found_text(node);
  std::optional<SettingValue> value = value_of(node);
  // true, false and numbers may be among the choices (fsdp.reshard_after_forward).
  const auto& choices = field.choices;
  if (std::find(choices.begin(), choices.end(), found) != choices.end()) value = found;
  if (!value) {
    throw ConfigError(
        fmt::format("{} = {}, expected {}", field.key, shorten(found), field.expected_text()));
  }
  field.set(*value, found);
}

template <class T>
std::optional<T> parse_number(const std::string& text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || text.empty()) return std::nullopt;
  return value;
}

/// "1000" or "1e3": nothing for what is no integer, or too large for a double to tell.
std::optional<int64_t> parse_integer(const std::string& text) {
  if (const auto value = parse_number<int64_t>(text)) return value;
  const auto value = parse_number<double>(text);
  constexpr double kMaxExact = 9007199254740992;  // 2^53
  if (!value || !(std::abs(*value) <= kMaxExact) || std::trunc(*value) != *value) return {};
  return static_cast<int64_t>(*value);
}

/// A text that is no value of the field's type stays a text, which the field refuses.
void set_from_text(const Field& field, const std::string& text) {
  const SettingValue as_text = text;
  if (field.is_text()) {
    field.set(as_text, toml_text(text));
  } else if (field.is_flag() && (text == "true" || text == "false")) {
    field.set(text == "true", text);
  } else if (const auto integer = parse_integer(text); field.is_integer() && integer) {
    field.set(*integer, text);
  } else if (const auto number = parse_number<double>(text); field.is_number() && number) {
    field.set(*number, text);
  } else {
    field.set(as_text, toml_text(text));
  }
}

/// Calls `f`; what it refuses is said with the place.
template <class F>
void at(const std::string& where, F&& f) {
  try {
    f();
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{}: {}", where, error.what()));
  }
}

std::string section_of(std::string_view key) {
  const size_t dot = key.find('.');
  return std::string(dot == std::string_view::npos ? "" : key.substr(0, dot));
}

using Fields = std::deque<Field>;

const Field& find_field(const Fields& fields, std::string_view key, const std::string& where) {
  for (const Field& field : fields) {
    if (field.key == key) return field;
  }
  throw ConfigError(fmt::format("{}: unknown key {}, expected a known one (nearest: {})", where,
                                shorten(key), nearest_keys(key)));
}

/// The end of the string that begins at `begin`: after its last quote, or where the text ends.
size_t end_of_string(std::string_view text, size_t begin) {
  const char quote = text[begin];
  const std::string_view three = text.substr(begin, 3);
  const bool is_long = three.size() == 3 && three[1] == quote && three[2] == quote;
  for (size_t i = begin + (is_long ? 3 : 1); i < text.size(); ++i) {
    if (quote == '"' && text[i] == '\\') {
      ++i;
    } else if (text[i] == quote && (!is_long || text.substr(i, 3) == three)) {
      i += is_long ? 3 : 1;
      // Up to two more quotes at the end of a long one are part of it.
      for (int k = 0; is_long && k < 2 && i < text.size() && text[i] == quote; ++k) ++i;
      return i;
    } else if (text[i] == '\n' && !is_long) {
      return i;
    }
  }
  return text.size();
}

/// The parser of TOML calls itself once a level of brackets, and what it makes is as deep as the
/// names in a dotted key are many: both are limited before it sees the text.
void check_depth(std::string_view text, const std::string& name) {
  constexpr int kMaxBrackets = 8, kMaxDots = 8;
  int brackets = 0, dots = 0;
  int64_t line = 1;
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (c == '"' || c == '\'') {
      const size_t end = end_of_string(text, i);
      line += std::count(text.begin() + static_cast<long>(i), text.begin() + static_cast<long>(end),
                         '\n');
      i = end;
      continue;
    }
    if (c == '#') {
      i = std::min(text.find('\n', i), text.size());
      continue;
    }
    if (c == '\n') ++line;
    if (c == '[' || c == '{') ++brackets;
    if (c == ']' || c == '}') --brackets;
    dots = c == '.'                                                         ? dots + 1
           : std::string_view("\n=,[]{}").find(c) == std::string_view::npos ? dots
                                                                            : 0;
    if (brackets > kMaxBrackets) {
      throw ConfigError(fmt::format("{}:{}: {} brackets inside each other, expected at most {}",
                                    name, line, brackets, kMaxBrackets));
    }
    if (dots > kMaxDots) {
      throw ConfigError(fmt::format("{}:{}: a key of more than {} names, expected section.key",
                                    name, line, dots));
    }
    ++i;
  }
}

/// [[data.source]] tables as the text of data.sources: "a/*.bin: 0.7, b/*.bin: 0.3".
std::string sources_text(const toml::node& node) {
  std::string text;
  if (!node.is_array()) throw ConfigError("data.source, expected tables: [[data.source]]");
  for (const toml::node& entry : *node.as_array()) {
    const toml::table* const source = entry.as_table();
    if (source == nullptr) throw ConfigError("data.source, expected tables: [[data.source]]");
    std::string path;
    std::optional<double> weight;
    for (const auto& [key, value] : *source) {
      if (key.str() == "path" && value.is_string()) {
        path = *value.value<std::string>();
      } else if (key.str() == "weight" && value.is_number()) {
        weight = value.value<double>();
      } else {
        throw ConfigError(
            fmt::format("data.source: {} = {}, expected path, a text, and weight, a "
                        "number",
                        shorten(key.str()), shorten(found_text(value))));
      }
    }
    if (path.empty() || path.find(',') != std::string::npos) {
      throw ConfigError(
          fmt::format("data.source: path {}, expected a path or a glob without a comma",
                      toml_text(shorten(path))));
    }
    text += fmt::format("{}{}", text.empty() ? "" : ", ", path);
    if (weight) text += fmt::format(": {}", *weight);
  }
  return text;
}

/// [[optim.group]] tables as the text of optim.groups.
std::string groups_of_tables(const toml::node& node) {
  const auto expected = [](const std::string& found) {
    return ConfigError(fmt::format(
        "optim.group{}, expected tables: [[optim.group]] with match and lr_scale, weight_decay, "
        "optimizer or frozen",
        found));
  };
  std::vector<dist::ParameterGroup> groups;
  if (!node.is_array()) throw expected("");
  for (const toml::node& entry : *node.as_array()) {
    const toml::table* const table = entry.as_table();
    if (table == nullptr) throw expected("");
    dist::ParameterGroup group;
    for (const auto& [key, value] : *table) {
      if (key.str() == "match" && value.is_string()) {
        group.match = *value.value<std::string>();
      } else if (key.str() == "lr_scale" && value.is_number()) {
        group.lr_scale = *value.value<double>();
      } else if (key.str() == "weight_decay" && value.is_number()) {
        group.weight_decay = *value.value<double>();
      } else if (key.str() == "optimizer" && value.is_string()) {
        group.optimizer = *value.value<std::string>();
      } else if (key.str() == "frozen" && value.is_boolean()) {
        group.frozen = *value.value<bool>();
      } else {
        throw expected(fmt::format(": {} = {}", shorten(key.str()), shorten(found_text(value))));
      }
    }
    if (group.match.empty() || group.match.find_first_of(":;") != std::string::npos) {
      throw expected(fmt::format(": match = {}", toml_text(shorten(group.match))));
    }
    groups.push_back(std::move(group));
  }
  return groups_text(groups);
}

/// Arrays of tables, each with the field that has it as a text.
struct Tables {
  std::string_view name, field;
  std::string (*to_text)(const toml::node&);
};
constexpr Tables kTables[] = {{"data.source", "data.sources", sources_text},
                              {"optim.group", "optim.groups", groups_of_tables}};

void apply_toml(const Fields& fields, const toml::table& table, const std::string& prefix,
                const std::string& name, Config& config) {
  std::vector<std::string> sections;
  for (const Field& field : fields) {
    if (std::string section = section_of(field.key); !section.empty()) {
      sections.push_back(std::move(section));
    }
  }
  for (const auto& [toml_key, element] : table) {
    const toml::node& node = element;  // clang 14 captures no structured binding
    const std::string key = prefix + std::string(toml_key.str());
    const std::string where = fmt::format("{}:{}", name, toml_key.source().begin.line);
    const bool is_section =
        prefix.empty() && std::find(sections.begin(), sections.end(), key) != sections.end();
    if (is_section) {
      if (!node.is_table()) {
        throw ConfigError(fmt::format("{}: {} is a section, expected [{}]", where, key, key));
      }
      apply_toml(fields, *node.as_table(), key + ".", name, config);
      continue;
    }
    if (prefix.empty() && node.is_table()) {
      const std::vector<std::string_view> names(sections.begin(), sections.end());
      throw ConfigError(fmt::format("{}: unknown section [{}], expected a known one (nearest: {})",
                                    where, shorten(key), nearest_name(key, names)));
    }
    const auto tables = std::find_if(std::begin(kTables), std::end(kTables),
                                     [&](const Tables& t) { return t.name == key; });
    if (tables != std::end(kTables)) {
      at(where, [&] {
        const std::string text = tables->to_text(node);
        find_field(fields, tables->field, where).set(text, toml_text(text));
      });
      config.origins.insert_or_assign(std::string(tables->field), where);
      continue;
    }
    const Field& field = find_field(fields, key, where);
    at(where, [&] { set_from_toml(field, node); });
    config.origins.insert_or_assign(key, where);
  }
}

void apply_overrides(const Fields& fields, std::span<const std::string> overrides, Config& config) {
  const std::string where = "command line";
  for (size_t i = 0; i < overrides.size(); ++i) {
    const std::string& argument = overrides[i];
    if (!argument.starts_with("--")) {
      throw ConfigError(
          fmt::format("{}: {}, expected --section.key=value", where, shorten(toml_text(argument))));
    }
    const size_t equals = argument.find('=');
    const std::string key = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    const Field& field = find_field(fields, key, where);
    if (equals == std::string::npos &&
        (i + 1 == overrides.size() || overrides[i + 1].starts_with("--"))) {
      const std::string_view shown = key == "checkpoint.resume" ? "resume" : std::string_view(key);
      throw ConfigError(fmt::format("{}: --{} without a value, expected {}", where, shown,
                                    field.expected_text()));
    }
    const std::string text =
        equals == std::string::npos ? overrides[++i] : argument.substr(equals + 1);
    at(where, [&] { set_from_text(field, text); });
    config.origins.insert_or_assign(key, where);
  }
}

/// A tenth, as people write it: 3e-4 of 3e-3.
double tenth_of(double value) {
  return std::stod(fmt::format("{:.15g}", value / 10));
}

constexpr double kFineTuningLr = 1e-5, kLoraLr = 2e-4;

void derive_defaults(Config& config) {
  OptimConfig& o = config.optim;
  if (!config.model.from.empty() && !config.is_given("optim.lr")) {
    o.schedule.peak_lr = kFineTuningLr;
  }
  if (config.lora.is_on() && !config.is_given("optim.lr")) o.schedule.peak_lr = kLoraLr;
  if (o.name == OptimizerName::kLion && !config.is_given("optim.beta2")) {
    o.adamw.beta2 = optim::LionOptions().beta2;
  }
  if (!config.is_given("optim.final_lr")) o.schedule.final_lr = tenth_of(o.schedule.peak_lr);
}

}  // namespace

namespace {

Config parse_over(Config config, std::string_view text, const std::string& name,
                  std::span<const std::string> overrides) {
  const Fields fields = config_fields(config);
  if (std::ssize(text) > kMaxConfigNbytes) {
    throw ConfigError(
        fmt::format("{}: {} bytes, expected at most {}", name, text.size(), kMaxConfigNbytes));
  }
  check_depth(text, name);
  toml::table table;
  try {
    table = toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    throw ConfigError(
        fmt::format("{}:{}: {}", name, error.source().begin.line, shorten(error.description())));
  }
  apply_toml(fields, table, "", name, config);
  config.is_resolved = is_dump(text);
  if (config.is_resolved && text.find(kOwnComment) != std::string_view::npos) config.is_own = true;
  apply_overrides(fields, overrides, config);
  take_model_from(config);
  take_lora_from(config);
  derive_defaults(config);
  check_config(config);
  return config;
}

}  // namespace

Config parse_config(std::string_view text, const std::string& name,
                    std::span<const std::string> overrides) {
  return parse_over({}, text, name, overrides);
}

Config load_config(const std::string& path, std::span<const std::string> overrides) {
  return load_config_over({}, path, overrides);
}

Config load_config_over(Config defaults, const std::string& path,
                        std::span<const std::string> overrides) {
  if (path.empty()) return parse_over(std::move(defaults), "", "", overrides);
  std::string text;
  try {
    text = read_regular_file(path, kMaxConfigNbytes);
  } catch (const InputError& error) {
    throw ConfigError(error.what());
  }
  return parse_over(std::move(defaults), text, path, overrides);
}

std::string config_help(std::string_view what) {
  Config config;
  std::string out;
  const Fields fields = config_fields(config);
  const auto is_wanted = [&](const Field& field) {
    return what.empty() || field.key == what || section_of(field.key) == what;
  };
  if (std::none_of(fields.begin(), fields.end(), is_wanted)) {
    std::vector<std::string> sections;
    for (const Field& field : fields) {
      const std::string section = section_of(field.key);
      if (!section.empty() && (sections.empty() || sections.back() != section)) {
        sections.push_back(section);
      }
    }
    throw ConfigError(
        fmt::format("command line: --help {}, expected a section ({}) or a key (nearest: {})",
                    shorten(what), fmt::join(sections, ", "), nearest_keys(what)));
  }
  for (const Field& field : fields) {
    if (!is_wanted(field)) continue;
    out += fmt::format("  --{:<31} {}\n  {:<33} {}; default {}\n", field.key, field.doc, "",
                       field.expected_text(), field.value_text());
  }
  return out;
}

std::string nearest_keys(std::string_view word) {
  Config config;
  const Fields fields = config_fields(config);
  std::vector<std::string_view> keys;
  for (const Field& field : fields) keys.push_back(field.key);
  std::string name(word);
  std::replace(name.begin(), name.end(), '-', '_');
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto last = [](std::string_view key) { return key.substr(key.rfind('.') + 1); };
  const std::string_view own = last(name);
  const auto all_with = [&](auto&& is_meant) {
    std::vector<std::string_view> found;
    for (const std::string_view key : keys) {
      if (found.size() < 3 && is_meant(last(key))) found.push_back(key);
    }
    return fmt::format("{}", fmt::join(found, ", "));
  };
  if (std::string same = all_with([&](std::string_view l) { return l == own; }); !same.empty()) {
    return same;
  }
  for (const Field& field : fields) {
    const std::string others = fmt::format(" {} ", field.other_names);
    if (others.find(fmt::format(" {} ", own)) != std::string::npos) return std::string(field.key);
  }
  const bool has_section = std::any_of(keys.begin(), keys.end(), [&](std::string_view key) {
    return name.find('.') != std::string::npos && section_of(key) == section_of(name);
  });
  if (!has_section) {
    size_t distance = std::max<size_t>(1, own.size() / 4);  // typing errors
    std::string_view best;
    for (const std::string_view key : keys) {
      const size_t edits = edit_distance(own, last(key));
      if (edits < distance + best.empty()) best = key, distance = edits;
    }
    if (!best.empty()) return std::string(best);
    const auto contains = [&](std::string_view l) { return l.find(own) != std::string_view::npos; };
    if (std::string parts = own.size() < 3 ? "" : all_with(contains); !parts.empty()) return parts;
  }
  return std::string(nearest_name(name, keys));
}

}  // namespace tessera::apps
