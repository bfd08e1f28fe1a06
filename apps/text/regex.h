#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::text {

/// A regular expression as Hugging Face's tokenizers reads it (Oniguruma's syntax), matched by
/// PCRE2 with its classes of characters taken from our tables: literals, . ^ $ | ( ) and groups
/// (?: ?= ?! ?<= ?<! ?> ?i), [...] with ranges, escapes and classes, * + ? {n,m} with ? or + behind
/// them, \s \S \w \W \d \D \h \b \B \A \z \n \r \t \f \v \a \e \x \u, \p{L} and the other
/// general categories.
/// Time     PCRE2's: not linear for every expression; its limits of steps and memory are an error
/// Threads  any number may search with one
class Regex {
 public:
  /// Errors   InputError that begins with `what` for what is not of that syntax
  Regex(std::string_view pattern, std::string what);
  ~Regex();
  Regex(Regex&&) noexcept;

  /// (begin, end) of the matches in a valid text from left to right, also of empty ones but for
  /// those right behind another match.
  /// Errors   InputError if PCRE2 gives up
  std::vector<std::pair<size_t, size_t>> find_all(std::string_view text) const;

 private:
  struct Code;
  std::unique_ptr<Code> code_;
  std::string what_;
};

/// The same expression in PCRE2's syntax with our classes (for tests and messages).
std::string translate_regex(std::string_view pattern, std::string_view what);

}  // namespace tessera::text
