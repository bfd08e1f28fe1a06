#include "kernels/loss/loss.h"

#include <cmath>
#include <limits>

#include "core/runtime/context.h"
#include "kernels/loss/kernel.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"
#include "test/kernels/row_sink.h"
#include "test/testing.h"

// R rows, C model width, V vocabulary.

namespace tessera {
namespace {

using testing::check_bitwise;
using testing::check_close;
using testing::error_of;
using testing::gradcheck;
using testing::randint;
using testing::randn;
using testing::tol;

constexpr int64_t kIgnored = -100;

struct Reference {
  double sum = 0, count = 0;
  std::vector<double> dlogits;  // for an upstream gradient of 1
};

/// What is added to a cross entropy.
struct Terms {
  double z_loss = 0, label_smoothing = 0;
};

Reference reference(std::vector<double> logits, const std::vector<int64_t>& targets, size_t V,
                    double softcap = 0, const Terms& terms = {}) {
  Reference ref;
  ref.dlogits.resize(logits.size());
  std::vector<double> slopes(logits.size(), 1.0);
  for (size_t i = 0; softcap > 0 && i < logits.size(); ++i) {
    const double t = std::tanh(logits[i] / softcap);
    logits[i] = softcap * t, slopes[i] = 1 - t * t;
  }
  for (size_t r = 0; r < targets.size(); ++r) {
    if (targets[r] == kIgnored) continue;
    const double* row = logits.data() + r * V;
    double max = -std::numeric_limits<double>::infinity(), sum = 0;
    for (size_t v = 0; v < V; ++v) max = std::max(max, row[v]);
    for (size_t v = 0; v < V; ++v) sum += std::exp(row[v] - max);
    const auto target = static_cast<size_t>(targets[r]);
    const double log_z = max + std::log(sum), of_all = terms.label_smoothing / double(V);
    ref.sum += std::log(sum) - (1 - terms.label_smoothing) * (row[target] - max);
    for (size_t v = 0; of_all > 0 && v < V; ++v) ref.sum -= of_all * (row[v] - max);
    ref.sum += terms.z_loss * log_z * log_z;
    ref.count += 1;
    for (size_t v = 0; v < V; ++v) {
      ref.dlogits[r * V + v] =
          std::exp(row[v] - max) / sum * (1 + 2 * terms.z_loss * log_z) - of_all;
    }
    ref.dlogits[r * V + target] -= 1 - terms.label_smoothing;
    for (size_t v = 0; v < V; ++v) ref.dlogits[r * V + v] *= slopes[r * V + v];
  }
  return ref;
}

/// a [m, k] b [k, n], or with a or b stored transposed.
std::vector<double> product(const std::vector<double>& a, const std::vector<double>& b, size_t m,
                            size_t n, size_t k, bool trans_a, bool trans_b) {
  std::vector<double> c(m * n);
  for (size_t i = 0; i < m; ++i) {
    for (size_t j = 0; j < n; ++j) {
      for (size_t l = 0; l < k; ++l) {
        c[i * n + j] += a[trans_a ? l * m + i : i * k + l] * b[trans_b ? j * k + l : l * n + j];
      }
    }
  }
  return c;
}

/// Targets in [0, V), every fifth ignored.
Tensor make_targets(int64_t R, int64_t V, DType dtype = kI32) {
  std::vector<int64_t> targets = randint(0, V, {R}, kI64, 7).to_vector_of<int64_t>();
  for (size_t r = 3; r < targets.size(); r += 5) targets[r] = kIgnored;
  return from_values(std::span<const int64_t>(targets), {R}, dtype);
}

std::vector<double> scaled(std::vector<double> values, double factor) {
  for (double& v : values) v *= factor;
  return values;
}

// ---- cross_entropy

TEST_CASE("cross_entropy: forward and backward match the f64 definition", "[loss]") {
  const auto dtype = GENERATE(kF64, kF32, kBF16, kF16);
  const auto target_dtype = GENERATE(kI32, kI64);
  for (const auto& [R, V] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {1, 7}, {6, 16}, {9, 65}, {3, 1031}, {2, 5000}, {300, 11}}) {
    Tensor logits = randn({R, V}, dtype, 1, 3.0);
    const Tensor targets = make_targets(R, V, target_dtype);
    const Reference ref =
        reference(logits.to_vector(), targets.to_vector_of<int64_t>(), static_cast<size_t>(V));
    INFO("R " << R << " V " << V << " " << name_of(dtype));
    logits.set_requires_grad(true);
    const LossSum loss = cross_entropy(logits, targets);
    CHECK(loss.sum.dtype() == (dtype == kF64 ? kF64 : kF32));
    CHECK(loss.sum.shape() == Shape{});
    CHECK(loss.count.item() == ref.count);
    check_close({loss.sum.item()}, {ref.sum}, tol(dtype == kF64 ? kF64 : kF32, V), "sum");
    backward(loss.sum, full({}, 0.25, loss.sum.dtype()));
    check_close(logits.grad().to_vector(), scaled(ref.dlogits, 0.25), tol(dtype, V), "dlogits");
  }
}

TEST_CASE("cross_entropy: gradients match finite differences", "[loss]") {
  Tensor logits = randn({2, 3, 7}, kF64, 1);
  logits.set_requires_grad(true);
  const Tensor targets = from_values({0, 6, -100, 3, 3, 1}, {2, 3});
  gradcheck([&](const auto& in) { return cross_entropy(in[0], targets).sum; }, {logits});
}

TEST_CASE("cross_entropy: large offsets, masked classes, another ignore_index", "[loss]") {
  const double inf = std::numeric_limits<double>::infinity();
  // The first block of 1024 classes is masked out; what follows is far below zero.
  std::vector<double> values(2 * 1030, -inf);
  for (size_t v = 1024; v < 1030; ++v) values[v] = -3000.0 - static_cast<double>(v % 2);
  for (size_t v = 0; v < 1030; ++v) values[1030 + v] = 1e4 + static_cast<double>(v % 3);
  Tensor logits = from_values(values, {2, 1030}, kF32);
  const Tensor targets = from_values({1024, 5}, {2});
  const Reference ref = reference(values, {1024, 5}, 1030);
  logits.set_requires_grad(true);
  const LossSum loss = cross_entropy(logits, targets);
  check_close({loss.sum.item()}, {ref.sum}, tol(kF32, 1030));
  backward(loss.sum);
  check_close(logits.grad().to_vector(), ref.dlogits, tol(kF32, 1030), "dlogits");

  const LossSum none = cross_entropy(logits, from_values({2, 2}, {2}), 2);
  CHECK(none.sum.item() == 0);
  CHECK(none.count.item() == 0);
  // A NaN is not hidden by the maximum, except in an ignored row.
  const Tensor bad = from_values({1.0, std::nan(""), 1.0, 2.0}, {2, 2}, kF32);
  CHECK(std::isnan(cross_entropy(bad, from_values({0, 0}, {2})).sum.item()));
  CHECK(std::isfinite(cross_entropy(bad, from_values({-100, 0}, {2})).sum.item()));
}

TEST_CASE("cross_entropy: a slice of a padded vocabulary; added gradients; no rows", "[loss]") {
  Tensor padded = randn({6, 40}, kF32, 1);
  padded.set_requires_grad(true);
  const Tensor first = randn({6, 40}, kF32, 2), targets = make_targets(6, 33);
  padded.set_grad(first.clone());
  const Tensor logits = padded.narrow(1, 0, 33);
  const Reference ref = reference(logits.to_vector(), targets.to_vector_of<int64_t>(), 33);
  const LossSum loss = cross_entropy(logits, targets);
  check_close({loss.sum.item()}, {ref.sum}, tol(kF32, 33));
  backward(loss.sum);
  std::vector<double> expected = first.to_vector();
  for (size_t i = 0; i < ref.dlogits.size(); ++i) expected[i / 33 * 40 + i % 33] += ref.dlogits[i];
  check_close(padded.grad().to_vector(), expected, tol(kF32, 33), "dlogits");

  Tensor leaf = logits.clone();
  leaf.set_requires_grad(true);
  backward(cross_entropy(leaf, targets).sum);
  backward(cross_entropy(leaf, targets).sum);
  check_close(leaf.grad().to_vector(), scaled(ref.dlogits, 2), tol(kF32, 33), "accumulated");

  Tensor none = randn({0, 5}, kF32);
  none.set_requires_grad(true);
  const LossSum empty_loss = cross_entropy(none, zeros({0}, kI32));
  backward(empty_loss.sum);
  CHECK(empty_loss.sum.item() == 0);
  CHECK(empty_loss.count.item() == 0);
}

const std::vector<Terms> kTerms = {{1e-3, 0}, {0, 0.1}, {0.02, 0.3}, {0, 1}};

TEST_CASE("cross_entropy: z-loss and label smoothing match the f64 definition", "[loss]") {
  const auto dtype = GENERATE(kF64, kF32, kBF16, kF16);
  for (const Terms& terms : kTerms) {
    for (const auto& [R, V] :
         std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {6, 16}, {9, 65}, {3, 1031}, {2, 5000}}) {
      Tensor logits = randn({R, V}, dtype, 1, 3.0);
      const Tensor targets = make_targets(R, V);
      const Reference ref = reference(logits.to_vector(), targets.to_vector_of<int64_t>(),
                                      static_cast<size_t>(V), 0, terms);
      INFO("R " << R << " V " << V << " z " << terms.z_loss << " smoothing "
                << terms.label_smoothing << " " << name_of(dtype));
      logits.set_requires_grad(true);
      const CrossEntropyOptions options{
          .z_loss = static_cast<float>(terms.z_loss),
          .label_smoothing = static_cast<float>(terms.label_smoothing)};
      const LossSum loss = cross_entropy(logits, targets, options);
      CHECK(loss.count.item() == ref.count);
      check_close({loss.sum.item()}, {ref.sum}, tol(kF32, V), "sum");
      backward(loss.sum, full({}, 0.25, loss.sum.dtype()));
      check_close(logits.grad().to_vector(), scaled(ref.dlogits, 0.25),
                  dtype == kF64 ? tol(kF32, 1) : tol(dtype, V), "dlogits");
    }
  }
}

