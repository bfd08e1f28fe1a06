#include "core/glob.h"

#include <fnmatch.h>

#include <random>
#include <string>

#include "test/testing.h"

namespace tessera {

TEST_CASE("glob: a pattern matches what fnmatch says", "[glob]") {
  std::mt19937 random(1);
  const auto draw = [&random](std::string_view letters, size_t max_length) {
    std::string text(random() % (max_length + 1), ' ');
    for (char& c : text) c = letters[random() % letters.size()];
    return text;
  };
  int num_matches = 0;
  for (int i = 0; i < 100000; ++i) {
    const std::string text = draw("abc]-", 8), pattern = draw("abc*?[]-!^", 10);
    CAPTURE(text, pattern);
    const bool expected = ::fnmatch(pattern.c_str(), text.c_str(), FNM_NOESCAPE) == 0;
    num_matches += expected ? 1 : 0;
    if (matches_glob(text, pattern) != expected) CHECK(matches_glob(text, pattern) == expected);
  }
  CHECK(num_matches > 1000);
}

TEST_CASE("glob: many stars end as soon as few", "[glob]") {
  // Where each star tries each place, this is more than 10^30 of them.
  std::string pattern;
  for (int i = 0; i < 60; ++i) pattern += "*a";
  CHECK(!matches_glob(std::string(200, 'a'), pattern + "b"));
  CHECK(matches_glob(std::string(200, 'a'), pattern));
  CHECK(!matches_glob(std::string(59, 'a'), pattern));
}

}  // namespace tessera
