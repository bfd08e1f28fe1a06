#include "kernels/elementwise/elementwise.h"

#include <limits>

#include "kernels/elementwise/kernel.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"
#include "test/kernels/op_testing.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const std::vector<std::pair<std::string, Function>>& unary_ops() {
  static const std::vector<std::pair<std::string, Function>> ops = {
      {"scale", [](const Tensors& t) { return scale(t[0], -1.75); }},
      {"relu", [](const Tensors& t) { return relu(t[0]); }},
      {"silu", [](const Tensors& t) { return silu(t[0]); }},
      {"gelu tanh", [](const Tensors& t) { return gelu(t[0]); }},
      {"gelu exact", [](const Tensors& t) { return gelu(t[0], Gelu::kExact); }}};
  return ops;
}

}  // namespace

// ---- activations

TEST_CASE("relu, silu, gelu, scale: closed forms in f64", "[elementwise]") {
  const std::vector<double> x = {-30, -4, -1, -0.25, 0, 0.25, 1, 4, 30};
  const Tensor t = from_values(x, {9}, kF64);
  std::vector<double> expected[5];
  for (const double v : x) {
    expected[0].push_back(-1.75 * v);
    expected[1].push_back(std::max(v, 0.0));
    expected[2].push_back(v / (1 + std::exp(-v)));
    const double u = std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v);
    expected[3].push_back(0.5 * v * (1 + std::tanh(u)));
    expected[4].push_back(0.5 * v * std::erfc(-v / std::sqrt(2.0)));
  }
  for (size_t i = 0; i < unary_ops().size(); ++i) {
    check_close(unary_ops()[i].second({t}).to_vector(), expected[i], 1e-15, unary_ops()[i].first);
  }
}

TEST_CASE("relu, silu, gelu, scale: backward matches finite differences", "[elementwise]") {
  for (const auto& op : unary_ops()) {
    CAPTURE(op.first);
    for (const Shape& shape : {Shape{}, Shape{1}, Shape{3, 5}, Shape{2, 3, 4}, Shape{1031}}) {
      gradcheck(op.second, {leaf(shape)});
    }
  }
}

TEST_CASE("relu, silu, gelu, scale: f32, bf16 and f16 match f64", "[elementwise]") {
  for (const auto& op : unary_ops()) {
    CAPTURE(op.first);
    for (const Shape& shape : {Shape{1}, Shape{17}, Shape{31, 67}, Shape{2, 2053}}) {
      check_dtypes(op.second, {shape});
    }
  }
}

TEST_CASE("gelu: f32 is exact to 3e-7 over the whole range", "[elementwise]") {
  std::vector<double> x;
  for (int i = -8000; i <= 8000; ++i) x.push_back(static_cast<float>(i * 1e-3));
  const auto count = static_cast<int64_t>(x.size());
  for (const Gelu kind : {Gelu::kTanh, Gelu::kExact}) {
    Tensor x32 = from_values(x, {count}, kF32).set_requires_grad(true);
    Tensor x64 = from_values(x, {count}, kF64).set_requires_grad(true);
    const Tensor y32 = gelu(x32, kind), y64 = gelu(x64, kind);
    check_close(y32, y64, 3e-7);
    backward(y32, full({count}, 1, kF32));
    backward(y64, full({count}, 1, kF64));
    check_close(x32.grad(), x64.grad(), 6e-7);
  }
}

TEST_CASE("relu, silu, gelu: large values stay finite, NaN stays NaN", "[elementwise]") {
  const float inf = std::numeric_limits<float>::infinity();
  for (const DType dtype : {kF32, kBF16, kF64}) {
    Tensor x = from_values({NAN, 1e4f, -1e4f, inf}, {4}, dtype).set_requires_grad(true);
    for (size_t i = 1; i < unary_ops().size(); ++i) {
      CAPTURE(unary_ops()[i].first);
      x.zero_grad();
      const Tensor y = unary_ops()[i].second({x});
      backward(y, full({4}, 1, dtype));
      const std::vector<double> v = y.to_vector(), dx = x.grad().to_vector();
      CHECK(std::isnan(v[0]));
      CHECK(std::fabs(v[1] - 1e4) <= 1e4 * tol(dtype));
      CHECK(v[2] == 0);
      CHECK(v[3] == inf);
      CHECK(dx[1] == 1);
      CHECK(dx[2] == 0);
    }
  }
}

TEST_CASE("activations: read and write column slices in place", "[elementwise]") {
  for (const auto& op : unary_ops()) {
    CAPTURE(op.first);
    Tensor packed = leaf({2, 3, 11}), whole = packed.detach().clone().set_requires_grad(true);
    const int64_t sizes[] = {4, 7};
    const Tensor dy = randn({2, 3, 7}, kF64, 9);
    const Tensor part = split(packed, sizes)[1];
    const Tensor y = op.second({part}), expected = op.second({whole.narrow(2, 4, 7).contiguous()});
    check_bitwise(y, expected);
    backward(y, dy);
    backward(expected, dy);
    check_bitwise(packed.grad(), whole.grad());
  }
}

