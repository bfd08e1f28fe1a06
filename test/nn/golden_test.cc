// Training curves of PyTorch (test/golden), on one rank.

#include "test/golden/golden.h"

#include <nlohmann/json.hpp>

#include "core/autograd.h"
#include "core/runtime/context.h"
#include "kernels/reduce/reduce.h"
#include "optim/adamw.h"
#include "optim/schedule.h"
#include "test/temp_dir.h"
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

/// Values by name as make_gemma2.py has them: uniform in [-1, 1).
Tensor gemma2_values(const std::string& name, const Shape& shape) {
  std::vector<double> values = uniform(name, shape.numel());
  for (double& value : values) value = (value - 0.5) * 2;
  return from_values(values, shape, kF64);
}

/// Within `kGemma2Tolerance` of the largest: transformers' softmax and loss are f32.
constexpr double kGemma2Tolerance = 1e-6;
void check_gemma2(const Tensor& actual, const nlohmann::json& expected, const char* what) {
  const std::vector<double> values = expected;
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::fabs(value));
  check_close(actual.to_vector(), values, kGemma2Tolerance * largest, what);
}

TEST_CASE("golden: attention of Gemma 2, with and without a window", "[golden]") {
  nn::ParameterDtype dtype(kF64);
  const auto golden = nlohmann::json::parse(read_file(golden_dir() + "/gemma2.json"));
  nn::AttentionConfig c;
  c.width = golden["width"];
  c.num_heads = golden["num_heads"], c.num_kv_heads = golden["num_kv_heads"];
  c.head_width = golden["head_width"];
  c.scale = static_cast<float>(1 / std::sqrt(golden["query_scalar"].get<double>()));
  c.softcap = golden["attn_softcap"];
  c.rope = RopeOptions{.theta = golden["rope_theta"]};
  const Shape shape{golden["batch"], golden["num_tokens"], c.width};
  const int64_t q_rows = c.num_heads * c.head_width, kv_rows = c.num_kv_heads * c.head_width;
  for (size_t layer = 0; layer < 2; ++layer) {
    const auto& expected = golden["layers"][layer];
    c.window = expected["window"];
    INFO("layer " << layer << ", window " << c.window);
    nn::Attention attention(c);
    const Tensor qkv = attention.parameter("qkv.weight").tensor;
    const Tensor out = attention.parameter("out.weight").tensor;
    const auto weight = [&](const char* name, int64_t rows, int64_t cols) {
      return gemma2_values(fmt::format("{}.{}.weight", layer, name), {rows, cols});
    };
    qkv.detach().narrow(0, 0, q_rows).copy_(weight("q_proj", q_rows, c.width));
    qkv.detach().narrow(0, q_rows, kv_rows).copy_(weight("k_proj", kv_rows, c.width));
    qkv.detach().narrow(0, q_rows + kv_rows, kv_rows).copy_(weight("v_proj", kv_rows, c.width));
    out.detach().copy_(weight("o_proj", c.width, q_rows));
    Tensor x_BTC = gemma2_values("hidden", shape);
    x_BTC.set_requires_grad(true);
    const Tensor y_BTC = attention.forward(x_BTC);
    check_gemma2(y_BTC, expected["y"], "y");
    backward(y_BTC, gemma2_values("upstream", shape));
    check_gemma2(x_BTC.grad(), expected["dx"], "dx");
    check_gemma2(qkv.grad().narrow(0, 0, q_rows), expected["d_q_proj"], "dq");
    check_gemma2(qkv.grad().narrow(0, q_rows, kv_rows), expected["d_k_proj"], "dk");
    check_gemma2(qkv.grad().narrow(0, q_rows + kv_rows, kv_rows), expected["d_v_proj"], "dv");
    check_gemma2(out.grad(), expected["d_o_proj"], "do");
  }
}

TEST_CASE("golden: capped logits of Gemma 2 and their loss", "[golden]") {
  nn::ParameterDtype dtype(kF64);
  const auto golden = nlohmann::json::parse(read_file(golden_dir() + "/gemma2.json"));
  const auto& expected = golden["head"];
  const int64_t B = golden["batch"], T = golden["num_tokens"], C = golden["width"],
                V = golden["vocab_size"];
  nn::LmHead head(C, V, nn::Init::normal(0, 1), golden["logit_softcap"]);
  const Tensor w = head.weight();
  w.detach().copy_(gemma2_values("lm_head", {V, C}));
  Tensor x_BTC = gemma2_values("hidden", {B, T, C});
  x_BTC.set_requires_grad(true);
  check_gemma2(head.forward(x_BTC), expected["logits"], "logits");
  const std::vector<int32_t> labels = expected["labels"];
  const LossSum loss = head.forward(x_BTC, from_values(std::span<const int32_t>(labels), {B, T}),
                                    LinearCrossEntropyOptions{});
  const double count = loss.count.item();
  CHECK(relative(loss.sum.item() / count, expected["loss"]) < kGemma2Tolerance);
  backward(loss.sum, full({}, 1 / count, kF64));
  check_gemma2(x_BTC.grad(), expected["dx"], "dx");
  check_gemma2(w.grad(), expected["dw"], "dw");
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
TEST_CASE("golden: cross entropy with a z-loss and label smoothing is PyTorch's",
          "[golden][loss]") {
  const auto golden = nlohmann::json::parse(read_file(golden_dir() + "/loss_terms.json"));
  const auto targets_of = golden["targets"].get<std::vector<int64_t>>();
  const auto R = static_cast<int64_t>(targets_of.size());
  const auto values = golden["logits"].get<std::vector<double>>();
  const int64_t V = static_cast<int64_t>(values.size()) / R;
  const Tensor targets = from_values(std::span<const int64_t>(targets_of), {R});
  for (const DType dtype : {kF32, kF64}) {
    for (const auto& c : golden["cases"]) {
      // The options are f32.
      const CrossEntropyOptions options{.z_loss = c["z_loss"].get<float>(),
                                        .label_smoothing = c["label_smoothing"].get<float>()};
      Tensor logits = from_values(std::span<const double>(values), {R, V}, dtype);
      logits.set_requires_grad(true);
      const LossSum loss = cross_entropy(logits, targets, options);
      backward(loss.sum);
      CAPTURE(c["z_loss"].get<double>(), c["label_smoothing"].get<double>());
      CHECK(loss.sum.item() == Approx(c["loss"].get<double>()).epsilon(1e-6));
      check_close(logits.grad().to_vector(), c["gradient"].get<std::vector<double>>(), 1e-6);
    }
  }
}

}  // namespace tessera::testing
