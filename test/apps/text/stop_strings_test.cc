#include "apps/text/stop_strings.h"

#include "test/testing.h"

namespace tessera::text {
namespace {

/// The text that comes out, whatever the pieces.
std::string shown(const std::vector<std::string>& stops, std::string_view text, size_t piece,
                  bool* is_found) {
  StopStrings filter(stops);
  std::string out;
  for (size_t at = 0; at < text.size(); at += piece) out += filter.add(text.substr(at, piece));
  *is_found = filter.is_found();
  return out + filter.finish();
}

TEST_CASE("StopStrings: the text up to the first of them, in pieces of any size", "[text]") {
  bool is_found = false;
  for (const size_t piece : {1, 2, 3, 5, 100}) {
    CAPTURE(piece);
    CHECK(shown({"\n\n", "END"}, "a\nb EN\n\nc END", piece, &is_found) == "a\nb EN");
    CHECK(is_found);
    CHECK(shown({"END", "D"}, "a EN b", piece, &is_found) == "a EN b");
    CHECK_FALSE(is_found);
    CHECK(shown({"aab"}, "aaab", piece, &is_found) == "a");
    CHECK(is_found);
    CHECK(shown({"", "x"}, "abc", piece, &is_found) == "abc");
    CHECK_FALSE(is_found);
    CHECK(shown({}, "abc", piece, &is_found) == "abc");
    CHECK(shown({"bcd", "c"}, "abcd", piece, &is_found) == "ab");  // complete before the other
    CHECK(shown({"d", "cd", "bcde"}, "abcde", piece, &is_found) == "ab");
  }
}

TEST_CASE("StopStrings: what may begin one waits", "[text]") {
  StopStrings filter({"stop"});
  CHECK(filter.add("ab s") == "ab ");
  CHECK(filter.add("t") == "");
  CHECK(filter.add("ar") == "star");
  CHECK(filter.add("sto") == "");
  CHECK(filter.finish() == "sto");
  CHECK_FALSE(filter.is_found());
}

}  // namespace
}  // namespace tessera::text
