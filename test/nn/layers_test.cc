// Linear, Embedding, LayerNorm, RmsNorm, Dropout, Mlp, SwiGlu.

#include "core/autograd.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/matmul/matmul.h"
#include "kernels/pointwise/pointwise.h"
#include "nn/dropout.h"
#include "nn/embedding.h"
#include "nn/mlp.h"
#include "nn/norm.h"
#include "test/testing.h"

namespace tessera::nn {
namespace {

using testing::check_bitwise;
using testing::check_close;
using testing::error_of;
using testing::randn;
using testing::tol;

TEST_CASE("linear: closed form", "[nn]") {
  Linear layer(3, 2);
  layer.parameter("weight").tensor.copy_(from_values({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, {2, 3}, kF32));
  layer.parameter("bias").tensor.copy_(from_values({10.0, 20.0}, {2}, kF32));
  const Tensor x = from_values({1.0, 0.0, -1.0}, {1, 3}, kF32);
  CHECK(layer.forward(x).to_vector() == std::vector<double>{8, 18});
  const Tensor residual = from_values({100.0, 200.0}, {1, 2}, kF32);
  CHECK(layer.forward(x, residual).to_vector() == std::vector<double>{108, 218});
  CHECK(layer.kind() == "Linear(3 -> 2)");
}

TEST_CASE("linear: the fused activation is the activation", "[nn]") {
  Linear layer(17, 13);
  layer.initialize(3);
  const Tensor x = randn({5, 17});
  for (const Gelu kind : {Gelu::kTanh, Gelu::kExact}) {
    check_close(layer.forward(x, kind), gelu(layer.forward(x), kind), tol(kF32, 17));
  }
}

TEST_CASE("linear: initial values", "[nn]") {
  Linear layer(16, 64);
  layer.initialize(1);
  double largest = 0;
  for (const char* name : {"weight", "bias"}) {
    for (const double value : layer.parameter(name).tensor.to_vector()) {
      largest = std::max(largest, std::fabs(value));
    }
  }
  CHECK(largest <= 0.25);
  CHECK(largest > 0.24);

  Linear given(16, 64, {.bias = true, .init = Init::normal(0, 3)});
  given.initialize(1);
  CHECK(given.parameter("bias").tensor.to_vector() == std::vector<double>(64, 0.0));
  double square = 0;
  for (const double value : given.weight().to_vector()) square += value * value / (16 * 64);
  CHECK(std::sqrt(square) > 2.8);
  CHECK(std::sqrt(square) < 3.2);

  Linear plain(16, 64, {.bias = false});
  CHECK(plain.named_parameters().size() == 1);
  CHECK(plain.kind() == "Linear(16 -> 64, no bias)");
}

TEST_CASE("embedding: rows of the table", "[nn]") {
  Embedding table(5, 2);
  table.initialize(1);
  const std::vector<double> weight = table.weight().to_vector();
  const Tensor y = table.forward(from_values({4, 0, 4}, {1, 3}));
  CHECK(y.shape() == Shape{1, 3, 2});
  CHECK(y.to_vector() ==
        std::vector<double>{weight[8], weight[9], weight[0], weight[1], weight[8], weight[9]});
  CHECK(table.kind() == "Embedding(5, 2)");
}

TEST_CASE("norms: fused with the residual addition", "[nn]") {
  LayerNorm layer(11);
  RmsNorm rms(11, 1e-6f);
  layer.initialize(1);
  rms.initialize(1);
  const Tensor x = randn({3, 11}), residual = randn({3, 11}, kF32, 2);
  const ResidualNorm a = layer.forward(x, residual), b = rms.forward(x, residual);
  check_bitwise(a.sum, add(x, residual));
  check_bitwise(b.sum, a.sum);
  check_close(a.y, layer.forward(a.sum), tol(kF32, 11));
  check_close(b.y, rms.forward(a.sum), tol(kF32, 11));
  for (Module* norm : {static_cast<Module*>(&layer), static_cast<Module*>(&rms)}) {
    for (const NamedParameter& entry : norm->named_parameters()) {
      CHECK(entry.parameter->is_norm);
      CHECK_FALSE(entry.parameter->decay);
    }
  }
  CHECK(layer.kind() == "LayerNorm(11, eps 1e-05)");
  CHECK(LayerNorm(4, 1e-5f, false).kind() == "LayerNorm(4, eps 1e-05, no bias)");
  CHECK(rms.kind() == "RmsNorm(11, eps 1e-06)");
}

struct CountTensors : ModuleHook {
  void pre_forward(Module&, std::span<Tensor*> inputs) override { num_inputs = inputs.size(); }
  void post_forward(Module&, std::span<Tensor*> outputs) override { num_outputs = outputs.size(); }
  void on_forward_error(Module&) noexcept override {}
  size_t num_inputs = 0, num_outputs = 0;
};

TEST_CASE("norms: a hook sees both results", "[nn]") {
  RmsNorm rms(4);
  rms.initialize(1);
  auto hook = std::make_shared<CountTensors>();
  rms.set_hook(hook);
  const Tensor x = randn({2, 4});
  call(rms, x, x);
  CHECK(hook->num_inputs == 2);
  CHECK(hook->num_outputs == 2);
}

TEST_CASE("dropout: only while training", "[nn]") {
  Dropout layer(0.5);
  const Tensor x = full({64, 64}, 3);
  CHECK(layer.is_active());
  double zeros = 0;
  for (const double value : layer.forward(x).to_vector()) {
    REQUIRE((value == 0 || value == 6));
    zeros += value == 0;
  }
  CHECK(std::fabs(zeros / (64 * 64) - 0.5) < 0.05);
  layer.train(false);
  CHECK_FALSE(layer.is_active());
  CHECK(layer.forward(x).impl() == x.impl());
  CHECK_FALSE(Dropout(0).is_active());
  CHECK(error_of([] { Dropout(1.0); }).starts_with("Dropout: expected p in [0, 1), got 1"));
  CHECK(error_of([] { Dropout(-0.1); }).starts_with("Dropout: expected p in [0, 1), got -0.1"));
}

TEST_CASE("mlp: is two linear layers around a gelu", "[nn]") {
  MlpConfig config;
  config.width = 7;
  config.ffn_width = 13;
  config.gelu = Gelu::kExact;
  Mlp mlp(config);
  mlp.initialize(2);
  const auto weight = [&](const char* name) { return mlp.parameter(name).tensor; };
  const Tensor x = randn({3, 7}), residual = randn({3, 7}, kF32, 2);
  const Tensor h = gelu(linear(x, weight("up.weight"), weight("up.bias")), Gelu::kExact);
  const Tensor y = linear(h, weight("down.weight"), weight("down.bias"));
  check_close(mlp.forward(x), y, tol(kF32, 13));
  check_close(mlp.forward(x, residual), add(y, residual), tol(kF32, 13));
  CHECK(mlp.kind() == "Mlp(gelu exact)");
}

TEST_CASE("swiglu: the gate's rows come first", "[nn]") {
  MlpConfig config;
  config.width = 7;
  config.ffn_width = 13;
  config.bias = false;
  SwiGlu mlp(config);
  mlp.initialize(2);
  const Tensor gate_up = mlp.parameter("gate_up.weight").tensor.detach();
  const Tensor down = mlp.parameter("down.weight").tensor.detach();
  const Tensor x = randn({3, 7}), residual = randn({3, 7}, kF32, 2);
  const Tensor h =
      mul(silu(linear(x, gate_up.narrow(0, 0, 13))), linear(x, gate_up.narrow(0, 13, 13)));
  check_close(mlp.forward(x), linear(h, down), tol(kF32, 13));
  check_close(mlp.forward(x, residual), add(linear(h, down), residual), tol(kF32, 13));
  CHECK(mlp.named_parameters().size() == 2);
}

}  // namespace
}  // namespace tessera::nn
