#include "core/recompute.h"

#include "core/autograd.h"
#include "core/random.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::check_bitwise;
using testing::error_of;
using testing::randn;

using Tensors = std::vector<Tensor>;

/// y = x * noise, with the noise that the random state gives now, and x saved for backward.
Tensor noisy(const Tensor& x) {
  const RandomState& r = random_state();
  const Tensor noise = randn(x.shape(), x.dtype(), r.seed * 1000 + r.step * 100 + r.op_index);
  ++random_state().op_index;
  const std::vector<double> a = x.to_vector(), b = noise.to_vector();
  std::vector<double> product;
  for (size_t i = 0; i < a.size(); ++i) product.push_back(a[i] * b[i]);
  return record("noisy", {x}, from_values(product, x.shape(), x.dtype()),
                [x = save(x), noise](const Tensor& dy, Grads& g) {
                  const std::vector<double> d = dy.to_vector(), n = noise.to_vector();
                  std::vector<double> dx;
                  for (size_t i = 0; i < d.size(); ++i) dx.push_back(d[i] * n[i]);
                  CHECK(x->is_defined());
                  g.add(0, from_values(dx, dy.shape(), dy.dtype()));
                });
}

Tensor plus(const Tensor& a, const Tensor& b) {
  Tensor y = a.detach().clone();
  y.add_(b);
  return record("plus", {a, b}, y, [](const Tensor& dy, Grads& g) {
    g.add(0, dy);
    g.add(1, dy);
  });
}

struct Result {
  Tensor y, dx, dw;
  uint64_t op_index;
};

template <class F>
Result run(F&& net) {
  Tensor x = randn({3, 4}, kF64, 1).set_requires_grad(true);
  Tensor w = randn({3, 4}, kF64, 2).set_requires_grad(true);
  random_state() = {.seed = 3, .step = 4};
  const Tensor y = net(x, w);
  backward(y, randn({3, 4}, kF64, 5));
  return {y, x.grad(), w.grad(), random_state().op_index};
}

void check_same(const Result& a, const Result& b) {
  check_bitwise(a.y, b.y, "y");
  check_bitwise(a.dx, b.dx, "dx");
  check_bitwise(a.dw, b.dw, "dw");
  CHECK(a.op_index == b.op_index);
}

TEST_CASE("recompute: same bits as without, random numbers included", "[recompute]") {
  const auto block = [](const Tensor& x, const Tensor& w) {
    return noisy(plus(noisy(x), noisy(w)));
  };
  const Result plain =
      run([&](const Tensor& x, const Tensor& w) { return noisy(block(block(x, w), w)); });
  const Result again = run([&](const Tensor& x, const Tensor& w) {
    const auto fn = [&, w](const Tensors& in) { return block(in[0], w); };
    return noisy(recompute(fn, {recompute(fn, {x})}));
  });
  check_same(plain, again);
}

TEST_CASE("recompute_output: same bits, and the first output has no bytes until backward",
          "[recompute]") {
  // Two outputs, of which the consumer saves the first.
  const auto produce = [](const Tensors& in) { return Tensors{noisy(in[0]), plus(in[0], in[0])}; };
  const auto consume = [](const Tensors& in) { return plus(noisy(in[0]), in[1]); };
  const Result plain = run([&](const Tensor& x, const Tensor& w) {
    const Tensor a = consume(produce({plus(x, w)}));
    return plus(a, consume(produce({w})));
  });
  std::vector<std::shared_ptr<Storage>> first, second;
  const Result again = run([&](const Tensor& x, const Tensor& w) {
    const auto watched = [&](const Tensors& in) {
      first.push_back(in[0].storage());
      second.push_back(in[1].storage());
      CHECK(first.back()->is_materialized());
      return consume(in);
    };
    const Tensor a = recompute_output(produce, watched, {plus(x, w)});
    CHECK_FALSE(first.back()->is_materialized());
    CHECK(second.back()->is_materialized());
    return plus(a, recompute_output(produce, watched, {w}));
  });
  check_same(plain, again);
  for (const auto& storage : first) CHECK_FALSE(storage->is_materialized());
  NoGrad no_grad;
  const Tensor x = randn({3, 4}, kF64, 1);
  recompute_output(produce,
                   [&](const Tensors& in) {
                     first.push_back(in[0].storage());
                     return consume(in);
                   },
                   {x});
  CHECK(first.back()->is_materialized());
}

TEST_CASE("recompute_output: a view of what is dropped is refused", "[recompute]") {
  const Tensor x = randn({3, 4}, kF64, 1).set_requires_grad(true);
  const auto message = error_of([&] {
    recompute_output([](const Tensors& in) { return Tensors{noisy(in[0])}; },
                     [](const Tensors& in) { return in[0]; }, {x});
  });
  CHECK(message.find("recompute_output: consume must not return a view") != std::string::npos);
}

TEST_CASE("recompute: regions may lie inside regions", "[recompute]") {
  const Result plain =
      run([](const Tensor& x, const Tensor& w) { return noisy(plus(noisy(noisy(x)), w)); });
  int inner_calls = 0;
  const Result nested = run([&](const Tensor& x, const Tensor& w) {
    return recompute(
        [&, w](const Tensors& in) {
          const Tensor h = recompute(
              [&](const Tensors& inner) {
                ++inner_calls;
                return noisy(noisy(inner[0]));
              },
              in);
          return noisy(plus(h, w));
        },
        {x});
  });
  check_same(plain, nested);
  CHECK(inner_calls == 3);  // forward, the outer's second run, and its own
}

