#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace tessera::dist {

struct JsonRules {
  int max_depth = 8;
  /// NaN, Infinity and -Infinity, as Python's json writes them, are numbers.
  bool python_numbers = false;
};

/// JSON of a file that nobody vouches for, in time and memory linear in its size. InputError that
/// begins with `what`, such as "model.safetensors: header", and says what was `expected`, for text
/// that is not UTF-8 or JSON, nests deeper than `max_depth`, names a key twice in one object, or
/// has an array of so many tiny elements that it would take far more memory than the text.
nlohmann::json parse_strict_json(std::string_view what, std::string_view text,
                                 const JsonRules& rules, std::string_view expected);
nlohmann::json parse_strict_json(std::string_view what, std::string_view text, int max_depth,
                                 std::string_view expected);

/// The number as a size, 0 to 2^63 - 1, or -1 if it is none.
int64_t json_size(const nlohmann::json& value);

/// The value in a message: as JSON, shortened.
std::string json_text(const nlohmann::json& value);

}  // namespace tessera::dist
