#define PCRE2_CODE_UNIT_WIDTH 8
#include "apps/text/regex.h"

#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <cctype>
#include <functional>

#include "apps/text/unicode.h"
#include "apps/text/work.h"
#include "core/check.h"
#include "core/text.h"

namespace tessera::text {
namespace {

constexpr uint32_t kMaxSteps = 10'000'000;  // of a match in a text that is not long

constexpr std::string_view kCategories[] = {
    "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe",
    "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co", "Cn"};

/// Characters as sorted ranges [first, second] in the text of a class, without its brackets.
std::string ranges_where(const std::function<bool(uint32_t)>& is_in) {
  const Properties properties;
  std::string out;
  for (char32_t c = 0; c < kNumCodes;) {
    if (c == 0xd800) c = 0xe000;  // surrogates are no characters
    if (!is_in(properties(c))) {
      ++c;
      continue;
    }
    const char32_t first = c;
    while (c < kNumCodes && c != 0xd800 && is_in(properties(c))) ++c;
    out += fmt::format("\\x{{{:x}}}", static_cast<uint32_t>(first));
    if (c - 1 > first) out += fmt::format("-\\x{{{:x}}}", static_cast<uint32_t>(c - 1));
  }
  return out;
}

class Translator {
 public:
  Translator(std::string_view pattern, std::string_view what) : in_(pattern), what_(what) {}

  std::string run() {
    if (const size_t at = find_invalid_utf8(in_); at < in_.size()) {
      at_ = at;
      fail("UTF-8");
    }
    while (at_ < in_.size()) step();
    return out_;
  }

 private:
  [[noreturn]] void fail(std::string_view expected) const {
    throw InputError(fmt::format("{}: '{}' at byte {} of the regular expression, expected {}",
                                 what_, shorten(in_.substr(std::min(at_, in_.size())), 40), at_,
                                 expected));
  }
  bool takes(std::string_view text) {
    if (!in_.substr(at_).starts_with(text)) return false;
    at_ += text.size();
    return true;
  }
  char32_t take_character() {
    if (at_ >= in_.size()) fail("a character");
    const char32_t c = utf8_decode(in_.data() + at_);
    at_ += utf8_nbytes(in_[at_]);
    return c;
  }
  static std::string literal(char32_t c) {
    return fmt::format("\\x{{{:x}}}", static_cast<uint32_t>(c));
  }

  void step() {
    const char c = in_[at_];
    if (c == '(') {
      open();
    } else if (c == ')') {
      if (groups_.empty()) fail("no ')' without '('");
      ++at_;
      out_ += ')';
      atom_ = groups_.back();
      groups_.pop_back();
    } else if (c == '|' || c == '^' || c == '$') {
      ++at_;
      out_ += c;
      atom_ = std::string::npos;
    } else if (c == '*' || c == '+' || c == '?' || (c == '{' && is_repetition())) {
      repeat();
    } else {
      atom_ = out_.size();
      if (c == '[') {
        out_ += take_class();
      } else if (c == '.') {
        ++at_;
        out_ += "[^\\n]";
      } else if (c == '\\') {
        escape();
      } else {
        out_ += literal(take_character());
      }
    }
  }

  void open() {
    groups_.push_back(out_.size());
    for (const std::string_view group : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"}) {
      if (takes(group)) {
        out_ += group;
        atom_ = std::string::npos;
        return;
      }
    }
    if (takes("(?i)")) {
      out_ += "(?i)";
      groups_.pop_back();
      return;
    }
    if (in_.substr(at_).starts_with("(?") || in_.substr(at_).starts_with("(*")) {
      fail("a group (?:, (?=, (?!, (?<=, (?<!, (?>, (?i: or (");
    }
    ++at_;
    out_ += '(';
    atom_ = std::string::npos;
  }

