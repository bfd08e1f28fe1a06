#include "core/elementary/kernel.h"
#include "kernels/pointwise/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::Pointwise;
using kernels::PointwiseOp;
using testing::check_close;
using testing::DeviceBuffer;
using testing::error_of;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

constexpr auto kLastOp = PointwiseOp::kMaximumBwd;

struct Case {
  PointwiseOp op = PointwiseOp::kAdd;
  DType dst_dtype = kF32, dtype = kF32;
  Shape shape = {304};
  Strides dst = {1};
  std::array<Strides, 3> in = {Strides{1}, Strides{1}, Strides{1}};
  bool accumulate = false;
  int64_t offset = 0;
  bool is_second_a_number = false;
};

bool is_mask_op(PointwiseOp op) {
  return (op >= PointwiseOp::kEq && op <= PointwiseOp::kOr) || op == PointwiseOp::kIsInside;
}

/// The CPU kernel and the emulator agree. Operands are in [0.5, 2.5], with ties; the first of Where
/// is a mask.
void check(const Case& c) {
  INFO(fmt::format("{} <- {}, op {}, shape {}, strides {} <- {} {} {}, accumulate {}, offset {}",
                   c.dst_dtype, c.dtype, static_cast<int>(c.op), c.shape, c.dst, c.in[0], c.in[1],
                   c.in[2], c.accumulate, c.offset));
  const auto numel = [&](const Strides& s) { return kernels::span_nbytes(c.shape, s, kU8); };
  const auto operand = [&](size_t i) {
    const bool is_mask = c.op == PointwiseOp::kWhere && i == 0;
    std::vector<double> values = randn({numel(c.in[i])}, kF64, i + 1).to_vector();
    for (double& v : values) {
      v = is_mask ? (v > 0 ? 1.0 : 0.0) : 0.5 + std::fmod(std::fabs(std::round(v * 8) / 8), 2.0);
    }
    return std::make_unique<DeviceBuffer>(
        from_values(std::span<const double>(values), {numel(c.in[i])}, is_mask ? kU8 : c.dtype),
        c.offset);
  };
  const std::unique_ptr<DeviceBuffer> in[] = {operand(0), operand(1), operand(2)};
  const auto run = [&](bool on_device) {
    const DeviceBuffer dst(
        c.dst_dtype == kU8 ? zeros({numel(c.dst)}, kU8) : randn({numel(c.dst)}, c.dst_dtype, 4),
        c.offset);
    Pointwise args{dst.data(), c.dst_dtype, c.op, c.shape, c.dst, {}, c.accumulate};
    for (size_t i = 0; i < 3; ++i) {
      args.in[i] = {in[i]->data(), in[i]->dtype(), c.in[i], 1.25};
      if (static_cast<int>(i) >= kernels::num_operands(c.op)) args.in[i].data = nullptr;
    }
    if (c.is_second_a_number) args.in[1].data = nullptr;
    on_device ? kernels::cuda::pointwise(nullptr, args) : kernels::cpu::pointwise(args);
    return std::vector<Tensor>{dst.tensor()};
  };
  const Tensor expected = run(false)[0];
  const Tensor actual = run_in_all_schedules([&] { return run(true); })[0];
  check_close(actual, expected, c.dst_dtype == kU8 ? 0 : tol(c.dst_dtype, 4), "output");
}

TEST_CASE("simt pointwise: every op, on vectors and off them", "[pointwise][simt]") {
  for (int op = 0; op <= static_cast<int>(kLastOp); ++op) {
    Case c;
    c.op = static_cast<PointwiseOp>(op);
    if (is_mask_op(c.op)) c.dst_dtype = kU8;
    check(c);
    c.shape = {37};
    c.dtype = kBF16;
    check(c);
    c.shape = {24};
    c.is_second_a_number = kernels::num_operands(c.op) > 1;
    check(c);
  }
}

TEST_CASE("simt pointwise: any dtypes, accumulating or not", "[pointwise][simt]") {
  for (const PointwiseOp op : {PointwiseOp::kAdd, PointwiseOp::kWhere, PointwiseOp::kExp}) {
    for (const DType dtype : {kF32, kBF16, kF16}) {
      for (const DType dst : {kF32, kBF16, kF16}) {
        for (const bool accumulate : {false, true}) {
          Case c;
          c.op = op, c.dtype = dtype, c.dst_dtype = dst, c.accumulate = accumulate;
          check(c);
        }
      }
    }
  }
}

TEST_CASE("simt pointwise: lengths and addresses off the vectors", "[pointwise][simt]") {
  for (const int64_t numel : {1, 7, 8, 255, 4096, 4097, 20008}) {
    Case c;
    c.shape = {numel}, c.dtype = c.dst_dtype = kBF16;
    check(c);
  }
  Case c;
  c.shape = {512}, c.offset = 1;
  check(c);
  c.op = PointwiseOp::kWhere;
  check(c);
}

TEST_CASE("simt pointwise: broadcasts and strides", "[pointwise][simt]") {
  for (const PointwiseOp op : {PointwiseOp::kMul, PointwiseOp::kWhere}) {
    for (const DType dtype : {kF32, kBF16}) {
      const auto check_strides = [&](const Shape& shape, const Strides& dst, const Strides& a,
                                     const Strides& b) {
        for (const bool accumulate : {false, true}) {
          check({op, kF32, dtype, shape, dst, {a, b, a}, accumulate});
        }
      };
      check_strides({5, 48}, {48, 1}, {48, 1}, {0, 1});     // a bias
      check_strides({5, 48}, {48, 1}, {48, 1}, {1, 0});     // a factor a row
      check_strides({5, 48}, {48, 1}, {144, 1}, {144, 1});  // slices of a packed buffer
      check_strides({5, 47}, {47, 1}, {50, 1}, {0, 0});     // a scalar
      check_strides({2, 3, 4, 8}, {96, 32, 8, 1}, {96, 8, 24, 1}, {0, 8, 0, 1});  // heads
      check_strides({7, 9}, {1, 7}, {9, 1}, {9, 1});     // a transposed destination
      check_strides({7, 16}, {16, 1}, {1, 7}, {16, 1});  // a transposed operand
    }
  }
}

