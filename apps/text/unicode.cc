#include "apps/text/unicode.h"

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <map>
#include <unordered_map>
#include <vector>

#include "apps/text/unicode_data.h"
#include "apps/text/work.h"

namespace tessera::text {
namespace {

using namespace unicode_data;

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

/// What normal forms need of a character.
struct FormTraits {
  uint8_t combining_class;  // 0 for a starter
  uint8_t bits;             // kMarked << form, kCanonicalEntry, kCompatibleEntry
};
constexpr uint8_t kMarked = 1;  // the form may change it, or what stands before it by it
constexpr uint8_t kCanonicalEntry = 16, kCompatibleEntry = 32;
static_assert(static_cast<int>(NormalForm::kNfkd) == 3);

constexpr uint8_t marked_bit(NormalForm form) {
  return static_cast<uint8_t>(kMarked << static_cast<int>(form));
}

struct FormTables {
  Entries canonical = entries_of(kCanonical, kCanonicalCount);
  Entries compatible = entries_of(kCompatible, kCompatibleCount);
  std::unordered_map<uint64_t, char32_t> pairs;
  uint16_t block[kNumCodes / 128];
  std::vector<FormTraits> traits;  // of 128 code points a block

  FormTables() {
    for (size_t i = 0; i < kPairsCount; i += 3) {
      pairs.emplace(uint64_t{kPairs[i]} << 32 | kPairs[i + 1], kPairs[i + 2]);
    }
    compress(make_traits());
  }
  const FormTraits& of(char32_t c) const { return traits[size_t{block[c >> 7]} * 128 + (c & 127)]; }
  uint8_t class_of(char32_t c) const { return of(c).combining_class; }
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

