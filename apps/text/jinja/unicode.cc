#include "apps/text/jinja/unicode.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "apps/text/jinja/meter.h"

namespace tessera::text::jinja {
namespace {

struct PropertyRun {
  char32_t first;
  uint16_t properties;
};
/// Every `stride`th character from first to last is mapped to itself + delta.
struct CaseRun {
  char32_t first, last;
  int stride, delta;
};
struct CaseSpecial {
  char32_t from;
  const char32_t* to;
};

#include "apps/text/jinja/unicode_tables.inc"

/// Of ASCII, the letters from `first_ascii` on are mapped.
struct CaseTable {
  char32_t first_ascii;
  const CaseRun *runs, *runs_end;
  const CaseSpecial *special, *special_end;
};

template <size_t N, size_t M>
constexpr CaseTable table_of(char first_ascii, const CaseRun (&runs)[N],
                             const CaseSpecial (&special)[M]) {
  return {static_cast<char32_t>(first_ascii), runs, runs + N, special, special + M};
}

constexpr CaseTable kUpper = table_of('a', kUpperRuns, kUpperSpecial);
constexpr CaseTable kLower = table_of('A', kLowerRuns, kLowerSpecial);
constexpr CaseTable kTitle = table_of('a', kTitleRuns, kTitleSpecial);
constexpr CaseTable kFold = table_of('A', kFoldRuns, kFoldSpecial);
constexpr CaseTable kSame = {0x80, nullptr, nullptr, nullptr, nullptr};

/// A search counts as an operation: texts that have nothing but such characters take their time.
void append_mapped(std::string& out, const CaseTable& table, char32_t c) {
  if (c < 0x80) {
    const bool is_mapped = c >= table.first_ascii && c < table.first_ascii + 26;
    out += static_cast<char>(is_mapped ? c ^ 0x20u : c);
    return;
  }
  count_steps(1);
  const CaseSpecial* special =
      std::lower_bound(table.special, table.special_end, c,
                       [](const CaseSpecial& each, char32_t key) { return each.from < key; });
  if (special != table.special_end && special->from == c) {
    for (const char32_t* to = special->to; *to != 0; ++to) append_char(out, *to);
    return;
  }
  const CaseRun* run =
      std::upper_bound(table.runs, table.runs_end, c,
                       [](char32_t key, const CaseRun& each) { return key < each.first; });
  if (run != table.runs) {
    --run;
    if (c <= run->last && (c - run->first) % static_cast<char32_t>(run->stride) == 0) {
      c = static_cast<char32_t>(static_cast<int64_t>(c) + run->delta);
    }
  }
  append_char(out, c);
}

uint16_t find_properties(char32_t c) {
  const PropertyRun* run =
      std::upper_bound(std::begin(kPropertyRuns), std::end(kPropertyRuns), c,
                       [](char32_t key, const PropertyRun& each) { return key < each.first; });
  return (run - 1)->properties;
}

constexpr char32_t kSigma = 0x3a3, kFinalSigma = 0x3c2, kSmallSigma = 0x3c3;

/// Whether the sigma at [begin, end) ends a word: a cased character before it and none after it,
/// without those that are ignored.
bool is_final_sigma(std::string_view text, size_t begin, size_t end) {
  bool is_after_cased = false;
  for (size_t at = begin; at > 0;) {
    const uint16_t properties = properties_of(previous_char(text, at));
    if ((properties & kIsCaseIgnorable) != 0) continue;
    is_after_cased = (properties & kIsCased) != 0;
    break;
  }
  if (!is_after_cased) return false;
  for (size_t at = end; at < text.size();) {
    const uint16_t properties = properties_of(next_char(text, at));
    if ((properties & kIsCaseIgnorable) != 0) continue;
    return (properties & kIsCased) == 0;
  }
  return true;
}

/// Appends the character [begin, end) of `text` in lower case.
void append_lower(std::string& out, std::string_view text, size_t begin, size_t end, char32_t c) {
  if (c == kSigma) {
    append_char(out, is_final_sigma(text, begin, end) ? kFinalSigma : kSmallSigma);
  } else {
    append_mapped(out, kLower, c);
  }
}

/// Calls f(character, begin, end) for each.
template <class F>
void for_each_char(std::string_view text, const F& f) {
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_char(text, at);
    f(c, begin, at);
  }
}

}  // namespace

