#include "apps/options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <unordered_set>

#include "apps/classification.h"
#include "apps/config_table.h"
#include "apps/parameter_groups.h"
#include "core/glob.h"
#include "core/split.h"
#include "kernels/attention/cuda/cudnn.h"
#include "kernels/matmul/cuda/cublaslt.h"
#include "optim/adafactor.h"
#include "optim/adamw.h"
#include "optim/adamw_8bit.h"
#include "optim/lion.h"
#include "optim/muon.h"
#include "optim/optimizer_set.h"
#include "optim/sgd.h"

namespace tessera::apps {
namespace {

/// The class that print_tree names where a module says no more of itself.
std::string class_of(const nn::Module& module) {
  return module.nn::Module::kind();
}

dist::WrapPolicy by_class_names(const Config& config, nn::Module& model) {
  const auto names = names_in(config.fsdp.wrap_class);
  const std::vector<std::string> classes(names.begin(), names.end());
  std::set<std::string> found;
  for (const nn::NamedModule& m : model.named_modules()) {
    if (!m.name.empty()) found.insert(class_of(*m.module));
  }
  if (classes.empty()) {
    throw ConfigError(fmt::format("{}: fsdp.wrap = class, expected fsdp.wrap_class with some of {}",
                                  config.origin("fsdp.wrap"), fmt::join(found, ", ")));
  }
  for (const std::string& name : classes) {
    TESSERA_CHECK_AS(ConfigError, found.contains(name),
                     "{}: fsdp.wrap_class: no module is a {}, expected some of {}",
                     config.origin("fsdp.wrap_class"), name, fmt::join(found, ", "));
  }
  return dist::wrap::by_predicate([classes](const std::string&, nn::Module& module) {
    return std::find(classes.begin(), classes.end(), class_of(module)) != classes.end();
  });
}

dist::WrapPolicy wrap_policy(const Config& config, nn::Module& model) {
  const FsdpConfig& fsdp = config.fsdp;
  switch (fsdp.wrap) {
    case Wrap::kTransformerBlock:
      return dist::wrap::transformer_block();
    case Wrap::kEveryNBlocks:
      return dist::wrap::every_n_blocks(fsdp.wrap_every);
    case Wrap::kMinNumParams:
      return dist::wrap::min_num_params(fsdp.min_num_params);
    case Wrap::kClass:
      return by_class_names(config, model);
    case Wrap::kWholeModel:
      return dist::wrap::whole_model();
  }
  throw InternalError("wrap_policy: not a name of a policy");
}

/// Keys in place of the options that an out-of-memory error names. Looked up now: then there may be
/// no memory for a table.
std::function<std::string(std::string_view)> option_keys() {
  std::map<std::string, std::string, std::less<>> keys;
  for (const char* option :
       {"FsdpOptions::strategy", "FsdpOptions::sync_every_micro_batch", "FsdpOptions::offload",
        "FsdpOptions::prefetch_forward", "FsdpOptions::prefetch_backward", "FsdpOptions::wrap",
        "FsdpOptions::gradient_pieces", "PrecisionOptions::param_dtype", "RecomputePolicy::kind",
        "RecomputePolicy::mlp_tile", "batch", "sequence"}) {
    keys[option] = key_of_option(option);
  }
  return [keys = std::move(keys)](std::string_view option) {
    const auto key = keys.find(option);
    return key == keys.end() ? std::string(option) : key->second;
  };
}

std::unique_ptr<optim::Optimizer> make_one_optimizer(const Config& config, OptimizerName name,
                                                     std::vector<optim::FlatShard> shards) {
  const OptimConfig& optim = config.optim;
  std::optional<uint64_t> rounding_seed;
  if (optim.stochastic_rounding) rounding_seed = static_cast<uint64_t>(config.train.seed);
  // The keys of betas are Lion's where the run is Lion's, else AdamW's.
  const bool is_lion = optim.name == OptimizerName::kLion;
  optim::AdamWOptions adamw = optim.adamw;
  adamw.rounding_seed = rounding_seed;
  if (is_lion) {
    const optim::AdamWOptions own = OptimConfig().adamw;
    adamw.beta1 = own.beta1, adamw.beta2 = own.beta2;
  }
  switch (name) {
    case OptimizerName::kSgd: {
      optim::SgdOptions options = optim.sgd;
      options.weight_decay = optim.adamw.weight_decay;
      options.rounding_seed = rounding_seed;
      return std::make_unique<optim::Sgd>(std::move(shards), options);
    }
    case OptimizerName::kAdamW:
      return std::make_unique<optim::AdamW>(std::move(shards), adamw);
    case OptimizerName::kAdamW8bit:
      return std::make_unique<optim::AdamW8bit>(std::move(shards), adamw);
    case OptimizerName::kAdafactor:
      return std::make_unique<optim::Adafactor>(
          std::move(shards), optim::AdafactorOptions{.weight_decay = optim.adamw.weight_decay,
                                                     .rounding_seed = rounding_seed});
    case OptimizerName::kMuon: {
      optim::MuonOptions options = optim.muon;
      options.weight_decay = optim.adamw.weight_decay;
      options.rounding_seed = rounding_seed;
      return std::make_unique<optim::Muon>(std::move(shards), options);
    }
    case OptimizerName::kLion: {
      optim::LionOptions options{.weight_decay = optim.adamw.weight_decay,
                                 .rounding_seed = rounding_seed};
      if (is_lion) options.beta1 = optim.adamw.beta1, options.beta2 = optim.adamw.beta2;
      return std::make_unique<optim::Lion>(std::move(shards), options);
    }
  }
  throw InternalError("make_optimizer: not a name of an optimizer");
}

}  // namespace

std::unique_ptr<nn::LanguageModel> make_model(const ModelConfig& config, int64_t vocab_size) {
  nn::FamilyConfig family = config.selected();
  family.set_sizes(vocab_size, std::max(config.context, config.max_positions));
  if (!config.classes.empty()) family.set_classifier(parse_classes(config.classes), config.pooling);
  return family.make_model();
}

std::unique_ptr<nn::LanguageModel> make_model(const Config& config, int64_t vocab_size) {
  std::unique_ptr<nn::LanguageModel> model = make_model(config.model, vocab_size);
  if (!config.lora.is_on()) return model;
  try {
    nn::LoraOptions options = config.lora.options;
    if (model->classifier() != nullptr) {
      // What classifies begins anew, so it is trained, as with peft.
      std::string_view name = config.model.selected().hf_layout().score_prefix;
      name.remove_suffix(1);  // the dot
      options.modules_to_save +=
          fmt::format("{}{}", options.modules_to_save.empty() ? "" : ",", name);
    }
    nn::add_lora(*model, options, static_cast<uint64_t>(config.train.seed));
  } catch (const ConfigError& error) {
    throw ConfigError(in_keys(config, error.what()));
  }
  return model;
}

dist::LossScaleOptions loss_scale_options(const PrecisionConfig& config) {
  dist::LossScaleOptions options = config.scaler;
  options.scaling = loss_scaling(config);
  options.rule.min_scale = std::min(options.rule.min_scale, options.init);
  return options;
}

std::vector<std::string> matching_parameters(const Config& config, std::string_view key,
                                             const std::string& patterns, nn::Module& model) {
  std::vector<std::string> names;
  std::unordered_set<std::string> seen;
  const auto parameters = model.named_parameters();
  for (const std::string_view pattern : names_in(patterns)) {
    bool is_found = false;
    for (const nn::NamedParameter& p : parameters) {
      if (!matches_glob(p.name, pattern)) continue;
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
  const FsdpConfig& fsdp = config.fsdp;
  dist::FsdpOptions options = fsdp.options;
  options.ignored = matching_parameters(config, "fsdp.ignored", fsdp.ignored, model);
  options.wrap = wrap_policy(config, model);
  options.precision.param_dtype = config.precision.param_dtype.value_or(kF32);
  options.parameters = parameter_rules(config, model);
  options.name_option = option_keys();
  return options;
}

std::unique_ptr<optim::Optimizer> make_optimizer(const Config& config,
                                                 const std::vector<optim::FlatShard>& shards) {
  const auto maker = [&config](OptimizerName name) {
    return [&config, name](std::vector<optim::FlatShard> own) {
      return make_one_optimizer(config, name, std::move(own));
    };
  };
  const bool is_alone = std::all_of(shards.begin(), shards.end(),
                                    [](const optim::FlatShard& s) { return s.optimizer.empty(); });
  if (is_alone) return maker(config.optim.name)(shards);
  std::map<std::string, optim::OptimizerSet::Make> makers{{"", maker(config.optim.name)}};
  for (const auto& entry : kEnumNames<OptimizerName>) {
    makers.emplace(entry.name, maker(entry.value));
  }
  try {
    return std::make_unique<optim::OptimizerSet>(shards, makers);
  } catch (const ConfigError& error) {
    if (config.optim.groups.empty()) throw;
    throw ConfigError(
        fmt::format("{}: optim.groups: {}", config.origin("optim.groups"), error.what()));
  }
}

optim::Schedule make_schedule(const Config& config) {
  optim::ScheduleOptions options = config.optim.schedule;
  options.num_steps = config.train.steps;
  if (options.decay_steps == 0) options.decay_steps = config.train.steps / 5;
  return optim::Schedule(options);
}

void check_kernel_libraries(const Config& config, DeviceType device) {
  if (device != DeviceType::kCuda) return;
  const auto check = [&](std::string_view key, std::string_view value, const std::string& problem) {
    TESSERA_CHECK_AS(ConfigError, problem.empty(),
                     "{}: {} = {}, but {}, expected the library or one of own, auto",
                     config.origin(key), key, value, problem);
  };
  const Backends& k = config.runtime.backends;
  if (k.attention == AttentionBackend::kCudnn) {
    check("kernels.attention", name_of(k.attention), kernels::cudnn_problem());
  }
  if (k.gemm == GemmBackend::kCublasLt) {
    check("kernels.gemm", name_of(k.gemm), kernels::cuda::cublaslt_problem());
  }
}

SampleOptions sample_options(const Config& config, const Data& data) {
  SampleOptions options;
  options.context = config.model.context;
  options.vocab_size = data.vocab_size;
  options.seed = static_cast<uint64_t>(config.train.seed);
  options.separator = config.data.separator;
  if (options.separator < 0) {
    options.separator = data.document_tokens.end;
    options.document_begin = data.document_tokens.begin;
  }
  options.restart_positions = config.data.restart_positions;
  options.mask_token = config.data.mask_token;
  options.mask_probability = config.data.mask_probability;
  return options;
}

}  // namespace tessera::apps
