#include "kernels/softmax/softmax.h"

#include <cmath>
#include <limits>

#include "core/runtime/context.h"
#include "kernels/softmax/kernel.h"
#include "test/testing.h"

// R rows, C columns.

namespace tessera {
namespace {

using testing::check_bitwise;
using testing::check_close;
using testing::error_of;
using testing::gradcheck;
using testing::randn;
using testing::tol;

struct Reference {
  std::vector<double> y, log_y, dx, log_dx;
};

Reference reference(const Tensor& x, const Tensor& dy) {
  const std::vector<double> xs = x.to_vector(), dys = dy.to_vector();
  const size_t C = static_cast<size_t>(x.dim(-1)), R = xs.size() / C;
  Reference ref{xs, xs, xs, xs};
  for (size_t r = 0; r < R; ++r) {
    double max = -std::numeric_limits<double>::infinity(), sum = 0, dot = 0, total = 0;
    for (size_t c = 0; c < C; ++c) max = std::max(max, xs[r * C + c]);
    for (size_t c = 0; c < C; ++c) sum += std::exp(xs[r * C + c] - max);
    for (size_t c = 0; c < C; ++c) {
      const size_t i = r * C + c;
      ref.log_y[i] = xs[i] - max - std::log(sum);
      ref.y[i] = std::exp(xs[i] - max) / sum;
      dot += ref.y[i] * dys[i];
      total += dys[i];
    }
    for (size_t c = 0; c < C; ++c) {
      const size_t i = r * C + c;
      ref.dx[i] = ref.y[i] * (dys[i] - dot);
      ref.log_dx[i] = dys[i] - ref.y[i] * total;
    }
  }
  return ref;
}

TEST_CASE("softmax: forward and backward match the f64 definition", "[softmax]") {
  const auto dtype = GENERATE(kF64, kF32, kBF16, kF16);
  for (const auto& [R, C] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {3, 2}, {7, 5}, {4, 16}, {9, 37}, {2, 1031}, {700, 48}}) {
    Tensor x = randn({R, C}, dtype, 1, 4.0);
    const Tensor dy = randn({R, C}, dtype, 2);
    const Reference ref = reference(x, dy);
    INFO("R " << R << " C " << C << " " << name_of(dtype));
    x.set_requires_grad(true);
    const Tensor y = softmax(x);
    check_close(y.to_vector(), ref.y, tol(dtype, C), "y");
    backward(y, dy);
    check_close(x.grad().to_vector(), ref.dx, tol(dtype, C), "dx");
    x.zero_grad();
    const Tensor log_y = log_softmax(x);
    check_close(log_y.to_vector(), ref.log_y, tol(dtype, C), "log y");
    backward(log_y, dy);
    check_close(x.grad().to_vector(), ref.log_dx, 2 * tol(dtype, C), "log dx");
  }
}

TEST_CASE("softmax: gradients match finite differences", "[softmax]") {
  Tensor x = randn({3, 9}, kF64, 1);
  x.set_requires_grad(true);
  gradcheck([](const auto& in) { return softmax(in[0]); }, {x});
  gradcheck([](const auto& in) { return log_softmax(in[0]); }, {x});
}

TEST_CASE("softmax: large, equal and masked logits", "[softmax]") {
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor x =
      from_values({3e38, -3e38, 0.0, 500.0, 500.0, -inf, -500.0, -500.0, -500.0}, {3, 3}, kF32);
  check_close(softmax(x).to_vector(), {1, 0, 0, 0.5, 0.5, 0, 1 / 3., 1 / 3., 1 / 3.}, tol(kF32));
  const std::vector<double> log_y = log_softmax(x).to_vector();
  CHECK(log_y[5] == -inf);
  CHECK(std::fabs(log_y[4] + std::log(2.0)) < 1e-6);
  // A row without any finite logit, or with a NaN, has no softmax.
  const Tensor bad = from_values({-inf, -inf, 1.0, std::nan("")}, {2, 2}, kF32);
  for (const double y : softmax(bad).to_vector()) CHECK(std::isnan(y));
  for (const double y : log_softmax(bad).to_vector()) CHECK(std::isnan(y));
}

TEST_CASE("softmax: slices of packed buffers, added gradients, no rows", "[softmax]") {
  Tensor packed = randn({5, 20}, kF32, 1);
  packed.set_requires_grad(true);
  const Tensor first = randn({5, 20}, kF32, 3), dy = randn({5, 7}, kF32, 2);
  packed.set_grad(first.clone());
  const Tensor slice = packed.narrow(1, 4, 7);
  const Tensor y = softmax(slice);
  check_bitwise(y, softmax(slice.clone()));
  backward(y, dy);
  std::vector<double> expected = first.to_vector();
  const std::vector<double> dx = reference(slice.clone(), dy).dx;
  for (size_t i = 0; i < dx.size(); ++i) expected[i / 7 * 20 + 4 + i % 7] += dx[i];
  check_close(packed.grad().to_vector(), expected, tol(kF32, 7), "dx");

  Tensor leaf = randn({5, 7}, kF32, 4);
  leaf.set_requires_grad(true);
  backward(log_softmax(leaf), dy);
  const std::vector<double> once = leaf.grad().to_vector();
  backward(log_softmax(leaf), dy);
  std::vector<double> twice = once;
  for (double& v : twice) v *= 2;
  check_close(leaf.grad().to_vector(), twice, tol(kF32), "accumulated");

  Tensor none = randn({0, 3}, kF32);
  none.set_requires_grad(true);
  const Tensor nothing = softmax(none);
  backward(nothing, randn({0, 3}, kF32));
  CHECK(nothing.shape() == Shape{0, 3});
}

TEST_CASE("softmax: the bits do not depend on the number of threads", "[softmax]") {
  std::vector<Tensor> results[2];
  for (int threads = 1; threads <= 2; ++threads) {
    Context::Scope scope(
        std::make_shared<Context>(ContextOptions{.device = {}, .num_threads = threads}));
    Tensor x = randn({300, 101}, kF32, 1);
    x.set_requires_grad(true);
    const Tensor y = softmax(x);
    backward(y, randn({300, 101}, kF32, 2));
    results[threads - 1] = {y, x.grad()};
  }
  check_bitwise(results[0][0], results[1][0], "y");
  check_bitwise(results[0][1], results[1][1], "dx");
}

TEST_CASE("softmax: cost counts each operand once", "[softmax]") {
  std::byte memory[1];
  kernels::SoftmaxFwd fwd{memory, memory, kBF16, 10, 6, kernels::contiguous_rows(6)};
  CHECK(fwd.cost().flops() == 5 * 60);
  CHECK(fwd.cost().bytes_read() == 120);
  CHECK(fwd.cost().bytes_written() == 120);
  kernels::SoftmaxBwd bwd{memory, memory, memory, kF32, true, 10, 6, kernels::contiguous_rows(6)};
  CHECK(bwd.cost().flops() == 4 * 60);
  CHECK(bwd.cost().bytes_read() == 3 * 240);
  CHECK(bwd.cost().bytes_written() == 240);
}

TEST_CASE("softmax: errors name the op and what came", "[softmax]") {
  const auto contains = [](const std::string& message, const char* part) {
    INFO(message);
    CHECK(message.find(part) != std::string::npos);
  };
  contains(error_of([] { softmax(randn({})); }),
           "softmax: x must have at least one dimension, got []");
  contains(error_of([] {
             log_softmax(randn({2, 0}));
           }),
           "log_softmax: the last dimension of x is empty: [2, 0]");
  contains(error_of([] { softmax(zeros({2, 3}, kI32)); }), "softmax: x must be floating, got i32");
}

}  // namespace
}  // namespace tessera
