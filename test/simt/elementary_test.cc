#include "core/elementary/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::Copy;
using kernels::Fill;
using testing::check_bitwise;
using testing::DeviceBuffer;
using testing::randint;
using testing::randn;
using testing::run_in_all_schedules;

const std::vector<DType> kAllDtypes = {kF32, kBF16, kF16, kF64, kI32, kI64, kU8};

/// Integers that every dtype holds, so that conversions and sums are exact.
Tensor values(const Shape& shape, DType dtype, uint64_t seed) {
  return randint(0, 100, shape, dtype, seed);
}

int64_t span_of(const Shape& shape, const Strides& strides) {
  return kernels::span_nbytes(shape, strides, kU8);
}

/// Copies a strided range on the emulator in all schedules and by the CPU kernel: the same bits,
/// also between the elements of the destination.
void check_copy(const Copy& pattern, int64_t offset = 0) {
  INFO(fmt::format("{} <- {}, shape {}, strides {} <- {}, accumulate {}, offset {}",
                   pattern.dst_dtype, pattern.src_dtype, pattern.shape, pattern.dst_strides,
                   pattern.src_strides, pattern.accumulate, offset));
  const Tensor src = values({span_of(pattern.shape, pattern.src_strides)}, pattern.src_dtype, 1);
  const Tensor dst = values({span_of(pattern.shape, pattern.dst_strides)}, pattern.dst_dtype, 2);
  const DeviceBuffer src_buffer(src, offset);
  const auto run = [&](auto fn) {
    const DeviceBuffer dst_buffer(dst, offset);
    Copy args = pattern;
    args.dst = dst_buffer.data();
    args.src = src_buffer.data();
    fn(args);
    return std::vector<Tensor>{dst_buffer.tensor()};
  };
  const auto expected = run([](const Copy& a) { kernels::cpu::copy(a); });
  const auto actual = run_in_all_schedules(
      [&] { return run([](const Copy& a) { kernels::cuda::copy(nullptr, a); }); });
  check_bitwise(actual[0], expected[0], "dst");
}

Copy contiguous_copy(DType dst, DType src, const Shape& shape, bool accumulate = false) {
  return {nullptr,   nullptr, dst, src, shape, contiguous_strides(shape), contiguous_strides(shape),
          accumulate};
}

TEST_CASE("simt copy: between any two dtypes, also accumulating", "[elementary][simt]") {
  for (const DType dst : kAllDtypes) {
    for (const DType src : kAllDtypes) {
      check_copy(contiguous_copy(dst, src, {37}));
      check_copy(contiguous_copy(dst, src, {37}, true));
    }
  }
}

TEST_CASE("simt copy: lengths around the vector and block sizes", "[elementary][simt]") {
  for (const int64_t length : {1, 3, 4, 8, 15, 16, 17, 255, 2048, 2049}) {
    check_copy(contiguous_copy(kBF16, kF32, {length}));
    check_copy(contiguous_copy(kF32, kBF16, {length}, true));
    check_copy(contiguous_copy(kU8, kU8, {length}));
    check_copy(contiguous_copy(kF32, kF32, {length}), 1);
    check_copy(contiguous_copy(kF16, kBF16, {length}), 3);
  }
}

TEST_CASE("simt copy: strided rows, slices, transposes and broadcasts", "[elementary][simt]") {
  for (const DType src : {kF32, kBF16}) {
    for (const bool accumulate : {false, true}) {
      const DType dst = kBF16;
      // Rows of a packed buffer, aligned and not; odd row lengths.
      check_copy({nullptr, nullptr, dst, src, {5, 24}, {24, 1}, {72, 1}, accumulate});
      check_copy({nullptr, nullptr, dst, src, {5, 24}, {72, 1}, {24, 1}, accumulate});
      check_copy({nullptr, nullptr, dst, src, {5, 13}, {16, 1}, {24, 1}, accumulate});
      check_copy({nullptr, nullptr, dst, src, {5, 7}, {9, 1}, {11, 1}, accumulate});
      // [2, 3, 4, 8] with heads before time, and a transpose.
      check_copy(
          {nullptr, nullptr, dst, src, {2, 3, 4, 8}, {96, 32, 8, 1}, {96, 8, 24, 1}, accumulate});
      check_copy({nullptr, nullptr, dst, src, {31, 17}, {17, 1}, {1, 31}, accumulate});
      // A broadcast source, and dimensions of one element.
      check_copy({nullptr, nullptr, dst, src, {6, 16}, {16, 1}, {0, 1}, accumulate});
      check_copy({nullptr, nullptr, dst, src, {1, 6, 1}, {99, 2, 5}, {7, 3, 1}, accumulate});
      check_copy({nullptr, nullptr, dst, src, {}, {}, {}, accumulate});
    }
  }
}

