#include "nn/llama/llama.h"

#include "kernels/loss/loss.h"
#include "kernels/matmul/matmul.h"
#include "test/nn/model_checks.h"

namespace tessera::nn {
namespace {

using testing::check_bitwise;
using testing::check_cache;
using testing::check_close;
using testing::check_gradients;
using testing::check_recompute;
using testing::check_tiles;
using testing::error_of;
using testing::loss_and_gradients;
using testing::randint;
using testing::tol;

LlamaConfig tiny() {
  LlamaConfig c;
  c.vocab_size = 23;
  c.context_length = 11;
  c.num_layers = 2;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.width = 8;
  c.head_width = 4;
  c.ffn_width = 10;
  c.init_stddev = 0.3;
  return c;
}

/// With a window in the first of two layers and soft-caps that bend.
LlamaConfig gemma_like() {
  LlamaConfig c = tiny();
  c.window = 3, c.window_layers = "wf";
  c.attn_softcap = 0.5f, c.logit_softcap = 1.5f;
  return c;
}

int64_t num_parameters(const LlamaConfig& config) {
  DeferredInit deferred;
  return Llama(config).num_parameters();
}

TEST_CASE("llama: relatives are configurations with their published sizes", "[llama]") {
  LlamaConfig llama3;
  llama3.vocab_size = 128256;
  llama3.num_layers = 32;
  llama3.num_heads = 32;
  llama3.num_kv_heads = 8;
  llama3.width = 4096;
  llama3.ffn_width = 14336;
  CHECK(num_parameters(llama3) == 8030261248);

  LlamaConfig mistral = llama3;
  mistral.vocab_size = 32000;
  CHECK(num_parameters(mistral) == 7241732096);

  LlamaConfig qwen2;
  qwen2.vocab_size = 151936;
  qwen2.num_layers = 24;
  qwen2.num_heads = 14;
  qwen2.num_kv_heads = 2;
  qwen2.width = 896;
  qwen2.ffn_width = 4864;
  qwen2.tied = true;
  qwen2.qkv_bias = true;
  CHECK(num_parameters(qwen2) == 494032768);

  LlamaConfig qwen3;
  qwen3.vocab_size = 151936;
  qwen3.num_layers = 28;
  qwen3.num_heads = 16;
  qwen3.num_kv_heads = 8;
  qwen3.width = 1024;
  qwen3.head_width = 128;
  qwen3.ffn_width = 3072;
  qwen3.tied = true;
  qwen3.qk_norm = true;
  CHECK(num_parameters(qwen3) == 596049920);
}

TEST_CASE("llama: defaults and operations per token", "[llama]") {
  DeferredInit deferred;
  LlamaConfig c = tiny();
  c.width = 4096;
  c.head_width = 0;
  c.ffn_width = 0;
  c.num_heads = 32;
  c.num_kv_heads = 0;
  Llama model(c);
  CHECK(model.config().ffn_width == 10944);  // 10922.67 up to a multiple of 64
  CHECK(model.shape().head_width == 128);
  CHECK(model.shape().num_kv_heads == 32);
  c.width = 192;
  c.num_heads = 2;
  CHECK(Llama(c).config().ffn_width == 512);  // already a multiple

  Llama grouped(tiny());
  const double matrices = 2.0 * ((4 + 2 * 2) * 4 * 8 + 4 * 4 * 8 + 3 * 8 * 10) + 23 * 8;
  CHECK(grouped.flops_per_token(7) == 6 * (matrices + 2.0 * 4 * 4 * 7));
  // One layer with a window of 3 of 9: 2 * 3 - 9 / 9 instead of 9.
  CHECK(Llama(gemma_like()).flops_per_token(9) == 6 * (matrices + 4.0 * 4 * (9 + 5)));
  CHECK(Llama(gemma_like()).flops_per_token(3) == 6 * (matrices + 4.0 * 4 * (3 + 3)));
}

TEST_CASE("llama: a layer sees its window, the layers above it further", "[llama]") {
  LlamaConfig c = tiny();
  c.window = 3;
  const auto last_to_see_token_0 = [&](const std::string& layers) {
    LlamaConfig of_layers = c;
    of_layers.window_layers = layers;
    Llama model(of_layers);
    model.initialize(1);
    const Tensor ids_BT = randint(0, 22, {1, 9});
    Tensor other = ids_BT.clone();
    other.narrow(1, 0, 1).fill_(22);
    const Tensor before = model.logits(ids_BT), after = model.logits(other);
    int64_t last = 0;
    for (int64_t t = 0; t < 9; ++t) {
      if (before.narrow(1, t, 1).to_vector() != after.narrow(1, t, 1).to_vector()) last = t;
    }
    return last;
  };
  CHECK(last_to_see_token_0("w") == 4);
  CHECK(last_to_see_token_0("wf") == 8);
  CHECK(last_to_see_token_0("fw") == 8);
  CHECK(last_to_see_token_0("ffw") == 8);
  c.num_layers = 1;
  CHECK(last_to_see_token_0("wf") == 2);
}

TEST_CASE("llama: logits are capped, and so in the loss", "[llama]") {
  for (const bool tied : {true, false}) {
    LlamaConfig c = gemma_like();
    c.tied = tied;
    Llama model(c);
    model.initialize(1);
    const Tensor ids_BT = randint(0, 23, {3, 7}), targets_BT = randint(0, 23, {3, 7}, kI64, 2);
    const Tensor logits = model.logits(ids_BT);
    double largest = 0;
    for (const double x : logits.to_vector()) largest = std::max(largest, std::fabs(x));
    CHECK(largest <= 1.5);
    const Tensor hidden = model.forward(ids_BT);
    const Tensor& weight = model.parameter(tied ? "embed.weight" : "head.weight").tensor;
    std::vector<double> expected = linear(hidden, weight).to_vector();
    for (double& x : expected) x = 1.5 * std::tanh(x / 1.5);
    check_close(logits.to_vector(), expected, tol(kF32, 8));
    check_close(model.loss(ids_BT, targets_BT).sum, cross_entropy(logits, targets_BT).sum,
                tol(kF32, 21));
  }
}

TEST_CASE("llama: names of the parameters", "[llama]") {
  LlamaConfig c = tiny();
  c.num_layers = 1;
  c.qkv_bias = true;
  c.qk_norm = true;
  Llama model(c);
  std::vector<std::string> names;
  for (const NamedParameter& entry : model.named_parameters()) names.push_back(entry.name);
  CHECK(names == std::vector<std::string>{
                     "embed.weight", "blocks.0.norm1.weight", "blocks.0.attn.qkv.weight",
                     "blocks.0.attn.qkv.bias", "blocks.0.attn.q_norm.weight",
                     "blocks.0.attn.k_norm.weight", "blocks.0.attn.out.weight",
                     "blocks.0.norm2.weight", "blocks.0.mlp.gate_up.weight",
                     "blocks.0.mlp.down.weight", "norm.weight", "head.weight"});
}

TEST_CASE("llama: loss is the cross entropy of the logits", "[llama]") {
  for (const bool tied : {true, false}) {
    LlamaConfig c = tiny();
    c.tied = tied;
    Llama model(c);
    model.initialize(1);
    const Tensor ids_BT = randint(0, 23, {3, 7}), targets_BT = randint(0, 23, {3, 7}, kI64, 2);
    const LossSum loss = model.loss(ids_BT, targets_BT);
    check_close(loss.sum, cross_entropy(model.logits(ids_BT), targets_BT).sum, tol(kF32, 21));
  }
}

TEST_CASE("llama: backward matches finite differences", "[llama]") {
  ParameterDtype dtype(kF64);
  LlamaConfig c = tiny();
  c.num_layers = 1;
  c.tied = true;
  c.qkv_bias = true;
  c.qk_norm = true;
  Llama model(c);
  model.initialize(1);
  check_gradients(model);
  model.set_recompute({.mlp_tile = 3});
  check_gradients(model);
  Llama capped(gemma_like());
  capped.initialize(1);
  check_gradients(capped);
}

TEST_CASE("llama: a gradient scale known early changes nothing", "[llama]") {
  for (const bool tied : {false, true}) {
    LlamaConfig c = tied ? gemma_like() : tiny();
    c.tied = tied;
    Llama model(c);
    model.initialize(1);
    const Tensor ids_BT = randint(0, 23, {3, 7}), targets_BT = randint(0, 23, {3, 7}, kI32, 2);
    const Tensor scale = full({}, 0.25);
    const auto late = loss_and_gradients(model, ids_BT, targets_BT, scale, false);
    const auto early = loss_and_gradients(model, ids_BT, targets_BT, scale, true);
    for (size_t i = 0; i < late.size(); ++i) check_close(early[i], late[i], tol(kF32, 21));
  }
}

TEST_CASE("llama: recompute and an MLP in tiles give the same bits", "[llama]") {
  Llama model(tiny());
  model.initialize(1);
  using Kind = RecomputePolicy::Kind;
  check_recompute(model, {{Kind::kFull, 1}, {Kind::kSelective, 1}});
  check_tiles(model);
  Llama capped(gemma_like());
  capped.initialize(1);
  check_recompute(capped, {{Kind::kFull, 1}, {Kind::kSelective, 1}});
  check_tiles(capped);
}

TEST_CASE("llama: a cache gives the same logits", "[llama]") {
  LlamaConfig c = tiny();
  c.qk_norm = true;
  Llama model(c);
  model.initialize(1);
  check_cache(model);
  Llama capped(gemma_like());
  capped.initialize(1);
  check_cache(capped);
}

TEST_CASE("llama: packed documents do not see each other", "[llama]") {
  Llama model(tiny());
  model.initialize(1);
  const Tensor ids_BT = from_values({5, 2, 3, 1, 2, 7}, {1, 6});
  ForwardOptions options;
  options.document_starts = from_values({0, 0, 0, 3, 3, 3}, {1, 6});
  options.positions = from_values({0, 1, 2, 0, 1, 2}, {1, 6});
  const Tensor packed = model.logits(ids_BT, options);
  const Tensor alone = model.logits(from_values({1, 2, 7}, {1, 3}));
  check_close(packed.narrow(1, 3, 3), alone, 2e-6);
  const Tensor other = model.logits(from_values({9, 9, 9, 1, 2, 7}, {1, 6}), options);
  check_bitwise(other.narrow(1, 3, 3), packed.narrow(1, 3, 3));
  Llama capped(gemma_like());
  capped.initialize(1);
  check_close(capped.logits(ids_BT, options).narrow(1, 3, 3),
              capped.logits(from_values({1, 2, 7}, {1, 3})), 2e-6);
}

TEST_CASE("llama: bf16 stays near f32", "[llama]") {
  Llama model(tiny());
  model.initialize(1);
  std::unique_ptr<Llama> low;
  {
    ParameterDtype dtype(kBF16);
    low = std::make_unique<Llama>(tiny());
  }
  for (const NamedParameter& entry : low->named_parameters()) {
    CHECK(entry.parameter->tensor.dtype() == kBF16);
    entry.parameter->tensor.detach().copy_(model.parameter(entry.name).tensor);
  }
  const Tensor ids_BT = randint(0, 23, {3, 7}), targets_BT = randint(0, 23, {3, 7}, kI32, 2);
  const double expected = model.loss(ids_BT, targets_BT).sum.item();
  const double actual = low->loss(ids_BT, targets_BT).sum.item();
  CHECK(actual != expected);
  CHECK(std::fabs(actual / expected - 1) < 0.01);
}

TEST_CASE("llama: impossible sizes are named", "[llama]") {
  const auto error = [](auto change) {
    LlamaConfig c = tiny();
    change(c);
    return error_of([&] { Llama model(c); });
  };
  CHECK(error([](auto& c) { c.width = 0; }).starts_with("Llama: width must be positive, got 0"));
  CHECK(error([](auto& c) {
          c.num_kv_heads = 3;
        }).starts_with("Llama: num_heads 4 is not divisible by num_kv_heads 3"));
  CHECK(error([](auto& c) {
          c.head_width = 0;
          c.width = 10;
        }).starts_with("Llama: width 10 is not divisible by num_heads 4"));
  CHECK(error([](auto& c) {
          c.head_width = 3;
        }).starts_with("Llama: rotary positions need an even head width, got 3"));
  CHECK(error([](auto& c) {
          c.ffn_width = -1;
        }).starts_with("Llama: ffn_width must be positive, got -1"));
  CHECK(error([](auto& c) { c.window = -2; }).starts_with("Llama: window must not be negative"));
  for (const char* layers : {"", "wx", "W"}) {
    CHECK(error([&](auto& c) { c.window_layers = layers; })
              .starts_with(
                  fmt::format("Llama: window_layers must be letters w and f, got \"{}\"", layers)));
  }
  CHECK(error([](auto& c) {
          c.logit_softcap = -1;
        }).starts_with("Llama: a softcap must be finite and not negative, got -1"));
}

}  // namespace
}  // namespace tessera::nn
