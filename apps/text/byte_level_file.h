#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "apps/text/tokenizer.h"

// Parts of a tokenizer.json of the byte-level BPE kind, to write one.

namespace tessera::text {

/// A pre-tokenizer or decoder of type ByteLevel; as a pre-tokenizer it cuts as GPT-2 or not at all.
nlohmann::json byte_level_json(bool use_regex);
/// A pre-tokenizer that cuts by a regular expression and maps bytes.
nlohmann::json split_by_regex(std::string_view pattern);
/// An entry of added_tokens.
nlohmann::json special_token_json(int32_t id, const std::string& content);

/// The whole file as a tokenizer; `name` stands for it in messages.
std::unique_ptr<Tokenizer> make_byte_level(nlohmann::json vocab, nlohmann::json merges,
                                           nlohmann::json pre_tokenizer,
                                           nlohmann::json added_tokens, bool ignore_merges,
                                           const std::string& name);

}  // namespace tessera::text
