#include "kernels/optimizer/optimizer.h"

#include <limits>

#include "core/autograd.h"
#include "core/runtime/context.h"
#include "kernels/optimizer/kernel.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::check_bitwise;
using testing::check_close;
using testing::error_of;
using testing::randn;
using testing::tol;
using Values = std::vector<double>;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Tensor step_of(int64_t step) {
  return from_values({step}, {});
}

/// A shard with everything that an update may have.
struct State {
  FlatUpdate flat;
  AdamWUpdate adamw;
  SgdUpdate sgd;
};

State make_state(int64_t numel, std::vector<FlatSegment> segments, DType grad_dtype = kF32,
                 DType low_dtype = kBF16) {
  State s;
  s.flat.master = randn({numel}, kF32, 1);
  s.flat.grad = randn({numel}, grad_dtype, 2);
  s.flat.low = zeros({numel}, low_dtype);
  s.flat.segments = flat_segments(segments, numel);
  s.flat.lr = 0.01f;
  s.flat.weight_decay = 0.1f;
  s.adamw.exp_avg = randn({numel}, kF32, 3);
  s.adamw.exp_avg_sq = from_values(Values(static_cast<size_t>(numel), 0.25), {numel});
  s.adamw.step = step_of(3);
  s.sgd.momentum_buffer = randn({numel}, kF32, 4);
  s.sgd.momentum = 0.9f;
  return s;
}

/// The definition in f64 for one segment's elements.
void expect_adamw(const State& s, const FlatSegment& segment, double grad_scale, Values& p,
                  Values& m, Values& v) {
  const Values grad = s.flat.grad.to_vector();
  const double t = s.adamw.step.item(), lr = 0.01f * segment.lr_scale;
  for (auto i = static_cast<size_t>(segment.begin); i < static_cast<size_t>(segment.end); ++i) {
    const double g = grad[i] * grad_scale;
    p[i] *= 1 - lr * 0.1f * segment.decay_scale;
    m[i] += (1 - s.adamw.beta1) * (g - m[i]);
    v[i] = s.adamw.beta2 * v[i] + (1 - s.adamw.beta2) * g * g;
    const double m_hat = m[i] / (1 - std::pow(s.adamw.beta1, t));
    const double v_hat = v[i] / (1 - std::pow(s.adamw.beta2, t));
    p[i] -= lr * m_hat / (std::sqrt(v_hat) + s.adamw.eps);
  }
}

const std::vector<FlatSegment> kSegments = {
    {0, 1, 1, 1}, {1, 300, 2, 0}, {512, 512, 1, 1}, {512, 40000, 1, 1}, {40001, 40003, 0.5f, 1}};

TEST_CASE("adamw_step: segments of any size equal the definition in f64", "[optimizer]") {
  for (const DType grad_dtype : {kF32, kBF16, kF16}) {
    for (const DType low_dtype : {kBF16, kF16, kF32}) {
      State s = make_state(40010, kSegments, grad_dtype, low_dtype);
      s.flat.grad_scale = from_values({0.5f}, {});
      Values p = s.flat.master.to_vector(), m = s.adamw.exp_avg.to_vector(),
             v = s.adamw.exp_avg_sq.to_vector(), low(p.size(), 0.0);
      for (const FlatSegment& segment : kSegments) expect_adamw(s, segment, 0.5, p, m, v);
      adamw_step(s.flat, s.adamw);
      check_close(s.flat.master.to_vector(), p, tol(kF32), "master");
      check_close(s.adamw.exp_avg.to_vector(), m, tol(kF32), "exp_avg");
      check_close(s.adamw.exp_avg_sq.to_vector(), v, tol(kF32), "exp_avg_sq");
      const Values rounded = s.flat.master.to(low_dtype).to_vector();
      for (const FlatSegment& segment : kSegments) {
        std::copy(rounded.begin() + segment.begin, rounded.begin() + segment.end,
                  low.begin() + segment.begin);
      }
      check_close(s.flat.low.to_vector(), low, 0, "low");
    }
  }
}

TEST_CASE("optimizer: padding outside the segments is neither read nor written", "[optimizer]") {
  const std::vector<FlatSegment> segments = {{2, 5}, {7, 8}};
  State s = make_state(10, segments);
  const auto poison = [](const Tensor& t) {
    Tensor padding = t;
    for (const int64_t i : {0, 1, 5, 6, 8, 9}) padding.narrow(0, i, 1).fill_(kNaN);
  };
  for (const Tensor& t : {s.flat.master, s.flat.grad, s.flat.low, s.adamw.exp_avg,
                          s.adamw.exp_avg_sq, s.sgd.momentum_buffer}) {
    poison(t);
  }
  const Values before = s.flat.master.to_vector();
  adamw_step(s.flat, s.adamw);
  sgd_step(s.flat, s.sgd);
  for (const Tensor& t :
       {s.flat.master, s.flat.low, s.adamw.exp_avg, s.adamw.exp_avg_sq, s.sgd.momentum_buffer}) {
    const Values values = t.to_vector();
    for (const size_t i : {0, 1, 5, 6, 8, 9}) CHECK(std::isnan(values[i]));
    for (const size_t i : {2, 3, 4, 7}) CHECK(std::isfinite(values[i]));
  }
  for (const size_t i : {2, 3, 4, 7}) CHECK(s.flat.master.to_vector()[i] != before[i]);
}

