#pragma once

#include <string>
#include <vector>

#include "apps/config.h"

namespace tessera::apps {

/// The groups of `optim.groups`: "*.norm.*: weight_decay=0, lr_scale=2; head.*: optimizer=adamw,
/// frozen"; patterns separated by commas before the colon.
/// Errors   ConfigError that follows the key, for anything else
std::vector<dist::ParameterGroup> parse_groups(const std::string& text);

/// The inverse: what [[optim.group]] tables say.
std::string groups_text(const std::vector<dist::ParameterGroup>& groups);

/// What `fully_shard` is told of the parameters of a run: the groups, and who updates the rest. With
/// muon that is muon for the matrices of linear layers in blocks, adamw for all others; with
/// adamw_8bit adamw for tensors of fewer than 4096 elements.
dist::ParameterRules parameter_rules(const Config& config, nn::Module& model);

/// ConfigError with the key and the parameter if one that `model.quantize` makes codes of is trained.
void check_quantized(const Config& config, nn::Module& model);

}  // namespace tessera::apps
