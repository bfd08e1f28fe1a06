#include "apps/text/regex.h"

#include "test/testing.h"

using namespace tessera;
using namespace tessera::text;
using tessera::testing::error_of;

using Matches = std::vector<std::pair<size_t, size_t>>;

namespace {

Matches find(std::string_view pattern, std::string_view text) {
  return Regex(pattern, "r").find_all(text);
}

}  // namespace

TEST_CASE("regex: lines begin and end where Oniguruma has them", "[text]") {
  CHECK(find("a$", "a\nba") == Matches{{0, 1}, {3, 4}});
  CHECK(find("^a", "a\naa") == Matches{{0, 1}, {2, 3}});
  CHECK(find(".", "a\nb") == Matches{{0, 1}, {2, 3}});
}

TEST_CASE("regex: a repetition in braces with + behind repeats what is repeated", "[text]") {
  CHECK(find("a{1,2}+", "aaaaa") == Matches{{0, 5}});
  CHECK(find("(?:ab){1,2}+c", "abababc") == Matches{{0, 7}});
  CHECK(find("a{2}?", "aaaa") == Matches{{0, 2}, {2, 4}});
  CHECK(find("a++b|a", "aab a") == Matches{{0, 3}, {4, 5}});
}

TEST_CASE("regex: empty matches count, but not right behind another", "[text]") {
  CHECK(find("b*", "abba") == Matches{{0, 0}, {1, 3}, {4, 4}});
}

TEST_CASE("regex: a class in a class adds to it", "[text]") {
  CHECK(find("[a[b-c\\d]x]+", "-ab7xc-[]") == Matches{{1, 6}});
  // As BLOOM has it.
  CHECK(find(" ?[^(\\s|[.,])]+", "a[b].c (d)|e,") == Matches{{0, 4}, {5, 6}, {8, 9}, {11, 12}});
  // However deep.
  const std::string open(2000, '['), close(2000, ']');
  CHECK(find(open + "ab" + close, "xbax") == Matches{{1, 2}, {2, 3}});
  CHECK(error_of([&] { find(open, ""); }).find("expected ']'") != std::string::npos);
}

TEST_CASE("regex: cases fold beyond ASCII", "[text]") {
  CHECK(find("(?i:'s)", "'S '\xc5\xbf 's") == Matches{{0, 2}, {3, 6}, {7, 9}});
}

TEST_CASE("regex: what is not of the syntax is named with its place", "[text]") {
  const auto message = [](const char* pattern) {
    return error_of([&] { Regex(pattern, "f: k"); });
  };
  CHECK(message("a\\q") ==
        "f: k: '\\q' at byte 1 of the regular expression, expected an escape that is known");
  CHECK(message("\\p{Greek}") ==
        "f: k: '\\p{Greek}' at byte 0 of the regular expression, expected a general category such "
        "as \\p{L} or \\p{Lu}");
  CHECK(message("[a[^b]]") ==
        "f: k: '[^b]]' at byte 2 of the regular expression, expected a class without negated "
        "classes, names and &&");
  CHECK(message("[a&&b]").find("f: k: '&&b]' at byte 2 of the regular expression, expected") == 0);
  CHECK(message("[a[:alpha:]]").find("f: k: '[:alpha:]]' at byte 2 of the regular expr") == 0);
  CHECK(message("[a[b") == "f: k: '' at byte 4 of the regular expression, expected ']'");
  CHECK(message("[a") == "f: k: '' at byte 2 of the regular expression, expected ']'");
  CHECK(message("a)") ==
        "f: k: ')' at byte 1 of the regular expression, expected no ')' without '('");
  CHECK(message("*") ==
        "f: k: '*' at byte 0 of the regular expression, expected something to repeat");
  CHECK(
      message("(?<n>a)") ==
      "f: k: '(?<n>a)' at byte 0 of the regular expression, expected a group (?:, (?=, (?!, (?<=, "
      "(?<!, (?>, (?i: or (");
  CHECK(message("[b-a]") ==
        "f: k: ']' at byte 4 of the regular expression, expected a range that ascends");
  CHECK(message("\\x{110000}") ==
        "f: k: '' at byte 10 of the regular expression, expected a character's number");
  CHECK(error_of([&] { Regex(std::string(5000, 'a'), "f: k"); }) ==
        "f: k: a regular expression of 5000 bytes, expected at most 4096");
}

TEST_CASE("regex: a run as long as the text may be given back", "[text]") {
  const std::string spaces(11'000'000, ' ');
  CHECK(find("\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", spaces) == Matches{{0, spaces.size()}});
}

TEST_CASE("regex: an expression that takes too long is an error", "[text]") {
  CHECK(
      error_of([] { find("(?:a|aa)+[^a]", std::string(200, 'a')); }) ==
      "r: matching at byte 0 takes too much time or memory, expected a simpler regular expression");
}
