#include "kernels/reduce/reduce.h"

#include <cstring>
#include <limits>

#include "core/runtime/context.h"
#include "kernels/reduce/kernel.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Tensors = std::vector<Tensor>;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

void check_error(const std::function<void()>& f, const std::vector<std::string>& parts) {
  const std::string text = error_of(f);
  INFO(text);
  for (const std::string& part : parts) CHECK(text.find(part) != std::string::npos);
}

Tensor leaf(const Shape& shape) {
  return randn(shape, kF64).set_requires_grad(true);
}

/// sum over dimension `dim` of row-major values, in f64.
std::vector<double> reference_sum(const Tensor& x, int dim) {
  const std::vector<double> values = x.to_vector();
  const int d = x.shape().wrap(dim);
  int64_t outer = 1, inner = 1;
  for (int i = 0; i < d; ++i) outer *= x.dim(i);
  for (int i = d + 1; i < x.num_dims(); ++i) inner *= x.dim(i);
  const int64_t length = x.dim(d);
  std::vector<double> sums(static_cast<size_t>(outer * inner), 0);
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t n = 0; n < length; ++n) {
      for (int64_t i = 0; i < inner; ++i) {
        sums[static_cast<size_t>(o * inner + i)] +=
            values[static_cast<size_t>((o * length + n) * inner + i)];
      }
    }
  }
  return sums;
}

template <class F>
auto on_threads(int num_threads, F&& f) {
  Context::Scope scope(std::make_shared<Context>(
      ContextOptions{.device = {}, .num_threads = num_threads, .poison = true}));
  return f();
}

Tensor all_of(const Tensor& x) {
  const Segment whole[] = {{0, x.numel()}};
  return segments_to_device(whole, x.numel());
}

struct Norm {
  double partial;
  bool has_nonfinite;
};

Norm norm_of(const Tensor& x, const Tensor& segments, double p) {
  const Tensor partial = empty({}, kF64), flag = empty({}, kU8);
  partial_norm(partial, x, segments, p, flag);
  return {partial.item(), flag.item() != 0};
}

double norm_from(const Tensor& partials, double p) {
  const Tensor norm = empty({});
  combine_norms(norm, partials, p);
  return norm.item();
}

struct Clip {
  double factor;
  bool found_inf;
};

Clip clip_of(double norm, double max_norm) {
  const Tensor factor = empty({}), found_inf = empty({}, kU8);
  clip_factor(factor, found_inf, full({}, norm), max_norm);
  return {factor.item(), found_inf.item() != 0};
}

}  // namespace

// ---- sum, mean

TEST_CASE("sum, mean: values, shapes and dtypes of results", "[reduce]") {
  const Tensor x = from_values({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, {2, 3}, kF32);
  CHECK(sum(x).item() == 21);
  CHECK(sum(x).shape() == Shape{});
  CHECK(mean(x).item() == 3.5);
  check_close(sum(x, 0).to_vector(), {5, 7, 9}, 0);
  check_close(sum(x, -1).to_vector(), {6, 15}, 0);
  check_close(mean(x, 1, true).to_vector(), {2, 5}, 0);
  CHECK(mean(x, 1, true).shape() == Shape{2, 1});
  CHECK(sum(x, 0).shape() == Shape{3});
  check_close(sum(x.transpose(0, 1), 0).to_vector(), {6, 15}, 0);
  CHECK(sum(full({4}, 2, kBF16)).dtype() == kF32);
  CHECK(sum(full({4}, 2, kF64)).dtype() == kF64);
  CHECK(sum(full({4}, 2, kBF16), 0).dtype() == kBF16);
  CHECK(sum(full({}, 7)).item() == 7);
  CHECK(sum(empty({0, 3})).item() == 0);
  check_close(sum(empty({0, 3}), 0).to_vector(), {0, 0, 0}, 0);
  CHECK(sum(empty({0, 3}), 1).numel() == 0);
}

TEST_CASE("sum: every length, width and dtype matches f64", "[reduce]") {
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    for (const Shape& shape : {Shape{1}, Shape{257}, Shape{3, 255, 5}, Shape{2, 1031, 1},
                               Shape{1, 700, 300}, Shape{70000}, Shape{5, 513, 7}}) {
      CAPTURE(name_of(dtype), fmt::format("{}", shape));
      const Tensor x = randn(shape, dtype);
      const int dim = shape.num_dims() == 1 ? 0 : 1;
      check_close(sum(x, dim).to_vector(), reference_sum(x, dim), tol(dtype, 16));
      const Tensor flat = x.view({-1});
      check_close(sum(x).to_vector(), reference_sum(flat, 0),
                  dtype == kF64 ? tol(kF64, x.numel()) : tol(kF32, 16));
    }
  }
}

