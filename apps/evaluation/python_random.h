#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::apps {

/// The draws of Python's random.Random(seed), so that few-shot examples are those that others draw:
/// the Mersenne Twister MT19937 (Matsumoto & Nishimura 1998) seeded with an array of one word.
class PythonRandom {
 public:
  explicit PythonRandom(uint32_t seed);

  /// random.sample(range(population), count), in its order. `count` is at most `population`.
  std::vector<size_t> sample(size_t population, size_t count);

 private:
  uint32_t next();
  size_t below(size_t bound);

  std::array<uint32_t, 624> state_;
  size_t index_ = 624;
};

}  // namespace tessera::apps
