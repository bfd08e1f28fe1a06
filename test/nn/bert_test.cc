#include "nn/bert/bert.h"

#include "nn/generate.h"
#include "test/nn/model_checks.h"

namespace tessera::nn {
namespace {

using testing::check_bitwise;
using testing::check_gradients;
using testing::check_recompute;
using testing::check_tiles;
using testing::error_of;

BertConfig tiny() {
  BertConfig c;
  c.vocab_size = 13, c.context_length = 12;
  c.num_layers = 2, c.num_heads = 2, c.width = 8, c.ffn_width = 12;
  c.init_stddev = 0.3;  // so that every part counts
  return c;
}

TEST_CASE("bert: gradients match finite differences, tied or not", "[bert]") {
  const ParameterDtype f64(kF64);
  for (const bool is_tied : {true, false}) {
    BertConfig c = tiny();
    c.tied = is_tied;
    Bert model(c);
    model.initialize(3);
    check_gradients(model);
  }
}

TEST_CASE("bert: recompute policies and an MLP in tiles keep the bits, with dropout too",
          "[bert]") {
  for (const double dropout : {0.0, 0.2}) {
    BertConfig c = tiny();
    c.dropout = dropout;
    Bert model(c);
    model.initialize(3);
    check_recompute(model, {{RecomputePolicy::Kind::kFull, 1},
                            {RecomputePolicy::Kind::kEveryN, 2},
                            {RecomputePolicy::Kind::kSelective, 1}});
    check_tiles(model);
  }
}

TEST_CASE("bert: a later token changes what comes before it, a type what has it", "[bert]") {
  Bert model(tiny());
  model.initialize(3);
  const NoGrad no_grad;
  const Tensor ids = from_values<int32_t>({1, 2, 3, 4}, {1, 4});
  const Tensor other = from_values<int32_t>({1, 2, 3, 5}, {1, 4});
  const auto first = [](const Tensor& x) { return x.narrow(1, 0, 1).to_vector(); };
  CHECK(first(model.logits(ids)) != first(model.logits(other)));
  ForwardOptions typed;
  typed.token_types = from_values<int32_t>({0, 0, 0, 0}, {1, 4});
  check_bitwise(model.logits(ids, typed), model.logits(ids));
  typed.token_types = from_values<int32_t>({0, 0, 1, 1}, {1, 4});
  CHECK(model.logits(ids, typed).to_vector() != model.logits(ids).to_vector());
}

TEST_CASE("bert: work of attention in both directions is twice that of a causal one", "[bert]") {
  Bert model(tiny());
  const double of_5 = model.flops_per_token(5), of_6 = model.flops_per_token(6);
  CHECK(of_6 - of_5 == 6.0 * 2 * 2 * 2 * 4);  // 6 x twice x layers x heads x head width
}

TEST_CASE("bert: what it cannot do is named", "[bert]") {
  BertConfig both = tiny();
  both.pooler = true;
  CHECK(error_of([&] {
          Bert model(both);
        }).starts_with("Bert: mlm_head and pooler together, expected one of them at most"));
  BertConfig untyped = tiny();
  untyped.num_types = 0;
  CHECK(error_of([&] {
          Bert model(untyped);
        }).starts_with("Bert: num_types must be positive, got 0"));
  Bert model(tiny());
  model.initialize(1);
  const int32_t prompt[] = {1};
  CHECK(
      error_of([&] { generate(model, prompt); })
          .starts_with(
              "generate: Bert predicts masked tokens, expected a model that predicts the next one"));
  CHECK(error_of([&] {
          model.pooled(zeros({1, 2, 8}));
        }).starts_with("Bert: no pooler, expected BertConfig::pooler"));
  BertConfig hidden = tiny();
  hidden.mlm_head = false;
  Bert bare(hidden);
  bare.initialize(1);
  const Tensor ids = from_values<int32_t>({1, 2}, {1, 2});
  CHECK(error_of([&] {
          bare.logits(ids);
        }).starts_with("Bert: no head, expected BertConfig::mlm_head for logits and losses"));
  ForwardOptions cached;
  KvCache cache = model.make_cache(1);
  cached.cache = &cache;
  CHECK(error_of([&] {
          model.logits(ids, cached);
        }).starts_with("Bert: a cache, which attention in both directions cannot use"));
  BertConfig shifted = tiny();
  shifted.position_offset = 2;
  Bert roberta(shifted);
  roberta.initialize(1);
  ForwardOptions given;
  given.positions = from_values<int32_t>({0, 1}, {2});
  CHECK(error_of([&] {
          roberta.logits(ids, given);
        }).starts_with("Bert: positions of the caller's beside position_offset 2, expected 0"));
}

}  // namespace
}  // namespace tessera::nn
