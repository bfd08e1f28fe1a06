#include "kernels/matmul/matmul.h"

#include <cstring>
#include <numeric>

#include "core/autograd.h"
#include "core/runtime/context.h"
#include "kernels/matmul/cpu/panels.h"
#include "kernels/matmul/kernel.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::check_bitwise;
using testing::check_close;
using testing::error_of;
using testing::gradcheck;
using testing::randn;
using testing::tol;
using Values = std::vector<double>;

/// a b + c for [m, k] and [k, n] in f64.
Values product(const Values& a, const Values& b, int64_t m, int64_t n, int64_t k, Values c) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += a[size_t(i * k + l)] * b[size_t(l * n + j)];
      c[size_t(i * n + j)] += sum;
    }
  }
  return c;
}

double gelu_of(double x, Gelu kind) {
  return kind == Gelu::kExact
             ? 0.5 * x * (1 + std::erf(x / std::sqrt(2)))
             : 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

/// A stored matrix with `extra` elements between its rows: the wanted view of a wider tensor.
Tensor with_row_gap(int64_t rows, int64_t cols, int64_t extra, DType dtype, uint64_t seed) {
  return randn({rows, cols + extra}, dtype, seed).narrow(1, 0, cols);
}

struct Case {
  int64_t m, n, k;
};
const Case kCases[] = {{1, 1, 1},    {1, 17, 5},  {7, 1, 33},    {3, 5, 1},      {13, 31, 64},
                       {64, 64, 64}, {65, 97, 3}, {130, 48, 67}, {257, 129, 19}, {2, 300, 130}};

/// Runs one product through the kernel, every combination of flags, and compares with f64.
void check_kernel(DType dtype, DType c_dtype, const Case& size, bool trans_a, bool trans_b) {
  const auto [m, n, k] = size;
  const Tensor a = with_row_gap(trans_a ? k : m, trans_a ? m : k, 3, dtype, 1);
  const Tensor b = with_row_gap(trans_b ? n : k, trans_b ? k : n, 2, dtype, 2);
  const Tensor bias = randn({n}, dtype, 3), bias_f32 = randn({n}, kF32, 3);
  const Tensor residual = with_row_gap(m, n, 1, c_dtype, 4);
  const Values a_values = (trans_a ? a.transpose(0, 1) : a).to_vector();
  const Values b_values = (trans_b ? b.transpose(0, 1) : b).to_vector();
  enum { kPlain, kAccumulate, kBias, kBiasF32, kResidual, kAll, kNumVariants };
  for (int variant = 0; variant < kNumVariants; ++variant) {
    if (variant == kBiasF32 && dtype == kF64) continue;
    const Tensor storage = randn({m, n + 4}, c_dtype, 5), c = storage.narrow(1, 0, n);
    Values expected(size_t(m * n), 0.0);
    const auto expect = [&](const Values& terms) {
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += terms[i % terms.size()];
    };
    kernels::Matmul args{.c = c.raw_data(),
                         .a = a.raw_data(),
                         .b = b.raw_data(),
                         .dtype = dtype,
                         .c_dtype = c_dtype,
                         .trans_a = trans_a,
                         .trans_b = trans_b,
                         .m = m,
                         .n = n,
                         .k = k,
                         .lda = a.row_stride(),
                         .ldb = b.row_stride(),
                         .ldc = n + 4};
    if (variant == kAccumulate) args.accumulate = true, expect(c.to_vector());
    if (variant == kBias || variant == kAll) {
      args.bias = bias.raw_data(), args.bias_dtype = dtype;
      expect(bias.to_vector());
    }
    if (variant == kBiasF32) args.bias = bias_f32.raw_data(), expect(bias_f32.to_vector());
    if (variant == kResidual || variant == kAll) {
      args.residual = residual.raw_data();
      args.ld_residual = m == 1 ? n : residual.row_stride();
      expect(residual.to_vector());
    }
    const Values outside = storage.narrow(1, n, 4).to_vector();
    kernels::matmul(current_stream(), args);
    INFO(fmt::format("{} -> {}, m {} n {} k {}, trans {} {}, variant {}", dtype, c_dtype, m, n, k,
                     trans_a, trans_b, variant));
    check_close(c.to_vector(), product(a_values, b_values, m, n, k, expected), tol(c_dtype, k));
    CHECK(storage.narrow(1, n, 4).to_vector() == outside);
  }
}

TEST_CASE("matmul: every layout, epilogue and dtype equals the f64 product", "[matmul]") {
  const std::pair<DType, DType> dtypes[] = {{kF32, kF32}, {kBF16, kBF16}, {kBF16, kF32},
                                            {kF16, kF16}, {kF16, kF32},   {kF64, kF64}};
  for (const auto& [dtype, c_dtype] : dtypes) {
    for (const Case& size : kCases) {
      for (int trans = 0; trans < 4; ++trans) {
        check_kernel(dtype, c_dtype, size, (trans & 1) != 0, (trans & 2) != 0);
      }
    }
  }
}

TEST_CASE("matmul: sgemm tiles and panels of several blocks equal the f64 product", "[matmul]") {
  check_kernel(kF32, kF32, {257, 385, 1025}, false, false);
  check_kernel(kF32, kF32, {770, 801, 5}, true, false);
  check_kernel(kF32, kF32, {2049, 2050, 3}, true, false);
  check_kernel(kF16, kF32, {513, 1030, 3}, false, true);
  check_kernel(kF16, kF16, {5, 7, 2050}, true, false);
}

TEST_CASE("matmul: a part of the rows has the bits of the whole product, tiles or not",
          "[matmul]") {
  struct Sizes {
    int64_t m, n, k;
  };
  // Weight gradients: primitives, tiles of 384 and of 512 rows, panels; in bf16 tiles of depth too.
  for (const Sizes& size : {Sizes{1031, 40, 70}, Sizes{1100, 768, 300}, Sizes{2100, 2048, 70}}) {
    const auto [m, n, k] = size;
    for (const DType dtype : {kF32, kBF16, kF16}) {
      const Tensor a = randn({k, m}, dtype, 1), b = randn({k, n}, dtype, 2);
      const Tensor whole = empty({m, n}), parts = empty({m, n});
      kernels::Matmul args{.c = whole.raw_data(),
                           .a = a.raw_data(),
                           .b = b.raw_data(),
                           .dtype = dtype,
                           .c_dtype = kF32,
                           .trans_a = true,
                           .m = m,
                           .n = n,
                           .k = k,
                           .lda = m,
                           .ldb = n,
                           .ldc = n};
      kernels::matmul(current_stream(), args);
      args.num_rows = m;
      const std::vector<int64_t> cuts = {0, 2, 200, 512, 700, m};
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        args.first_row = cuts[i], args.m = cuts[i + 1] - cuts[i];
        args.c = parts.data<float>() + cuts[i] * n;
        args.a =
            static_cast<const char*>(a.raw_data()) + cuts[i] * static_cast<int64_t>(size_of(dtype));
        kernels::matmul(current_stream(), args);
      }
      INFO(fmt::format("{}: m {} n {} k {}", dtype, m, n, k));
      const Values actual = parts.to_vector(), expected = whole.to_vector();
      int64_t num_different = 0;
      for (size_t i = 0; i < actual.size(); ++i) num_different += actual[i] != expected[i];
      CHECK(num_different == 0);
    }
  }
}

