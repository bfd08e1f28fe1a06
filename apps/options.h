#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "apps/config.h"
#include "apps/data.h"
#include "optim/optimizer.h"

// What libraries are given of a configuration, where it is not simply their struct in it.

namespace tessera::apps {

/// The model that the configuration describes, with its adapters, for `vocab_size` tokens.
/// Errors   ConfigError of the model's constructor; for adapters that fit no layer, with the key
std::unique_ptr<nn::LanguageModel> make_model(const Config& config, int64_t vocab_size);
/// The same without adapters.
std::unique_ptr<nn::LanguageModel> make_model(const ModelConfig& config, int64_t vocab_size);

dist::LossScaleOptions loss_scale_options(const PrecisionConfig& config);
/// Full names of the parameters of `model` that the comma-separated `patterns` of `key` match.
/// ConfigError if one matches none.
std::vector<std::string> matching_parameters(const Config& config, std::string_view key,
                                             const std::string& patterns, nn::Module& model);
/// `model.frozen`, and `fsdp.ignored`, which nobody could train: before `fully_shard`.
void freeze_parameters(const Config& config, nn::Module& model);
dist::FsdpOptions fsdp_options(const Config& config, nn::Module& model);
std::unique_ptr<optim::Optimizer> make_optimizer(const Config& config,
                                                 const std::vector<optim::FlatShard>& shards);
optim::Schedule make_schedule(const Config& config);
/// ConfigError, with key and library, if a key asks for a library that cannot be used on `device`.
void check_kernel_libraries(const Config& config, DeviceType device);
SampleOptions sample_options(const Config& config, const Data& data);

}  // namespace tessera::apps