TEST_CASE("sum: long sums keep their precision", "[reduce]") {
  // One f32 accumulator would be off by 1e-3 here; a bf16 one would stop at 256.
  CHECK(sum(full({(1 << 20) + 1}, 0.1)).item() ==
        Approx(((1 << 20) + 1) * static_cast<double>(0.1f)).epsilon(1e-6));
  CHECK(sum(full({100003}, 1, kBF16)).item() == 100003);
  CHECK(sum(full({100003, 3}, 1, kF16), 0).to_vector() == std::vector<double>(3, kInf));
  check_close(mean(full({100003, 3}, 1, kF16), 0).to_vector(), {1, 1, 1}, 1e-3);
}

TEST_CASE("sum, mean: backward matches finite differences", "[reduce]") {
  for (const Shape& shape : {Shape{}, Shape{1}, Shape{7}, Shape{3, 5}, Shape{2, 3, 4}}) {
    CAPTURE(fmt::format("{}", shape));
    gradcheck([](const Tensors& t) { return sum(t[0]); }, {leaf(shape)});
    gradcheck([](const Tensors& t) { return mean(t[0]); }, {leaf(shape)});
    for (int d = 0; d < shape.num_dims(); ++d) {
      gradcheck([d](const Tensors& t) { return sum(t[0], d); }, {leaf(shape)});
      gradcheck([d](const Tensors& t) { return mean(t[0], d, true); }, {leaf(shape)});
    }
  }
}

TEST_CASE("sum, mean: several dimensions at once", "[reduce]") {
  const Tensor x = randn({3, 4, 5, 2}, kF64);
  check_close(sum(x, {1, 2}), sum(sum(x, 2), 1), 1e-14);
  check_close(mean(x, {0, -1}, true), mean(mean(x, -1, true), 0, true), 1e-14);
  CHECK(sum(x, {0, 2}).shape() == Shape{4, 2});
  CHECK(mean(x, {0, 2}, true).shape() == Shape{1, 4, 1, 2});
  CHECK(sum(x, {3, 2, 1, 0}).shape() == Shape{});
  gradcheck([](const Tensors& t) { return sum(t[0], {0, 2}); }, {leaf({2, 3, 4})});
  gradcheck(
      [](const Tensors& t) {
        return mean(t[0].transpose(0, 2), {0, 1}, true);
      },
      {leaf({2, 3, 4})});
  check_error([&] { sum(x, {1, -3}); }, {"sum: dimension -3 of [3, 4, 5, 2] is named twice"});
  check_error([&] { mean(empty({2, 0}), {0, 1}); }, {"mean: there is no mean of nothing"});
}

TEST_CASE("cumsum: values, shapes and dtypes", "[reduce]") {
  const Tensor x = from_values({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, {3, 2}, kF32);
  check_close(cumsum(x, 0).to_vector(), {1, 2, 4, 6, 9, 12}, 0);
  check_close(cumsum(x, -1).to_vector(), {1, 3, 3, 7, 5, 11}, 0);
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    for (const Shape& shape : {Shape{2, 2500}, Shape{1300, 3}, Shape{2, 5, 300}, Shape{3, 0}}) {
      CAPTURE(name_of(dtype), fmt::format("{}", shape));
      const Tensor t = randn(shape, dtype), y = cumsum(t, 1 - shape.num_dims() + 1);
      CHECK(y.dtype() == dtype);
      check_close(y, cumsum(t.to(kF64), 1 - shape.num_dims() + 1), tol(dtype));
    }
  }
  // Small terms behind a large one, and a bf16 sum that would stop at 256.
  std::vector<double> values(5000, 1.0);
  values[0] = 16777216;
  CHECK(cumsum(from_values(std::span<const double>(values), {5000}, kF32), 0).to_vector()[4999] ==
        16777216 + 5000);  // 4999 to f32's even neighbour
  CHECK(cumsum(full({4096}, 1, kBF16), 0).to_vector()[4095] == 4096);
}

