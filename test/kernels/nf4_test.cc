#include "kernels/nf4/nf4.h"

#include <algorithm>
#include <cmath>

#include "core/runtime/context.h"
#include "kernels/nf4/codes.h"
#include "kernels/optimizer/dynamic_map.h"
#include "test/testing.h"

namespace tessera {
namespace {

using testing::check_bitwise;
using testing::error_of;
using testing::randn;

struct Coded {
  Tensor records, scales;
};

/// All of a tensor at once.
Coded quantize(const Tensor& values) {
  const int64_t numel = values.numel();
  const Coded coded{zeros({nf4_nbytes(numel)}, kU8), zeros({nf4_num_scales(numel)})};
  const Tensor absmax = zeros({nf4_num_blocks(numel)});
  nf4_quantize(coded.records, absmax, values);
  nf4_compress(coded.records, coded.scales, absmax, nf4_map());
  return coded;
}

Tensor dequantize(const Coded& coded, int64_t numel, DType dtype = kF32) {
  const Tensor values = zeros({numel}, dtype);
  nf4_dequantize(values, coded.records, coded.scales, nf4_map());
  return values;
}

/// The nearest of `codes` to x, the first of two.
template <class Codes>
float nearest(const Codes& codes, double x) {
  return *std::min_element(std::begin(codes), std::end(codes), [x](float a, float b) {
    return std::abs(static_cast<double>(a) - x) < std::abs(static_cast<double>(b) - x);
  });
}

TEST_CASE("nf4: values are the nearest codes times scales that are 8-bit codes themselves",
          "[nf4]") {
  const int64_t numel = 3 * 16384 + 3 * 64;
  const Tensor values = randn({numel}, kF32, 3);
  const std::vector<double> x = values.to_vector();
  std::vector<double> absmax;
  for (int64_t b = 0; b < nf4_num_blocks(numel); ++b) {
    double largest = 0;
    for (int64_t i = b * 64; i < std::min(numel, b * 64 + 64); ++i) {
      largest = std::max(largest, std::abs(x[static_cast<size_t>(i)]));
    }
    absmax.push_back(largest);
  }
  double sum = 0;
  for (const double a : absmax) sum += a;
  const double mean = static_cast<double>(static_cast<float>(sum / std::ssize(absmax)));
  std::vector<double> expected(x.size());
  const auto& map = kernels::dynamic_map(true).values;
  std::vector<float> codes;
  for (int i = 0; i < 16; ++i) codes.push_back(kernels::nf4_value(i));
  for (size_t b = 0; b < absmax.size(); ++b) {
    const size_t first = b / 256 * 256, last = std::min(first + 256, absmax.size());
    double nested = 0;
    for (size_t i = first; i < last; ++i) nested = std::max(nested, std::abs(absmax[i] - mean));
    const double scale =
        static_cast<double>(nearest(map, (absmax[b] - mean) / nested)) * nested + mean;
    for (size_t i = b * 64; i < std::min(x.size(), b * 64 + 64); ++i) {
      expected[i] = static_cast<double>(nearest(codes, x[i] / absmax[b])) * scale;
    }
  }
  const std::vector<double> actual = dequantize(quantize(values), numel).to_vector();
  for (size_t i = 0; i < expected.size(); ++i) {
    INFO(i);
    REQUIRE(std::abs(actual[i] - expected[i]) <= 1e-6);
  }
}

TEST_CASE("nf4: parts that begin at multiples of 256 have the bits of the whole", "[nf4]") {
  const int64_t numel = 16384 + 700;
  const Tensor values = randn({numel}, kF32, 4), map = nf4_map();
  const Coded whole = quantize(values);
  const Tensor absmax = zeros({nf4_num_blocks(numel)});
  const int64_t bounds[] = {0, 256, 2048, 16640, numel};
  std::vector<Tensor> parts;
  for (size_t k = 0; k + 1 < std::size(bounds); ++k) {
    const int64_t first = bounds[k], count = bounds[k + 1] - first;
    parts.push_back(zeros({nf4_nbytes(count)}, kU8));
    nf4_quantize(parts[k], absmax.narrow(0, first / 64, nf4_num_blocks(count)),
                 values.narrow(0, first, count));
  }
  for (const DType dtype : {kF32, kBF16, kF16}) {
    const Tensor expected = dequantize(whole, numel, dtype);
    for (size_t k = 0; k < parts.size(); ++k) {
      const int64_t first = bounds[k], count = bounds[k + 1] - first;
      const Tensor scales = zeros({nf4_num_scales(numel)});
      nf4_compress(parts[k], scales, absmax, map, first);
      check_bitwise(scales, whole.scales, "scales");
      const Tensor out = zeros({count}, dtype);
      nf4_dequantize(out, parts[k], scales, map, first);
      check_bitwise(out, expected.narrow(0, first, count), "values");
    }
    // One rounding, of the f32 value.
    check_bitwise(expected, dequantize(whole, numel).to(dtype), "rounded");
  }
}

TEST_CASE("nf4: numbers are the same whatever the number of threads", "[nf4]") {
  std::vector<std::vector<double>> values;
  for (const int num_threads : {1, 2}) {
    const Context::Scope scope(
        std::make_shared<Context>(ContextOptions{.device = {}, .num_threads = num_threads}));
    const Tensor x = randn({200'000}, kBF16, 5);
    values.push_back(dequantize(quantize(x), x.numel(), kBF16).to_vector());
  }
  CHECK(values[0] == values[1]);
}

TEST_CASE("nf4: blocks of zeros stay zeros, what is not finite spoils the tensor", "[nf4]") {
  Tensor values = zeros({1000});
  for (const double x : dequantize(quantize(values), 1000).to_vector()) CHECK(x == 0);
  values.narrow(0, 64, 64).fill_(0.5);  // the other scales are 0
  const std::vector<double> some = dequantize(quantize(values), 1000).to_vector();
  for (size_t i = 0; i < 960; ++i) {
    INFO(i);
    CHECK(std::abs(some[i] - (i / 64 == 1 ? 0.5 : 0)) < 0.01);
  }
  values.narrow(0, 5, 1).fill_(INFINITY);
  for (const double x : dequantize(quantize(values), 1000).to_vector()) {
    REQUIRE(std::isnan(x));
  }
}

TEST_CASE("nf4: wrong arguments are named", "[nf4]") {
  const Tensor values = zeros({300}), records = zeros({264}, kU8), absmax = zeros({5}),
               scales = zeros({2}), map = nf4_map();
  CHECK(error_of([&] {
          nf4_quantize(zeros({132}, kU8), absmax, values);
        }).starts_with("nf4_quantize: records must be [264], got [132]"));
  CHECK(error_of([&] {
          nf4_quantize(zeros({264}), absmax, values);
        }).starts_with("nf4_quantize: records must be u8, got f32"));
  CHECK(error_of([&] {
          nf4_quantize(records, zeros({4}), values);
        }).starts_with("nf4_quantize: absmax must be [5], got [4]"));
  CHECK(error_of([&] {
          nf4_quantize(records, absmax, zeros({300}, kI64));
        }).starts_with("nf4_quantize: values must be f32, bf16 or f16, got i64"));
  CHECK(error_of([&] {
          nf4_quantize(records, absmax, zeros({300, 2}).narrow(1, 0, 1));
        }).starts_with("nf4_quantize: values must be contiguous, got strides 2, 1 of [300, 1]"));
  CHECK(error_of([&] {
          nf4_compress(records, zeros({1}), absmax, map);
        }).starts_with("nf4_compress: scales must be [2], got [1]"));
  CHECK(error_of([&] {
          nf4_compress(records, scales, absmax, map, 64);
        }).starts_with("nf4_compress: the first element must be a multiple of 256, got 64"));
  CHECK(error_of([&] {
          nf4_compress(zeros({396}, kU8), scales, absmax, map);
        }).starts_with("nf4_compress: records must be [264], got [396]"));
  CHECK(error_of([&] {
          nf4_dequantize(values, records, zeros({2}, kF64), map);
        }).starts_with("nf4_dequantize: scales must be f32, got f64"));
  CHECK(error_of([&] {
          nf4_dequantize(values, records, scales, map, 16384);
        }).starts_with("nf4_dequantize: scales must be [3] or more, got [2]"));
  CHECK(error_of([&] {
          nf4_dequantize(values, records, scales, zeros({256}));
        }).starts_with("nf4_dequantize: map must be [512], got [256]"));
}

}  // namespace
}  // namespace tessera
