#include "optim/sgd.h"

#include "test/testing.h"

namespace tessera {
namespace {

using optim::FlatShard;
using optim::Sgd;
using optim::SgdOptions;
using testing::check_close;
using testing::error_of;
using Values = std::vector<double>;

struct Golden {
  SgdOptions options;
  Values parameters, momentum_buffer;
};

/// What test/golden/make_optimizer.py prints.
const Golden kGolden[] = {
    {{.lr = 1, .momentum = 0.9f, .nesterov = false, .weight_decay = 0.1f},
     {0.7527570724487305, 1.159296989440918, 0.13373488187789917, -0.9057537913322449,
      -1.1141421794891357, -0.2676595151424408, 0.8184939026832581},
     {-1.558639407157898, -0.7331080436706543, 0.06453745812177658, 1.5134179592132568,
      -0.23670536279678345, -2.015899658203125, -0.8417963981628418}},
    {{.lr = 1, .momentum = 0.9f, .nesterov = true, .weight_decay = 0.1f},
     {0.7280159592628479, 1.2276731729507446, 0.13114750385284424, -0.9476142525672913,
      -1.1598820686340332, -0.2635696828365326, 0.8664218187332153},
     {-1.5820351839065552, -0.7028735280036926, 0.06369055807590485, 1.5022900104522705,
      -0.23670536279678345, -2.015899658203125, -0.8417963981628418}},
    {{.lr = 1, .momentum = 0, .nesterov = false, .weight_decay = 0.1f},
     {0.8043074011802673, 1.0058021545410156, 0.13770228624343872, -0.8141153454780579,
      -1.020185947418213, -0.2741500735282898, 0.7210652828216553},
     {}}};

TEST_CASE("Sgd: six steps equal PyTorch's", "[optim]") {
  for (const Golden& golden : kGolden) {
    Values start(7), grad(7);
    for (size_t i = 0; i < 7; ++i) start[i] = std::sin(static_cast<double>(i) + 1);
    const FlatShard shard{.name = "golden",
                          .master = from_values(start, {7}),
                          .grad = zeros({7}),
                          .low = {},
                          .segments = {{"decays", 0, 4, 1, true}, {"plain", 4, 7, 0.5f, false}}};
    Sgd sgd({shard}, golden.options);
    for (int step = 1; step <= 6; ++step) {
      for (size_t i = 0; i < 7; ++i) {
        grad[i] = std::cos(0.7 * step + 1.3 * static_cast<double>(i)) * (i == 2 ? 1e-4 : 1.0);
      }
      Tensor(shard.grad).copy_(from_values(grad, {7}));
      sgd.step(0.1f / static_cast<float>(step));
    }
    INFO("momentum " << golden.options.momentum << ", nesterov " << golden.options.nesterov);
    check_close(shard.master.to_vector(), golden.parameters, 1e-6, "parameters");
    const auto state = sgd.state();
    REQUIRE(state.size() == (golden.momentum_buffer.empty() ? 0 : 1));
    if (state.empty()) continue;
    CHECK(state[0].name == "momentum_buffer");
    check_close(state[0].tensors[0].to_vector(), golden.momentum_buffer, 1e-6, "momentum_buffer");
  }
}

TEST_CASE("Sgd: mistakes are named", "[optim]") {
  const auto has = [](const SgdOptions& options, const std::string& part) {
    CHECK(error_of([&] { Sgd({}, options); }).find(part) == 0);
  };
  SgdOptions options;
  options.momentum = -1;
  has(options, "Sgd: momentum must be at least 0, got -1");
  options = {};
  options.weight_decay = -1;
  has(options, "Sgd: weight_decay must be at least 0, got -1");
  options = {};
  options.nesterov = true;
  has(options, "Sgd: nesterov needs a momentum above 0");
}

}  // namespace
}  // namespace tessera
