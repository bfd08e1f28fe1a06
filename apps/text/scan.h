#pragma once

#include <immintrin.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "apps/text/unicode.h"

// Scanners: where the next word of a valid UTF-8 text ends, by the rules of a regular expression
// that is in wide use. Each has `const char* next(const char* p, const char* end)`, p < end; what is
// before p does not count, as in a search that goes on from match to match. Linear in the text.

namespace tessera::text {

enum class Kind : uint8_t { kOther, kLetter, kNumber, kSpace, kNewline };  // \r, \n: kNewline

namespace detail {

struct AsciiKinds {
  Kind kind[128] = {};
  constexpr AsciiKinds() {
    for (int c = 'a'; c <= 'z'; ++c) kind[c] = kind[c - 32] = Kind::kLetter;
    for (int c = '0'; c <= '9'; ++c) kind[c] = Kind::kNumber;
    for (const int c : {9, 11, 12, 32}) kind[c] = Kind::kSpace;
    kind[10] = kind[13] = Kind::kNewline;
  }
};
inline constexpr AsciiKinds kAscii;

/// One bit a byte of the 16 at `p`, 1 for an ASCII letter.
inline uint32_t letter_mask(const char* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i lower = _mm_or_si128(bytes, _mm_set1_epi8(0x20));
  const __m128i offset = _mm_sub_epi8(lower, _mm_set1_epi8('a'));
  const __m128i is_letter = _mm_cmpeq_epi8(_mm_min_epu8(offset, _mm_set1_epi8(25)), offset);
  return static_cast<uint32_t>(_mm_movemask_epi8(is_letter));
}

class ScannerBase {
 protected:
  static bool is_ascii(char c) { return static_cast<signed char>(c) >= 0; }

  Kind kind_at(const char* p) const {
    if (is_ascii(*p)) [[likely]]
      return kAscii.kind[static_cast<unsigned char>(*p)];
    return wide_kind(utf8_decode(p));
  }
  Kind wide_kind(char32_t c) const {
    const uint32_t bits = properties_(c);
    return (bits & kLetter) != 0       ? Kind::kLetter
           : (bits & kNumber) != 0     ? Kind::kNumber
           : (bits & kRegexSpace) != 0 ? Kind::kSpace
                                       : Kind::kOther;
  }

  const char* letters_end(const char* p, const char* end) const {
    while (end - p >= 16) {
      const uint32_t mask = letter_mask(p);
      if (mask == 0xffffu) {
        p += 16;
        continue;
      }
      p += std::countr_one(mask);
      if (is_ascii(*p)) [[likely]]
        return p;
      if (wide_kind(utf8_decode(p)) != Kind::kLetter) return p;
      p += utf8_nbytes(*p);
    }
    return run_end(p, end, Kind::kLetter);
  }
  const char* run_end(const char* p, const char* end, Kind kind) const {
    while (p < end && kind_at(p) == kind) p += utf8_nbytes(*p);
    return p;
  }
  /// Up to `max` numbers.
  const char* numbers_end(const char* p, const char* end, int max) const {
    for (int i = 0; i < max && p < end && kind_at(p) == Kind::kNumber; ++i) p += utf8_nbytes(*p);
    return p;
  }
  static const char* newlines_end(const char* p, const char* end) {
    while (p < end && (*p == '\n' || *p == '\r')) ++p;
    return p;
  }

  /// Whitespace from p on, where no other rule holds: \s*[\r\n]+ first if `newlines`, then
  /// \s+(?!\S)|\s+, where the last one of several is left to what follows.
  const char* spaces_end(const char* p, const char* end, bool newlines) const {
    const char *q = p, *last = p, *after_newline = nullptr;
    while (q < end) {
      const Kind kind = kind_at(q);
      if (kind != Kind::kSpace && kind != Kind::kNewline) break;
      last = q;
      q += utf8_nbytes(*q);
      if (kind == Kind::kNewline) after_newline = q;
    }
    if (newlines && after_newline != nullptr) return after_newline;
    return q == end || last == p ? q : last;
  }

  /// The end of 's 't 're 've 'm 'll 'd at p, which is an apostrophe, or nullptr.
  static const char* contraction_end(const char* p, const char* end, bool any_case) {
    if (end - p < 2) return nullptr;
    const auto lower = [&](char c) {
      return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    };
    const char first = lower(p[1]), second = end - p > 2 ? lower(p[2]) : '\0';
    switch (first) {
      case 's':
      case 't':
      case 'm':
      case 'd':
        return p + 2;
      case 'r':
      case 'v':
        return second == 'e' ? p + 3 : nullptr;
      case 'l':
        return second == 'l' ? p + 3 : nullptr;
      case '\xc5':  // U+017F, a long s, is an s in another case
        return any_case && end - p > 2 && p[2] == '\xbf' ? p + 3 : nullptr;
      default:
        return nullptr;
    }
  }

