#pragma once

#include <algorithm>
#include <cmath>

#include "core/autograd.h"
#include "core/random.h"
#include "nn/transformer.h"
#include "test/testing.h"

// What holds for every language model: checks that their tests share.

namespace tessera::testing {

/// Loss and the gradients of all trained parameters for one batch; `grad_scale` is told to the loss before
/// backward if `early`.
inline std::vector<Tensor> loss_and_gradients(nn::LanguageModel& model, const Tensor& ids_BT,
                                              const Tensor& targets_BT,
                                              const Tensor& grad_scale = full({}, 1),
                                              bool early = false) {
  const auto parameters = model.named_parameters();
  for (const nn::NamedParameter& entry : parameters) entry.parameter->tensor.zero_grad();
  random_state() = RandomState{.seed = 3, .step = 1};
  LinearCrossEntropyOptions options;
  if (early) options.grad_scale = grad_scale;
  const LossSum loss = model.loss(ids_BT, targets_BT, {}, options);
  backward(loss.sum, grad_scale);
  std::vector<Tensor> results{loss.sum.detach()};
  for (const nn::NamedParameter& entry : parameters) {
    const Tensor& tensor = entry.parameter->tensor;
    if (tensor.requires_grad()) results.push_back(tensor.grad().clone());
  }
  return results;
}

/// Gradients of all parameters by finite differences, of a model in f64.
inline void check_gradients(nn::LanguageModel& model) {
  const int64_t V = model.shape().vocab_size;
  const Tensor ids_BT = randint(0, V, {2, 5}), targets_BT = randint(0, V, {2, 5}, kI32, 2);
  const auto parameters = model.named_parameters();
  std::vector<Tensor> inputs;
  for (const nn::NamedParameter& entry : parameters) inputs.push_back(entry.parameter->tensor);
  const auto fn = [&](const std::vector<Tensor>& in) {
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].parameter->tensor = in[i];
    return model.loss(ids_BT, targets_BT).sum;
  };
  gradcheck(fn, inputs);
}

/// Loss and gradients are the same bits under the policies as without.
inline void check_recompute(nn::LanguageModel& model,
                            const std::vector<nn::RecomputePolicy>& policies) {
  const int64_t V = model.shape().vocab_size;
  const Tensor ids_BT = randint(0, V, {3, 7}), targets_BT = randint(0, V, {3, 7}, kI32, 2);
  model.set_recompute({});
  const std::vector<Tensor> expected = loss_and_gradients(model, ids_BT, targets_BT);
  for (const nn::RecomputePolicy& policy : policies) {
    model.set_recompute(policy);
    const std::vector<Tensor> actual = loss_and_gradients(model, ids_BT, targets_BT);
    REQUIRE(actual.size() == expected.size());
    for (size_t i = 0; i < expected.size(); ++i) check_bitwise(actual[i], expected[i]);
  }
}

/// With the MLP in tiles of rows the loss has the bits of all rows at once, whatever the policy and the
/// dropout; so have the gradients if there is one tile, else those of the MLPs' parameters are sums in
/// another order, and what comes before an MLP is near.
inline void check_tiles(nn::LanguageModel& model) {
  using Kind = nn::RecomputePolicy::Kind;
  const int64_t V = model.shape().vocab_size, num_rows = 3 * 7;
  const Tensor ids_BT = randint(0, V, {3, 7}), targets_BT = randint(0, V, {3, 7}, kI32, 2);
  model.set_recompute({});
  const std::vector<Tensor> expected = loss_and_gradients(model, ids_BT, targets_BT);
  for (const Kind kind : {Kind::kNone, Kind::kFull, Kind::kSelective}) {
    for (const int64_t tile : {int64_t{1}, int64_t{4}, int64_t{20}, num_rows, 2 * num_rows}) {
      INFO(fmt::format("policy {}, tile {}", name_of(kind), tile));
      model.set_recompute({.kind = kind, .mlp_tile = tile});
      const std::vector<Tensor> actual = loss_and_gradients(model, ids_BT, targets_BT);
      check_bitwise(actual[0], expected[0], "loss");
      for (size_t i = 1; i < expected.size(); ++i) {
        if (tile >= num_rows) {
          check_bitwise(actual[i], expected[i]);
          continue;
        }
        const std::vector<double> values = expected[i].to_vector();
        const double largest =
            std::abs(*std::max_element(values.begin(), values.end(), [](double a, double b) {
              return std::abs(a) < std::abs(b);
            }));
        check_close(actual[i], expected[i], std::min(1.0, largest) * tol(kF32, num_rows));
      }
    }
  }
  model.set_recompute({});
}

/// Tokens that come piece by piece, with a cache, have the logits of a whole forward.
inline void check_cache(nn::LanguageModel& model) {
  const NoGrad no_grad;
  const Tensor ids_BT = randint(0, model.shape().vocab_size, {2, 9});
  const Tensor expected = model.logits(ids_BT);
  nn::KvCache cache = model.make_cache(2);
  CHECK(cache.capacity == model.shape().context_length);
  nn::ForwardOptions options;
  options.cache = &cache;
  int64_t begin = 0;
  for (const int64_t num_new : {4, 1, 1, 3}) {
    const Tensor logits = model.logits(ids_BT.narrow(1, begin, num_new).contiguous(), options);
    check_close(logits, expected.narrow(1, begin, num_new), tol(kF32));
    begin += num_new;
    CHECK(cache.length == begin);
  }
}

}  // namespace tessera::testing
