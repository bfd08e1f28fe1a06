#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "nn/family.h"
#include "nn/transformer.h"

// config.json and generation_config.json of transformers.

namespace tessera::nn {

/// The model that a config.json describes, by its `architectures` or `model_type`, among those of
/// all families. Dropout is 0: fine-tuning sets its own. A key that is not known here is one warning
/// for all of them, unless its value is off (null, false, 0, empty) or it is among `ignored_keys`,
/// which pass over no error.
/// Errors   InputError that begins with `path` and names the key, what was found and what is
///          expected: for another architecture, a value out of range, a feature that the models
///          here lack (attention_bias, yarn, ...), a key that is known to change numbers or is named
///          like one (..._multiplier, ..._scaling, ..._softcap, ..._factor, ..._scale)
FamilyConfig parse_hf_config(const std::string& path, std::string_view text,
                             const std::vector<std::string>& ignored_keys = {});

/// The tokens that a text begins and ends with and that fill it up. Nothing here computes with
/// them; an export has those of the model it came from. Empty: the model has none.
struct HfTokenIds {
  std::vector<int64_t> bos, eos, pad;
};

/// bos_token_id, eos_token_id, pad_token_id: a number or several. InputError as parse_hf_config.
HfTokenIds parse_hf_token_ids(const std::string& path, std::string_view text);

/// The config.json of a model, with sizes as its `config()` has them; relatives in a family are
/// named by what they have.
/// Errors   ConfigError for a model that transformers has no name for
std::string hf_config_json(const FamilyConfig& config, DType dtype, const HfTokenIds& ids = {});

/// The generation_config.json of a model: its ids. `source`, the text of another one in `path`,
/// gives what else it says; its ids count where `changes_ids` is false (they may be more than the
/// config.json of the same model has). InputError as parse_hf_config.
std::string hf_generation_json(const HfTokenIds& ids);
std::string hf_generation_json(const HfTokenIds& ids, bool changes_ids, const std::string& path,
                               std::string_view source);

/// The sizes of a model of ours. ConfigError if it is of another class.
FamilyConfig hf_config_of(const LanguageModel& model);

/// Which tensors of transformers the parameters of `root` are made of, by their full names there, a
/// tied head's too: of all models of a family in it.
std::map<std::string, HfParameter> hf_parameters_of(Module& root);

}  // namespace tessera::nn
