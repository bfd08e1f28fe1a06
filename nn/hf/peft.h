#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "nn/hf/parameters.h"
#include "nn/lora.h"

// Adapters as Hugging Face's peft has them: adapter_config.json, and the names of the tensors in
// adapter_model.safetensors.

namespace tessera::nn {

/// What an adapter_config.json says.
struct PeftConfig {
  LoraOptions options;
  /// `target_modules` is a pattern of a language of its own: the tensors say which layers it means,
  /// and `options.targets` is empty.
  bool has_pattern = false;
};

/// Errors   InputError that begins with `path` and names the key: for another method than LoRA, a
///          value out of range, or a feature that adapters here lack (DoRA, biases, ranks by layer,
///          ...), also one that is not known but switched on
PeftConfig parse_peft_config(const std::string& path, std::string_view text);

/// The adapter_config.json of a model that `add_lora` made, of a base that is found at `base`.
std::string peft_config_json(Module& root, const LoraOptions& options, const std::string& base);

/// The layer that a tensor of an adapter is of, "model.layers.0.self_attn.q_proj"; empty if it is
/// none of a LoRA.
std::string peft_layer_of(std::string_view tensor);

/// The trained parameters of a model of a family as `add_lora` left it, adapters and
/// modules_to_save, and the tensors that peft has of them.
/// Errors   ConfigError for a layer that transformers has no name for
std::vector<HfParameter> peft_parameters(Module& root);

}  // namespace tessera::nn
