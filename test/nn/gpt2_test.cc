#include "nn/gpt2/gpt2.h"

#include "core/runtime/context.h"
#include "kernels/loss/loss.h"
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

Gpt2Config tiny() {
  Gpt2Config c;
  c.vocab_size = 23;
  c.context_length = 11;
  c.num_layers = 2;
  c.num_heads = 2;
  c.width = 6;
  c.ffn_width = 10;
  c.init_stddev = 0.3;
  return c;
}

TEST_CASE("gpt2: 124M has the published number of parameters", "[gpt2]") {
  DeferredInit deferred;
  Gpt2 model{Gpt2Config{}};
  CHECK(model.num_parameters() == 124439808);
  const std::string tree = print_tree(model);
  CHECK(tree.find("Gpt2  # 124,439,808 parameters\n") == 0);
  CHECK(tree.find("(0-11): 12 x Gpt2Block") != std::string::npos);
  CHECK(tree.find("(qkv): Linear(768 -> 2304)  # weight [2304, 768] f32, bias [2304] f32") !=
        std::string::npos);
  CHECK(tree.find("(head): LmHead(768 -> 50257, tied)") != std::string::npos);

  Gpt2Config xl;
  xl.num_layers = 48;
  xl.num_heads = 25;
  xl.width = 1600;
  CHECK(Gpt2(xl).num_parameters() == 1557611200);
}

TEST_CASE("gpt2: operations per token count what multiplies", "[gpt2]") {
  DeferredInit deferred;
  Gpt2 model{Gpt2Config{}};
  const double matrices = 12.0 * 12 * 768 * 768 + 50257.0 * 768;
  CHECK(model.flops_per_token(1024) == 6 * (matrices + 12.0 * 768 * 1024));
}

TEST_CASE("gpt2: names of the parameters", "[gpt2]") {
  Gpt2 model(tiny());
  std::vector<std::string> names;
  for (const NamedParameter& entry : model.named_parameters()) names.push_back(entry.name);
  const std::vector<std::string> block{"norm1.weight",  "norm1.bias",      "attn.qkv.weight",
                                       "attn.qkv.bias", "attn.out.weight", "attn.out.bias",
                                       "norm2.weight",  "norm2.bias",      "mlp.up.weight",
                                       "mlp.up.bias",   "mlp.down.weight", "mlp.down.bias"};
  std::vector<std::string> expected{"embed.weight", "position.weight"};
  for (const char* prefix : {"blocks.0.", "blocks.1."}) {
    for (const std::string& name : block) expected.push_back(prefix + name);
  }
  expected.insert(expected.end(), {"norm.weight", "norm.bias"});
  CHECK(names == expected);
  Gpt2Config c = tiny();
  c.tied = false;
  c.bias = false;
  Gpt2 untied(c);
  CHECK(untied.named_parameters().back().name == "head.weight");
  CHECK(untied.named_parameters().size() == 2 + 2 * 6 + 1 + 1);
  CHECK(untied.parameter("head.weight").tensor.impl() !=
        untied.parameter("embed.weight").tensor.impl());
}

TEST_CASE("gpt2: projections that end a sublayer start smaller", "[gpt2]") {
  Gpt2Config c;
  c.vocab_size = 100;
  c.num_layers = 8;
  c.num_heads = 2;
  c.width = 64;
  Gpt2 model(c);
  model.initialize(1);
  const auto stddev = [&](const char* name) {
    const std::vector<double> values = model.parameter(name).tensor.to_vector();
    double square = 0;
    for (const double value : values) square += value * value;
    return std::sqrt(square / static_cast<double>(values.size()));
  };
  for (const char* name : {"embed.weight", "blocks.3.attn.qkv.weight", "blocks.7.mlp.up.weight"}) {
    CHECK(std::fabs(stddev(name) / 0.02 - 1) < 0.05);
  }
  for (const char* name : {"blocks.0.attn.out.weight", "blocks.7.mlp.down.weight"}) {
    CHECK(std::fabs(stddev(name) / (0.02 / 4) - 1) < 0.05);
  }
  CHECK(stddev("blocks.0.attn.qkv.bias") == 0);
  CHECK(stddev("norm.weight") == 1);
}

