#include "apps/config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "apps/classification.h"
#include "apps/config_table.h"
#include "apps/evaluation/tasks.h"
#include "apps/packed_samples.h"
#include "apps/parameter_groups.h"
#include "apps/profile.h"
#include "core/text.h"
#include "kernels/reduce/reduce.h"

namespace tessera::apps {
namespace {

constexpr std::string_view kResolvedComment = "# The resolved configuration: every key.";

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

/// Settings of other families keep their defaults where it matters.
void check_other_families(const Config& config) {
  const ModelConfig& m = config.model;
  Config copy = config, plain;
  const auto fields = config_fields(copy), defaults = config_fields(plain);
  const std::vector<std::string_view>& refused = m.selected().family().refused;
  const auto value_of = [&](std::string_view key) {
    const auto at = std::find_if(fields.begin(), fields.end(),
                                 [&](const Field& field) { return field.key == key; });
    return std::get<int64_t>(at->get());
  };
  for (size_t i = 0; i < fields.size(); ++i) {
    const Field& field = fields[i];
    if (field.is_of_model || field.get() == defaults[i].get()) continue;
    const std::string_view name = field.key.substr(field.key.find('.') + 1);
    const bool is_refused = std::find(refused.begin(), refused.end(), name) != refused.end();
    if (!field.is_essential && !is_refused) continue;
    // What a model without the setting has.
    std::string expected = defaults[i].value_text();
    if (name == "kv_heads") {
      if (field.get() == SettingValue(value_of("model.heads"))) continue;
      expected = fmt::format("model.heads = {}", value_of("model.heads"));
    } else if (name == "ffn") {
      if (field.get() == SettingValue(4 * value_of("model.width"))) continue;
      expected = "0 or 4 x model.width";
    }
    fail_at(config, field.key, "{} = {}, expected {} for kind {}", field.key, field.value_text(),
            expected, m.kind);
  }
}

void check_model(const Config& config) {
  const ModelConfig& m = config.model;
  check_ids(config);
  if (!m.ignore_keys.empty() && m.from.empty()) {
    fail_at(config, "model.ignore_keys",
            "model.ignore_keys = {} without model.from, expected the model that has them",
            shorten(toml_text(m.ignore_keys)));
  }
  if (m.max_positions != 0 && m.max_positions < m.context) {
    fail_at(config,
            config.is_given("model.max_positions") ? "model.max_positions" : "model.context",
            "model.max_positions = {}, expected 0 or at least model.context = {}", m.max_positions,
            m.context);
  }
  check_other_families(config);
  nn::FamilyConfig family = m.selected();
  if (!config.data.classify.empty()) family.set_classifier({"0", "1"}, m.pooling);
  family.check([&](std::string_view name, const std::string& expected) {
    const std::string key = fmt::format("model.{}", name);
    Config copy = config;
    for (const Field& field : config_fields(copy)) {
      if (field.key != key) continue;
      fail_at(config, key, "{} = {}, expected {}", key, field.value_text(), expected);
    }
    throw InternalError(fmt::format("{}: no such setting", key));
  });
}

void check_lora(const Config& config) {
  if (!config.lora.from.empty() && config.model.from.empty()) {
    fail_at(config, "lora.from",
            "lora.from = {} without model.from, expected the model that the adapters are of",
            config.lora.from);
  }
}

/// What describes models and data is not for a program that has its own.
void check_own(const Config& config) {
  for (const auto& [key, where] : config.origins) {
    for (const std::string_view section : kOwnSections) {
      if (!config.is_own || config.is_resolved || key.substr(0, key.find('.')) != section) continue;
      throw ConfigError(fmt::format(
          "{}: {}, expected none of section {}: this program has a model and data of its own",
          where, key, section));
    }
  }
}

void check_data(const Config& config) {
  if (config.is_own) return;
  const DataConfig& d = config.data;
  std::vector<std::string_view> given;
  const std::pair<const char*, const std::string*> keys[] = {
      {"text", &d.text}, {"tokens", &d.tokens},         {"sources", &d.sources},
      {"chat", &d.chat}, {"preference", &d.preference}, {"classify", &d.classify}};
  for (const auto& [name, value] : keys) {
    if (!value->empty()) given.push_back(name);
  }
  if (given.size() != 1) {
    throw ConfigError(fmt::format(
        "data: {}, expected one of --data.text=FILE, --data.tokens=GLOB, --data.sources=GLOB,..., "
        "--data.chat=GLOB, --data.preference=GLOB or --data.classify=GLOB",
        given.empty() ? "no data given" : fmt::format("both {} and {} given", given[0], given[1])));
  }
  if (d.tokens.empty() && !d.val_tokens.empty()) {
    fail_at(config, "data.val_tokens", "data.val_tokens with data.{}, expected data.tokens",
            given[0]);
  }
  const bool has_rows = !d.chat.empty() || !d.preference.empty();
  const bool classifies = !d.classify.empty();
  const bool is_packed = !d.sources.empty() || has_rows || classifies;
  if (is_packed && d.mask_token >= 0) {
    fail_at(config, "data.mask_token", "data.mask_token with data.{}, expected data.tokens",
            given[0]);
  }
  if (classifies && d.separator >= 0) {
    fail_at(config, "data.separator", "data.separator = {} with data.classify, expected none",
            d.separator);
  }
  if (has_rows && d.separator >= 0) {
    fail_at(config, "data.separator",
            "data.separator = {} with data.{}, expected none: its template says what ends a "
            "conversation",
            d.separator, given[0]);
  }
  if (!d.sources.empty()) {
    try {
      parse_sources(d.sources);
    } catch (const ConfigError& error) {
      fail_at(config, "data.sources", "data.sources {}", error.what());
    }
  }
  if (!d.tokens.empty() && config.model.vocab == 0) {
    fail_at(config, "data.tokens",
            "data.tokens without a vocabulary, expected model.vocab to be set");
  }
  if (d.restart_positions && d.separator < 0 && !d.tokens.empty()) {
    fail_at(config, "data.restart_positions",
            "data.restart_positions = true, expected data.separator to be set");
  }
  const bool is_causal = config.model.selected().family().is_causal;
  if (!classifies && is_causal == (d.mask_token >= 0)) {
    fail_at(config, "data.mask_token", "data.mask_token = {}, expected {} for kind {}, which {}",
            d.mask_token, is_causal ? "-1" : "the id of the mask token", config.model.kind,
            is_causal ? "predicts the next token" : "predicts masked tokens");
  }
  if (!config.model.classes.empty()) {
    try {
      parse_classes(config.model.classes);
    } catch (const ConfigError& error) {
      fail_at(config, "model.classes", "model.classes {}", error.what());
    }
    if (!classifies && !config.is_resolved) {
      fail_at(config, "model.classes", "model.classes = {} with data.{}, expected data.classify",
              shorten(config.model.classes), given[0]);
    }
  }
  if (config.sample.options.num_tokens == 0) return;
  if (!is_causal || classifies) {
    fail_at(config, "sample.tokens", "sample.tokens = {}, expected 0 for {}, which {}",
            config.sample.options.num_tokens,
            classifies ? "data.classify" : "kind " + config.model.kind, "cannot continue a text");
  }
  if (!d.tokens.empty()) {
    fail_at(config, "sample.tokens",
            "sample.tokens = {} with data.tokens, expected 0 or data.text, which has a tokenizer",
            config.sample.options.num_tokens);
  }
  if (config.sample.prompt.empty()) {
    fail_at(config, "sample.prompt", "sample.prompt is empty, expected some text");
  }
}

void check_eval(const Config& config) {
  const EvalConfig& e = config.eval;
  if (!e.is_on()) return;
  try {
    parse_tasks(e.tasks);
  } catch (const ConfigError& error) {
    fail_at(config, "eval.tasks", "{}", error.what());
  }
  if (!config.data.classify.empty() || !config.model.selected().family().is_causal) {
    fail_at(config, "eval.tasks",
            "eval.tasks with {}, expected a model that predicts the next token",
            config.data.classify.empty() ? "kind " + config.model.kind : "data.classify");
  }
  if (!config.data.tokens.empty() && e.tokenizer.empty()) {
    fail_at(config, "eval.tasks",
            "eval.tasks with data.tokens, expected eval.tokenizer, the one of their ids");
  }
}

void check_groups(const Config& config) {
  try {
    parse_groups(config.optim.groups);
  } catch (const ConfigError& error) {
    fail_at(config, "optim.groups", "optim.groups: {}", error.what());
  }
}

void check_rounding(const Config& config) {
  if (!config.optim.stochastic_rounding) return;
  if (config.precision.param_dtype == kF32) {  // auto: resolved later
    fail_at(config, "optim.stochastic_rounding",
            "optim.stochastic_rounding = true with precision.param_dtype = f32, expected bf16 or "
            "f16");
  }
}

void check_schedule(const Config& config) {
  const OptimConfig& o = config.optim;
  const optim::ScheduleOptions& schedule = o.schedule;
  if (schedule.final_lr > schedule.peak_lr) {
    fail_at(config, "optim.final_lr", "optim.final_lr = {}, expected at most optim.lr = {}",
            schedule.final_lr, schedule.peak_lr);
  }
  if (schedule.kind == optim::ScheduleKind::kRangeTest && schedule.first_lr >= schedule.peak_lr) {
    fail_at(
        config, "optim.first_lr",
        "optim.first_lr = {} with optim.schedule = range_test, expected less than optim.lr = {}",
        schedule.first_lr, schedule.peak_lr);
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

/// What two keys would both set. Of what `dump_config` wrote, which has every key, the one that the
/// command line adds.
void check_budget(const Config& config) {
  const TrainConfig& t = config.train;
  const auto is_set = [&](std::string_view key) {
    return config.is_given(key) && (!config.is_resolved || config.origin(key) == "command line");
  };
  const auto check = [&](std::string_view key, bool has_value, std::string_view other) {
    if (!has_value || !is_set(other)) return;
    fail_at(config, other, "{} beside {}, which sets it, expected one of them", other, key);
  };
  check("train.epochs", t.epochs > 0, "train.steps");
  check("train.tokens", t.tokens > 0, "train.steps");
  check("train.global_batch_tokens", t.global_batch_tokens > 0, "train.global_batch");
  check("train.global_batch_tokens", t.global_batch_tokens > 0, "train.grad_accum_steps");
  check("optim.warmup_ratio", config.optim.warmup_ratio > 0, "optim.warmup_steps");
  if (t.epochs > 0 && t.tokens > 0 && is_set("train.tokens")) {
    fail_at(config, "train.tokens",
            "train.tokens = {} beside train.epochs = {}, expected one of them", t.tokens, t.epochs);
  }
}

}  // namespace

ModelConfig::ModelConfig() : kind(nn::families().front()->name) {
  for (const nn::Family* family : nn::families()) {
    families.push_back(family->defaults());
    for (const auto& [key, value] : {std::pair<std::string_view, SettingValue>{"layers", 4},
                                     {"heads", 4},
                                     {"width", 128},
                                     {"tied", true}}) {
      families.back().set(key, value);
    }
  }
}

const nn::FamilyConfig& ModelConfig::selected() const {
  for (const nn::FamilyConfig& config : families) {
    if (config.family().name == kind) return config;
  }
  throw InternalError(fmt::format("model.kind = {}: no such family", kind));
}

nn::FamilyConfig& ModelConfig::selected() {
  return const_cast<nn::FamilyConfig&>(std::as_const(*this).selected());
}

dist::LossScaling loss_scaling(const PrecisionConfig& config) {
  const bool needs_scale = config.param_dtype == kF16;
  return config.loss_scale.value_or(needs_scale ? dist::LossScaling::kDynamic
                                                : dist::LossScaling::kNone);
}

const std::string& Config::origin(std::string_view key) const {
  static const std::string kDefault = "default";
  const auto found = origins.find(key);
  return found == origins.end() ? kDefault : found->second;
}

namespace {

void check_profile(const Config& config) {
  try {
    parse_step_range(config.profile.steps);
  } catch (const ConfigError& error) {
    throw ConfigError(
        fmt::format("{}: profile.steps = {}", config.origin("profile.steps"), error.what()));
  }
}

}  // namespace

void check_config(const Config& config) {
  check_own(config);
  check_model(config);
  check_lora(config);
  check_data(config);
  check_schedule(config);
  check_budget(config);
  check_eval(config);
  check_groups(config);
  check_rounding(config);
  check_profile(config);
}

std::string dump_config(const Config& config) {
  Config copy = config;
  std::string out = std::string(kResolvedComment) + "\n", section;
  if (config.is_own) out += std::string(kOwnComment) + "\n";
  for (const Field& field : config_fields(copy)) {
    if (!field.is_stored) continue;
    const size_t dot = field.key.find('.');
    const std::string_view own = field.key.substr(0, dot == std::string_view::npos ? 0 : dot);
    if (config.is_own &&
        std::find(kOwnSections.begin(), kOwnSections.end(), own) != kOwnSections.end()) {
      continue;
    }
    if (own != section) {
      out += fmt::format("\n[{}]\n", own);
      section = own;
    }
    out +=
        fmt::format("{} = {}\n", field.key.substr(own.empty() ? 0 : dot + 1), field.value_text());
  }
  return out;
}

bool is_dump(std::string_view text) {
  return text.starts_with(kResolvedComment);
}

void resolve_param_dtype(Config& config, bool is_cuda, std::optional<DType> stored) {
  std::optional<DType>& dtype = config.precision.param_dtype;
  if (dtype) return;
  dtype = stored.value_or(is_cuda ? kBF16 : kF32);
  check_rounding(config);
}

std::string derived_defaults(const Config& config) {
  std::vector<std::string> all;
  const OptimConfig& o = config.optim;
  if (config.lora.is_on() && !config.is_given("optim.lr")) {
    all.push_back(
        fmt::format("optim.lr = {} (that of adapters, lora.targets)", o.schedule.peak_lr));
  } else if (!config.model.from.empty() && !config.is_given("optim.lr")) {
    all.push_back(fmt::format("optim.lr = {} (that of fine-tuning, since model.from is given)",
                              o.schedule.peak_lr));
  }
  const bool ends_at_final = o.schedule.kind != optim::ScheduleKind::kConstant &&
                             o.schedule.kind != optim::ScheduleKind::kRangeTest;
  if (!config.is_given("optim.final_lr") && ends_at_final) {
    all.push_back(fmt::format("optim.final_lr = {} (a tenth of optim.lr)", o.schedule.final_lr));
  }
  if (o.name == OptimizerName::kLion && !config.is_given("optim.beta2")) {
    all.push_back(fmt::format("optim.beta2 = {} (that of lion)", o.adamw.beta2));
  }
  return fmt::format("{}", fmt::join(all, "; "));
}

std::vector<std::string> keys_without_effect(const Config& config, bool is_cuda) {
  Config copy = config;
  std::vector<std::string> found;
  for (const Field& field : config_fields(copy, is_cuda)) {
    if (!config.is_given(field.key) || field.has_effect) continue;
    const std::string& origin = config.origin(field.key);
    const bool is_by_hand = origin == "command line" || !config.is_resolved;
    if (!is_by_hand || origin == config.model.from + "/config.json") continue;
    found.push_back(
        fmt::format("{} = {} (needs {})", field.key, field.value_text(), field.condition));
  }
  return found;
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
          fmt::format("{}, expected token ids, such as 2 or 2,7", shorten(toml_text(text))));
    }
    ids.push_back(id);
    next = is_last ? end : stop + 1;
  }
  return ids;
}

}  // namespace tessera::apps