TEST_CASE("matmul: an empty sum is zero plus what is added, and empty results are fine",
          "[matmul]") {
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    const Tensor x = empty({3, 0}, dtype), w = empty({2, 0}, dtype);
    const Tensor bias = from_values({1.5, -2.0}, {2}, dtype);
    check_close(linear(x, w).to_vector(), Values(6, 0.0), 0);
    check_close(linear(x, w, bias).to_vector(), {1.5, -2, 1.5, -2, 1.5, -2}, 0);
    CHECK(linear(empty({0, 4}, dtype), randn({2, 4}, dtype)).shape() == Shape{0, 2});
    CHECK(linear(randn({3, 4}, dtype), empty({0, 4}, dtype)).shape() == Shape{3, 0});
    CHECK(matmul(empty({0, 2, 3}, dtype), empty({0, 3, 4}, dtype)).shape() == Shape{0, 2, 4});
  }
  // No rows: the weight's gradient is zero, not what was in memory; with accumulation it stays.
  Tensor w = randn({2, 4}).set_requires_grad(true);
  Tensor bias = randn({2}).set_requires_grad(true);
  backward(linear(empty({0, 4}), w, bias), empty({0, 2}));
  check_close(w.grad().to_vector(), Values(8, 0.0), 0);
  check_close(bias.grad().to_vector(), Values(2, 0.0), 0);
  w.set_grad(full({2, 4}, 3));
  backward(linear(empty({0, 4}), w, bias), empty({0, 2}));
  check_close(w.grad().to_vector(), Values(8, 3.0), 0);
}