TEST_CASE("gpt2: loss is the cross entropy of the logits", "[gpt2]") {
  for (const bool tied : {true, false}) {
    Gpt2Config c = tiny();
    c.tied = tied;
    Gpt2 model(c);
    model.initialize(1);
    const Tensor ids_BT = randint(0, 23, {3, 7}), targets_BT = randint(0, 23, {3, 7}, kI64, 2);
    const LossSum loss = model.loss(ids_BT, targets_BT);
    const Tensor logits_BTV = model.logits(ids_BT);
    CHECK(logits_BTV.shape() == Shape{3, 7, 23});
    const LossSum expected = cross_entropy(logits_BTV, targets_BT);
    check_close(loss.sum, expected.sum, tol(kF32, 21));
    CHECK(loss.count.item() == 21);
    ForwardOptions last;
    last.last_only = true;
    check_close(model.logits(ids_BT, last), logits_BTV.narrow(1, 6, 1), tol(kF32, 6));
  }
}

TEST_CASE("gpt2: backward matches finite differences", "[gpt2]") {
  ParameterDtype dtype(kF64);
  Gpt2Config c = tiny();
  c.num_layers = 1;
  Gpt2 model(c);
  model.initialize(1);
  check_gradients(model);
  model.set_recompute({.mlp_tile = 3});
  check_gradients(model);
}

TEST_CASE("gpt2: recompute gives the same bits, with dropout", "[gpt2]") {
  Gpt2Config c = tiny();
  c.num_layers = 3;
  using Kind = RecomputePolicy::Kind;
  for (const double dropout : {0.2, 0.0}) {
    c.dropout = dropout;
    Gpt2 model(c);
    model.initialize(1);
    check_recompute(model, {{Kind::kFull, 1}, {Kind::kEveryN, 2}, {Kind::kSelective, 1}});
  }
  CHECK(RecomputePolicy{Kind::kEveryN, 2}.applies_to(0));
  CHECK_FALSE(RecomputePolicy{Kind::kEveryN, 2}.applies_to(1));
  CHECK_FALSE(RecomputePolicy{}.applies_to(0));
}

TEST_CASE("gpt2: an MLP in tiles has the bits of the whole, and gradients as near as sums are",
          "[gpt2]") {
  Gpt2Config c = tiny();
  for (const double dropout : {0.2, 0.0}) {
    c.dropout = dropout;
    Gpt2 model(c);
    model.initialize(1);
    check_tiles(model);
  }
  Gpt2 model(tiny());
  model.initialize(1);
  CHECK(error_of([&] { model.set_recompute({.mlp_tile = -1}); }) ==
        "Mlp(gelu tanh): a tile must not be negative, got -1");
}

TEST_CASE("gpt2: recompute keeps one block's activations, selective no norms and activations",
          "[gpt2]") {
  Gpt2Config c = tiny();
  c.num_layers = 6;
  c.width = 32;
  c.ffn_width = 256;
  c.context_length = 64;
  Gpt2 model(c);
  model.initialize(1);
  const Tensor ids_BT = randint(0, 23, {4, 64}), targets_BT = randint(0, 23, {4, 64}, kI32, 2);
  const auto peak = [&] {
    const auto& allocator = *Context::current()->allocator();
    loss_and_gradients(model, ids_BT, targets_BT);
    Context::current()->compute().synchronize();
    Context::current()->allocator()->reset_peak();
    const int64_t before = allocator.stats().allocated;
    loss_and_gradients(model, ids_BT, targets_BT);
    return allocator.stats().peak_allocated - before;
  };
  const int64_t without = peak();
  model.set_recompute({RecomputePolicy::Kind::kFull, 1});
  CHECK(peak() < without / 3);
  // Of the two norms' outputs and the activation's, 2 C + F a token, no block keeps any.
  model.set_recompute({RecomputePolicy::Kind::kSelective, 1});
  const int64_t dropped = 4 * 64 * (2 * c.width + c.ffn_width) * 4;
  const int64_t selective = peak();
  CHECK(selective < without - (c.num_layers - 2) * dropped);
  CHECK(selective > without / 3);
}

TEST_CASE("gpt2: dropout acts while training only", "[gpt2]") {
  Gpt2Config c = tiny();
  c.dropout = 0.3;
  Gpt2 model(c);
  model.initialize(1);
  const Tensor ids_BT = randint(0, 23, {3, 7});
  random_state() = RandomState{.seed = 3, .step = 1};
  const std::vector<double> a = model.logits(ids_BT).to_vector();
  CHECK(random_state().op_index == 1 + 2 * 2);
  CHECK(model.logits(ids_BT).to_vector() != a);
  model.train(false);
  Gpt2 plain(tiny());
  plain.initialize(1);
  check_bitwise(model.logits(ids_BT), plain.logits(ids_BT));
}

TEST_CASE("gpt2: a cache gives the same logits", "[gpt2]") {
  Gpt2 model(tiny());
  model.initialize(1);
  check_cache(model);
}

