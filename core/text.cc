#include "core/text.h"

#include <algorithm>

namespace tessera {
namespace {

/// The code point of a valid character.
char32_t decode(std::string_view c) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(c[i]); };
  if (c.size() == 1) return byte(0);
  char32_t value = byte(0) & (0xffu >> (c.size() + 1));
  for (size_t i = 1; i < c.size(); ++i) value = (value << 6) | (byte(i) & 0x3fu);
  return value;
}

/// What a terminal acts upon, or what changes how the text around it is shown.
bool is_control(char32_t c) {
  const bool is_c0_or_c1 = c < 0x20 || (c >= 0x7f && c < 0xa0);
  const bool is_line = c == 0x2028 || c == 0x2029;
  const bool is_direction = c == 0x061c || c == 0x200e || c == 0x200f ||
                            (c >= 0x202a && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
  return is_c0_or_c1 || is_line || is_direction;
}

void append_escaped(std::string& out, char32_t c) {
  if (c == '\n') {
    out += "\\n";
  } else if (c == '\r') {
    out += "\\r";
  } else if (c == '\t') {
    out += "\\t";
  } else {
    out += c < 0x80 ? fmt::format("\\x{:02x}", static_cast<uint32_t>(c))
                    : fmt::format("\\u{:04x}", static_cast<uint32_t>(c));
  }
}

/// Appends the character at `offset` and returns where the next one begins.
size_t append_printable(std::string& out, std::string_view text, size_t offset,
                        std::string_view kept) {
  const size_t nbytes = utf8_length(text, offset);
  if (nbytes == 0) {
    out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[offset]));
    return offset + 1;
  }
  const std::string_view c = text.substr(offset, nbytes);
  const char32_t code = decode(c);
  const bool stays = nbytes == 1 && kept.find(c[0]) != std::string_view::npos;
  if (is_control(code) && !stays) {
    append_escaped(out, code);
  } else {
    out += c;
  }
  return offset + nbytes;
}

bool is_tail_byte(char c) {
  return (static_cast<unsigned char>(c) & 0xc0u) == 0x80u;
}

/// Whether more bytes can make a character of this beginning of one.
bool may_begin(std::string_view bytes) {
  for (const std::string_view rest :
       {"\x80", "\x80\x80", "\x80\x80\x80", "\xbf", "\xbf\x80", "\xbf\x80\x80"}) {
    const std::string whole = std::string(bytes) + std::string(rest);
    if (utf8_length(whole, 0) == whole.size()) return true;
  }
  return false;
}

}  // namespace

size_t utf8_length(std::string_view text, size_t offset) {
  const auto byte = [&](size_t i) {
    return offset + i < text.size() ? static_cast<unsigned char>(text[offset + i]) : 0u;
  };
  const auto is_tail = [&](size_t i) { return (byte(i) & 0xc0u) == 0x80u; };
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return is_tail(1) ? 2 : 0;
  if ((first & 0xf0u) == 0xe0u) {
    const bool overlong = first == 0xe0 && second < 0xa0;
    const bool surrogate = first == 0xed && second > 0x9f;
    return is_tail(1) && is_tail(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const bool overlong = first == 0xf0 && second < 0x90;
    const bool too_large = first == 0xf4 && second > 0x8f;
    return is_tail(1) && is_tail(2) && is_tail(3) && !overlong && !too_large ? 4 : 0;
  }
  return 0;
}

std::string printable(std::string_view text, std::string_view kept) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) at = append_printable(out, text, at, kept);
  return out;
}

std::string printable_message(std::string_view text) {
  while (text.ends_with('\n')) text.remove_suffix(1);
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const bool is_ours = text.substr(at, 3) == "\n  ";
    at = append_printable(out, text, at, is_ours ? "\n" : "");
  }
  return out;
}

std::string PrintableStream::add(std::string_view piece) {
  rest_ += piece;
  // A character has up to four bytes; one that can still become whole waits.
  size_t end = rest_.size();
  for (size_t back = 1; back <= 3 && back <= rest_.size(); ++back) {
    const size_t at = rest_.size() - back;
    if (is_tail_byte(rest_[at])) continue;
    if (may_begin(std::string_view(rest_).substr(at))) end = at;
    break;
  }
  std::string out = printable(std::string_view(rest_).substr(0, end), kept_);
  rest_.erase(0, end);
  return out;
}

std::string PrintableStream::finish() {
  std::string out = printable(rest_, kept_);
  rest_.clear();
  return out;
}

std::string presentable(std::string_view message) {
  constexpr size_t kMaxNbytes = 65536;
  std::string text;
  const std::string all = printable_message(shorten(message, kMaxNbytes));
  for (size_t begin = 0; begin <= all.size();) {
    const size_t end = std::min(all.find('\n', begin), all.size());
    if (begin > 0) text += '\n';
    text += shorten(std::string_view(all).substr(begin, end - begin), kMaxLineShown);
    begin = end + 1;
  }
  return text;
}

std::string shorten(std::string_view text, size_t max_nbytes) {
  if (text.size() <= max_nbytes) return std::string(text);
  size_t head = max_nbytes * 2 / 3, tail = text.size() - max_nbytes / 3;
  // Of bytes that are no text at all any place is as good.
  for (int i = 0; i < 3 && head > 0 && is_tail_byte(text[head]); ++i) --head;
  for (int i = 0; i < 3 && tail < text.size() && is_tail_byte(text[tail]); ++i) ++tail;
  return fmt::format("{}[... {} bytes ...]{}", text.substr(0, head), tail - head,
                     text.substr(tail));
}

}  // namespace tessera