TEST_CASE("matmul: bf16 through f32 panels equals the native product", "[matmul]") {
  const Tensor a = randn({70, 1100}, kBF16, 1), b = randn({33, 1100}, kBF16, 2);
  const Tensor c = empty({70, 33}), native = empty({70, 33});
  kernels::Matmul args{.c = c.raw_data(),
                       .a = a.raw_data(),
                       .b = b.raw_data(),
                       .dtype = kBF16,
                       .c_dtype = kF32,
                       .trans_b = true,
                       .m = 70,
                       .n = 33,
                       .k = 1100,
                       .lda = 1100,
                       .ldb = 1100,
                       .ldc = 33};
  current_stream().submit("panels", [args] { kernels::cpu::product_panels(args); });
  args.c = native.raw_data();
  kernels::matmul(current_stream(), args);
  check_close(c, native, tol(kF32, 1100));
}

TEST_CASE("matmul: batches, broadcast b and transposed views equal the products one by one",
          "[matmul]") {
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    const Tensor a = randn({2, 3, 4, 5}, dtype, 1);
    const Tensor b = randn({2, 3, 6, 5}, dtype, 2).transpose(-1, -2);    // [2, 3, 5, 6]
    const Tensor heads = randn({2, 4, 3, 5}, dtype, 3).transpose(1, 2);  // batches not mergeable
    const Tensor shared = randn({5, 6}, dtype, 4);
    const Tensor y = matmul(a, b), z = matmul(heads, b), s = matmul(a, shared);
    for (int64_t i = 0; i < 2; ++i) {
      for (int64_t j = 0; j < 3; ++j) {
        const auto at = [&](const Tensor& t) { return t.select(0, i).select(0, j); };
        const Values zero(24, 0.0);
        const double tolerance = tol(dtype, 5);
        check_close(at(y).to_vector(), product(at(a).to_vector(), at(b).to_vector(), 4, 6, 5, zero),
                    tolerance);
        check_close(at(z).to_vector(),
                    product(at(heads).to_vector(), at(b).to_vector(), 4, 6, 5, zero), tolerance);
        check_close(at(s).to_vector(),
                    product(at(a).to_vector(), shared.to_vector(), 4, 6, 5, zero), tolerance);
      }
    }
  }
}

Tensor leaf(const Shape& shape, uint64_t seed, DType dtype = kF64) {
  return randn(shape, dtype, seed).set_requires_grad(true);
}

TEST_CASE("matmul: backward matches finite differences", "[matmul]") {
  const auto plain = [](const std::vector<Tensor>& in) { return matmul(in[0], in[1]); };
  gradcheck(plain, {leaf({3, 4}, 1), leaf({4, 5}, 2)});
  gradcheck(plain, {leaf({1, 1}, 1), leaf({1, 1}, 2)});
  gradcheck(plain, {leaf({2, 3, 4}, 1), leaf({2, 4, 5}, 2)});
  gradcheck(plain, {leaf({2, 2, 3, 4}, 1), leaf({2, 2, 4, 1}, 2)});
  gradcheck(plain, {leaf({2, 3, 4}, 1), leaf({4, 5}, 2)});
  gradcheck([](const std::vector<Tensor>& in) { return matmul(in[0], in[0]); }, {leaf({3, 3}, 1)});
  gradcheck(
      [](const std::vector<Tensor>& in) {
        return matmul(in[0].transpose(1, 2), in[1].transpose(-1, -2));
      },
      {leaf({2, 4, 3}, 1), leaf({2, 5, 4}, 2)});
  gradcheck(
      [](const std::vector<Tensor>& in) {
        return matmul(in[0].narrow(2, 1, 3), in[1].narrow(0, 0, 3));
      },
      {leaf({2, 2, 5}, 1), leaf({4, 3}, 2)});
}