TEST_CASE("activations: layouts that rows cannot describe work too", "[elementwise]") {
  gradcheck([](const Tensors& t) { return silu(t[0].transpose(0, 1)); }, {leaf({3, 4})});
  gradcheck(
      [](const Tensors& t) {
        const int64_t sizes[] = {1, 2};  // parts of the middle dimension are not evenly spaced
        const Tensors parts = split(t[0], sizes, 1);
        return add(gelu(parts[1]), scale(parts[0], 3));
      },
      {leaf({2, 3, 4})});
}

TEST_CASE("activations: gradients accumulate into a destination of another dtype",
          "[elementwise]") {
  for (const auto& op : unary_ops()) {
    CAPTURE(op.first);
    Tensor x = randn({3, 5}, kBF16).set_requires_grad(true);
    const Tensor dx = full({3, 5}, 1, kF32);
    set_grad_sink(x, std::make_shared<BufferSink>(dx, true));
    backward(op.second({x}), full({3, 5}, 1, kBF16));
    Tensor x64 = x.detach().to(kF64).clone().set_requires_grad(true);
    backward(op.second({x64}), full({3, 5}, 1, kF64));
    // relu's derivative is taken from y, which is exact; the others from x: no rounding but f32's.
    check_close(dx, add(x64.grad(), full({}, 1, kF64)), 10 * tol(kF32));
  }
}

TEST_CASE("activations: results do not depend on the number of threads", "[elementwise]") {
  for (const auto& op : unary_ops()) {
    for (const DType dtype : {kF32, kBF16, kF16}) {
      CAPTURE(op.first, name_of(dtype));
      check_same_on_threads([&] { return run(op.second, {randn({257, 523}, dtype)}, dtype); });
    }
  }
}

// ---- swiglu

TEST_CASE("swiglu: equals silu(gate) * up and its gradient", "[elementwise]") {
  const Function composite = [](const Tensors& t) { return mul(silu(t[0]), t[1]); };
  const Function fused = [](const Tensors& t) { return swiglu(t[0], t[1]); };
  const Tensors inputs = {randn({5, 23}, kF64, 1), randn({5, 23}, kF64, 2)};
  const Run a = run(fused, inputs, kF64), b = run(composite, inputs, kF64);
  check_close(a.y, b.y, tol(kF64));
  check_close(a.grads[0], b.grads[0], tol(kF64));
  check_close(a.grads[1], b.grads[1], tol(kF64));
  gradcheck(fused, {leaf({3, 4}, kF64, 1), leaf({3, 4}, kF64, 2)});
  gradcheck([](const Tensors& t) { return swiglu(t[0], t[0]); }, {leaf({7})});
  gradcheck(
      [](const Tensors& t) {
        const Tensor x = scale(t[0], 1.5);
        return swiglu(x, x);
      },
      {leaf({7})});
  check_dtypes(fused, {{1}, {1}});
  check_dtypes(fused, {{29, 61}, {29, 61}}, 2);  // values up to 10
}

TEST_CASE("swiglu: halves of a packed tensor, gradient written in place", "[elementwise]") {
  gradcheck(
      [](const Tensors& t) {
        const int64_t sizes[] = {5, 5};
        const Tensors parts = split(t[0], sizes);
        return swiglu(parts[0], parts[1]);
      },
      {leaf({2, 3, 10})});
  check_same_on_threads([] {
    return run(
        [](const Tensors& t) {
          const int64_t sizes[] = {600, 600};
          const Tensors parts = split(t[0], sizes);
          return swiglu(parts[0], parts[1]);
        },
        {randn({101, 1200}, kBF16)}, kBF16);
  });
}

TEST_CASE("swiglu: only the gradient that is wanted", "[elementwise]") {
  Tensor gate = leaf({3, 4}, kF64, 1);
  const Tensor up = randn({3, 4}, kF64, 2);
  gradcheck([&](const Tensors& t) { return swiglu(t[0], up); }, {gate});
  gradcheck([&](const Tensors& t) { return swiglu(up, t[0]); }, {gate});
  CHECK(!up.grad().is_defined());
}

// ---- split

TEST_CASE("split: parts are views in order along any dimension", "[elementwise]") {
  const Tensor x = from_values({0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0}, {2, 4}, kF32);
  const int64_t sizes[] = {1, 0, 3};
  const Tensors parts = split(x, sizes);
  REQUIRE(parts.size() == 3);
  check_close(parts[0].to_vector(), {0, 4}, 0);
  CHECK(parts[1].shape() == Shape{2, 0});
  check_close(parts[2].to_vector(), {1, 2, 3, 5, 6, 7}, 0);
  CHECK(parts[2].storage() == x.storage());
  const int64_t rows[] = {1, 1};
  check_close(split(x, rows, 0)[1].to_vector(), {4, 5, 6, 7}, 0);
}