  bool is_repetition() const {
    size_t at = at_ + 1;
    size_t num_digits = 0;
    for (; at < in_.size() &&
           (std::isdigit(static_cast<unsigned char>(in_[at])) != 0 || in_[at] == ',');
         ++at) {
      num_digits += in_[at] != ',';
    }
    return num_digits > 0 && at < in_.size() && in_[at] == '}';
  }
  void repeat() {
    if (atom_ == std::string::npos) fail("something to repeat");
    std::string times;
    const bool is_braced = in_[at_] == '{';
    if (is_braced) {
      const size_t end = in_.find('}', at_) + 1;
      times = in_.substr(at_, end - at_);
      if (times.size() > 12) fail("a smaller number");
      if (times[1] == ',') times.insert(1, "0");
      at_ = end;
    } else {
      times = in_[at_++];
    }
    out_ += times;
    if (takes("?")) {
      out_ += '?';
    } else if (takes("+")) {
      // Behind braces it repeats what is repeated; behind the others it is possessive.
      if (is_braced) {
        out_.insert(atom_, "(?:");
        out_ += ")+";
      } else {
        out_ += '+';
      }
    }
    if (at_ < in_.size() && (in_[at_] == '*' || in_[at_] == '+' || in_[at_] == '?')) {
      out_.insert(atom_, "(?:");
      out_ += ')';
    }
  }

  /// The class of \s, \p{L}, ... at the backslash as ranges, and whether it is negated; false if
  /// there is none.
  bool take_set(std::string& ranges, bool& is_negated) {
    const char c = at_ + 1 < in_.size() ? in_[at_ + 1] : '\0';
    switch (c) {
      case 's':
      case 'S':
        ranges = where(kRegexSpace);
        break;
      case 'w':
      case 'W':
        ranges = where(kRegexWord);
        break;
      case 'd':
      case 'D':
        ranges = where(kRegexDigit);
        break;
      case 'h':
      case 'H':
        ranges = "0-9a-fA-F";
        break;
      case 'p':
      case 'P': {
        const size_t end = in_.find('}', at_);
        if (at_ + 2 >= in_.size() || in_[at_ + 2] != '{' || end == std::string_view::npos) {
          fail("\\p{...}");
        }
        std::string_view name = in_.substr(at_ + 3, end - at_ - 3);
        is_negated = c == 'P';
        if (name.starts_with('^')) {
          is_negated = !is_negated;
          name.remove_prefix(1);
        }
        ranges = of_category(name);
        at_ = end + 1;
        return true;
      }
      default:
        return false;
    }
    is_negated = c < 'a';
    at_ += 2;
    return true;
  }
  static std::string where(uint32_t property) {
    return ranges_where([&](uint32_t bits) { return (bits & property) != 0; });
  }
  std::string of_category(std::string_view name) {
    if (name == "Any") return "\\x{0}-\\x{10ffff}";
    const std::string ranges = ranges_where([&](uint32_t bits) {
      const std::string_view own = kCategories[bits & 31u];
      return own == name || (name.size() == 1 && own[0] == name[0]);
    });
    if (ranges.empty()) fail("a general category such as \\p{L} or \\p{Lu}");
    return ranges;
  }

