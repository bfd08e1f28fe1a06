#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string_view>

// Counter-based random numbers (Philox 4x32-10; Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3"). A value is a function of (key, counter) only, so it does not depend on the
// order of evaluation, the number of threads or ranks, the wrapping or the accumulation:
//   initialization  key = seed, parameter name;  counter = global element
//   dropout         key = seed, step, op index;  counter = global row, column

namespace tessera {

/// The key of a stream of random numbers.
struct PhiloxKey {
  uint32_t k0 = 0, k1 = 0;
};

/// Four 32-bit random words for a 128-bit counter.
constexpr std::array<uint32_t, 4> philox(PhiloxKey key, std::array<uint32_t, 4> c) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0], p1 = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key.k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key.k1, static_cast<uint32_t>(p0)};
    key.k0 += 0x9E3779B9u;
    key.k1 += 0xBB67AE85u;
  }
  return c;
}
/// The same with a counter of two halves.
constexpr std::array<uint32_t, 4> philox(PhiloxKey key, uint64_t high, uint64_t low) {
  return philox(key, {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                      static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)});
}

/// 24 high bits as a float in [0, 1).
constexpr float uniform_from_bits(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

/// A key that mixes a seed with a second word (SplitMix64 finalizer).
PhiloxKey make_key(uint64_t seed, uint64_t stream);
/// A stable 64-bit hash of a name (FNV-1a).
uint64_t hash_name(std::string_view name);

/// Position of this thread in the random numbers of training; set once a micro-batch.
struct RandomState {
  uint64_t seed = 0;
  uint64_t step = 0;
  uint64_t op_index = 0;      ///< counts the random ops of a forward; reset with each micro-batch
  int64_t sample_offset = 0;  ///< global index in the step of this micro-batch's first sample
};
/// That of this thread.
RandomState& random_state();

}  // namespace tessera
