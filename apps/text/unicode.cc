#include "apps/text/unicode.h"

#include <immintrin.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <vector>

#include "apps/text/unicode_data.h"

namespace tessera::text {
namespace {

using namespace unicode_data;

constexpr char32_t kNumCodes = 0x110000;
constexpr char32_t kHangulBase = 0xac00, kHangulCount = 11172;
constexpr char32_t kLeadBase = 0x1100, kLeadCount = 19;
constexpr char32_t kVowelBase = 0x1161, kVowelCount = 21;
constexpr char32_t kTailBase = 0x11a7, kTailCount = 28;

/// Code point -> where its entry (code point, n, ...) is in an array of such.
using Entries = std::unordered_map<char32_t, const uint32_t*>;

Entries entries_of(const uint32_t* array, size_t count) {
  Entries entries;
  for (size_t i = 0; i < count; i += 2 + array[i + 1]) entries.emplace(array[i], array + i + 1);
  return entries;
}

struct FormTables {
  Entries canonical = entries_of(kCanonical, kCanonicalCount);
  Entries compatible = entries_of(kCompatible, kCompatibleCount);
  std::unordered_map<char32_t, uint8_t> classes;  // of those that are no starters
  std::unordered_map<uint64_t, char32_t> pairs;

  FormTables() {
    for (size_t i = 0; i < kClassRunsCount; i += 2) {
      if (kClassRuns[i + 1] == 0) continue;
      const char32_t end = i + 2 < kClassRunsCount ? kClassRuns[i + 2] : kNumCodes;
      for (char32_t c = kClassRuns[i]; c < end; ++c) {
        classes.emplace(c, static_cast<uint8_t>(kClassRuns[i + 1]));
      }
    }
    for (size_t i = 0; i < kPairsCount; i += 3) {
      pairs.emplace(uint64_t{kPairs[i]} << 32 | kPairs[i + 1], kPairs[i + 2]);
    }
  }
  uint8_t class_of(char32_t c) const {
    const auto found = classes.find(c);
    return found == classes.end() ? 0 : found->second;
  }
  /// What the two are composed to, or 0.
  char32_t compose(char32_t a, char32_t b) const {
    if (a - kLeadBase < kLeadCount && b - kVowelBase < kVowelCount) {
      return kHangulBase + ((a - kLeadBase) * kVowelCount + (b - kVowelBase)) * kTailCount;
    }
    if (a - kHangulBase < kHangulCount && (a - kHangulBase) % kTailCount == 0 &&
        b - kTailBase - 1 < kTailCount - 1) {
      return a + (b - kTailBase);
    }
    const auto found = pairs.find(uint64_t{a} << 32 | b);
    return found == pairs.end() ? 0 : found->second;
  }
};

const FormTables& form_tables() {
  static const FormTables tables;
  return tables;
}

struct BuiltProperties : detail::PropertyTables {
  std::vector<uint8_t> all;

  BuiltProperties() {
    std::vector<uint8_t> flat(kNumCodes);
    for (size_t i = 0; i < kPropertyRunsCount; i += 2) {
      const char32_t end = i + 2 < kPropertyRunsCount ? kPropertyRuns[i + 2] : kNumCodes;
      std::fill(flat.begin() + kPropertyRuns[i], flat.begin() + end,
                static_cast<uint8_t>(kPropertyRuns[i + 1]));
    }
    size_t num_kinds = kPropertyKindsCount;
    for (size_t i = 0; i < num_kinds; ++i) bits[i] = kPropertyKinds[i] | derived(kPropertyKinds[i]);
    std::map<uint8_t, uint8_t> marked;  // the same kind with kNotNfc
    const auto mark = [&](char32_t c) {
      if ((bits[flat[c]] & kNotNfc) != 0) return;
      const auto [found, is_new] = marked.emplace(flat[c], static_cast<uint8_t>(num_kinds));
      if (is_new) bits[num_kinds++] = bits[flat[c]] | kNotNfc;
      flat[c] = found->second;
    };
    const FormTables& forms = form_tables();
    for (const auto& [c, entry] : forms.canonical) mark(c);  // some are composed to others
    for (const auto& [c, value] : forms.classes) mark(c);
    for (const auto& [pair, c] : forms.pairs) mark(static_cast<char32_t>(pair & 0xffffffffu));
    for (char32_t i = 0; i < kVowelCount; ++i) mark(kVowelBase + i);
    for (char32_t i = 1; i < kTailCount; ++i) mark(kTailBase + i);
    // A composed character is what composing makes of it, if none of these follows.
    for (const auto& [pair, c] : forms.pairs) unmark(c, flat, marked);
    compress(flat);
  }

