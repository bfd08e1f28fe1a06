#include "core/elementary/kernel.h"
#include "kernels/elementwise/kernel.h"
#include "test/simt/simt_testing.h"

// R rows, C columns.

namespace tessera {
namespace {

using kernels::Activation;
using kernels::ActivationBwd;
using kernels::ActivationFwd;
using kernels::Scale;
using kernels::SwigluBwd;
using kernels::SwigluFwd;
using testing::check_close;
using testing::DeviceBuffer;
using testing::error_of;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

constexpr DType kDtypes[] = {kF32, kBF16, kF16};

/// Elements of a row-strided operand from the first to the last.
int64_t span_of(int64_t rows, int64_t cols, int64_t stride) {
  return rows == 0 ? 0 : (rows - 1) * stride + cols;
}

/// Runs `run(on_device)` with the CPU kernels and on the emulator; the outputs must agree. `dtype`
/// is that of the operands: functions of 16-bit values need not be exact to f32.
void check_same(const std::function<std::vector<Tensor>(bool)>& run, DType dtype) {
  const auto expected = run(false);
  const auto actual = run_in_all_schedules([&] { return run(true); });
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const double tolerance = std::max(tol(expected[i].dtype(), 4), tol(dtype) / 16);
    check_close(actual[i], expected[i], tolerance, fmt::format("output {}", i));
  }
}

// ---- scale, activations -------------------------------------------------------------------------

struct RowsCase {
  DType dst_dtype = kF32, dtype = kF32;
  int64_t rows = 1, cols = 304, dst_stride = 304, x_stride = 304, dy_stride = 304, offset = 0;
  bool accumulate = false;

