#pragma once

#include <cstdint>

#include "core/random.h"

namespace tessera::apps {

/// A bijection of [0, count) drawn by the key, without a table: a Feistel network on the next even
/// number of bits, applied again while it leaves the range.
class Permutation {
 public:
  Permutation(int64_t count, PhiloxKey key);
  int64_t operator()(int64_t index) const;

 private:
  uint64_t count_;
  PhiloxKey key_;
  int half_bits_ = 1;
};

}  // namespace tessera::apps
