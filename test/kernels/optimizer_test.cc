#include "kernels/optimizer/optimizer.h"

#include <limits>

#include "core/autograd.h"
#include "core/runtime/context.h"
#include "kernels/optimizer/kernel.h"
#include "kernels/optimizer/rounding.h"
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
  LionUpdate lion;
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
  s.lion.exp_avg = randn({numel}, kF32, 5);
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
                          s.adamw.exp_avg_sq, s.sgd.momentum_buffer, s.lion.exp_avg}) {
    poison(t);
  }
  const Values before = s.flat.master.to_vector();
  adamw_step(s.flat, s.adamw);
  sgd_step(s.flat, s.sgd);
  lion_step(s.flat, s.lion);
  for (const Tensor& t : {s.flat.master, s.flat.low, s.adamw.exp_avg, s.adamw.exp_avg_sq,
                          s.sgd.momentum_buffer, s.lion.exp_avg}) {
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
  old.lion.exp_avg = s.lion.exp_avg.clone();
  adamw_step(s.flat, s.adamw);
  sgd_step(s.flat, s.sgd);
  lion_step(s.flat, s.lion);
  advance_step(s.adamw.step, s.flat.skip);
  check_bitwise(s.flat.master, old.flat.master);
  check_bitwise(s.flat.low, old.flat.low);
  check_bitwise(s.adamw.exp_avg, old.adamw.exp_avg);
  check_bitwise(s.adamw.exp_avg_sq, old.adamw.exp_avg_sq);
  check_bitwise(s.sgd.momentum_buffer, old.sgd.momentum_buffer);
  check_bitwise(s.lion.exp_avg, old.lion.exp_avg);
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
    lion_step(s.flat, s.lion);
    return std::vector<Values>{s.flat.master.to_vector(), s.flat.low.to_vector(),
                               s.lion.exp_avg.to_vector(), s.adamw.exp_avg_sq.to_vector(),
                               s.sgd.momentum_buffer.to_vector()};
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

TEST_CASE("lion_step: equals the definition in f64", "[optimizer]") {
  for (const DType grad_dtype : {kF32, kBF16, kF16}) {
    State s = make_state(40010, kSegments, grad_dtype);
    s.flat.grad_scale = from_values({2.0f}, {});
    Values p = s.flat.master.to_vector(), m = s.lion.exp_avg.to_vector();
    const Values grad = s.flat.grad.to_vector();
    for (const FlatSegment& segment : kSegments) {
      for (auto i = static_cast<size_t>(segment.begin); i < static_cast<size_t>(segment.end); ++i) {
        const double g = 2 * grad[i], u = 0.9 * m[i] + 0.1 * g, lr = 0.01f * segment.lr_scale;
        CHECK_FALSE(std::abs(u) < 1e-6);  // whose sign rounding decides
        p[i] = p[i] * (1 - lr * 0.1f * segment.decay_scale) - lr * (u > 0 ? 1 : -1);
        m[i] = 0.99 * m[i] + 0.01 * g;
      }
    }
    lion_step(s.flat, s.lion);
    check_close(s.flat.master.to_vector(), p, tol(kF32), "master");
    check_close(s.lion.exp_avg.to_vector(), m, tol(kF32), "exp_avg");
  }
}

template <class T>
uint16_t rounded(float value, uint32_t word) {
  return kernels::round_stochastic<T>(std::bit_cast<uint32_t>(value), word, T(value).bits);
}
template <class T>
float decoded(uint32_t bits) {
  T t;
  t.bits = static_cast<uint16_t>(bits);
  return static_cast<float>(t);
}

/// Between every two neighbours, normal and subnormal: the lower one for small words, from the
/// right word on the upper one.
template <class T>
void check_grid() {
  constexpr uint32_t kAll = 0xffffffff;
  const float largest = std::bit_cast<float>(kernels::StochasticGrid<T>::kLargest);
  CHECK(T(largest).bits + 1 == T(INFINITY).bits);
  int64_t num_wrong = 0;
  for (uint32_t bits = 0; decoded<T>(bits) < largest; ++bits) {
    const float lower = decoded<T>(bits), upper = decoded<T>(bits + 1);
    for (const float sign : {1.0f, -1.0f}) {
      const auto low = T(sign * lower).bits, high = T(sign * upper).bits;
      num_wrong += rounded<T>(sign * lower, 0) != low || rounded<T>(sign * lower, kAll) != low;
      for (const float fraction : {0.25f, 0.5f, 0.875f}) {
        const float value = sign * (lower + (upper - lower) * fraction);
        if (value == sign * lower || value == sign * upper) continue;  // no f32 between them
        // Exact in f32, except below its own subnormal numbers.
        const double part = (std::abs(static_cast<double>(value)) - static_cast<double>(lower)) /
                            (static_cast<double>(upper) - static_cast<double>(lower));
        const auto first_up = static_cast<uint32_t>((1 - part) * 0x1p32);
        num_wrong += rounded<T>(value, 0) != low || rounded<T>(value, first_up - 1) != low ||
                     rounded<T>(value, first_up) != high || rounded<T>(value, kAll) != high;
      }
    }
  }
  CHECK(num_wrong == 0);
}

TEST_CASE("stochastic rounding: up with just the right probability, what fits stays",
          "[optimizer]") {
  check_grid<BFloat16>();
  check_grid<Float16>();
  // Below half the smallest subnormal number nearest would always give 0.
  CHECK(rounded<Float16>(0x1p-40f, 0xffffffffu) == 1);
  CHECK(rounded<Float16>(0x1p-40f, 0xffffffffu - (1u << 16)) == 0);
  CHECK(rounded<Float16>(0x1p-80f, 0xffffffffu) == 0);
}

TEST_CASE("stochastic rounding: chance makes no infinity; what is not finite stays",
          "[optimizer]") {
  const float inf = INFINITY, nan = NAN;
  for (const uint32_t word : {0u, 0x80000000u, 0xffffffffu}) {
    for (const float sign : {1.0f, -1.0f}) {
      CHECK(rounded<Float16>(sign * 65519, word) == Float16(sign * 65504).bits);
      CHECK(rounded<Float16>(sign * 65521, word) == Float16(sign * inf).bits);
      CHECK(rounded<Float16>(sign * inf, word) == Float16(sign * inf).bits);
      CHECK(rounded<BFloat16>(sign * 0x1.fe8p127f, word) == BFloat16(sign * 0x1.fep127f).bits);
      CHECK(rounded<BFloat16>(sign * 0x1.ff8p127f, word) == BFloat16(sign * inf).bits);
      CHECK(rounded<BFloat16>(sign * inf, word) == BFloat16(sign * inf).bits);
    }
    CHECK(std::isnan(decoded<Float16>(rounded<Float16>(nan, word))));
    CHECK(std::isnan(decoded<BFloat16>(rounded<BFloat16>(nan, word))));
  }
}

double mean_of(const Tensor& t) {
  double sum = 0;
  for (const double value : t.to_vector()) sum += value;
  return sum / static_cast<double>(t.numel());
}

TEST_CASE("adamw_step: case 22: many updates below half an ulp move bf16 by the true amount",
          "[optimizer]") {
  constexpr int64_t kNumel = 16384;
  const std::vector<FlatSegment> segments = {{.begin = 0, .end = kNumel, .key = make_key(1, 2)}};
  for (const bool is_stochastic : {false, true}) {
    State s = make_state(kNumel, segments);
    s.flat.segments = flat_segments(segments, kNumel, true);
    s.flat.master.fill_(1);
    s.flat.grad.fill_(1);
    s.flat.low.fill_(1);
    s.flat.weight_decay = 0;
    s.flat.lr = 1e-4f;  // the ulp below 1 is 2^-8
    s.adamw.exp_avg.fill_(0);
    s.adamw.exp_avg_sq.fill_(0);
    s.adamw.step = step_of(0);
    if (is_stochastic) s.flat.rounding_step = s.adamw.step;
    for (int i = 0; i < 10; ++i) {
      advance_step(s.adamw.step);
      adamw_step(s.flat, s.adamw);
    }
    const double moved = 1 - mean_of(s.flat.master);
    CHECK(std::abs(moved - 1e-3) < 1e-6);
    if (is_stochastic) {
      // 5 standard deviations of the mean: an element is an ulp below with probability 0.256.
      CHECK(std::abs(1 - mean_of(s.flat.low) - moved) < 5 * 0x1p-8 * 0.436 / 128);
    } else {
      CHECK(mean_of(s.flat.low) == 1);
    }
  }
}

TEST_CASE("adamw_step: the bits of chance do not depend on shards, windows or threads",
          "[optimizer]") {
  // Three parameters: as one shard; as two, cut inside the second at any element; in windows.
  constexpr int64_t kNumel = 40'000;
  const auto make_segment = [](int64_t parameter_begin, int64_t parameter_end, int64_t begin,
                               int64_t end, int64_t shard_begin) {
    FlatSegment segment;
    segment.begin = std::max(parameter_begin, begin) - shard_begin;
    segment.end = std::min(parameter_end, end) - shard_begin;
    segment.key = make_key(7, static_cast<uint64_t>(parameter_begin));
    segment.first_element = std::max(parameter_begin, begin) - parameter_begin;
    return segment;
  };
  const int64_t bounds[][2] = {{0, 1}, {1, 30'003}, {30'208, kNumel}};
  const auto low_of = [&](const std::vector<int64_t>& cuts, bool in_windows, DType dtype) {
    State s = make_state(kNumel, {}, kF32, dtype);
    s.flat.rounding_step = s.adamw.step;
    for (size_t c = 0; c + 1 < cuts.size(); ++c) {
      const int64_t begin = cuts[c], end = cuts[c + 1];
      std::vector<FlatSegment> segments;
      for (const auto& b : bounds) {
        if (in_windows) {
          segments.push_back(make_segment(b[0], b[1], b[0], b[1], 0));
        } else if (std::max(b[0], begin) < std::min(b[1], end)) {
          segments.push_back(make_segment(b[0], b[1], begin, end, begin));
        }
      }
      const auto part = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
      FlatUpdate flat = s.flat;
      flat.master = part(flat.master);
      flat.grad = part(flat.grad);
      flat.low = part(flat.low);
      flat.first = in_windows ? begin : 0;
      flat.segments = flat_segments(segments, in_windows ? kNumel : end - begin, true);
      AdamWUpdate adamw = s.adamw;
      adamw.exp_avg = part(adamw.exp_avg);
      adamw.exp_avg_sq = part(adamw.exp_avg_sq);
      adamw_step(flat, adamw);
    }
    return s.flat.low.to_vector();
  };
  for (const DType dtype : {kBF16, kF16}) {
    const Values whole = low_of({0, kNumel}, false, dtype);
    CHECK(low_of({0, 1, 7, 20'001, 30'001, kNumel}, false, dtype) == whole);
    CHECK(low_of({0, 1, 7, 20'001, 30'001, kNumel}, true, dtype) == whole);
    for (const int num_threads : {1, 2, 3}) {
      ContextOptions options;
      options.num_threads = num_threads;
      const Context::Scope scope(std::make_shared<Context>(options));
      CHECK(low_of({0, kNumel}, false, dtype) == whole);
    }
  }
}

TEST_CASE("round_low: what the update rounded is rounded the same way again", "[optimizer]") {
  const std::vector<FlatSegment> segments = {
      {.begin = 0, .end = 300, .key = make_key(1, 1)},
      {.begin = 512, .end = 4001, .key = make_key(1, 2), .first_element = 33}};
  State s = make_state(4010, segments);
  s.flat.segments = flat_segments(segments, 4010, true);
  s.flat.rounding_step = s.adamw.step;
  adamw_step(s.flat, s.adamw);
  const Tensor rounded = s.flat.low.clone();
  s.flat.low.fill_(0);
  round_low(s.flat);
  check_bitwise(s.flat.low, rounded);
  // Another step is another throw, another key too.
  advance_step(s.adamw.step);
  round_low(s.flat);
  CHECK(s.flat.low.to_vector() != rounded.to_vector());
  s.adamw.step.fill_(3);
  auto other = segments;
  for (FlatSegment& segment : other) segment.key = make_key(2, segment.key.k0);
  s.flat.segments = flat_segments(other, 4010, true);
  round_low(s.flat);
  CHECK(s.flat.low.to_vector() != rounded.to_vector());
  // Step 0 is what was initialized, or imported: to nearest, like the update without a step.
  s.adamw.step.fill_(0);
  round_low(s.flat);
  const Tensor nearest = s.flat.low.clone();
  s.flat.rounding_step = {};
  round_low(s.flat);
  check_bitwise(s.flat.low, nearest);
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
  has(broken([](State& s) { s.flat.rounding_step = zeros({}); }),
      "adamw_step: rounding_step must be i64, got f32");
  has(broken([](State& s) {
        s.flat.rounding_step = step_of(1);
        s.flat.low = zeros({8}, kF32);
      }),
      "adamw_step: low must be bf16 or f16 for stochastic rounding, got f32");
  has(broken([](State& s) {
        s.flat.rounding_step = step_of(1);
        s.flat.low = {};
      }),
      "adamw_step: low must be bf16 or f16 for stochastic rounding, got none");
  has(broken([](State& s) { s.flat.rounding_step = step_of(1); }),
      "adamw_step: stochastic rounding needs segments with the places of their parameters");
  has(
      [] {
        State s = make_state(8, {{0, 8}});
        s.flat.low = {};
        round_low(s.flat);
      },
      "round_low: low must be defined");
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