TEST_CASE("split: gradients of all parts come together", "[elementwise]") {
  const int64_t sizes[] = {2, 3, 1};
  const Function mixed = [&](const Tensors& t) {
    const Tensors p = split(t[0], sizes, 1);
    // One part used twice, one handed on by reference (add), one written in place.
    const Tensor sums = add(sum(mul(p[0], p[0]), 1), sum(silu(p[1]), 1));
    return add(sums, add(sum(p[2], 1), sum(gelu(p[0]), 1)));
  };
  gradcheck(mixed, {leaf({4, 6})});
  gradcheck(mixed, {leaf({2, 6, 3})});
}

TEST_CASE("split: a part that nobody used has gradient zero", "[elementwise]") {
  Tensor x = leaf({2, 6});
  const int64_t sizes[] = {2, 3, 1};
  backward(silu(split(x, sizes)[1]), full({2, 3}, 1, kF64));
  Tensor alone = x.detach().narrow(1, 2, 3).clone().set_requires_grad(true);
  backward(silu(alone), full({2, 3}, 1, kF64));
  check_bitwise(x.grad().narrow(1, 2, 3), alone.grad());
  check_close(x.grad().narrow(1, 0, 2).to_vector(), std::vector<double>(4, 0), 0);
  check_close(x.grad().narrow(1, 5, 1).to_vector(), std::vector<double>(2, 0), 0);
}

TEST_CASE("split: a retained graph can be walked twice", "[elementwise]") {
  Tensor x = leaf({2, 4});
  const int64_t sizes[] = {1, 3};
  const Tensors parts = split(x, sizes);
  const Tensor y = sum(add(mul(parts[1], parts[1]), parts[0]));
  backward(y, {}, {.retain_graph = true});
  const std::vector<double> once = x.grad().to_vector();
  backward(y);
  std::vector<double> twice = once;
  for (double& v : twice) v *= 2;
  check_close(x.grad().to_vector(), twice, 1e-15);
}

// ---- errors, costs

TEST_CASE("elementwise: errors name the op and what came", "[elementwise]") {
  const Tensor f = full({2, 3}, 1), b = full({2, 3}, 1, kBF16), i = full({2, 3}, 1, kI32);
  check_error([&] { scale(i, 2); }, {"scale: expected a floating dtype, got i32"});
  check_error([&] { gelu(i); }, {"gelu: expected a floating dtype, got i32"});
  check_error([&] { relu(i); }, {"relu: expected a floating dtype, got i32"});
  check_error([&] { silu(i); }, {"silu: expected a floating dtype, got i32"});
  check_error([&] { swiglu(i, i); }, {"swiglu: expected a floating dtype"});
  check_error([&] { swiglu(f, b); }, {"swiglu: gate and up must have one dtype"});
  check_error([&] { swiglu(f, full({3}, 1)); },
              {"swiglu: gate and up must have one shape", "[2, 3] vs [3]"});
  const int64_t wrong[] = {1, 1}, negative[] = {4, -1};
  check_error([&] { split(f, wrong); },
              {"split: the sizes [1, 1] must be >= 0 and sum to dimension -1 of [2, 3]"});
  check_error([&] { split(f, negative); }, {"split: the sizes [4, -1]"});
}

TEST_CASE("elementwise: costs", "[elementwise]") {
  float dummy[1];
  const kernels::ActivationFwd fwd{dummy, dummy, kF16, kernels::Activation::kRelu, 4, 8, 8};
  CHECK(fwd.cost().flops() == 32);
  CHECK(fwd.cost().bytes() == 2 * 32 * 2);
  kernels::ActivationBwd bwd{dummy, dummy, dummy, kF32, kF32, kernels::Activation::kSilu,
                             4,     8,     8,     8,    8,    true};
  CHECK(bwd.cost().bytes_read() == 3 * 32 * 4);
  CHECK(bwd.cost().bytes_written() == 32 * 4);
  const kernels::Scale times{dummy, dummy, kF32, kF32, 2, 4, 8, 8, 8, false};
  CHECK(times.cost().flops() == 32);
  CHECK(times.cost().bytes() == 2 * 32 * 4);
  const kernels::SwigluFwd swiglu_fwd{dummy, dummy, dummy, kF32, 4, 8, 8, 8};
  CHECK(swiglu_fwd.cost().bytes_read() == 2 * 32 * 4);
  CHECK(swiglu_fwd.cost().bytes_written() == 32 * 4);
  kernels::SwigluBwd swiglu_bwd{.dgate = dummy,
                                .dup = nullptr,
                                .dy = dummy,
                                .gate = dummy,
                                .up = dummy,
                                .dgate_dtype = kF32,
                                .dup_dtype = kF32,
                                .dtype = kF32,
                                .rows = 4,
                                .cols = 8,
                                .dgate_stride = 8,
                                .dup_stride = 8,
                                .dy_stride = 8,
                                .gate_stride = 8,
                                .up_stride = 8};
  CHECK(swiglu_bwd.cost().bytes_read() == 3 * 32 * 4);
  CHECK(swiglu_bwd.cost().bytes_written() == 32 * 4);
}