// ---- linear_cross_entropy

struct LinearCase {
  int64_t R, C, V, chunk_rows;
};

struct LinearReference {
  double sum, count;
  std::vector<double> dx, dw;
};

LinearReference linear_reference(const Tensor& x, const Tensor& w, const Tensor& targets,
                                 double softcap = 0, const Terms& terms = {}) {
  const auto C = static_cast<size_t>(x.dim(-1)), V = static_cast<size_t>(w.dim(0));
  const std::vector<double> xs = x.to_vector(), ws = w.to_vector();
  const size_t R = xs.size() / C;
  const Reference ref = reference(product(xs, ws, R, V, C, false, true),
                                  targets.to_vector_of<int64_t>(), V, softcap, terms);
  return {ref.sum, ref.count, product(ref.dlogits, ws, R, C, V, false, false),
          product(ref.dlogits, xs, V, C, R, true, false)};
}

TEST_CASE("linear_cross_entropy: z-loss and label smoothing, both modes, beside a soft-cap",
          "[loss]") {
  const auto dtype = GENERATE(kF32, kBF16);
  const auto early = GENERATE(false, true);
  const auto softcap = GENERATE(0.0f, 2.5f);
  constexpr int64_t R = 12, C = 16, V = 1500;
  for (const Terms& terms : kTerms) {
    Tensor x = randn({R, C}, dtype, 1), w = randn({V, C}, dtype, 2);
    const Tensor targets = make_targets(R, V);
    const LinearReference ref = linear_reference(x, w, targets, softcap, terms);
    x.set_requires_grad(true), w.set_requires_grad(true);
    const Tensor scale = full({}, 0.125);
    LinearCrossEntropyOptions options{.chunk_rows = 5,
                                      .softcap = softcap,
                                      .z_loss = static_cast<float>(terms.z_loss),
                                      .label_smoothing = static_cast<float>(terms.label_smoothing)};
    if (early) options.grad_scale = scale;
    const LossSum loss = linear_cross_entropy(x, w, targets, options);
    check_close({loss.sum.item()}, {ref.sum}, tol(kF32, V + C), "sum");
    backward(loss.sum, scale);
    check_close(x.grad().to_vector(), scaled(ref.dx, 0.125), tol(dtype, V), "dx");
    check_close(w.grad().to_vector(), scaled(ref.dw, 0.125), tol(dtype, R), "dw");
  }
}

