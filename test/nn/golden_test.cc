// Training curves of PyTorch (test/golden), on one rank.

#include "test/golden/golden.h"

#include "core/autograd.h"
#include "core/runtime/context.h"
#include "kernels/reduce/reduce.h"
#include "optim/adamw.h"
#include "optim/schedule.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

constexpr double kCurveTolerance = 5e-6;     // relative, of losses and gradient norms
constexpr double kGradientTolerance = 1e-5;  // of a parameter's largest element

/// One rank's training of a golden case: each parameter is a shard of its own.
class Training {
 public:
  explicit Training(const Golden& golden) : golden_(golden), model_(golden.make_model()) {
    golden.load_initial(*model_);
    std::vector<optim::FlatShard> shards;
    for (const nn::NamedParameter& entry : model_->named_parameters()) {
      Tensor& tensor = entry.parameter->tensor;
      tensor.set_grad(zeros(tensor.shape()));
      const int64_t numel = tensor.numel();
      const Tensor grad = tensor.grad().view({numel});
      optim::Segment segment{entry.name, 0, numel, 1, entry.parameter->decay};
      shards.push_back({entry.name, tensor.detach().view({numel}), grad, {}, {segment}});
      grads_.push_back(grad);
      const Segment whole{0, numel};
      segments_.push_back(segments_to_device(std::span(&whole, 1), numel));
    }
    adamw_ = std::make_unique<optim::AdamW>(std::move(shards), golden.adamw_options());
  }

  struct Result {
    double loss, grad_norm;
  };

  /// Forward and backward of a step in micro-batches; the gradients are there afterwards.
  Result run(int64_t step, int64_t num_micro_batches = 1) {
    for (Tensor& grad : grads_) grad.fill_(0);
    const double num_valid = static_cast<double>(golden_.num_valid(step));
    const int64_t num_rows = golden_.batch / num_micro_batches;
    double loss = 0;
    for (int64_t i = 0; i < num_micro_batches; ++i) {
      const LossSum sum = model_->loss(golden_.ids_BT(step, i * num_rows, num_rows),
                                       golden_.targets_BT(step, i * num_rows, num_rows));
      backward(sum.sum, full({}, 1 / num_valid));
      loss += sum.sum.item() / num_valid;
    }
    const Tensor partials = zeros({static_cast<int64_t>(grads_.size())}, kF64);
    for (size_t i = 0; i < grads_.size(); ++i) {
      partial_norm(partials.narrow(0, static_cast<int64_t>(i), 1), grads_[i], segments_[i], 2);
    }
    combine_norms(norm_, partials, 2);
    return {loss, norm_.item()};
  }

  /// Clips and applies the gradients of `run`.
  void update(int64_t step) {
    clip_factor(factor_, found_inf_, norm_, golden_.clip);
    adamw_->step(static_cast<float>(golden_.lr[static_cast<size_t>(step)]), factor_, found_inf_);
  }

  nn::LanguageModel& model() { return *model_; }

 private:
  const Golden& golden_;
  std::unique_ptr<nn::LanguageModel> model_;
  std::vector<Tensor> grads_, segments_;
  std::unique_ptr<optim::AdamW> adamw_;
  Tensor norm_ = empty({}), factor_ = empty({}), found_inf_ = empty({}, kU8);
};

double relative(double actual, double expected) {
  return std::fabs(actual / expected - 1);
}

struct Curve {
  double worst_loss = 0, worst_norm = 0;  ///< relative distance to the golden ones
};

Curve train(const Golden& golden) {
  Training training(golden);
  Curve curve;
  for (int64_t step = 0; step < golden.num_steps; ++step) {
    const auto [loss, grad_norm] = training.run(step);
    training.update(step);
    const auto index = static_cast<size_t>(step);
    curve.worst_loss = std::max(curve.worst_loss, relative(loss, golden.loss[index]));
    curve.worst_norm = std::max(curve.worst_norm, relative(grad_norm, golden.grad_norm[index]));
  }
  return curve;
}

