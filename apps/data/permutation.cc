#include "apps/data/permutation.h"

#include <bit>

namespace tessera::apps {

Permutation::Permutation(int64_t count, PhiloxKey key)
    : count_(static_cast<uint64_t>(count)), key_(key) {
  const int bits = std::bit_width(count_ <= 1 ? uint64_t{1} : count_ - 1);
  half_bits_ = (bits + 1) / 2;
}

int64_t Permutation::operator()(int64_t index) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t value = static_cast<uint64_t>(index);
  do {
    uint64_t left = value >> half_bits_, right = value & mask;
    for (uint32_t round = 0; round < 6; ++round) {
      const uint64_t mixed = left ^ (philox(key_, round, right)[0] & mask);
      left = right;
      right = mixed;
    }
    value = (left << half_bits_) | right;
  } while (value >= count_);
  return static_cast<int64_t>(value);
}

}  // namespace tessera::apps
