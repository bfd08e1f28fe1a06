#include "kernels/shaping/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::Gather;
using kernels::ScatterAdd;
using testing::check_bitwise;
using testing::check_close;
using testing::DeviceBuffer;
using testing::error_of;
using testing::randint;
using testing::randn;
using testing::run_in_all_schedules;

struct Lines {
  int64_t outer, length, count, inner;
};
/// Rows and columns, one line and many, around the width of a warp.
const Lines kLines[] = {{5, 7, 33, 1}, {1, 3, 100, 1}, {70, 50, 1, 1},
                        {3, 9, 4, 40}, {2, 2, 9, 3},   {1, 1, 1, 1}};

TEST_CASE("simt gather: the CPU kernel's bits, any dtype", "[shaping][simt]") {
  for (const DType dtype : {kF32, kBF16, kF16, kF64, kI32, kI64, kU8}) {
    for (const DType index_dtype : {kI32, kI64}) {
      for (const Lines& l : kLines) {
        INFO(fmt::format("{} by {}, [{}, {} of {}, {}]", dtype, index_dtype, l.outer, l.count,
                         l.length, l.inner));
        const Shape shape{l.outer, l.length, l.inner}, picked{l.outer, l.count, l.inner};
        const DeviceBuffer x(randint(0, 100, shape, dtype, 1)),
            index(randint(0, l.length, picked, index_dtype, 2));
        const auto run = [&](bool on_device) {
          const DeviceBuffer y(picked, dtype);
          const Gather args{y.data(), x.data(), index.data(), dtype,  index_dtype,
                            l.outer,  l.length, l.count,      l.inner};
          on_device ? kernels::cuda::gather(nullptr, args) : kernels::cpu::gather(args);
          return std::vector<Tensor>{y.tensor()};
        };
        check_bitwise(run_in_all_schedules([&] { return run(true); })[0], run(false)[0]);
      }
    }
  }
}

TEST_CASE("simt scatter_add: sums of the CPU kernel, whoever names a place", "[shaping][simt]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const Lines& l : kLines) {
      INFO(fmt::format("{}, [{}, {} of {}, {}]", dtype, l.outer, l.count, l.length, l.inner));
      const Shape shape{l.outer, l.length, l.inner}, picked{l.outer, l.count, l.inner};
      const DeviceBuffer dy(randn(picked, dtype, 1)), index(randint(0, l.length, picked, kI32, 2));
      const auto run = [&](bool on_device) {
        const DeviceBuffer sums(randn(shape, kF32, 3));
        const ScatterAdd args{sums.data(), dy.data(), index.data(), dtype,  kI32,
                              l.outer,     l.length,  l.count,      l.inner};
        on_device ? kernels::cuda::scatter_add(nullptr, args) : kernels::cpu::scatter_add(args);
        return std::vector<Tensor>{sums.tensor()};
      };
      check_close(run_in_all_schedules([&] { return run(true); })[0], run(false)[0],
                  testing::tol(kF32, l.count));
    }
  }
}

TEST_CASE("simt gather, scatter_add: an index out of range is NaN and adds nothing",
          "[shaping][simt]") {
  for (const int64_t inner : {1, 2}) {
    const Shape shape{2, 3 / inner, inner};
    const DeviceBuffer x(randn({2, 4, inner})), sums(zeros({2, 4, inner})), y({2, 2, inner}, kF32);
    const DeviceBuffer index(inner == 1 ? from_values({-1, 1, 4, 2}, {4})
                                        : from_values({-1, 0, 1, 1, 4, 4, 2, 2}, {8}));
    const Gather gather{y.data(), x.data(), index.data(), kF32, kI32, 2, 4, 2, inner};
    kernels::cuda::gather(nullptr, gather);
    CHECK(std::isnan(y.tensor().to_vector()[0]));
    CHECK(y.tensor().to_vector()[static_cast<size_t>(inner)] ==
          x.tensor().to_vector()[static_cast<size_t>(inner)]);
    const DeviceBuffer dy(full({2, 2, inner}, 1));
    kernels::cuda::scatter_add(nullptr,
                               {sums.data(), dy.data(), index.data(), kF32, kI32, 2, 4, 2, inner});
    double total = 0;
    for (const double v : sums.tensor().to_vector()) total += v;
    CHECK(total == (inner == 1 ? 2 : 5));
  }
}

TEST_CASE("simt shaping: no elements launch nothing, f64 is refused", "[shaping][simt]") {
  kernels::cuda::gather(nullptr, {nullptr, nullptr, nullptr, kF32, kI32, 2, 3, 0, 1});
  kernels::cuda::scatter_add(nullptr, {nullptr, nullptr, nullptr, kF32, kI32, 2, 3, 0, 1});
  CHECK_THAT(
      error_of([] {
        kernels::cuda::scatter_add(nullptr, {nullptr, nullptr, nullptr, kF64, kI32, 1, 1, 1, 1});
      }),
      Catch::Matchers::Contains("scatter_add: no CUDA kernel for dtype f64"));
}

}  // namespace
}  // namespace tessera