  /// The character of an escape that stands for one.
  char32_t take_escaped() {
    ++at_;
    if (at_ >= in_.size()) fail("a character behind \\");
    switch (in_[at_]) {
      case 'n':
        ++at_;
        return '\n';
      case 'r':
        ++at_;
        return '\r';
      case 't':
        ++at_;
        return '\t';
      case 'f':
        ++at_;
        return '\f';
      case 'v':
        ++at_;
        return '\v';
      case 'a':
        ++at_;
        return '\a';
      case 'e':
        ++at_;
        return 0x1b;
      case 'x':
        ++at_;
        return take_hex(2);
      case 'u':
        ++at_;
        return take_hex(4);
      default:
        break;
    }
    const char32_t c = take_character();
    const bool is_word = c < 0x80 && std::isalnum(static_cast<int>(c)) != 0;
    if (is_word) {
      at_ -= 2;
      fail("an escape that is known");
    }
    return c;
  }
  char32_t take_hex(size_t num_digits) {
    const bool is_braced = takes("{");
    char32_t value = 0;
    size_t count = 0;
    for (; at_ < in_.size() && std::isxdigit(static_cast<unsigned char>(in_[at_])) != 0 &&
           count < (is_braced ? 8 : num_digits);
         ++at_, ++count) {
      const char c = in_[at_];
      value = value * 16 + static_cast<char32_t>(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
    }
    if (count == 0 || (is_braced && !takes("}"))) fail("hexadecimal digits");
    if (value >= kNumCodes || (value >= 0xd800 && value < 0xe000)) fail("a character's number");
    return value;
  }

  void escape() {
    std::string ranges;
    bool is_negated = false;
    if (take_set(ranges, is_negated)) {
      out_ += (is_negated ? "[^" : "[") + ranges + "]";
      return;
    }
    if (takes("\\A") || takes("\\z")) {
      out_ += in_.substr(at_ - 2, 2);
      atom_ = std::string::npos;
    } else if (takes("\\b") || takes("\\B")) {
      const std::string word = "[" + where(kRegexWord) + "]";
      const bool is_edge = in_[at_ - 1] == 'b';
      out_ += fmt::format("(?:(?<={0})(?{1}{0})|(?<!{0})(?{2}{0}))", word, is_edge ? '!' : '=',
                          is_edge ? '=' : '!');
      atom_ = std::string::npos;
    } else {
      out_ += literal(take_escaped());
    }
  }

  /// A class in brackets. Negated sets in it become their complements.
  std::string take_class() {
    ++at_;
    const std::string open = takes("^") ? "[^" : "[";
    return open + take_class_content() + "]";
  }
  /// What a class has up to its bracket, which is taken as well. A class in a class adds to it.
  std::string take_class_content() {
    std::string out;
    size_t depth = 0;  // of a class in a class, which adds to it: no call for each, however many
    bool is_first = true;
    for (;;) {
      if (at_ >= in_.size()) fail("']'");
      if (in_[at_] == ']' && !is_first) {
        ++at_;
        if (depth == 0) return out;
        --depth;
        continue;
      }
      const std::string_view rest = in_.substr(at_);
      if (rest.starts_with("[^") || rest.starts_with("[:") || rest.starts_with("&&")) {
        fail("a class without negated classes, names and &&");
      }
      if (rest[0] == '[') {
        ++at_;
        ++depth;
        is_first = true;
        continue;
      }
      is_first = false;
      if (in_[at_] == '\\') {
        std::string ranges;
        bool is_negated = false;
        if (take_set(ranges, is_negated)) {
          out += is_negated ? complement(ranges) : ranges;
          continue;
        }
      }
      const char32_t low = in_[at_] == '\\' ? take_escaped() : take_character();
      out += literal(low);
      if (at_ + 1 >= in_.size() || in_[at_] != '-' || in_[at_ + 1] == ']') continue;
      ++at_;
      const char32_t high = in_[at_] == '\\' ? take_escaped() : take_character();
      if (high < low) fail("a range that ascends");
      out += '-' + literal(high);
    }
  }
  /// Of ranges as `ranges_where` writes them.
  static std::string complement(const std::string& ranges) {
    std::string out;
    char32_t next = 0;
    const auto add = [&](char32_t end) {
      if (next < end) out += literal(next) + "-" + literal(end - 1);
    };
    for (size_t at = 0; at < ranges.size();) {
      const auto number = [&] {
        const bool is_plain = ranges[at] != '\\';
        const size_t end = is_plain ? at + 1 : ranges.find('}', at) + 1;
        const char32_t value =
            is_plain ? static_cast<char32_t>(ranges[at])
                     : static_cast<char32_t>(std::stoul(ranges.substr(at + 3), nullptr, 16));
        at = end;
        return value;
      };
      const char32_t low = number();
      char32_t high = low;
      if (at < ranges.size() && ranges[at] == '-') {
        ++at;
        high = number();
      }
      add(low);
      next = high + 1;
    }
    add(kNumCodes);
    return out;
  }

  const std::string_view in_;
  const std::string_view what_;
  size_t at_ = 0;
  std::string out_;
  size_t atom_ = std::string::npos;  // where in out_ what can be repeated begins
  std::vector<size_t> groups_;
};

}  // namespace

std::string translate_regex(std::string_view pattern, std::string_view what) {
  return Translator(pattern, what).run();
}

struct Regex::Code {
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;
  ~Code() {
    pcre2_match_context_free(context);
    pcre2_code_free(code);
  }
};

Regex::Regex(std::string_view pattern, std::string what)
    : code_(std::make_unique<Code>()), what_(std::move(what)) {
  constexpr size_t kMaxNbytes = 4096;
  if (pattern.size() > kMaxNbytes) {
    throw InputError(fmt::format("{}: a regular expression of {} bytes, expected at most {}", what_,
                                 pattern.size(), kMaxNbytes));
  }
  const std::string translated = translate_regex(pattern, what_);
  constexpr size_t kMaxTranslated = 4 << 20;
  if (translated.size() > kMaxTranslated) {
    throw InputError(
        fmt::format("{}: a regular expression with too many classes, expected fewer", what_));
  }
  int error = 0;
  size_t at = 0;
  auto* const compile = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(compile, PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(compile, 100);
  code_->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &at, compile);
  pcre2_compile_context_free(compile);
  if (code_->code == nullptr) {
    unsigned char text[256] = {};
    pcre2_get_error_message(error, text, sizeof text);
    throw InputError(fmt::format("{}: '{}' is no regular expression ({})", what_, shorten(pattern),
                                 reinterpret_cast<const char*>(text)));
  }
  pcre2_jit_compile(code_->code, PCRE2_JIT_COMPLETE);  // without it matching is slower
  code_->context = pcre2_match_context_create(nullptr);
  pcre2_set_match_limit(code_->context, kMaxSteps);
  pcre2_set_heap_limit(code_->context, 256 << 10);  // KiB
}
Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;

std::vector<std::pair<size_t, size_t>> Regex::find_all(std::string_view text) const {
  std::vector<std::pair<size_t, size_t>> found;
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(
      pcre2_match_data_create_from_pattern(code_->code, nullptr), pcre2_match_data_free);
  // A match may take a run of spaces as long as the text, and give all of it back.
  std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> own(
      nullptr, pcre2_match_context_free);
  constexpr size_t kLongNbytes = 1 << 18;
  if (text.size() > kLongNbytes) {
    own.reset(pcre2_match_context_copy(code_->context));
    pcre2_set_match_limit(own.get(), static_cast<uint32_t>(std::min<uint64_t>(
                                         UINT32_MAX, kMaxSteps + 16 * text.size())));
  }
  pcre2_match_context* const context = own == nullptr ? code_->context : own.get();
  const size_t* const ends = pcre2_get_ovector_pointer(data.get());
  size_t last_end = SIZE_MAX;
  for (size_t at = 0; at <= text.size();) {
    const auto search = [&](uint32_t options) {
      return pcre2_match(code_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                         options | PCRE2_NO_UTF_CHECK, data.get(), context);
    };
    ++counted_work();
    int status = search(0);
    if (status == PCRE2_ERROR_JIT_STACKLIMIT) status = search(PCRE2_NO_JIT);
    if (status == PCRE2_ERROR_NOMATCH) break;
    if (status < 0) {
      throw InputError(
          fmt::format("{}: matching at byte {} takes too much time or memory, expected "
                      "a simpler regular expression",
                      what_, at));
    }
    const size_t begin = ends[0], end = ends[1];
    if (begin == end) {
      if (begin != last_end) found.emplace_back(begin, end);
      at = end + (end < text.size() ? utf8_nbytes(text[end]) : 1);
      last_end = begin == last_end ? last_end : end;
      continue;
    }
    found.emplace_back(begin, end);
    at = last_end = end;
  }
  return found;
}

}  // namespace tessera::text
