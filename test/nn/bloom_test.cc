#include "nn/bloom.h"

#include "core/autograd.h"
#include "test/testing.h"

namespace tessera::nn {
namespace {

using testing::check_bitwise;
using testing::check_close;
using testing::error_of;
using testing::randint;
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
  const NoGrad no_grad;
  const Tensor ids = randint(0, 23, {2, 9});
  const Tensor whole = model.logits(ids);
  KvCache cache = model.make_cache(2);
  for (int64_t first = 0; first < 9; first += 3) {
    ForwardOptions options;
    options.cache = &cache;
    check_close(model.logits(ids.narrow(1, first, 3), options), whole.narrow(1, first, 3),
                tol(kF32, 64));
  }
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
  const Tensor ids = randint(0, 23, {2, 9}), targets = randint(0, 23, {2, 9}, kI32, 2);
  const auto gradients = [&](RecomputePolicy::Kind kind) {
    model.set_recompute({kind, 1});
    for (const NamedParameter& p : model.named_parameters()) p.parameter->tensor.zero_grad();
    backward(model.loss(ids, targets).sum);
    std::vector<Tensor> all;
    for (const NamedParameter& p : model.named_parameters()) {
      all.push_back(p.parameter->tensor.grad().clone());
    }
    return all;
  };
  const std::vector<Tensor> kept = gradients(RecomputePolicy::Kind::kNone);
  for (const auto kind : {RecomputePolicy::Kind::kFull, RecomputePolicy::Kind::kSelective}) {
    const std::vector<Tensor> again = gradients(kind);
    REQUIRE(again.size() == kept.size());
    for (size_t i = 0; i < kept.size(); ++i) check_bitwise(again[i], kept[i]);
  }
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
