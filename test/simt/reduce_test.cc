#include "kernels/reduce/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::ClipFactor;
using kernels::CombineNorms;
using kernels::PartialNorm;
using kernels::Sum;
using testing::check_bitwise;
using testing::check_close;
using testing::DeviceBuffer;
using testing::error_of;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

constexpr DType kDtypes[] = {kF32, kBF16, kF16};
constexpr double kInfinity = INFINITY;

// ---- sums ---------------------------------------------------------------------------------------

struct SumCase {
  DType dst_dtype = kF32, dtype = kF32;
  int64_t outer = 1, length = 100, inner = 1, offset = 0;
  bool accumulate = false;
};

std::vector<Tensor> run_sum(const SumCase& c, bool on_device) {
  const DeviceBuffer x(randn({c.outer, c.length, c.inner}, c.dtype, 1), c.offset),
      dst(randn({c.outer, c.inner}, c.dst_dtype, 2));
  Sum args{dst.data(), nullptr,  x.data(), c.dst_dtype, c.dtype,
           c.outer,    c.length, c.inner,  -0.5,        c.accumulate};
  args.num_chunks = kernels::num_sum_chunks(c.outer, c.length, c.inner,
                                            on_device ? DeviceType::kCuda : DeviceType::kCpu);
  const DeviceBuffer partials({args.num_chunks, c.outer, c.inner}, kF64);
  if (args.num_chunks > 1) args.partials = partials.as<double>();
  on_device ? kernels::cuda::sum(nullptr, args) : kernels::cpu::sum(args);
  return {dst.tensor()};
}

void check_sum(const SumCase& c) {
  INFO(fmt::format("{} <- {}, [{}, {}, {}], offset {}, accumulate {}", c.dst_dtype, c.dtype,
                   c.outer, c.length, c.inner, c.offset, c.accumulate));
  const auto expected = run_sum(c, false);
  const auto actual = run_in_all_schedules([&] { return run_sum(c, true); });
  check_close(actual[0], expected[0], tol(c.dst_dtype, c.length), "sum");
}

TEST_CASE("simt sum: any dtypes, along and across", "[reduce][simt]") {
  for (const DType dtype : kDtypes) {
    for (const DType dst : kDtypes) {
      for (const bool accumulate : {false, true}) {
        check_sum({dst, dtype, 3, 600, 1, 0, accumulate});
        check_sum({dst, dtype, 2, 70, 40, 0, accumulate});
      }
    }
  }
}

TEST_CASE("simt sum: lengths around blocks and chunks, addresses off the vectors",
          "[reduce][simt]") {
  for (const int64_t length : {0, 1, 7, 8, 255, 256, 257, 1000, 5000, 40000}) {
    check_sum({kF32, kBF16, 1, length, 1});
    check_sum({kF32, kBF16, 5, length / 3, 1});
    check_sum({kF32, kF32, 1, length, 1, 1});
  }
  for (const int64_t length : {0, 1, 9, 257, 700}) {
    for (const int64_t inner : {2, 37, 256, 264}) {
      check_sum({kF32, kBF16, 1, length, inner});
      check_sum({kBF16, kF32, 2, length, inner, 1});
    }
  }
}

TEST_CASE("simt sum: one chunk where there is no memory for more", "[reduce][simt]") {
  const DeviceBuffer x(full({5000}, 1, kBF16)), dst({1}, kF32);
  kernels::cuda::sum(nullptr, {dst.data(), nullptr, x.data(), kF32, kBF16, 1, 5000, 1});
  CHECK(*dst.as<float>() == 5000.0f);
}

