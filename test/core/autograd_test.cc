#include "core/autograd.h"

#include "core/recompute.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::check_bitwise;
using testing::check_close;
using testing::error_of;

/// y = a * x elementwise by hand, so that the tape is tested without any kernel family.
Tensor times(const Tensor& x, double a) {
  Tensor y = zeros(x.shape(), x.dtype());
  const std::vector<double> values = x.to_vector();
  std::vector<double> scaled;
  for (const double v : values) scaled.push_back(a * v);
  y.copy_(from_values(scaled, x.shape(), x.dtype()));
  return record("times", {x}, y, [a](const Tensor& dy, Grads& g) { g.add(0, times(dy, a)); });
}

Tensor plus(const Tensor& a, const Tensor& b) {
  Tensor y = a.detach().clone();
  y.add_(b);
  return record("plus", {a, b}, y, [](const Tensor& dy, Grads& g) {
    g.add(0, dy);
    g.add(1, dy);
  });
}

TEST_CASE("autograd: gradients of a diamond add up", "[autograd]") {
  Tensor x = from_values({1.0, 2.0}, {2}, kF64).set_requires_grad(true);
  const Tensor y = plus(plus(times(x, 3), times(x, 4)), x);
  backward(y, from_values({1.0, 10.0}, {2}, kF64));
  check_close(x.grad().to_vector(), {8, 80}, 0);
}

TEST_CASE("autograd: the same tensor twice in one op", "[autograd]") {
  Tensor x = from_values({1.0, 2.0}, {2}, kF64).set_requires_grad(true);
  const Tensor h = times(x, 2);
  backward(plus(h, h), from_values({1.0, 1.0}, {2}, kF64));
  check_close(x.grad().to_vector(), {4, 4}, 0);
}

TEST_CASE("autograd: walking a graph twice names the op", "[autograd]") {
  Tensor x = from_values({1.0}, {1}, kF64).set_requires_grad(true);
  const Tensor y = times(x, 2);
  backward(y, {}, {.retain_graph = true});
  backward(y);
  CHECK(x.grad().item() == 4);
  CHECK(error_of([&] { backward(y); }).find("\"times\" was already walked") != std::string::npos);
}

TEST_CASE("autograd: views hand their gradients to the base", "[autograd]") {
  Tensor x = from_values({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, {2, 3}, kF64).set_requires_grad(true);
  const Tensor y = times(x, 1);
  backward(times(y.narrow(1, 1, 2).contiguous(), 2), full({2, 2}, 1, kF64));
  check_close(x.grad().to_vector(), {0, 2, 2, 0, 2, 2}, 0);
  x.zero_grad();
  backward(times(x.transpose(0, 1).contiguous(), 3),
           from_values({1., 2., 3., 4., 5., 6.}, {3, 2}, kF64));
  check_close(x.grad().to_vector(), {3, 9, 15, 6, 12, 18}, 0);
}

TEST_CASE("recompute: same gradient, fewer saved tensors", "[recompute]") {
  Tensor w = from_values({3.0}, {1}, kF64).set_requires_grad(true);
  Tensor x = from_values({2.0}, {1}, kF64).set_requires_grad(true);
  int calls = 0;
  const Tensor y = recompute(
      [&](const std::vector<Tensor>& in) {
        ++calls;
        return plus(times(in[0], 5), times(w, 7));
      },
      {x});
  CHECK(calls == 1);
  backward(y);
  CHECK(calls == 2);
  CHECK(x.grad().item() == 5);
  CHECK(w.grad().item() == 7);
}

}  // namespace
}  // namespace tessera
