#pragma once

#include <cstdint>
#include <string>
#include <string_view>

// Characters as Python's str knows them (Unicode 14): classes, cases and positions in UTF-8.

namespace tessera::text::jinja {

enum CharProperty : uint16_t {
  kIsAlpha = 1,
  kIsDecimal = 2,
  kIsDigit = 4,
  kIsNumeric = 8,
  kIsSpace = 16,
  kIsPrintable = 32,
  kIsUpper = 64,
  kIsLower = 128,
  kIsTitle = 256,
  kIsCased = 512,
  kIsCaseIgnorable = 1024,
  kIsIdStart = 2048,
  kIsIdContinue = 4096,
  kIsAlnum = kIsAlpha | kIsDecimal | kIsDigit | kIsNumeric,
};

uint16_t properties_of(char32_t c);
inline bool has_property(char32_t c, int properties) {
  return (properties_of(c) & properties) != 0;
}
/// 0 to 9, or -1 for what is no decimal digit.
int decimal_value(char32_t c);

/// The character that begins at `at` (valid UTF-8), which moves behind it.
char32_t next_char(std::string_view text, size_t& at);
/// The character that ends before `at`, which moves to its beginning.
char32_t previous_char(std::string_view text, size_t& at);
void append_char(std::string& out, char32_t c);
size_t count_chars(std::string_view text);
/// The byte at which character `index` begins; the size for what is behind the end.
size_t byte_of_char(std::string_view text, size_t index, bool is_ascii);

std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
std::string to_casefold(std::string_view text);
std::string swap_case(std::string_view text);
/// The first character of each word in title case, the others in lower case.
std::string to_title(std::string_view text);
/// The first character in title case, the others in lower case.
std::string capitalize(std::string_view text);

}  // namespace tessera::text::jinja