TEST_CASE("loss: gradients of z-loss and label smoothing match finite differences", "[loss]") {
  Tensor x = randn({2, 3, 4}, kF64, 1), w = randn({7, 4}, kF64, 2), logits = randn({6, 7}, kF64, 3);
  for (Tensor* t : {&x, &w, &logits}) t->set_requires_grad(true);
  const Tensor targets = from_values({0, 6, -100, 3, 3, 1}, {2, 3});
  gradcheck(
      [&](const auto& in) {
        return cross_entropy(in[0], targets.view({6}),
                             CrossEntropyOptions{.z_loss = 0.25f, .label_smoothing = 0.25f})
            .sum;
      },
      {logits});
  for (const float softcap : {0.0f, 1.5f}) {
    const LinearCrossEntropyOptions options{
        .chunk_rows = 4, .softcap = softcap, .z_loss = 0.25f, .label_smoothing = 0.25f};
    gradcheck(
        [&](const auto& in) { return linear_cross_entropy(in[0], in[1], targets, options).sum; },
        {x, w});
  }
}

TEST_CASE("linear_cross_entropy_rows: losses of rows, gradients by a weight of each", "[loss]") {
  Tensor x = randn({2, 3, 4}, kF64, 1), w = randn({7, 4}, kF64, 2);
  x.set_requires_grad(true), w.set_requires_grad(true);
  const Tensor targets = from_values({0, 6, -100, 3, 3, 1}, {2, 3});
  const Tensor weights = from_values({0.5, -1.0, 3.0, 2.0, 0.25, -0.125}, {2, 3}, kF64);
  for (const int64_t chunk_rows : {0, 4}) {
    const LinearCrossEntropyOptions options{.chunk_rows = chunk_rows};
    gradcheck(
        [&](const auto& in) {
          return sum(mul(linear_cross_entropy_rows(in[0], in[1], targets, options), weights));
        },
        {x, w});
    const Tensor rows = linear_cross_entropy_rows(x, w, targets, options);
    CHECK(rows.shape() == targets.shape());
    CHECK(rows.to_vector()[2] == 0);
    // As the sum has them.
    const Tensor all = linear_cross_entropy(x, w, targets, options).sum;
    CHECK(sum(rows).item() == Approx(all.item()).epsilon(1e-14));
  }
  // Equal weights give the bits of the sum's gradients.
  const Tensor x0 = randn({17, 8}, kF32, 1), w0 = randn({1500, 8}, kF32, 2);
  const Tensor many = make_targets(17, 1500);
  Tensor grads[2][2];
  for (const bool by_rows : {false, true}) {
    Tensor a = x0.clone(), b = w0.clone();
    a.set_requires_grad(true), b.set_requires_grad(true);
    const LinearCrossEntropyOptions options{.chunk_rows = 6};
    if (by_rows) {
      backward(sum(linear_cross_entropy_rows(a, b, many, options)), full({}, 0.5));
    } else {
      backward(linear_cross_entropy(a, b, many, options).sum, full({}, 0.5));
    }
    grads[by_rows][0] = a.grad(), grads[by_rows][1] = b.grad();
  }
  check_bitwise(grads[0][0], grads[1][0], "dx");
  check_bitwise(grads[0][1], grads[1][1], "dw");
}

