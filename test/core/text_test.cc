#include "core/text.h"

#include <vector>

#include "core/split.h"
#include "test/testing.h"

namespace tessera {

TEST_CASE("text: lists are split at separators, without the spaces around", "[text]") {
  using Parts = std::vector<std::string_view>;
  CHECK(split(" a b, c ,,d") == Parts{"a b", "c", "", "d"});
  CHECK(split("a,") == Parts{"a", ""});
  CHECK(split("") == Parts{""});
  CHECK(split("x.1.y", '.') == Parts{"x", "1", "y"});
  CHECK(names_in(" a,, b , ") == Parts{"a", "b"});
  CHECK(names_in("").empty());
}

TEST_CASE("text: what steers a terminal is escaped, what is printable stays", "[text]") {
  CHECK(printable("weight \"a\\b\" äöü 中 😀") == "weight \"a\\b\" äöü 中 😀");
  CHECK(printable("a\x1b[2Jb\nc\rd\te\x7f") == "a\\x1b[2Jb\\nc\\rd\\te\\x7f");
  CHECK(printable(std::string("a\0b", 3)) == "a\\x00b");
  CHECK(printable("\xc2\x9b"
                  "31m") == "\\u009b31m");  // a control sequence of one character
  CHECK(printable("\xff\xc3") == "\\xff\\xc3");
  CHECK(printable("\xe2\x80\xae"
                  "a\xe2\x80\xa8") == "\\u202ea\\u2028");
  CHECK(printable("a\nb\tc\x1b", "\n\t") == "a\nb\tc\\x1b");
  const std::string once = printable("\\n \x1b \xff \n");
  CHECK(printable(once) == once);
}

TEST_CASE("text: lines of a message that begin at the left are escaped", "[text]") {
  CHECK(printable_message("out of memory\n  class  now\n  total  2\n") ==
        "out of memory\n  class  now\n  total  2");
  CHECK(printable_message("no tensor a\nerror: b") == "no tensor a\\nerror: b");
  CHECK(printable_message("no tensor a\n error: b\r\n  c") == "no tensor a\\n error: b\\r\n  c");
}

TEST_CASE("text: what comes in pieces is shown when its characters are whole", "[text]") {
  // e with acute, euro, an emoji; an escape; half of a character before another one and at the end.
  const std::string text = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82\x1b[2J\t\xe2\x82z\xf0\x9f";
  const std::string shown = printable(text, "\t");
  for (const size_t length : {1, 2, 3, 5, 100}) {
    CAPTURE(length);
    PrintableStream stream("\t");
    std::string all;
    for (size_t at = 0; at < text.size(); at += length) all += stream.add(text.substr(at, length));
    CHECK(all + stream.finish() == shown);
  }
  CHECK(shown.ends_with("\\x1b[2J\t\\xe2\\x82z\\xf0\\x9f"));
  PrintableStream stream("");
  CHECK(stream.add("\xe2") == "");
  CHECK(stream.add("\x82") == "");
  CHECK(stream.add("\xac") == "\xe2\x82\xac");
  CHECK(stream.add("\xc0") == "\\xc0");           // begins nothing
  CHECK(stream.add("\xed\xa0") == "\\xed\\xa0");  // half a surrogate
}

TEST_CASE("text: long names keep their beginning and end", "[text]") {
  CHECK(shorten("abc", 3) == "abc");
  CHECK(shorten("abcdefghijkl", 6) == "abcd[... 6 bytes ...]kl");
  CHECK(shorten(std::string(1000, 'x')).size() < kMaxShown + 30);
  // At characters: each has two bytes.
  CHECK(shorten("ääääääää", 9) == "äää[... 8 bytes ...]ä");
  CHECK(shorten(std::string(100, '\x80'), 10).size() < 40);
}

TEST_CASE("text: a list shows a few and counts the rest", "[text]") {
  const std::vector<std::string> names = {"a", "b", "c", "d"};
  CHECK(join_few(names) == "a, b, c, d");
  CHECK(join_few(names, "; ", 2) == "a; b and 2 more");
  CHECK(join_few(names, ", ", 4) == "a, b, c, d");
  CHECK(join_few(std::vector<std::string_view>{}).empty());
  CHECK(join_few(std::vector<int>{3, 5}) == "3, 5");
  const std::string long_list = join_few(std::vector<std::string>(5000, std::string(5000, 'x')));
  CHECK(long_list.size() < kMaxListShown + 50);
  CHECK(long_list.ends_with("x and 4998 more"));
  // What does not fit ends the list: nothing of it is left out in between.
  const std::vector<std::string> mixed = {std::string(190, 'a'), std::string(190, 'b'),
                                          std::string(190, 'c'), std::string(190, 'd'), "e"};
  CHECK(join_few(mixed).ends_with("c and 2 more"));
}

}  // namespace tessera