TEST_CASE("cumsum: backward matches finite differences", "[reduce]") {
  for (const int dim : {0, 1, 2}) {
    gradcheck([&](const Tensors& t) { return cumsum(t[0], dim); }, {leaf({3, 4, 2})});
    gradcheck([&](const Tensors& t) { return cumsum(t[0].transpose(0, 2), dim); },
              {leaf({3, 4, 2})});
  }
  CHECK_THROWS_AS(cumsum(full({2}, 1), 1), ShapeError);
  CHECK_THROWS_AS(cumsum(full({}, 1), 0), ShapeError);
  check_error([] { cumsum(full({2}, 1, kI32), 0); },
              {"cumsum: expected a floating dtype, got i32"});
}

TEST_CASE("sum: gradients add up over uses", "[reduce]") {
  Tensor x = leaf({2, 3});
  backward(sum(x));
  backward(mean(x));
  check_close(x.grad().to_vector(), std::vector<double>(6, 1 + 1.0 / 6), 1e-15);
}

TEST_CASE("sum: results do not depend on the number of threads", "[reduce]") {
  for (const DType dtype : {kF32, kBF16, kF64}) {
    for (const Shape& shape : {Shape{1, 300001, 1}, Shape{1, 3001, 97}, Shape{97, 1000, 1}}) {
      const auto f = [&] { return sum(randn(shape, dtype), 1).to_vector(); };
      CHECK(on_threads(1, f) == on_threads(2, f));
    }
  }
}

TEST_CASE("sum_to: any broadcast, factor, accumulation and destination dtype", "[reduce]") {
  const Tensor x = randn({2, 3, 4, 5}, kF32);
  for (const Shape& shape : {Shape{2, 3, 4, 5}, Shape{5}, Shape{4, 1}, Shape{3, 1, 5},
                             Shape{2, 1, 4, 1}, Shape{1, 1}, Shape{}}) {
    CAPTURE(fmt::format("{}", shape));
    Tensor expected = x.to(kF64);
    for (int d = 0; d < 4; ++d) {
      const int own = d - (4 - shape.num_dims());
      if (own < 0 || shape[own] == 1) expected = sum(expected, d, true);
    }
    std::vector<double> values = expected.to_vector();
    for (const DType dtype : {kF32, kBF16, kF64}) {
      const Tensor dst = full(shape, kNan, dtype);
      sum_to(dst, x, 1, false);
      check_close(dst.to_vector(), values, dtype == kBF16 ? tol(kBF16) : tol(kF32));
    }
    const Tensor dst = full(shape, 10, kF32);
    sum_to(dst, x, -0.5, true);
    for (double& v : values) v = 10 - 0.5 * v;
    check_close(dst.to_vector(), values, tol(kF32));
  }
  const Tensor packed = full({4, 7}, 1);
  sum_to(packed.narrow(1, 2, 5), x, 1, true);  // a strided destination
  check_close(packed.narrow(1, 0, 2).to_vector(), std::vector<double>(8, 1), 0);
  const Tensor expected = sum(sum(x.to(kF64), 0), 0);
  std::vector<double> values = expected.to_vector();
  for (double& v : values) v += 1;
  check_close(packed.narrow(1, 2, 5).to_vector(), values, tol(kF32));
}

// ---- norms

TEST_CASE("partial_norm: p = 1, 2, 3 and infinity over segments", "[reduce]") {
  const int64_t numel = 5000;
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    const Tensor x = randn({numel}, dtype);
    // What lies between the segments is never read.
    x.narrow(0, 700, 68).fill_(kNan);
    x.narrow(0, 2049, 255).fill_(1e30);
    const Segment list[] = {{0, 700}, {768, 768}, {768, 2049}, {2304, 2305}, {2560, 5000}};
    const Tensor segments = segments_to_device(list, numel);
    const std::vector<double> values = x.to_vector();
    for (const double p : {1.0, 2.0, 3.0, 0.5, kInf}) {
      double expected = 0;
      for (const Segment& s : list) {
        for (int64_t i = s.begin; i < s.end; ++i) {
          const double magnitude = std::fabs(values[static_cast<size_t>(i)]);
          expected =
              std::isinf(p) ? std::max(expected, magnitude) : expected + std::pow(magnitude, p);
        }
      }
      CAPTURE(name_of(dtype), p);
      const Norm norm = norm_of(x, segments, p);
      CHECK(norm.partial == Approx(expected).epsilon(1e-6));
      CHECK(!norm.has_nonfinite);
    }
  }
}

