#include "apps/budget.h"

#include <fmt/ranges.h>

#include <cmath>
#include <vector>

#include "core/check.h"

namespace tessera::apps {
namespace {

/// "491520 or 524288": the multiples of `unit` around `value`, without 0.
std::string nearest_multiples(int64_t value, int64_t unit) {
  const int64_t below = value / unit * unit;
  return below == 0 ? fmt::format("{}", below + unit)
                    : fmt::format("{} or {}", below, below + unit);
}

void check_parts(const Config& config, std::string_view key, int64_t parts) {
  if (parts == 0 || parts * config.samples_per_step <= config.samples_per_epoch) return;
  const int64_t most = config.samples_per_epoch / config.samples_per_step;
  throw ConfigError(fmt::format(
      "{}: {} = {}, but an epoch of {} samples has {:.2f} steps of {} samples, expected at most {}",
      config.origin(key), key, parts, config.samples_per_epoch,
      static_cast<double>(config.samples_per_epoch) / static_cast<double>(config.samples_per_step),
      config.samples_per_step, most));
}

}  // namespace

std::string resolve_budget(Config& config, const BudgetFacts& facts) {
  TrainConfig& t = config.train;
  std::vector<std::string> lines;
  const int64_t per_pass = t.micro_batch * facts.world_size;
  const int64_t tokens_per_pass = per_pass * facts.tokens_per_sample;
  const auto set = [&](std::string_view key, std::string_view by, int64_t& value,
                       int64_t resolved) {
    value = resolved;
    config.origins.insert_or_assign(std::string(key), config.origin(by));
  };
  if (t.global_batch_tokens > 0) {
    if (t.global_batch_tokens % tokens_per_pass != 0) {
      throw ConfigError(fmt::format(
          "{}: train.global_batch_tokens = {}, expected a multiple of train.micro_batch x ranks x tokens "
          "of a sample = {} x {} x {} = {}, such as {}",
          config.origin("train.global_batch_tokens"), t.global_batch_tokens, t.micro_batch,
          facts.world_size, facts.tokens_per_sample, tokens_per_pass,
          nearest_multiples(t.global_batch_tokens, tokens_per_pass)));
    }
    set("train.global_batch", "train.global_batch_tokens", t.global_batch,
        t.global_batch_tokens / facts.tokens_per_sample);
    t.grad_accum_steps = 1;
    lines.push_back(fmt::format("train.global_batch_tokens = {}: train.global_batch = {}",
                                t.global_batch_tokens, t.global_batch));
  }
  config.samples_per_epoch = facts.samples_per_epoch;
  config.samples_per_step = t.global_batch > 0 ? t.global_batch : per_pass * t.grad_accum_steps;
  const int64_t N = config.samples_per_epoch, S = config.samples_per_step;
  if (t.tokens > 0) {
    const int64_t per_step = S * facts.tokens_per_sample;
    if (t.tokens % per_step != 0) {
      throw ConfigError(fmt::format(
          "{}: train.tokens = {}, expected a multiple of a step's {} samples x {} tokens = {}, such as "
          "{}",
          config.origin("train.tokens"), t.tokens, S, facts.tokens_per_sample, per_step,
          nearest_multiples(t.tokens, per_step)));
    }
    set("train.steps", "train.tokens", t.steps, t.tokens / per_step);
    lines.push_back(fmt::format("train.tokens = {}: train.steps = {} of {} tokens, {:.2f} epochs",
                                t.tokens, t.steps, per_step,
                                static_cast<double>(t.steps * S) / static_cast<double>(N)));
  }
  if (t.epochs > 0) {
    const double samples = t.epochs * static_cast<double>(N);
    // A product that should be whole may be a rounding above it.
    const auto whole = static_cast<int64_t>(std::ceil(samples * (1 - 1e-12)));
    set("train.steps", "train.epochs", t.steps, std::max<int64_t>(1, (whole + S - 1) / S));
    lines.push_back(
        fmt::format("train.epochs = {}: train.steps = {}, {} samples of {} in steps of {}",
                    t.epochs, t.steps, whole, N, S));
    if (const int64_t more = t.steps * S - whole; more > 0) {
      lines.back() += fmt::format(", the last one with {} more", more);
    }
  }
  if (config.optim.warmup_ratio > 0) {
    const double steps = config.optim.warmup_ratio * static_cast<double>(t.steps);
    set("optim.warmup_steps", "optim.warmup_ratio", config.optim.schedule.warmup_steps,
        static_cast<int64_t>(std::ceil(steps * (1 - 1e-12))));
    lines.push_back(fmt::format("optim.warmup_ratio = {}: optim.warmup_steps = {} of {}",
                                config.optim.warmup_ratio, config.optim.schedule.warmup_steps,
                                t.steps));
  }
  for (const auto& [key, parts] :
       {std::pair<std::string_view, int64_t>{"train.evals_per_epoch", t.evals_per_epoch},
        {"eval.per_epoch", config.eval.per_epoch},
        {"checkpoint.per_epoch", config.checkpoint.per_epoch}}) {
    check_parts(config, key, parts);
    if (parts == 0) continue;
    constexpr int64_t kShown = 4;
    std::vector<std::string> steps;
    for (int64_t step = 1; step <= t.steps && std::ssize(steps) < kShown + 1; ++step) {
      if (completes_part_of_epoch(config, parts, step)) steps.push_back(std::to_string(step));
    }
    const bool has_more = std::ssize(steps) > kShown;
    if (has_more) steps.back() = "...";
    lines.push_back(fmt::format("{} = {}: after steps {}", key, parts, fmt::join(steps, ", ")));
  }
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "\n") + line;
  return text;
}

bool completes_part_of_epoch(const Config& config, int64_t parts, int64_t step) {
  if (parts == 0) return false;
  __extension__ using Wide = __int128;
  const auto done = [&](int64_t steps) {
    return static_cast<Wide>(steps) * config.samples_per_step * parts / config.samples_per_epoch;
  };
  return done(step) > done(step - 1);
}

}  // namespace tessera::apps
