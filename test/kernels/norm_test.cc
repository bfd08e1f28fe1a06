#include "kernels/norm/norm.h"

#include <cmath>

#include "core/runtime/context.h"
#include "kernels/norm/kernel.h"
#include "test/testing.h"

// R rows, C columns; B batch, T time, H heads, D head width.

namespace tessera {
namespace {

using testing::check_bitwise;
using testing::check_close;
using testing::error_of;
using testing::gradcheck;
using testing::randn;
using testing::tol;

enum class Kind { kLayer, kRms };

/// The definition in f64, forward and backward.
struct Reference {
  std::vector<double> y, dx, dw, db;
};

Reference reference(Kind kind, const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& dy,
                    double eps = 1e-5f) {
  const std::vector<double> xs = x.to_vector(), ws = w.to_vector(), dys = dy.to_vector();
  const std::vector<double> bs = b.is_defined() ? b.to_vector() : std::vector<double>(ws.size());
  const size_t C = ws.size(), R = xs.size() / C;
  Reference ref{std::vector<double>(R * C), std::vector<double>(R * C), std::vector<double>(C),
                std::vector<double>(C)};
  for (size_t r = 0; r < R; ++r) {
    double mean = 0, square = 0, mean_g = 0, mean_gx = 0;
    for (size_t c = 0; c < C; ++c) mean += xs[r * C + c] / static_cast<double>(C);
    if (kind == Kind::kRms) mean = 0;
    for (size_t c = 0; c < C; ++c) square += std::pow(xs[r * C + c] - mean, 2);
    const double rstd = 1 / std::sqrt(square / static_cast<double>(C) + eps);
    for (size_t c = 0; c < C; ++c) {
      const double xhat = (xs[r * C + c] - mean) * rstd, g = dys[r * C + c] * ws[c];
      ref.y[r * C + c] = xhat * ws[c] + bs[c];
      ref.dw[c] += dys[r * C + c] * xhat;
      ref.db[c] += dys[r * C + c];
      mean_g += g / static_cast<double>(C);
      mean_gx += g * xhat / static_cast<double>(C);
    }
    if (kind == Kind::kRms) mean_g = 0;
    for (size_t c = 0; c < C; ++c) {
      const double xhat = (xs[r * C + c] - mean) * rstd, g = dys[r * C + c] * ws[c];
      ref.dx[r * C + c] = rstd * (g - mean_g - xhat * mean_gx);
    }
  }
  return ref;
}

Tensor apply(Kind kind, const Tensor& x, const Tensor& w, const Tensor& b) {
  return kind == Kind::kLayer ? layer_norm(x, w, b) : rms_norm(x, w);
}

ResidualNorm apply_residual(Kind kind, const Tensor& x, const Tensor& residual, const Tensor& w,
                            const Tensor& b) {
  return kind == Kind::kLayer ? add_layer_norm(x, residual, w, b) : add_rms_norm(x, residual, w);
}

TEST_CASE("norm: forward and backward match the f64 definition", "[norm]") {
  const auto kind = GENERATE(Kind::kLayer, Kind::kRms);
  const auto dtype = GENERATE(kF64, kF32, kBF16, kF16);
  const auto w_is_f32 = GENERATE(false, true);
  for (const auto& [R, C] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {3, 7}, {5, 16}, {17, 33}, {64, 129}, {1, 1031}, {1100, 24}}) {
    const DType w_dtype = w_is_f32 ? kF32 : dtype;
    Tensor x = randn({R, C}, dtype, 1), w = randn({C}, w_dtype, 2), b = randn({C}, w_dtype, 3);
    if (kind == Kind::kRms) b = {};
    const Tensor dy = randn({R, C}, dtype, 4);
    const Reference ref = reference(kind, x, w, b, dy);
    x.set_requires_grad(true), w.set_requires_grad(true);
    if (b.is_defined()) b.set_requires_grad(true);
    const Tensor y = apply(kind, x, w, b);
    backward(y, dy);
    INFO("R " << R << " C " << C << " " << name_of(dtype) << " w " << name_of(w_dtype));
    // One column has no spread: rstd = 1 / sqrt(eps) magnifies rounding.
    const double magnify = C == 1 ? 400 : 4;
    check_close(y.to_vector(), ref.y, tol(dtype, C), "y");
    check_close(x.grad().to_vector(), ref.dx, magnify * tol(dtype, C), "dx");
    check_close(w.grad().to_vector(), ref.dw, magnify * tol(w_dtype, R * C), "dw");
    CHECK(w.grad().dtype() == w_dtype);
    if (b.is_defined()) check_close(b.grad().to_vector(), ref.db, tol(w_dtype, R), "db");
  }
}

TEST_CASE("norm: gradients match finite differences", "[norm]") {
  Tensor x = randn({4, 7}, kF64, 1), w = randn({7}, kF64, 2), b = randn({7}, kF64, 3);
  Tensor residual = randn({4, 7}, kF64, 4);
  for (Tensor* t : {&x, &w, &b, &residual}) t->set_requires_grad(true);
  gradcheck([](const auto& in) { return layer_norm(in[0], in[1], in[2]); }, {x, w, b});
  gradcheck([](const auto& in) { return layer_norm(in[0], in[1], {}); }, {x, w});
  gradcheck([](const auto& in) { return rms_norm(in[0], in[1]); }, {x, w});
  gradcheck([](const auto& in) { return add_layer_norm(in[0], in[1], in[2], in[3]).y; },
            {x, residual, w, b});
  gradcheck([](const auto& in) { return add_rms_norm(in[0], in[1], in[2]).y; }, {x, residual, w});
  const Tensor frozen = w.clone();
  gradcheck([](const auto& in) { return add_rms_norm(in[0], in[1], in[2]).sum; },
            {x, residual, frozen});
}

TEST_CASE("norm: inputs that need no gradient get none and change none", "[norm]") {
  const Tensor dy = randn({6, 9}, kF32, 4);
  Tensor all[3], some[3];
  for (int frozen = 0; frozen < 3; ++frozen) {
    for (int i = 0; i < 3; ++i) {
      all[i] = randn(i == 0 ? Shape{6, 9} : Shape{9}, kF32, static_cast<uint64_t>(i + 1));
      some[i] = all[i].clone();
      all[i].set_requires_grad(true);
      some[i].set_requires_grad(i != frozen);
    }
    backward(layer_norm(all[0], all[1], all[2]), dy);
    backward(layer_norm(some[0], some[1], some[2]), dy);
    for (int i = 0; i < 3; ++i) {
      CHECK(some[i].grad().is_defined() == (i != frozen));
      if (i != frozen) check_bitwise(some[i].grad(), all[i].grad());
    }
  }
}

TEST_CASE("norm: the fused residual ops give the bits of addition and norm", "[norm]") {
  const auto kind = GENERATE(Kind::kLayer, Kind::kRms);
  const auto dtype = GENERATE(kF32, kBF16, kF16);
  const Shape shape{3, 5, 37};
  Tensor x = randn(shape, dtype, 1), residual = randn(shape, dtype, 2);
  Tensor w = randn({37}, dtype, 3), b = kind == Kind::kLayer ? randn({37}, dtype, 4) : Tensor{};
  const Tensor dy = randn(shape, dtype, 5), d_sum = randn(shape, dtype, 6);
  x.set_requires_grad(true), residual.set_requires_grad(true), w.set_requires_grad(true);
  const ResidualNorm fused = apply_residual(kind, x, residual, w, b);
  Tensor sum = x.clone();
  sum.add_(residual);
  check_bitwise(fused.sum, sum, "sum");
  Tensor leaf = sum.clone(), leaf_w = w.clone();
  leaf.set_requires_grad(true), leaf_w.set_requires_grad(true);
  const Tensor y = apply(kind, leaf, leaf_w, b);
  check_bitwise(fused.y, y, "y");

  const std::vector<Tensor> roots{fused.y, fused.sum}, grads{dy, d_sum};
  backward(roots, grads);
  backward(y, dy);
  check_bitwise(w.grad(), leaf_w.grad(), "dw");
  check_bitwise(x.grad(), residual.grad(), "dx and d_residual are one");
  std::vector<double> expected = leaf.grad().to_vector();
  const std::vector<double> d_sums = d_sum.to_vector();
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += d_sums[i];
  check_close(x.grad().to_vector(), expected, tol(dtype), "dx");
}

TEST_CASE("norm: a residual sum that alone is used passes its gradient on", "[norm]") {
  Tensor x = randn({4, 6}, kF32, 1), residual = randn({4, 6}, kF32, 2), w = randn({6}, kF32, 3);
  x.set_requires_grad(true), residual.set_requires_grad(true), w.set_requires_grad(true);
  const Tensor d_sum = randn({4, 6}, kF32, 4);
  backward(add_rms_norm(x, residual, w).sum, d_sum);
  check_bitwise(x.grad(), d_sum);
  check_bitwise(residual.grad(), d_sum);
  CHECK(!w.grad().is_defined());
}

TEST_CASE("norm: gradients add into what is there", "[norm]") {
  const auto kind = GENERATE(Kind::kLayer, Kind::kRms);
  const auto dtype = GENERATE(kF32, kBF16);
  Tensor x = randn({19, 40}, dtype, 1), w = randn({40}, kF32, 2), b = randn({40}, kF32, 3);
  if (kind == Kind::kRms) b = {};
  const Tensor dy = randn({19, 40}, dtype, 4), first = randn({40}, kF32, 5);
  const Tensor first_x = randn({19, 40}, dtype, 6);
  const Reference ref = reference(kind, x, w, b, dy);
  x.set_requires_grad(true), w.set_requires_grad(true);
  x.set_grad(first_x.clone()), w.set_grad(first.clone());
  if (b.is_defined()) b.set_requires_grad(true).set_grad(first.clone());
  backward(apply(kind, x, w, b), dy);
  const auto plus = [](std::vector<double> a, const Tensor& other) {
    const std::vector<double> o = other.to_vector();
    for (size_t i = 0; i < a.size(); ++i) a[i] += o[i];
    return a;
  };
  check_close(x.grad().to_vector(), plus(ref.dx, first_x), 4 * tol(dtype, 40), "dx");
  check_close(w.grad().to_vector(), plus(ref.dw, first), 4 * tol(kF32, 19 * 40), "dw");
  if (b.is_defined()) check_close(b.grad().to_vector(), plus(ref.db, first), tol(kF32, 19), "db");
}

/// A leaf's gradient memory given from outside.
class FixedSink final : public GradSink {
 public:
  explicit FixedSink(GradDst destination) : destination_(std::move(destination)) {}
  GradDst destination(const Tensor&) override { return destination_; }
  void written(const Tensor&) override { ++num_written; }
  int num_written = 0;