TEST_CASE("partial_norm: no elements give 0", "[reduce]") {
  const Tensor none = segments_to_device({}, 100);
  for (const double p : {1.0, 2.0, kInf}) {
    CHECK(norm_of(full({100}, kNan), none, p).partial == 0);
    CHECK(!norm_of(full({100}, kNan), none, p).has_nonfinite);
    CHECK(norm_of(empty({0}), segments_to_device({}, 0), p).partial == 0);
  }
}

TEST_CASE("partial_norm: one inf or NaN anywhere is found by its bits", "[reduce]") {
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    for (const int64_t position : {0, 255, 256, 1029}) {
      for (const double bad : {kInf, -kInf, kNan}) {
        for (const double p : {1.0, 2.0, 3.0, kInf}) {
          CAPTURE(name_of(dtype), position, bad, p);
          const Tensor x = full({1030}, 0.5, dtype);
          x.narrow(0, position, 1).fill_(bad);
          const Norm norm = norm_of(x, all_of(x), p);
          CHECK(norm.has_nonfinite);
          CHECK((std::isnan(bad) ? std::isnan(norm.partial) : norm.partial == kInf));
        }
      }
    }
  }
}

TEST_CASE("partial_norm: huge and tiny elements neither overflow nor vanish", "[reduce]") {
  for (const DType dtype : {kF32, kBF16}) {
    for (const double magnitude : {1e30, 1e-30}) {
      const Tensor x = full({300}, magnitude, dtype);
      const double value = x.to_vector()[0];
      const Norm norm = norm_of(x, all_of(x), 2);
      CHECK(norm.partial == Approx(300 * value * value).epsilon(1e-12));
      CHECK(!norm.has_nonfinite);
    }
  }
  // Subnormal numbers are not zero either.
  const Tensor x = full({3}, 1e-42);
  CHECK(norm_of(x, all_of(x), kInf).partial == static_cast<double>(1e-42f));
}

TEST_CASE("partial_norm: the same bits on any number of threads", "[reduce]") {
  for (const double p : {1.0, 2.0, kInf}) {
    const auto f = [p] {
      const Tensor x = randn({300007}, kF32);
      const Segment list[] = {{0, 1000}, {1024, 150001}, {150016, 300007}};
      return norm_of(x, segments_to_device(list, x.numel()), p).partial;
    };
    CHECK(on_threads(1, f) == on_threads(2, f));
  }
}

TEST_CASE("combine_norms: partials are added in order and the root is taken", "[reduce]") {
  CHECK(norm_from(from_values({9.0, 16.0}, {2}, kF64), 2) == 5);
  CHECK(norm_from(from_values({1.5, 2.0}, {2}, kF64), 1) == 3.5);
  CHECK(norm_from(from_values({1.5, 4.0, 2.0}, {3}, kF64), kInf) == 4);
  CHECK(norm_from(from_values({20.0, 7.0}, {2}, kF64), 3) == Approx(3));
  CHECK(norm_from(empty({0}, kF64), 2) == 0);
  for (const double p : {1.0, 2.0, kInf}) {
    CHECK(std::isnan(norm_from(from_values({1.0, kNan, 2.0}, {3}, kF64), p)));
    CHECK(norm_from(from_values({1.0, kInf, 2.0}, {3}, kF64), p) == kInf);
  }
  CHECK(norm_from(from_values({1e200}, {1}, kF64), 1) == kInf);  // beyond f32
}

