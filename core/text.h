#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

// Text from elsewhere (names and keys in files, paths, arguments) in what people read.

namespace tessera {

/// Bytes of the UTF-8 character at `offset`; 0 if there is none (truncated, overlong, surrogate).
size_t utf8_length(std::string_view text, size_t offset);

/// The text as a terminal shows it and nothing else happens: control characters, marks that turn
/// the direction of writing and bytes that are not UTF-8 become \n, \x1b, \u202e; those in `kept`
/// stay. What is printable does not change, so printable(printable(x)) is printable(x).
std::string printable(std::string_view text, std::string_view kept = "");

/// The same for a message of ours that may have further lines, each indented by two spaces, as
/// tables have: a line break before two spaces stays, any other is escaped. So no line but the
/// first begins at the left, whatever names it has.
std::string printable_message(std::string_view text);

inline constexpr size_t kMaxShown = 200;  ///< bytes of one name or value in a message

/// `text`, or its beginning and end with the number of bytes between them left out, cut at
/// characters: "abc[... 9876 bytes ...]xyz" has about `max_nbytes` of it.
std::string shorten(std::string_view text, size_t max_nbytes = kMaxShown);

/// A list in a message: "a, b, c and 4092 more", each shortened.
template <class Range>
std::string join_few(const Range& items, std::string_view separator = ", ", size_t max_items = 8) {
  std::string text;
  size_t count = 0;
  for (const auto& item : items) {
    if (++count > max_items) continue;
    if (count > 1) text += separator;
    text += shorten(item);
  }
  return count <= max_items ? text : fmt::format("{} and {} more", text, count - max_items);
}

}  // namespace tessera
