#include "kernels/rope/kernel.h"
#include "test/simt/simt_testing.h"

// B batch, T time, H heads, D head width.

namespace tessera {
namespace {

using kernels::Rope;
using kernels::RopeTable;
using testing::check_close;
using testing::DeviceBuffer;
using testing::error_of;
using testing::randint;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

void check_table(RopeTable args, const DeviceBuffer* positions) {
  INFO(fmt::format("{} rows, rotary_dim {}, scaling {}", args.rows, args.rotary_dim,
                   static_cast<int>(args.scaling)));
  args.positions = positions != nullptr ? positions->as<int32_t>() : nullptr;
  const auto run = [&](bool on_device) {
    const DeviceBuffer table({args.rows, args.rotary_dim}, kF32);
    args.table = table.as<float>();
    on_device ? kernels::cuda::rope_table(nullptr, args) : kernels::cpu::rope_table(args);
    return std::vector<Tensor>{table.tensor()};
  };
  const auto expected = run(false);
  const auto actual = run_in_all_schedules([&] { return run(true); });
  check_close(actual[0], expected[0], tol(kF32), "table");
}

TEST_CASE("simt rope_table: positions given, implied and huge, each scaling", "[rope][simt]") {
  using Scaling = RopeTable::Scaling;
  const DeviceBuffer near(randint(0, 10000, {130})), far(randint(-2000000000, 2000000000, {33}));
  RopeTable args{};
  args.rotary_dim = 128, args.theta = 10000, args.rows = 70;
  check_table(args, nullptr);
  args.rows = 130, args.rotary_dim = 6;
  check_table(args, &near);
  args.rows = 33, args.rotary_dim = 80, args.theta = 500000;
  check_table(args, &far);
  args.rows = 5, args.scaling = Scaling::kLinear, args.factor = 4;
  check_table(args, &near);
  args.scaling = Scaling::kLlama3, args.factor = 8, args.low_freq_factor = 1;
  args.high_freq_factor = 4, args.original_max_position = 8192;
  check_table(args, &near);
  args.rows = 0;
  check_table(args, nullptr);
}

struct Case {
  DType dtype = kF32;
  bool interleaved = false, inverse = false, accumulate = false, in_place = false;
  bool has_batch_table = false;
  int64_t B = 2, T = 3, H = 2, D = 32, rotary_dim = 32, packed = 0, offset = 0;

  int64_t stride_t() const { return packed == 0 ? H * D : packed; }
  int64_t numel() const { return B * T * stride_t(); }
};

void check_rope(const Case& c) {
  INFO(
      fmt::format("{}, interleaved {}, inverse {}, accumulate {}, in place {}, [{}, {}, {}, {}], "
                  "rotary_dim {}, packed {}, offset {}",
                  c.dtype, c.interleaved, c.inverse, c.accumulate, c.in_place, c.B, c.T, c.H, c.D,
                  c.rotary_dim, c.packed, c.offset));
  const DeviceBuffer table(randn({c.B, c.T, c.rotary_dim}, kF32, 3));
  const auto run = [&](bool on_device) {
    const DeviceBuffer x(randn({c.numel()}, c.dtype, 1), c.offset),
        y(randn({c.B, c.T, c.H, c.D}, c.dtype, 2), c.offset);
    Rope args{};
    args.x = x.data(), args.y = c.in_place ? x.data() : y.data(), args.table = table.as<float>();
    args.dtype = c.dtype, args.interleaved = c.interleaved, args.inverse = c.inverse;
    args.accumulate = c.accumulate, args.batch = c.B, args.time = c.T, args.heads = c.H;
    args.head_dim = c.D, args.rotary_dim = c.rotary_dim;
    args.table_batch_stride = c.has_batch_table ? c.T * c.rotary_dim : 0;
    const int64_t x_strides[3] = {c.T * c.stride_t(), c.stride_t(), c.D};
    const int64_t y_strides[3] = {c.T * c.H * c.D, c.H * c.D, c.D};
    for (int d = 0; d < 3; ++d) {
      args.x_strides[d] = x_strides[d];
      args.y_strides[d] = c.in_place ? x_strides[d] : y_strides[d];
    }
    on_device ? kernels::cuda::rope(nullptr, args) : kernels::cpu::rope(args);
    return std::vector<Tensor>{x.tensor(), y.tensor()};
  };
  const auto expected = run(false);
  const auto actual = run_in_all_schedules([&] { return run(true); });
  check_close(actual[0], expected[0], tol(c.dtype, 2), "x");
  check_close(actual[1], expected[1], tol(c.dtype, 2), "y");
}

TEST_CASE("simt rope: dtypes, pairings, directions", "[rope][simt]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const bool interleaved : {false, true}) {
      for (const bool inverse : {false, true}) {
        check_rope({.dtype = dtype, .interleaved = interleaved, .inverse = inverse});
        check_rope({.dtype = dtype,
                    .interleaved = interleaved,
                    .inverse = inverse,
                    .accumulate = true,
                    .has_batch_table = true});
        check_rope(
            {.dtype = dtype, .interleaved = interleaved, .inverse = inverse, .in_place = true});
      }
    }
  }
}