TEST_CASE("simt pointwise: integers are compared exactly", "[pointwise][simt]") {
  const int64_t large = (int64_t{1} << 53) + 2;
  const DeviceBuffer a(from_values({large - 1, large, large + 1}, {3})),
      b(from_values({large}, {1})), c(from_values({1, 2, 3}, {3}, kI32));
  for (int op = static_cast<int>(PointwiseOp::kEq); op <= static_cast<int>(PointwiseOp::kOr);
       ++op) {
    const auto run = [&](bool on_device) {
      std::vector<Tensor> results;
      for (const bool is_wide : {true, false}) {
        const DeviceBuffer dst({3}, kU8);
        Pointwise args{dst.data(), kU8, static_cast<PointwiseOp>(op), {3}, {1}, {}};
        args.in[0] = {is_wide ? a.data() : c.data(), is_wide ? kI64 : kI32, {1}};
        args.in[1] = {is_wide ? b.data() : nullptr, kI64, {0}, 2};
        args.in[2].strides = {0};
        on_device ? kernels::cuda::pointwise(nullptr, args) : kernels::cpu::pointwise(args);
        results.push_back(dst.tensor());
      }
      return results;
    };
    const auto expected = run(false), actual = run_in_all_schedules([&] { return run(true); });
    for (size_t i = 0; i < 2; ++i) testing::check_bitwise(actual[i], expected[i]);
  }
}

TEST_CASE("simt pointwise: the ends of the range", "[pointwise][simt]") {
  const std::vector<double> ends = {-INFINITY, -1e20, -100, -88,  -1,       -0.0, 0, 1e-30,
                                    1,         88,    100,  1e20, INFINITY, NAN,  2, -2};
  const DeviceBuffer x(from_values(std::span<const double>(ends), {16}, kF32));
  for (int op = 0; op <= static_cast<int>(kLastOp); ++op) {
    const auto code = static_cast<PointwiseOp>(op);
    const auto run = [&](bool on_device) {
      const DeviceBuffer y({16, 16}, kF32);
      Pointwise args{y.data(), kF32, code, {16, 16}, {16, 1}, {}};
      for (size_t i = 0; i < 3; ++i) {  // every pair of them
        const Strides strides = i == 1 ? Strides{1, 0} : Strides{0, 1};
        args.in[i] = {static_cast<int>(i) < kernels::num_operands(code) ? x.data() : nullptr, kF32,
                      strides, 0};
      }
      on_device ? kernels::cuda::pointwise(nullptr, args) : kernels::cpu::pointwise(args);
      return y.tensor().to_vector();
    };
    const auto expected = run(false), actual = run(true);
    for (size_t i = 0; i < 256; ++i) {
      INFO("op " << op << ", " << ends[i % 16] << " and " << ends[i / 16]);
      if (std::isnan(expected[i])) {
        CHECK(std::isnan(actual[i]));
      } else {
        CHECK((actual[i] == expected[i] ||
               std::abs(actual[i] - expected[i]) <= 2e-6 * std::max(1e-30, std::abs(expected[i]))));
      }
    }
  }
}

TEST_CASE("simt pointwise: no elements launch nothing, f64 is refused", "[pointwise][simt]") {
  const Pointwise::Operand one{nullptr, kF32, {1}, 1};
  kernels::cuda::pointwise(nullptr, {nullptr, kF32, PointwiseOp::kAdd, {0}, {1}, {one, one, one}});
  float dummy[1];
  CHECK_THAT(error_of([&] {
               kernels::cuda::pointwise(
                   nullptr,
                   {dummy, kF32, PointwiseOp::kExp, {1}, {1}, {{{dummy, kF64, {1}}, one, one}}});
             }),
             Catch::Matchers::Contains("pointwise: no CUDA kernel for dtype f64"));
  CHECK_THAT(error_of([&] {
               kernels::cuda::pointwise(
                   nullptr, {dummy, kF64, PointwiseOp::kExp, {1}, {1}, {one, one, one}});
             }),
             Catch::Matchers::Contains("pointwise: no CUDA kernel for dtype f64"));
}

TEST_CASE("simt pointwise: rows of more than 2^32 bytes", "[pointwise][simt]") {
  constexpr int64_t kStride = int64_t{1} << 31, kRows = 3, kCols = 16;  // bf16
  const simt::ReservedBuffer x(((kRows - 1) * kStride + kCols) * 2),
      y(((kRows - 1) * kStride + kCols) * 2);
  const int64_t last = (kRows - 1) * kStride + kCols - 1;
  x.as<BFloat16>()[last] = BFloat16(3.0f);
  const Pointwise::Operand in{x.data(), kBF16, {kStride, 1}};
  kernels::cuda::pointwise(nullptr, {y.data(),
                                     kBF16,
                                     PointwiseOp::kMul,
                                     {kRows, kCols},
                                     {kStride, 1},
                                     {in, in, {nullptr, kF32, {0, 0}}}});
  CHECK(static_cast<float>(y.as<BFloat16>()[last]) == 9.0f);
}

}  // namespace
}  // namespace tessera
