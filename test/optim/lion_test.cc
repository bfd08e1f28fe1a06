#include "optim/lion.h"

#include "test/testing.h"

namespace tessera {
namespace {

using optim::FlatShard;
using optim::Lion;
using testing::check_close;
using testing::error_of;
using Values = std::vector<double>;

FlatShard make_shard(int64_t numel, const Values& start, DType low = kF32) {
  return {.name = "golden",
          .master = from_values(start, {numel}),
          .grad = zeros({numel}),
          .low = low == kF32 ? Tensor() : zeros({numel}, low),
          .segments = {{"decays", 0, 4, 1, true}, {"plain", 4, numel, 0.5f, false}}};
}

TEST_CASE("Lion: six steps equal lion-pytorch's", "[optim]") {
  Values start(7), grad(7);
  for (size_t i = 0; i < 7; ++i) start[i] = std::sin(static_cast<double>(i) + 1);
  const FlatShard shard = make_shard(7, start);
  Lion lion({shard}, {.weight_decay = 0.1});
  for (int step = 1; step <= 6; ++step) {
    for (size_t i = 0; i < 7; ++i) {
      grad[i] = std::cos(0.7 * step + 1.3 * static_cast<double>(i)) * (i == 2 ? 1e-4 : 1.0);
    }
    Tensor(shard.grad).copy_(from_values(grad, {7}));
    lion.step(0.1f / static_cast<float>(step));
  }
  // What test/golden/make_optimizer.py prints.
  check_close(shard.master.to_vector(),
              {0.7676291465759277, 1.0966452360153198, 0.2573653757572174, -0.784069299697876,
               -1.044757604598999, -0.3069155216217041, 0.7428199052810669},
              1e-6, "parameters");
  const auto state = lion.state();
  REQUIRE(state.size() == 1);
  CHECK(state[0].name == "exp_avg");
  check_close(
      state[0].tensors[0].to_vector(),
      {-0.019400496035814285, -0.019703742116689682, 8.859040008246666e-07, 0.024443306028842926,
       0.004218073561787605, -0.022186648100614548, -0.01608787663280964},
      1e-8, "exp_avg");
}

TEST_CASE("Lion: a gradient of zero moves nothing, one that is not a number shows", "[optim]") {
  const FlatShard shard = make_shard(7, Values(7, 1.0));
  Lion lion({shard}, {});
  Tensor(shard.grad).copy_(from_values(Values{0, 1, -1, NAN, 0, 1, -1}, {7}));
  lion.step(0.25f);
  const Values p = shard.master.to_vector();
  CHECK(p[0] == 1);
  CHECK(p[1] == 0.75);
  CHECK(p[2] == 1.25);
  CHECK(std::isnan(p[3]));
  CHECK(p[5] == 0.875);  // of half the rate
}

TEST_CASE("Lion: stochastic rounding keeps steps that bf16 is too coarse for", "[optim]") {
  const auto mean_after = [](std::optional<uint64_t> seed) {
    const int64_t numel = 4096;
    const FlatShard shard = make_shard(numel, Values(numel, 1.0), kBF16);
    Lion lion({shard}, {.rounding_seed = seed});
    CHECK(lion.has_stochastic_rounding() == seed.has_value());
    Tensor(shard.grad).fill_(1);
    lion.step(0x1p-10f);  // half a step of bf16 below 1 is 2^-9
    double sum = 0;
    for (const double value : shard.low.to_vector()) sum += value;
    return sum / numel;
  };
  CHECK(mean_after(std::nullopt) == 1.0);
  // The second part, 4092 of 4096 elements, moves by half as much: a quarter of a step.
  CHECK(std::abs(mean_after(7) - (1 - 0x1p-11)) < 4 * 0x1p-8 * 0.5 / 64);
}

TEST_CASE("Lion: mistakes are named", "[optim]") {
  CHECK(
      error_of([] { Lion({}, {.beta1 = 1}); }).starts_with("Lion: beta1 must be in [0, 1), got 1"));
  CHECK(error_of([] {
          Lion({}, {.beta2 = -1});
        }).starts_with("Lion: beta2 must be in [0, 1), got -1"));
  CHECK(error_of([] {
          Lion({}, {.weight_decay = -1});
        }).starts_with("Lion: weight_decay must be at least 0, got -1"));
}

}  // namespace
}  // namespace tessera