TEST_CASE("linear_cross_entropy: both modes match the f64 definition", "[loss]") {
  const auto dtype = GENERATE(kF64, kF32, kBF16, kF16);
  const auto early = GENERATE(false, true);
  const auto softcap = GENERATE(0.0f, 2.5f, 30.0f);
  for (const LinearCase& c : std::vector<LinearCase>{
           {1, 1, 1, 0}, {7, 5, 13, 0}, {7, 5, 13, 3}, {12, 16, 70, 4}, {5, 8, 1500, 2}}) {
    Tensor x = randn({c.R, c.C}, dtype, 1), w = randn({c.V, c.C}, dtype, 2);
    const Tensor targets = make_targets(c.R, c.V);
    const LinearReference ref = linear_reference(x, w, targets, softcap);
    INFO("R " << c.R << " C " << c.C << " V " << c.V << " chunk " << c.chunk_rows << " softcap "
              << softcap << " " << name_of(dtype) << (early ? " gradients in the forward" : ""));
    x.set_requires_grad(true), w.set_requires_grad(true);
    const DType loss_dtype = dtype == kF64 ? kF64 : kF32;
    const Tensor scale = full({}, 0.125, loss_dtype);
    LinearCrossEntropyOptions options{.chunk_rows = c.chunk_rows, .softcap = softcap};
    if (early) options.grad_scale = scale;
    const LossSum loss = linear_cross_entropy(x, w, targets, options);
    CHECK(loss.count.item() == ref.count);
    check_close({loss.sum.item()}, {ref.sum}, tol(loss_dtype, c.V + c.C), "sum");
    CHECK(w.grad().is_defined() == early);
    CHECK(!x.grad().is_defined());
    backward(loss.sum, scale);
    check_close(x.grad().to_vector(), scaled(ref.dx, 0.125), tol(dtype, c.V), "dx");
    check_close(w.grad().to_vector(), scaled(ref.dw, 0.125), tol(dtype, c.R), "dw");
  }
}

TEST_CASE("linear_cross_entropy: gradients match finite differences", "[loss]") {
  Tensor x = randn({2, 3, 4}, kF64, 1), w = randn({7, 4}, kF64, 2);
  x.set_requires_grad(true), w.set_requires_grad(true);
  const Tensor targets = from_values({0, 6, -100, 3, 3, 1}, {2, 3});
  for (const float softcap : {0.0f, 1.5f}) {
    for (const int64_t chunk_rows : {0, 4}) {
      const LinearCrossEntropyOptions options{.chunk_rows = chunk_rows, .softcap = softcap};
      gradcheck(
          [&](const auto& in) { return linear_cross_entropy(in[0], in[1], targets, options).sum; },
          {x, w});
    }
  }
}

