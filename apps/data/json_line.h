#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

// One JSON object in one line (RFC 8259, and NaN and Infinity, which Python writes), of which one
// string is wanted. All of it is checked; a gigabyte a second, without a tree of it.

namespace tessera::apps {

inline constexpr int kMaxJsonDepth = 512;

struct JsonString {
  bool is_null = false;
  std::string_view text;  ///< in the line, where escapes have been replaced
};

/// The string or null under `field` at the top of the object; empty for another field's name gives
/// null. `line` is valid UTF-8 and is written into. Half a surrogate pair (\ud83d alone) is an error
/// or, with `replace`, U+FFFD.
/// Errors   InputError without the name of the file: where in the line, what was found and what
///          was expected; a field that is missing, comes twice or is neither a string nor null
JsonString json_string_field(char* line, size_t nbytes, std::string_view field, bool replace);

/// `text` as JSON, in quotes.
void append_json_string(std::string& json, std::string_view text);

}  // namespace tessera::apps
