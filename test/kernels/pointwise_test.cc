#include "kernels/pointwise/pointwise.h"

#include <limits>

#include "kernels/elementwise/elementwise.h"
#include "kernels/loss/loss.h"
#include "kernels/pointwise/kernel.h"
#include "test/kernels/op_testing.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Op {
  std::string name;
  Function function;
  std::function<double(double, double)> value;
};

/// Of one operand or two, with a value for each pair of numbers.
const std::vector<Op>& unary_ops() {
  static const std::vector<Op> ops = {
      {"exp", [](const Tensors& t) { return tessera::exp(t[0]); },
       [](double x, double) { return std::exp(x); }},
      {"log", [](const Tensors& t) { return tessera::log(t[0]); },
       [](double x, double) { return std::log(x); }},
      {"sqrt", [](const Tensors& t) { return tessera::sqrt(t[0]); },
       [](double x, double) { return std::sqrt(x); }},
      {"rsqrt", [](const Tensors& t) { return rsqrt(t[0]); },
       [](double x, double) { return 1 / std::sqrt(x); }},
      {"tanh", [](const Tensors& t) { return tessera::tanh(t[0]); },
       [](double x, double) { return std::tanh(x); }},
      {"sigmoid", [](const Tensors& t) { return sigmoid(t[0]); },
       [](double x, double) { return 1 / (1 + std::exp(-x)); }},
      {"abs", [](const Tensors& t) { return tessera::abs(t[0]); },
       [](double x, double) { return std::fabs(x); }},
      {"neg", [](const Tensors& t) { return -t[0]; }, [](double x, double) { return -x; }},
      {"clamp", [](const Tensors& t) { return clamp(t[0], 0.5, 1.5); },
       [](double x, double) { return std::min(std::max(x, 0.5), 1.5); }}};
  return ops;
}
const std::vector<Op>& binary_ops() {
  static const std::vector<Op> ops = {
      {"add", [](const Tensors& t) { return t[0] + t[1]; },
       [](double a, double b) { return a + b; }},
      {"sub", [](const Tensors& t) { return t[0] - t[1]; },
       [](double a, double b) { return a - b; }},
      {"mul", [](const Tensors& t) { return t[0] * t[1]; },
       [](double a, double b) { return a * b; }},
      {"div", [](const Tensors& t) { return t[0] / t[1]; },
       [](double a, double b) { return a / b; }},
      {"pow", [](const Tensors& t) { return tessera::pow(t[0], t[1]); },
       [](double a, double b) { return std::pow(a, b); }},
      {"maximum", [](const Tensors& t) { return maximum(t[0], t[1]); },
       [](double a, double b) { return std::max(a, b); }},
      {"minimum", [](const Tensors& t) { return minimum(t[0], t[1]); },
       [](double a, double b) { return std::min(a, b); }},
      {"squared_difference", [](const Tensors& t) { return squared_difference(t[0], t[1]); },
       [](double a, double b) { return (a - b) * (a - b); }}};
  return ops;
}

/// Positive, away from the kinks of clamp: logarithms and powers are smooth there.
Tensor positive(const Shape& shape, DType dtype = kF64, uint64_t seed = 1) {
  std::vector<double> values = randn(shape, kF64, seed).to_vector();
  for (double& v : values) {
    v = 0.25 + std::fabs(v);
    if (std::fabs(v - 0.5) < 1e-3 || std::fabs(v - 1.5) < 1e-3) v += 0.01;
  }
  return from_values(std::span<const double>(values), shape, dtype);
}

/// Equal, NaN for NaN.
void check_values(const std::vector<double>& actual, const std::vector<double>& expected,
                  double tolerance = 0) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    INFO("element " << i << ": " << actual[i] << ", expected " << expected[i]);
    const bool is_same = std::isnan(expected[i]) ? std::isnan(actual[i]) : actual[i] == expected[i];
    CHECK((is_same || std::fabs(actual[i] - expected[i]) <= tolerance));
  }
}

