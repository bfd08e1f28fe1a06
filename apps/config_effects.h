#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "apps/config.h"

namespace tessera::apps {

/// A key that has an effect under a condition only.
struct KeyCondition {
  std::string_view key;
  bool (*holds)(const Config& config, bool is_cuda);
  std::string_view needs;  ///< the condition in words of keys: "optim.name = sgd"
};

/// All such keys. One that is not listed always has an effect (or is checked by `check_config`).
const std::vector<KeyCondition>& key_conditions();

/// "optim.momentum = 0.9 (needs optim.name = sgd)", one for each key that the command line or the
/// file gives (not what `dump_config` wrote, not what model.from sets) and that has no effect. For
/// a configuration whose `param_dtype` is resolved.
std::vector<std::string> keys_without_effect(const Config& config, bool is_cuda);

}  // namespace tessera::apps