TEST_CASE("golden: every loss and gradient norm of 30 steps", "[golden]") {
  for (const char* name : {"gpt2", "llama", "qwen"}) {
    INFO(name);
    const Golden golden = load_golden(name);
    REQUIRE(golden.num_steps == 30);
    const Curve curve = train(golden);
    CHECK(curve.worst_loss <= kCurveTolerance);
    CHECK(curve.worst_norm <= kCurveTolerance);
  }
}

TEST_CASE("golden: every gradient of the first step", "[golden]") {
  for (const char* name : {"gpt2", "llama", "qwen"}) {
    INFO(name);
    const Golden golden = load_golden(name);
    for (const int64_t num_micro_batches : {1, 2, 8}) {
      INFO(num_micro_batches << " micro-batches");
      Training training(golden);
      training.run(0, num_micro_batches);
      const auto parameters = training.model().named_parameters();
      REQUIRE(parameters.size() == golden.parameters.size());
      for (size_t i = 0; i < parameters.size(); ++i) {
        INFO(parameters[i].name);
        CHECK(parameters[i].name == golden.parameters[i].name);
        const std::vector<double> actual = parameters[i].parameter->tensor.grad().to_vector();
        const std::vector<float>& expected = golden.parameters[i].grad;
        REQUIRE(actual.size() == expected.size());
        double largest = 0, worst = 0;
        for (size_t k = 0; k < actual.size(); ++k) {
          largest = std::max(largest, std::fabs(static_cast<double>(expected[k])));
          worst = std::max(worst, std::fabs(actual[k] - static_cast<double>(expected[k])));
        }
        INFO("largest " << largest << ", worst difference " << worst);
        CHECK(worst <= kGradientTolerance * largest);
      }
    }
  }
}

TEST_CASE("golden: the wrong GELU leaves the curves", "[golden]") {
  Golden golden = load_golden("gpt2");
  std::get<nn::Gpt2Config>(golden.config).gelu = Gelu::kExact;
  const Curve curve = train(golden);
  CHECK(curve.worst_loss > 2 * kCurveTolerance);
  CHECK(curve.worst_norm > 2 * kCurveTolerance);
}

TEST_CASE("golden: the schedule is that of the curves", "[golden]") {
  const Golden golden = load_golden("gpt2");
  const optim::Schedule schedule({.kind = optim::ScheduleKind::kCosine,
                                  .peak_lr = 3e-3f,
                                  .final_lr = 3e-4f,
                                  .num_steps = golden.num_steps,
                                  .warmup_steps = 5});
  for (int64_t step = 0; step < golden.num_steps; ++step) {
    CHECK(relative(schedule.lr(step), golden.lr[static_cast<size_t>(step)]) < 2e-7);
  }
}

/// Losses and gradient norms of five steps.
std::vector<double> first_steps(Training& training) {
  std::vector<double> curve;
  for (int64_t step = 0; step < 5; ++step) {
    const auto [loss, grad_norm] = training.run(step);
    training.update(step);
    curve.insert(curve.end(), {loss, grad_norm});
  }
  return curve;
}

TEST_CASE("golden: recompute and a second run give the same bits", "[golden]") {
  const Golden golden = load_golden("llama");
  std::vector<double> first;
  for (const bool recompute : {false, true}) {
    Training training(golden);
    if (recompute) training.model().set_recompute({nn::RecomputePolicy::Kind::kFull, 1});
    const std::vector<double> curve = first_steps(training);
    if (first.empty()) first = curve;
    CHECK(curve == first);
  }
}

TEST_CASE("golden: the number of threads does not change a bit", "[golden]") {
  const Golden golden = load_golden("qwen");
  std::vector<double> first;
  for (const int num_threads : {1, 2}) {
    ContextOptions options;
    options.num_threads = num_threads;
    Context::Scope scope(std::make_shared<Context>(options));
    Training training(golden);
    const std::vector<double> curve = first_steps(training);
    if (first.empty()) first = curve;
    CHECK(curve == first);
  }
}

}  // namespace
}  // namespace tessera::testing
