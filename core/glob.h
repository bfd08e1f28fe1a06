#pragma once

#include <string_view>

namespace tessera {

/// Whether all of `text` is what `pattern` says: `*` is any characters or none, `?` any one,
/// `[abc]`, `[a-z]` one of them, `[!abc]`, `[^abc]` one that is none of them, anything else itself
/// (`[` too where no `]` closes it). Bytes, not characters. In time of the product of the lengths at
/// most, whatever the pattern.
bool matches_glob(std::string_view text, std::string_view pattern);

}  // namespace tessera
