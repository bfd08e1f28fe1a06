#pragma once

#include <memory>

#include "apps/text/json_node.h"
#include "apps/text/tokenizer.h"

namespace tessera::text {

/// From what a char tokenizer's `to_json` wrote. InputError if it is not that: no characters, a
/// character twice, one that is not UTF-8.
std::unique_ptr<Tokenizer> parse_char_tokenizer(const JsonNode& root);

}  // namespace tessera::text