TEST_CASE("recompute: an input without gradient still gives the parameters theirs", "[recompute]") {
  Tensor w = randn({2}, kF64, 2).set_requires_grad(true);
  const Tensor x = randn({2}, kF64, 1), ids = from_values({1, 2}, {2});
  const Tensor y = recompute(
      [&](const Tensors& in) {
        CHECK(in[1].dtype() == kI32);
        return plus(noisy(in[0]), w);
      },
      {x, ids});
  backward(y, full({2}, 1, kF64));
  CHECK(w.grad().to_vector() == std::vector<double>{1, 1});
  CHECK_FALSE(x.grad().is_defined());
}

TEST_CASE("recompute: nothing to do without grad mode", "[recompute]") {
  const NoGrad no_grad;
  int calls = 0;
  const Tensor y = recompute(
      [&](const Tensors& in) {
        ++calls;
        return noisy(in[0]);
      },
      {randn({2}, kF64)});
  CHECK_FALSE(y.requires_grad());
  CHECK(calls == 1);
}

TEST_CASE("recompute: each run can tell which it is", "[recompute]") {
  Tensor x = randn({2}, kF64).set_requires_grad(true);
  std::vector<bool> first, second, in_backward;
  const Tensor y = recompute(
      [&](const Tensors& in) {
        first.push_back(is_checkpointing());
        second.push_back(is_recomputing());
        return record("probe", {in[0]}, in[0].clone(), [&](const Tensor& dy, Grads& g) {
          in_backward.push_back(is_recomputing() || is_checkpointing());
          g.add(0, dy);
        });
      },
      {x});
  backward(y, full({2}, 1, kF64));
  CHECK(first == std::vector<bool>{true, false});
  CHECK(second == std::vector<bool>{false, true});
  CHECK(in_backward == std::vector<bool>{false});
  CHECK_FALSE((is_recomputing() || is_checkpointing()));
}

TEST_CASE("recompute: an exception in the second run leaves the thread as it was", "[recompute]") {
  Tensor x = randn({2}, kF64).set_requires_grad(true);
  random_state() = {.seed = 1};
  int calls = 0;
  const Tensor y = recompute(
      [&](const Tensors& in) {
        if (++calls == 2) throw Error("block: boom");
        return noisy(in[0]);
      },
      {x});
  random_state().op_index = 17;
  CHECK(error_of([&] { backward(y, full({2}, 1, kF64), {.retain_graph = true}); }) ==
        "block: boom");
  CHECK_FALSE((is_recomputing() || is_checkpointing()));
  CHECK(grad_mode());
  CHECK_FALSE(is_in_backward());
  CHECK(random_state().op_index == 17);
  backward(y, full({2}, 1, kF64));
  CHECK(x.grad().is_defined());
}

TEST_CASE("recompute: an exception in the forward leaves the thread as it was", "[recompute]") {
  const Tensor x = randn({2}, kF64);
  CHECK(error_of([&] { recompute([](const Tensors&) -> Tensor { throw Error("boom"); }, {x}); }) ==
        "boom");
  CHECK(grad_mode());
}

TEST_CASE("recompute: a changed input is found and named", "[recompute]") {
  Tensor w = randn({2}, kF64).set_requires_grad(true);
  Tensor x = randn({2}, kF64);
  const Tensor y = recompute([&](const Tensors& in) { return plus(in[0], w); }, {x});
  x.fill_(0);
  CHECK(error_of([&] {
          backward(y, full({2}, 1, kF64));
        }).find("recompute: a tensor of shape [2] that backward needs was changed in place") == 0);
}

TEST_CASE("recompute: returns an input unchanged", "[recompute]") {
  Tensor x = randn({2}, kF64).set_requires_grad(true);
  const Tensor y = recompute([](const Tensors& in) { return in[0]; }, {x});
  CHECK_FALSE(y.is_leaf());
  backward(y, full({2}, 3, kF64));
  CHECK(x.grad().to_vector() == std::vector<double>{3, 3});
}

TEST_CASE("recompute: what the region saves is not kept between forward and backward",
          "[recompute]") {
  const auto context = std::make_shared<Context>(ContextOptions{.num_threads = 1});
  const Context::Scope scope(context);
  Tensor x = zeros({128, 1024}, kF64).set_requires_grad(true);  // 1 MiB
  const auto chain = [](const Tensors& in) {
    Tensor h = in[0];
    for (int i = 0; i < 8; ++i) {
      h = record("hold", {h}, h.clone(), [kept = save(h)](const Tensor& dy, Grads& g) {
        CHECK(kept->is_defined());
        g.add(0, dy);
      });
    }
    return h;
  };
  const auto live = [&] { return context->allocator()->stats().allocated >> 20; };
  const Tensor plain = chain({x});
  CHECK(live() == 9);
  const Tensor again = recompute(chain, {x});
  CHECK(live() == 10);
}

}  // namespace
}  // namespace tessera
