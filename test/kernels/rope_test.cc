#include "kernels/rope/rope.h"

#include <cmath>

#include "core/runtime/context.h"
#include "kernels/rope/kernel.h"
#include "test/testing.h"

// B batch, T time, H heads, D head width.

namespace tessera {
namespace {

using testing::check_bitwise;
using testing::check_close;
using testing::error_of;
using testing::gradcheck;
using testing::randint;
using testing::randn;
using testing::tol;

double frequency(int64_t i, int64_t rotary_dim, const RopeOptions& o) {
  const double f = std::pow(static_cast<double>(o.theta),
                            -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
  if (o.scaling == RopeScaling::kNone) return f;
  if (o.scaling == RopeScaling::kLinear) return f / o.factor;
  const double wavelength = 2 * M_PI / f, old = static_cast<double>(o.original_max_position);
  if (wavelength < old / o.high_freq_factor) return f;
  if (wavelength > old / o.low_freq_factor) return f / o.factor;
  const double smooth =
      (old / wavelength - o.low_freq_factor) / (o.high_freq_factor - o.low_freq_factor);
  return (1 - smooth) * f / o.factor + smooth * f;
}

/// The definition in f64; `direction` -1 for the inverse.
std::vector<double> reference(const Tensor& x, const std::vector<int64_t>& positions,
                              const RopeOptions& o, double direction = 1) {
  const int64_t B = x.dim(0), T = x.dim(1), H = x.dim(2), D = x.dim(3);
  const int64_t rotary_dim = o.rotary_dim == 0 ? D : o.rotary_dim, half = rotary_dim / 2;
  std::vector<double> y = x.to_vector();
  for (int64_t row = 0; row < B * T * H; ++row) {
    double* head = y.data() + row * D;
    const auto position = static_cast<double>(positions[static_cast<size_t>(row / H)]);
    for (int64_t i = 0; i < half; ++i) {
      const double angle = direction * position * frequency(i, rotary_dim, o);
      double& a = head[o.interleaved ? 2 * i : i];
      double& b = head[o.interleaved ? 2 * i + 1 : i + half];
      const double x_a = a, x_b = b;
      a = x_a * std::cos(angle) - x_b * std::sin(angle);
      b = x_b * std::cos(angle) + x_a * std::sin(angle);
    }
  }
  return y;
}

std::vector<int64_t> counted(int64_t B, int64_t T) {
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < B * T; ++i) positions.push_back(i % T);
  return positions;
}

RopeOptions llama3() {
  RopeOptions o{.theta = 500000.0f};
  o.scaling = RopeScaling::kLlama3, o.factor = 8.0f;
  return o;
}

std::vector<RopeOptions> all_options() {
  RopeOptions interleaved, partial, partial_interleaved, linear;
  interleaved.interleaved = true;
  partial.rotary_dim = 6;
  partial_interleaved.rotary_dim = 2, partial_interleaved.interleaved = true;
  linear.scaling = RopeScaling::kLinear, linear.factor = 4.0f;
  return {{}, interleaved, partial, partial_interleaved, linear, llama3()};
}

TEST_CASE("rope: forward and backward match the f64 definition", "[rope]") {
  const auto dtype = GENERATE(kF64, kF32, kBF16, kF16);
  for (const RopeOptions& o : all_options()) {
    for (const Shape& shape : {Shape{1, 1, 1, 8}, {2, 5, 3, 8}, {1, 7, 2, 10}, {3, 4, 1, 66}}) {
      Tensor x = randn(shape, dtype, 1);
      const Tensor dy = randn(shape, dtype, 2);
      const std::vector<int64_t> positions = counted(shape[0], shape[1]);
      x.set_requires_grad(true);
      const Tensor y = rope(x, {}, o);
      backward(y, dy);
      const double tolerance = dtype == kF64 ? 1e-6 : tol(dtype);  // tables are f32
      check_close(y.to_vector(), reference(x, positions, o), tolerance, "y");
      check_close(x.grad().to_vector(), reference(dy, positions, o, -1), tolerance, "dx");
    }
  }
}

TEST_CASE("rope: gradients match finite differences", "[rope]") {
  for (const RopeOptions& o : all_options()) {
    Tensor x = randn({2, 3, 2, 8}, kF64, 1);
    x.set_requires_grad(true);
    gradcheck([&](const auto& in) { return rope(in[0], {}, o); }, {x});
  }
}

TEST_CASE("rope: angles are exact at every position, whatever the dtype", "[rope]") {
  for (const RopeOptions& o : {RopeOptions{}, RopeOptions{.theta = 500000.0f}, llama3()}) {
    const int64_t D = 128, num_positions = 131072;
    const Tensor table = rope_table(num_positions, D, o);
    CHECK(table.shape() == Shape{num_positions, 2, D / 2});
    const auto* values = table.data<float>();
    current_stream().synchronize();
    double worst = 0;
    for (int64_t position = 0; position < num_positions; position += 13) {
      for (int64_t i = 0; i < D / 2; i += 3) {
        const double angle = static_cast<double>(position) * frequency(i, D, o);
        const float* row = values + position * D;
        worst = std::max({worst, std::fabs(row[i] - std::cos(angle)),
                          std::fabs(row[D / 2 + i] - std::sin(angle))});
      }
    }
    CHECK(worst < 1e-6);
  }
  // The fastest frequency at the largest and the smallest position.
  const std::vector<int32_t> extreme{2147483647, -2147483647 - 1, -7, 131071};
  const Tensor table = rope_table(from_values(std::span<const int32_t>(extreme), {4}), 2);
  std::vector<double> expected;
  for (const int32_t p : extreme) {
    expected.push_back(std::cos(static_cast<double>(p)));
    expected.push_back(std::sin(static_cast<double>(p)));
  }
  check_close(table.to_vector(), expected, 1e-6);
}

TEST_CASE("rope: positions by time, by batch and time, and through a table", "[rope]") {
  const Tensor x = randn({3, 4, 2, 8}, kF32, 1);
  const Tensor by_time = randint(0, 100000, {4}, kI32, 2), both = randint(0, 9000, {3, 4}, kI32, 3);
  std::vector<int64_t> repeated, all = both.to_vector_of<int64_t>();
  for (int b = 0; b < 3; ++b) {
    for (const int64_t p : by_time.to_vector_of<int64_t>()) repeated.push_back(p);
  }
  check_close(rope(x, by_time).to_vector(), reference(x, repeated, {}), tol(kF32), "[T]");
  check_close(rope(x, both).to_vector(), reference(x, all, {}), tol(kF32), "[B, T]");
  check_bitwise(rope_with_table(x, rope_table(by_time, 8)), rope(x, by_time));
  check_bitwise(rope_with_table(x, rope_table(both, 8)), rope(x, both));
  check_bitwise(rope_with_table(x, rope_table(50, 8)), rope(x));  // a longer table
}

TEST_CASE("rope: heads of a packed buffer, there and back", "[rope]") {
  const auto interleaved = GENERATE(false, true);
  RopeOptions o;
  o.rotary_dim = 6, o.interleaved = interleaved;
  Tensor packed = randn({2, 3, 7, 8}, kF32, 1);
  packed.set_requires_grad(true);
  const Tensor first = randn({2, 3, 7, 8}, kF32, 5), dy = randn({2, 3, 3, 8}, kF32, 2);
  packed.set_grad(first.clone());
  const Tensor slice = packed.narrow(2, 2, 3);
  const Tensor y = rope(slice, {}, o);
  check_bitwise(y, rope(slice.clone(), {}, o), "y");
  backward(y, dy);
  std::vector<double> expected = first.narrow(2, 2, 3).to_vector();
  const std::vector<double> dx = reference(dy, counted(2, 3), o, -1);
  for (size_t i = 0; i < dx.size(); ++i) expected[i] += dx[i];
  check_close(packed.grad().narrow(2, 2, 3).to_vector(), expected, tol(kF32), "dx");
  check_bitwise(packed.grad().narrow(2, 0, 2).clone(), first.narrow(2, 0, 2).clone(), "others");
  // Heads that are not contiguous are copied.
  const Tensor turned = randn({2, 3, 8, 4}, kF32, 3).transpose(2, 3);
  check_bitwise(rope(turned, {}, o), rope(turned.clone(), {}, o));
}

/// A leaf's gradient memory given from outside.
class FixedSink final : public GradSink {
 public:
  explicit FixedSink(GradDst destination) : destination_(std::move(destination)) {}
  GradDst destination(const Tensor&) override { return destination_; }
  void written(const Tensor&) override {}