TEST_CASE("linear_cross_entropy: dlogits in bf16 keep the accuracy of f32 logits", "[loss]") {
  // Logits near 300: bf16 logits would be off by 1.
  Tensor x = full({3, 64}, 1.0, kBF16), w = full({9, 64}, 4.6875, kBF16);
  w.add_(randn({9, 64}, kBF16, 1, 0.03125));
  const Tensor targets = from_values({0, 4, 8}, {3});
  const LinearReference ref = linear_reference(x, w, targets);
  CHECK(std::fabs(linear_cross_entropy(x, w, targets).sum.item() - ref.sum) < 2e-4);
}

TEST_CASE("linear_cross_entropy: a weight that is no leaf, frozen inputs, no grad mode", "[loss]") {
  const Tensor targets = make_targets(6, 10), scale = full({}, 0.5);
  const Tensor x0 = randn({6, 4}, kF32, 1), padded0 = randn({12, 4}, kF32, 2);
  const LinearReference ref = linear_reference(x0, padded0.narrow(0, 1, 10), targets);
  for (const bool early : {false, true}) {
    LinearCrossEntropyOptions options{.chunk_rows = 4};
    if (early) options.grad_scale = scale;
    {
      Tensor x = x0.clone(), padded = padded0.clone();
      x.set_requires_grad(true), padded.set_requires_grad(true);
      const LossSum loss = linear_cross_entropy(x, padded.narrow(0, 1, 10), targets, options);
      CHECK(!padded.grad().is_defined());
      backward(loss.sum, scale);
      check_close(x.grad().to_vector(), scaled(ref.dx, 0.5), tol(kF32, 10), "dx");
      check_close(padded.grad().narrow(0, 1, 10).to_vector(), scaled(ref.dw, 0.5), tol(kF32, 6));
      CHECK(padded.grad().select(0, 0).to_vector() == std::vector<double>(4, 0.0));
    }
    {
      Tensor x = x0.clone(), w = padded0.narrow(0, 1, 10).clone();
      x.set_requires_grad(true);
      backward(linear_cross_entropy(x, w, targets, options).sum, scale);
      check_close(x.grad().to_vector(), scaled(ref.dx, 0.5), tol(kF32, 10), "dx");
      CHECK(!w.grad().is_defined());
      x.set_requires_grad(false).zero_grad(), w.set_requires_grad(true);
      backward(linear_cross_entropy(x, w, targets, options).sum, scale);
      check_close(w.grad().to_vector(), scaled(ref.dw, 0.5), tol(kF32, 6), "dw");
      CHECK(!x.grad().is_defined());
      w.zero_grad();
      NoGrad no_grad;
      const LossSum loss = linear_cross_entropy(x, w, targets, options);
      CHECK(!loss.sum.requires_grad());
      CHECK(!w.grad().is_defined());
      check_close({loss.sum.item()}, {ref.sum}, tol(kF32, 10));
    }
  }
}

/// A leaf's gradient memory given from outside, as a sharded parameter's is.
class FixedSink final : public GradSink {
 public:
  explicit FixedSink(GradDst destination) : destination_(std::move(destination)) {}
  GradDst destination(const Tensor&) override { return destination_; }
  void written(const Tensor&) override {
    destination_.accumulate = true;
    ++num_written;
  }
  int num_written = 0;

 private:
  GradDst destination_;
};

TEST_CASE("linear_cross_entropy: dw goes into the leaf's destination and adds there", "[loss]") {
  const auto dtype = GENERATE(kF32, kBF16);
  const auto slot_dtype = GENERATE(kF32, kBF16);
  const auto early = GENERATE(false, true);
  const auto chunk_rows = GENERATE(0, 5);
  if (dtype == kF32 && slot_dtype == kBF16 && chunk_rows == 0 && early) return;  // as chunks
  const Tensor targets = make_targets(17, 10), scale = full({}, 0.5);
  Tensor x = randn({17, 8}, dtype, 1), w = randn({10, 8}, dtype, 2);
  const LinearReference ref = linear_reference(x, w, targets);
  Tensor slot = full({10, 8}, 7.0, slot_dtype);
  x.set_requires_grad(true), w.set_requires_grad(true);
  const auto sink = std::make_shared<FixedSink>(GradDst{slot, false});
  set_grad_sink(w, sink);
  LinearCrossEntropyOptions options{.chunk_rows = chunk_rows};
  if (early) options.grad_scale = scale;
  // bf16 dlogits are rounded once; their sum is not, if the slot is f32.
  const double tolerance = dtype == kF32 && slot_dtype == kF32 ? tol(kF32, 17) : tol(kBF16, 17);
  for (int pass = 1; pass <= 2; ++pass) {
    const LossSum loss = linear_cross_entropy(x, w, targets, options);
    CHECK(sink->num_written == (early ? pass : pass - 1));
    backward(loss.sum, scale);
    CHECK(sink->num_written == pass);
    check_close(slot.to_vector(), scaled(ref.dw, 0.5 * pass), tolerance, "dw");
    check_close(x.grad().to_vector(), scaled(ref.dx, 0.5 * pass), tol(dtype, 10), "dx");
  }
  CHECK(!w.grad().is_defined());
}

