#include "apps/text/jinja/lexer.h"

#include <algorithm>

#include "apps/text/jinja/meter.h"
#include "apps/text/jinja/unicode.h"
#include "core/text.h"

namespace tessera::text::jinja {
namespace {

[[noreturn]] void fail_at(int line, const std::string& message) {
  throw TemplateError(fmt::format("line {}: {}", line, message));
}

/// With \n for every kind of line break, and without the last one.
std::string normalized(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      text += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      text += source[i];
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

/// What a string literal stands for: the escapes of Python's unicode-escape. A character that is
/// not ASCII is an escape there, so that a backslash before it stays and makes its escape text.
std::string unescape(std::string_view text, int line) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    if (text[i] != '\\') {
      out += text[i++];
      continue;
    }
    if (++i == text.size()) fail_at(line, "\\ at end of string");
    const char c = text[i++];
    constexpr std::string_view kNames = "\\'\"abfnrtv", kValues = "\\'\"\a\b\f\n\r\t\v";
    if (const size_t at = kNames.find(c); at != std::string_view::npos) {
      out += kValues[at];
    } else if (c == '\n') {
      // a line that goes on
    } else if (c >= '0' && c <= '7') {
      char32_t value = static_cast<char32_t>(c - '0');
      for (int k = 0; k < 2 && i < text.size() && text[i] >= '0' && text[i] <= '7'; ++k) {
        value = value * 8 + static_cast<char32_t>(text[i++] - '0');
      }
      append_char(out, value);
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const size_t num_digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
      char32_t value = 0;
      for (size_t k = 0; k < num_digits; ++k, ++i) {
        const int digit = i < text.size() ? hex_digit(text[i]) : -1;
        if (digit < 0) fail_at(line, fmt::format("truncated \\{} escape in a string", c));
        value = value * 16 + static_cast<char32_t>(digit);
      }
      if (value > 0x10ffff || (value >= 0xd800 && value < 0xe000)) {
        fail_at(line, "an escape in a string that is no character");
      }
      append_char(out, value);
    } else if (c == 'N') {
      fail_at(line, "\\N{...} in a string is not supported");
    } else if (static_cast<unsigned char>(c) >= 0x80) {
      size_t at = i - 1;
      const auto code = static_cast<uint32_t>(next_char(text, at));
      i = at;
      out += code < 0x100     ? fmt::format("\\x{:02x}", code)
             : code < 0x10000 ? fmt::format("\\u{:04x}", code)
                              : fmt::format("\\U{:08x}", code);
    } else {
      out += '\\';
      out += c;
    }
  }
  return out;
}

bool is_space_at(std::string_view text, size_t at, size_t& end) {
  end = at;
  return at < text.size() && has_property(next_char(text, end), kIsSpace);
}

/// Without the white space at its end.
std::string_view rstrip(std::string_view text) {
  while (!text.empty()) {
    size_t at = text.size();
    if (!has_property(previous_char(text, at), kIsSpace)) break;
    text = text.substr(0, at);
  }
  return text;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : text_(normalized(source)) {}

  std::deque<Token> run() {
    while (at_ < text_.size()) data();
    add(TokenType::kEnd, "");
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const { return std::string_view(text_).substr(at_); }
  bool next_is(std::string_view what) const { return rest().starts_with(what); }

  void add(TokenType type, std::string text) { tokens_.push_back({type, line_, std::move(text)}); }

  void move_to(size_t at) {
    line_ += static_cast<int>(std::count(text_.begin() + static_cast<int64_t>(at_),
                                         text_.begin() + static_cast<int64_t>(at), '\n'));
    at_ = at;
    is_line_start_ = at_ > 0 && text_[at_ - 1] == '\n';
  }

  void skip_spaces() {
    size_t at = at_;
    for (size_t end = 0; is_space_at(text_, at, end);) at = end;
    move_to(at);
  }

  /// Text up to the next tag, and the tag.
  void data() {
    size_t begin = at_;
    for (;; ++begin) {
      begin = text_.find('{', begin);
      if (begin == std::string::npos) {
        add_data(rest());
        move_to(text_.size());
        return;
      }
      if (begin + 1 < text_.size() &&
          (text_[begin + 1] == '{' || text_[begin + 1] == '%' || text_[begin + 1] == '#')) {
        break;
      }
    }
    const char kind = text_[begin + 1];
    const char sign = begin + 2 < text_.size() ? text_[begin + 2] : '\0';
    add_data(stripped(std::string_view(text_).substr(at_, begin - at_), sign, kind == '{'));
    move_to(begin + 2 + (sign == '-' || sign == '+' ? 1 : 0));
    if (kind == '#') {
      comment();
    } else if (kind == '{') {
      add(TokenType::kVariableBegin, "");
      code(true);
    } else if (!raw()) {
      add(TokenType::kBlockBegin, "");
      code(false);
    }
  }

  void add_data(std::string_view text) {
    if (!text.empty()) add(TokenType::kData, std::string(text));
  }

  /// The text before a tag: "-" takes all white space, else what stands before a block in its line.
  std::string_view stripped(std::string_view text, char sign, bool is_variable) const {
    if (sign == '-') return rstrip(text);
    if (sign == '+' || is_variable) return text;
    const size_t newline = text.rfind('\n');
    const size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
    const bool is_line = begin > 0 || is_line_start_ || at_ == 0;
    return is_line && begin < text.size() && rstrip(text.substr(begin)).empty()
               ? text.substr(0, begin)
               : text;
  }

  /// The end of a tag: "-" takes white space behind it, a block's own a line break.
  bool close(std::string_view end, bool is_block) {
    const bool is_plus = is_block && next_is("+") && rest().substr(1).starts_with(end);
    const bool is_minus = next_is("-") && rest().substr(1).starts_with(end);
    if (!is_plus && !is_minus && !next_is(end)) return false;
    move_to(at_ + end.size() + (is_plus || is_minus ? 1 : 0));
    if (is_minus) {
      skip_spaces();
    } else if (is_block && !is_plus && next_is("\n")) {
      move_to(at_ + 1);
    }
    return true;
  }

  void comment() {
    const size_t end = text_.find("#}", at_);
    if (end == std::string::npos) {
      if (at_ == text_.size()) return;  // as Jinja, which finds nothing that could be wrong
      fail_at(line_, "Missing end of comment tag");
    }
    const bool has_sign = end > at_ && (text_[end - 1] == '-' || text_[end - 1] == '+');
    move_to(has_sign ? end - 1 : end);
    close("#}", true);
  }

  /// `{% raw %}...{% endraw %}` after its begin; false (and nothing read) if it is another block.
  bool raw() {
    const auto word = [&](size_t at, std::string_view name) {
      for (size_t end = 0; is_space_at(text_, at, end);) at = end;
      if (std::string_view(text_).substr(at, name.size()) != name) return std::string::npos;
      at += name.size();
      for (size_t end = 0; is_space_at(text_, at, end);) at = end;
      return at;
    };
    const size_t end = word(at_, "raw");
    if (end == std::string::npos) return false;
    const std::string_view close_text = std::string_view(text_).substr(end);
    if (!close_text.starts_with("%}") && !close_text.starts_with("-%}")) return false;
    const bool is_minus = close_text[0] == '-';
    move_to(end + (is_minus ? 3 : 2));
    if (is_minus) skip_spaces();
    for (size_t begin = text_.find("{%", at_); begin != std::string::npos;
         begin = text_.find("{%", begin + 1)) {
      const char sign = begin + 2 < text_.size() ? text_[begin + 2] : '\0';
      const size_t behind = word(begin + 2 + (sign == '-' || sign == '+' ? 1 : 0), "endraw");
      if (behind == std::string::npos) continue;
      const std::string_view tail = std::string_view(text_).substr(behind);
      if (!tail.starts_with("%}") && !tail.starts_with("-%}") && !tail.starts_with("+%}")) continue;
      const std::string_view body = std::string_view(text_).substr(at_, begin - at_);
      add_data(stripped(body, sign, false));
      move_to(behind);
      close("%}", true);
      return true;
    }
    if (at_ < text_.size()) fail_at(line_, "Missing end of raw directive");
    return true;
  }

  void code(bool is_variable) {
    std::string open;
    for (;;) {
      const bool is_closed = open.empty() && close(is_variable ? "}}" : "%}", !is_variable);
      if (is_closed) {
        add(is_variable ? TokenType::kVariableEnd : TokenType::kBlockEnd, "");
        return;
      }
      if (at_ == text_.size()) return;
      token(open);
    }
  }

  void token(std::string& open) {
    const char c = text_[at_];
    size_t end = at_;
    if (is_space_at(text_, at_, end)) {
      move_to(end);
    } else if (c >= '0' && c <= '9') {
      number();
    } else if (is_word(at_, end)) {
      name();
    } else if (c == '"' || c == '\'') {
      string(c);
    } else {
      operation(open);
    }
  }

  bool is_word(size_t at, size_t& end) const {
    end = at;
    if (at == text_.size()) return false;
    const char32_t c = next_char(text_, end);
    return c == '_' || has_property(c, kIsAlnum) || has_property(c, kIsIdContinue);
  }

  void name() {
    size_t end = at_;
    for (size_t next = 0; is_word(end, next);) end = next;
    const std::string text = text_.substr(at_, end - at_);
    size_t at = 0;
    bool is_valid = has_property(next_char(text, at), kIsIdStart);
    while (at < text.size()) is_valid &= has_property(next_char(text, at), kIsIdContinue);
    if (!is_valid) fail_at(line_, "Invalid character in identifier");
    add(TokenType::kName, text);
    move_to(end);
  }

  /// Behind digits of a base, each with an underscore before it if `at` is not their first.
  size_t digits(size_t at, int base, bool may_begin_with_underscore) const {
    const auto is_digit = [&](size_t i) {
      return i < text_.size() && hex_digit(text_[i]) >= 0 && hex_digit(text_[i]) < base;
    };
    bool is_first = !may_begin_with_underscore;
    for (;;) {
      if (is_digit(at)) {
        ++at;
      } else if (!is_first && at < text_.size() && text_[at] == '_' && is_digit(at + 1)) {
        at += 2;
      } else {
        return at;
      }
      is_first = false;
    }
  }

  void number() {
    const auto char_at = [&](size_t i) { return i < text_.size() ? text_[i] : '\0'; };
    const auto lower_at = [&](size_t i) { return static_cast<char>(char_at(i) | 0x20); };
    const bool is_after_dot = at_ > 0 && text_[at_ - 1] == '.';
    const size_t whole = digits(at_, 10, false);
    size_t end = whole;
    if (!is_after_dot) {
      if (char_at(end) == '.' && digits(end + 1, 10, false) > end + 1) {
        end = digits(end + 1, 10, false);
      }
      if (lower_at(end) == 'e') {
        const size_t begin = end + 1 + (char_at(end + 1) == '+' || char_at(end + 1) == '-' ? 1 : 0);
        if (digits(begin, 10, false) > begin) end = digits(begin, 10, false);
      }
    }
    const bool is_float = end > whole;
    if (!is_float && text_[at_] == '0') {
      const int base = lower_at(at_ + 1) == 'b'   ? 2
                       : lower_at(at_ + 1) == 'o' ? 8
                       : lower_at(at_ + 1) == 'x' ? 16
                                                  : 0;
      end = base == 0 ? at_ + 1 : digits(at_ + 2, base, true);
      if (base != 0 && end == at_ + 2) end = at_ + 1;
      if (base == 0) {
        while (char_at(end) == '0' || (char_at(end) == '_' && char_at(end + 1) == '0')) ++end;
      }
    }
    std::string text = text_.substr(at_, end - at_);
    text.erase(std::remove(text.begin(), text.end(), '_'), text.end());
    add(is_float ? TokenType::kFloat : TokenType::kInteger, std::move(text));
    move_to(end);
  }

  void string(char quote) {
    size_t end = at_ + 1;
    while (end < text_.size() && text_[end] != quote) end += text_[end] == '\\' ? 2 : 1;
    if (end >= text_.size()) fail_at(line_, fmt::format("unexpected char '{}'", quote));
    add(TokenType::kString,
        unescape(std::string_view(text_).substr(at_ + 1, end - at_ - 1), line_));
    move_to(end + 1);
  }

  void operation(std::string& open) {
    constexpr std::string_view kOperators[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                               "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                               ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    const auto* found = std::find_if(std::begin(kOperators), std::end(kOperators),
                                     [&](std::string_view each) { return next_is(each); });
    if (found == std::end(kOperators)) {
      size_t end = at_;
      next_char(text_, end);
      fail_at(line_, fmt::format("unexpected char '{}'", text_.substr(at_, end - at_)));
    }
    const char c = (*found)[0];
    if (c == '(' || c == '[' || c == '{') {
      open += c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (c == ')' || c == ']' || c == '}') {
      if (open.empty()) fail_at(line_, fmt::format("unexpected '{}'", c));
      if (open.back() != c) {
        fail_at(line_, fmt::format("unexpected '{}', expected '{}'", c, open.back()));
      }
      open.pop_back();
    }
    add(TokenType::kOperator, std::string(*found));
    move_to(at_ + found->size());
  }

  std::string text_;
  size_t at_ = 0;
  int line_ = 1;
  bool is_line_start_ = true;
  std::deque<Token> tokens_;
};

}  // namespace

std::deque<Token> tokenize(std::string_view source) {
  for (size_t at = 0; at < source.size();) {
    const size_t nbytes = utf8_length(source, at);
    if (nbytes == 0) fail("byte {} is not UTF-8", at);
    at += nbytes;
  }
  return Lexer(source).run();
}

std::string describe(const Token& token) {
  switch (token.type) {
    case TokenType::kData:
      return "template data / text";
    case TokenType::kVariableBegin:
      return "begin of print statement";
    case TokenType::kVariableEnd:
      return "end of print statement";
    case TokenType::kBlockBegin:
      return "begin of statement block";
    case TokenType::kBlockEnd:
      return "end of statement block";
    case TokenType::kEnd:
      return "end of template";
    default:
      return shorten(token.text);
  }
}

}  // namespace tessera::text::jinja