TEST_CASE("linear: backward matches finite differences", "[matmul]") {
  const auto all = [](const std::vector<Tensor>& in) { return linear(in[0], in[1], in[2]); };
  gradcheck(all, {leaf({2, 3, 4}, 1), leaf({5, 4}, 2), leaf({5}, 3)});
  gradcheck(all, {leaf({4}, 1), leaf({1, 4}, 2), leaf({1}, 3)});
  gradcheck([](const std::vector<Tensor>& in) { return linear(in[0].narrow(2, 1, 4), in[1]); },
            {leaf({2, 3, 7}, 1), leaf({5, 4}, 2)});
  // x of unevenly spaced rows and a transposed weight are copied.
  gradcheck(
      [](const std::vector<Tensor>& in) {
        return linear(in[0].transpose(0, 1), in[1].transpose(0, 1));
      },
      {leaf({2, 3, 4}, 1), leaf({4, 5}, 2)});
  // Only some inputs want a gradient.
  const Tensor x = randn({3, 4}, kF64, 1);
  gradcheck([&](const std::vector<Tensor>& in) { return linear(x, in[0]); }, {leaf({5, 4}, 2)});
}

TEST_CASE("linear_gelu and linear_residual: backward matches finite differences", "[matmul]") {
  const std::vector<Tensor> inputs = {leaf({2, 3, 4}, 1), leaf({5, 4}, 2), leaf({5}, 3)};
  for (const Gelu kind : {Gelu::kTanh, Gelu::kExact}) {
    gradcheck(
        [kind](const std::vector<Tensor>& in) { return linear_gelu(in[0], in[1], in[2], kind); },
        inputs);
    gradcheck([kind](const std::vector<Tensor>& in) { return linear_gelu(in[0], in[1], {}, kind); },
              {inputs[0], inputs[1]});
  }
  gradcheck(
      [](const std::vector<Tensor>& in) { return linear_residual(in[0], in[1], in[2], in[3]); },
      {inputs[0], inputs[1], inputs[2], leaf({2, 3, 5}, 4)});
}

TEST_CASE("linear_gelu: closed form, and the bits of the two ops", "[matmul]") {
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    for (const Gelu kind : {Gelu::kTanh, Gelu::kExact}) {
      Tensor x = randn({37, 19}, dtype, 1), w = randn({23, 19}, dtype, 2, 0.3);
      const Tensor bias = randn({23}, dtype, 3);
      Values expected = linear(x, w, bias).to_vector();
      for (double& v : expected) v = gelu_of(v, kind);
      const Tensor y = linear_gelu(x, w, bias, kind);
      check_close(y.to_vector(), expected, tol(dtype));
      check_bitwise(y, gelu(linear(x, w, bias), kind));
      x.set_requires_grad(true);
      check_bitwise(linear_gelu(x, w, bias, kind), y, "with and without a graph");
    }
  }
}

TEST_CASE("linear_residual: one rounding in low precision", "[matmul]") {
  // 256 + (1 + 2^-8) is just above the middle of 256 and 258, neighbours in bf16. The product
  // rounded by itself is 1, and the sum then a tie that goes to 256.
  const Tensor x = from_values({1.0, 1.0}, {1, 2}, kBF16);
  const Tensor w = from_values({1.0, 0.00390625}, {1, 2}, kBF16);
  const Tensor residual = from_values({256.0}, {1, 1}, kBF16);
  CHECK(linear_residual(x, w, {}, residual).item() == 258);
}

/// Gradients into a slot of another dtype, as a sharded parameter has them.
class Slot : public GradSink {
 public:
  explicit Slot(Tensor memory) : memory_(std::move(memory)) {}
  GradDst destination(const Tensor&) override { return {memory_, is_written_}; }
  void written(const Tensor&) override { is_written_ = true; }

 private:
  Tensor memory_;
  bool is_written_ = false;
};

