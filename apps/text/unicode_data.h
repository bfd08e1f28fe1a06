#pragma once

#include <cstddef>
#include <cstdint>

// What make_unicode.py has asked of Hugging Face's tokenizers.

namespace tessera::text::unicode_data {

/// (first code point, index into kPropertyKinds): the properties of all code points in stretches.
extern const uint32_t kPropertyRuns[];
extern const size_t kPropertyRunsCount;
/// Bits as in unicode.h: the category and one bit a property.
extern const uint32_t kPropertyKinds[];
extern const size_t kPropertyKindsCount;
/// (first code point, combining class) in stretches. The classes are numbered anew, in their order.
extern const uint32_t kClassRuns[];
extern const size_t kClassRunsCount;
/// (code point, n, n code points): full canonical decompositions without Hangul's; the compatible
/// ones where those are others; lower cases.
extern const uint32_t kCanonical[];
extern const size_t kCanonicalCount;
extern const uint32_t kCompatible[];
extern const size_t kCompatibleCount;
extern const uint32_t kLowerCases[];
extern const size_t kLowerCasesCount;
/// (first, second, what both are composed to).
extern const uint32_t kPairs[];
extern const size_t kPairsCount;

}  // namespace tessera::text::unicode_data
