#include "apps/text/jinja/strings.h"

#include <string.h>

#include <algorithm>
#include <limits>

#include "apps/text/jinja/meter.h"
#include "apps/text/jinja/unicode.h"

namespace tessera::text::jinja {
namespace {

template <class F>
std::string_view strip_if(std::string_view text, StripSide side, const F& goes) {
  while (side != StripSide::kRight && !text.empty()) {
    size_t at = 0;
    if (!goes(next_char(text, at))) break;
    text.remove_prefix(at);
  }
  while (side != StripSide::kLeft && !text.empty()) {
    size_t at = text.size();
    if (!goes(previous_char(text, at))) break;
    text = text.substr(0, at);
  }
  return text;
}

using Parts = std::vector<std::string_view>;

Parts split_left(std::string_view text, std::string_view separator, int64_t max_splits) {
  Parts parts;
  size_t begin = 0;
  while (max_splits-- > 0) {
    const size_t at = find_text(text, separator, begin);
    if (at == std::string_view::npos) break;
    expect_growing(parts.size() * sizeof(text));
    parts.push_back(text.substr(begin, at - begin));
    begin = at + separator.size();
  }
  parts.push_back(text.substr(begin));
  return parts;
}

Parts split_right(std::string_view text, std::string_view separator, int64_t max_splits) {
  Parts parts;
  while (max_splits-- > 0) {
    const size_t at = rfind_text(text, separator);
    if (at == std::string_view::npos) break;
    expect_growing(parts.size() * sizeof(text));
    parts.push_back(text.substr(at + separator.size()));
    text = text.substr(0, at);
  }
  parts.push_back(text);
  std::reverse(parts.begin(), parts.end());
  return parts;
}

/// Behind the word at the beginning of `text`.
size_t end_of_word(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    if (has_property(next_char(text, at), kIsSpace)) return begin;
  }
  return text.size();
}

size_t begin_of_word(std::string_view text) {
  for (size_t at = text.size(); at > 0;) {
    const size_t end = at;
    if (has_property(previous_char(text, at), kIsSpace)) return end;
  }
  return 0;
}

Parts split_words(std::string_view text, int64_t max_splits, bool is_right) {
  Parts parts;
  const StripSide near = is_right ? StripSide::kRight : StripSide::kLeft;
  for (text = strip(text, near); !text.empty(); text = strip(text, near)) {
    expect_growing(parts.size() * sizeof(text));
    if (max_splits-- <= 0) {
      // The rest is one part; the white space at its other end stays.
      parts.push_back(text);
      break;
    }
    if (is_right) {
      const size_t begin = begin_of_word(text);
      parts.push_back(text.substr(begin));
      text = text.substr(0, begin);
    } else {
      const size_t end = end_of_word(text);
      parts.push_back(text.substr(0, end));
      text.remove_prefix(end);
    }
  }
  if (is_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

bool is_line_break(char32_t c) {
  return (c >= 0x0a && c <= 0x0d) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

}  // namespace

std::string_view strip(std::string_view text, StripSide side) {
  return strip_if(text, side, [](char32_t c) { return has_property(c, kIsSpace); });
}

std::string_view strip_chars(std::string_view text, std::string_view chars, StripSide side) {
  std::u32string set;
  for (size_t at = 0; at < chars.size();) set += next_char(chars, at);
  return strip_if(text, side, [&](char32_t c) {
    count_steps(1 + static_cast<int64_t>(set.size() / 32));
    return set.find(c) != std::u32string::npos;
  });
}

std::vector<std::string_view> split(std::string_view text, const std::string* separator,
                                    int64_t max_splits, bool is_right) {
  expect_nbytes(static_cast<int64_t>(text.size()));
  if (max_splits < 0) max_splits = std::numeric_limits<int64_t>::max();
  if (separator == nullptr) return split_words(text, max_splits, is_right);
  return is_right ? split_right(text, *separator, max_splits)
                  : split_left(text, *separator, max_splits);
}

std::vector<std::string_view> split_lines(std::string_view text, bool keeps_ends) {
  expect_nbytes(static_cast<int64_t>(text.size()));
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = at;
    const char32_t c = next_char(text, at);
    if (!is_line_break(c)) continue;
    expect_growing(lines.size() * sizeof(text));
    if (c == '\r' && at < text.size() && text[at] == '\n') ++at;
    lines.push_back(text.substr(begin, (keeps_ends ? at : end) - begin));
    begin = at;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

std::string replace(std::string_view text, std::string_view old, std::string_view by,
                    int64_t count) {
  if (count < 0) count = std::numeric_limits<int64_t>::max();
  std::string out;
  const auto add = [&](std::string_view part) {
    expect_nbytes(static_cast<int64_t>(part.size()));
    out += part;
    expect_growing(out.size());
  };
  size_t at = 0;
  if (old.empty()) {  // before each character and at the end
    while (count-- > 0) {
      add(by);
      if (at == text.size()) return out;
      const size_t begin = at;
      next_char(text, at);
      add(text.substr(begin, at - begin));
    }
  }
  while (!old.empty() && count-- > 0) {
    const size_t found = find_text(text, old, at);
    if (found == std::string_view::npos) break;
    count_steps(1);
    add(text.substr(at, found - at));
    add(by);
    at = found + old.size();
  }
  add(text.substr(at));
  return out;
}

std::string align(std::string_view text, int64_t width, std::string_view fill, Align align) {
  count_steps(static_cast<int64_t>(text.size() / 32));
  const auto num_chars = static_cast<int64_t>(count_chars(text));
  if (width <= num_chars) return std::string(text);
  const int64_t count = width - num_chars;
  expect_nbytes(product(count, static_cast<int64_t>(fill.size())));
  // Of an odd number one more stands where Python puts it.
  const int64_t left = align == Align::kLeft    ? 0
                       : align == Align::kRight ? count
                                                : count / 2 + (count & width & 1);
  std::string out;
  for (int64_t i = 0; i < left; ++i) out += fill;
  out += text;
  for (int64_t i = left; i < count; ++i) out += fill;
  return out;
}

size_t find_text(std::string_view text, std::string_view what, size_t from) {
  if (from > text.size()) return std::string_view::npos;
  const std::string_view rest = text.substr(from);
  // Of the C library, as std::string's takes the product of both sizes.
  const void* found = ::memmem(rest.data(), rest.size(), what.data(), what.size());
  const size_t at = found == nullptr
                        ? rest.size()
                        : static_cast<size_t>(static_cast<const char*>(found) - rest.data());
  count_steps(1 + static_cast<int64_t>((at + what.size()) / 16));
  return found == nullptr ? std::string_view::npos : from + at;
}

/// From the end on, by what the pattern repeats of itself (Knuth, Morris & Pratt 1977).
size_t rfind_text(std::string_view text, std::string_view what) {
  if (what.size() > text.size()) return std::string_view::npos;
  count_steps(1 + static_cast<int64_t>(what.size() / 8));
  expect_growing(what.size() * sizeof(uint32_t) / 2);
  const auto pattern = [&](size_t i) { return what[what.size() - 1 - i]; };
  std::vector<uint32_t> border(what.size() + 1, 0);
  for (size_t i = 1, length = 0; i < what.size(); ++i) {
    while (length > 0 && pattern(i) != pattern(length)) length = border[length];
    length += pattern(i) == pattern(length) ? 1 : 0;
    border[i + 1] = static_cast<uint32_t>(length);
  }
  size_t length = 0;
  for (size_t i = text.size(); i > 0 && length < what.size(); --i) {
    if (i % 8 == 0) count_steps(1);
    while (length > 0 && text[i - 1] != pattern(length)) length = border[length];
    length += text[i - 1] == pattern(length) ? 1 : 0;
    if (length == what.size()) return i - 1;
  }
  return what.empty() ? text.size() : std::string_view::npos;
}

bool has_case(std::string_view text, bool is_upper) {
  count_steps(static_cast<int64_t>(text.size() / 8));
  bool found = false;
  for (size_t at = 0; at < text.size();) {
    const uint16_t properties = properties_of(next_char(text, at));
    if ((properties & (kIsTitle | (is_upper ? kIsLower : kIsUpper))) != 0) return false;
    found = found || (properties & (is_upper ? kIsUpper : kIsLower)) != 0;
  }
  return found;
}

}  // namespace tessera::text::jinja
