#include "optim/adamw.h"

#include "core/runtime/context.h"
#include "test/testing.h"

namespace tessera {
namespace {

using optim::AdamW;
using optim::FlatShard;
using testing::check_bitwise;
using testing::check_close;
using testing::error_of;
using Values = std::vector<double>;

/// The case of test/golden/make_optimizer.py, with padding around and between its two parts.
constexpr int kNumSteps = 6;
constexpr int64_t kNumel = 12, kPlaces[] = {1, 2, 3, 4, 7, 8, 9};

FlatShard make_shard() {
  FlatShard shard{.name = "golden",
                  .master = full({kNumel}, 100),
                  .grad = full({kNumel}, 1000),
                  .low = zeros({kNumel}, kBF16),
                  .segments = {{"decays", 1, 5, 1, true}, {"plain", 7, 10, 0.5f, false}}};
  for (size_t i = 0; i < 7; ++i) {
    shard.master.narrow(0, kPlaces[i], 1).fill_(std::sin(static_cast<double>(i) + 1));
  }
  return shard;
}

void set_grad(const FlatShard& shard, int step, double factor) {
  for (size_t i = 0; i < 7; ++i) {
    const double value = std::cos(0.7 * step + 1.3 * static_cast<double>(i));
    shard.grad.narrow(0, kPlaces[i], 1).fill_(value * (i == 2 ? 1e-4 : 1.0) * factor);
  }
}

Values parts_of(const Tensor& t) {
  const Values all = t.to_vector();
  Values parts;
  for (const int64_t place : kPlaces) parts.push_back(all[static_cast<size_t>(place)]);
  return parts;
}

TEST_CASE("AdamW: six steps equal PyTorch's", "[optim]") {
  const FlatShard shard = make_shard();
  AdamW adamw({shard}, {.lr = 0, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1f});
  for (int step = 1; step <= kNumSteps; ++step) {
    set_grad(shard, step, 1);
    adamw.step(0.1f / static_cast<float>(step));
  }
  check_close(parts_of(shard.master),
              {0.7031794786453247, 1.1107466220855713, 0.306415319442749, -0.7435736656188965,
               -1.0614756345748901, -0.3240208327770233, 0.7686014771461487},
              1e-6, "parameters");
  const auto state = adamw.state();
  REQUIRE(state.size() == 2);
  CHECK(state[0].name == "exp_avg");
  CHECK(state[1].name == "exp_avg_sq");
  check_close(
      parts_of(state[0].tensors[0]),
      {-0.1901157647371292, -0.12218766659498215, 1.2474563845898956e-05, 0.1889263093471527,
       -0.023670513182878494, -0.20158997178077698, -0.08417963981628418},
      1e-7, "exp_avg");
  check_close(parts_of(state[1].tensors[0]),
              {0.1284690648317337, 0.12044078856706619, 1.570271246364996e-09, 0.10235456377267838,
               0.15946482121944427, 0.11626310646533966, 0.13319097459316254},
              1e-7, "exp_avg_sq");
  CHECK(adamw.step_count().item() == kNumSteps);
  check_close(parts_of(shard.low), parts_of(shard.master.to(kBF16)), 0, "low");
  CHECK(shard.master.to_vector()[0] == 100);  // padding
  CHECK(shard.master.to_vector()[5] == 100);
}

TEST_CASE("AdamW: grad_scale undoes a loss scale, skipped steps do not count", "[optim]") {
  const FlatShard plain = make_shard(), scaled = make_shard();
  AdamW a({plain}), b({scaled});
  const Tensor scale = full({}, 1.0 / 1024), skip = full({}, 1, kU8), go = zeros({}, kU8);
  for (int step = 1; step <= kNumSteps; ++step) {
    set_grad(plain, step, 1);
    a.step(0.01f);
    set_grad(scaled, step, INFINITY);
    b.step(0.01f, scale, skip);
    set_grad(scaled, step, 1024);
    b.step(0.01f, scale, go);
  }
  check_bitwise(scaled.master, plain.master);
  check_bitwise(b.state()[1].tensors[0], a.state()[1].tensors[0]);
  CHECK(b.step_count().item() == kNumSteps);
}

TEST_CASE("AdamW: a state written into another optimizer continues bit by bit", "[optim]") {
  const FlatShard one = make_shard(), two = make_shard();
  AdamW a({one}), b({two});
  for (int step = 1; step <= 2; ++step) set_grad(one, step, 1), a.step(0.01f);
  const auto copy = [](const Tensor& to, const Tensor& from) { Tensor(to).copy_(from); };
  copy(two.master, one.master);
  copy(b.step_count(), a.step_count());
  for (size_t i = 0; i < 2; ++i) copy(b.state()[i].tensors[0], a.state()[i].tensors[0]);
  set_grad(one, 3, 1), a.step(0.01f);
  set_grad(two, 3, 1), b.step(0.01f);
  check_bitwise(two.master, one.master);
}

TEST_CASE("AdamW: states are f32, shaped like the shards, and counted as optimizer memory",
          "[optim]") {
  const auto count = [] {
    return Context::current()->allocator()->stats().allocated_by_class[static_cast<size_t>(
        MemoryClass::kOptimizer)];
  };
  const int64_t before = count();
  const FlatShard large{"large", zeros({4096}), zeros({4096}), {}, {{"w", 0, 4096}}};
  const FlatShard nothing{"nothing", zeros({0}), zeros({0}), {}, {}};
  const auto adamw = std::make_unique<AdamW>(std::vector<FlatShard>{large, nothing});
  adamw->step();
  const auto state = adamw->state();
  CHECK(state[0].tensors[0].shape() == Shape{4096});
  CHECK(state[0].tensors[1].shape() == Shape{0});
  CHECK(state[0].tensors[0].dtype() == kF32);
  CHECK(count() - before >= 2 * 4 * 4096);
  CHECK(count() - before < 2 * 4 * 4096 + 8192);
}

TEST_CASE("AdamW: mistakes are named", "[optim]") {
  const auto has = [](const std::function<void()>& f, const std::string& part) {
    const std::string text = error_of(f);
    INFO(text);
    CHECK(text.find(part) == 0);
  };
  // The lower ends are in the ranges.
  CHECK_NOTHROW(AdamW({}, {.beta1 = 0, .beta2 = 0, .eps = 0, .weight_decay = 0}));
  has([] { AdamW({}, {.beta1 = 1}); }, "AdamW: beta1 must be in [0, 1), got 1");
  has([] { AdamW({}, {.beta2 = -1}); }, "AdamW: beta2 must be in [0, 1), got -1");
  has([] { AdamW({}, {.eps = -1}); }, "AdamW: eps must be at least 0, got -1");
  has([] { AdamW({}, {.weight_decay = -1}); }, "AdamW: weight_decay must be at least 0, got -1");
  has(
      [] {
        AdamW({FlatShard{"s", zeros({2, 2}), zeros({2, 2}), {}, {}}});
      },
      "Optimizer: the master of shard s must be flat, got [2, 2]");
  has(
      [] {
        AdamW({FlatShard{"s", zeros({4}), zeros({2}), {}, {}}});
      },
      "Optimizer: the gradient of shard s must have the master's shape [4], got [2]");
  has(
      [] {
        AdamW({FlatShard{"s", zeros({4}), zeros({4}), {}, {{"w", 0, 3}, {"v", 2, 4}}}});
      },
      "flat_segments: segment [2, 4) must begin at 3 or later and end by 4");
}

}  // namespace
}  // namespace tessera
