#include "kernels/random/random.h"

#include <set>

#include "core/recompute.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/random/kernel.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Tensors = std::vector<Tensor>;

void check_error(const std::function<void()>& f, const std::vector<std::string>& parts) {
  const std::string text = error_of(f);
  INFO(text);
  for (const std::string& part : parts) CHECK(text.find(part) != std::string::npos);
}

/// The random state of this thread for a scope.
class StateScope {
 public:
  explicit StateScope(const RandomState& state) : saved_(random_state()) { random_state() = state; }
  ~StateScope() { random_state() = saved_; }

 private:
  RandomState saved_;
};

Tensor dropout_at(const RandomState& state, const Tensor& x, double p) {
  StateScope scope(state);
  return dropout(x, p);
}

template <class F>
auto on_threads(int num_threads, F&& f) {
  Context::Scope scope(std::make_shared<Context>(
      ContextOptions{.device = {}, .num_threads = num_threads, .poison = true}));
  return f();
}

struct Moments {
  double mean, variance, skewness, kurtosis;
};

Moments moments_of(const std::vector<double>& values) {
  double mean = 0, m2 = 0, m3 = 0, m4 = 0;
  for (const double v : values) mean += v;
  mean /= static_cast<double>(values.size());
  for (const double v : values) {
    const double d = v - mean;
    m2 += d * d, m3 += d * d * d, m4 += d * d * d * d;
  }
  const double n = static_cast<double>(values.size());
  m2 /= n, m3 /= n, m4 /= n;
  return {mean, m2, m3 / std::pow(m2, 1.5), m4 / (m2 * m2)};
}

}  // namespace

// ---- dropout

TEST_CASE("dropout: each element is 0 or scaled, as the Philox word of its row and column says",
          "[random]") {
  const RandomState state{.seed = 42, .step = 7, .op_index = 3, .sample_offset = 5};
  const int64_t B = 2, T = 3, C = 1029;
  const double p = 0.3;
  const std::vector<double> y = dropout_at(state, full({B, T, C}, 1, kF64), p).to_vector();
  const PhiloxKey step_key = make_key(42, 7);
  const PhiloxKey key = make_key(uint64_t{step_key.k1} << 32 | step_key.k0, 3);
  const auto threshold = static_cast<uint32_t>(p * 0x1p32);
  std::vector<double> expected;
  for (int64_t row = 5 * T; row < 5 * T + B * T; ++row) {
    for (int64_t c = 0; c < C; ++c) {
      const auto words = philox(key, static_cast<uint64_t>(row), static_cast<uint64_t>(c) / 4);
      const bool kept = words[static_cast<size_t>(c % 4)] >= threshold;
      expected.push_back(kept ? 1 / (1 - p) : 0);
    }
  }
  CHECK(y == expected);
}

TEST_CASE("dropout: drops the asked share and keeps the mean", "[random]") {
  for (const double p : {0.1, 0.5, 0.9}) {
    const std::vector<double> y = dropout_at({.seed = 1}, full({64, 4096}, 1), p).to_vector();
    const double dropped = static_cast<double>(std::count(y.begin(), y.end(), 0.0));
    const double n = static_cast<double>(y.size());
    CHECK(std::fabs(dropped / n - p) < 4 * std::sqrt(p * (1 - p) / n));
  }
}

TEST_CASE("dropout: seed, step, op index and global sample each give another mask", "[random]") {
  const Tensor x = full({2, 3, 65}, 1, kF64);
  std::set<std::vector<double>> masks;
  masks.insert(dropout_at({.seed = 1}, x, 0.5).to_vector());
  masks.insert(dropout_at({.seed = 2}, x, 0.5).to_vector());
  masks.insert(dropout_at({.seed = 1, .step = 1}, x, 0.5).to_vector());
  masks.insert(dropout_at({.seed = 1, .op_index = 1}, x, 0.5).to_vector());
  masks.insert(dropout_at({.seed = 1, .sample_offset = 1}, x, 0.5).to_vector());
  CHECK(masks.size() == 5);
}

TEST_CASE("dropout: the mask of a sample does not depend on its batch", "[random]") {
  const Tensor x = randn({4, 3, 70}, kF32);
  const Tensor whole = dropout_at({.seed = 9, .sample_offset = 8}, x, 0.4);
  for (int64_t start : {0, 1, 2}) {
    const Tensor part = dropout_at({.seed = 9, .sample_offset = 8 + start},
                                   x.narrow(0, start, 2).contiguous(), 0.4);
    check_bitwise(part, whole.narrow(0, start, 2));
  }
  // A column slice is read in place and has the mask of its own columns.
  const Tensor slice = dropout_at({.seed = 9}, x.narrow(2, 3, 40), 0.4);
  check_bitwise(slice, dropout_at({.seed = 9}, x.narrow(2, 3, 40).contiguous(), 0.4));
  // One dimension: every element is a sample.
  const Tensor line = randn({50}, kF32);
  const Tensor all = dropout_at({.seed = 9}, line, 0.4);
  check_bitwise(dropout_at({.seed = 9, .sample_offset = 20}, line.narrow(0, 20, 30), 0.4),
                all.narrow(0, 20, 30));
}

