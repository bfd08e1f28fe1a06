#include "core/elementary/kernel.h"
#include "core/runtime/cuda/cuda.h"
#include "test/testing.h"

// launch() as nvcc compiles it. The emulator's: test/simt/emulator_test.cc.

namespace tessera {
namespace {

using testing::error_of;

TEST_CASE("cuda launch: without a device the error names kernel, sizes and reason", "[cuda]") {
  const CudaProbe probe = probe_cuda();
  if (probe.num_devices > 0) {
    WARN("skipped: there is a device");
    return;
  }
  const auto fill = [] { kernels::cuda::fill(nullptr, {nullptr, kF32, {1000}, {1}, 1.0}); };
  CHECK_THROWS_AS(fill(), CudaError);
  const std::string text = error_of(fill);
  INFO(text);
  CHECK(text.find("fill: launch of grid [1, 1, 1], block [256, 1, 1], 0 bytes of shared memory "
                  "failed: ") == 0);
  CHECK(text.find(" (cudaError") != std::string::npos);
  CHECK(text.find(" core/runtime/cuda/launch.cuh:") != std::string::npos);
}

TEST_CASE("cuda launch: a grid that is too large is an error before the launch", "[cuda]") {
  const int64_t numel = int64_t{1} << 42;
  const auto fill = [&](int64_t count) {
    kernels::cuda::fill(nullptr, {nullptr, kU8, {count}, {2}, 1.0});  // strided: 1 a thread
  };
  CHECK(error_of([&] {
          fill(numel);
        }).find("grid_blocks: expected 0 to 2147483647 blocks, got 17179869184") == 0);
}

TEST_CASE("cuda launch: an empty range launches nothing", "[cuda]") {
  kernels::cuda::fill(nullptr, {nullptr, kF32, {0}, {1}, 1.0});
  kernels::cuda::copy(nullptr, {nullptr, nullptr, kF32, kBF16, {3, 0}, {1, 1}, {1, 1}, true});
}

}  // namespace
}  // namespace tessera