 private:
  std::vector<FormTraits> make_traits() const {
    constexpr uint8_t kC = marked_bit(NormalForm::kNfc), kD = marked_bit(NormalForm::kNfd),
                      kKc = marked_bit(NormalForm::kNfkc), kKd = marked_bit(NormalForm::kNfkd);
    std::vector<FormTraits> all(kNumCodes);
    const auto mark = [&](char32_t c, uint8_t bits) { all[c].bits |= bits; };
    for (size_t i = 0; i < kClassRunsCount; i += 2) {
      if (kClassRuns[i + 1] == 0) continue;
      const char32_t end = i + 2 < kClassRunsCount ? kClassRuns[i + 2] : kNumCodes;
      for (char32_t c = kClassRuns[i]; c < end; ++c) {
        all[c] = {static_cast<uint8_t>(kClassRuns[i + 1]), kC | kD | kKc | kKd};
      }
    }
    for (const auto& [pair, c] : pairs) mark(static_cast<char32_t>(pair & 0xffffffffu), kC | kKc);
    for (char32_t i = 0; i < kVowelCount; ++i) mark(kVowelBase + i, kC | kKc);
    for (char32_t i = 1; i < kTailCount; ++i) mark(kTailBase + i, kC | kKc);
    for (char32_t i = 0; i < kHangulCount; ++i) mark(kHangulBase + i, kD | kKd);
    std::vector<bool> is_second(kNumCodes);
    for (char32_t c = 0; c < kNumCodes; ++c) is_second[c] = (all[c].bits & kC) != 0;
    // A composed character is what composing makes of it, if its parts are not composed with what
    // stands before.
    std::vector<bool> is_composed(kNumCodes);
    for (const auto& [pair, c] : pairs) is_composed[c] = true;
    for (const auto& [c, entry] : canonical) {
      mark(c, kCanonicalEntry | kD | kKd);
      if (!is_composed[c] || is_second[entry[1]]) mark(c, kC | kKc);
    }
    for (const auto& [c, entry] : compatible) mark(c, kCompatibleEntry | kKc | kKd);
    return all;
  }
  void compress(const std::vector<FormTraits>& all) {
    std::map<std::string_view, uint16_t> numbers;
    constexpr size_t kNbytes = 128 * sizeof(FormTraits);
    for (size_t i = 0; i < kNumCodes / 128; ++i) {
      const FormTraits* const own = all.data() + i * 128;
      const auto [found, is_new] =
          numbers.emplace(std::string_view(reinterpret_cast<const char*>(own), kNbytes),
                          static_cast<uint16_t>(numbers.size()));
      block[i] = found->second;
      if (is_new) traits.insert(traits.end(), own, own + 128);
    }
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
    for (size_t i = 0; i < kPropertyKindsCount; ++i) {
      bits[i] = kPropertyKinds[i] | derived(kPropertyKinds[i]);
    }
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
  const uint8_t bits = forms.of(c).bits;
  if (is_compatible && (bits & kCompatibleEntry) != 0) {
    entry = forms.compatible.find(c)->second;
  } else if ((bits & kCanonicalEntry) != 0) {
    entry = forms.canonical.find(c)->second;
  }
  if (entry == nullptr) {
    out += c;
  } else {
    out.append(entry + 1, entry + 1 + *entry);
  }
}

/// Sorts marks by their classes, those of one as they stand, in linear time.
void sort_marks(char32_t* marks, size_t count) {
  const FormTables& forms = form_tables();
  const auto class_of = [&](char32_t c) { return forms.class_of(c); };
  constexpr size_t kFew = 32;
  if (count <= kFew) {
    for (size_t i = 1; i < count; ++i) {
      const char32_t mark = marks[i];
      size_t at = i;
      for (; at > 0 && class_of(marks[at - 1]) > class_of(mark); --at) marks[at] = marks[at - 1];
      marks[at] = mark;
    }
    return;
  }
  size_t begin[257] = {};
  for (size_t i = 0; i < count; ++i) ++begin[class_of(marks[i]) + 1];
  for (size_t i = 0; i < 256; ++i) begin[i + 1] += begin[i];
  const std::u32string old(marks, count);
  for (const char32_t c : old) marks[begin[class_of(c)]++] = c;
}

/// Marks after one starter, in the order of their classes.
void order_marks(std::u32string& text) {
  const FormTables& forms = form_tables();
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin;
    while (end < text.size() && forms.class_of(text[end]) != 0) ++end;
    if (end - begin > 1) sort_marks(text.data() + begin, end - begin);
    begin = end + 1;
  }
}

void compose(std::u32string& text) {
  const FormTables& forms = form_tables();
  size_t out = 0, starter = SIZE_MAX;
  int last_class = -1;  // of what follows the starter; -1: nothing does
  for (const char32_t c : text) {
    const int own = forms.class_of(c);
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

namespace {

struct LowerCases {
  Entries entries = entries_of(kLowerCases, kLowerCasesCount);
  std::vector<bool> has_one = std::vector<bool>(kNumCodes);  // most have none, in a small table
  LowerCases() {
    for (const auto& [c, entry] : entries) has_one[c] = true;
  }
};

}  // namespace

size_t ascii_nbytes(std::string_view text) {
  const char *p = text.data(), *const end = p + text.size();
  for (; end - p >= 16; p += 16) {
    const int mask = _mm_movemask_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    if (mask != 0) return static_cast<size_t>(p - text.data()) + std::countr_zero(unsigned(mask));
  }
  while (p < end && static_cast<signed char>(*p) >= 0) ++p;
  return static_cast<size_t>(p - text.data());
}

void append_ascii_lower(std::string& out, std::string_view ascii) {
  const size_t old = out.size();
  out += ascii;
  for (char* p = out.data() + old; p < out.data() + out.size(); ++p) {
    *p = static_cast<char>(*p + (*p >= 'A' && *p <= 'Z' ? 32 : 0));
  }
}

void append_lower(std::string& out, std::string_view text) {
  static const LowerCases lower;
  while (!text.empty()) {
    const size_t num_ascii = ascii_nbytes(text);
    append_ascii_lower(out, text.substr(0, num_ascii));
    text.remove_prefix(num_ascii);
    if (text.empty()) return;
    const char32_t c = utf8_decode(text.data());
    const size_t nbytes = utf8_nbytes(text[0]);
    if (lower.has_one[c]) {
      const uint32_t* const entry = lower.entries.find(c)->second;
      for (uint32_t i = 1; i <= *entry; ++i) append_utf8(out, entry[i]);
    } else {
      out += text.substr(0, nbytes);
    }
    text.remove_prefix(nbytes);
  }
}

namespace {

/// The first character from p on that the form may change, or what stands before it by it.
const char* find_marked(const char* p, const char* end, NormalForm form) {
  const FormTables& forms = form_tables();
  const uint8_t bit = marked_bit(form);
  while (p < end) {
    while (end - p >= 16) {
      const int mask = _mm_movemask_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      if (mask != 0) {
        p += std::countr_zero(static_cast<unsigned>(mask));
        break;
      }
      p += 16;
    }
    if (p == end) break;
    if ((forms.of(utf8_decode(p)).bits & bit) != 0) break;
    p += utf8_nbytes(*p);
  }
  return p;
}

}  // namespace

bool is_surely_normal(std::string_view text, NormalForm form) {
  const char* const end = text.data() + text.size();
  return find_marked(text.data(), end, form) == end;
}

std::string normal_form(std::string_view text, NormalForm form) {
  const bool is_compatible = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  const bool is_composed = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  const FormTables& forms = form_tables();
  std::string out;
  out.reserve(text.size());
  std::u32string codes;
  // A character that is not marked stays and ends what can be composed: only stretches of marked
  // ones change, with the one before them if there is composing.
  const char *done = text.data(), *const end = done + text.size();
  while (done < end) {
    const char* p = find_marked(done, end, form);
    if (p == end) break;
    if (is_composed && p > done) {
      do {
        --p;
      } while ((static_cast<unsigned char>(*p) & 0xc0u) == 0x80u);
    }
    out.append(done, p);
    codes.clear();
    do {
      decompose(codes, utf8_decode(p), is_compatible);
      p += utf8_nbytes(*p);
    } while (p < end && (forms.of(utf8_decode(p)).bits & marked_bit(form)) != 0);
    counted_work() += static_cast<int64_t>(codes.size());
    order_marks(codes);
    if (is_composed) compose(codes);
    for (const char32_t c : codes) append_utf8(out, c);
    done = p;
  }
  out.append(done, end);
  return out;
}

}  // namespace tessera::text
