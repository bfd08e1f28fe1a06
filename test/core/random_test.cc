#include "core/random.h"

#include <set>
#include <thread>

#include "test/testing.h"

namespace tessera {
namespace {

TEST_CASE("random: philox 4x32-10 gives the published known answers", "[random]") {
  using Words = std::array<uint32_t, 4>;
  CHECK(philox({0, 0}, Words{0, 0, 0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox({0xffffffff, 0xffffffff}, Words{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}) ==
        Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox({0xa4093822, 0x299f31d0}, Words{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("random: the 64-bit counters fill the words from the low end", "[random]") {
  const PhiloxKey key{1, 2};
  CHECK(philox(key, 0x0000000400000003u, 0x0000000200000001u) == philox(key, {1, 2, 3, 4}));
  CHECK(philox(key, 0, 5) != philox(key, 5, 0));
}

TEST_CASE("random: uniform values are in [0, 1) and evenly spread", "[random]") {
  CHECK(uniform_from_bits(0) == 0.0f);
  CHECK(uniform_from_bits(0xffffffff) < 1.0f);
  double sum = 0, squares = 0;
  const int count = 40000;
  for (int i = 0; i < count; ++i) {
    const double u = uniform_from_bits(philox(make_key(3, 4), 0, static_cast<uint64_t>(i))[0]);
    sum += u, squares += u * u;
  }
  CHECK(std::fabs(sum / count - 0.5) < 0.01);  // 7 standard errors
  CHECK(std::fabs(squares / count - 1.0 / 3) < 0.01);
}

TEST_CASE("random: keys differ by seed and by stream", "[random]") {
  std::set<uint64_t> keys;
  for (uint64_t seed = 0; seed < 64; ++seed) {
    for (uint64_t stream = 0; stream < 64; ++stream) {
      const PhiloxKey key = make_key(seed, stream);
      keys.insert(uint64_t{key.k1} << 32 | key.k0);
    }
  }
  CHECK(keys.size() == 64 * 64);
}

TEST_CASE("random: a name's hash is FNV-1a, the same on every machine", "[random]") {
  CHECK(hash_name("") == 0xcbf29ce484222325u);
  CHECK(hash_name("a") == 0xaf63dc4c8601ec8cu);
  CHECK(hash_name("foobar") == 0x85944171f73967e8u);
}

TEST_CASE("random: each thread has its own position", "[random]") {
  random_state() = {.seed = 5, .step = 6, .op_index = 7, .sample_offset = 8};
  uint64_t seed_there = 1;
  std::thread([&] { seed_there = random_state().seed; }).join();
  CHECK(seed_there == 0);
  CHECK(random_state().op_index == 7);
  random_state() = {};
}

}  // namespace
}  // namespace tessera