TEST_CASE("optimizer: skip leaves everything unchanged, whatever the gradient", "[optimizer]") {
  State s = make_state(40010, kSegments);
  s.flat.grad.fill_(std::numeric_limits<double>::infinity());
  s.flat.skip = full({}, 1, kU8);
  State old;
  old.flat.master = s.flat.master.clone();
  old.flat.low = s.flat.low.clone();
  old.adamw.exp_avg = s.adamw.exp_avg.clone();
  old.adamw.exp_avg_sq = s.adamw.exp_avg_sq.clone();
  old.sgd.momentum_buffer = s.sgd.momentum_buffer.clone();
  adamw_step(s.flat, s.adamw);
  sgd_step(s.flat, s.sgd);
  advance_step(s.adamw.step, s.flat.skip);
  check_bitwise(s.flat.master, old.flat.master);
  check_bitwise(s.flat.low, old.flat.low);
  check_bitwise(s.adamw.exp_avg, old.adamw.exp_avg);
  check_bitwise(s.adamw.exp_avg_sq, old.adamw.exp_avg_sq);
  check_bitwise(s.sgd.momentum_buffer, old.sgd.momentum_buffer);
  CHECK(s.adamw.step.item() == 3);
  s.flat.skip.fill_(0);
  advance_step(s.adamw.step, s.flat.skip);
  CHECK(s.adamw.step.item() == 4);
  advance_step(s.adamw.step);
  CHECK(s.adamw.step.item() == 5);
  s.flat.grad.fill_(1);
  adamw_step(s.flat, s.adamw);
  CHECK(s.flat.master.to_vector() != old.flat.master.to_vector());
}

TEST_CASE("optimizer: a shard in windows has the bits of the whole shard", "[optimizer]") {
  State whole = make_state(40010, kSegments), parts = make_state(40010, kSegments);
  adamw_step(whole.flat, whole.adamw);
  const int64_t cuts[] = {0, 200, 513, 30000, 40002, 40010};
  for (int i = 0; i + 1 < 6; ++i) {
    const auto window = [&, i](const Tensor& t) {
      return t.narrow(0, cuts[i], cuts[i + 1] - cuts[i]);
    };
    FlatUpdate flat = parts.flat;
    flat.master = window(flat.master);
    flat.grad = window(flat.grad);
    flat.low = window(flat.low);
    flat.first = cuts[i];
    AdamWUpdate adamw = parts.adamw;
    adamw.exp_avg = window(adamw.exp_avg);
    adamw.exp_avg_sq = window(adamw.exp_avg_sq);
    adamw_step(flat, adamw);
  }
  check_bitwise(parts.flat.master, whole.flat.master);
  check_bitwise(parts.flat.low, whole.flat.low);
  check_bitwise(parts.adamw.exp_avg_sq, whole.adamw.exp_avg_sq);
}

TEST_CASE("optimizer: the bits do not depend on the number of threads", "[optimizer]") {
  const auto run = [](int num_threads) {
    ContextOptions options;
    options.num_threads = num_threads;
    const Context::Scope scope(std::make_shared<Context>(options));
    State s = make_state(200'001, {{0, 70'001, 1, 1}, {70'256, 200'001, 1, 0}}, kBF16);
    adamw_step(s.flat, s.adamw);
    sgd_step(s.flat, s.sgd);
    return std::vector<Values>{s.flat.master.to_vector(), s.flat.low.to_vector(),
                               s.adamw.exp_avg_sq.to_vector(), s.sgd.momentum_buffer.to_vector()};
  };
  const auto one = run(1);
  CHECK(run(2) == one);
  CHECK(run(3) == one);
}

TEST_CASE("sgd_step: with and without momentum equals the definition in f64", "[optimizer]") {
  for (const bool nesterov : {false, true}) {
    for (const double momentum : {0.0, 0.9}) {
      State s = make_state(40010, kSegments, kF16);
      s.flat.grad_scale = from_values({2.0f}, {});
      s.sgd.momentum = static_cast<float>(momentum);
      s.sgd.nesterov = nesterov && momentum > 0;
      if (momentum == 0) s.sgd.momentum_buffer = {};
      Values p = s.flat.master.to_vector();
      const Values grad = s.flat.grad.to_vector();
      Values b = momentum > 0 ? s.sgd.momentum_buffer.to_vector() : Values(p.size(), 0.0);
      for (const FlatSegment& segment : kSegments) {
        for (auto i = static_cast<size_t>(segment.begin); i < static_cast<size_t>(segment.end);
             ++i) {
          const double g = 2 * grad[i] + 0.1f * segment.decay_scale * p[i];
          b[i] = momentum * b[i] + g;
          p[i] -= 0.01f * segment.lr_scale * (s.sgd.nesterov ? g + momentum * b[i] : b[i]);
        }
      }
      sgd_step(s.flat, s.sgd);
      check_close(s.flat.master.to_vector(), p, tol(kF32));
      if (momentum > 0) check_close(s.sgd.momentum_buffer.to_vector(), b, tol(kF32));
    }
  }
}