TEST_CASE("linear: weight and bias gradients come in the slot's dtype, unrounded", "[matmul]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const DType slot_dtype : {kF32, kBF16, kF16, kF64}) {
      const int64_t m = 150, n = 33, k = 21;
      const Tensor x = randn({m, k}, dtype, 1), dy = randn({m, n}, dtype, 4);
      Tensor w = leaf({n, k}, 2, dtype), bias = leaf({n}, 3, dtype);
      Tensor dw = randn({n, k}, slot_dtype, 5), db = randn({n}, slot_dtype, 6);
      set_grad_sink(w, std::make_shared<Slot>(dw));
      set_grad_sink(bias, std::make_shared<Slot>(db));
      const Values dy_t = dy.transpose(0, 1).to_vector();
      Values dw_expected =
          product(dy_t, x.to_vector(), n, k, m, Values(static_cast<size_t>(n * k), 0.0));
      Values db_expected = product(dy_t, Values(static_cast<size_t>(m), 1.0), n, 1, m,
                                   Values(static_cast<size_t>(n), 0.0));
      const DType coarsest = slot_dtype == kF64 ? kF32 : slot_dtype;
      for (int pass = 1; pass <= 2; ++pass) {  // written, then added to
        backward(linear(x, w, bias), dy);
        INFO(fmt::format("{} into {}, pass {}", dtype, slot_dtype, pass));
        check_close(dw.to_vector(), dw_expected, tol(coarsest, m), "dw");
        check_close(db.to_vector(), db_expected, tol(coarsest, m), "db");
        for (double& v : dw_expected) v *= 2;
        for (double& v : db_expected) v *= 2;
      }
    }
  }
}

TEST_CASE("linear: a low-precision gradient of x is close to f64 and adds to what is there",
          "[matmul]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    Tensor x = leaf({31, 45}, 1, dtype);
    const Tensor w = randn({27, 45}, dtype, 2), dy = randn({31, 27}, dtype, 3);
    Values expected = product(dy.to_vector(), w.to_vector(), 31, 45, 27, Values(31 * 45, 0.0));
    backward(linear(x, w), dy);
    check_close(x.grad().to_vector(), expected, tol(dtype, 27));
    backward(linear(x, w), dy);
    for (double& v : expected) v *= 2;
    check_close(x.grad().to_vector(), expected, tol(dtype, 27));
  }
}

TEST_CASE("linear: an f32 bias beside low-precision operands", "[matmul]") {
  for (const DType dtype : {kBF16, kF16}) {
    const Tensor x = randn({5, 8}, dtype, 1), w = randn({6, 8}, dtype, 2);
    Tensor bias = leaf({6}, 3, kF32);
    const Tensor y = linear(x, w, bias);
    Values expected =
        product(x.to_vector(), w.transpose(0, 1).to_vector(), 5, 6, 8, Values(30, 0.0));
    const Values b = bias.to_vector();
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += b[i % 6];
    check_close(y.to_vector(), expected, tol(dtype, 8));
    backward(y, full({5, 6}, 1, dtype));
    check_close(bias.grad().to_vector(), Values(6, 5.0), 0);
  }
}

/// Runs f on a compute stream with that many threads; returns the values of what it returns.
template <class F>
std::vector<Values> with_threads(int num_threads, F&& f) {
  ContextOptions options;
  options.num_threads = num_threads;
  options.poison = true;
  const Context::Scope scope(std::make_shared<Context>(options));
  std::vector<Values> values;
  for (const Tensor& t : f()) values.push_back(t.to_vector());
  return values;
}

TEST_CASE("linear: forward and backward have the same bits for any number of threads", "[matmul]") {
  const Case sizes[] = {{1, 768, 1100},    {1, 1100, 768}, {300, 1030, 390}, {520, 130, 64},
                        {48, 33, 2000},    {64, 64, 64},   {17, 3000, 40},   {65, 1000, 800},
                        {1025, 385, 1024}, {768, 128, 384}};
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    for (const auto& [m, n, k] : sizes) {
      if (dtype == kF64 && m * n * k > 30'000'000) continue;
      const auto run = [&, m = m, n = n, k = k] {
        Tensor x = leaf({m, k}, 1, dtype), w = leaf({n, k}, 2, dtype), bias = leaf({n}, 3, dtype);
        const Tensor y = linear_gelu(x, w, bias, Gelu::kTanh);
        backward(y, randn({m, n}, dtype, 4));
        return std::vector<Tensor>{y, x.grad(), w.grad(), bias.grad()};
      };
      const std::vector<Values> one = with_threads(1, run);
      INFO(fmt::format("{}, m {} n {} k {}", dtype, m, n, k));
      CHECK(with_threads(2, run) == one);
      CHECK(with_threads(5, run) == one);
    }
  }
}