TEST_CASE("partial_norm: powers beyond f64 are refused, the largest allowed one is right",
          "[reduce]") {
  const Tensor x = full({4}, 1e-18), partial = empty({1}, kF64), norm = empty({1});
  const Segment whole{0, 4};
  const Tensor segments = segments_to_device({&whole, 1}, 4);
  CHECK(testing::error_of([&] {
          partial_norm(partial, x, segments, 1000);
        }).starts_with("partial_norm: p must be > 0 and at most 16, or infinity, got 1000"));
  for (const double value : {1e-18, 1e18}) {
    partial_norm(partial, full({4}, value), segments, kMaxNormPower);
    combine_norms(norm, partial, kMaxNormPower);
    CHECK(std::abs(norm.item() / (value * std::pow(4.0, 1.0 / 16)) - 1) < 1e-5);
  }
}

TEST_CASE("clip_factor: scales down only what is too long, flags what is not finite", "[reduce]") {
  CHECK(clip_of(5, 1).factor == Approx(0.2).epsilon(1e-6));
  CHECK(clip_of(0.5, 1).factor == 1);
  CHECK(clip_of(0, 1).factor == 1);
  CHECK(clip_of(1e30, kInf).factor == 1);
  CHECK(!clip_of(5, 1).found_inf);
  for (const double bad : {kInf, kNan}) {
    CHECK(clip_of(bad, 1).found_inf);
    CHECK(clip_of(bad, 1).factor == 0);
    CHECK(clip_of(bad, kInf).factor == 0);
  }
}

TEST_CASE("reduce: errors name the op and what came", "[reduce]") {
  const Tensor f = full({4}, 1), one = empty({}, kF64), integers = full({2, 2}, 1, kI32);
  check_error([&] { sum(integers); }, {"sum: expected a floating dtype, got i32"});
  check_error([&] { mean(integers, 0); }, {"mean: expected a floating dtype, got i32"});
  check_error([&] { mean(empty({0, 2})); }, {"mean: there is no mean of nothing, got [0, 2]"});
  CHECK_THROWS_AS(sum(f, 1), ShapeError);
  check_error([&] { sum_to(full({3}, 0), f); }, {"sum_to", "[3]", "[4]"});
  check_error([&] { sum_to(full({2, 4}, 0), f); }, {"sum_to: dst [2, 4] must broadcast"});

  const Segment outside[] = {{0, 2}, {3, 5}}, backwards[] = {{2, 1}}, overlap[] = {{0, 3}, {2, 4}};
  check_error([&] { segments_to_device(outside, 4); },
              {"segments_to_device: segment [3, 5) must be in order and within [2, 4)"});
  check_error([&] { segments_to_device(backwards, 4); }, {"segment [2, 1)"});
  check_error([&] { segments_to_device(overlap, 4); }, {"segment [2, 4)", "within [3, 4)"});

  const Tensor segments = all_of(f);
  check_error([&] { partial_norm(one, f, segments, 0); },
              {"partial_norm: p must be > 0 and at most 16, or infinity, got 0"});
  check_error([&] { partial_norm(one, f, segments, kNan); }, {"partial_norm: p must be > 0"});
  check_error([&] { partial_norm(f, f, segments, 2); },
              {"partial_norm: partial must be f64, got f32"});
  check_error([&] { partial_norm(empty({2}, kF64), f, segments, 2); },
              {"partial_norm: partial must have one element, got [2]"});
  check_error(
      [&] {
        partial_norm(one, full({2, 2}, 1), segments, 2);
      },
      {"partial_norm: x must be flat and contiguous, got [2, 2]"});
  check_error([&] { partial_norm(one, integers, segments, 2); },
              {"partial_norm: expected a floating dtype, got i32"});
  check_error([&] { partial_norm(one, f, f, 2); }, {"partial_norm: segments must be i64"});
  check_error([&] { partial_norm(one, f, full({3}, 0, kI64), 2); },
              {"partial_norm: segments must be [num_segments, 2], got [3]"});
  check_error([&] { partial_norm(one, f, segments, 2, f); },
              {"partial_norm: has_nonfinite must be u8, got f32"});
  check_error([&] { combine_norms(one, one, 2); }, {"combine_norms: norm must be f32, got f64"});
  check_error([&] { combine_norms(empty({}), f, 2); }, {"combine_norms: partials must be f64"});
  check_error([&] { combine_norms(empty({}), one, -1); }, {"combine_norms: p must be > 0, got -1"});
  check_error([&] { clip_factor(empty({}), empty({}, kU8), empty({}), 0); },
              {"clip_factor: max_norm must be > 0, got 0"});
  check_error([&] { clip_factor(empty({}), empty({}), empty({}), 1); },
              {"clip_factor: found_inf must be u8, got f32"});
}

