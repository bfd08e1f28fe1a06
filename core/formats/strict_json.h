#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace tessera {

struct JsonRules {
  int max_depth = 8;
  /// Elements that are allowed for the text's length: of an array one for 16 bytes, of an object one
  /// for so many, arrays and objects in all one for 8; and these beyond that.
  size_t nbytes_each_member = 8;
  size_t num_free_elements = 1024;
  /// NaN, Infinity and -Infinity, as Python's json writes them, are numbers.
  bool python_numbers = false;
};

/// JSON of a file that nobody vouches for, in time and memory linear in its size. InputError that
/// begins with `what`, such as "model.safetensors: header", and says what was `expected`, for text
/// that is not UTF-8 or JSON, nests deeper than `max_depth`, names a key twice in one object, or
/// has so many tiny elements in an array or object, or so many empty ones of these, that they would
/// take far more memory than the text.
nlohmann::json parse_strict_json(std::string_view what, std::string_view text,
                                 const JsonRules& rules, std::string_view expected);
nlohmann::json parse_strict_json(std::string_view what, std::string_view text, int max_depth,
                                 std::string_view expected);

/// Large files are checked, and then taken apart a piece at a time: a value of a whole one takes 13 to
/// 17 times the memory of its text. InputError as above; not for `python_numbers`.
void check_strict_json(std::string_view what, std::string_view text, const JsonRules& rules,
                       std::string_view expected);
/// Of JSON that has been checked: each member of an object, or element of an array, with its text, in
/// the order that they have there. False if it is none.
bool for_each_member(std::string_view text,
                     const std::function<void(const std::string& name, std::string_view value)>& f);
bool for_each_element(std::string_view text, const std::function<void(std::string_view value)>& f);

/// The number as a size, 0 to 2^63 - 1, or -1 if it is none.
int64_t json_size(const nlohmann::json& value);

/// The value in a message: as JSON, shortened.
std::string json_text(const nlohmann::json& value);

}  // namespace tessera
