#include "apps/config.h"

#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <optional>
#include <sstream>

#include "apps/model_from.h"
#include "core/files.h"
#include "core/runtime/allocator.h"
#include "core/text.h"
#include "kernels/attention/kernel.h"
#include "kernels/reduce/reduce.h"

namespace tessera::apps {
namespace {

constexpr double kMaxCount = 1e12;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::string_view kResolvedComment = "# The resolved configuration: every key.";

std::string section_of(std::string_view key) {
  const size_t dot = key.find('.');
  return std::string(dot == std::string_view::npos ? "" : key.substr(0, dot));
}

std::string number_text(double value) {
  std::string text = fmt::format("{}", value);
  const bool is_integer = text.find_first_not_of("-0123456789") == std::string::npos;
  return is_integer ? text + ".0" : text;
}

std::string quote(std::string_view text) {
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

bool is_integer(const Field& field) {
  return std::holds_alternative<int64_t*>(field.value);
}

std::string range_text(const Field& field) {
  const Range& r = field.range;
  const auto end = [&](double value) {
    if (is_integer(field)) return fmt::format("{:.0f}", value);
    return fmt::format("{}", value);
  };
  if (r.high == kInfinity || r.high == kMaxCount) {
    return fmt::format("{} {}", r.low_open ? ">" : ">=", end(r.low));
  }
  return fmt::format("in {}{}, {}{}", r.low_open ? '(' : '[', end(r.low), end(r.high),
                     r.high_open ? ')' : ']');
}

/// What a field accepts, for messages and --help.
std::string expected_text(const Field& field) {
  if (field.key == "checkpoint.resume") return "auto, none or the path of a checkpoint";
  if (std::holds_alternative<bool*>(field.value)) return "true or false";
  if (std::holds_alternative<std::string*>(field.value)) {
    return field.choices.empty() ? "a string"
                                 : fmt::format("one of {}", fmt::join(field.choices, ", "));
  }
  return fmt::format("{} {}", is_integer(field) ? "an integer" : "a number", range_text(field));
}

/// The same for a value above the range, whose end --help leaves out where nobody comes near it.
std::string expected_below_text(const Field& field) {
  if (field.range.high == kInfinity) return fmt::format("a finite number {}", range_text(field));
  if (field.range.high != kMaxCount) return expected_text(field);
  return fmt::format("{} and <= {:.0f}", expected_text(field), kMaxCount);
}

[[noreturn]] void fail_value(const Field& field, const std::string& found, const std::string& where,
                             const std::string& expected) {
  throw ConfigError(
      fmt::format("{}: {} = {}, expected {}", where, field.key, shorten(found), expected));
}

[[noreturn]] void fail_value(const Field& field, const std::string& found,
                             const std::string& where) {
  fail_value(field, found, where, expected_text(field));
}

void check_range(const Field& field, double value, const std::string& found,
                 const std::string& where) {
  const Range& r = field.range;
  const bool low = r.low_open ? value > r.low : value >= r.low;
  const bool high = r.high_open ? value < r.high : value <= r.high;
  if (low && !high) fail_value(field, found, where, expected_below_text(field));
  if (!low) fail_value(field, found, where);  // NaN fails both
}

/// A text that the saved configuration and the manifest can hold, and that names the same file
/// everywhere: the paths that the run writes are also lines of its log and its exchanges.
void check_text(const Field& field, const std::string& value, const std::string& where) {
  constexpr std::string_view kWritten[] = {"output.dir", "checkpoint.dir", "checkpoint.resume",
                                           "debug.trace"};
  const bool is_written =
      std::find(std::begin(kWritten), std::end(kWritten), field.key) != std::end(kWritten);
  for (size_t i = 0; i < value.size();) {
    const size_t nbytes = utf8_length(value, i);
    const auto byte = static_cast<unsigned char>(value[i]);
    const bool is_control = byte == 0 || (is_written && (byte < 0x20 || byte == 0x7f));
    if (nbytes == 0 || is_control) {
      throw ConfigError(fmt::format("{}: {} = \"{}\": byte {:#04x} at {}, expected {}", where,
                                    field.key, shorten(printable(value)), byte, i,
                                    nbytes == 0 ? "UTF-8" : "no control character"));
    }
    i += nbytes;
  }
}

void set_string(const Field& field, const std::string& value, const std::string& where) {
  check_text(field, value, where);
  const auto& choices = field.choices;
  if (!choices.empty() && std::find(choices.begin(), choices.end(), value) == choices.end()) {
    throw ConfigError(fmt::format("{}: {} = {}, expected {} (nearest: {})", where, field.key,
                                  shorten(quote(value)), expected_text(field),
                                  nearest_name(value, choices)));
  }
  *std::get<std::string*>(field.value) = value;
}

std::string found_text(const toml::node& node) {
  if (const auto text = node.value_exact<std::string>()) return quote(*text);
  if (!node.is_value()) return node.is_array() ? "an array" : "a table";
  std::ostringstream text;
  text << toml::node_view<const toml::node>(node);
  return text.str();
}

void set_from_toml(const Field& field, const toml::node& node, const std::string& where) {
  const std::string found = found_text(node);
  if (auto* const* flag = std::get_if<bool*>(&field.value)) {
    if (!node.is_boolean()) fail_value(field, found, where);
    **flag = *node.value<bool>();
  } else if (auto* const* integer = std::get_if<int64_t*>(&field.value)) {
    if (!node.is_integer()) fail_value(field, found, where);
    const int64_t value = *node.value<int64_t>();
    check_range(field, static_cast<double>(value), found, where);
    **integer = value;
  } else if (auto* const* number = std::get_if<double*>(&field.value)) {
    if (!node.is_number()) fail_value(field, found, where);
    const double value = *node.value<double>();
    check_range(field, value, found, where);
    **number = value;
  } else {
    // true, false and numbers may be among the choices (fsdp.reshard_after_forward).
    const bool is_bare = !node.is_string() && std::find(field.choices.begin(), field.choices.end(),
                                                        found) != field.choices.end();
    if (!node.is_string() && !is_bare) fail_value(field, found, where);
    set_string(field, is_bare ? found : *node.value<std::string>(), where);
  }
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

void set_from_text(const Field& field, const std::string& text, const std::string& where) {
  if (auto* const* flag = std::get_if<bool*>(&field.value)) {
    if (text != "true" && text != "false") fail_value(field, quote(text), where);
    **flag = text == "true";
  } else if (auto* const* integer = std::get_if<int64_t*>(&field.value)) {
    const auto value = parse_integer(text);
    if (!value) fail_value(field, quote(text), where);
    check_range(field, static_cast<double>(*value), text, where);
    **integer = *value;
  } else if (auto* const* number = std::get_if<double*>(&field.value)) {
    const auto value = parse_number<double>(text);
    if (!value) fail_value(field, quote(text), where);
    check_range(field, *value, text, where);
    **number = *value;
  } else {
    set_string(field, text, where);
  }
}

const Field& find_field(std::span<const Field> fields, std::string_view key,
                        const std::string& where) {
  std::vector<std::string_view> names;
  for (const Field& field : fields) {
    if (field.key == key) return field;
    names.push_back(field.key);
  }
  throw ConfigError(fmt::format("{}: unknown key {}, expected a known one (nearest: {})", where,
                                shorten(key), nearest_keys(key, names)));
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

void apply_toml(std::span<const Field> fields, const toml::table& table, const std::string& prefix,
                const std::string& name, Config& config) {
  std::vector<std::string> sections;
  for (const Field& field : fields) {
    if (std::string section = section_of(field.key); !section.empty()) {
      sections.push_back(std::move(section));
    }
  }
  for (const auto& [toml_key, node] : table) {
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
    const Field& field = find_field(fields, key, where);
    set_from_toml(field, node, where);
    config.origins.insert_or_assign(key, where);
  }
}

void apply_overrides(std::span<const Field> fields, std::span<const std::string> overrides,
                     Config& config) {
  const std::string where = "command line";
  for (size_t i = 0; i < overrides.size(); ++i) {
    const std::string& argument = overrides[i];
    if (!argument.starts_with("--")) {
      throw ConfigError(
          fmt::format("{}: {}, expected --section.key=value", where, shorten(quote(argument))));
    }
    const size_t equals = argument.find('=');
    const std::string key = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    const Field& field = find_field(fields, key, where);
    if (equals == std::string::npos &&
        (i + 1 == overrides.size() || overrides[i + 1].starts_with("--"))) {
      const std::string_view shown = key == "checkpoint.resume" ? "resume" : std::string_view(key);
      throw ConfigError(
          fmt::format("{}: --{} without a value, expected {}", where, shown, expected_text(field)));
    }
    set_from_text(field, equals == std::string::npos ? overrides[++i] : argument.substr(equals + 1),
                  where);
    config.origins.insert_or_assign(key, where);
  }
}

/// ConfigError at the place where `key` was set.
template <class... Args>
[[noreturn]] void fail_at(const Config& config, std::string_view key,
                          fmt::format_string<Args...> format, Args&&... args) {
  throw ConfigError(
      fmt::format("{}: {}", config.origin(key), fmt::format(format, std::forward<Args>(args)...)));
}

void check_ids(const Config& config) {
  const ModelConfig& m = config.model;
  const std::pair<const char*, const std::string*> all[] = {
      {"model.bos_ids", &m.bos_ids}, {"model.eos_ids", &m.eos_ids}, {"model.pad_ids", &m.pad_ids}};
  for (const auto& [key, text] : all) {
    try {
      parse_ids(*text);
    } catch (const ConfigError& error) {
      fail_at(config, key, "{} = {}", key, error.what());
    }
  }
}

/// Positions and width of a head, after the checks of what its width depends on.
void check_head(const Config& config) {
  const ModelConfig& m = config.model;
  const char* key = m.head_width == 0 ? "model.width" : "model.head_width";
  const int64_t head_width = m.head_width == 0 ? m.width / m.heads : m.head_width;
  if (m.kind == "llama" && head_width % 2 != 0) {
    fail_at(config, key, "head width {}, expected an even one (rotary positions)", head_width);
  }
  const bool needs_order = m.kind == "llama" && m.rope_scaling == "llama3";
  if (needs_order && m.rope_low_freq_factor >= m.rope_high_freq_factor) {
    fail_at(config, "model.rope_low_freq_factor",
            "model.rope_low_freq_factor = {}, expected less than model.rope_high_freq_factor = {}",
            m.rope_low_freq_factor, m.rope_high_freq_factor);
  }
  if (head_width > kernels::kMaxAttentionWidth) {
    fail_at(config, key, "head width {}, expected at most {}", head_width,
            kernels::kMaxAttentionWidth);
  }
}

void check_model(const Config& config) {
  const ModelConfig& m = config.model;
  check_ids(config);
  if (!m.ignore_keys.empty() && m.from.empty()) {
    fail_at(config, "model.ignore_keys",
            "model.ignore_keys = {} without model.from, expected the model that has them",
            shorten(quote(m.ignore_keys)));
  }
  if (m.max_positions != 0 && m.max_positions < m.context) {
    fail_at(config,
            config.is_given("model.max_positions") ? "model.max_positions" : "model.context",
            "model.max_positions = {}, expected 0 or at least model.context = {}", m.max_positions,
            m.context);
  }
  if (m.head_width == 0 && m.width % m.heads != 0) {
    fail_at(config, "model.width", "model.width = {}, expected a multiple of model.heads = {}",
            m.width, m.heads);
  }
  if (m.kv_heads != 0 && m.heads % m.kv_heads != 0) {
    fail_at(config, "model.kv_heads", "model.kv_heads = {}, expected a divisor of model.heads = {}",
            m.kv_heads, m.heads);
  }
  if (m.kind != "llama") {
    if (m.kv_heads != 0 && m.kv_heads != m.heads) {
      fail_at(config, "model.kv_heads",
              "model.kv_heads = {}, expected model.heads = {} for kind {}", m.kv_heads, m.heads,
              m.kind);
    }
    if (m.head_width != 0) {
      fail_at(config, "model.head_width", "model.head_width = {}, expected 0 for kind {}",
              m.head_width, m.kind);
    }
    if (m.qk_norm || m.qkv_bias) {
      fail_at(config, m.qk_norm ? "model.qk_norm" : "model.qkv_bias",
              "model.{} = true, expected false for kind {}", m.qk_norm ? "qk_norm" : "qkv_bias",
              m.kind);
    }
    if (m.kind == "bloom" && (m.ffn != 0 && m.ffn != 4 * m.width)) {
      fail_at(config, "model.ffn", "model.ffn = {}, expected 0 or 4 x model.width for kind bloom",
              m.ffn);
    }
    if (m.kind == "bloom" && (!m.bias || m.gelu != "tanh")) {
      fail_at(config, m.bias ? "model.gelu" : "model.bias",
              "model.bias and model.gelu other than true and tanh, which kind bloom has");
    }
  } else if (m.dropout != 0) {
    fail_at(config, "model.dropout", "model.dropout = {}, expected 0 for kind llama", m.dropout);
  }
  check_head(config);
}

void check_data(const Config& config) {
  const DataConfig& d = config.data;
  if (d.text.empty() == d.tokens.empty()) {
    throw ConfigError(fmt::format("data: {}, expected one of --data.text=FILE, --data.tokens=GLOB",
                                  d.text.empty() ? "no data given" : "both text and tokens given"));
  }
  if (!d.text.empty() && !d.val_tokens.empty()) {
    fail_at(config, "data.val_tokens", "data.val_tokens with data.text, expected data.tokens");
  }
  if (!d.tokens.empty() && config.model.vocab == 0) {
    fail_at(config, "data.tokens",
            "data.tokens without a vocabulary, expected model.vocab to be set");
  }
  if (d.restart_positions && d.separator < 0) {
    fail_at(config, "data.restart_positions",
            "data.restart_positions = true, expected data.separator to be set");
  }
  if (config.sample.tokens == 0) return;
  if (!d.tokens.empty()) {
    fail_at(config, "sample.tokens",
            "sample.tokens = {} with data.tokens, expected 0 or data.text, which has a tokenizer",
            config.sample.tokens);
  }
  if (config.sample.prompt.empty()) {
    fail_at(config, "sample.prompt", "sample.prompt is empty, expected some text");
  }
}

void check_memory(const Config& config) {
  for (const auto& [key, text] : {std::pair{"memory.limit", &config.memory.limit},
                                  std::pair{"memory.split", &config.memory.split}}) {
    try {
      parse_nbytes(*text);
    } catch (const ConfigError& error) {
      fail_at(config, key, "{}: {}", key, shorten(error.what()));
    }
  }
}

void check_rounding(const Config& config) {
  if (!config.optim.stochastic_rounding) return;
  const auto fail = [&](const char* key, const std::string& value, const char* expected) {
    fail_at(config, "optim.stochastic_rounding",
            "optim.stochastic_rounding = true with {} = {}, expected {}", key, value, expected);
  };
  const std::string& dtype = config.precision.param_dtype;
  if (dtype == "f32") fail("precision.param_dtype", dtype, "bf16 or f16");  // auto: resolved later
  if (config.optim.name != "adamw") fail("optim.name", config.optim.name, "adamw");
}

void check_schedule(const Config& config) {
  const OptimConfig& o = config.optim;
  if (o.final_lr > o.lr) {
    fail_at(config, "optim.final_lr", "optim.final_lr = {}, expected at most optim.lr = {}",
            o.final_lr, o.lr);
  }
  if (o.clip_p > kMaxNormPower && !std::isinf(o.clip_p)) {
    fail_at(config, "optim.clip_p",
            "optim.clip_p = {}, expected at most {}, whose powers f64 can hold, or inf", o.clip_p,
            kMaxNormPower);
  }
  const TrainConfig& t = config.train;
  if (t.global_batch % t.micro_batch != 0) {
    fail_at(config, "train.global_batch",
            "train.global_batch = {}, expected a multiple of train.micro_batch = {}",
            t.global_batch, t.micro_batch);
  }
  constexpr int64_t kMaxTokens = (int64_t{1} << 31) - 1;
  if (t.micro_batch > kMaxTokens / config.model.context) {
    fail_at(config, "train.micro_batch",
            "train.micro_batch = {} with model.context = {}, expected at most {} tokens in a pass",
            t.micro_batch, config.model.context, kMaxTokens);
  }
  if (t.global_batch != 0 && t.grad_accum_steps != 1) {
    fail_at(config, "train.grad_accum_steps",
            "train.grad_accum_steps = {}, expected it left out where train.global_batch is set",
            t.grad_accum_steps);
  }
}

/// A tenth, as people write it: 3e-4 of 3e-3.
double tenth_of(double value) {
  return std::stod(fmt::format("{:.15g}", value / 10));
}

constexpr double kFineTuningLr = 1e-5;

void derive_defaults(Config& config) {
  OptimConfig& o = config.optim;
  if (!config.model.from.empty() && !config.is_given("optim.lr")) o.lr = kFineTuningLr;
  if (!config.is_given("optim.final_lr")) o.final_lr = tenth_of(o.lr);
}

/// Of two names; of a text that is none, its beginning counts.
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

/// Names that other trainers have for keys of ours, by the last component.
constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {
    // Hugging Face's TrainingArguments and model configurations
    {"learning_rate", "optim.lr"},
    {"per_device_train_batch_size", "train.micro_batch"},
    {"per_device_eval_batch_size", "train.micro_batch"},
    {"train_batch_size", "train.global_batch"},
    {"gradient_accumulation_steps", "train.grad_accum_steps"},
    {"num_train_epochs", "train.steps"},
    {"max_steps", "train.steps"},
    {"warmup_ratio", "optim.warmup_steps"},
    {"adam_beta1", "optim.beta1"},
    {"adam_beta2", "optim.beta2"},
    {"adam_epsilon", "optim.eps"},
    {"epsilon", "optim.eps"},
    {"max_grad_norm", "optim.clip"},
    {"lr_scheduler_type", "optim.schedule"},
    {"optimizer", "optim.name"},
    {"logging_steps", "train.log_every"},
    {"save_steps", "checkpoint.every"},
    {"save_interval", "checkpoint.every"},
    {"save_total_limit", "checkpoint.keep"},
    {"eval_steps", "train.eval_every"},
    {"bf16", "precision.param_dtype"},
    {"fp16", "precision.param_dtype"},
    {"output_dir", "output.dir"},
    {"overwrite_output_dir", "output.overwrite"},
    {"resume_from_checkpoint", "checkpoint.resume"},
    {"gradient_checkpointing", "recompute.policy"},
    {"model_name_or_path", "model.from"},
    {"pretrained_model_name_or_path", "model.from"},
    {"train_file", "data.text"},
    {"dataset", "data.text"},
    {"dataset_name", "data.text"},
    {"max_seq_length", "model.context"},
    {"max_position_embeddings", "model.max_positions"},
    {"hidden_size", "model.width"},
    {"num_hidden_layers", "model.layers"},
    {"num_attention_heads", "model.heads"},
    {"num_key_value_heads", "model.kv_heads"},
    {"head_dim", "model.head_width"},
    {"intermediate_size", "model.ffn"},
    {"vocab_size", "model.vocab"},
    {"tie_word_embeddings", "model.tied"},
    {"rms_norm_eps", "model.norm_eps"},
    {"ddp_timeout", "dist.timeout"},
    // torchtitan
    {"local_batch_size", "train.micro_batch"},
    {"global_batch_size", "train.global_batch"},
    {"seq_len", "model.context"},
    {"max_norm", "optim.clip"},
    {"decay_ratio", "optim.decay_steps"},
    {"min_lr_factor", "optim.final_lr"},
    {"dump_folder", "output.dir"},
    {"log_freq", "train.log_every"},
    {"data_parallel_shard_degree", "fsdp.shard_size"},
    {"fsdp_reshard_after_forward", "fsdp.reshard_after_forward"},
    {"enable_cpu_offload", "fsdp.offload"},
    {"mixed_precision_param", "precision.param_dtype"},
    {"mixed_precision_reduce", "precision.reduce_dtype"},
    {"activation_checkpoint", "recompute.policy"},
    {"selective_ac_option", "recompute.every_n"},
    {"keep_latest_k", "checkpoint.keep"},
    {"dim", "model.width"},
    // nanoGPT and llm.c
    {"batch_size", "train.micro_batch"},
    {"block_size", "model.context"},
    {"n_layer", "model.layers"},
    {"n_head", "model.heads"},
    {"n_embd", "model.width"},
    {"max_iters", "train.steps"},
    {"epochs", "train.steps"},
    {"iters", "train.steps"},
    {"warmup_iters", "optim.warmup_steps"},
    {"lr_decay_iters", "train.steps"},
    {"min_lr", "optim.final_lr"},
    {"grad_clip", "optim.clip"},
    {"eval_interval", "train.eval_every"},
    {"eval_iters", "train.eval_batches"},
    {"log_interval", "train.log_every"},
    {"out_dir", "output.dir"},
    {"init_from", "model.from"},
    {"dtype", "precision.param_dtype"},
    {"weight_tying", "model.tied"},
    {"zero_stage", "fsdp.strategy"},
    {"sharding_strategy", "fsdp.strategy"},
    {"auto_wrap_policy", "fsdp.wrap"},
};

}  // namespace

std::string value_text(const Field& field) {
  return std::visit(
      [](const auto* value) -> std::string {
        using T = std::remove_cvref_t<decltype(*value)>;
        if constexpr (std::is_same_v<T, std::string>)
          return quote(*value);
        else if constexpr (std::is_same_v<T, double>)
          return number_text(*value);
        else
          return fmt::format("{}", *value);
      },
      field.value);
}

const std::string& Config::origin(std::string_view key) const {
  static const std::string kDefault = "default";
  const auto found = origins.find(key);
  return found == origins.end() ? kDefault : found->second;
}

void check_in_range(const Field& field, const std::string& where) {
  const std::string found = value_text(field);
  if (const auto* const* integer = std::get_if<int64_t*>(&field.value)) {
    check_range(field, static_cast<double>(**integer), found, where);
  } else if (const auto* const* number = std::get_if<double*>(&field.value)) {
    check_range(field, **number, found, where);
  }
}

std::vector<Field> config_fields(Config& c) {
  const Range any{-kInfinity, kInfinity}, fraction{0, 1, false, true};
  const auto from = [](double low) { return Range{low, kMaxCount}; };
  const Range positive{0, kInfinity, true, true}, not_negative{0, kInfinity, false, true};
  const Range f32_positive{1e-30, 1e30};  // becomes an f32, neither 0 nor infinity
  return {
      {"device",
       &c.device,
       any,
       {"auto", "cpu", "cuda"},
       "device that computes; auto: cuda if there is one, else cpu"},

      {"model.from",
       &c.model.from,
       any,
       {},
       "fine-tune: directory with config.json and model.safetensors of Hugging Face's "
       "transformers, which sets all model keys (model.context may be shorter)"},
      {"model.ignore_keys",
       &c.model.ignore_keys,
       any,
       {},
       "keys of model.from's config.json, separated by commas, of which nothing is known here and "
       "that change no numbers: no warning"},
      {"model.source",
       &c.model.source,
       any,
       {},
       "directory from which an export takes the tokenizer's files; set by model.from"},
      {"model.frozen",
       &c.model.frozen,
       any,
       {},
       "parameters that are not trained, such as \"embed.*,blocks.0.*\": names, * for any "
       "characters, separated by commas"},
      {"model.kind", &c.model.kind, any, {"gpt2", "llama", "bloom"}, "model architecture"},
      {"model.layers", &c.model.layers, {1, 10000}, {}, "number of transformer blocks"},
      {"model.heads", &c.model.heads, {1, 4096}, {}, "attention heads of a block"},
      {"model.kv_heads",
       &c.model.kv_heads,
       {0, 4096},
       {},
       "key/value heads of a block (grouped-query attention); 0: as many as model.heads"},
      {"model.head_width",
       &c.model.head_width,
       {0, 65536},
       {},
       "llama: width of an attention head; 0: model.width / model.heads"},
      {"model.width", &c.model.width, {1, 1048576}, {}, "width of the hidden states"},
      {"model.ffn",
       &c.model.ffn,
       {0, 16777216},
       {},
       "hidden width of the MLP; 0: 4 x model.width (gpt2, bloom), 8/3 x model.width rounded up to "
       "a multiple of 64 (llama)"},
      {"model.context",
       &c.model.context,
       {1, 16777216},
       {},
       "sequence length of a training sample, in tokens"},
      {"model.max_positions",
       &c.model.max_positions,
       {0, 16777216},
       {},
       "positions that the model can tell apart (position embeddings of gpt2, the limit in "
       "exports); "
       "0: model.context; set by model.from"},
      {"model.vocab",
       &c.model.vocab,
       {0, 2147483647},
       {},
       "vocabulary size; 0: that of the tokenizer"},
      {"model.tied",
       &c.model.tied,
       any,
       {},
       "output head shares the weight of the token embedding"},
      {"model.bias", &c.model.bias, any, {}, "gpt2: biases in linear and norm layers"},
      {"model.qkv_bias",
       &c.model.qkv_bias,
       any,
       {},
       "llama: biases of the query, key and value projections (Qwen2)"},
      {"model.qk_norm", &c.model.qk_norm, any, {}, "llama: RMS norms of queries and keys (Qwen3)"},
      {"model.gelu",
       &c.model.gelu,
       any,
       {"tanh", "exact"},
       "gpt2: tanh approximation of GELU, or the exact function"},
      {"model.rope_theta",
       &c.model.rope_theta,
       f32_positive,
       {},
       "llama: base of the rotary position frequencies"},
      {"model.rope_scaling",
       &c.model.rope_scaling,
       any,
       {"none", "linear", "llama3"},
       "llama: scaling of the rotary frequencies for a longer context"},
      {"model.rope_factor",
       &c.model.rope_factor,
       f32_positive,
       {},
       "rope_scaling linear, llama3: factor by which rotary frequencies are divided"},
      {"model.rope_low_freq_factor",
       &c.model.rope_low_freq_factor,
       f32_positive,
       {},
       "rope_scaling llama3: low_freq_factor of transformers' config.json"},
      {"model.rope_high_freq_factor",
       &c.model.rope_high_freq_factor,
       f32_positive,
       {},
       "rope_scaling llama3: high_freq_factor of transformers' config.json"},
      {"model.rope_original_context",
       &c.model.rope_original_context,
       from(1),
       {},
       "rope_scaling llama3: context length before scaling, in tokens"},
      {"model.norm_eps", &c.model.norm_eps, f32_positive, {}, "epsilon of LayerNorm and RMSNorm"},
      {"model.bos_ids",
       &c.model.bos_ids,
       any,
       {},
       "token ids that begin a text, such as 1 or 1,7, for config.json of exports; set by "
       "model.from"},
      {"model.eos_ids",
       &c.model.eos_ids,
       any,
       {},
       "token ids that end a text, such as 2 or 2,7, for config.json of exports; set by "
       "model.from"},
      {"model.pad_ids",
       &c.model.pad_ids,
       any,
       {},
       "token ids of padding, such as 0, for config.json of exports; set by model.from"},
      {"model.dropout", &c.model.dropout, fraction, {}, "gpt2, bloom: dropout probability"},

      {"data.text", &c.data.text, any, {}, "text file to train on"},
      {"data.tokens",
       &c.data.tokens,
       any,
       {},
       "token shards to train on (.bin format of llm.c), a path or a glob such as "
       "'data/train_*.bin'"},
      {"data.val_tokens",
       &c.data.val_tokens,
       any,
       {},
       "token shards for validation, a glob; empty: a part of data.tokens (data.val_fraction)"},
      {"data.tokenizer",
       &c.data.tokenizer,
       any,
       {"byte", "char"},
       "tokens of data.text: bytes, or the characters that occur in it"},
      {"data.val_fraction",
       &c.data.val_fraction,
       fraction,
       {},
       "fraction of the data kept back for validation"},
      {"data.val_split",
       &c.data.val_split,
       any,
       {"tail", "interleave"},
       "validation data: the end of the data, or the end of each of many pieces of it"},
      {"data.separator",
       &c.data.separator,
       {-1, 2147483647},
       {},
       "token id that ends a document and begins the next: attention stays inside a document; -1: "
       "no separator"},
      {"data.restart_positions",
       &c.data.restart_positions,
       any,
       {},
       "positions restart at 0 with each document"},

      {"train.steps", &c.train.steps, from(1), {}, "optimizer steps of the whole run"},
      {"train.micro_batch",
       &c.train.micro_batch,
       {1, 1048576},
       {},
       "samples of a rank in one forward and backward pass"},
      {"train.grad_accum_steps",
       &c.train.grad_accum_steps,
       {1, 1048576},
       {},
       "gradient accumulation: forward and backward passes of a step"},
      {"train.global_batch",
       &c.train.global_batch,
       from(0),
       {},
       "samples of a step over all ranks, which sets grad_accum_steps; 0: micro_batch x "
       "grad_accum_steps x ranks"},
      {"train.seed", &c.train.seed, from(0), {}, "seed of initialization, data order and dropout"},
      {"train.eval_every",
       &c.train.eval_every,
       from(0),
       {},
       "steps from one evaluation to the next; 0: only after the last step"},
      {"train.eval_batches",
       &c.train.eval_batches,
       from(0),
       {},
       "micro-batches in one evaluation, over all ranks; 0: the whole validation split"},
      {"train.log_every",
       &c.train.log_every,
       from(1),
       {},
       "steps from one printed line to the next"},
      {"train.threads",
       &c.train.threads,
       {0, 4096},
       {},
       "CPU threads of a rank; 0: allowed processors / ranks of the node"},
      {"train.pin_threads",
       &c.train.pin_threads,
       any,
       {},
       "binds each CPU thread to a processor of its own, where train.threads is 0"},
      {"train.reproducible",
       &c.train.reproducible,
       any,
       {},
       "bitwise the same results on any power of two of ranks with the same micro_batch and "
       "global_batch"},
      {"train.max_minutes",
       &c.train.max_minutes,
       not_negative,
       {},
       "wall-clock minutes after which the run ends in good order; 0: no limit"},

      {"sample.tokens",
       &c.sample.tokens,
       from(0),
       {},
       "tokens to generate from sample.prompt after training; 0: none"},
      {"sample.prompt", &c.sample.prompt, any, {}, "text that the sample continues"},
      {"sample.temperature",
       &c.sample.temperature,
       not_negative,
       {},
       "sampling temperature; 0: greedy, the likeliest token"},
      {"sample.top_k",
       &c.sample.top_k,
       from(0),
       {},
       "top-k sampling: draws from the k likeliest tokens; 0: from all"},
      {"sample.top_p",
       &c.sample.top_p,
       {0, 1, true, false},
       {},
       "nucleus sampling: draws from the likeliest tokens with this total probability"},

      {"optim.name", &c.optim.name, any, {"adamw", "sgd"}, "optimizer"},
      {"optim.lr",
       &c.optim.lr,
       not_negative,
       {},
       "peak learning rate; not given with model.from: 1e-5"},
      {"optim.final_lr",
       &c.optim.final_lr,
       not_negative,
       {},
       "learning rate at the last step, absolute; not given: a tenth of optim.lr"},
      {"optim.warmup_steps",
       &c.optim.warmup_steps,
       from(0),
       {},
       "steps of the linear warm-up from 0 to optim.lr"},
      {"optim.decay_steps",
       &c.optim.decay_steps,
       from(0),
       {},
       "schedule wsd: steps of the decay at the end; 0: a fifth of train.steps"},
      {"optim.schedule",
       &c.optim.schedule,
       any,
       {"constant", "linear", "cosine", "wsd"},
       "learning rate schedule after the warm-up"},
      {"optim.beta1", &c.optim.beta1, fraction, {}, "adamw: decay rate of the first moment"},
      {"optim.beta2", &c.optim.beta2, fraction, {}, "adamw: decay rate of the second moment"},
      {"optim.eps", &c.optim.eps, positive, {}, "adamw: epsilon"},
      {"optim.momentum", &c.optim.momentum, fraction, {}, "sgd: momentum"},
      {"optim.nesterov", &c.optim.nesterov, any, {}, "sgd: Nesterov momentum, which looks ahead"},
      {"optim.weight_decay",
       &c.optim.weight_decay,
       not_negative,
       {},
       "decoupled weight decay of matrices (not of norms and biases)"},
      {"optim.stochastic_rounding",
       &c.optim.stochastic_rounding,
       any,
       {},
       "adamw: stochastic rounding of bf16 and f16 parameters, so that they follow the f32 masters "
       "on average"},
      {"optim.clip",
       &c.optim.clip,
       not_negative,
       {},
       "gradient clipping: largest norm of all gradients; 0: no clipping"},
      {"optim.clip_p",
       &c.optim.clip_p,
       {1, kInfinity},
       {},
       "p of the p-norm of gradients for clipping and the log; inf: the largest magnitude"},

      {"fsdp.strategy",
       &c.fsdp.strategy,
       any,
       {"full_shard", "shard_grad_op", "shard_optim", "no_shard", "hybrid_shard",
        "hybrid_shard_zero2"},
       "sharding strategy: what of parameters, gradients and optimizer states is sharded over "
       "ranks"},
      {"fsdp.shard_size",
       &c.fsdp.shard_size,
       {0, 1048576},
       {},
       "hybrid strategies: ranks in a shard group; 0: the ranks of a node"},
      {"fsdp.wrap",
       &c.fsdp.wrap,
       any,
       {"transformer_block", "every_n_blocks", "min_num_params", "whole_model"},
       "wrap policy: the modules whose parameters form a unit, gathered together"},
      {"fsdp.wrap_every",
       &c.fsdp.wrap_every,
       {1, 10000},
       {},
       "wrap every_n_blocks: blocks in a unit"},
      {"fsdp.min_num_params",
       &c.fsdp.min_num_params,
       from(1),
       {},
       "wrap min_num_params: parameters from which a module is a unit"},
      {"fsdp.sync_every_micro_batch",
       &c.fsdp.sync_every_micro_batch,
       any,
       {"auto", "true", "shard", "false"},
       "gradient reduction in accumulation: true: over all ranks after each pass; shard: inside "
       "shard groups; false: after the last pass only; auto: by the strategy"},
      {"fsdp.reshard_after_forward",
       &c.fsdp.reshard_after_forward,
       any,
       {"auto", "true", "false", "2", "3", "4", "6", "8", "12", "16", "32", "64"},
       "true, false: as the strategy says; g: keep 1/g of each unit after forward and gather it "
       "from g ranks in backward"},
      {"fsdp.prefetch_forward",
       &c.fsdp.prefetch_forward,
       {0, 1024},
       {},
       "units gathered ahead of the computing one in forward"},
      {"fsdp.prefetch_backward",
       &c.fsdp.prefetch_backward,
       {0, 1024},
       {},
       "units gathered ahead of the computing one in backward"},
      {"fsdp.offload",
       &c.fsdp.offload,
       any,
       {"none", "optimizer", "params_and_optimizer"},
       "shards kept in host memory: optimizer states and masters, or parameters and gradients too"},
      {"fsdp.communicators",
       &c.fsdp.communicators,
       {1, 2},
       {},
       "2: all-gather and reduce-scatter overlap; 1: one after the other"},
      {"fsdp.wire_dtype",
       &c.fsdp.wire_dtype,
       any,
       {"same", "f32", "bf16", "f16"},
       "dtype in which gradients travel to be summed in f32; same: precision.reduce_dtype"},
      {"fsdp.ignored",
       &c.fsdp.ignored,
       any,
       {},
       "parameters that every rank keeps whole and nobody trains, such as \"embed.*\": names, * "
       "for "
       "any characters, separated by commas"},

      {"precision.param_dtype",
       &c.precision.param_dtype,
       any,
       {"auto", "f32", "bf16", "f16"},
       "dtype of gathered parameters and activations (masters are f32); auto: bf16 on cuda, f32 on "
       "cpu, on a resume that of the checkpoint"},
      {"precision.reduce_dtype",
       &c.precision.reduce_dtype,
       any,
       {"f32", "bf16", "f16"},
       "dtype of gradients that are reduced over ranks"},
      {"precision.output_dtype",
       &c.precision.output_dtype,
       any,
       {"same", "f32", "bf16", "f16"},
       "dtype of the model's outputs (losses stay f32); same: as computed"},
      {"precision.buffer_dtype",
       &c.precision.buffer_dtype,
       any,
       {"same", "f32", "bf16", "f16"},
       "bloom: dtype to which the ALiBi slopes are rounded; same: f32"},
      {"precision.cast_forward_inputs",
       &c.precision.cast_forward_inputs,
       any,
       {},
       "casts the floating-point inputs of a unit to param_dtype"},
      {"precision.norm_fp32",
       &c.precision.norm_fp32,
       any,
       {},
       "norm parameters stay f32 beside bf16 and f16"},
      {"precision.loss_scale",
       &c.precision.loss_scale,
       any,
       {"auto", "none", "static", "dynamic"},
       "loss scaling, which keeps small gradients in range; steps that overflow are skipped; auto: "
       "dynamic for f16"},
      {"precision.loss_scale_init",
       &c.precision.loss_scale_init,
       {0, 16777216, true, false},
       {},
       "loss scale at the start, best a power of two"},
      {"precision.loss_scale_interval",
       &c.precision.loss_scale_interval,
       from(1),
       {},
       "loss_scale dynamic: finite steps until the scale doubles"},

      {"recompute.policy",
       &c.recompute.policy,
       any,
       {"none", "full", "every_n", "selective"},
       "activation recompute (checkpointing): blocks whose activations are computed again in "
       "backward; selective: only norms and activation functions, of all blocks"},
      {"recompute.every_n",
       &c.recompute.every_n,
       from(1),
       {},
       "policy every_n: recomputes every n-th block"},

      {"memory.limit",
       &c.memory.limit,
       any,
       {},
       "most memory of the device, such as \"2GiB\"; none: no limit"},
      {"memory.split",
       &c.memory.split,
       any,
       {},
       "a cached block is cut if at least so much is left of it, else used whole: more leaves "
       "fewer fragments and wastes more inside blocks"},
      {"memory.empty_cache_every",
       &c.memory.empty_cache_every,
       from(0),
       {},
       "steps after which cached memory goes back to the system, which waits for the device; 0: "
       "never"},
      {"output.dir",
       &c.output.dir,
       any,
       {},
       "directory for metrics, status, configuration and model"},
      {"output.overwrite",
       &c.output.overwrite,
       any,
       {},
       "starts anew although a run is in output.dir, whose model, metrics and checkpoints are then "
       "removed; not stored"},
      {"output.peak_tflops",
       &c.output.peak_tflops,
       not_negative,
       {},
       "peak TFLOP/s of one rank's device, for MFU in the log; 0: no MFU"},
      {"checkpoint.every",
       &c.checkpoint.every,
       from(0),
       {},
       "steps from one checkpoint to the next; 0: none by steps"},
      {"checkpoint.every_minutes",
       &c.checkpoint.every_minutes,
       not_negative,
       {},
       "wall-clock minutes after a checkpoint until the next, if none came by steps; 0: none by "
       "time"},
      {"checkpoint.last", &c.checkpoint.last, any, {}, "saves a checkpoint after the last step"},
      {"checkpoint.keep", &c.checkpoint.keep, from(1), {}, "newest checkpoints that are kept"},
      {"checkpoint.best",
       &c.checkpoint.best,
       any,
       {},
       "keeps the checkpoint with the lowest validation loss and, with checkpoint.every, saves "
       "after each evaluation that is the best so far"},
      {"checkpoint.dir",
       &c.checkpoint.dir,
       any,
       {},
       "directory for checkpoints; empty: output.dir"},
      {"checkpoint.on_error",
       &c.checkpoint.on_error,
       any,
       {"warn", "stop"},
       "a checkpoint that cannot be written: warn and go on, or stop the run"},
      {"checkpoint.max_errors",
       &c.checkpoint.max_errors,
       from(0),
       {},
       "on_error warn: failed checkpoints in a row that end the run; 0: no limit"},
      {"checkpoint.resume",
       &c.checkpoint.resume,
       any,
       {},
       "(also --resume) none; auto: from the newest whole checkpoint, or, without one, from that "
       "which the run there began with, else from the start; or the path of a checkpoint"},
      {"checkpoint.resume_override",
       &c.checkpoint.resume_override,
       any,
       {},
       "(also --resume.override) resume although data, seed, batch or other settings are not those "
       "of the checkpoint"},
      {"checkpoint.resume_skip_unreadable",
       &c.checkpoint.resume_skip_unreadable,
       any,
       {},
       "(also --resume.skip_unreadable) auto passes over checkpoints that cannot be read (of a "
       "newer "
       "version, with a file missing) and leaves them alone, instead of ending"},

      {"guard.max_skips",
       &c.guard.max_skips,
       from(0),
       {},
       "steps in a row with a non-finite loss or gradient norm, which change nothing, before the "
       "run stops"},
      {"guard.spike",
       &c.guard.spike,
       any,
       {"off", "skip", "rewind"},
       "a step whose loss is far above the last ones: skip changes nothing, rewind goes back to a "
       "copy in memory and on with later data; the host waits for each step"},
      {"guard.spike_z",
       &c.guard.spike_z,
       positive,
       {},
       "guard.spike: standard deviations above the mean from which a loss is a spike"},
      {"guard.spike_window",
       &c.guard.spike_window,
       {2, 1e6},
       {},
       "guard.spike: last losses that a loss is compared with"},
      {"guard.max_spikes",
       &c.guard.max_spikes,
       from(0),
       {},
       "guard.spike: spikes in a row before the run stops"},
      {"guard.snapshot_every",
       &c.guard.snapshot_every,
       from(1),
       {},
       "guard.spike rewind: steps from one copy of the state in memory to the next"},
      {"guard.replica_every",
       &c.guard.replica_every,
       from(0),
       {},
       "steps from one comparison of what replicas hold to the next; one that differs ends the run "
       "with status 5 and is named; 0: none"},
      {"guard.state_checksum",
       &c.guard.state_checksum,
       any,
       {},
       "each step, checks that nothing has changed parameters and optimizer states since the last "
       "update; takes two more passes over them"},

      {"kernels.attention",
       &c.kernels.attention,
       any,
       {"own", "cudnn", "auto"},
       "attention on CUDA: this project's kernels (bitwise repeatable), cuDNN where it takes the "
       "problem, or the faster of both, timed once a shape"},
      {"kernels.gemm",
       &c.kernels.gemm,
       any,
       {"auto", "own", "cublaslt"},
       "GEMMs on CUDA: cuBLASLt where it is installed, this project's kernel, or cuBLASLt and an "
       "error without it"},

      {"dist.timeout",
       &c.dist.timeout,
       {0.001, 1e9},
       {},
       "seconds after which a collective that is not complete counts as hung"},
      {"dist.nccl_reduce",
       &c.dist.nccl_reduce,
       any,
       {"tree", "nccl"},
       "gradient sums on CUDA: this project's fixed tree over ranks, or NCCL in an order of its "
       "own"},
      {"dist.nccl_max_ctas",
       &c.dist.nccl_max_ctas,
       {0, 64},
       {},
       "thread blocks (CTAs) that a NCCL communicator may use at once; 0: NCCL's choice"},
      {"dist.single_process",
       &c.dist.single_process,
       any,
       {},
       "this process is meant to be alone, although a launcher that MPI does not know says that it "
       "started several"},
      {"debug.poison", &c.debug.poison, any, {}, "fills freed memory with NaN"},
      {"debug.order_check",
       &c.debug.order_check,
       any,
       {},
       "checks that events order all accesses of streams to the same memory"},
      {"debug.dist", &c.debug.dist, any, {}, "logs each collective as it starts"},
      {"debug.trace",
       &c.debug.trace,
       any,
       {},
       "file for the timeline of all streams (Chrome trace, opens in Perfetto); FILE.1 and so on "
       "for the ranks after the first"},
      {"debug.trace_from",
       &c.debug.trace_from,
       from(1),
       {},
       "debug.trace: first step of the timeline"},
      {"debug.nan_step",
       &c.debug.nan_step,
       from(0),
       {},
       "fault injection: step whose loss becomes NaN; 0: none"},
      {"debug.nan_rank",
       &c.debug.nan_rank,
       {0, 1048576},
       {},
       "fault injection: rank whose loss becomes NaN at debug.nan_step"},
      {"debug.flip_step",
       &c.debug.flip_step,
       from(0),
       {},
       "fault injection: step before which a bit of a parameter flips; 0: none"},
      {"debug.flip_rank",
       &c.debug.flip_rank,
       {0, 1048576},
       {},
       "fault injection: rank whose parameter changes at debug.flip_step"},
      {"debug.slow_rank",
       &c.debug.slow_rank,
       {0, 1048576},
       {},
       "fault injection: rank that debug.slow_ms is for"},
      {"debug.slow_ms",
       &c.debug.slow_ms,
       {0, 1e6},
       {},
       "fault injection: milliseconds that a rank sleeps in each step"},
      {"debug.trace_steps",
       &c.debug.trace_steps,
       from(1),
       {},
       "debug.trace: steps in the timeline"},
      {"debug.exposed_units",
       &c.debug.exposed_units,
       from(0),
       {},
       "units in each line of metrics.jsonl whose collectives compute waited for longest"},
  };
}

void check_config(const Config& config) {
  check_model(config);
  check_data(config);
  check_schedule(config);
  check_memory(config);
  check_rounding(config);
}

Config parse_config(std::string_view text, const std::string& name,
                    std::span<const std::string> overrides) {
  Config config;
  const std::vector<Field> fields = config_fields(config);
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
  config.is_resolved = text.starts_with(kResolvedComment);
  apply_overrides(fields, overrides, config);
  take_model_from(config);
  derive_defaults(config);
  check_config(config);
  return config;
}

Config load_config(const std::string& path, std::span<const std::string> overrides) {
  if (path.empty()) return parse_config("", "", overrides);
  std::string text;
  try {
    text = read_regular_file(path, kMaxConfigNbytes);
  } catch (const InputError& error) {
    throw ConfigError(error.what());
  }
  return parse_config(text, path, overrides);
}

std::vector<std::pair<std::string, std::string>> config_values(const Config& config) {
  Config copy = config;
  std::vector<std::pair<std::string, std::string>> values;
  for (const Field& field : config_fields(copy)) {
    values.emplace_back(field.key, value_text(field));
  }
  return values;
}

std::string dump_config(const Config& config) {
  std::string out = std::string(kResolvedComment) + "\n", section;
  for (const auto& [key, value] : config_values(config)) {
    // What they meant is in the other keys.
    if (key == "model.from" || key == "model.ignore_keys") continue;
    if (key == "output.overwrite") continue;  // said for one start, not for those after it
    const std::string own = section_of(key);
    if (own != section) {
      out += fmt::format("\n[{}]\n", own);
      section = own;
    }
    const std::string name = own.empty() ? key : key.substr(own.size() + 1);
    out += fmt::format("{} = {}\n", name, value);
  }
  return out;
}

void resolve_param_dtype(Config& config, bool is_cuda, const std::string& stored) {
  std::string& dtype = config.precision.param_dtype;
  if (dtype != "auto") return;
  const bool is_known = !stored.empty() && stored != "auto";
  dtype = is_known ? stored : is_cuda ? "bf16" : "f32";
  check_rounding(config);
}

std::string derived_defaults(const Config& config) {
  std::vector<std::string> all;
  const OptimConfig& o = config.optim;
  if (!config.model.from.empty() && !config.is_given("optim.lr")) {
    all.push_back(
        fmt::format("optim.lr = {} (that of fine-tuning, since model.from is given)", o.lr));
  }
  if (!config.is_given("optim.final_lr") && o.schedule != "constant") {
    all.push_back(fmt::format("optim.final_lr = {} (a tenth of optim.lr)", o.final_lr));
  }
  return fmt::format("{}", fmt::join(all, "; "));
}

std::string config_help(std::string_view what) {
  Config config;
  std::string out;
  std::vector<std::string_view> names;
  const std::vector<Field> fields = config_fields(config);
  for (const Field& field : fields) names.push_back(field.key);
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
                    shorten(what), fmt::join(sections, ", "), nearest_keys(what, names)));
  }
  for (const Field& field : fields) {
    if (!is_wanted(field)) continue;
    const std::string expected = expected_text(field);
    out += fmt::format("  --{:<31} {}\n  {:<33} {}; default {}\n", field.key, field.doc, "",
                       expected, value_text(field));
  }
  return out;
}

std::vector<int64_t> parse_ids(std::string_view text) {
  constexpr int64_t kMax = (int64_t{1} << 31) - 1;
  std::vector<int64_t> ids;
  const char* const end = text.data() + text.size();
  for (const char* next = text.data(); next < end;) {
    int64_t id = -1;
    const auto [stop, error] = std::from_chars(next, end, id);
    const bool is_last = stop == end;
    if (error != std::errc() || id < 0 || id > kMax || (!is_last && *stop != ',') ||
        stop + 1 == end) {
      throw ConfigError(
          fmt::format("{}, expected token ids, such as 2 or 2,7", shorten(quote(text))));
    }
    ids.push_back(id);
    next = is_last ? end : stop + 1;
  }
  return ids;
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

std::string nearest_keys(std::string_view word, std::span<const std::string_view> keys) {
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
  for (const auto& [other, key] : kOtherNames) {
    const bool is_there = std::find(keys.begin(), keys.end(), key) != keys.end();
    if (own == other && is_there) return std::string(key);
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