TEST_CASE("reduce: costs", "[reduce]") {
  float dummy[1];
  double doubles[1];
  const kernels::Sum small{dummy, nullptr, dummy, kF32, kBF16, 2, 100, 3, 1, true};
  CHECK(small.cost().flops() == 600);
  CHECK(small.cost().bytes_read() == 600 * 2 + 6 * 4);
  CHECK(small.cost().bytes_written() == 6 * 4);
  const kernels::Cumsum scan{dummy, dummy, kF32, kBF16, 2, 100, 3, false, true};
  CHECK(scan.cost().flops() == 600);
  CHECK(scan.cost().bytes_read() == 600 * 2 + 600 * 4);
  CHECK(scan.cost().bytes_written() == 600 * 4);
  const kernels::PartialNorm norm{doubles, nullptr, doubles, dummy, nullptr, kF32, 1000, 0, 2};
  CHECK(norm.cost().flops() == 2000);
  CHECK(norm.cost().bytes_read() == 4000);
  const kernels::CombineNorms combine{dummy, doubles, 7, 2};
  CHECK(combine.cost().bytes_read() == 56);
  unsigned char flag[1];
  const kernels::ClipFactor clip{dummy, flag, dummy + 0, 1};
  CHECK(clip.cost().bytes() == 9);
}

namespace {

/// The definition, from the bytes of a tensor's elements [begin, end).
template <class T>
uint64_t reference_checksum(const Tensor& x, int64_t begin, int64_t end, int64_t offset) {
  uint64_t total = 0;
  for (int64_t i = begin; i < end; ++i) {
    T bits = 0;
    std::memcpy(&bits, static_cast<const char*>(x.raw_data()) + i * int64_t{sizeof(T)}, sizeof(T));
    const uint32_t weight = (static_cast<uint32_t>(offset + i - begin) + 1) * 0x9e3779b1u | 1u;
    total += static_cast<uint64_t>(bits) * weight;
  }
  return total;
}

std::vector<uint64_t> checksums(const Tensor& x, const std::vector<int64_t>& segments) {
  const auto count = static_cast<int64_t>(segments.size() / 3);
  const Tensor sums = zeros({count}, kI64);
  add_checksums(sums, x, from_values(std::span<const int64_t>(segments), {count, 3}, kI64));
  current_stream().synchronize();
  const auto* data = reinterpret_cast<const uint64_t*>(sums.data<int64_t>());
  return {data, data + count};
}

}  // namespace

TEST_CASE("add_checksums: the definition, for every width of elements", "[reduce]") {
  const std::vector<int64_t> segments = {3, 1000, 0, 1000, 1000, 7, 1024, 100001, 50};
  for (const DType dtype : {kF32, kBF16, kF16, kF64, kU8, kI32}) {
    CAPTURE(dtype);
    const Tensor x =
        is_floating(dtype) ? randn({100003}, dtype, 3) : randint(0, 200, {100003}, dtype, 3);
    const auto sums = checksums(x, segments);
    for (size_t s = 0; s < sums.size(); ++s) {
      const int64_t begin = segments[3 * s], end = segments[3 * s + 1],
                    offset = segments[3 * s + 2];
      CHECK(sums[s] == (size_of(dtype) == 1   ? reference_checksum<uint8_t>(x, begin, end, offset)
                        : size_of(dtype) == 2 ? reference_checksum<uint16_t>(x, begin, end, offset)
                        : size_of(dtype) == 4
                            ? reference_checksum<uint32_t>(x, begin, end, offset)
                            : reference_checksum<uint64_t>(x, begin, end, offset)));
    }
  }
}

