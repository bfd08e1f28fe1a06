#include "core/utf8.h"

#include "core/text.h"
#include "test/testing.h"

using namespace tessera;

TEST_CASE("utf8: the first byte that is in no character is found wherever it is", "[utf8]") {
  for (const std::string bad : {"\xff", "\xc3", "\xe2\x82", "\xf0\x9f\x98", "\xc0\xaf",
                                "\xed\xa0\x80", "\xf4\x90\x80\x80", "\x80", "\xe0\x80\x80"}) {
    for (size_t before = 0; before < 70; ++before) {
      for (const std::string tail : {"", "x", "\xc3\xa9 and more than thirty-two bytes of it"}) {
        INFO(printable(bad) << " behind " << before);
        const std::string text = std::string(before, 'a') + "\xe2\x82\xac" + bad + tail;
        CHECK(find_invalid_utf8(text) == before + 3);
      }
    }
  }
  const std::string good = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xed\x9f\xbf\xf4\x8f\xbf\xbf";
  CHECK(find_invalid_utf8(good) == good.size());
  CHECK(find_invalid_utf8("") == 0);
}

TEST_CASE("utf8: what begins a character is replaced as one, other bytes alone", "[utf8]") {
  const std::string r = "\xef\xbf\xbd";
  // As bytes.decode("utf-8", errors="replace") of Python 3.11.
  CHECK(replace_invalid_utf8("a\xff\xfe"
                             "b") == "a" + r + r + "b");
  CHECK(replace_invalid_utf8("\xe2\x82x") == r + "x");
  CHECK(replace_invalid_utf8("\xf0\x9f\x98") == r);
  CHECK(replace_invalid_utf8("\xed\xa0\x80") == r + r + r);
  CHECK(replace_invalid_utf8("\xe0\x80\x80") == r + r + r);
  CHECK(replace_invalid_utf8("\xc0\xaf") == r + r);
  CHECK(replace_invalid_utf8("\xf4\x90\x80\x80") == r + r + r + r);
  CHECK(replace_invalid_utf8("\xc3\xc3\xa9") == r + "\xc3\xa9");
  CHECK(replace_invalid_utf8("\xf1\x80\x80\xe1\x80\xc2") == r + r + r);
  CHECK(replace_invalid_utf8("whole") == "whole");
}

TEST_CASE("utf8: a code point is written as the bytes that are read as it", "[utf8]") {
  std::string text;
  for (const char32_t code : {0x24, 0x7f, 0x80, 0x7ff, 0x800, 0xffff, 0x10000, 0x10ffff}) {
    append_utf8(text, code);
  }
  CHECK(text == "$\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80\xef\xbf\xbf\xf0\x90\x80\x80\xf4\x8f\xbf\xbf");
  CHECK(find_invalid_utf8(text) == text.size());
}