TEST_CASE("optimizer: an empty shard and a shard without segments are fine", "[optimizer]") {
  State empty_shard = make_state(0, {});
  adamw_step(empty_shard.flat, empty_shard.adamw);
  sgd_step(empty_shard.flat, empty_shard.sgd);
  State padding_only = make_state(256, {});
  const Tensor before = padding_only.flat.master.clone();
  adamw_step(padding_only.flat, padding_only.adamw);
  check_bitwise(padding_only.flat.master, before);
}

TEST_CASE("optimizer: a graph that saved the master notices the update", "[optimizer]") {
  State s = make_state(4, {{0, 4}});
  const Saved saved = save(s.flat.master);
  adamw_step(s.flat, s.adamw);
  CHECK(error_of([&] { saved.get(); }) != "");
}

TEST_CASE("optimizer: mistakes are named", "[optimizer]") {
  const auto has = [](const std::function<void()>& f, const std::string& part) {
    const std::string text = error_of(f);
    INFO(text);
    CHECK(text.find(part) == 0);
  };
  has(
      [] {
        flat_segments(std::vector<FlatSegment>{{0, 4}, {3, 5}}, 8);
      },
      "flat_segments: segment [3, 5) must begin at 4 or later and end by 8");
  has(
      [] {
        flat_segments(std::vector<FlatSegment>{{0, 9}}, 8);
      },
      "flat_segments: segment [0, 9) must begin at 0 or later and end by 8");
  const auto broken = [](auto change) {
    State s = make_state(8, {{0, 8}});
    change(s);
    return [s] { adamw_step(s.flat, s.adamw); };
  };
  has(broken([](State& s) { s.flat.master = zeros({8}, kBF16); }),
      "adamw_step: master must be f32, got bf16");
  has(broken([](State& s) { s.flat.grad = zeros({7}); }),
      "adamw_step: grad must be contiguous with master's shape [8], got [7]");
  has(broken([](State& s) { s.flat.grad = zeros({8}, kF64); }),
      "adamw_step: grad must be f32, bf16 or f16, got f64");
  has(broken([](State& s) { s.flat.low = zeros({8}, kI32); }),
      "adamw_step: low must be floating, got i32");
  has(broken([](State& s) { s.flat.grad_scale = zeros({2}); }),
      "adamw_step: grad_scale must be a scalar, got [2]");
  has(broken([](State& s) { s.flat.skip = zeros({}); }), "adamw_step: skip must be u8, got f32");
  has(broken([](State& s) { s.adamw.exp_avg = zeros({9}); }),
      "adamw_step: exp_avg must be contiguous with master's shape [8], got [9]");
  has(broken([](State& s) { s.adamw.exp_avg_sq = zeros({8}, kF16); }),
      "adamw_step: exp_avg_sq must be f32, got f16");
  has(broken([](State& s) { s.adamw.step = zeros({}); }), "adamw_step: step must be i64, got f32");
  has(
      [] {
        State s = make_state(8, {{0, 8}});
        s.sgd.momentum_buffer = zeros({3});
        sgd_step(s.flat, s.sgd);
      },
      "sgd_step: momentum_buffer must be contiguous with master's shape [8], got [3]");
  has([] { advance_step(zeros({})); }, "advance_step: step must be i64, got f32");
}

TEST_CASE("optimizer: cost counts each byte once", "[optimizer]") {
  char memory[1];
  kernels::AdamWStep adamw{};
  adamw.master = adamw.exp_avg = adamw.exp_avg_sq = reinterpret_cast<float*>(memory);
  adamw.grad = adamw.low = memory;
  adamw.grad_dtype = kF32;
  adamw.low_dtype = kBF16;
  adamw.numel = 100;
  CHECK(adamw.cost().bytes_read() == 100 * 16);
  CHECK(adamw.cost().bytes_written() == 100 * 14);
  CHECK(adamw.cost().flops() == 1500);
  kernels::SgdStep sgd{};
  sgd.master = reinterpret_cast<float*>(memory);
  sgd.grad = memory;
  sgd.grad_dtype = kBF16;
  sgd.numel = 100;
  CHECK(sgd.cost().bytes() == 100 * (8 + 2));
}

}  // namespace
}  // namespace tessera
