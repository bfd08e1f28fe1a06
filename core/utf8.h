#pragma once

#include <cstddef>
#include <string>
#include <string_view>

// Whole texts as UTF-8 (The Unicode Standard, table 3-7: no surrogates, nothing overlong).

namespace tessera {

/// Where the first byte is that is in no character; the length of the text if there is none.
size_t find_invalid_utf8(std::string_view text);

/// The text with U+FFFD in place of each longest beginning of a character that no other byte
/// completes, and of each other byte that is in none (as the Unicode Standard advises in 3.9, and
/// as Python and browsers do).
std::string replace_invalid_utf8(std::string_view text);

/// Appends a code point, at most 0x10ffff.
void append_utf8(std::string& text, char32_t code);

}  // namespace tessera
