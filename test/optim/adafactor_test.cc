#include "optim/adafactor.h"

#include "test/optim/states.h"
#include "test/testing.h"

namespace tessera {
namespace {

using optim::Adafactor;
using optim::FlatShard;
using testing::check_close;
using testing::error_of;
using testing::formula_tensor;
using testing::golden_states;

/// One shard with parameters of these shapes, each from a multiple of 256 on.
FlatShard shard_of(const std::vector<Shape>& shapes) {
  FlatShard shard;
  shard.name = "golden";
  int64_t begin = 0;
  for (size_t k = 0; k < shapes.size(); ++k) {
    const std::string name = fmt::format("p{}", k);
    shard.parameters.push_back({name, shapes[k], begin});
    shard.segments.push_back({name, begin, begin + shapes[k].numel()});
    begin += (shapes[k].numel() + 255) / 256 * 256;
  }
  shard.master = zeros({begin});
  shard.grad = zeros({begin});
  return shard;
}

TEST_CASE("Adafactor: 30 steps equal PyTorch's", "[optim]") {
  const auto& golden = golden_states()["adafactor"];
  const FlatShard shard = shard_of({{24, 40}, {40, 24}, {50}});
  const auto part = [&](const Tensor& t, size_t k) {
    return t.narrow(0, shard.parameters[k].begin, shard.parameters[k].shape.numel());
  };
  for (size_t k = 0; k < 3; ++k) {
    part(shard.master, k)
        .copy_(formula_tensor(shard.parameters[k].shape.numel(), 0, static_cast<int64_t>(k) + 1));
  }
  Adafactor adafactor({shard}, {.weight_decay = 0.1});
  for (int64_t step = 1; step <= golden["steps"].get<int64_t>(); ++step) {
    for (size_t k = 0; k < 3; ++k) {
      part(shard.grad, k)
          .copy_(formula_tensor(shard.parameters[k].shape.numel(), step, static_cast<int64_t>(k)));
    }
    adafactor.step(0.02f);
    if (step == 4) {  // changes nothing
      Tensor(shard.grad).fill_(1);
      adafactor.step(0.02f, {}, from_values({1}, {}, kU8));
    }
  }
  for (size_t k = 0; k < 3; ++k) {
    // A vector decays here as PyTorch's does: segments say so by default.
    check_close(part(shard.master, k).to_vector(),
                golden["parameters"][k].get<std::vector<double>>(), 1e-6, "parameters");
  }
  const auto states = adafactor.whole_state();
  REQUIRE(states.size() == 5);
  CHECK(states[0].name == "row_var/p0");
  CHECK(states[0].values.shape() == Shape{24});
  CHECK(states[1].name == "col_var/p0");
  CHECK(states[1].values.shape() == Shape{40});
  CHECK(states[4].name == "variance/p2");
  CHECK(states[4].values.shape() == Shape{50});
}

TEST_CASE("Adafactor: mistakes are named", "[optim]") {
  CHECK(
      error_of([] { Adafactor({}, {.d = 0}); }).starts_with("Adafactor: d must be above 0, got 0"));
  CHECK(error_of([] {
          Adafactor({}, {.beta2_decay = 0.5});
        }).starts_with("Adafactor: beta2_decay must be at most 0, got 0.5"));
}

}  // namespace
}  // namespace tessera
