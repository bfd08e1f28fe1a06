#include "core/glob.h"

#include <cstddef>

namespace tessera {
namespace {

/// One step of a pattern, which one byte meets or does not.
struct Step {
  size_t length;  // in the pattern
  bool is_met;
};

Step bracket(std::string_view pattern, unsigned char byte) {
  const bool is_negated = pattern.size() > 1 && (pattern[1] == '!' || pattern[1] == '^');
  const size_t first = is_negated ? 2 : 1;
  const size_t close = pattern.find(']', first + 1);  // one that comes first stands for itself
  if (close == std::string_view::npos) return {1, byte == '['};
  bool is_in = false;
  for (size_t i = first; i < close; ++i) {
    const auto low = static_cast<unsigned char>(pattern[i]);
    const bool is_range = i + 2 < close && pattern[i + 1] == '-';
    const auto high = is_range ? static_cast<unsigned char>(pattern[i + 2]) : low;
    is_in = is_in || (low <= byte && byte <= high);
    if (is_range) i += 2;
  }
  return {close + 1, is_in != is_negated};
}

Step step(std::string_view pattern, char byte) {
  if (pattern[0] == '?') return {1, true};
  if (pattern[0] == '[') return bracket(pattern, static_cast<unsigned char>(byte));
  return {1, pattern[0] == byte};
}

}  // namespace

bool matches_glob(std::string_view text, std::string_view pattern) {
  constexpr size_t kNone = std::string_view::npos;
  size_t t = 0, p = 0;
  // After the last `*`, and how far it reaches. What an earlier one takes need never change: any
  // match that goes on from there goes on from the last one too.
  size_t star = kNone, star_end = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = ++p, star_end = t;
      continue;
    }
    const Step next = p < pattern.size() ? step(pattern.substr(p), text[t]) : Step{0, false};
    if (next.is_met) {
      ++t, p += next.length;
    } else if (star != kNone) {
      t = ++star_end, p = star;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace tessera