TEST_CASE("simt rope: partial rotation, packed heads, widths off the vectors", "[rope][simt]") {
  for (const bool interleaved : {false, true}) {
    for (const bool accumulate : {false, true}) {
      Case c{.dtype = kBF16, .interleaved = interleaved, .accumulate = accumulate};
      c.D = 48, c.rotary_dim = 32;
      check_rope(c);
      c.packed = 3 * c.H * c.D;
      check_rope(c);
      c.packed = 0, c.rotary_dim = 6;
      check_rope(c);
      c.D = 7;
      check_rope(c);
      c.D = c.rotary_dim = 80, c.offset = 1;
      check_rope(c);
      c.offset = 0, c.T = 0;
      check_rope(c);
    }
    Case c{.dtype = kBF16, .interleaved = interleaved, .in_place = true};
    c.D = 64, c.rotary_dim = 32, c.packed = 3 * c.H * c.D;
    check_rope(c);
  }
}

TEST_CASE("simt rope: f64 is for the CPU", "[rope][simt]") {
  Rope args{};
  args.dtype = kF64, args.batch = args.time = args.heads = args.head_dim = 2;
  CHECK_THAT(error_of([&] { kernels::cuda::rope(nullptr, args); }),
             Catch::Matchers::Contains("rope: no CUDA kernel for dtype f64"));
}

TEST_CASE("simt rope: positions of more than 2^32 bytes", "[rope][simt]") {
  constexpr int64_t kStride = int64_t{1} << 31, kT = 3, kD = 16;  // bf16
  const simt::ReservedBuffer x(((kT - 1) * kStride + kD) * 2);
  BFloat16* last = x.as<BFloat16>() + (kT - 1) * kStride;
  for (int64_t d = 0; d < kD; ++d) last[d] = BFloat16(static_cast<float>(d));
  std::vector<double> quarter_turn;
  for (int64_t t = 0; t < kT; ++t) {
    for (int64_t d = 0; d < kD; ++d) quarter_turn.push_back(d < kD / 2 ? 0 : 1);
  }
  const DeviceBuffer table(from_values(quarter_turn, {kT, kD}));
  Rope args{};
  args.x = args.y = x.data(), args.table = table.as<float>(), args.dtype = kBF16;
  args.batch = args.heads = 1, args.time = kT, args.head_dim = args.rotary_dim = kD;
  args.x_strides[1] = args.y_strides[1] = kStride;
  kernels::cuda::rope(nullptr, args);
  for (int64_t d = 0; d < kD / 2; ++d) {
    CHECK(static_cast<float>(last[d]) == -static_cast<float>(d + kD / 2));
    CHECK(static_cast<float>(last[d + kD / 2]) == static_cast<float>(d));
  }
}

}  // namespace
}  // namespace tessera
