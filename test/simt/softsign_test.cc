// The kernels of the example of an own op (apps/examples/custom_op.cc), as others write them: of
// installed headers alone.
#include "apps/examples/softsign.cu"

#include <cmath>

#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using testing::check_close;
using testing::DeviceBuffer;
using testing::error_of;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

std::vector<Tensor> run_softsign(const Tensor& x_values, const Tensor& dy_values) {
  const DeviceBuffer x(x_values), dy(dy_values), y(x_values.shape(), kF32),
      dx(x_values.shape(), kF32);
  const int64_t numel = x_values.numel();
  example::cuda::softsign_fwd(nullptr, {y.data(), x.data(), kF32, numel});
  example::cuda::softsign_bwd(nullptr, {dx.data(), dy.data(), x.data(), kF32, numel});
  return {y.tensor(), dx.tensor()};
}

}  // namespace

TEST_CASE("example op: its CUDA kernels are the formula, in all schedules", "[simt]") {
  for (const int64_t numel : {1, 255, 256, 1000}) {
    INFO(numel);
    const Tensor x = randn({numel}, kF32, 1, 3), dy = randn({numel}, kF32, 2);
    std::vector<double> y, dx;
    const std::vector<double> xs = x.to_vector(), dys = dy.to_vector();
    for (size_t i = 0; i < xs.size(); ++i) {
      const double d = 1 + std::abs(xs[i]);
      y.push_back(xs[i] / d), dx.push_back(dys[i] / (d * d));
    }
    const auto actual = run_in_all_schedules([&] { return run_softsign(x, dy); });
    check_close(actual[0], from_values(std::span<const double>(y), {numel}), tol(kF32, 1), "y");
    check_close(actual[1], from_values(std::span<const double>(dx), {numel}), tol(kF32, 1), "dx");
  }
}

TEST_CASE("example op: a dtype that its CUDA kernels lack is named", "[simt]") {
  const DeviceBuffer x(randn({4}, kF64)), y({4}, kF64);
  CHECK(error_of([&] {
          example::cuda::softsign_fwd(nullptr, {y.data(), x.data(), kF64, 4});
        }).find("softsign: expected f32 on cuda, got f64") != std::string::npos);
}

}  // namespace tessera