/// y and the gradients of sum(y) for the given values, in f64 and in f32.
void check_case(const Function& f, const std::vector<std::vector<double>>& inputs,
                const std::vector<std::vector<double>>& expected) {
  for (const DType dtype : {kF64, kF32}) {
    CAPTURE(name_of(dtype));
    Tensors leaves;
    for (const auto& values : inputs) {
      leaves.push_back(
          from_values(std::span<const double>(values), {static_cast<int64_t>(values.size())}, dtype)
              .set_requires_grad(true));
    }
    const Tensor y = f(leaves);
    backward(y, full(y.shape(), 1, dtype));
    check_values(y.to_vector(), expected[0], 1e-6);
    for (size_t i = 0; i < leaves.size(); ++i) {
      INFO("gradient " << i);
      check_values(leaves[i].grad().to_vector(), expected[i + 1], 1e-6);
    }
  }
}

}  // namespace

// ---- add, sub, mul

TEST_CASE("add, sub, mul: values with broadcasting", "[pointwise]") {
  const Tensor a = from_values({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, {2, 3}, kF64);
  const Tensor row = from_values({10.0, 20.0, 30.0}, {3}, kF64);
  const Tensor column = from_values({2.0, -1.0}, {2, 1}, kF64);
  check_close(add(a, row).to_vector(), {11, 22, 33, 14, 25, 36}, 0);
  check_close(sub(row, a).to_vector(), {9, 18, 27, 6, 15, 24}, 0);
  check_close(mul(a, column).to_vector(), {2, 4, 6, -4, -5, -6}, 0);
  check_close(mul(column, row).to_vector(), {20, 40, 60, -10, -20, -30}, 0);
  check_close(add(a, full({}, 0.5, kF64)).to_vector(), {1.5, 2.5, 3.5, 4.5, 5.5, 6.5}, 0);
  check_close(sub(a, a.transpose(0, 1).contiguous().view({2, 3})).to_vector(), {0, -2, 1, -1, 2, 0},
              0);
  CHECK(add(full({}, 1), full({}, 2)).item() == 3);
  CHECK(mul(empty({0, 3}), full({3}, 1)).shape() == Shape{0, 3});
}

TEST_CASE("add, sub, mul: operands may have any strides", "[pointwise]") {
  const Tensor base = randn({5, 7, 6}, kF32);
  const Tensor a = base.transpose(0, 2), b = base.narrow(2, 1, 5).transpose(0, 2);
  check_bitwise(add(a, a), add(a.contiguous(), a.contiguous()));
  check_bitwise(mul(b, a.narrow(0, 0, 5)), mul(b.contiguous(), a.narrow(0, 0, 5).contiguous()));
}

TEST_CASE("add, sub, mul: backward matches finite differences", "[pointwise]") {
  const std::vector<std::pair<Shape, Shape>> shapes = {
      {{3, 4}, {3, 4}},    {{3, 4}, {4}},       {{2, 3, 4}, {3, 1}},       {{5}, {}},
      {{2, 1, 3}, {4, 1}}, {{1, 1}, {1}},       {{2, 3, 2, 3}, {3, 1, 3}}, {{}, {}},
      {{1, 3}, {2, 1, 1}}, {{2, 3}, {1, 2, 3}}, {{2, 3, 2}, {2, 1, 2}}};
  for (const auto& s : shapes) {
    CAPTURE(fmt::format("{} {}", s.first, s.second));
    const Tensors inputs = {leaf(s.first, kF64, 1), leaf(s.second, kF64, 2)};
    gradcheck([](const Tensors& t) { return add(t[0], t[1]); }, inputs);
    gradcheck([](const Tensors& t) { return sub(t[0], t[1]); }, inputs);
    gradcheck([](const Tensors& t) { return sub(t[1], t[0]); }, inputs);
    gradcheck([](const Tensors& t) { return mul(t[0], t[1]); }, inputs);
  }
}

TEST_CASE("mul: the same tensor twice", "[pointwise]") {
  gradcheck([](const Tensors& t) { return mul(t[0], t[0]); }, {leaf({3, 5})});
  gradcheck(
      [](const Tensors& t) {
        const Tensor x = scale(t[0], 2);
        return mul(x, mul(x, x));
      },
      {leaf({7})});
  const Tensor x = leaf_of({3.0, -2.0});
  backward(add(x, x), full({2}, 1, kF64));
  check_close(x.grad().to_vector(), {2, 2}, 0);
}

TEST_CASE("add, sub, mul: f32, bf16 and f16 match f64", "[pointwise]") {
  const std::vector<std::vector<Shape>> shapes = {
      {{1}, {1}}, {{13, 37}, {13, 37}}, {{13, 37}, {37}}, {{13, 37}, {13, 1}}, {{3, 1, 5}, {7, 1}}};
  for (const auto& s : shapes) {
    check_dtypes([](const Tensors& t) { return add(t[0], t[1]); }, s);
    check_dtypes([](const Tensors& t) { return sub(t[0], t[1]); }, s);
    check_dtypes([](const Tensors& t) { return mul(t[0], t[1]); }, s);
  }
}

TEST_CASE("mul: a broadcast weight's gradient is summed over many rows without drift",
          "[pointwise]") {
  // 4097 terms of 1 + 2^-7: a sum kept in bf16 would stop at 256.
  Tensor w = full({3}, 1, kBF16).set_requires_grad(true);
  const Tensor x = full({4097, 3}, 1.0078125, kBF16);
  const Tensor dw = empty({3}, kF32);
  set_grad_sink(w, std::make_shared<BufferSink>(dw, false));
  backward(mul(x, w), full({4097, 3}, 1, kBF16));
  check_close(dw.to_vector(), std::vector<double>(3, 4097 * 1.0078125), 1e-7);
}

TEST_CASE("add, mul: gradients accumulate into a destination of another dtype", "[pointwise]") {
  for (const bool accumulate : {false, true}) {
    for (const Shape& shape : {Shape{3, 4}, Shape{4}, Shape{3, 1}}) {
      CAPTURE(accumulate, fmt::format("{}", shape));
      const Tensor x = randn({3, 4}, kBF16, 5), dy = randn({3, 4}, kBF16, 6);
      const double before = accumulate ? 2 : 0;
      for (const bool is_mul : {false, true}) {
        Tensor w = randn(shape, kBF16, 7).set_requires_grad(true);
        // Where nothing is accumulated, old bytes must not matter.
        const Tensor dw = full(shape, accumulate ? 2 : NAN, kF32);
        set_grad_sink(w, std::make_shared<BufferSink>(dw, accumulate));
        backward(is_mul ? mul(x, w) : sub(x, w), dy);
        Tensor w64 = w.detach().to(kF64).clone().set_requires_grad(true);
        const Tensor x64 = x.to(kF64);
        backward(is_mul ? mul(x64, w64) : sub(x64, w64), dy.to(kF64));
        std::vector<double> expected = w64.grad().to_vector();
        for (double& v : expected) v += before;
        check_close(dw.to_vector(), expected, tol(kF32));
      }
    }
  }
}

TEST_CASE("add, mul: results do not depend on the number of threads", "[pointwise]") {
  check_same_on_threads([] {
    return run([](const Tensors& t) { return mul(add(t[0], t[1]), t[2]); },
               {randn({313, 517}, kF32, 1), randn({517}, kF32, 2), randn({313, 1}, kF32, 3)}, kF32);
  });
}

// ---- the other functions

TEST_CASE("pointwise: closed forms in f64, with broadcasting", "[pointwise]") {
  const Tensor a = positive({3, 5}, kF64, 1), row = positive({5}, kF64, 2);
  for (const Op& op : unary_ops()) {
    CAPTURE(op.name);
    std::vector<double> expected;
    for (const double x : a.to_vector()) expected.push_back(op.value(x, 0));
    check_close(op.function({a}).to_vector(), expected, 1e-15);
  }
  for (const Op& op : binary_ops()) {
    CAPTURE(op.name);
    std::vector<double> expected;
    for (const double x : a.to_vector()) {
      expected.push_back(op.value(x, row.to_vector()[expected.size() % 5]));
    }
    check_close(op.function({a, row}).to_vector(), expected, 1e-15);
  }
}

TEST_CASE("pointwise: backward matches finite differences", "[pointwise]") {
  for (const Op& op : unary_ops()) {
    CAPTURE(op.name);
    for (const Shape& shape : {Shape{}, Shape{3, 5}, Shape{1031}}) {
      gradcheck(op.function, {positive(shape).set_requires_grad(true)});
    }
    gradcheck([&](const Tensors& t) { return op.function({t[0].transpose(0, 1)}); },
              {positive({3, 4}).set_requires_grad(true)});
  }
  const std::vector<std::pair<Shape, Shape>> shapes = {
      {{3, 4}, {3, 4}}, {{3, 4}, {4}}, {{2, 3, 4}, {3, 1}}, {{5}, {}}, {{2, 1, 3}, {4, 1}}};
  for (const Op& op : binary_ops()) {
    for (const auto& s : shapes) {
      CAPTURE(op.name, fmt::format("{} {}", s.first, s.second));
      gradcheck(op.function, {positive(s.first, kF64, 3).set_requires_grad(true),
                              positive(s.second, kF64, 4).set_requires_grad(true)});
    }
  }
}

TEST_CASE("pointwise: f32, bf16 and f16 match f64", "[pointwise]") {
  // Their inputs are squares and a little, so that every function is smooth.
  const auto near = [](const Tensor& x) { return scale(x, 0.25) * scale(x, 0.25) + 0.75; };
  for (const Op& op : unary_ops()) {
    CAPTURE(op.name);
    if (op.name == "clamp") continue;  // a gradient of 0 or 1 by a rounding
    for (const Shape& shape : {Shape{1}, Shape{17}, Shape{2, 2053}}) {
      for (const DType dtype : {kF32, kBF16, kF16}) {
        CAPTURE(name_of(dtype));
        const Tensors inputs = {near(randn(shape, kF64)).to(dtype)};
        const Run expected = run(op.function, inputs, kF64),
                  actual = run(op.function, inputs, dtype);
        check_close(actual.y, expected.y, 2 * tol(dtype), "y");
        check_close(actual.grads[0], expected.grads[0], 4 * tol(dtype), "gradient");
      }
    }
  }
  for (const Op& op : binary_ops()) {
    CAPTURE(op.name);
    for (const DType dtype : {kF32, kBF16, kF16}) {
      CAPTURE(name_of(dtype));
      const Tensors inputs = {near(randn({13, 37}, kF64, 1)).to(dtype),
                              near(randn({37}, kF64, 2)).to(dtype)};
      const Run expected = run(op.function, inputs, kF64), actual = run(op.function, inputs, dtype);
      check_close(actual.y, expected.y, 2 * tol(dtype), "y");
      for (size_t i = 0; i < 2; ++i) {
        check_close(actual.grads[i], expected.grads[i], 4 * tol(dtype), "gradient");
      }
    }
  }
}

TEST_CASE("pointwise: edges, ties and NaN as PyTorch has them", "[pointwise]") {
  const auto unary = [](Tensor (*f)(const Tensor&)) {
    return [f](const Tensors& t) { return f(t[0]); };
  };
  check_case(unary(tessera::abs), {{-2, -0.0, 0, 3, kNan, -kInf}},
             {{2, 0, 0, 3, kNan, kInf}, {-1, 0, 0, 1, 0, -1}});
  check_case([](const Tensors& t) { return clamp(t[0], -1, 2); }, {{-2, -1, 0, 2, 3, kNan, kInf}},
             {{-1, -1, 0, 2, 2, kNan, 2}, {0, 0, 1, 0, 0, 0, 0}});
  check_case([](const Tensors& t) { return clamp(t[0], 0, -1); }, {{-2, 0.5}}, {{-1, -1}, {0, 0}});
  check_case([](const Tensors& t) { return clamp(t[0], -kInf, 1); }, {{-7, 2}}, {{-7, 1}, {1, 0}});
  const std::vector<std::vector<double>> pairs = {{1, 2, 3, kNan, 1}, {2, 2, 1, 1, kNan}};
  check_case([](const Tensors& t) { return maximum(t[0], t[1]); }, pairs,
             {{2, 2, 3, kNan, kNan}, {0, 0.5, 1, 1, 1}, {1, 0.5, 0, 1, 1}});
  check_case([](const Tensors& t) { return minimum(t[0], t[1]); }, pairs,
             {{1, 2, 1, kNan, kNan}, {1, 0.5, 0, 1, 1}, {0, 0.5, 1, 1, 1}});
  check_case([](const Tensors& t) { return tessera::pow(t[0], t[1]); },
             {{0, 0, 0, -2, 2, 0, -8}, {0, 2, -1, 3, 0.5, 0.5, 1.0 / 3}},
             {{1, 0, kInf, -8, std::sqrt(2.0), 0, kNan},
              {0, 0, -kInf, 12, 0.3535533905932738, kInf, kNan},
              {0, 0, -kInf, kNan, 0.9802581434685472, 0, kNan}});
  check_case([](const Tensors& t) { return tessera::pow(t[0], 0); }, {{0, 2}}, {{1, 1}, {0, 0}});
  check_case([](const Tensors& t) { return tessera::pow(t[0], 2); }, {{0, -2}}, {{0, 4}, {0, -4}});
  check_case([](const Tensors& t) { return tessera::pow(t[0], 3); }, {{0, -2}}, {{0, -8}, {0, 12}});
  check_case([](const Tensors& t) { return tessera::pow(0, t[0]); }, {{0, 2, -1}},
             {{1, 0, kInf}, {0, 0, -kInf}});
  check_case(unary(tessera::log), {{0, 1, -1, kInf}}, {{-kInf, 0, kNan, kInf}, {kInf, 1, -1, 0}});
  check_case(unary(tessera::sqrt), {{0, 4, -1}}, {{0, 2, kNan}, {kInf, 0.25, kNan}});
  check_case(unary(rsqrt), {{0, 4, kInf}}, {{kInf, 0.5, 0}, {-kInf, -0.0625, 0}});
  check_case([](const Tensors& t) { return t[0] / t[1]; }, {{1, -1, 0, 6}, {0, 0, 0, 3}},
             {{kInf, -kInf, kNan, 2}, {kInf, kInf, kInf, 1.0 / 3}, {-kInf, kInf, kNan, -2.0 / 3}});
  check_case(unary(sigmoid), {{-800, 0, 800, kNan}}, {{0, 0.5, 1, kNan}, {0, 0.25, 0, kNan}});
  check_case(unary(tessera::exp), {{-800, 0, 800, kNan}}, {{0, 1, kInf, kNan}, {0, 1, kInf, kNan}});
  check_case(unary(tessera::tanh), {{-800, 0, 0.5, kNan}},
             {{-1, 0, 0.46211715726000974, kNan}, {0, 1, 0.7864477329659274, kNan}});
}

TEST_CASE("pointwise: numbers on either side", "[pointwise]") {
  const auto check = [](const Function& f, const std::vector<double>& y,
                        const std::vector<double>& dx) {
    check_case(f, {{1, -2, 4}}, {y, dx});
  };
  check([](const Tensors& t) { return t[0] + 2; }, {3, 0, 6}, {1, 1, 1});
  check([](const Tensors& t) { return 2 - t[0]; }, {1, 4, -2}, {-1, -1, -1});
  check([](const Tensors& t) { return t[0] - 0.5; }, {0.5, -2.5, 3.5}, {1, 1, 1});
  check([](const Tensors& t) { return -3.0 * t[0]; }, {-3, 6, -12}, {-3, -3, -3});
  check([](const Tensors& t) { return t[0] / 4; }, {0.25, -0.5, 1}, {0.25, 0.25, 0.25});
  check([](const Tensors& t) { return 8 / t[0]; }, {8, -4, 2}, {-8, -2, -0.5});
  check([](const Tensors& t) { return maximum(t[0], 1); }, {1, 1, 4}, {0.5, 0, 1});
  check([](const Tensors& t) { return minimum(0.5, t[0]); }, {0.5, -2, 0.5}, {0, 1, 0});
  check([](const Tensors& t) { return tessera::pow(2, t[0]); }, {2, 0.25, 16},
        {2 * M_LN2, 0.25 * M_LN2, 16 * M_LN2});
  // A number is taken in f32, not in the tensor's dtype, but compared in it.
  const Tensor x = full({1}, 256, kBF16);
  CHECK((x * 1.00390625).item() == 256);  // 257 in f32 rounds to even
  CHECK((x * 1.01171875).item() == 260);  // 259, where the bf16 factor 1.015625 would give 260
  CHECK(eq(full({1}, 0.1, kBF16), 0.1).item() == 1);
  CHECK(gt(full({1}, 0.1, kF16), 0.1).item() == 0);
}

TEST_CASE("mul: an operand is kept only if its partner wants a gradient", "[pointwise]") {
  const Tensor a = full({2}, 3, kF64).set_requires_grad(true), b = full({2}, 5, kF64);
  const Tensor y = mul(a, b);
  Tensor(a.detach()).fill_(0);  // not read by backward
  backward(y, full({2}, 1, kF64));
  check_values(a.grad().to_vector(), {5, 5});
  const Tensor z = div(a, b);
  Tensor(b).fill_(1);
  CHECK_THAT(error_of([&] { backward(z, full({2}, 1, kF64)); }),
             Catch::Matchers::Contains("div: a tensor of shape [2] that backward needs"));
}

// ---- masks

TEST_CASE("eq, ne, lt, le, gt, ge: masks of floats and integers, NaN is never equal",
          "[pointwise]") {
  const Tensor a = from_values({kNan, 1.0, 2.0, 3.0}, {4}, kF32),
               b = from_values({kNan, 2.0, 2.0, 2.0}, {4}, kF32);
  const std::vector<std::pair<Tensor (*)(const Operand&, const Operand&), std::vector<double>>>
      comparisons = {{eq, {0, 0, 1, 0}}, {ne, {1, 1, 0, 1}}, {lt, {0, 1, 0, 0}},
                     {le, {0, 1, 1, 0}}, {gt, {0, 0, 0, 1}}, {ge, {0, 0, 1, 1}}};
  for (const auto& [compare, expected] : comparisons) {
    const Tensor mask = compare(a, b);
    CHECK(mask.dtype() == kU8);
    check_values(mask.to_vector(), expected);
    check_values(compare(a, 2).to_vector(), expected);
    const auto last = std::vector<double>(expected.begin() + 1, expected.end());
    const int64_t large = (int64_t{1} << 53) + 2;  // neighbours that f64 does not tell apart
    const Tensor i = from_values({large - 1, large, large + 1}, {3}), j = from_values({large}, {1});
    check_values(compare(i, j).to_vector(), last);
    check_values(compare(from_values({1, 2, 3}, {3}, kI32), 2).to_vector(), last);
  }
  CHECK(lt(full({3, 1}, 1), full({2}, 2)).shape() == Shape{3, 2});
  CHECK(!lt(full({2}, 1).set_requires_grad(true), 2).requires_grad());
}

TEST_CASE("logical_and, logical_or, logical_not: every value but 0 is true", "[pointwise]") {
  const Tensor a = from_values({0.0, 0.0, 7.0, 1.0}, {4}, kU8),
               b = from_values({0.0, 1.0, 0.0, 255.0}, {4}, kU8);
  check_values(logical_and(a, b).to_vector(), {0, 0, 0, 1});
  check_values(logical_or(a, b).to_vector(), {0, 1, 1, 1});
  check_values(logical_not(a).to_vector(), {1, 1, 0, 0});
}

TEST_CASE("where, masked_fill: what is not taken never reaches the gradient", "[pointwise]") {
  const Tensor mask = from_values({1.0, 0.0, 2.0}, {3}, kU8);
  check_case([&](const Tensors& t) { return where(mask, t[0], t[1]); },
             {{1, 2, kInf}, {kNan, 5, 6}}, {{1, 5, kInf}, {1, 0, 1}, {0, 1, 0}});
  check_case([&](const Tensors& t) { return masked_fill(t[0], mask, -kInf); }, {{1, 2, 3}},
             {{-kInf, 2, -kInf}, {0, 1, 0}});
  check_case([&](const Tensors& t) { return where(mask, tessera::log(t[0]), 0); }, {{1, 0, 2}},
             {{0, 0, M_LN2}, {1, kNan, 0.5}});  // 0 * inf in log's own backward, as in PyTorch
  const Tensor wide = from_values({1.0, 0.0, 0.0, 1.0, 1.0, 0.0}, {2, 1, 3}, kU8);
  gradcheck([&](const Tensors& t) { return where(wide, t[0], t[1]); },
            {leaf({4, 1}, kF64, 1), leaf({3}, kF64, 2)});
  CHECK(where(wide, full({4, 1}, 1), 2).shape() == Shape{2, 4, 3});
}

TEST_CASE("pointwise: results do not depend on the number of threads", "[pointwise]") {
  check_same_on_threads([] {
    return run(
        [](const Tensors& t) {
          const Tensor x = tessera::tanh(t[0]) / (tessera::exp(t[1]) + 1);
          return where(gt(x, 0), tessera::log(tessera::abs(x) + 1), sigmoid(x) * t[2]);
        },
        {randn({313, 517}, kF32, 1), randn({517}, kF32, 2), randn({313, 1}, kF32, 3)}, kF32);
  });
}

TEST_CASE("mse_loss: the mean of squares, in f32 for 16-bit inputs", "[pointwise]") {
  check_case([](const Tensors& t) { return mse_loss(t[0], t[1]); }, {{1, 2, 4}, {0, 2, 1}},
             {{10.0 / 3}, {2.0 / 3, 0, 2}, {-2.0 / 3, 0, -2}});
  gradcheck([](const Tensors& t) { return mse_loss(t[0], t[1]); },
            {leaf({3, 5}, kF64, 1), leaf({3, 5}, kF64, 2)});
  const Tensor loss = mse_loss(full({300}, 3, kBF16), full({300}, 1, kBF16));
  CHECK(loss.dtype() == kF32);
  CHECK(loss.item() == 4);
  check_error(
      [] {
        mse_loss(full({2}, 1), full({2, 1}, 1));
      },
      {"mse_loss: x and target must have one shape", "[2] vs [2, 1]"});
}

// ---- errors, costs

TEST_CASE("pointwise: errors name the op and what came", "[pointwise]") {
  const Tensor f = full({2, 3}, 1), b = full({2, 3}, 1, kBF16), i = full({2, 3}, 1, kI32);
  check_error([&] { add(f, full({4}, 1)); }, {"add: ", "[4]"});
  CHECK_THROWS_AS(add(f, full({4}, 1)), ShapeError);
  check_error([&] { mul(f, b); }, {"mul: the operands must have one dtype", "f32 vs bf16"});
  CHECK_THROWS_AS(mul(f, b), DtypeError);
  check_error([&] { sub(i, i); }, {"sub: expected a floating dtype, got i32"});
  check_error([&] { tessera::div(1.0, 2.0); },
              {"div: at least one operand must be a tensor, got numbers"});
  check_error([&] { tessera::exp(i); }, {"exp: expected a floating dtype, got i32"});
  check_error([&] { clamp(i, 0, 1); }, {"clamp: expected a floating dtype, got i32"});
  check_error([&] { eq(f, i); }, {"eq: the operands must have one dtype", "f32 vs i32"});
  check_error([&] { lt(i, 0.5); }, {"lt: beside i32 a number must be whole, got 0.5"});
  check_error([&] { where(f, f, f); }, {"where: a mask must be u8, got f32"});
  check_error([&] { logical_and(f, f); }, {"logical_and: a mask must be u8, got f32"});
  check_error([&] { where(full({2}, 1, kU8), f, 0); }, {"where: ", "[2]", "[2, 3]"});
  const Tensor elsewhere =
      view_of_storage(std::make_shared<Storage>(24, Device{DeviceType::kCuda, 0}), 0, {2, 3}, kF32);
  check_error(
      [&] { maximum(f, elsewhere); },
      {"maximum: expected an operand on cpu, where this thread computes, got one on cuda:0"});
}

TEST_CASE("pointwise: costs", "[pointwise]") {
  float dummy[1];
  kernels::Pointwise row_add{.dst = dummy,
                             .dst_dtype = kF32,
                             .op = kernels::PointwiseOp::kAdd,
                             .shape = {8, 16},
                             .dst_strides = {16, 1},
                             .in = {{{dummy, kBF16, {16, 1}}, {dummy, kBF16, {0, 1}}, {}}}};
  CHECK(row_add.cost().flops() == 128);
  CHECK(row_add.cost().bytes_read() == 128 * 2 + 16 * 2);
  CHECK(row_add.cost().bytes_written() == 128 * 4);
  row_add.accumulate = true;
  CHECK(row_add.cost().flops() == 256);
  CHECK(row_add.cost().bytes_read() == 128 * 2 + 16 * 2 + 128 * 4);
  CHECK(kernels::num_operands(kernels::PointwiseOp::kAbs) == 1);
  CHECK(kernels::num_operands(kernels::PointwiseOp::kEq) == 2);
  CHECK(kernels::num_operands(kernels::PointwiseOp::kSigmoidBwd) == 2);
  CHECK(kernels::num_operands(kernels::PointwiseOp::kWhere) == 3);
}
