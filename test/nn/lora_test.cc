#include "nn/lora.h"

#include <cmath>
#include <set>

#include "core/autograd.h"
#include "core/profiler.h"
#include "core/random.h"
#include "core/recompute.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/matmul/matmul.h"
#include "kernels/random/random.h"
#include "nn/bert/bert.h"
#include "nn/bloom/bloom.h"
#include "nn/gpt2/gpt2.h"
#include "nn/linear.h"
#include "nn/llama/llama.h"
#include "test/kernels/op_testing.h"
#include "test/nn/model_checks.h"
#include "test/testing.h"

namespace tessera::nn {
namespace {

using namespace testing;
using Names = std::vector<std::string>;

// Two adapters of rank 2, of columns [1, 4) and [4, 6) of 7.
constexpr LoraColumns kColumns[] = {{1, 3}, {4, 2}};
const std::vector<Shape> kShapes = {{2, 3, 7}, {2, 3, 5}, {4, 5}, {5, 2}};  // y, x, a, b

Function lora_of(double dropout) {
  return [dropout](const Tensors& t) {
    random_state() = {.seed = 3, .step = 1, .op_index = 4, .sample_offset = 2};
    const Tensor y = t[0] * 1.0;  // one that may be written to
    return lora_add_(y, t[1], t[2], t[3], kColumns, {.rank = 2, .scale = 1.5, .dropout = dropout});
  };
}

/// The same by ops that each are tested.
Tensor composed(const Tensors& t, double dropout) {
  random_state() = {.seed = 3, .step = 1, .op_index = 4, .sample_offset = 2};
  const Tensor x = dropout > 0 ? tessera::dropout(t[1], dropout) : t[1];
  std::vector<double> y = t[0].to_vector();
  int64_t first_b = 0;
  for (size_t p = 0; p < 2; ++p) {
    const Tensor a = t[2].narrow(0, static_cast<int64_t>(2 * p), 2);
    const Tensor b = t[3].narrow(0, first_b, kColumns[p].count);
    const std::vector<double> part = (linear(linear(x, a), b) * 1.5).to_vector();
    for (size_t i = 0; i < part.size(); ++i) {
      const auto n = static_cast<size_t>(kColumns[p].count);
      y[i / n * 7 + static_cast<size_t>(kColumns[p].first) + i % n] += part[i];
    }
    first_b += kColumns[p].count;
  }
  return from_values(std::span<const double>(y), t[0].shape(), kF64);
}

Tensors inputs(DType dtype = kF64) {
  Tensors t;
  for (size_t i = 0; i < kShapes.size(); ++i) t.push_back(randn(kShapes[i], dtype, i + 1));
  return t;
}

TEST_CASE("lora_add_: its formula, with and without dropout, and its gradients", "[lora]") {
  for (const double dropout : {0.0, 0.4}) {
    Tensors t = inputs();
    check_close(lora_of(dropout)(t), composed(t, dropout), 1e-12);
    for (Tensor& x : t) x.set_requires_grad(true);
    gradcheck(lora_of(dropout), t);
  }
}

TEST_CASE("lora_add_: every dtype follows f64", "[lora]") {
  check_dtypes(lora_of(0), kShapes, 4);
}

TEST_CASE("lora_add_: the same bits with any number of threads", "[lora]") {
  check_same_on_threads([]() -> testing::Run {
    const Tensors t = {randn({129, 96}, kF32, 1), randn({129, 40}, kF32, 2),
                       randn({16, 40}, kF32, 3), randn({90, 8}, kF32, 4)};
    const LoraColumns columns[] = {{0, 60}, {66, 30}};
    return testing::run(
        [&](const Tensors& in) {
          random_state() = {.seed = 3};
          return lora_add_(in[0] * 1.0, in[1], in[2], in[3], columns,
                           {.rank = 8, .scale = 2, .dropout = 0.1});
        },
        t, kF32);
  });
}

TEST_CASE("lora_add_: column slices, gradients that are added, f32 gradients of bf16", "[lora]") {
  Tensors t = inputs(kBF16);
  const Tensor wide = randn({2, 3, 9}, kBF16, 9);
  const Tensor x = wide.narrow(2, 2, 5);
  t[1] = x.contiguous();
  const Tensor expected = lora_of(0)(t);
  t[1] = x;
  check_bitwise(lora_of(0)(t), expected);

  // A gradient in f32, onto what is there, is not rounded to bf16.
  const Tensors plain = inputs(kBF16);
  const Run reference = testing::run(lora_of(0), plain, kF64);
  Tensors leaves;
  std::vector<Tensor> sinks;
  for (const Tensor& p : plain) {
    leaves.push_back(p.detach().clone().set_requires_grad(true));
    sinks.push_back(full(p.shape(), 100, kF32));
    set_grad_sink(leaves.back(), std::make_shared<BufferSink>(sinks.back(), true));
  }
  backward(lora_of(0)(leaves), randn(kShapes[0], kF16, 77).to(kBF16));
  for (const size_t i : {size_t{2}, size_t{3}}) {
    std::vector<double> got = sinks[i].to_vector();
    for (double& value : got) value -= 100;
    check_close(got, reference.grads[i].to_vector(), tol(kBF16), "gradient");
  }
}

TEST_CASE("lora_add_: what does not fit is named", "[lora]") {
  const Tensors t = inputs();
  const auto call = [&](const Tensors& in, std::vector<LoraColumns> columns, int64_t rank,
                        double dropout) {
    lora_add_(in[0], in[1], in[2], in[3], columns, {.rank = rank, .dropout = dropout});
  };
  const std::vector<LoraColumns> good(std::begin(kColumns), std::end(kColumns));
  check_error([&] { call(t, good, 3, 0); }, {"lora_add_", "rank 3", "[6, 5]", "[4, 5]"});
  check_error([&] { call(t, {{1, 3}, {3, 2}}, 2, 0); }, {"columns [3, 5) after [..., 4)"});
  check_error([&] { call(t, {{1, 3}, {4, 4}}, 2, 0); }, {"columns [4, 8)", "7 of y"});
  check_error([&] { call(t, good, 2, 1.0); }, {"dropout must be in [0, 1), got 1"});
  Tensors other = t;
  other[2] = t[2].to(kF32);
  check_error([&] { call(other, good, 2, 0); }, {"same floating dtype", "f64, f64, f32 and f64"});
  other = t;
  other[0] = randn({3, 2, 7}, kF64);
  check_error([&] { call(other, good, 2, 0); }, {"leading dimensions", "[3, 2, 7]"});
}

TEST_CASE("linear: a frozen weight takes no product for its gradient, and its input no memory",
          "[lora]") {
  for (const bool is_frozen : {false, true}) {
    const Tensor w = leaf({3, 4}), bias = leaf({3}), x = leaf({5, 4});
    if (is_frozen) Tensor(w).set_requires_grad(false);
    for (const int kind : {0, 1, 2}) {
      Tensor input = x * 1.0;
      const std::weak_ptr<Storage> bytes = input.storage();
      const Tensor y = kind == 0   ? linear(input, w, bias)
                       : kind == 1 ? linear_gelu(input, w, bias, Gelu::kTanh)
                                   : linear_residual(input, w, bias, zeros({5, 3}, kF64));
      input = Tensor();
      CHECK(bytes.expired() == is_frozen);
      current_stream().synchronize();
      profiler::start();
      backward(y, full({5, 3}, 1, kF64));
      current_stream().synchronize();
      profiler::stop();
      int num_products = 0;
      for (const TraceEvent& e : profiler::events())
        num_products += e.name == std::string("matmul");
      CHECK(num_products == (is_frozen ? 1 : 2));
    }
    CHECK(w.grad().is_defined() == !is_frozen);
  }
}

LlamaConfig tiny() {
  LlamaConfig c;
  c.vocab_size = 17;
  c.context_length = 8;
  c.num_layers = 2;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.width = 8;
  c.ffn_width = 12;
  return c;
}

/// "blocks.0.attn.qkv: q_proj 0+8, v_proj 12+4" for each adapted layer.
Names adapters_of(Module& model) {
  Names all;
  for (const NamedModule& entry : model.named_modules()) {
    const auto* const linear = dynamic_cast<const Linear*>(entry.module);
    if (linear == nullptr || linear->lora() == nullptr) continue;
    std::string line = entry.name + ":";
    for (const LoraPart& part : linear->lora()->parts()) {
      line += fmt::format(" {} {}+{}", part.name.substr(part.name.rfind('.') + 1), part.rows.first,
                          part.rows.count);
    }
    all.push_back(line);
  }
  return all;
}

Names trained(Module& model) {
  Names names;
  for (const NamedParameter& p : model.named_parameters()) {
    if (p.parameter->tensor.requires_grad()) names.push_back(p.name);
  }
  return names;
}

template <class Model, class Config>
Names adapters(const Config& config, const std::string& targets) {
  const DeferredInit deferred;
  Model model(config);
  add_lora(model, {.targets = targets});
  return adapters_of(model);
}

TEST_CASE("add_lora: names of transformers choose parts of packed layers", "[lora]") {
  CHECK(adapters<Llama>(tiny(), "v_proj, q_proj,down_proj") ==
        Names{"blocks.0.attn.qkv: q_proj 0+8 v_proj 12+4", "blocks.0.mlp.down: down_proj 0+8",
              "blocks.1.attn.qkv: q_proj 0+8 v_proj 12+4", "blocks.1.mlp.down: down_proj 0+8"});
  CHECK(adapters<Llama>(tiny(), "model.layers.1.self_attn.k_proj") ==
        Names{"blocks.1.attn.qkv: k_proj 8+4"});
  CHECK(adapters<Llama>(tiny(), "layers.0.mlp.up_proj") ==
        Names{"blocks.0.mlp.gate_up: up_proj 12+12"});
  // Ours are the whole of a layer.
  CHECK(adapters<Llama>(tiny(), "blocks.1.*.qkv,mlp.gate_up") ==
        Names{"blocks.0.mlp.gate_up: gate_proj 0+12 up_proj 12+12",
              "blocks.1.attn.qkv: q_proj 0+8 k_proj 8+4 v_proj 12+4",
              "blocks.1.mlp.gate_up: gate_proj 0+12 up_proj 12+12"});
  LlamaConfig one = tiny();
  one.num_layers = 1;
  CHECK(adapters<Llama>(one, "all-linear") ==
        Names{"blocks.0.attn.qkv: q_proj 0+8 k_proj 8+4 v_proj 12+4",
              "blocks.0.attn.out: o_proj 0+8", "blocks.0.mlp.gate_up: gate_proj 0+12 up_proj 12+12",
              "blocks.0.mlp.down: down_proj 0+8"});
  Gpt2Config gpt2;
  gpt2.vocab_size = 17, gpt2.context_length = 8, gpt2.num_layers = 1, gpt2.num_heads = 2;
  gpt2.width = 4;
  CHECK(adapters<Gpt2>(gpt2, "c_attn, c_proj") == Names{"blocks.0.attn.qkv: c_attn 0+12",
                                                        "blocks.0.attn.out: c_proj 0+4",
                                                        "blocks.0.mlp.down: c_proj 0+4"});
  BloomConfig bloom;
  bloom.vocab_size = 17, bloom.context_length = 8, bloom.num_layers = 1, bloom.num_heads = 2;
  bloom.width = 4;
  CHECK(adapters<Bloom>(bloom, "query_key_value") ==
        Names{"blocks.0.attn.qkv: query_key_value 0+12"});
  BertConfig bert;
  bert.vocab_size = 17, bert.context_length = 8, bert.num_layers = 1, bert.num_heads = 2;
  bert.width = 4;
  CHECK(adapters<Bert>(bert, "query,value") == Names{"blocks.0.attn.qkv: query 0+4 value 8+4"});
}

TEST_CASE("add_lora: a model of one's own has its own names; all else is frozen", "[lora]") {
  struct Net : Module {
    Child<Linear> in{this, "in", 4, 6};
    Child<Linear> out{this, "out", 6, 2};
    Tensor forward(const Tensor& x) { return out(in(x)); }
  } net;
  net.initialize(1);
  const Tensor x = randn({3, 4});
  const std::vector<double> before = net.forward(x).to_vector();
  add_lora(net, {.targets = "in", .rank = 2, .alpha = 3, .rslora = true, .modules_to_save = "out"},
           7);
  CHECK(net.in->lora()->scale() == 3 / std::sqrt(2.0));
  CHECK(trained(net) == Names{"in.lora.A", "in.lora.B", "out.weight", "out.bias"});
  CHECK(net.forward(x).to_vector() == before);  // B starts at zero
  const std::vector<double> a = net.parameter("in.lora.A").tensor.to_vector();
  double largest = 0;
  for (const double value : a) largest = std::max(largest, std::fabs(value));
  CHECK(largest <= 0.5);  // 1 / sqrt(4)
  CHECK(largest > 0.3);
  const Tensor again = empty({2, 4});
  fill_init(again, Init::uniform(-0.5, 0.5), 7, "in.lora.A");
  CHECK(again.to_vector() == a);

  // The formula, through each form of forward.
  Tensor& b = net.parameter("in.lora.B").tensor;
  {
    NoGrad no_grad;
    b.copy_(randn({6, 2}));
  }
  const Tensor& w = net.in->weight();
  const Tensor bias = net.parameter("in.bias").tensor;
  const auto delta = [&] {
    return linear(linear(x, net.parameter("in.lora.A").tensor), b) * (3 / std::sqrt(2.0));
  };
  const NoGrad no_grad;
  const Tensor y = add(linear(x, w, bias), delta());
  check_close(net.in->forward(x), y, 4 * tol(kF32));
  check_close(net.in->forward(x, Gelu::kExact), gelu(y, Gelu::kExact), 4 * tol(kF32));
  const Tensor residual = randn({3, 6}, kF32, 4);
  check_close(net.in->forward(x, residual), add(y, residual), 4 * tol(kF32));
  const LoraOff off;
  check_bitwise(net.in->forward(x, Gelu::kExact), gelu(linear(x, w, bias), Gelu::kExact));
}

TEST_CASE("add_lora: dropout is of training alone", "[lora]") {
  Linear layer(4, 6);
  layer.initialize(1);
  layer.add_lora({{"", {0, 6}}}, {.targets = "", .rank = 2, .dropout = 0.5});
  layer.initialize(1);
  layer.parameter("lora.B").tensor.fill_(1);
  const NoGrad no_grad;
  const Tensor x = randn({3, 4});
  random_state() = {.seed = 1};
  const std::vector<double> one = layer.forward(x).to_vector();
  CHECK(layer.forward(x).to_vector() != one);
  layer.train(false);
  const std::vector<double> plain = layer.forward(x).to_vector();
  CHECK(plain != one);
  CHECK(layer.forward(x).to_vector() == plain);
  CHECK(random_state().op_index == 2);
}

TEST_CASE("add_lora: an MLP in tiles has the same bits and masks of dropout", "[lora]") {
  Llama model(tiny());
  model.initialize(1);
  add_lora(model, {.targets = "all-linear", .rank = 2, .dropout = 0.3});
  const NoGrad no_grad;
  for (const NamedParameter& p : model.named_parameters()) {
    if (is_lora(p)) p.parameter->tensor.copy_(randn(p.parameter->tensor.shape()));
  }
  const GradMode grad(true);
  testing::check_tiles(model);
}

TEST_CASE("LoraOff: the model without adapters, and never where backward follows", "[lora]") {
  Llama model(tiny());
  model.initialize(1);
  const Tensor ids = randint(0, 17, {2, 8});
  std::vector<double> before;
  {
    const NoGrad no_grad;
    before = model.logits(ids).to_vector();
  }
  add_lora(model, {.targets = "all-linear"});
  const NoGrad no_grad;
  for (const NamedParameter& p : model.named_parameters()) {
    if (is_lora(p)) p.parameter->tensor.copy_(randn(p.parameter->tensor.shape()));
  }
  CHECK(model.logits(ids).to_vector() != before);
  {
    const LoraOff off;
    CHECK(model.logits(ids).to_vector() == before);
    const GradMode grad(true);
    check_error([&] { model.logits(ids); }, {"LoraOff", "expected NoGrad"});
    model.set_recompute({RecomputePolicy::Kind::kFull});
    check_error([&] { model.logits(ids); }, {"LoraOff", "expected NoGrad"});
  }
  CHECK(model.logits(ids).to_vector() != before);
}

TEST_CASE("add_lora: what is wrong is named in one line", "[lora]") {
  const auto error = [](const LoraOptions& options, bool tied = false) {
    const DeferredInit deferred;
    LlamaConfig c = tiny();
    c.tied = tied;
    Llama model(c);
    return error_of([&] { add_lora(model, options); });
  };
  CHECK(error({.targets = "q_proj,qproj"}) ==
        "LoraOptions::targets: no linear layer is called \"qproj\", expected all-linear or some of "
        "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj");
  CHECK(error({.targets = ""}).starts_with("LoraOptions::targets: none, expected all-linear or"));
  CHECK(error({.targets = "embed_tokens"}).find("no linear layer is called") != std::string::npos);
  CHECK(error({.targets = "q_proj", .rank = 0}) == "LoraOptions::rank: 0, expected at least 1");
  CHECK(error({.targets = "q_proj", .alpha = 0}) ==
        "LoraOptions::alpha: 0, expected a positive number");
  CHECK(error({.targets = "q_proj", .dropout = 1}) ==
        "LoraOptions::dropout: 1, expected a number in [0, 1)");
  CHECK(
      error({.targets = "q_proj", .modules_to_save = "score"}) ==
      "LoraOptions::modules_to_save: no module is called \"score\", expected a name such as embed "
      "or head");
  CHECK(error({.targets = "q_proj", .modules_to_save = "k_proj"}) ==
        "LoraOptions::modules_to_save: k_proj is a part of blocks.0.attn.qkv.weight, which is "
        "trained as one, expected all of its parts");
  CHECK(error({.targets = "o_proj", .modules_to_save = "o_proj"}) ==
        "LoraOptions::targets: model.layers.0.self_attn.o_proj is one of modules_to_save too, "
        "expected one of both");

  const DeferredInit deferred;
  Llama model(tiny());
  add_lora(model, {.targets = "q_proj"});
  CHECK(error_of([&] { add_lora(model, {.targets = "q_proj"}); }) ==
        "LoraOptions::targets: blocks.0.attn.qkv.lora.A is there already, expected a model without "
        "adapters");
}

TEST_CASE("add_lora: modules_to_save by their names here and in transformers", "[lora]") {
  for (const char* name : {"lm_head", "head"}) {
    const DeferredInit deferred;
    Llama model(tiny());
    add_lora(model, {.targets = "down_proj", .modules_to_save = name});
    CHECK(trained(model) == Names{"blocks.0.mlp.down.lora.A", "blocks.0.mlp.down.lora.B",
                                  "blocks.1.mlp.down.lora.A", "blocks.1.mlp.down.lora.B",
                                  "head.weight"});
  }
  for (const char* name : {"lm_head", "embed_tokens", "head"}) {
    const DeferredInit deferred;
    LlamaConfig c = tiny();
    c.num_layers = 1, c.tied = true;
    Llama model(c);
    add_lora(model, {.targets = "down_proj", .modules_to_save = name});
    CHECK(trained(model) ==
          Names{"embed.weight", "blocks.0.mlp.down.lora.A", "blocks.0.mlp.down.lora.B"});
  }
}

}  // namespace
}  // namespace tessera::nn
