#pragma once

#include <string>
#include <vector>

#include "apps/config.h"

namespace tessera::apps {

/// Sets the model's keys from the config.json in `model.from`; nothing if that is empty. A key that
/// was given as well must agree; `model.context` may be shorter, `model.dropout` is free.
/// With texts the directory's tokenizer is that of `data.tokenizer`, unless a path is given there.
/// Errors   ConfigError for a key that contradicts the file, a text without a tokenizer, or
///          sizes that no model here may have; InputError for a file that cannot be used (see
///          nn::parse_hf_config)
void take_model_from(Config& config);
/// Sets the keys of adapters from the adapter_config.json in `lora.from`; nothing if that is empty.
/// A key that was given as well must agree, but `lora.dropout`.
/// Errors   ConfigError for a key that contradicts the file; InputError as dist::PeftReader
void take_lora_from(Config& config);
/// The names in `model.ignore_keys`.
std::vector<std::string> ignored_keys(const ModelConfig& config);

}  // namespace tessera::apps