TEST_CASE("simt sum: small terms are not lost in a long sum", "[reduce][simt]") {
  // 2^24 and 32768 ones: f32 alone would stay at 2^24; a block of 256 may lose its own.
  std::vector<double> values(32769, 1.0);
  values[0] = 16777216;
  const DeviceBuffer x(from_values(values, {32769}, kF32)), dst({1}, kF32);
  const DeviceBuffer partials({1024}, kF64);
  Sum args{dst.data(), partials.as<double>(), x.data(), kF32, kF32, 1, 32769, 1};
  args.num_chunks = kernels::num_sum_chunks(1, 32769, 1, DeviceType::kCuda);
  kernels::cuda::sum(nullptr, args);
  CHECK(std::abs(*dst.as<float>() - (16777216.0f + 32768.0f)) <= 256.0f);
}

TEST_CASE("simt sum: the order does not depend on the address", "[reduce][simt]") {
  SumCase c{kF32, kF32, 1, 3001, 1};
  const Tensor aligned = run_sum(c, true)[0];
  c.offset = 1;
  check_bitwise(run_sum(c, true)[0], aligned, "sum");
}

TEST_CASE("simt cumsum: along and across, both ways, any dtypes", "[reduce][simt]") {
  struct Extent {
    int64_t outer, length, inner;
  };
  for (const Extent& e : {Extent{3, 1, 1}, Extent{3, 33, 1}, Extent{2, 2500, 1}, Extent{2, 21, 40},
                          Extent{1, 8, 300}, Extent{5, 3, 2}}) {
    for (const DType dtype : kDtypes) {
      for (const bool reverse : {false, true}) {
        const DType dst = reverse ? kF32 : dtype;
        INFO(fmt::format("{} <- {}, [{}, {}, {}], reverse {}", dst, dtype, e.outer, e.length,
                         e.inner, reverse));
        const Shape shape{e.outer, e.length, e.inner};
        const DeviceBuffer x(randn(shape, dtype, 1));
        const auto run = [&](bool on_device) {
          const DeviceBuffer y(randn(shape, dst, 2));
          const kernels::Cumsum args{y.data(), x.data(), dst,     dtype,  e.outer,
                                     e.length, e.inner,  reverse, reverse};
          on_device ? kernels::cuda::cumsum(nullptr, args) : kernels::cpu::cumsum(args);
          return std::vector<Tensor>{y.tensor()};
        };
        const auto actual = run_in_all_schedules([&] { return run(true); });
        check_close(actual[0], run(false)[0], tol(dst, e.length), "cumsum");
      }
    }
  }
}

TEST_CASE("num_sum_chunks: CUDA cuts until there is work, never below a block", "[reduce][simt]") {
  const auto chunks = [](int64_t outer, int64_t length, int64_t inner) {
    return kernels::num_sum_chunks(outer, length, inner, DeviceType::kCuda);
  };
  CHECK(chunks(1, 0, 1) == 1);
  CHECK(chunks(1, 511, 1) == 1);
  CHECK(chunks(1, 1 << 30, 1) == 1024);
  CHECK(chunks(1, 8192, 4096) == 32);
  CHECK(chunks(100000, 1 << 20, 1) == 1);
  CHECK(chunks(0, 100, 0) == 1);
  CHECK(kernels::num_sum_chunks(1, 1 << 30, 1, DeviceType::kCpu) == kernels::kMaxSumChunks);
}

// ---- norms --------------------------------------------------------------------------------------

struct NormCase {
  DType dtype = kF32;
  std::vector<int64_t> segments = {0, 1, 1, 300, 512, 512, 512, 2049, 2056, 5000};
  double p = 2;
  int64_t offset = 0;
};

std::vector<Tensor> run_norm(const NormCase& c, const Tensor& values, bool on_device) {
  const DeviceBuffer x(values, c.offset), partial({1}, kF64), has_nonfinite({1}, kU8),
      chunks({kernels::kMaxNormChunks * 2}, kF64),
      segments(from_values(std::span<const int64_t>(c.segments),
                           {static_cast<int64_t>(c.segments.size())}));
  const PartialNorm args{partial.as<double>(),
                         has_nonfinite.as<uint8_t>(),
                         chunks.as<double>(),
                         x.data(),
                         segments.as<int64_t>(),
                         c.dtype,
                         values.numel(),
                         static_cast<int64_t>(c.segments.size() / 2),
                         c.p};
  on_device ? kernels::cuda::partial_norm(nullptr, args) : kernels::cpu::partial_norm(args);
  return {partial.tensor(), has_nonfinite.tensor()};
}

