#include "apps/data/json_line.h"

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "core/utf8.h"

namespace tessera::apps {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

int hex_digit(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/// How many bytes from `p` on are neither a quote, a backslash nor a control character.
size_t plain_length(const char* p, const char* end) {
  const char* const begin = p;
  for (; end - p >= 32; p += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i quotes = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8('"'));
    const __m256i slashes = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8('\\'));
    const __m256i controls =
        _mm256_cmpeq_epi8(_mm256_min_epu8(bytes, _mm256_set1_epi8(0x1f)), bytes);
    const auto found = static_cast<unsigned>(
        _mm256_movemask_epi8(_mm256_or_si256(_mm256_or_si256(quotes, slashes), controls)));
    if (found != 0) return static_cast<size_t>(p - begin + std::countr_zero(found));
  }
  while (p < end && *p != '"' && *p != '\\' && static_cast<unsigned char>(*p) >= 0x20) ++p;
  return static_cast<size_t>(p - begin);
}

class LineParser {
 public:
  LineParser(char* line, size_t nbytes, bool replace)
      : begin_(line), p_(line), end_(line + nbytes), replace_(replace) {}

  JsonString find(std::string_view field) {
    JsonString found{.is_null = true, .text = {}};
    bool is_found = field.empty();
    std::vector<std::string> others;
    expect('{', "an object");
    skip_space();
    bool is_first = true;
    while (!take('}')) {
      if (!is_first) expect(',', ", or }"), skip_space();
      is_first = false;
      const std::string_view key = string("a name in quotes");
      skip_space(), expect(':', ":"), skip_space();
      if (key == field && !field.empty()) {
        if (is_found) fail_text(fmt::format("field \"{}\" comes twice", shorten(field)), "it once");
        is_found = true;
        found = wanted(field);
      } else {
        if (others.size() < 9) others.emplace_back(shorten(key, 60));
        value(1);
      }
      skip_space();
    }
    skip_space();
    if (p_ != end_) fail("the end of the line");
    if (!is_found) {
      throw InputError(
          fmt::format("no field \"{}\", expected one with the text ({})", shorten(field),
                      others.empty() ? "there is none" : "there is " + join_few(others)));
    }
    return found;
  }

 private:
  [[noreturn]] void fail_text(std::string_view found, std::string_view expected) const {
    throw InputError(
        fmt::format("byte {} of the line: {}, expected {}", p_ - begin_, found, expected));
  }
  [[noreturn]] void fail(std::string_view expected) const {
    if (p_ == end_) fail_text("the line ends", expected);
    const size_t length = utf8_length({p_, static_cast<size_t>(end_ - p_)}, 0);
    fail_text(fmt::format("'{}'", printable({p_, length})), expected);
  }

  bool take(char c) {
    if (p_ == end_ || *p_ != c) return false;
    ++p_;
    return true;
  }
  void expect(char c, std::string_view expected) {
    skip_space();
    if (!take(c)) fail(expected);
  }
  void skip_space() {
    while (p_ < end_ && (*p_ == ' ' || *p_ == '\t' || *p_ == '\r' || *p_ == '\n')) ++p_;
  }

  JsonString wanted(std::string_view field) {
    if (p_ < end_ && *p_ == '"') return {.is_null = false, .text = string("a string")};
    if (literal("null")) return {.is_null = true, .text = {}};
    const char* const start = p_;
    value(1);
    throw InputError(
        fmt::format("field \"{}\" is {}, expected a string", shorten(field),
                    shorten(std::string_view(start, static_cast<size_t>(p_ - start)), 60)));
  }

  bool literal(std::string_view word) {
    if (!std::string_view(p_, static_cast<size_t>(end_ - p_)).starts_with(word)) return false;
    p_ += word.size();
    return true;
  }

  void value(int depth) {
    if (depth > kMaxJsonDepth) {
      fail_text(fmt::format("more than {} levels", kMaxJsonDepth), "fewer");
    }
    skip_space();
    if (p_ == end_) fail("a value");
    if (*p_ == '"') {
      string("a string");
    } else if (*p_ == '{' || *p_ == '[') {
      container(depth);
    } else if (*p_ == '-' || is_digit(*p_)) {
      number();
    } else if (!literal("true") && !literal("false") && !literal("null") && !literal("NaN") &&
               !literal("Infinity")) {
      fail("a value");
    }
  }

