#include "apps/options.h"

#include <fnmatch.h>

#include <algorithm>
#include <sstream>
#include <unordered_set>

#include "kernels/attention/cudnn.h"
#include "kernels/matmul/cublaslt.h"
#include "nn/bloom.h"
#include "nn/gpt2.h"
#include "nn/llama.h"
#include "optim/adamw.h"
#include "optim/sgd.h"

namespace tessera::apps {
namespace {

DType dtype_from_name(const std::string& name) {
  return name == "bf16" ? kBF16 : name == "f16" ? kF16 : kF32;
}

std::optional<DType> dtype_or_same(const std::string& name) {
  return name == "same" ? std::nullopt : std::optional(dtype_from_name(name));
}

/// What the configurations of all models have; of NnConfig, one of nn's.
template <class NnConfig>
NnConfig common_config(const ModelConfig& config, int64_t vocab_size) {
  NnConfig c;
  c.vocab_size = vocab_size;
  c.context_length = std::max(config.context, config.max_positions);
  c.num_layers = config.layers;
  c.num_heads = config.heads;
  c.width = config.width;
  c.tied = config.tied;
  c.norm_eps = static_cast<float>(config.norm_eps);
  return c;
}

}  // namespace

std::unique_ptr<nn::LanguageModel> make_model(const ModelConfig& config, int64_t vocab_size) {
  if (config.kind == "gpt2") {
    auto c = common_config<nn::Gpt2Config>(config, vocab_size);
    c.ffn_width = config.ffn;
    c.bias = config.bias;
    c.dropout = config.dropout;
    c.gelu = config.gelu == "exact" ? Gelu::kExact : Gelu::kTanh;
    return std::make_unique<nn::Gpt2>(c);
  }
  if (config.kind == "bloom") {
    auto c = common_config<nn::BloomConfig>(config, vocab_size);
    c.dropout = config.dropout;
    return std::make_unique<nn::Bloom>(c);
  }
  auto c = common_config<nn::LlamaConfig>(config, vocab_size);
  c.num_kv_heads = config.kv_heads;
  c.head_width = config.head_width;
  c.ffn_width = config.ffn;
  c.qkv_bias = config.qkv_bias;
  c.qk_norm = config.qk_norm;
  c.rope.theta = static_cast<float>(config.rope_theta);
  c.rope.scaling = config.rope_scaling == "linear"   ? RopeScaling::kLinear
                   : config.rope_scaling == "llama3" ? RopeScaling::kLlama3
                                                     : RopeScaling::kNone;
  c.rope.factor = static_cast<float>(config.rope_factor);
  c.rope.low_freq_factor = static_cast<float>(config.rope_low_freq_factor);
  c.rope.high_freq_factor = static_cast<float>(config.rope_high_freq_factor);
  c.rope.original_max_position = config.rope_original_context;
  return std::make_unique<nn::Llama>(c);
}

dist::LossScaleOptions loss_scale_options(const PrecisionConfig& config) {
  using dist::LossScaling;
  const bool is_auto = config.loss_scale == "auto";
  dist::LossScaleOptions options;
  options.scaling = config.loss_scale == "static" ? LossScaling::kStatic
                    : config.loss_scale == "dynamic" || (is_auto && config.param_dtype == "f16")
                        ? LossScaling::kDynamic
                        : LossScaling::kNone;
  options.init = config.loss_scale_init;
  options.rule.interval = config.loss_scale_interval;
  options.rule.min_scale = std::min(options.rule.min_scale, options.init);
  return options;
}

nn::RecomputePolicy recompute_policy(const RecomputeConfig& config) {
  using Kind = nn::RecomputePolicy::Kind;
  const Kind kind = config.policy == "full"        ? Kind::kFull
                    : config.policy == "every_n"   ? Kind::kEveryN
                    : config.policy == "selective" ? Kind::kSelective
                                                   : Kind::kNone;
  return {kind, config.every_n};
}

std::vector<std::string> matching_parameters(const Config& config, std::string_view key,
                                             const std::string& patterns, nn::Module& model) {
  std::vector<std::string> names;
  std::unordered_set<std::string> seen;
  const auto parameters = model.named_parameters();
  std::istringstream list(patterns);
  for (std::string pattern; std::getline(list, pattern, ',');) {
    const size_t begin = pattern.find_first_not_of(' '), end = pattern.find_last_not_of(' ');
    if (begin != std::string::npos) pattern = pattern.substr(begin, end - begin + 1);
    bool is_found = false;
    for (const nn::NamedParameter& p : parameters) {
      if (::fnmatch(pattern.c_str(), p.name.c_str(), FNM_NOESCAPE) != 0) continue;
      is_found = true;
      if (seen.insert(p.name).second) names.push_back(p.name);
    }
    TESSERA_CHECK_AS(ConfigError, is_found,
                     "{}: {}: no parameter is called \"{}\", expected a name such as {} or {}",
                     config.origin(key), key, pattern, parameters.front().name,
                     parameters.back().name);
  }
  return names;
}

void freeze_parameters(const Config& config, nn::Module& model) {
  for (const auto& [key, patterns] : {std::pair{"model.frozen", &config.model.frozen},
                                      std::pair{"fsdp.ignored", &config.fsdp.ignored}}) {
    const auto names = matching_parameters(config, key, *patterns, model);
    const std::unordered_set<std::string> chosen(names.begin(), names.end());
    const auto parameters = model.named_parameters();
    for (const nn::NamedParameter& p : parameters) {
      if (chosen.contains(p.name)) p.parameter->tensor.set_requires_grad(false);
    }
    const bool is_any_left = std::any_of(
        parameters.begin(), parameters.end(),
        [](const nn::NamedParameter& p) { return p.parameter->tensor.requires_grad(); });
    TESSERA_CHECK_AS(ConfigError, is_any_left,
                     "{}: {} = {} leaves no parameter to train, expected at least one",
                     config.origin(key), key, *patterns);
  }
}

dist::FsdpOptions fsdp_options(const Config& config, nn::Module& model) {
  dist::FsdpOptions options;
  options.ignored = matching_parameters(config, "fsdp.ignored", config.fsdp.ignored, model);
  options.strategy = dist::strategy_from_name(config.fsdp.strategy);
  options.shard_size = static_cast<int>(config.fsdp.shard_size);
  if (config.fsdp.wrap == "whole_model") options.wrap = dist::wrap::whole_model();
  if (config.fsdp.wrap == "every_n_blocks") {
    options.wrap = dist::wrap::every_n_blocks(static_cast<int>(config.fsdp.wrap_every));
  }
  if (config.fsdp.wrap == "min_num_params") {
    options.wrap = dist::wrap::min_num_params(config.fsdp.min_num_params);
  }
  if (config.fsdp.sync_every_micro_batch != "auto") {
    options.sync_every_micro_batch = dist::grad_sync_from_name(config.fsdp.sync_every_micro_batch);
  }
  const std::string& reshard = config.fsdp.reshard_after_forward;
  if (reshard == "true" || reshard == "false") {
    options.reshard_after_forward = reshard == "true";
  } else if (reshard != "auto") {
    options.reshard_after_forward = std::stoi(reshard);
  }
  options.prefetch_forward = static_cast<int>(config.fsdp.prefetch_forward);
  options.prefetch_backward = static_cast<int>(config.fsdp.prefetch_backward);
  options.communicators = static_cast<int>(config.fsdp.communicators);
  options.offload = dist::offload_from_name(config.fsdp.offload);
  options.reproducible = config.train.reproducible;
  options.precision.norm_fp32 = config.precision.norm_fp32;
  options.precision.param_dtype = dtype_from_name(config.precision.param_dtype);
  options.precision.reduce_dtype = dtype_from_name(config.precision.reduce_dtype);
  options.precision.wire_dtype = dtype_or_same(config.fsdp.wire_dtype);
  options.precision.output_dtype = dtype_or_same(config.precision.output_dtype);
  options.precision.buffer_dtype = dtype_or_same(config.precision.buffer_dtype);
  options.precision.cast_forward_inputs = config.precision.cast_forward_inputs;
  return options;
}

std::unique_ptr<optim::Optimizer> make_optimizer(const Config& config,
                                                 const std::vector<optim::FlatShard>& shards) {
  const OptimConfig& optim = config.optim;
  const auto lr = static_cast<float>(optim.lr);
  const auto weight_decay = static_cast<float>(optim.weight_decay);
  if (optim.name == "sgd") {
    optim::SgdOptions options;
    options.lr = lr;
    options.momentum = static_cast<float>(optim.momentum);
    options.nesterov = optim.nesterov;
    options.weight_decay = weight_decay;
    return std::make_unique<optim::Sgd>(shards, options);
  }
  optim::AdamWOptions options;
  options.lr = lr;
  options.beta1 = optim.beta1;
  options.beta2 = optim.beta2;
  options.eps = optim.eps;
  options.weight_decay = weight_decay;
  if (optim.stochastic_rounding) {
    options.rounding_seed = static_cast<uint64_t>(config.train.seed);
  }
  return std::make_unique<optim::AdamW>(shards, options);
}

optim::Schedule make_schedule(const Config& config) {
  optim::ScheduleOptions options;
  options.kind = optim::schedule_from_name(config.optim.schedule);
  options.peak_lr = static_cast<float>(config.optim.lr);
  options.final_lr = static_cast<float>(config.optim.final_lr);
  options.num_steps = config.train.steps;
  options.warmup_steps = config.optim.warmup_steps;
  options.decay_steps =
      config.optim.decay_steps == 0 ? config.train.steps / 5 : config.optim.decay_steps;
  return optim::Schedule(options);
}

AttentionBackend attention_backend_from_name(std::string_view name) {
  return name == "cudnn"  ? AttentionBackend::kCudnn
         : name == "auto" ? AttentionBackend::kAuto
                          : AttentionBackend::kOwn;
}

GemmBackend gemm_backend_from_name(std::string_view name) {
  return name == "own"        ? GemmBackend::kOwn
         : name == "cublaslt" ? GemmBackend::kCublasLt
                              : GemmBackend::kAuto;
}

void check_kernel_libraries(const Config& config, DeviceType device) {
  if (device != DeviceType::kCuda) return;
  const auto check = [&](std::string_view key, std::string_view value, const std::string& problem,
                         std::string_view others) {
    TESSERA_CHECK_AS(ConfigError, problem.empty(),
                     "{}: {} = {}, but {}, expected the library or {}", config.origin(key), key,
                     value, problem, others);
  };
  const KernelsConfig& k = config.kernels;
  if (k.attention == "cudnn") {
    check("kernels.attention", k.attention, kernels::cudnn_problem(), "one of own, auto");
  }
  if (k.gemm == "cublaslt") {
    check("kernels.gemm", k.gemm, kernels::cuda::cublaslt_problem(), "one of own, auto");
  }
}

SampleOptions sample_options(const Config& config, int64_t vocab_size) {
  SampleOptions options;
  options.context = config.model.context;
  options.vocab_size = vocab_size;
  options.seed = static_cast<uint64_t>(config.train.seed);
  options.separator = config.data.separator;
  options.restart_positions = config.data.restart_positions;
  return options;
}

}  // namespace tessera::apps
