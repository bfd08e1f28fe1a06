#include "core/utf8.h"

#include <cstdint>
#include <cstring>

#include "core/text.h"

namespace tessera {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

/// How many bytes from `offset` on are ASCII.
size_t ascii_length(std::string_view text, size_t offset) {
  constexpr size_t kWord = sizeof(uint64_t), kBlock = 4 * kWord;
  constexpr uint64_t kHigh = 0x8080808080808080u;
  const size_t begin = offset;
  for (; offset + kBlock <= text.size(); offset += kBlock) {
    uint64_t words[4];
    std::memcpy(words, text.data() + offset, kBlock);
    if (((words[0] | words[1] | words[2] | words[3]) & kHigh) != 0) break;
  }
  while (offset < text.size() && static_cast<unsigned char>(text[offset]) < 0x80) ++offset;
  return offset - begin;
}

/// Bytes at `offset`, where no character is, that a decoder takes for one mistake: those with which
/// one could begin.
size_t invalid_length(std::string_view text, size_t offset) {
  const auto byte = [&](size_t i) {
    return offset + i < text.size() ? static_cast<unsigned char>(text[offset + i]) : 0u;
  };
  const unsigned first = byte(0), second = byte(1);
  const bool is_three = (first & 0xf0u) == 0xe0u, is_four = first >= 0xf0 && first <= 0xf4;
  if (!is_three && !is_four) return 1;
  const unsigned low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const unsigned high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  if (second < low || second > high) return 1;
  return is_four && (byte(2) & 0xc0u) == 0x80u ? 3 : 2;
}

}  // namespace

size_t find_invalid_utf8(std::string_view text) {
  size_t offset = 0;
  while ((offset += ascii_length(text, offset)) < text.size()) {
    while (offset < text.size() && static_cast<unsigned char>(text[offset]) >= 0x80) {
      const size_t nbytes = utf8_length(text, offset);
      if (nbytes == 0) return offset;
      offset += nbytes;
    }
  }
  return text.size();
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string mended;
  mended.reserve(text.size());
  while (true) {
    const size_t valid = find_invalid_utf8(text);
    mended += text.substr(0, valid);
    if (valid == text.size()) return mended;
    mended += kReplacement;
    text.remove_prefix(valid + invalid_length(text, valid));
  }
}

void append_utf8(std::string& text, char32_t code) {
  const auto add = [&](char32_t byte) { text += static_cast<char>(byte); };
  const auto tail = [&](int shift) { add(0x80u | ((code >> shift) & 0x3fu)); };
  if (code < 0x80) return add(code);
  if (code < 0x800) return add(0xc0u | (code >> 6)), tail(0);
  if (code < 0x10000) return add(0xe0u | (code >> 12)), tail(6), tail(0);
  add(0xf0u | (code >> 18)), tail(12), tail(6), tail(0);
}

}  // namespace tessera