 private:
  GradDst destination_;
};

TEST_CASE("rope: the backward writes or adds into a slice of a packed gradient", "[rope]") {
  const auto accumulate = GENERATE(false, true);
  const auto interleaved = GENERATE(false, true);
  RopeOptions o;
  o.rotary_dim = 4, o.interleaved = interleaved;
  Tensor x = randn({2, 3, 2, 8}, kF32, 1), packed = full({2, 3, 5, 8}, 3.0);
  const Tensor dy = randn({2, 3, 2, 8}, kF32, 2), view = packed.narrow(2, 1, 2);
  x.set_requires_grad(true);
  set_grad_sink(x, std::make_shared<FixedSink>(GradDst{view, accumulate}));
  backward(rope(x, {}, o), dy);
  std::vector<double> expected = reference(dy, counted(2, 3), o, -1);
  for (double& e : expected) e += accumulate ? 3 : 0;
  check_close(view.to_vector(), expected, tol(kF32), "dx");
  CHECK(packed.narrow(2, 3, 2).to_vector() == std::vector<double>(2 * 3 * 2 * 8, 3.0));
  CHECK(packed.select(2, 0).to_vector() == std::vector<double>(2 * 3 * 8, 3.0));
}

TEST_CASE("rope: the kernel may work in place, and the inverse undoes it", "[rope]") {
  const auto interleaved = GENERATE(false, true);
  RopeOptions o;
  o.interleaved = interleaved, o.rotary_dim = 6;
  const Tensor x = randn({2, 3, 2, 8}, kF32, 1), expected = rope(x, {}, o),
               table = rope_table(3, 8, o);
  Tensor memory = x.clone();
  kernels::Rope a{};
  a.y = memory.raw_data(), a.x = memory.raw_data(), a.table = table.data<float>();
  a.dtype = kF32, a.interleaved = interleaved;
  a.batch = 2, a.time = 3, a.heads = 2, a.head_dim = 8, a.rotary_dim = 6;
  for (int i = 0; i < 3; ++i) a.x_strides[i] = a.y_strides[i] = memory.strides()[i];
  kernels::rope(current_stream(), a);
  check_bitwise(memory, expected);
  a.inverse = true;
  kernels::rope(current_stream(), a);
  check_close(memory, x, tol(kF32));
}

TEST_CASE("rope: a graph holds one table for all calls with equal options", "[rope]") {
  Tensor x = randn({1, 64, 2, 8}, kF32, 1);
  x.set_requires_grad(true);
  const auto allocated = [] { return Context::current()->allocator()->stats().allocated; };
  const int64_t before = allocated(), table_nbytes = 64 * 8 * 4;
  {
    const Tensor y = rope(x), y_again = rope(x), shorter = rope(x.narrow(1, 0, 32));
    const int64_t outputs = y.nbytes() + y_again.nbytes() + shorter.nbytes();
    CHECK(allocated() - before == outputs + table_nbytes);
    const Tensor other = rope(x, {}, {.theta = 100.0f});  // its own frequencies
    check_close(other.to_vector(), reference(x, counted(1, 64), {.theta = 100.0f}), tol(kF32));
    CHECK(allocated() - before == outputs + other.nbytes() + 2 * table_nbytes);
  }
  CHECK(allocated() == before);  // nothing outlives the graph
}

TEST_CASE("rope: no positions, no batch", "[rope]") {
  for (const Shape& shape : {Shape{0, 3, 2, 8}, {2, 0, 2, 8}, {2, 3, 0, 8}}) {
    Tensor x = randn(shape, kF32, 1);
    x.set_requires_grad(true);
    const Tensor y = rope(x);
    CHECK(y.shape() == shape);
    backward(y, randn(shape, kF32, 2));
    CHECK(x.grad().shape() == shape);
  }
}

TEST_CASE("rope: the bits do not depend on the number of threads", "[rope]") {
  std::vector<Tensor> results;
  for (int threads = 1; threads <= 2; ++threads) {
    Context::Scope scope(
        std::make_shared<Context>(ContextOptions{.device = {}, .num_threads = threads}));
    Tensor x = randn({2, 301, 3, 40}, kF32, 1);
    x.set_requires_grad(true);
    const Tensor y = rope(x);
    backward(y, randn({2, 301, 3, 40}, kF32, 2));
    results.push_back(y);
    results.push_back(x.grad());
  }
  check_bitwise(results[0], results[2], "y");
  check_bitwise(results[1], results[3], "dx");
}

TEST_CASE("rope: cost counts each operand once", "[rope]") {
  std::byte memory[1];
  kernels::Rope a{};
  a.x = a.y = memory;
  const float table = 0;
  a.table = &table, a.dtype = kBF16, a.accumulate = true;
  a.batch = 2, a.time = 3, a.heads = 4, a.head_dim = 8, a.rotary_dim = 6;
  for (int64_t* strides : {a.x_strides, a.y_strides})
    strides[0] = 96, strides[1] = 32, strides[2] = 8;
  CHECK(a.cost().flops() == 3 * 2 * 3 * 4 * 6);
  CHECK(a.cost().bytes_read() == 2 * (192 * 2) + 3 * 6 * 4);
  CHECK(a.cost().bytes_written() == 192 * 2);
  kernels::RopeTable t{};
  float out = 0;
  t.table = &out, t.rows = 5, t.rotary_dim = 6;
  CHECK(t.cost().flops() == 15 * 30);
  CHECK(t.cost().bytes_written() == 120);
  CHECK(t.cost().bytes_read() == 0);
}

TEST_CASE("rope: errors name the op and what came", "[rope]") {
  const Tensor x = randn({2, 3, 4, 8});
  const auto contains = [](const std::function<void()>& f, const char* part) {
    const std::string message = error_of(f);
    INFO(message << "\nshould contain: " << part);
    CHECK(message.find(part) != std::string::npos);
  };
  const auto with = [](auto&& change) {
    RopeOptions o;
    change(o);
    return o;
  };
  contains([] { rope(randn({2, 3, 8})); }, "rope: x must be [B, T, H, D], got [2, 3, 8]");
  contains([] { rope(zeros({2, 3, 4, 8}, kI32)); }, "rope: x must be floating, got i32");
  contains([&] { rope(x, zeros({4}, kI32)); },
           "rope: positions must be [T] or [B, T] for x [2, 3, 4, 8], got [4]");
  contains([&] { rope(x, zeros({3}, kF32)); }, "rope: positions must be i32");
  contains(
      [] {
        rope_table(zeros({1, 2, 3}, kI32), 8);
      },
      "rope: positions must be [T] or [B, T], got [1, 2, 3]");
  contains([] { rope_table(-1, 8); }, "rope: the number of positions is negative: -1");
  for (const int64_t bad : {3, 10, -2}) {
    contains([&] { rope(x, {}, with([&](RopeOptions& o) { o.rotary_dim = bad; })); },
             "rope: rotary_dim must be even, from 2 to the head width 8, got ");
  }
  contains([&] { rope(x, {}, {.theta = 0.0f}); }, "rope: theta must be positive, got 0");
  contains(
      [&] {
        rope(x, {}, with([](RopeOptions& o) { o.scaling = RopeScaling::kLinear, o.factor = 0; }));
      },
      "rope: factor must be positive, got 0");
  contains(
      [&] {
        rope(x, {},
             with([](RopeOptions& o) { o.scaling = RopeScaling::kLlama3, o.low_freq_factor = 4; }));
      },
      "rope: low_freq_factor must be less than high_freq_factor, got 4 and 4");
  contains(
      [&] {
        rope(x, {}, with([](RopeOptions& o) {
               o.scaling = RopeScaling::kLlama3, o.original_max_position = 0;
             }));
      },
      "rope: original_max_position must be positive, got 0");
  contains(
      [&] {
        rope_with_table(x, zeros({2, 2, 4}));
      },
      "rope: table must be [T or more, 2, 4], with or without B, for x [2, 3, 4, 8]; got "
      "[2, 2, 4]");
  contains([&] { rope_with_table(x, zeros({3, 2, 4}, kBF16)); }, "rope: table must be f32");
}

}  // namespace
}  // namespace tessera