  Properties properties_;
};

}  // namespace detail

/// GPT-2: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
class Gpt2Scanner : detail::ScannerBase {
 public:
  const char* next(const char* p, const char* end) const {
    if (*p == '\'') {
      if (const char* q = contraction_end(p, end, false)) return q;
    }
    const char* q = p;
    Kind kind = kind_at(q);
    if (*q == ' ' && end - q > 1) {
      const Kind after = kind_at(q + 1);
      if (after < Kind::kSpace) {
        ++q;
        kind = after;
      }
    }
    if (kind == Kind::kLetter) [[likely]]
      return letters_end(q, end);
    if (kind >= Kind::kSpace) return spaces_end(p, end, false);
    return run_end(q, end, kind);
  }
};

/// GPT-4 (cl100k), Llama 3, Qwen:
/// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|
/// \s*[\r\n]+|\s+(?!\S)|\s+   with at most `max_digits` numbers in a word.
class Gpt4Scanner : detail::ScannerBase {
 public:
  explicit Gpt4Scanner(int max_digits) : max_digits_(max_digits) {}

  const char* next(const char* p, const char* end) const {
    if (*p == '\'') {
      if (const char* q = contraction_end(p, end, true)) return q;
    }
    const Kind kind = kind_at(p);
    if (kind == Kind::kLetter) return letters_end(p, end);
    if (kind == Kind::kNumber) return numbers_end(p, end, max_digits_);
    const char* const q = p + utf8_nbytes(*p);
    if (kind != Kind::kNewline && q < end) {
      const Kind after = kind_at(q);
      if (after == Kind::kLetter) [[likely]]
        return letters_end(q, end);
      if (*p == ' ' && after == Kind::kOther) {
        return newlines_end(run_end(q, end, Kind::kOther), end);
      }
    }
    if (kind == Kind::kOther) return newlines_end(run_end(q, end, Kind::kOther), end);
    return spaces_end(p, end, true);
  }

 private:
  int max_digits_;
};

/// GPT-4o (o200k): words also end where capitals follow small letters; W is
/// [^\r\n\p{L}\p{N}]?, U [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}], L [\p{Ll}\p{Lm}\p{Lo}\p{M}] and C the
/// contractions, which may be left out:
/// W U*L+ C?|W U+L* C?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
class Gpt4oScanner : detail::ScannerBase {
 public:
  Gpt4oScanner(int max_digits, bool contractions)
      : max_digits_(max_digits), contractions_(contractions) {}

  const char* next(const char* p, const char* end) const {
    const Kind kind = kind_at(p);
    const char* const q = p + utf8_nbytes(*p);
    const bool may_lead = kind == Kind::kOther || kind == Kind::kSpace;
    const char* word = nullptr;
    if (may_lead && q < end) word = lower_word(q, end);
    if (word == nullptr) word = lower_word(p, end);
    if (word == nullptr && may_lead && q < end) word = upper_word(q, end);
    if (word == nullptr) word = upper_word(p, end);
    if (word != nullptr) {
      const char* const more =
          contractions_ && word < end && *word == '\'' ? contraction_end(word, end, true) : nullptr;
      return more != nullptr ? more : word;
    }
    if (kind == Kind::kNumber) return numbers_end(p, end, max_digits_);
    if (kind == Kind::kOther) return tail_end(run_end(q, end, Kind::kOther), end);
    if (*p == ' ' && q < end && kind_at(q) == Kind::kOther) {
      return tail_end(run_end(q, end, Kind::kOther), end);
    }
    return spaces_end(p, end, true);
  }

 private:
  uint32_t case_at(const char* p) const { return properties_(utf8_decode(p)) & (kUpper | kLower); }
  const char* cased_end(const char* p, const char* end, uint32_t which) const {
    while (p < end && (case_at(p) & which) != 0) p += utf8_nbytes(*p);
    return p;
  }
  /// U*L+ from p on, or nullptr.
  const char* lower_word(const char* p, const char* end) const {
    const char* after_both = nullptr;  // the last character that is in U and in L ends there
    while (p < end) {
      const uint32_t bits = case_at(p);
      if ((bits & kUpper) == 0) break;
      p += utf8_nbytes(*p);
      if ((bits & kLower) != 0) after_both = p;
    }
    const char* const all = cased_end(p, end, kLower);
    return all != p ? all : after_both;
  }
  /// U+L* from p on, or nullptr.
  const char* upper_word(const char* p, const char* end) const {
    const char* const upper = cased_end(p, end, kUpper);
    return upper == p ? nullptr : cased_end(upper, end, kLower);
  }
  static const char* tail_end(const char* p, const char* end) {
    while (p < end && (*p == '\n' || *p == '\r' || *p == '/')) ++p;
    return p;
  }

  int max_digits_;
  bool contractions_;
};

/// The whole text is one word.
class WholeScanner {
 public:
  const char* next(const char*, const char* end) const { return end; }
};

/// Cuts before each run of a character (of `mark` in UTF-8) that stands behind another one.
class MarkScanner {
 public:
  explicit MarkScanner(std::string_view mark) : mark_(mark) {}
  const char* next(const char* p, const char* end) const {
    while (starts(p, end)) p += mark_.size();
    while (p < end && !starts(p, end)) {
      const void* const found = std::memchr(p + 1, mark_[0], static_cast<size_t>(end - p - 1));
      p = found == nullptr ? end : static_cast<const char*>(found);
    }
    return p;
  }

 private:
  bool starts(const char* p, const char* end) const {
    return static_cast<size_t>(end - p) >= mark_.size() &&
           std::memcmp(p, mark_.data(), mark_.size()) == 0;
  }
  std::string_view mark_;
};

}  // namespace tessera::text