TEST_CASE("simt copy: rounds to nearest even, NaN stays NaN, integers truncate",
          "[elementary][simt]") {
  const std::vector<double> special = {1.00390625, 1.01171875, 65519.9,   65520.0, -1e-8,
                                       3.1e-8,     1e30,       -INFINITY, -2.75,   2.75};
  for (const DType dst : {kBF16, kF16, kF64, kI32}) {
    const int64_t count = dst == kI32 ? 3 : 10;
    const std::vector<double> used(special.end() - count, special.end());
    const DeviceBuffer src(from_values(used, {count}, kF32));
    const DeviceBuffer cpu({count}, dst), emulated({count}, dst);
    Copy args = contiguous_copy(dst, kF32, {count});
    args.src = src.data();
    if (dst == kI32) src.as<float>()[0] = 1e9f;  // what no integer holds is undefined
    args.dst = cpu.data();
    kernels::cpu::copy(args);
    args.dst = emulated.data();
    kernels::cuda::copy(nullptr, args);
    check_bitwise(emulated.tensor(), cpu.tensor(), "rounded");
  }
  const DeviceBuffer nan(from_values({NAN}, {1}, kF32)), dst({1}, kBF16);
  *dst.as<BFloat16>() = BFloat16(0.0f);
  Copy args = contiguous_copy(kBF16, kF32, {1});
  args.src = nan.data();
  args.dst = dst.data();
  kernels::cuda::copy(nullptr, args);
  CHECK(std::isnan(static_cast<float>(*dst.as<BFloat16>())));
}

TEST_CASE("simt fill: any dtype, contiguous and strided", "[elementary][simt]") {
  for (const DType dtype : kAllDtypes) {
    for (const int64_t offset : {0, 1}) {
      for (const auto& [shape, strides] : std::vector<std::pair<Shape, Strides>>{
               {{1}, {1}}, {{37}, {1}}, {{4096}, {1}}, {{5, 7}, {16, 1}}, {{5, 7}, {9, 2}}}) {
        const Tensor before = values({span_of(shape, strides)}, dtype, 3);
        const auto run = [&](auto fn) {
          const DeviceBuffer dst(before, offset);
          fn(Fill{dst.data(), dtype, shape, strides, 42.0});
          return std::vector<Tensor>{dst.tensor()};
        };
        const auto expected = run([](const Fill& a) { kernels::cpu::fill(a); });
        const auto actual = run_in_all_schedules(
            [&] { return run([](const Fill& a) { kernels::cuda::fill(nullptr, a); }); });
        check_bitwise(actual[0], expected[0], "dst");
      }
    }
  }
}

TEST_CASE("simt elementary: an empty range launches nothing", "[elementary][simt]") {
  kernels::cuda::copy(nullptr, contiguous_copy(kF32, kF32, {0, 3}));
  kernels::cuda::fill(nullptr, {nullptr, kF32, {3, 0}, {1, 1}, 1.0});
}

TEST_CASE("simt elementary: first and last block above 2^32 bytes", "[elementary][simt]") {
  const simt::OnlyBlocks ends({0, -1});
  const int64_t numel = (int64_t{1} << 32) + 5;  // of u8; the last vector is partial
  const simt::ReservedBuffer src(numel), dst(numel);
  src.as<uint8_t>()[0] = 1;
  src.as<uint8_t>()[numel - 1] = 2;
  Copy copy = contiguous_copy(kU8, kU8, {numel});
  copy.dst = dst.data();
  copy.src = src.data();
  kernels::cuda::copy(nullptr, copy);
  CHECK(dst.as<uint8_t>()[0] == 1);
  CHECK(dst.as<uint8_t>()[numel - 1] == 2);
  kernels::cuda::fill(nullptr, {dst.data(), kU8, {numel}, {1}, 3.0});
  CHECK(dst.as<uint8_t>()[0] == 3);
  CHECK(dst.as<uint8_t>()[numel - 1] == 3);
  // Strided: 3 rows, 2^31 elements of 2 bytes apart.
  Copy rows{dst.data(), src.data(), kU8, kU8, {3, 5}, {int64_t{1} << 31, 1}, {16, 1}};
  src.as<uint8_t>()[2 * 16 + 4] = 7;
  kernels::cuda::copy(nullptr, rows);
  CHECK(dst.as<uint8_t>()[(int64_t{1} << 32) + 4] == 7);
}

}  // namespace
}  // namespace tessera