 private:
  GradDst destination_;
};

TEST_CASE("norm: a bf16 weight's gradient goes to f32 memory unrounded", "[norm]") {
  Tensor x = randn({70, 24}, kBF16, 1), w = randn({24}, kBF16, 2), b = randn({24}, kBF16, 3);
  const Tensor dy = randn({70, 24}, kBF16, 4), dw = empty({24}, kF32), db = empty({24}, kF32);
  const Reference ref = reference(Kind::kLayer, x, w, b, dy);
  w.set_requires_grad(true), b.set_requires_grad(true);
  const auto w_sink = std::make_shared<FixedSink>(GradDst{dw, false});
  const auto b_sink = std::make_shared<FixedSink>(GradDst{db, false});
  set_grad_sink(w, w_sink), set_grad_sink(b, b_sink);
  backward(layer_norm(x, w, b), dy);
  check_close(dw.to_vector(), ref.dw, tol(kF32, 70 * 24), "dw");
  check_close(db.to_vector(), ref.db, tol(kF32, 70), "db");
  CHECK(w_sink->num_written == 1);
  CHECK(b_sink->num_written == 1);
}

TEST_CASE("norm: destinations of any layout", "[norm]") {
  Tensor x = randn({6, 8}, kF32, 1), w = randn({8}, kF32, 2);
  const Tensor dy = randn({6, 8}, kF32, 3);
  x.set_requires_grad(true);
  backward(rms_norm(x, w), dy);
  const bool accumulate = GENERATE(false, true);
  for (const bool columns : {false, true}) {
    Tensor packed = full(columns ? Shape{6, 20} : Shape{8, 6}, 2.0);
    const Tensor view = columns ? packed.narrow(1, 5, 8) : packed.transpose(0, 1);
    Tensor leaf = x.clone();
    leaf.set_requires_grad(true);
    set_grad_sink(leaf, std::make_shared<FixedSink>(GradDst{view, accumulate}));
    backward(rms_norm(leaf, w), dy);
    std::vector<double> expected = x.grad().to_vector();
    for (double& e : expected) e += accumulate ? 2 : 0;
    check_close(view.to_vector(), expected, tol(kF32), "dx");
    if (columns) {  // the rest of the packed buffer is untouched
      CHECK(packed.select(1, 4).to_vector() == std::vector<double>(6, 2.0));
      CHECK(packed.select(1, 13).to_vector() == std::vector<double>(6, 2.0));
    }
  }
}

TEST_CASE("norm: heads of a packed buffer are normalized in place, without a copy", "[norm]") {
  // q heads 2 .. 4 of [B, T, heads, D]: rows are evenly spaced only within one position.
  Tensor packed = randn({2, 3, 7, 8}, kF32, 1), w = randn({8}, kF32, 2);
  packed.set_requires_grad(true), w.set_requires_grad(true);
  const Tensor dy = randn({2, 3, 3, 8}, kF32, 3);
  const Tensor slice = packed.narrow(2, 2, 3);
  const int64_t before = Context::current()->allocator()->stats().num_allocations;
  const Tensor y = rms_norm(slice, w);
  CHECK(Context::current()->allocator()->stats().num_allocations - before == 2);  // y, rstd
  backward(y, dy);

  Tensor dense = slice.clone(), dense_w = w.clone();
  dense.set_requires_grad(true), dense_w.set_requires_grad(true);
  const Tensor dense_y = rms_norm(dense, dense_w);
  backward(dense_y, dy);
  check_bitwise(y, dense_y, "y");
  check_bitwise(packed.grad().narrow(2, 2, 3).clone(), dense.grad(), "dx");
  check_bitwise(w.grad(), dense_w.grad(), "dw");
  // A transposed input has no rows to walk: it is copied.
  const Tensor turned = randn({8, 5}, kF32, 4);
  check_bitwise(rms_norm(turned.transpose(0, 1), w), rms_norm(turned.transpose(0, 1).clone(), w));
}

TEST_CASE("norm: a large common offset does not cancel", "[norm]") {
  const int64_t C = 1000;
  std::vector<double> values = randn({3, C}, kF64, 1).to_vector();
  for (double& v : values) v += 4096;
  const Tensor x = from_values(values, {3, C}, kF32), w = full({C}, 1.0);
  const Reference ref = reference(Kind::kLayer, x, w, {}, zeros({3, C}));
  // Half an ulp of the mean, 2^-12, is all that may be lost.
  check_close(layer_norm(x, w, {}).to_vector(), ref.y, 1.0 / 4096, "y");
  // A constant row has no variance at all.
  const Tensor flat = layer_norm(full({2, C}, 1234.56789), w, {});
  check_close(flat.to_vector(), std::vector<double>(2 * C, 0.0), 1e-3, "constant");
}

TEST_CASE("norm: no rows", "[norm]") {
  Tensor x = randn({0, 5}, kF32), w = randn({5}, kF32, 2), b = randn({5}, kF32, 3);
  x.set_requires_grad(true), w.set_requires_grad(true), b.set_requires_grad(true);
  const Tensor y = layer_norm(x, w, b);
  CHECK(y.shape() == Shape{0, 5});
  backward(y, randn({0, 5}, kF32));
  CHECK(w.grad().to_vector() == std::vector<double>(5, 0.0));
  CHECK(b.grad().to_vector() == std::vector<double>(5, 0.0));
}

TEST_CASE("norm: the bits do not depend on the number of threads", "[norm]") {
  const auto kind = GENERATE(Kind::kLayer, Kind::kRms);
  std::vector<Tensor> results[2];
  for (int threads = 1; threads <= 2; ++threads) {
    Context::Scope scope(
        std::make_shared<Context>(ContextOptions{.device = {}, .num_threads = threads}));
    Tensor x = randn({900, 100}, kF32, 1), w = randn({100}, kF32, 2), b = randn({100}, kF32, 3);
    if (kind == Kind::kRms) b = {};
    x.set_requires_grad(true), w.set_requires_grad(true);
    const Tensor y = apply(kind, x, w, b);
    backward(y, randn({900, 100}, kF32, 4));
    results[threads - 1] = {y, x.grad(), w.grad()};
  }
  const char* names[] = {"y", "dx", "dw"};
  for (size_t i = 0; i < 3; ++i) check_bitwise(results[0][i], results[1][i], names[i]);
}

TEST_CASE("norm: cost counts each operand once", "[norm]") {
  kernels::NormFwd fwd{};
  std::byte memory[1];
  void* p = memory;
  fwd.y = fwd.sum = fwd.mean = fwd.rstd = p;
  fwd.x = fwd.residual = fwd.w = fwd.b = p;
  fwd.dtype = kBF16, fwd.w_dtype = kF32, fwd.rows = 10, fwd.cols = 6;
  fwd.x_rows = fwd.residual_rows = kernels::contiguous_rows(6);
  CHECK(fwd.cost().flops() == 8 * 60);
  CHECK(fwd.cost().bytes_read() == 2 * 60 * 2 + 2 * 6 * 4);
  CHECK(fwd.cost().bytes_written() == 2 * 60 * 2 + 2 * 10 * 4);

  kernels::NormBwd bwd{};
  bwd.dx = bwd.dw = bwd.partials = p;
  bwd.dy = bwd.x = bwd.w = bwd.rstd = p;
  bwd.dtype = kF32, bwd.w_dtype = kF32, bwd.dw_dtype = kF32, bwd.accumulate_dw = true;
  bwd.rows = 40, bwd.cols = 6, bwd.x_rows = bwd.dx_rows = kernels::contiguous_rows(6);
  CHECK(kernels::NormBwd::num_chunks(40) == 3);
  CHECK(bwd.cost().flops() == 12 * 240);
  CHECK(bwd.cost().bytes_read() == 2 * 240 * 4 + 6 * 4 + 40 * 4 + 6 * 4);
  CHECK(bwd.cost().bytes_written() == 240 * 4 + 6 * 4 + 3 * 6 * 4);
}

void check_error(const std::function<void()>& f, std::initializer_list<const char*> parts) {
  const std::string message = error_of(f);
  for (const char* part : parts) {
    INFO(message << "\nshould contain: " << part);
    CHECK(message.find(part) != std::string::npos);
  }
}

TEST_CASE("norm: errors name the op and what came", "[norm]") {
  const Tensor x = randn({2, 4}), w = randn({4}), bad = randn({5});
  check_error([&] { rms_norm(x, bad); }, {"rms_norm: w must be [C]", "[5] vs [4]"});
  check_error([&] { layer_norm(x, w, bad); }, {"layer_norm: b must be [C]", "[5] vs [4]"});
  check_error([&] { rms_norm(x, w.to(kBF16)); },
              {"rms_norm: w must have x's dtype (f32) or f32, got bf16"});
  check_error([&] { layer_norm(x.to(kBF16), w, w.to(kBF16)); },
              {"layer_norm: b must have w's dtype", "bf16 vs f32"});
  check_error([&] { rms_norm(randn({}), w); },
              {"rms_norm: x must have at least one dimension, got []"});
  check_error(
      [&] {
        rms_norm(randn({3, 0}), randn({0}));
      },
      {"rms_norm: the last dimension of x is empty: [3, 0]"});
  check_error([&] { rms_norm(zeros({2, 4}, kI32), w); }, {"rms_norm: x must be floating, got i32"});
  check_error(
      [&] {
        add_rms_norm(x, randn({3, 4}), w);
      },
      {"add_rms_norm: residual must have x's shape", "[3, 4] vs [2, 4]"});
  check_error([&] { add_layer_norm(x, x.to(kF16), w, w); },
              {"add_layer_norm: residual must have x's dtype", "f16 vs f32"});
}

}  // namespace
}  // namespace tessera
