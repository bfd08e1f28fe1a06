#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// What Python's str does, on UTF-8.

namespace tessera::text::jinja {

enum class StripSide : uint8_t { kLeft, kRight, kBoth };
/// Without white space at its ends.
std::string_view strip(std::string_view text, StripSide side = StripSide::kBoth);
/// Without characters of `chars` at its ends.
std::string_view strip_chars(std::string_view text, std::string_view chars, StripSide side);

/// Parts between `separator`; null: between white space, without empty parts. At most `max_splits`
/// splits from the left or the right, unless that is negative.
std::vector<std::string_view> split(std::string_view text, const std::string* separator,
                                    int64_t max_splits, bool is_right);
/// Lines by all of Unicode's line breaks.
std::vector<std::string_view> split_lines(std::string_view text, bool keeps_ends);

/// At most `count` replacements, unless that is negative.
std::string replace(std::string_view text, std::string_view old, std::string_view by,
                    int64_t count);

enum class Align : uint8_t { kLeft, kCenter, kRight };
/// At least `width` characters, with `fill` on the other sides.
std::string align(std::string_view text, int64_t width, std::string_view fill, Align align);

/// The first or last place of `what`, from a byte on; npos if there is none. Linear time, counted.
size_t find_text(std::string_view text, std::string_view what, size_t from = 0);
size_t rfind_text(std::string_view text, std::string_view what);

/// str.isupper or str.islower: some character has that case and none another one.
bool has_case(std::string_view text, bool is_upper);

}  // namespace tessera::text::jinja
