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

/// The same for text that comes in pieces, which may end inside a character.
class PrintableStream {
 public:
  explicit PrintableStream(std::string_view kept) : kept_(kept) {}
  /// What can be shown now; the beginning of a character waits for the rest of it.
  std::string add(std::string_view piece);
  std::string finish();

 private:
  std::string kept_, rest_;
};

inline constexpr size_t kMaxShown = 200;  ///< bytes of one name or value in a message

inline constexpr size_t kMaxLineShown = 4096;  ///< bytes of a line of a message

/// `text`, or its beginning and end with the number of bytes between them left out, cut at
/// characters: "abc[... 9876 bytes ...]xyz" has about `max_nbytes` of it.
std::string shorten(std::string_view text, size_t max_nbytes = kMaxShown);

/// A message as it is shown: printable_message, at most 64 KiB of it, each line shortened.
std::string presentable(std::string_view message);

inline constexpr size_t kMaxListShown = 600;  ///< bytes of a list in a message, about

/// A list in a message: "a, b, c and 4092 more", each shortened, and no more of them than fit into
/// `max_nbytes`. Every list whose length is not ours goes through this.
template <class Range>
std::string join_few(const Range& items, std::string_view separator = ", ", size_t max_items = 8,
                     size_t max_nbytes = kMaxListShown, size_t max_item_nbytes = kMaxShown) {
  std::string text;
  size_t count = 0, num_shown = 0;
  for (const auto& item : items) {
    const bool is_shown = count++ == num_shown && num_shown < max_items;
    if (!is_shown) continue;
    const std::string next = shorten(fmt::format("{}", item), max_item_nbytes);
    if (num_shown > 0 && text.size() + next.size() > max_nbytes) continue;
    if (num_shown++ > 0) text += separator;
    text += next;
  }
  return count == num_shown ? text : fmt::format("{} and {} more", text, count - num_shown);
}

}  // namespace tessera
