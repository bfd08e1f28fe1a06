#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/utf8.h"

// Characters as Hugging Face's tokenizers sees them. Its parts (regular expressions, Rust's own
// tests, normal forms, BERT's rules) follow different versions of Unicode: each has its bit here.

namespace tessera::text {

inline constexpr char32_t kNumCodes = 0x110000;  ///< code points, surrogates among them

enum class Category : uint8_t {
  kLu,
  kLl,
  kLt,
  kLm,
  kLo,
  kMn,
  kMc,
  kMe,
  kNd,
  kNl,
  kNo,
  kPc,
  kPd,
  kPs,
  kPe,
  kPi,
  kPf,
  kPo,
  kSm,
  kSc,
  kSk,
  kSo,
  kZs,
  kZl,
  kZp,
  kCc,
  kCf,
  kCs,
  kCo,
  kCn
};

/// Bits of `properties`; the lowest five are the Category.
enum Property : uint32_t {
  kRegexSpace = 1u << 5,    ///< \s of a regular expression
  kRegexWord = 1u << 6,     ///< \w
  kRegexDigit = 1u << 7,    ///< \d
  kWhite = 1u << 8,         ///< whitespace of WhitespaceSplit and Strip
  kWord = 1u << 9,          ///< part of a word for Whitespace and for single_word
  kNumeric = 1u << 10,      ///< of Digits
  kPunctuation = 1u << 11,  ///< of Punctuation
  kBertControl = 1u << 12,  ///< dropped by BertNormalizer's clean_text
  kBertSpace = 1u << 13,    ///< made a space by it
  kAccent = 1u << 14,       ///< dropped by StripAccents
  kBertAccent = 1u << 15,   ///< dropped by BertNormalizer's strip_accents
  kBertAlone = 1u << 16,    ///< a piece of its own for BertPreTokenizer
  // Made of the others when the tables are built:
  kLetter = 1u << 20,  ///< \p{L}
  kNumber = 1u << 21,  ///< \p{N}
  kUpper = 1u << 22,   ///< \p{Lu} \p{Lt} \p{Lm} \p{Lo} \p{M}
  kLower = 1u << 23,   ///< \p{Ll} \p{Lm} \p{Lo} \p{M}
};

namespace detail {
struct PropertyTables {
  uint16_t block[0x110000 / 128];
  const uint8_t* kinds;  // of 128 code points a block
  uint32_t bits[256];
};
const PropertyTables& property_tables();
}  // namespace detail

/// The properties of all code points; looked up once, then used in a loop.
class Properties {
 public:
  Properties() : tables_(detail::property_tables()) {}
  uint32_t operator()(char32_t c) const {
    return tables_.bits[tables_.kinds[size_t{tables_.block[c >> 7]} * 128 + (c & 127)]];
  }
  Category category(char32_t c) const { return static_cast<Category>((*this)(c)&31u); }

 private:
  const detail::PropertyTables& tables_;
};

/// Bytes of the character that begins with this byte, of a valid text.
inline size_t utf8_nbytes(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

/// The character at `p` of a valid text.
inline char32_t utf8_decode(const char* p) {
  const auto byte = [&](int i) { return static_cast<char32_t>(static_cast<unsigned char>(p[i])); };
  if (byte(0) < 0x80) return byte(0);
  if (byte(0) < 0xe0) return (byte(0) & 31u) << 6 | (byte(1) & 63u);
  if (byte(0) < 0xf0) return (byte(0) & 15u) << 12 | (byte(1) & 63u) << 6 | (byte(2) & 63u);
  return (byte(0) & 7u) << 18 | (byte(1) & 63u) << 12 | (byte(2) & 63u) << 6 | (byte(3) & 63u);
}

/// The characters of a valid text, in order.
template <class F>
void for_each_character(std::string_view text, F&& f) {
  for (const char *p = text.data(), *end = p + text.size(); p < end; p += utf8_nbytes(*p)) {
    f(utf8_decode(p));
  }
}

/// How many bytes at the beginning are ASCII.
size_t ascii_nbytes(std::string_view text);

/// Appends the lower case of a valid text, where one character may become two.
void append_lower(std::string& out, std::string_view text);
/// The same of a text that is ASCII.
void append_ascii_lower(std::string& out, std::string_view ascii);

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

/// Whether the text is surely what `normal_form` makes of it; one that is may be said not to be.
bool is_surely_normal(std::string_view text, NormalForm form);

/// The normal form of a valid text, of which only the stretches are looked at closely that it may
/// change. Time and memory linear in it.
std::string normal_form(std::string_view text, NormalForm form);

}  // namespace tessera::text