uint16_t properties_of(char32_t c) {
  static const auto kAscii = [] {
    std::array<uint16_t, 128> table;
    for (char32_t each = 0; each < 128; ++each) table[each] = find_properties(each);
    return table;
  }();
  if (c < 128) return kAscii[c];
  count_steps(1);
  return find_properties(c);
}

int decimal_value(char32_t c) {
  if (c < 0x80) return c >= '0' && c <= '9' ? static_cast<int>(c - '0') : -1;
  const char32_t* zero = std::upper_bound(std::begin(kDecimalZeros), std::end(kDecimalZeros), c);
  const char32_t value = c - *(zero - 1);
  return value < 10 ? static_cast<int>(value) : -1;
}

char32_t next_char(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const unsigned first = byte(at);
  const int num_tail = first < 0x80 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
  char32_t c = num_tail == 0 ? first : first & (0x3fu >> num_tail);
  for (int i = 1; i <= num_tail; ++i) c = (c << 6) | (byte(at + static_cast<size_t>(i)) & 0x3fu);
  at = std::min(text.size(), at + 1 + static_cast<size_t>(num_tail));
  return c;
}

char32_t previous_char(std::string_view text, size_t& at) {
  do {
    --at;
  } while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0u) == 0x80u);
  size_t end = at;
  return next_char(text, end);
}

void append_char(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xc0 | (c >> 6));
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xe0 | (c >> 12));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else {
    out += static_cast<char>(0xf0 | (c >> 18));
    out += static_cast<char>(0x80 | ((c >> 12) & 0x3f));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  }
}

size_t count_chars(std::string_view text) {
  size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xc0u) != 0x80u ? 1 : 0;
  return count;
}

size_t byte_of_char(std::string_view text, size_t index, bool is_ascii) {
  if (is_ascii) return std::min(index, text.size());
  size_t at = 0;
  for (; index > 0 && at < text.size(); --index) next_char(text, at);
  return at;
}

std::string to_upper(std::string_view text) {
  std::string out;
  for_each_char(text, [&](char32_t c, size_t, size_t) { append_mapped(out, kUpper, c); });
  return out;
}

std::string to_lower(std::string_view text) {
  std::string out;
  for_each_char(
      text, [&](char32_t c, size_t begin, size_t end) { append_lower(out, text, begin, end, c); });
  return out;
}

std::string to_casefold(std::string_view text) {
  std::string out;
  for_each_char(text, [&](char32_t c, size_t, size_t) { append_mapped(out, kFold, c); });
  return out;
}

std::string swap_case(std::string_view text) {
  std::string out;
  for_each_char(text, [&](char32_t c, size_t begin, size_t end) {
    const uint16_t properties = properties_of(c);
    if ((properties & kIsUpper) != 0) {
      append_lower(out, text, begin, end, c);
    } else {
      append_mapped(out, (properties & kIsLower) != 0 ? kUpper : kSame, c);
    }
  });
  return out;
}

std::string to_title(std::string_view text) {
  std::string out;
  bool is_in_word = false;
  for_each_char(text, [&](char32_t c, size_t begin, size_t end) {
    if (is_in_word) {
      append_lower(out, text, begin, end, c);
    } else {
      append_mapped(out, kTitle, c);
    }
    is_in_word = has_property(c, kIsCased);
  });
  return out;
}

std::string capitalize(std::string_view text) {
  std::string out;
  for_each_char(text, [&](char32_t c, size_t begin, size_t end) {
    if (begin == 0) {
      append_mapped(out, kTitle, c);
    } else {
      append_lower(out, text, begin, end, c);
    }
  });
  return out;
}

}  // namespace tessera::text::jinja