struct CountCalls : ModuleHook {
  void pre_forward(Module&, std::span<Tensor*> inputs) override {
    ++num_calls;
    num_inputs = inputs.size();
  }
  void post_forward(Module&, std::span<Tensor*> outputs) override { num_outputs = outputs.size(); }
  void on_forward_error(Module&) noexcept override {}
  int num_calls = 0;
  size_t num_inputs = 0, num_outputs = 0;
};

TEST_CASE("gpt2: hooks run once a module, around loss and logits too", "[gpt2]") {
  Gpt2 model(tiny());
  model.initialize(1);
  std::vector<std::pair<std::string, std::shared_ptr<CountCalls>>> hooks;
  for (const NamedModule& entry : model.named_modules()) {
    hooks.emplace_back(entry.name, std::make_shared<CountCalls>());
    entry.module->set_hook(hooks.back().second);
  }
  const Tensor ids_BT = randint(0, 23, {3, 7});
  model.loss(ids_BT, ids_BT);
  for (const auto& hook : hooks) {
    INFO(hook.first);
    // Dropout acts once a sublayer, and not at all at p = 0; a list is never called.
    const bool is_called = hook.first != "blocks" && !hook.first.ends_with(".dropout");
    CHECK(hook.second->num_calls == is_called);
  }
  CHECK(hooks[0].second->num_inputs == 2);
  CHECK(hooks[0].second->num_outputs == 2);
  model.logits(ids_BT);
  CHECK(hooks[0].second->num_calls == 2);
  call(model, ids_BT);
  CHECK(hooks[0].second->num_calls == 3);
  CHECK(hooks[0].second->num_outputs == 1);
  CHECK(hooks.back().first == "head");
  CHECK(hooks.back().second->num_calls == 2);
}

TEST_CASE("gpt2: positions can be given", "[gpt2]") {
  Gpt2 model(tiny());
  model.initialize(1);
  const Tensor ids_BT = from_values({1, 2, 3, 1, 2, 3}, {1, 6});
  ForwardOptions options;
  options.positions = from_values({0, 1, 2, 0, 1, 2}, {6});
  options.document_starts = from_values({0, 0, 0, 3, 3, 3}, {1, 6});
  const Tensor logits = model.logits(ids_BT, options);
  check_close(logits.narrow(1, 3, 3), logits.narrow(1, 0, 3), 1e-6);
  options.positions = from_values({0, 1, 2, 0, 1, 2}, {1, 6});
  check_bitwise(model.logits(ids_BT, options), logits);
}

TEST_CASE("gpt2: errors name what does not fit", "[gpt2]") {
  Gpt2 model(tiny());
  model.initialize(1);
  CHECK(error_of([&] {
          model.logits(randint(0, 23, {5}));
        }).starts_with("Gpt2: ids must be [B, T], got [5]"));
  CHECK(error_of([&] {
          model.logits(randint(0, 23, {1, 12}));
        }).starts_with("Gpt2: 12 positions do not fit the context of 11"));
  KvCache cache = model.make_cache(1, 4);
  ForwardOptions options;
  options.cache = &cache;
  CHECK(error_of([&] {
          model.logits(randint(0, 23, {1, 5}), options);
        }).starts_with("Gpt2: 5 positions do not fit the cache's capacity of 4"));
  options.document_starts = from_values({0}, {1, 1});
  CHECK(error_of([&] {
          model.logits(randint(0, 23, {1, 1}), options);
        }).starts_with("Gpt2: document_starts and a cache do not go together"));
  options.document_starts = {};
  cache.layers.pop_back();
  CHECK(error_of([&] {
          model.logits(randint(0, 23, {1, 1}), options);
        }).starts_with("Gpt2: the cache has another number of layers"));

  const auto config_error = [](auto change) {
    Gpt2Config c = tiny();
    change(c);
    return error_of([&] { Gpt2 broken(c); });
  };
  CHECK(config_error([](auto& c) {
          c.num_heads = 4;
        }).starts_with("Gpt2: width 6 is not divisible by num_heads 4"));
  CHECK(config_error([](auto& c) {
          c.num_layers = 0;
        }).starts_with("Gpt2: num_layers must be positive, got 0"));
  CHECK(config_error([](auto& c) {
          c.vocab_size = -1;
        }).starts_with("Gpt2: vocab_size must be positive, got -1"));
  CHECK(config_error([](auto& c) {
          c.ffn_width = -8;
        }).starts_with("Mlp: width and ffn_width must be positive, got 6 and -8"));
}

}  // namespace
}  // namespace tessera::nn
