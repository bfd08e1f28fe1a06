#include "optim/adamw_8bit.h"

#include "kernels/optimizer/code_table.h"
#include "test/optim/states.h"
#include "test/testing.h"

namespace tessera {
namespace {

using optim::AdamW8bit;
using optim::FlatShard;
using testing::error_of;
using testing::formula;
using testing::formula_tensor;
using testing::golden_states;

TEST_CASE("AdamW8bit: maps, codes and scales are those of bitsandbytes, bit by bit", "[optim]") {
  for (const bool is_signed : {true, false}) {
    const auto& golden = golden_states()["maps"][is_signed ? "signed" : "unsigned"];
    const kernels::DynamicMap& map = kernels::dynamic_map(is_signed);
    for (size_t i = 0; i < 256; ++i) CHECK(map.values[i] == golden["map"][i].get<float>());
    // The moments of a step with betas of 0 are the gradient and its square: for codes of the first
    // moment the gradient is what is coded, for those of the second its root.
    const auto values = golden["values"].get<std::vector<float>>();
    const auto numel = std::ssize(values);
    int num_wrong = 0;
    for (int64_t i = 0; i < numel; ++i) {
      const auto at = static_cast<size_t>(i);
      const float absmax = golden["absmax"][at / 256].get<float>();
      const float x = values[at] * (1 / absmax);
      const auto code = std::lower_bound(map.thresholds.begin(), map.thresholds.end(), x) -
                        map.thresholds.begin();
      num_wrong += code != golden["codes"][at].get<int64_t>();
    }
    CHECK(num_wrong == 0);
    if (!is_signed) continue;
    FlatShard shard{.name = "codes",
                    .master = zeros({numel}),
                    .grad = from_values(std::span<const float>(values), {numel}, kF32),
                    .low = {},
                    .segments = {{"p", 0, numel}}};
    AdamW8bit adamw({shard}, {.beta1 = 0, .beta2 = 0});
    adamw.step();
    const auto states = adamw.state();
    REQUIRE(states.size() == 4);
    CHECK(states[0].tensors[0].to_vector() == golden["codes"].get<std::vector<double>>());
    CHECK(states[2].tensors[0].to_vector() == golden["absmax"].get<std::vector<double>>());
  }
}

TEST_CASE("AdamW8bit: the code of a value is how many thresholds are below it", "[optim]") {
  for (const bool is_signed : {true, false}) {
    const kernels::DynamicMap& map = kernels::dynamic_map(is_signed);
    const kernels::cpu::CodeTable table(is_signed);
    std::vector<float> values{0.0f, -0.0f, 1.0f, std::nextafter(1.0f, 2.0f), 1e-30f, 1e-40f};
    for (size_t i = 0; i < 255; ++i) {
      for (const float limit : {-2.0f, 2.0f}) {
        float x = map.thresholds[i];
        for (int step = 0; step < 4; ++step, x = std::nextafter(x, limit)) values.push_back(x);
      }
      values.push_back(map.values[i]);
    }
    for (int i = 0; i < 40000; ++i) {  // 33 octaves evenly
      values.push_back(static_cast<float>(std::exp2(-33.0 * i / 40000)));
    }
    if (is_signed) {
      for (size_t i = values.size(); i-- > 0;) values.push_back(-values[i]);
    }
    // Whole vectors, and what is left at an end.
    for (const int64_t block : {int64_t{256}, int64_t{67}, int64_t{5}}) {
      std::vector<uint8_t> codes(values.size());
      for (int64_t first = 0; first < std::ssize(values); first += block) {
        const int64_t count = std::min(block, std::ssize(values) - first);
        table.encode(codes.data() + first, values.data() + first, 1, count);
      }
      int num_wrong = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        num_wrong +=
            codes[i] != std::lower_bound(map.thresholds.begin(), map.thresholds.end(), values[i]) -
                            map.thresholds.begin();
      }
      CHECK(num_wrong == 0);
      std::vector<float> decoded(codes.size());
      table.decode(decoded.data(), codes.data(), 0.3f, std::ssize(codes));
      for (size_t i = 0; i < codes.size(); ++i)
        num_wrong += decoded[i] != map.values[codes[i]] * 0.3f;
      CHECK(num_wrong == 0);
    }
    // The inverse of the smallest scales is not finite: 0 times it is no number, and has code 0.
    const std::vector<float> smallest(64, 1e-40f);
    std::vector<uint8_t> codes(64);
    table.encode(codes.data(), smallest.data(), 1e-40f, 64);
    CHECK(codes == std::vector<uint8_t>(64, 255));
    table.encode(codes.data(), std::vector<float>(64).data(), 1e-40f, 64);
    CHECK(codes == std::vector<uint8_t>(64, 0));
  }
}

TEST_CASE("AdamW8bit: 100 steps give the codes, scales and parameters of bitsandbytes", "[optim]") {
  const auto& golden = golden_states()["adamw_8bit"];
  const auto expected = golden["parameters"].get<std::vector<double>>();
  const auto numel = std::ssize(expected);
  FlatShard shard{.name = "golden",
                  .master = formula_tensor(numel, 0, 1),
                  .grad = zeros({numel}),
                  .low = {},
                  .segments = {{"p", 0, numel}}};
  AdamW8bit adamw({shard}, {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1});
  for (int64_t step = 1; step <= golden["steps"].get<int64_t>(); ++step) {
    Tensor(shard.grad).copy_(formula_tensor(numel, step));
    adamw.step(1e-3f);
  }
  const auto states = adamw.state();
  for (const auto& state : states) {
    const auto actual = state.tensors[0].to_vector();
    const auto wanted = golden[state.name].get<std::vector<double>>();
    REQUIRE(actual.size() == wanted.size());
    int num_other = 0;
    double largest = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      num_other += actual[i] != wanted[i];
      const double difference = std::abs(actual[i] - wanted[i]);
      largest = std::max(largest, state.block == 1 ? difference : difference / wanted[i]);
    }
    INFO(state.name << ": " << num_other << " other ones, by " << largest);
    if (state.block == 1) {
      CHECK(num_other <= std::ssize(actual) / 10000);
      CHECK(largest <= 1);
    } else {
      CHECK(largest <= 2 * 0x1p-23);
    }
  }
  testing::check_close(shard.master.to_vector(), expected, 1e-6, "parameters");
}