TEST_CASE("linear_cross_entropy: rows of dw that are asked for later have the bits of the whole",
          "[loss]") {
  const auto dtype = GENERATE(kF32, kBF16, kF64);
  const auto slot_dtype = GENERATE(kF32, kBF16, kF64);
  const auto softcap = GENERATE(0.0f, 2.0f);
  const auto early = GENERATE(false, true);
  if (slot_dtype != dtype && (dtype == kF64 || slot_dtype != kF32)) return;
  // Blocks of exponentials in the fused loss have 1024 columns.
  constexpr int64_t kRows = 37, kVocab = 2500, kWidth = 40;
  const Tensor targets = make_targets(kRows, kVocab),
               scale = full({}, 0.5, dtype == kF64 ? kF64 : kF32);
  Tensor x = randn({kRows, kWidth}, dtype, 1), w = randn({kVocab, kWidth}, dtype, 2);
  x.set_requires_grad(true), w.set_requires_grad(true);
  for (const int64_t chunk_rows : {0, 16}) {
    LinearCrossEntropyOptions options{.chunk_rows = chunk_rows, .softcap = softcap};
    if (early) options.grad_scale = scale;
    const Tensor whole = empty({kVocab, kWidth}, slot_dtype);
    set_grad_sink(w, std::make_shared<FixedSink>(GradDst{whole, false}));
    x.zero_grad();
    const LossSum expected = linear_cross_entropy(x, w, targets, options);
    backward(expected.sum, scale);
    const Tensor dx = x.grad();
    const auto sink = testing::set_row_sink(w);
    x.zero_grad();
    const LossSum loss = linear_cross_entropy(x, w, targets, options);
    CHECK(sink->num_added() == (early ? 1 : 0));
    backward(loss.sum, scale);
    CHECK(sink->num_added() == 1);
    CHECK(loss.sum.item() == expected.sum.item());
    CHECK(x.grad().to_vector() == dx.to_vector());
    for (const int64_t at_once : {333, 1024, 2499}) {
      CAPTURE(name_of(dtype), name_of(slot_dtype), softcap, early, chunk_rows, at_once);
      const bool is_same =
          sink->gradient({kVocab, kWidth}, slot_dtype, at_once).to_vector() == whole.to_vector();
      CHECK(is_same);
    }
  }
}

TEST_CASE("linear_cross_entropy: no rows, and no valid target", "[loss]") {
  for (const int64_t R : {0, 4}) {
    for (const bool early : {false, true}) {
      Tensor x = randn({R, 3}, kF32, 1), w = randn({5, 3}, kF32, 2);
      x.set_requires_grad(true), w.set_requires_grad(true);
      LinearCrossEntropyOptions options;
      if (early) options.grad_scale = full({}, 0.5);
      const Tensor targets = full({R}, kIgnored, kI32);
      const LossSum loss = linear_cross_entropy(x, w, targets, options);
      CHECK(loss.sum.item() == 0);
      CHECK(loss.count.item() == 0);
      backward(loss.sum);
      CHECK(w.grad().to_vector() == std::vector<double>(15, 0.0));
      CHECK(x.grad().to_vector() == std::vector<double>(static_cast<size_t>(3 * R), 0.0));
    }
  }
}