TEST_CASE("dropout: counts the op index up, also for p = 0, which changes nothing", "[random]") {
  StateScope scope({.seed = 3});
  const Tensor x = randn({4, 5}, kF32);
  check_bitwise(dropout(x, 0), x);
  CHECK(random_state().op_index == 1);
  const Tensor a = dropout(x, 0.5), b = dropout(x, 0.5);
  CHECK(random_state().op_index == 3);
  CHECK(a.to_vector() != b.to_vector());
}

TEST_CASE("dropout: backward draws the same mask", "[random]") {
  const auto fn = [](const Tensors& t) { return dropout_at({.seed = 5}, t[0], 0.3); };
  for (const Shape& shape : {Shape{}, Shape{7}, Shape{3, 5}, Shape{2, 3, 9}}) {
    gradcheck(fn, {randn(shape, kF64).set_requires_grad(true)});
  }
  for (const DType dtype : {kF32, kBF16, kF16}) {
    Tensor x = randn({5, 1100}, dtype).set_requires_grad(true);
    const Tensor y = fn({x});
    CHECK(y.dtype() == dtype);
    check_close(y, fn({x.to(kF64)}), tol(dtype));
    const Tensor ones = full(x.shape(), 1, dtype);
    backward(y, ones);
    check_bitwise(x.grad(), fn({ones}));
    backward(fn({x}), ones);  // adds
    check_bitwise(x.grad(), scale(fn({ones}), 2));
  }
  gradcheck(
      [](const Tensors& t) {
        const int64_t sizes[] = {3, 4};  // into a slice of a packed gradient
        return dropout_at({.seed = 5}, split(t[0], sizes)[1], 0.5);
      },
      {randn({4, 7}, kF64).set_requires_grad(true)});
}

TEST_CASE("dropout: recomputation draws the same mask", "[random]") {
  Tensor x = randn({6, 33}, kF64).set_requires_grad(true);
  const auto block = [](const Tensors& t) { return mul(dropout(t[0], 0.5), t[0]); };
  StateScope scope({.seed = 8});
  const Tensor direct = block({x});
  backward(direct, full(x.shape(), 1, kF64));
  const Tensor expected = x.grad();
  x.zero_grad();
  random_state().op_index = 0;
  const Tensor again = recompute(block, {x});
  check_bitwise(again, direct);
  backward(again, full(x.shape(), 1, kF64));
  check_bitwise(x.grad(), expected);
}

TEST_CASE("dropout, fill_normal: results do not depend on the number of threads", "[random]") {
  const auto masked = [] {
    return dropout_at({.seed = 4}, full({301, 555}, 1, kBF16), 0.5).to_vector();
  };
  CHECK(on_threads(1, masked) == on_threads(2, masked));
  const auto filled = [] {
    const Tensor x = empty({200003});
    fill_normal(x, 0, 1, make_key(1, 2), 13);
    return x.to_vector();
  };
  CHECK(on_threads(1, filled) == on_threads(2, filled));
}

// ---- fills

TEST_CASE("fill_normal: moments and tails of the normal distribution", "[random]") {
  const Tensor x = empty({1 << 20});
  fill_normal(x, 0, 1, make_key(3, 0));
  const std::vector<double> values = x.to_vector();
  const Moments m = moments_of(values);
  const double n = static_cast<double>(values.size());
  CHECK(std::fabs(m.mean) < 4 / std::sqrt(n));
  CHECK(std::fabs(m.variance - 1) < 4 * std::sqrt(2 / n));
  CHECK(std::fabs(m.skewness) < 4 * std::sqrt(6 / n));
  CHECK(std::fabs(m.kurtosis - 3) < 4 * std::sqrt(24 / n));
  for (const double limit : {0.5, 1.0, 2.0, 3.0}) {
    const double expected = std::erfc(limit / std::sqrt(2.0));
    const double beyond = static_cast<double>(std::count_if(
        values.begin(), values.end(), [limit](double v) { return std::fabs(v) > limit; }));
    CHECK(std::fabs(beyond / n - expected) < 4 * std::sqrt(expected / n));
  }
  // Neighbours share a Philox block, but nothing else.
  for (const size_t lag : {size_t{1}, size_t{2}, size_t{3}, size_t{4}}) {
    double product = 0;
    for (size_t i = lag; i < values.size(); ++i) product += values[i] * values[i - lag];
    CHECK(std::fabs(product / n) < 4 / std::sqrt(n));
  }
}

TEST_CASE("fill_normal: equals Box-Muller in f64 to f32 precision", "[random]") {
  const PhiloxKey key = make_key(77, 1);
  const int64_t count = 100000;
  const Tensor x = empty({count});
  fill_normal(x, 0, 1, key);
  std::vector<double> expected;
  for (uint64_t block = 0; block < static_cast<uint64_t>(count) / 4; ++block) {
    const auto words = philox(key, 0, block);
    for (const size_t pair : {0, 2}) {
      const double u = static_cast<double>((words[pair] >> 8) + 1) * 0x1p-24;
      const double angle = 2 * M_PI * static_cast<double>(words[pair + 1] >> 8) * 0x1p-24;
      const double radius = std::sqrt(-2 * std::log(u));
      expected.push_back(radius * std::cos(angle));
      expected.push_back(radius * std::sin(angle));
    }
  }
  check_close(x.to_vector(), expected, 3e-7);
}