TEST_CASE("linear: a row has the same bits whatever the other rows", "[matmul]") {
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    for (const auto& [m, n, k] : {Case{200, 97, 130}, Case{530, 64, 1500}, Case{70, 1100, 64}}) {
      const Tensor x = randn({m, k}, dtype, 1), w = randn({n, k}, dtype, 2);
      const Tensor bias = randn({n}, dtype, 3), whole = linear(x, w, bias);
      for (const int64_t rows :
           {int64_t{1}, int64_t{2}, int64_t{7}, int64_t{16}, int64_t{33}, m / 2}) {
        for (const int64_t first : {int64_t{0}, m - rows}) {
          INFO(fmt::format("{}, {} rows from {} of {}, n {} k {}", dtype, rows, first, m, n, k));
          check_bitwise(linear(x.narrow(0, first, rows), w, bias), whole.narrow(0, first, rows));
        }
      }
    }
  }
}

TEST_CASE("matmul: more shapes than the primitive cache holds", "[matmul]") {
  const Tensor w = randn({3, 8}, kF32, 2);
  for (int64_t round = 0; round < 2; ++round) {
    for (int64_t m = 1; m <= 300; m += 1) {
      const Tensor y = linear(full({m, 8}, 1), w);
      if (m % 50 == 0) {
        check_close(y.to_vector(),
                    product(Values(size_t(m * 8), 1.0), w.transpose(0, 1).to_vector(), m, 3, 8,
                            Values(size_t(m * 3), 0.0)),
                    tol(kF32, 8));
      }
    }
  }
}

TEST_CASE("matmul: mistakes are named", "[matmul]") {
  const auto has = [](const std::string& text, const std::string& part) {
    INFO(text);
    CHECK(text.find(part) == 0);
  };
  const Tensor a = zeros({2, 3}), b = zeros({3, 4}), w = zeros({4, 3});
  has(error_of([&] { matmul(zeros({3}), b); }),
      "matmul: a and b must have at least two dimensions, got [3] and [3, 4]");
  has(error_of([&] {
        matmul(a, zeros({3, 4}, kBF16));
      }),
      "matmul: a and b must have the same floating dtype, got f32 and bf16");
  has(error_of([&] {
        matmul(zeros({2, 3}, kI32), zeros({3, 4}, kI32));
      }),
      "matmul: a and b must have the same floating dtype, got i32 and i32");
  has(error_of([&] { matmul(a, w); }),
      "matmul: the columns of a must be the rows of b, got [2, 3] and [4, 3]");
  has(error_of([&] {
        matmul(zeros({2, 2, 3}), zeros({3, 3, 4}));
      }),
      "matmul: a and b must have the same leading dimensions, got [2, 2, 3] and [3, 3, 4]");
  has(error_of([&] { linear(a, b); }),
      "linear: w must be [N, K] with K = 3 of x, got x [2, 3] and w [3, 4]");
  has(error_of([&] { linear(zeros({}), b); }), "linear: w must be [N, K] with K = 0 of x");
  has(error_of([&] {
        linear(a, zeros({4, 3}, kF16));
      }),
      "linear: x and w must have the same floating dtype, got f32 and f16");
  has(error_of([&] { linear(a, w, zeros({3})); }), "linear: bias must be [N] (");
  has(error_of([&] { linear(a, w, zeros({4}, kBF16)); }),
      "linear: bias must have x's dtype f32 or f32, got bf16");
  has(error_of([&] { linear_gelu(a, b, {}, Gelu::kTanh); }), "linear_gelu: w must be [N, K]");
  has(error_of([&] { linear_residual(a, b, {}, a); }), "linear_residual: w must be [N, K]");
  has(error_of([&] { linear_residual(a, w, {}, a); }),
      "linear_residual: residual must have the result's shape (");
  has(error_of([&] {
        linear_residual(a, w, {}, zeros({2, 4}, kBF16));
      }),
      "linear_residual: residual must have the dtype of x (");
}