void check_norm(const NormCase& c, const Tensor& values) {
  INFO(fmt::format("{}, p {}, offset {}, segments {}", c.dtype, c.p, c.offset, c.segments));
  const auto expected = run_norm(c, values, false);
  const auto actual = run_in_all_schedules([&] { return run_norm(c, values, true); });
  check_bitwise(actual[1], expected[1], "has_nonfinite");
  const double e = expected[0].item(), a = actual[0].item();
  CAPTURE(e, a);
  CHECK((e == a || (std::isnan(e) && std::isnan(a)) ||
         std::abs(a - e) <= tol(kF32, 256) * std::abs(e)));
}

TEST_CASE("simt partial_norm: dtypes and powers over segments", "[reduce][simt]") {
  for (const DType dtype : kDtypes) {
    for (const double p : {1.0, 2.0, 3.0, 0.5, kInfinity}) {
      check_norm({.dtype = dtype, .p = p}, randn({5000}, dtype, 1));
      if (p == 2) check_norm({.dtype = dtype, .p = p, .offset = 1}, randn({5000}, dtype, 1));
    }
    check_norm({.dtype = dtype, .segments = {}}, randn({10}, dtype, 1));
    check_norm({.dtype = dtype, .segments = {3, 3}}, randn({10}, dtype, 1));
  }
}

TEST_CASE("simt partial_norm: more segments than lanes, more blocks than chunks",
          "[reduce][simt]") {
  NormCase c;
  c.segments.clear();
  for (int64_t i = 0; i < 100; ++i) {
    c.segments.insert(c.segments.end(), {300 * i, 300 * i + 1 + i * 2});
  }
  check_norm(c, randn({30000}, kF32, 2));
  const int64_t numel = 256 * (kernels::kMaxNormChunks + 77);
  check_norm({.dtype = kBF16, .segments = {0, 1000, 1024, numel}}, randn({numel}, kBF16, 3));
}

TEST_CASE("simt partial_norm: what overflows, vanishes or is not finite in f32", "[reduce][simt]") {
  for (const double value : {1e30, 1e-30, 3e38, 0.0, kInfinity, double(NAN)}) {
    for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
      std::vector<double> values(700, 0.5);
      values[650] = value;
      check_norm({.segments = {0, 700}, .p = p}, from_values(values, {700}, kF32));
      check_norm({.segments = {640, 660}, .p = p},
                 from_values(std::vector<double>(700, value), {700}, kF32));
    }
  }
}

TEST_CASE("simt partial_norm: padding is not read", "[reduce][simt]") {
  std::vector<double> values(900, NAN);
  for (size_t i = 10; i < 300; ++i) values[i] = 1;
  values[899] = 2;
  const auto actual =
      run_norm({.segments = {10, 300, 899, 900}}, from_values(values, {900}, kF32), true);
  CHECK(actual[0].item() == 294.0);
  CHECK(actual[1].item() == 0.0);
}

TEST_CASE("simt partial_norm: bits do not depend on the buffer around the segments",
          "[reduce][simt]") {
  const std::vector<double> values = randn({3000}, kF32, 4).to_vector();
  std::vector<double> wide(50000, 9.0);
  std::copy(values.begin(), values.end(), wide.begin() + 20225);  // at no multiple of a vector
  const auto own =
      run_norm({.segments = {0, 1000, 1024, 3000}}, from_values(values, {3000}, kF32), true);
  const auto shared =
      run_norm({.segments = {20225, 21225, 21249, 23225}}, from_values(wide, {50000}, kF32), true);
  check_bitwise(shared[0], own[0], "partial");
}