  void container(int depth) {
    const bool is_object = *p_++ == '{';
    const char close = is_object ? '}' : ']';
    skip_space();
    if (take(close)) return;
    while (true) {
      if (is_object) {
        skip_space(), string("a name in quotes"), expect(':', ":");
      }
      value(depth + 1);
      skip_space();
      if (take(close)) return;
      expect(',', is_object ? ", or }" : ", or ]");
    }
  }

  void digits() {
    if (p_ == end_ || !is_digit(*p_)) fail("a digit");
    while (p_ < end_ && is_digit(*p_)) ++p_;
  }
  void number() {
    if (take('-') && literal("Infinity")) return;
    if (!take('0')) digits();
    if (take('.')) digits();
    if (p_ < end_ && (*p_ == 'e' || *p_ == 'E')) {
      ++p_;
      if (p_ < end_ && (*p_ == '+' || *p_ == '-')) ++p_;
      digits();
    }
  }

  /// Escapes become shorter, or stay as long as they are: the text is written over them.
  std::string_view string(std::string_view expected) {
    if (!take('"')) fail(expected);
    char* const text = p_;
    char* out = p_ += plain_length(p_, end_);
    while (true) {
      if (p_ == end_) fail("the end of the string");
      if (*p_ == '"') break;
      if (*p_ != '\\') {
        fail_text(fmt::format("control character {}", printable({p_, 1})), "it as an escape");
      }
      ++p_;
      out = escape(out);
      const size_t length = plain_length(p_, end_);
      std::memmove(out, p_, length);
      out += length, p_ += length;
    }
    ++p_;
    return {text, static_cast<size_t>(out - text)};
  }

  char* escape(char* out) {
    constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
    if (p_ == end_) fail("an escape");
    if (const size_t i = kFrom.find(*p_); i != std::string_view::npos) {
      ++p_;
      *out++ = kTo[i];
      return out;
    }
    if (*p_ != 'u') fail("an escape: one of \"\\/bfnrtu");
    ++p_;
    char32_t code = four_hex();
    const bool is_high = code >= 0xd800 && code < 0xdc00;
    if (is_high && end_ - p_ >= 2 && p_[0] == '\\' && p_[1] == 'u') {
      char* const second = p_;
      p_ += 2;
      const char32_t low = four_hex();
      if (low >= 0xdc00 && low < 0xe000) {
        code = 0x10000u + ((code - 0xd800u) << 10) + (low - 0xdc00u);
      } else {
        p_ = second;  // a character of its own
      }
    }
    if (code >= 0xd800 && code < 0xe000) {
      if (!replace_) {
        fail_text(fmt::format("\\u{:04x}, half a character", static_cast<uint32_t>(code)),
                  "a surrogate pair");
      }
      code = 0xfffd;
    }
    std::string bytes;
    append_utf8(bytes, code);
    std::memcpy(out, bytes.data(), bytes.size());
    return out + bytes.size();
  }

  char32_t four_hex() {
    char32_t code = 0;
    for (int i = 0; i < 4; ++i, ++p_) {
      const int digit = p_ == end_ ? -1 : hex_digit(*p_);
      if (digit < 0) fail("four hexadecimal digits");
      code = code * 16 + static_cast<char32_t>(digit);
    }
    return code;
  }

  const char* begin_;
  char* p_;
  char* end_;
  bool replace_;
};

}  // namespace

JsonString json_string_field(char* line, size_t nbytes, std::string_view field, bool replace) {
  return LineParser(line, nbytes, replace).find(field);
}

void append_json_string(std::string& json, std::string_view text) {
  json += '"';
  while (true) {
    const size_t length = plain_length(text.data(), text.data() + text.size());
    json += text.substr(0, length);
    text.remove_prefix(length);
    if (text.empty()) break;
    if (static_cast<unsigned char>(text[0]) < 0x20) {
      json += fmt::format("\\u{:04x}", static_cast<unsigned>(text[0]));
    } else {
      json += '\\', json += text[0];
    }
    text.remove_prefix(1);
  }
  json += '"';
}

}  // namespace tessera::apps
