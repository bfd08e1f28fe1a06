#include "apps/evaluation/python_random.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "core/check.h"

namespace tessera::apps {

PythonRandom::PythonRandom(uint32_t seed) {
  constexpr uint32_t kFirstSeed = 19650218;
  const size_t size = state_.size();
  state_[0] = kFirstSeed;
  const auto mixed = [&](size_t i) { return state_[i - 1] ^ (state_[i - 1] >> 30); };
  for (size_t i = 1; i < size; ++i) {
    state_[i] = 1812433253u * mixed(i) + static_cast<uint32_t>(i);
  }
  size_t i = 1;
  const auto advance = [&] {
    if (++i < size) return;
    state_[0] = state_[size - 1];
    i = 1;
  };
  for (size_t k = 0; k < size; ++k) {
    state_[i] = (state_[i] ^ (mixed(i) * 1664525u)) + seed;
    advance();
  }
  for (size_t k = 0; k + 1 < size; ++k) {
    state_[i] = (state_[i] ^ (mixed(i) * 1566083941u)) - static_cast<uint32_t>(i);
    advance();
  }
  state_[0] = 0x80000000u;
}

uint32_t PythonRandom::next() {
  constexpr size_t kShift = 397;
  const size_t size = state_.size();
  if (index_ == size) {
    for (size_t i = 0; i < size; ++i) {
      const uint32_t y = (state_[i] & 0x80000000u) | (state_[(i + 1) % size] & 0x7fffffffu);
      state_[i] = state_[(i + kShift) % size] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0);
    }
    index_ = 0;
  }
  uint32_t y = state_[index_++];
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

size_t PythonRandom::below(size_t bound) {
  const int bits = std::bit_width(bound);
  size_t value = bound;
  while (value >= bound) value = next() >> (32 - bits);
  return value;
}

std::vector<size_t> PythonRandom::sample(size_t population, size_t count) {
  TESSERA_CHECK(count <= population && population < (size_t{1} << 31),
                "sample: {} of {}, expected no more than there are", count, population);
  // A pool that is drawn from, or, of few among many, those that were drawn: as Python decides it.
  size_t set_size = 21;
  if (count > 5) {
    set_size += static_cast<size_t>(
        std::pow(4.0, std::ceil(std::log(3.0 * static_cast<double>(count)) / std::log(4.0))));
  }
  std::vector<size_t> drawn;
  if (population <= set_size) {
    std::vector<size_t> pool(population);
    std::iota(pool.begin(), pool.end(), size_t{0});
    for (size_t i = 0; i < count; ++i) {
      const size_t j = below(population - i);
      drawn.push_back(pool[j]);
      pool[j] = pool[population - i - 1];
    }
    return drawn;
  }
  while (drawn.size() < count) {
    const size_t j = below(population);
    if (std::find(drawn.begin(), drawn.end(), j) == drawn.end()) drawn.push_back(j);
  }
  return drawn;
}

}  // namespace tessera::apps