TEST_CASE("simt combine_norms: the CPU kernel's bits", "[reduce][simt]") {
  for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
    for (const int64_t count : {0, 1, 7, 2500}) {
      std::vector<double> values = randn({count}, kF32, 5).to_vector();
      for (double& v : values) v = std::abs(v) * 1.1;
      for (const bool has_nan : {false, true}) {
        if (has_nan && count > 0) values[static_cast<size_t>(count / 2)] = NAN;
        const auto run = [&](bool on_device) {
          const DeviceBuffer partials(from_values(values, {count}, kF64)), norm({1}, kF32);
          const CombineNorms args{norm.as<float>(), partials.as<double>(), count, p};
          on_device ? kernels::cuda::combine_norms(nullptr, args)
                    : kernels::cpu::combine_norms(args);
          return std::vector<Tensor>{norm.tensor()};
        };
        INFO("p " << p << ", " << count << " partials, NaN " << has_nan);
        const auto expected = run(false);
        const auto actual = run_in_all_schedules([&] { return run(true); });
        if (std::isnan(expected[0].item())) {
          CHECK(std::isnan(actual[0].item()));
        } else {
          check_bitwise(actual[0], expected[0], "norm");
        }
      }
    }
  }
}

TEST_CASE("simt clip_factor: the CPU kernel's bits", "[reduce][simt]") {
  for (const double norm : {0.0, 0.5, 1.0, 4.0, 3e38, kInfinity, double(NAN)}) {
    const auto run = [&](bool on_device) {
      const DeviceBuffer value(from_values({norm}, {1}, kF32)), factor({1}, kF32),
          found_inf({1}, kU8);
      const ClipFactor args{factor.as<float>(), found_inf.as<uint8_t>(), value.as<float>(), 1.0f};
      on_device ? kernels::cuda::clip_factor(nullptr, args) : kernels::cpu::clip_factor(args);
      return std::vector<Tensor>{factor.tensor(), found_inf.tensor()};
    };
    const auto expected = run(false), actual = run(true);
    CAPTURE(norm);
    check_bitwise(actual[0], expected[0], "factor");
    check_bitwise(actual[1], expected[1], "found_inf");
  }
}

TEST_CASE("simt checksum: the CPU kernel's bits, whatever the width", "[reduce][simt]") {
  const std::vector<int64_t> bounds = {3, 1000, 0, 1000, 1000, 7, 1024, 20001, 50};
  for (const DType dtype : {kF32, kBF16, kU8, kI64}) {
    CAPTURE(dtype);
    const Tensor x =
        is_floating(dtype) ? randn({20003}, dtype, 3) : testing::randint(0, 200, {20003}, dtype, 3);
    const auto run = [&](bool on_device) {
      const DeviceBuffer values(x), segments(from_values(std::span(bounds), {9}, kI64)),
          sums(from_values({int64_t{1}, int64_t{2}, int64_t{3}}, {3}));
      const kernels::Checksum args{sums.as<uint64_t>(),
                                   values.data(),
                                   segments.as<int64_t>(),
                                   static_cast<int64_t>(size_of(dtype)),
                                   20003,
                                   3};
      on_device ? kernels::cuda::checksum(nullptr, args) : kernels::cpu::checksum(args);
      return std::vector<Tensor>{sums.tensor()};
    };
    const auto expected = run(false), actual = run_in_all_schedules([&] { return run(true); });
    CHECK(std::memcmp(actual[0].raw_data(), expected[0].raw_data(), 24) == 0);
    CHECK(expected[0].data<int64_t>()[1] == 2);  // an empty segment adds nothing
  }
}

