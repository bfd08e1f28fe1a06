#include "kernels/random/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::Dropout;
using kernels::FillNormal;
using kernels::FillUniform;
using testing::check_bitwise;
using testing::check_close;
using testing::DeviceBuffer;
using testing::error_of;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

constexpr DType kDtypes[] = {kF32, kBF16, kF16};

struct DropoutCase {
  DType y_dtype = kF32, dtype = kF32;
  int64_t rows = 5, cols = 64, y_stride = 64, x_stride = 64, offset = 0;
  bool accumulate = false;
  int64_t first_row = 7;
};

void check_dropout(const DropoutCase& c) {
  INFO(fmt::format("{} <- {}, {} x {}, strides {} {}, offset {}, accumulate {}", c.y_dtype, c.dtype,
                   c.rows, c.cols, c.y_stride, c.x_stride, c.offset, c.accumulate));
  const auto span = [&](int64_t stride) { return (c.rows - 1) * stride + c.cols; };
  const DeviceBuffer x(randn({span(c.x_stride)}, c.dtype, 1), c.offset);
  const auto run = [&](bool on_device) {
    const DeviceBuffer y(randn({span(c.y_stride)}, c.y_dtype, 2), c.offset);
    const Dropout args{y.data(),   x.data(),   c.y_dtype,   c.dtype, {123, 456},
                       1u << 30,   4.0 / 3.0,  c.first_row, c.rows,  c.cols,
                       c.y_stride, c.x_stride, c.accumulate};
    on_device ? kernels::cuda::dropout(nullptr, args) : kernels::cpu::dropout(args);
    return std::vector<Tensor>{y.tensor()};
  };
  const auto expected = run(false);
  const auto actual = run_in_all_schedules([&] { return run(true); });
  if (c.accumulate) {  // one multiplication and one addition, which may be fused
    check_close(actual[0], expected[0], tol(c.y_dtype), "y");
  } else {
    check_bitwise(actual[0], expected[0], "y");
  }
}

TEST_CASE("simt dropout: the CPU kernel's mask and values, in any dtype and layout",
          "[random][simt]") {
  for (const DType dtype : kDtypes) {
    for (const DType y_dtype : kDtypes) {
      check_dropout({.y_dtype = y_dtype, .dtype = dtype});
      check_dropout({.y_dtype = y_dtype, .dtype = dtype, .accumulate = true});
    }
    check_dropout({.y_dtype = dtype, .dtype = dtype, .y_stride = 72, .x_stride = 192});
    check_dropout({.y_dtype = dtype, .dtype = dtype, .cols = 37, .y_stride = 41, .x_stride = 39});
    check_dropout(
        {.y_dtype = dtype, .dtype = dtype, .rows = 300, .cols = 1, .y_stride = 1, .x_stride = 1});
    check_dropout({.y_dtype = dtype, .dtype = dtype, .offset = 1});
  }
}

TEST_CASE("simt dropout: rows count beyond 32 bits", "[random][simt]") {
  check_dropout({.first_row = (int64_t{1} << 32) - 2});
}

/// Any piece of the sequence, aligned and not.
template <class Args, class Check>
void check_fill(void (*cpu)(const Args&), void (*cuda)(CUstream_st*, const Args&), Check check) {
  for (const DType dtype : kDtypes) {
    for (const int64_t first : {int64_t{0}, int64_t{3}, int64_t{64}, (int64_t{1} << 34) + 5}) {
      for (const int64_t numel : {1, 8, 61, 4099}) {
        for (const int64_t offset : {0, 1}) {
          INFO(fmt::format("{}, first {}, numel {}, offset {}", dtype, first, numel, offset));
          const auto run = [&](auto fn) {
            const DeviceBuffer x({numel}, dtype, offset);
            fn(Args{x.data(), dtype, {123, 456}, first, numel, -0.5, 1.5});
            return std::vector<Tensor>{x.tensor()};
          };
          const auto expected = run(cpu);
          const auto actual = run_in_all_schedules(
              [&] { return run([&](const Args& args) { cuda(nullptr, args); }); });
          check(actual[0], expected[0]);
        }
      }
    }
  }
}

TEST_CASE("simt fill_uniform: the numbers of the CPU kernel", "[random][simt]") {
  // One multiplication and one addition, which the CPU's compiler may fuse.
  check_fill<FillUniform>(kernels::cpu::fill_uniform, kernels::cuda::fill_uniform,
                          [](const Tensor& actual, const Tensor& expected) {
                            check_close(actual, expected, tol(expected.dtype()) / 4, "uniform");
                          });
}

TEST_CASE("simt fill_uniform: bitwise without an offset", "[random][simt]") {
  for (const DType dtype : kDtypes) {
    const auto run = [&](auto fn) {
      const DeviceBuffer x({1000}, dtype);
      fn(FillUniform{x.data(), dtype, {1, 2}, 9, 1000, 0, 1});
      return x.tensor();
    };
    check_bitwise(run([](const FillUniform& a) { kernels::cuda::fill_uniform(nullptr, a); }),
                  run([](const FillUniform& a) { kernels::cpu::fill_uniform(a); }), "uniform");
  }
}

TEST_CASE("simt fill_normal: the numbers of the CPU kernel up to rounding", "[random][simt]") {
  check_fill<FillNormal>(kernels::cpu::fill_normal, kernels::cuda::fill_normal,
                         [](const Tensor& actual, const Tensor& expected) {
                           check_close(actual, expected, tol(expected.dtype()), "normal");
                         });
}

TEST_CASE("simt random: nothing launches nothing, f64 is refused", "[random][simt]") {
  kernels::cuda::fill_uniform(nullptr, {nullptr, kF32, {}, 0, 0, 0, 1});
  kernels::cuda::dropout(nullptr, Dropout{});
  CHECK_THAT(error_of([] {
               kernels::cuda::fill_normal(nullptr, {nullptr, kF64, {}, 0, 1, 0, 1});
             }),
             Catch::Matchers::Contains("fill_normal: no CUDA kernel for dtype f64"));
}

TEST_CASE("simt random: rows of more than 2^32 bytes", "[random][simt]") {
  constexpr int64_t kStride = int64_t{1} << 31, kRows = 3, kCols = 16;  // bf16
  const simt::ReservedBuffer x(((kRows - 1) * kStride + kCols) * 2);
  for (int64_t c = 0; c < kCols; ++c) {
    x.as<BFloat16>()[(kRows - 1) * kStride + c] = BFloat16(1.0f);
  }
  Dropout args{};
  args.y = x.data(), args.x = x.data(), args.y_dtype = args.dtype = kBF16;
  args.factor = 2, args.rows = kRows, args.cols = kCols, args.y_stride = args.x_stride = kStride;
  kernels::cuda::dropout(nullptr, args);
  for (int64_t c = 0; c < kCols; ++c) {
    CHECK(static_cast<float>(x.as<BFloat16>()[(kRows - 1) * kStride + c]) == 2.0f);
  }
}

}  // namespace
}  // namespace tessera
