#pragma once

#include <array>
#include <cstdint>
#include <vector>

// [Note: Eight-bit states]
// A block of 256 values is kept as 256 codes of 8 bits and one f32, the largest magnitude in it:
// value = map[code] * absmax, with the dynamic map of Dettmers et al. (2022, arXiv:2110.02861) in the
// numbers of bitsandbytes. Of each decade from 1e-6 to 1 it has 2^i values (i = 0..6; twice as many
// without a sign), the middles of equal parts of [0.1, 1], and 0 and 1; there is no -1. A value
// scaled by 1 / absmax takes the nearest code, of two equally near ones the lower, as in the
// reference of bitsandbytes 0.50 (its f32 kernel for CPUs gives other codes to the lowest values).
// A block whose largest magnitude is 0 has codes 0; so has one with a value that is not finite, and
// its scale is not a number.
//
// Every device chooses codes by the same 255 f32 thresholds, so that all choose the same ones.

namespace tessera::kernels {

inline constexpr int64_t kStateBlock = 256;  ///< values that share a scale
constexpr int64_t state_blocks(int64_t numel) {
  return (numel + kStateBlock - 1) / kStateBlock;
}

struct DynamicMap {
  std::array<float, 256> values;  ///< ascending
  std::array<float, 256>
      thresholds;  ///< the code of x is how many of them are below x; the last: inf
};

/// For values of both signs, or of none below 0.
const DynamicMap& dynamic_map(bool is_signed);

/// What `AdamW8bitStep::maps` points at: values and thresholds of the signed map, then of the other.
std::vector<float> dynamic_maps();

}  // namespace tessera::kernels