  std::string text() const {
    return fmt::format("{} <- {}, {} x {}, strides {} {} {}, offset {}, accumulate {}", dst_dtype,
                       dtype, rows, cols, dst_stride, x_stride, dy_stride, offset, accumulate);
  }
};

/// Flat and strided, on vectors and off them, in every dtype.
std::vector<RowsCase> rows_cases() {
  std::vector<RowsCase> cases;
  for (const DType dtype : kDtypes) {
    for (const bool accumulate : {false, true}) {
      const DType other = dtype == kF32 ? kBF16 : kF32;
      cases.push_back({dtype, dtype, 1, 304, 304, 304, 304, 0, accumulate});
      cases.push_back({other, dtype, 7, 40, 40, 40, 40, 0, accumulate});
      cases.push_back({dtype, dtype, 7, 40, 48, 80, 120, 0, accumulate});
      cases.push_back({dtype, dtype, 7, 37, 41, 38, 39, 0, accumulate});
      cases.push_back({dtype, dtype, 3, 16, 16, 16, 16, 1, accumulate});
    }
  }
  cases.push_back({kBF16, kBF16, 1, 20000, 20000, 20000, 20000, 0, false});
  return cases;
}

TEST_CASE("simt scale: rows of any layout", "[elementwise][simt]") {
  for (const RowsCase& c : rows_cases()) {
    INFO(c.text());
    const DeviceBuffer x(randn({span_of(c.rows, c.cols, c.x_stride)}, c.dtype, 1), c.offset);
    check_same(
        [&](bool on_device) {
          const DeviceBuffer dst(randn({span_of(c.rows, c.cols, c.dst_stride)}, c.dst_dtype, 2),
                                 c.offset);
          const Scale args{dst.data(), x.data(), c.dst_dtype,  c.dtype,    -0.3,
                           c.rows,     c.cols,   c.dst_stride, c.x_stride, c.accumulate};
          on_device ? kernels::cuda::scale(nullptr, args) : kernels::cpu::scale(args);
          return std::vector<Tensor>{dst.tensor()};
        },
        c.dtype);
  }
}

constexpr Activation kActivations[] = {Activation::kRelu, Activation::kSilu, Activation::kGeluTanh,
                                       Activation::kGeluExact};

TEST_CASE("simt activation: forward and backward of each, rows of any layout",
          "[elementwise][simt]") {
  for (const RowsCase& c : rows_cases()) {
    for (const Activation activation : kActivations) {
      if (c.cols > 1000 && activation != Activation::kSilu) continue;
      INFO(c.text() << ", activation " << static_cast<int>(activation));
      const DeviceBuffer x(randn({span_of(c.rows, c.cols, c.x_stride)}, c.dtype, 1, 3.0), c.offset),
          dy(randn({span_of(c.rows, c.cols, c.dy_stride)}, c.dtype, 2), c.offset);
      check_same(
          [&](bool on_device) {
            const DeviceBuffer y({c.rows, c.cols}, c.dtype, c.offset);
            const ActivationFwd fwd{y.data(), x.data(), c.dtype,   activation,
                                    c.rows,   c.cols,   c.x_stride};
            on_device ? kernels::cuda::activation_fwd(nullptr, fwd)
                      : kernels::cpu::activation_fwd(fwd);
            const DeviceBuffer dx(randn({span_of(c.rows, c.cols, c.dst_stride)}, c.dst_dtype, 3),
                                  c.offset);
            const ActivationBwd bwd{dx.data(),    dy.data(),   x.data(),   c.dst_dtype,
                                    c.dtype,      activation,  c.rows,     c.cols,
                                    c.dst_stride, c.dy_stride, c.x_stride, c.accumulate};
            on_device ? kernels::cuda::activation_bwd(nullptr, bwd)
                      : kernels::cpu::activation_bwd(bwd);
            return std::vector<Tensor>{y.tensor(), dx.tensor()};
          },
          c.dtype);
    }
  }
}

TEST_CASE("simt activation: the ends of the range", "[elementwise][simt]") {
  const std::vector<double> ends = {-1e20, -1e4, -100, -88,      -0.0, 0,
                                    88,    100,  1e4,  INFINITY, NAN,  1e-30};
  const DeviceBuffer x(from_values(ends, {12}, kF32));
  for (const Activation activation : kActivations) {
    const auto run = [&](bool on_device) {
      const DeviceBuffer y({12}, kF32);
      const ActivationFwd args{y.data(), x.data(), kF32, activation, 1, 12, 12};
      on_device ? kernels::cuda::activation_fwd(nullptr, args) : kernels::cpu::activation_fwd(args);
      return y.tensor().to_vector();
    };
    const auto expected = run(false), actual = run(true);
    for (size_t i = 0; i < 12; ++i) {
      INFO("activation " << static_cast<int>(activation) << ", element " << i);
      if (std::isnan(expected[i])) {
        CHECK(std::isnan(actual[i]));
      } else {
        CHECK((actual[i] == expected[i] ||
               std::abs(actual[i] - expected[i]) <= 1e-6 * std::max(1e-2, std::abs(expected[i]))));
      }
    }
  }
}

// ---- swiglu -------------------------------------------------------------------------------------

TEST_CASE("simt swiglu: forward and backward, gate and up packed or apart", "[elementwise][simt]") {
  for (const RowsCase& c : rows_cases()) {
    INFO(c.text());
    const DeviceBuffer gate(randn({span_of(c.rows, c.cols, c.x_stride)}, c.dtype, 1, 3.0),
                            c.offset),
        up(randn({span_of(c.rows, c.cols, c.dy_stride)}, c.dtype, 2), c.offset),
        dy(randn({c.rows, c.cols}, c.dtype, 3), c.offset);
    check_same(
        [&](bool on_device) {
          const DeviceBuffer y({c.rows, c.cols}, c.dtype, c.offset);
          const SwigluFwd fwd{y.data(), gate.data(), up.data(),  c.dtype,
                              c.rows,   c.cols,      c.x_stride, c.dy_stride};
          on_device ? kernels::cuda::swiglu_fwd(nullptr, fwd) : kernels::cpu::swiglu_fwd(fwd);
          const DeviceBuffer dgate(randn({span_of(c.rows, c.cols, c.dst_stride)}, c.dst_dtype, 4),
                                   c.offset),
              dup(randn({span_of(c.rows, c.cols, c.dst_stride)}, c.dtype, 5), c.offset);
          SwigluBwd bwd{dgate.data(), dup.data(),   dy.data(), gate.data(), up.data(),
                        c.dst_dtype,  c.dtype,      c.dtype,   c.rows,      c.cols,
                        c.dst_stride, c.dst_stride, c.cols,    c.x_stride,  c.dy_stride,
                        c.accumulate, !c.accumulate};
          on_device ? kernels::cuda::swiglu_bwd(nullptr, bwd) : kernels::cpu::swiglu_bwd(bwd);
          return std::vector<Tensor>{y.tensor(), dgate.tensor(), dup.tensor()};
        },
        c.dtype);
  }
}

TEST_CASE("simt swiglu: one gradient alone", "[elementwise][simt]") {
  const DeviceBuffer gate(randn({64}, kF32, 1)), up(randn({64}, kF32, 2)), dy(randn({64}, kF32, 3));
  check_same(
      [&](bool on_device) {
        const DeviceBuffer dgate({64}, kF32), dup({64}, kF32);
        SwigluBwd args{dgate.data(), nullptr, dy.data(), gate.data(), up.data(),
                       kF32,         kF32,    kF32,      1,           64,
                       64,           64,      64,        64,          64};
        on_device ? kernels::cuda::swiglu_bwd(nullptr, args) : kernels::cpu::swiglu_bwd(args);
        args.dgate = nullptr, args.dup = dup.data();
        on_device ? kernels::cuda::swiglu_bwd(nullptr, args) : kernels::cpu::swiglu_bwd(args);
        return std::vector<Tensor>{dgate.tensor(), dup.tensor()};
      },
      kF32);
}

// ---- limits -------------------------------------------------------------------------------------

TEST_CASE("simt elementwise: no elements launch nothing, f64 is refused", "[elementwise][simt]") {
  kernels::cuda::scale(nullptr, {nullptr, nullptr, kF32, kF32, 1, 0, 8, 8, 8});
  CHECK_THAT(error_of([] {
               kernels::cuda::scale(nullptr, {nullptr, nullptr, kF32, kF64, 1, 1, 8, 8, 8});
             }),
             Catch::Matchers::Contains("scale: no CUDA kernel for dtype f64"));
  CHECK_THAT(error_of([] {
               kernels::cuda::scale(nullptr, {nullptr, nullptr, kF64, kF32, 1, 1, 8, 8, 8});
             }),
             Catch::Matchers::Contains("scale: no CUDA kernel for dtype f64"));
}

TEST_CASE("simt elementwise: rows of more than 2^32 bytes", "[elementwise][simt]") {
  constexpr int64_t kStride = int64_t{1} << 31, kRows = 3, kCols = 16;  // bf16
  const simt::ReservedBuffer x(((kRows - 1) * kStride + kCols) * 2),
      y(((kRows - 1) * kStride + kCols) * 2);
  const int64_t last = (kRows - 1) * kStride + kCols - 1;
  x.as<BFloat16>()[last] = BFloat16(3.0f);
  kernels::cuda::scale(nullptr,
                       {y.data(), x.data(), kBF16, kBF16, 2.0, kRows, kCols, kStride, kStride});
  CHECK(static_cast<float>(y.as<BFloat16>()[last]) == 6.0f);
}

}  // namespace
}  // namespace tessera