TEST_CASE("matmul: cost counts 2 m n k and the bytes of each operand", "[matmul]") {
  char memory[1];
  kernels::Matmul args{.c = memory,
                       .a = memory,
                       .b = memory,
                       .dtype = kBF16,
                       .c_dtype = kF32,
                       .trans_a = true,
                       .m = 4,
                       .n = 8,
                       .k = 16,
                       .lda = 4,
                       .ldb = 8,
                       .ldc = 8};
  CHECK(args.cost().flops() == 2.0 * 4 * 8 * 16);
  CHECK(args.cost().bytes_read() == 2 * (4 * 16 + 16 * 8));
  CHECK(args.cost().bytes_written() == 4 * 4 * 8);
  args.accumulate = true;
  args.bias = memory;
  CHECK(args.cost().bytes_read() == 2 * (4 * 16 + 16 * 8) + 4 * 4 * 8 + 4 * 8);
  args.num_batches = 3;
  args.batch_stride_a = args.batch_stride_b = args.batch_stride_c = 200;
  CHECK(args.cost().flops() == 3 * 2.0 * 4 * 8 * 16);
  CHECK(args.cost().bytes_written() == 4 * (400 + 4 * 8));
  const kernels::BiasGrad bias{.db = memory,
                               .partials = memory,
                               .dy = memory,
                               .db_dtype = kF32,
                               .dtype = kBF16,
                               .rows = 100,
                               .n = 8,
                               .ld_dy = 8,
                               .accumulate = true};
  CHECK(bias.cost().flops() == 800);
  CHECK(bias.cost().bytes_read() == 2 * 800 + 4 * 8);
  CHECK(bias.cost().bytes_written() == 4 * 8 + 4 * 8 * 4);
}

/// x [rows, k], w [n, k] with gaps between their rows.
void check_few_rows(DType dtype, int64_t n, int64_t k) {
  CAPTURE(dtype, n, k);
  constexpr int64_t kRows = 37;
  const Tensor x = with_row_gap(kRows, k, 3, dtype, 1), w = with_row_gap(n, k, 2, dtype, 2);
  const Tensor bias = randn({n}, kF32, 3), residual = randn({kRows, n}, dtype, 4);
  const Values expected = [&] {
    Values terms;
    for (int64_t row = 0; row < kRows; ++row) {
      for (const double value : bias.to_vector()) terms.push_back(value);
    }
    return product(x.to_vector(), w.transpose(0, 1).to_vector(), kRows, n, k, terms);
  }();
  const FewRows few;
  const Tensor whole = linear(x, w, bias), added = linear_residual(x, w, bias, residual);
  const Tensor activated = linear_gelu(x, w, bias, Gelu::kTanh);
  check_close(whole.to_vector(), expected, tol(dtype, k), "y");
  Values with_residual = residual.to_vector(), with_gelu = whole.to_vector();
  for (size_t i = 0; i < expected.size(); ++i) {
    with_residual[i] += expected[i];
    with_gelu[i] = gelu_of(with_gelu[i], Gelu::kTanh);
  }
  check_close(added.to_vector(), with_residual, tol(dtype, k), "residual");
  check_close(activated.to_vector(), with_gelu, 4 * tol(dtype), "gelu");
  for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 16, 33}) {
    CAPTURE(rows);
    const int64_t first = kRows - rows;
    check_bitwise(linear(x.narrow(0, first, rows), w, bias), whole.narrow(0, first, rows));
    check_bitwise(linear_gelu(x.narrow(0, first, rows), w, bias, Gelu::kTanh),
                  activated.narrow(0, first, rows));
  }
}

TEST_CASE("linear: of few rows it is the product, a row's bits are those it has alone",
          "[matmul]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {17, 5}, {33, 131}, {48, 64}}) {
      check_few_rows(dtype, n, k);
    }
  }
}

TEST_CASE("linear: of few rows it has the same bits on any number of threads, f64 as without",
          "[matmul]") {
  const Tensor x = randn({3, 1024}, kBF16, 1), w = randn({700, 1024}, kBF16, 2);
  const FewRows few;
  CHECK(FewRows::is_active());
  const Tensor y = linear(x, w);
  ContextOptions options = Context::current()->options();
  options.num_threads = 3;
  {
    const Context::Scope scope(std::make_shared<Context>(options));
    check_bitwise(linear(x, w), y);
  }
  const Tensor x64 = randn({3, 20}, kF64, 1), w64 = randn({7, 20}, kF64, 2);
  check_close(linear(x64, w64).to_vector(),
              product(x64.to_vector(), w64.transpose(0, 1).to_vector(), 3, 7, 20, Values(21, 0.0)),
              tol(kF64, 20), "y");
}

}  // namespace
}  // namespace tessera
