// Training curves of PyTorch (test/golden) on several ranks.

#include "test/golden/golden.h"

#include <map>

#include "core/autograd.h"
#include "dist/comm/local.h"
#include "dist/fsdp/fully_shard.h"
#include "optim/adamw.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

constexpr double kCurveTolerance = 5e-6;     // relative, of losses and gradient norms
constexpr double kGradientTolerance = 1e-5;  // of a parameter's largest element

struct Curve {
  std::vector<double> loss, grad_norm;
  std::map<std::string, std::vector<double>> gradients;  // of step 0
};

Curve train(dist::World& world, const Golden& golden, dist::Strategy strategy) {
  const std::unique_ptr<nn::LanguageModel> model = golden.make_model();
  golden.load_initial(*model);
  dist::FsdpOptions fsdp_options;
  fsdp_options.strategy = strategy;
  auto fsdp = dist::fully_shard(*model, world, fsdp_options);
  optim::AdamW adamw(fsdp->shards(), golden.adamw_options());
  const int64_t rows = golden.batch / world.world_size();
  Curve curve;
  for (int64_t step = 0; step < golden.num_steps; ++step) {
    const auto num_valid = static_cast<double>(golden.num_valid(step));
    const Tensor scale = full({}, 1 / num_valid);
    const LossSum loss =
        model->loss(golden.ids_BT(step, world.rank() * rows, rows),
                    golden.targets_BT(step, world.rank() * rows, rows), {}, {.grad_scale = scale});
    backward(loss.sum, scale);
    Tensor loss_sum = loss.sum.detach().clone();
    fsdp->all_reduce_scalars(loss_sum);
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(golden.clip);
    if (step == 0) {
      fsdp->for_each_full(dist::Fsdp::State::kGradient,
                          [&](const std::string& name, const Tensor& full) {
                            curve.gradients[name] = full.to_vector();
                          });
    }
    adamw.step(static_cast<float>(golden.lr[static_cast<size_t>(step)]), clip.factor,
               clip.found_inf);
    fsdp->end_step();
    curve.loss.push_back(loss_sum.item() / num_valid);
    curve.grad_norm.push_back(clip.norm.item());
  }
  return curve;
}

void check_curve(const Curve& curve, const Golden& golden) {
  for (size_t i = 0; i < golden.loss.size(); ++i) {
    INFO("step " << i << ": loss " << curve.loss[i] << " and " << golden.loss[i] << ", norm "
                 << curve.grad_norm[i] << " and " << golden.grad_norm[i]);
    REQUIRE(std::fabs(curve.loss[i] / golden.loss[i] - 1) <= kCurveTolerance);
    REQUIRE(std::fabs(curve.grad_norm[i] / golden.grad_norm[i] - 1) <= kCurveTolerance);
  }
  REQUIRE(curve.gradients.size() == golden.parameters.size());
  for (const GoldenParameter& p : golden.parameters) {
    double largest = 0, error = 0;
    const std::vector<double>& actual = curve.gradients.at(p.name);
    REQUIRE(actual.size() == p.grad.size());
    for (size_t i = 0; i < p.grad.size(); ++i) {
      largest = std::max(largest, std::fabs(static_cast<double>(p.grad[i])));
      error = std::max(error, std::fabs(actual[i] - static_cast<double>(p.grad[i])));
    }
    INFO(p.name << ": largest " << largest << ", error " << error);
    CHECK(error <= kGradientTolerance * largest);
  }
}

TEST_CASE("golden: PyTorch's curves on 1, 2 and 4 ranks", "[golden][fsdp]") {
  for (const char* name : {"gpt2", "llama", "qwen"}) {
    const Golden golden = load_golden(name);
    for (const int world : {1, 2, 4}) {
      for (const dist::Strategy strategy : {dist::Strategy::kFullShard, dist::Strategy::kNoShard}) {
        INFO(name << ", " << world << " ranks, " << std::string(name_of(strategy)));
        std::vector<Curve> curves(static_cast<size_t>(world));
        dist::run_ranks(world, [&](dist::World& w) {
          curves[static_cast<size_t>(w.rank())] = train(w, golden, strategy);
        });
        check_curve(curves[0], golden);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