TEST_CASE("fill_normal, fill_uniform: any cut of the sequence gives the same values", "[random]") {
  const PhiloxKey key = make_key(11, 12);
  const int64_t far = (int64_t{1} << 40) + 3;  // block counters beyond 32 bits
  for (const int64_t start : {int64_t{0}, far}) {
    for (const bool is_normal : {true, false}) {
      const auto fill = [&](const Tensor& x, int64_t first) {
        if (is_normal) {
          fill_normal(x, 0.5, 2, key, first);
        } else {
          fill_uniform(x, -1, 3, key, first);
        }
      };
      const Tensor whole = empty({500});
      fill(whole, start);
      const Tensor pieces = empty({500});
      int64_t at = 0;
      for (const int64_t length : {1, 2, 3, 5, 7, 60, 64, 65, 128, 100, 65}) {
        fill(pieces.narrow(0, at, length), start + at);
        at += length;
      }
      REQUIRE(at == 500);
      check_bitwise(pieces, whole);
    }
  }
}

TEST_CASE("fill_normal: mean, stddev and dtypes", "[random]") {
  const PhiloxKey key = make_key(1, 1);
  const Tensor z = empty({1000}, kF64);
  fill_normal(z, 0, 1, key);
  std::vector<double> expected = z.to_vector();
  for (double& v : expected) v = 3 + 0.02 * v;
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    const Tensor x = empty({10, 100}, dtype);
    fill_normal(x, 3, 0.02, key);
    // f64 from the same f32 numbers; bf16 keeps 8 bits of 3.
    check_close(x.to_vector(), expected, dtype == kF64 ? 1e-15 : tol(dtype));
  }
  const Tensor constant = empty({9});
  fill_normal(constant, 4, 0, key);
  check_close(constant.to_vector(), std::vector<double>(9, 4), 0);
}

TEST_CASE("fill_uniform: range and moments", "[random]") {
  const Tensor x = empty({1 << 18});
  fill_uniform(x, -2, 6, make_key(5, 6));
  const std::vector<double> values = x.to_vector();
  const Moments m = moments_of(values);
  const double n = static_cast<double>(values.size());
  CHECK(std::fabs(m.mean - 2) < 4 * 8 / std::sqrt(12 * n));
  CHECK(m.variance == Approx(64.0 / 12).epsilon(0.01));
  CHECK(*std::min_element(values.begin(), values.end()) >= -2);
  CHECK(*std::max_element(values.begin(), values.end()) <= 6);
}

TEST_CASE("fill_normal: is an in-place change", "[random]") {
  Tensor x = randn({4}, kF64).set_requires_grad(true);
  const Tensor y = mul(x, x);
  fill_normal(x, 0, 1, make_key(1, 1));
  check_error([&] { backward(y, full({4}, 1, kF64)); }, {"mul: ", "changed in place"});
}

TEST_CASE("random: errors and costs", "[random]") {
  const Tensor x = full({2, 4}, 1), integers = full({2}, 1, kI32);
  check_error([&] { dropout(x, 1); }, {"dropout: p must be in [0, 1), got 1"});
  check_error([&] { dropout(x, -0.1); }, {"dropout: p must be in [0, 1), got -0.1"});
  check_error([&] { dropout(x, NAN); }, {"dropout: p must be in [0, 1), got nan"});
  check_error([&] { dropout(integers, 0.1); }, {"dropout: expected a floating dtype, got i32"});
  check_error([&] { fill_normal(x.transpose(0, 1), 0, 1, {}); },
              {"fill_normal: x must be contiguous, got [4, 2] with strides [1, 4]"});
  check_error([&] { fill_normal(integers, 0, 1, {}); },
              {"fill_normal: expected a floating dtype, got i32"});
  check_error([&] { fill_uniform(x, 0, 1, {}, -1); },
              {"fill_uniform: first_element must be >= 0, got -1"});
  CHECK(dropout(empty({0, 3}), 0.5).numel() == 0);
  fill_normal(empty({0}), 0, 1, {});

  float dummy[1];
  const kernels::Dropout mask{.y = dummy,
                              .x = dummy,
                              .y_dtype = kF32,
                              .dtype = kBF16,
                              .key = {},
                              .threshold = 0,
                              .factor = 1,
                              .first_row = 0,
                              .rows = 4,
                              .cols = 8,
                              .y_stride = 8,
                              .x_stride = 8};
  CHECK(mask.cost().bytes_read() == 64);
  CHECK(mask.cost().bytes_written() == 128);
  CHECK(mask.cost().flops() == 32 * 16);
  const kernels::FillNormal normal{dummy, kBF16, {}, 0, 100, 0, 1};
  CHECK(normal.cost().bytes() == 200);
  const kernels::FillUniform uniform{dummy, kF32, {}, 0, 100, 0, 1};
  CHECK(uniform.cost().bytes() == 400);
}
