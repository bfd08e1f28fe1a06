#include "nn/bloom/bloom.h"

#include "test/nn/model_checks.h"

namespace tessera::nn {
namespace {

using testing::check_cache;
using testing::check_close;
using testing::check_recompute;
using testing::check_tiles;
using testing::error_of;
using testing::tol;

BloomConfig tiny() {
  BloomConfig c;
  c.vocab_size = 23, c.context_length = 12;
  c.num_layers = 2, c.num_heads = 3, c.width = 24;
  c.init_stddev = 0.2;  // so that every part counts
  return c;
}

TEST_CASE("bloom: generation with a cache gives the logits of a whole forward", "[bloom]") {
  Bloom model(tiny());
  model.initialize(3);
  check_cache(model);
}

TEST_CASE("bloom: positions count only through the biases of attention", "[bloom]") {
  Bloom model(tiny());
  model.initialize(3);
  const NoGrad no_grad;
  // One token repeated: without positions all rows would be alike, with ALiBi they still are, since
  // every value that is averaged is the same.
  const Tensor same = model.logits(full({1, 5}, 7, kI32));
  for (int64_t t = 1; t < 5; ++t) {
    check_close(same.narrow(1, t, 1), same.narrow(1, 0, 1), tol(kF32, 64));
  }
  // Two tokens exchanged before the last: the nearer one weighs more.
  const Tensor ab = model.logits(from_values<int32_t>({3, 4, 5}, {1, 3})).narrow(1, 2, 1);
  const Tensor ba = model.logits(from_values<int32_t>({4, 3, 5}, {1, 3})).narrow(1, 2, 1);
  double difference = 0;
  const std::vector<double> x = ab.to_vector(), y = ba.to_vector();
  for (size_t i = 0; i < x.size(); ++i) difference = std::max(difference, std::abs(x[i] - y[i]));
  CHECK(difference > 1e-4);
}

TEST_CASE("bloom: recomputed blocks give the same gradients, bit by bit", "[bloom]") {
  Bloom model(tiny());
  model.initialize(3);
  using Kind = RecomputePolicy::Kind;
  check_recompute(model, {{Kind::kFull, 1}, {Kind::kSelective, 1}});
  check_tiles(model);
}

TEST_CASE("bloom: heads must divide the width", "[bloom]") {
  BloomConfig c = tiny();
  c.num_heads = 5;
  CHECK(error_of([&] {
          Bloom model(c);
        }).starts_with("Bloom: width 24 is not divisible by num_heads 5"));
}

}  // namespace
}  // namespace tessera::nn
