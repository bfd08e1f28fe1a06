#include "kernels/softmax/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::contiguous_rows;
using kernels::RowLayout;
using kernels::SoftmaxBwd;
using kernels::SoftmaxFwd;
using testing::check_close;
using testing::DeviceBuffer;
using testing::error_of;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

struct Case {
  DType dtype = kF32;
  int64_t rows = 3, cols = 64, offset = 0;
  RowLayout layout = {};  // of x and dx; contiguous if outer_stride is 0
  bool accumulate = false;
  double scale = 4;

  RowLayout rows_of_x() const { return layout.outer_stride == 0 ? contiguous_rows(cols) : layout; }
  int64_t x_numel() const { return rows == 0 ? 0 : rows_of_x().offset(rows - 1) + cols; }
};

std::vector<Tensor> run_softmax(const Case& c, const Tensor& x_values, bool is_log,
                                bool on_device) {
  using Fwd = void (*)(const SoftmaxFwd&);
  using Bwd = void (*)(const SoftmaxBwd&);
  const Fwd cpu_fwd = is_log ? kernels::cpu::log_softmax_fwd : kernels::cpu::softmax_fwd;
  const Bwd cpu_bwd = is_log ? kernels::cpu::log_softmax_bwd : kernels::cpu::softmax_bwd;
  const auto device_fwd = is_log ? kernels::cuda::log_softmax_fwd : kernels::cuda::softmax_fwd;
  const auto device_bwd = is_log ? kernels::cuda::log_softmax_bwd : kernels::cuda::softmax_bwd;
  const DeviceBuffer x(x_values, c.offset), y({c.rows, c.cols}, c.dtype, c.offset),
      dy(randn({c.rows, c.cols}, c.dtype, 2), c.offset),
      dx(randn({c.x_numel()}, c.dtype, 3), c.offset);
  const SoftmaxFwd fwd{y.data(), x.data(), c.dtype, c.rows, c.cols, c.rows_of_x()};
  on_device ? device_fwd(nullptr, fwd) : cpu_fwd(fwd);
  const SoftmaxBwd bwd{dx.data(),    dy.data(), y.data(), c.dtype,
                       c.accumulate, c.rows,    c.cols,   c.rows_of_x()};
  on_device ? device_bwd(nullptr, bwd) : cpu_bwd(bwd);
  return {y.tensor(), dx.tensor()};
}

void check_softmax(const Case& c) {
  for (const bool is_log : {false, true}) {
    INFO(fmt::format("{} {}, {} x {}, offset {}, outer stride {}, accumulate {}",
                     is_log ? "log_softmax" : "softmax", c.dtype, c.rows, c.cols, c.offset,
                     c.layout.outer_stride, c.accumulate));
    const Tensor x = randn({c.x_numel()}, c.dtype, 1, c.scale);
    const auto expected = run_softmax(c, x, is_log, false);
    const auto actual = run_in_all_schedules([&] { return run_softmax(c, x, is_log, true); });
    check_close(actual[0], expected[0], tol(c.dtype, c.cols), "y");
    check_close(actual[1], expected[1], tol(c.dtype, c.cols), "dx");
  }
}

TEST_CASE("simt softmax: any dtype and row length", "[softmax][simt]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const int64_t cols : {1, 2, 8, 37, 64, 100, 1000, 2056}) {
      Case c;
      c.dtype = dtype, c.cols = cols, c.rows = cols < 50 ? 41 : 3, c.accumulate = cols % 3 == 1;
      check_softmax(c);
    }
  }
}

TEST_CASE("simt softmax: a vocabulary of 248,320 and an odd one", "[softmax][simt]") {
  Case c;
  c.dtype = kBF16, c.rows = 1, c.cols = 248320;
  check_softmax(c);
  c.cols = 50257;
  check_softmax(c);
}

TEST_CASE("simt softmax: more rows than grid.y could count", "[softmax][simt]") {
  Case c;
  c.dtype = kBF16, c.rows = 70000, c.cols = 8;
  check_softmax(c);
}

TEST_CASE("simt softmax: strided rows, unaligned memory, no rows", "[softmax][simt]") {
  for (const int64_t outer_stride : {96, 97}) {
    Case c;
    c.dtype = kBF16, c.rows = 12, c.cols = 16, c.accumulate = true;
    c.layout = {3, 16, outer_stride};
    check_softmax(c);
  }
  Case c;
  c.offset = 1;
  check_softmax(c);
  c.rows = 0;
  check_softmax(c);
}

TEST_CASE("simt softmax: large values, minus infinity, NaN", "[softmax][simt]") {
  Case c;
  c.rows = 4, c.cols = 72;
  std::vector<double> values = randn({4, 72}, kF32, 5, 1e4).to_vector();
  for (size_t i = 0; i < 72; ++i) {
    if (i % 3 != 0) values[72 + i] = -INFINITY;  // a masked row
    values[2 * 72 + i] = -INFINITY;              // nothing left
  }
  values[3 * 72 + 5] = NAN;
  const Tensor x = from_values(values, {4 * 72});
  for (const bool is_log : {false, true}) {
    const auto expected = run_softmax(c, x, is_log, false)[0].to_vector();
    const auto actual = run_softmax(c, x, is_log, true)[0].to_vector();
    for (size_t i = 0; i < expected.size(); ++i) {
      CAPTURE(is_log, i);
      if (std::isnan(expected[i])) {
        CHECK(std::isnan(actual[i]));
      } else {
        CHECK((actual[i] == expected[i] ||
               std::abs(actual[i] - expected[i]) <= 1e-6 * std::max(1.0, std::abs(expected[i]))));
      }
    }
  }
}

TEST_CASE("simt softmax: f64 is for the CPU", "[softmax][simt]") {
  CHECK_THAT(error_of([] {
               kernels::cuda::softmax_fwd(nullptr, {nullptr, nullptr, kF64, 1, 1, {}});
             }),
             Catch::Matchers::Contains("softmax_fwd: no CUDA kernel for dtype f64"));
}

TEST_CASE("simt softmax: rows of more than 2^32 bytes", "[softmax][simt]") {
  constexpr int64_t kStride = int64_t{1} << 31, kRows = 3, kCols = 8;  // bf16
  const simt::ReservedBuffer x(((kRows - 1) * kStride + kCols) * 2);
  const DeviceBuffer y({kRows, kCols}, kBF16);
  x.as<BFloat16>()[(kRows - 1) * kStride + kCols - 1] = BFloat16(100.0f);
  kernels::cuda::softmax_fwd(nullptr, {y.data(), x.data(), kBF16, kRows, kCols, {1, 0, kStride}});
  CHECK(static_cast<float>(y.as<BFloat16>()[0]) == 0.125f);
  CHECK(static_cast<float>(y.as<BFloat16>()[kRows * kCols - 1]) == 1.0f);
}

}  // namespace
}  // namespace tessera