 private:
  static uint32_t derived(uint32_t bits) {
    const auto category = static_cast<Category>(bits & 31u);
    const bool is_mark = category >= Category::kMn && category <= Category::kMe;
    const bool is_both = category == Category::kLm || category == Category::kLo || is_mark;
    uint32_t more = 0;
    if (category <= Category::kLo) more |= kLetter;
    if (category >= Category::kNd && category <= Category::kNo) more |= kNumber;
    if (is_both || category == Category::kLu || category == Category::kLt) more |= kUpper;
    if (is_both || category == Category::kLl) more |= kLower;
    return more;
  }
  /// Takes kNotNfc back unless the character is a mark or the second of a pair.
  static void unmark(char32_t c, std::vector<uint8_t>& flat,
                     const std::map<uint8_t, uint8_t>& marked) {
    const FormTables& forms = form_tables();
    if (forms.class_of(c) != 0 || is_second(c)) return;
    for (const auto& [plain, with] : marked) {
      if (flat[c] == with) flat[c] = plain;
    }
  }
  static bool is_second(char32_t c) {
    static const std::vector<char32_t> seconds = [] {
      std::vector<char32_t> all;
      for (size_t i = 0; i < kPairsCount; i += 3) all.push_back(kPairs[i + 1]);
      std::sort(all.begin(), all.end());
      return all;
    }();
    return std::binary_search(seconds.begin(), seconds.end(), c);
  }
  void compress(const std::vector<uint8_t>& flat) {
    std::map<std::string_view, uint16_t> numbers;
    for (size_t i = 0; i < kNumCodes / 128; ++i) {
      const std::string_view bytes(reinterpret_cast<const char*>(flat.data()) + i * 128, 128);
      const auto [found, is_new] = numbers.emplace(bytes, static_cast<uint16_t>(numbers.size()));
      block[i] = found->second;
      if (is_new) all.insert(all.end(), bytes.begin(), bytes.end());
    }
    kinds = all.data();
  }
};

/// Full decomposition, appended with marks in their order.
void decompose(std::u32string& out, char32_t c, bool is_compatible) {
  if (c < 0x80) {
    out += c;
    return;
  }
  const FormTables& forms = form_tables();
  if (c - kHangulBase < kHangulCount) {
    const char32_t index = c - kHangulBase, tail = index % kTailCount;
    out += kLeadBase + index / (kVowelCount * kTailCount);
    out += kVowelBase + index / kTailCount % kVowelCount;
    if (tail != 0) out += kTailBase + tail;
    return;
  }
  const uint32_t* entry = nullptr;
  if (is_compatible) {
    const auto found = forms.compatible.find(c);
    if (found != forms.compatible.end()) entry = found->second;
  }
  if (entry == nullptr) {
    const auto found = forms.canonical.find(c);
    if (found != forms.canonical.end()) entry = found->second;
  }
  if (entry == nullptr) {
    out += c;
  } else {
    out.append(entry + 1, entry + 1 + *entry);
  }
}

/// Marks after one starter, in the order of their classes.
void order_marks(std::u32string& text) {
  const FormTables& forms = form_tables();
  for (size_t begin = 0; begin < text.size();) {
    if (text[begin] < 0x300 || forms.class_of(text[begin]) == 0) {
      ++begin;
      continue;
    }
    size_t end = begin + 1;
    while (end < text.size() && forms.class_of(text[end]) != 0) ++end;
    std::stable_sort(text.begin() + static_cast<std::ptrdiff_t>(begin),
                     text.begin() + static_cast<std::ptrdiff_t>(end),
                     [&](char32_t a, char32_t b) { return forms.class_of(a) < forms.class_of(b); });
    begin = end;
  }
}

void compose(std::u32string& text) {
  const FormTables& forms = form_tables();
  size_t out = 0, starter = SIZE_MAX;
  int last_class = -1;  // of what follows the starter; -1: nothing does
  for (const char32_t c : text) {
    const int own = c < 0x300 ? 0 : forms.class_of(c);
    if (starter != SIZE_MAX && last_class < own) {
      const char32_t both = forms.compose(text[starter], c);
      if (both != 0) {
        text[starter] = both;
        continue;
      }
    }
    if (own == 0) {
      starter = out;
      last_class = -1;
    } else {
      last_class = own;
    }
    text[out++] = c;
  }
  text.resize(out);
}

}  // namespace

const detail::PropertyTables& detail::property_tables() {
  static const BuiltProperties tables;
  return tables;
}

void append_lower(std::string& out, char32_t c) {
  static const Entries lower = entries_of(kLowerCases, kLowerCasesCount);
  if (c < 0x80) {
    out += static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
    return;
  }
  const auto found = lower.find(c);
  if (found == lower.end()) {
    append_utf8(out, c);
  } else {
    for (uint32_t i = 1; i <= *found->second; ++i) append_utf8(out, found->second[i]);
  }
}

bool is_surely_normal(std::string_view text, NormalForm form) {
  const Properties properties;
  const char* p = text.data();
  const char* const end = p + text.size();
  while (p < end) {
    while (end - p >= 16 &&
           _mm_movemask_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))) == 0) {
      p += 16;
    }
    if (p == end) break;
    const char32_t c = utf8_decode(p);
    p += utf8_nbytes(*p);
    if (c >= 0x80 && (form != NormalForm::kNfc || (properties(c) & kNotNfc) != 0)) return false;
  }
  return true;
}

std::string normal_form(std::string_view text, NormalForm form) {
  const bool is_compatible = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  const bool is_composed = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  constexpr size_t kPieceNbytes = 1 << 16;
  std::string out;
  out.reserve(text.size());
  // In pieces that end before an ASCII character, which neither changes nor is composed with what
  // stands before it, so that the memory stays small.
  for (size_t begin = 0; begin < text.size();) {
    size_t end = std::min(text.size(), begin + kPieceNbytes);
    while (end < text.size() && static_cast<unsigned char>(text[end]) >= 0x80) ++end;
    std::u32string codes;
    codes.reserve(end - begin);
    for_each_character(text.substr(begin, end - begin),
                       [&](char32_t c) { decompose(codes, c, is_compatible); });
    order_marks(codes);
    if (is_composed) compose(codes);
    for (const char32_t c : codes) append_utf8(out, c);
    begin = end;
  }
  return out;
}

}  // namespace tessera::text