TEST_CASE("loss: peak memory is linear in the rows, not rows x vocabulary", "[loss]") {
  const auto early = GENERATE(false, true);
  const int64_t C = 8, V = 50257;
  // The second half of each pair of peaks costs what its rows cost, logits included or not.
  const auto peak_of = [&](int64_t R) {
    const auto context = std::make_shared<Context>(ContextOptions{.device = {}, .num_threads = 2});
    Context::Scope scope(context);
    Tensor x = randn({R, C}, kF32, 1), w = randn({V, C}, kF32, 2);
    x.set_requires_grad(true), w.set_requires_grad(true);
    LinearCrossEntropyOptions options;
    if (early) options.grad_scale = full({}, 0.5);
    const Tensor targets = make_targets(R, V);
    const int64_t before = context->allocator()->stats().allocated;
    context->allocator()->reset_peak();
    const LossSum loss = linear_cross_entropy(x, w, targets, options);
    backward(loss.sum);
    context->compute().synchronize();
    return context->allocator()->stats().peak_allocated - before;
  };
  const int64_t peak_600 = peak_of(600), peak_1200 = peak_of(1200);
  const int64_t weight_nbytes = V * C * 4;
  // dw, one chunk of logits (at most 64 MiB), and per row dx, losses and statistics.
  CHECK(peak_600 < weight_nbytes + (64 << 20) + 600 * (C * 4 + 12) + 16384);
  CHECK(peak_1200 < weight_nbytes + (64 << 20) + 1200 * (C * 4 + 12) + 16384);
  CHECK(peak_1200 < 1200 * V * 4 / 3);  // all logits would be 241 MB
}

TEST_CASE("loss: the bits do not depend on the number of threads", "[loss]") {
  const auto early = GENERATE(false, true);
  const auto softcap = GENERATE(0.0f, 5.0f);
  std::vector<Tensor> results[2];
  for (int threads = 1; threads <= 2; ++threads) {
    Context::Scope scope(
        std::make_shared<Context>(ContextOptions{.device = {}, .num_threads = threads}));
    Tensor logits = randn({70, 2000}, kF32, 1);
    Tensor x = randn({70, 32}, kF32, 3), w = randn({2000, 32}, kF32, 4);
    for (Tensor* t : {&logits, &x, &w}) t->set_requires_grad(true);
    const Tensor targets = make_targets(70, 2000);
    LinearCrossEntropyOptions options{.chunk_rows = 24, .softcap = softcap};
    if (early) options.grad_scale = full({}, 1.0);
    const LossSum a = cross_entropy(logits, targets);
    const LossSum b = linear_cross_entropy(x, w, targets, options);
    backward(a.sum), backward(b.sum);
    results[threads - 1] = {a.sum, logits.grad(), b.sum, x.grad(), w.grad()};
  }
  const char* names[] = {"sum", "dlogits", "linear sum", "dx", "dw"};
  for (size_t i = 0; i < 5; ++i) check_bitwise(results[0][i], results[1][i], names[i]);
}

TEST_CASE("loss: cost counts each operand once", "[loss]") {
  std::byte memory[1];
  void* p = memory;
  const kernels::Targets targets{p, kI32, kIgnored, 0, "test"};
  const kernels::CrossEntropyFwd fwd{p, p, p, targets, kBF16, 10, 6, 8};
  CHECK(fwd.cost().flops() == 4 * 60);
  CHECK(fwd.cost().bytes_read() == (9 * 8 + 6) * 2 + 10 * 4);
  CHECK(fwd.cost().bytes_written() == 10 * 4 + 20 * 4);
  const kernels::CrossEntropyBwd bwd{p, p, p, targets, p, kF32, kBF16, false, 10, 6, 6, 12};
  CHECK(bwd.cost().flops() == 4 * 60);
  CHECK(bwd.cost().bytes_read() == 240 + 40 + 80 + 4);
  CHECK(bwd.cost().bytes_written() == (9 * 12 + 6) * 2);
  kernels::CrossEntropyFwd capped_fwd = fwd;
  kernels::CrossEntropyBwd capped_bwd = bwd;
  capped_fwd.softcap = capped_bwd.softcap = 30;
  CHECK(capped_fwd.cost().flops() == 7 * 60);
  CHECK(capped_bwd.cost().flops() == 10 * 60);
  kernels::CrossEntropyFwd smooth_fwd = fwd;
  kernels::CrossEntropyBwd smooth_bwd = bwd;
  smooth_fwd.label_smoothing = smooth_bwd.label_smoothing = 0.1f;
  smooth_bwd.scale_stride = 1;
  CHECK(smooth_fwd.cost().flops() == 5 * 60);
  CHECK(smooth_bwd.cost().flops() == 5 * 60);
  CHECK(smooth_bwd.cost().bytes_read() == 240 + 40 + 80 + 40);
  const kernels::CrossEntropyFused fused{p, p, targets, p, kF32, kF32, 10, 6, 6};
  CHECK(fused.cost().flops() == 6 * 60);
  CHECK(fused.cost().bytes_read() == 240 + 40 + 4);
  CHECK(fused.cost().bytes_written() == 240 + 40);
  const kernels::LossTotal total{p, p, p, targets, kF32, 10};
  CHECK(total.cost().flops() == 10);
  CHECK(total.cost().bytes_read() == 80);
  CHECK(total.cost().bytes_written() == 8);
}

