#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "apps/config.h"
#include "apps/data.h"
#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/scaler.h"
#include "kernels/attention/attention.h"
#include "kernels/matmul/backend.h"
#include "nn/transformer.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"

// What the keys of a configuration mean to the libraries.

namespace tessera::apps {

/// The model that the configuration describes, for `vocab_size` tokens.
std::unique_ptr<nn::LanguageModel> make_model(const ModelConfig& config, int64_t vocab_size);

dist::LossScaleOptions loss_scale_options(const PrecisionConfig& config);
nn::RecomputePolicy recompute_policy(const RecomputeConfig& config);
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
/// What computes on CUDA, by the names of the keys `kernels.attention` and `kernels.gemm`.
AttentionBackend attention_backend_from_name(std::string_view name);
GemmBackend gemm_backend_from_name(std::string_view name);
/// ConfigError, with key and library, if a key asks for a library that cannot be used on `device`.
void check_kernel_libraries(const Config& config, DeviceType device);
SampleOptions sample_options(const Config& config, int64_t vocab_size);

}  // namespace tessera::apps
