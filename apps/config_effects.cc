#include "apps/config_effects.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::apps {
namespace {

bool is_low(const Config& c) {
  return c.precision.param_dtype != "f32";
}

bool has_validation(const Config& c) {
  return c.data.val_fraction > 0 || !c.data.val_tokens.empty();
}

bool is_dynamic(const Config& c) {
  const PrecisionConfig& p = c.precision;
  return p.loss_scale == "dynamic" || (p.loss_scale == "auto" && p.param_dtype == "f16");
}

int64_t steps_to_decay(const Config& c) {
  return c.train.steps - c.optim.warmup_steps;
}

}  // namespace

const std::vector<KeyCondition>& key_conditions() {
#define TESSERA_IF(condition) [](const Config& c, bool) { return condition; }
  static const std::vector<KeyCondition> all = {
      {"model.bias", TESSERA_IF(c.model.kind != "llama"), "model.kind = gpt2"},
      {"model.gelu", TESSERA_IF(c.model.kind != "llama"), "model.kind = gpt2"},
      {"model.rope_theta", TESSERA_IF(c.model.kind == "llama"), "model.kind = llama"},
      {"model.rope_scaling", TESSERA_IF(c.model.kind == "llama"), "model.kind = llama"},
      {"model.rope_factor", TESSERA_IF(c.model.kind == "llama" && c.model.rope_scaling != "none"),
       "model.kind = llama and model.rope_scaling = linear or llama3"},
      {"model.rope_low_freq_factor",
       TESSERA_IF(c.model.kind == "llama" && c.model.rope_scaling == "llama3"),
       "model.kind = llama and model.rope_scaling = llama3"},
      {"model.rope_high_freq_factor",
       TESSERA_IF(c.model.kind == "llama" && c.model.rope_scaling == "llama3"),
       "model.kind = llama and model.rope_scaling = llama3"},
      {"model.rope_original_context",
       TESSERA_IF(c.model.kind == "llama" && c.model.rope_scaling == "llama3"),
       "model.kind = llama and model.rope_scaling = llama3"},

      {"data.tokenizer", TESSERA_IF(!c.data.text.empty()), "data.text"},
      {"data.val_fraction", TESSERA_IF(c.data.val_tokens.empty()), "no data.val_tokens"},
      {"data.val_split", TESSERA_IF(c.data.val_tokens.empty() && c.data.val_fraction > 0),
       "data.val_fraction > 0 and no data.val_tokens"},
      {"data.restart_positions", TESSERA_IF(c.model.kind != "bloom"),
       "model.kind = llama or gpt2; ALiBi has no positions"},

      {"train.eval_every", TESSERA_IF(has_validation(c)),
       "data.val_fraction > 0 or data.val_tokens"},
      {"train.eval_batches", TESSERA_IF(has_validation(c)),
       "data.val_fraction > 0 or data.val_tokens"},
      {"train.pin_threads",
       [](const Config& c, bool is_cuda) { return c.train.threads == 0 && !is_cuda; },
       "train.threads = 0 and device = cpu"},

      {"sample.prompt", TESSERA_IF(c.sample.tokens > 0), "sample.tokens > 0"},
      {"sample.temperature", TESSERA_IF(c.sample.tokens > 0), "sample.tokens > 0"},
      {"sample.top_k", TESSERA_IF(c.sample.tokens > 0 && c.sample.temperature > 0),
       "sample.tokens > 0 and sample.temperature > 0"},
      {"sample.top_p", TESSERA_IF(c.sample.tokens > 0 && c.sample.temperature > 0),
       "sample.tokens > 0 and sample.temperature > 0"},

      {"optim.final_lr", TESSERA_IF(c.optim.schedule != "constant"),
       "optim.schedule = linear, cosine or wsd"},
      {"optim.warmup_steps", TESSERA_IF(c.optim.warmup_steps <= c.train.steps),
       "at least as many train.steps, else optim.lr is never reached"},
      {"optim.schedule", TESSERA_IF(steps_to_decay(c) > 0 || c.optim.schedule == "constant"),
       "train.steps > optim.warmup_steps"},
      {"optim.decay_steps",
       TESSERA_IF(c.optim.schedule == "wsd" && c.optim.decay_steps <= steps_to_decay(c)),
       "optim.schedule = wsd and at least as many steps after the warm-up"},
      {"optim.beta1", TESSERA_IF(c.optim.name == "adamw"), "optim.name = adamw"},
      {"optim.beta2", TESSERA_IF(c.optim.name == "adamw"), "optim.name = adamw"},
      {"optim.eps", TESSERA_IF(c.optim.name == "adamw"), "optim.name = adamw"},
      {"optim.momentum", TESSERA_IF(c.optim.name == "sgd"), "optim.name = sgd"},
      {"optim.nesterov", TESSERA_IF(c.optim.name == "sgd" && c.optim.momentum > 0),
       "optim.name = sgd and optim.momentum > 0"},

      {"fsdp.shard_size", TESSERA_IF(c.fsdp.strategy.starts_with("hybrid")),
       "fsdp.strategy = hybrid_shard or hybrid_shard_zero2"},
      {"fsdp.wrap_every", TESSERA_IF(c.fsdp.wrap == "every_n_blocks"),
       "fsdp.wrap = every_n_blocks"},
      {"fsdp.min_num_params", TESSERA_IF(c.fsdp.wrap == "min_num_params"),
       "fsdp.wrap = min_num_params"},
      {"fsdp.prefetch_forward", TESSERA_IF(c.fsdp.strategy != "no_shard"),
       "a strategy that shards parameters"},
      {"fsdp.prefetch_backward", TESSERA_IF(c.fsdp.strategy != "no_shard"),
       "a strategy that shards parameters"},

      {"precision.buffer_dtype", TESSERA_IF(c.model.kind == "bloom"), "model.kind = bloom"},
      {"precision.cast_forward_inputs", TESSERA_IF(is_low(c)),
       "precision.param_dtype = bf16 or f16"},
      {"precision.norm_fp32", TESSERA_IF(is_low(c)), "precision.param_dtype = bf16 or f16"},
      {"precision.loss_scale_init", TESSERA_IF(is_dynamic(c) || c.precision.loss_scale == "static"),
       "precision.loss_scale = static or dynamic, or precision.param_dtype = f16"},
      {"precision.loss_scale_interval", TESSERA_IF(is_dynamic(c)),
       "precision.loss_scale = dynamic, or precision.param_dtype = f16"},

      {"recompute.every_n", TESSERA_IF(c.recompute.policy == "every_n"),
       "recompute.policy = every_n"},

      {"checkpoint.max_errors", TESSERA_IF(c.checkpoint.on_error == "warn"),
       "checkpoint.on_error = warn"},
      {"checkpoint.resume_override", TESSERA_IF(c.checkpoint.resume != "none"),
       "checkpoint.resume (--resume)"},

      {"guard.spike_z", TESSERA_IF(c.guard.spike != "off"), "guard.spike = skip or rewind"},
      {"guard.spike_window", TESSERA_IF(c.guard.spike != "off"), "guard.spike = skip or rewind"},
      {"guard.max_spikes", TESSERA_IF(c.guard.spike != "off"), "guard.spike = skip or rewind"},
      {"guard.snapshot_every", TESSERA_IF(c.guard.spike == "rewind"), "guard.spike = rewind"},

      {"kernels.attention", [](const Config&, bool is_cuda) { return is_cuda; }, "device = cuda"},
      {"kernels.gemm", [](const Config&, bool is_cuda) { return is_cuda; }, "device = cuda"},
      {"dist.nccl_reduce", [](const Config&, bool is_cuda) { return is_cuda; }, "device = cuda"},
      {"dist.nccl_max_ctas", [](const Config&, bool is_cuda) { return is_cuda; }, "device = cuda"},

      {"debug.trace", TESSERA_IF(c.debug.trace_from <= c.train.steps),
       "debug.trace_from <= train.steps"},
      {"debug.trace_from", TESSERA_IF(!c.debug.trace.empty()), "debug.trace"},
      {"debug.trace_steps", TESSERA_IF(!c.debug.trace.empty()), "debug.trace"},
      {"debug.nan_rank", TESSERA_IF(c.debug.nan_step > 0), "debug.nan_step > 0"},
      {"debug.nan_step", TESSERA_IF(c.debug.nan_step <= c.train.steps),
       "debug.nan_step <= train.steps"},
  };
#undef TESSERA_IF
  return all;
}

std::vector<std::string> keys_without_effect(const Config& config, bool is_cuda) {
  Config copy = config;
  const std::vector<Field> fields = config_fields(copy);
  std::vector<std::string> found;
  for (const KeyCondition& c : key_conditions()) {
    if (!config.is_given(c.key) || c.holds(config, is_cuda)) continue;
    const std::string& origin = config.origin(c.key);
    const bool is_by_hand = origin == "command line" || !config.is_resolved;
    if (!is_by_hand || origin == config.model.from + "/config.json") continue;
    const auto field =
        std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return f.key == c.key; });
    if (field == fields.end()) continue;
    found.push_back(fmt::format("{} = {} (needs {})", c.key, value_text(*field), c.needs));
  }
  return found;
}

}  // namespace tessera::apps