void check_error(const std::function<void()>& f, std::initializer_list<const char*> parts) {
  const std::string message = error_of(f);
  for (const char* part : parts) {
    INFO(message << "\nshould contain: " << part);
    CHECK(message.find(part) != std::string::npos);
  }
}

TEST_CASE("loss: a target out of range is named by the stream", "[loss]") {
  const auto run = [](const std::function<LossSum()>& f) {
    Context::Scope scope(std::make_shared<Context>(ContextOptions{.device = {}, .num_threads = 1}));
    f().sum.item();
  };
  check_error(
      [&] { run([] {
              return cross_entropy(randn({3, 5}), from_values({0, -100, 5}, {3}));
            }); },
      {"cross_entropy: target 5 at position 2 is outside [0, 5) and is not ignore_index (-100)"});
  check_error(
      [&] { run([] {
              return cross_entropy(randn({3, 5}), from_values({0, -100, 4}, {3}), -1);
            }); },
      {"cross_entropy: target -100 at position 1 is outside [0, 5) and is not ignore_index (-1)"});
  for (const bool early : {false, true}) {
    check_error(
        [&] {
          run([&] {
            Tensor x = randn({5, 2}), w = randn({4, 2});
            x.set_requires_grad(true);
            LinearCrossEntropyOptions options{.chunk_rows = 2};
            if (early) options.grad_scale = full({}, 1.0);
            return linear_cross_entropy(x, w, from_values({0, 1, 2, 3, 9}, {5}), options);
          });
        },
        {"linear_cross_entropy: target 9 at position 4 is outside [0, 4)"});
  }
}

TEST_CASE("loss: errors name the op and what came", "[loss]") {
  const Tensor x = randn({2, 3}), w = randn({5, 3}), t = zeros({2}, kI32);
  check_error([&] { cross_entropy(x, t, CrossEntropyOptions{.z_loss = -1}); },
              {"cross_entropy: z_loss must be finite and not negative, got -1"});
  check_error([&] { linear_cross_entropy(x, w, t, {.z_loss = INFINITY}); },
              {"linear_cross_entropy: z_loss must be finite and not negative, got inf"});
  check_error([&] { linear_cross_entropy(x, w, t, {.label_smoothing = 1.5f}); },
              {"linear_cross_entropy: label_smoothing must be in [0, 1], got 1.5"});
  check_error([&] { linear_cross_entropy_rows(x, w, t, {.grad_scale = full({}, 1)}); },
              {"linear_cross_entropy_rows: a grad_scale, expected none: rows have their own"});
  check_error([&] { cross_entropy(x, zeros({3}, kI32)); },
              {"cross_entropy: targets must have the leading shape of logits", "[3] vs [2]"});
  check_error([&] { cross_entropy(x, zeros({2})); },
              {"cross_entropy: targets must be i32 or i64, got f32"});
  check_error(
      [&] {
        cross_entropy(zeros({2, 3}, kI32), t);
      },
      {"cross_entropy: logits must be floating, got i32"});
  check_error(
      [&] {
        cross_entropy(randn({2, 0}), t);
      },
      {"cross_entropy: logits must have a last dimension, got [2, 0]"});
  check_error([&] { linear_cross_entropy(x, w, zeros({1}, kI32)); },
              {"linear_cross_entropy: targets must have the leading shape of x", "[1] vs [2]"});
  check_error(
      [&] {
        linear_cross_entropy(x, randn({5, 4}), t);
      },
      {"linear_cross_entropy: w must be [V, 3], got [5, 4]"});
  check_error([&] { linear_cross_entropy(x, w.to(kBF16), t); },
              {"linear_cross_entropy: w must have x's dtype", "bf16 vs f32"});
  check_error([&] { linear_cross_entropy(x, w, t, {.chunk_rows = -1}); },
              {"linear_cross_entropy: chunk_rows must not be negative, got -1"});
  check_error([&] { linear_cross_entropy(x, w, t, {.softcap = -2}); },
              {"linear_cross_entropy: softcap must be finite and not negative, got -2"});
  LinearCrossEntropyOptions options;
  options.grad_scale = zeros({1});
  check_error([&] { linear_cross_entropy(x, w, t, options); },
              {"linear_cross_entropy: grad_scale must be a scalar", "[1] vs []"});
  options.grad_scale = zeros({}, kF64);
  check_error([&] { linear_cross_entropy(x, w, t, options); },
              {"linear_cross_entropy: grad_scale must have the loss's dtype", "f64 vs f32"});
}

}  // namespace
}  // namespace tessera