TEST_CASE("add_checksums: every flipped bit is seen, padding is not", "[reduce]") {
  for (const DType dtype : {kF32, kBF16, kU8, kF64}) {
    const Tensor x = zeros({301}, dtype);
    current_stream().synchronize();
    const uint64_t before = checksums(x, {1, 300, 0})[0];
    const auto num_bits = static_cast<int>(8 * size_of(dtype));
    for (const int64_t i : {1, 2, 150, 299}) {
      for (int b = 0; b < num_bits; ++b) {
        auto* byte = static_cast<unsigned char*>(x.raw_data()) + i * num_bits / 8 + b / 8;
        *byte = static_cast<unsigned char>(*byte ^ 1u << b % 8);
        CHECK(checksums(x, {1, 300, 0})[0] != before);
        *byte = static_cast<unsigned char>(*byte ^ 1u << b % 8);
      }
    }
    static_cast<unsigned char*>(x.raw_data())[0] = 1;
    static_cast<unsigned char*>(x.raw_data())[300 * num_bits / 8] = 1;
    CHECK(checksums(x, {1, 300, 0})[0] == before);
  }
}

TEST_CASE("add_checksums: parts add up to the whole, on any number of threads", "[reduce]") {
  const Tensor x = randn({200000}, kF32, 4);
  const uint64_t whole = checksums(x, {0, 200000, 0})[0];
  const auto parts = checksums(x, {0, 77777, 0, 77777, 150000, 77777, 150000, 200000, 150000});
  CHECK(parts[0] + parts[1] + parts[2] == whole);
  const auto context = std::make_shared<Context>(ContextOptions{.num_threads = 3});
  const Context::Scope scope(context);
  CHECK(checksums(x, {0, 200000, 0})[0] == whole);
}

TEST_CASE("mark_nonfinite: one element is enough, of any dtype, wherever it is", "[reduce]") {
  const double kBad[] = {INFINITY, -INFINITY, NAN};
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    CAPTURE(dtype);
    const Tensor mark = full({1}, 3, kI32), x = full({100003}, -60000.0, dtype);
    mark_nonfinite(mark, x, 7);
    CHECK(mark.item() == 3);
    for (const int64_t at : {int64_t{0}, int64_t{31}, int64_t{50000}, int64_t{100002}}) {
      mark.narrow(0, 0, 1).fill_(3);
      x.narrow(0, at, 1).fill_(kBad[at % 3]);
      mark_nonfinite(mark, x, 7);
      CHECK(mark.item() == 7);
      mark_nonfinite(mark, x, 5);
      CHECK(mark.item() == 7);
      x.narrow(0, at, 1).fill_(1);
    }
  }
}

TEST_CASE("mark_nonfinite: of a slice its own elements only", "[reduce]") {
  const Tensor mark = zeros({1}, kI32), x = zeros({5, 3, 16});
  x.narrow(2, 8, 8).fill_(NAN);
  mark_nonfinite(mark, x.narrow(2, 0, 8), 1);
  CHECK(mark.item() == 0);
  mark_nonfinite(mark, x.narrow(2, 1, 8), 1);
  CHECK(mark.item() == 1);
  check_error([&] { mark_nonfinite(mark, x.transpose(1, 2), 1); },
              {"mark_nonfinite: x must be contiguous or rows of two strides, got [5, 16, 3]"});
  check_error([&] { mark_nonfinite(mark, mark, 1); },
              {"mark_nonfinite: expected a floating dtype, got i32"});
  check_error([&] { mark_nonfinite(zeros({1}), x, 1); }, {"mark_nonfinite: mark"});
}

TEST_CASE("add_checksums: what does not fit is named", "[reduce]") {
  const Tensor x = zeros({8}, kF32), sums = zeros({2}, kI64), segments = zeros({2, 3}, kI64);
  check_error(
      [&] {
        add_checksums(sums, zeros({2, 4}, kF32), segments);
      },
      {"add_checksums: x must be flat and contiguous, got [2, 4]"});
  check_error([&] { add_checksums(zeros({2}, kF32), x, segments); },
              {"add_checksums: sums and segments must be i64, got f32 and i64"});
  check_error(
      [&] {
        add_checksums(sums, x, zeros({2, 2}, kI64));
      },
      {"add_checksums: segments must be [num_segments, 3], got [2, 2]"});
  check_error([&] { add_checksums(zeros({3}, kI64), x, segments); },
              {"add_checksums: expected a sum of each of the 2 segments, got [3]"});
}