TEST_CASE("AdamW8bit: parts of segments, windows and skipped steps leave the rest alone",
          "[optim]") {
  const int64_t numel = 1024;
  const auto make = [&](int64_t first_end) {
    FlatShard shard{.name = "s",
                    .master = formula_tensor(numel, 0, 1),
                    .grad = formula_tensor(numel, 3),
                    .low = zeros({numel}, kBF16),
                    .segments = {{"a", 0, first_end}, {"b", 512, 1000, 0.5f, false}}};
    AdamW8bit adamw({shard});
    adamw.step(1e-2f);
    adamw.step(1e-2f, {}, from_values({1}, {}, kU8));
    adamw.step(1e-2f, full({}, 0.5, kF32));
    std::vector<std::vector<double>> all{shard.master.to_vector(), shard.low.to_vector()};
    for (const auto& state : adamw.state()) all.push_back(state.tensors[0].to_vector());
    CHECK(adamw.step_count().item() == 2);
    return all;
  };
  const auto whole = make(512), part = make(300);
  const std::vector<float> start = formula(numel, 0, 1);
  for (size_t i = 300; i < 512; ++i) {
    CHECK(part[0][i] == static_cast<double>(start[i]));
    CHECK(part[2][i] == 0);
    CHECK(part[3][i] == 0);
  }
  for (size_t i = 512; i < 1000; ++i) {
    CHECK(part[0][i] == whole[0][i]);
    CHECK(part[2][i] == whole[2][i]);
  }
  CHECK(whole[0][400] != static_cast<double>(start[400]));
  CHECK(part[0][1010] == static_cast<double>(start[1010]));
  CHECK(whole[1][5] ==
        static_cast<double>(static_cast<float>(BFloat16(static_cast<float>(whole[0][5])))));
}

TEST_CASE("AdamW8bit: a gradient of zeros keeps zeros, one that is not finite shows", "[optim]") {
  FlatShard shard{.name = "s",
                  .master = full({512}, 1),
                  .grad = zeros({512}),
                  .low = {},
                  .segments = {{"a", 0, 256}, {"b", 256, 512}}};
  AdamW8bit adamw({shard}, {.weight_decay = 0});
  adamw.step(0.1f);
  CHECK(shard.master.to_vector() == std::vector<double>(512, 1.0));
  CHECK(adamw.state()[2].tensors[0].to_vector() == std::vector<double>{0, 0});
  Tensor(shard.grad).narrow(0, 3, 1).fill_(INFINITY);
  adamw.step(0.1f);
  adamw.step(0.1f);
  CHECK(std::isnan(shard.master.to_vector()[0]));
  CHECK(shard.master.to_vector()[300] == 1);
}

TEST_CASE("AdamW8bit: mistakes are named", "[optim]") {
  CHECK(error_of([] {
          AdamW8bit({}, {.beta1 = 1});
        }).starts_with("AdamW8bit: beta1 must be in [0, 1), got 1"));
  CHECK(error_of([] {
          AdamW8bit({FlatShard{"s", zeros({512}), zeros({512}), {}, {{"w", 100, 300}}}});
        })
            .starts_with("AdamW8bit: w begins at element 100 of its shard, expected a multiple of "
                         "256"));
}

}  // namespace
}  // namespace tessera