TEST_CASE("simt mark_nonfinite: what the CPU kernel finds, in rows of any layout",
          "[reduce][simt]") {
  struct Case {
    int64_t rows, cols;
    kernels::RowLayout layout;
    int64_t bad;  // element, or none
  };
  constexpr int64_t kNumel = 30000;
  const Case cases[] = {{1, 29999, kernels::contiguous_rows(29999), 29998},
                        {1, 29999, kernels::contiguous_rows(29999), 29999},
                        {12, 65, {3, 100, 1000}, 3264},
                        {12, 65, {3, 100, 1000}, 65},
                        {3, 9000, {1, 0, 10000}, 28999},
                        {3, 9000, {1, 0, 10000}, 9500}};
  for (const DType dtype : kDtypes) {
    for (const Case& c : cases) {
      CAPTURE(dtype, c.rows, c.bad);
      const Tensor x = randn({kNumel}, dtype, 3);
      x.narrow(0, c.bad, 1).fill_(c.bad % 2 == 0 ? -kInfinity : NAN);
      const auto run = [&](bool on_device) {
        const DeviceBuffer values(x), mark(full({1}, 2, kI32));
        const kernels::MarkNonfinite args{
            mark.as<int32_t>(), values.data(), dtype, c.rows, c.cols, c.layout, 9};
        on_device ? kernels::cuda::mark_nonfinite(nullptr, args)
                  : kernels::cpu::mark_nonfinite(args);
        return std::vector<Tensor>{mark.tensor()};
      };
      const auto expected = run(false), actual = run_in_all_schedules([&] { return run(true); });
      CHECK(actual[0].item() == expected[0].item());
      const bool is_inside = c.bad != 29999 && c.bad != 65 && c.bad != 9500;
      CHECK(expected[0].item() == (is_inside ? 9 : 2));
    }
  }
}

TEST_CASE("simt reduce: f64 is for the CPU", "[reduce][simt]") {
  kernels::cuda::cumsum(nullptr, {nullptr, nullptr, kF32, kF32, 2, 0, 1});
  CHECK_THAT(error_of([] {
               kernels::cuda::cumsum(nullptr, {nullptr, nullptr, kF32, kF64, 1, 1, 1});
             }),
             Catch::Matchers::Contains("cumsum: no CUDA kernel for dtype f64"));
  CHECK_THAT(error_of([] {
               kernels::cuda::sum(nullptr, {nullptr, nullptr, nullptr, kF32, kF64, 1, 1, 1});
             }),
             Catch::Matchers::Contains("sum: no CUDA kernel for dtype f64"));
  PartialNorm norm{};
  norm.dtype = kF64;
  CHECK_THAT(error_of([&] { kernels::cuda::partial_norm(nullptr, norm); }),
             Catch::Matchers::Contains("partial_norm: no CUDA kernel for dtype f64"));
}

TEST_CASE("simt reduce: first and last block above 2^32 bytes", "[reduce][simt]") {
  const int64_t numel = (int64_t{1} << 31) + 300;  // of bf16
  const simt::ReservedBuffer x(numel * 2);
  x.as<BFloat16>()[0] = BFloat16(3.0f);
  x.as<BFloat16>()[numel - 1] = BFloat16(4.0f);
  const DeviceBuffer dst({1}, kF32), partial({1}, kF64),
      chunks(zeros({kernels::kMaxNormChunks * 2}, kF64)), partials(zeros({1}, kF64));
  // Segments at both ends: the norm's blocks between them are not there.
  const DeviceBuffer segments(from_values({int64_t{0}, int64_t{300}, numel - 300, numel}, {4}));
  kernels::cuda::partial_norm(nullptr, {partial.as<double>(), nullptr, chunks.as<double>(),
                                        x.data(), segments.as<int64_t>(), kBF16, numel, 2, 2.0});
  CHECK(*partial.as<double>() == 25.0);
  // Rows 2^31 elements long, of which a block has 256 columns: the last ones of the second row.
  const simt::OnlyBlocks last({-1});
  const simt::ReservedBuffer sums(numel * 4);
  kernels::cuda::sum(nullptr, {sums.data(), nullptr, x.data(), kF32, kBF16, 1, 1, numel});
  CHECK(sums.as<float>()[numel - 1] == 4.0f);
}

}  // namespace
}  // namespace tessera
