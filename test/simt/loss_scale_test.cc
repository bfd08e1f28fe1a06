#include <limits>

#include "kernels/loss_scale/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::UnscaleNorm;
using kernels::UpdateLossScale;
using testing::check_bitwise;
using testing::DeviceBuffer;
using testing::run_in_all_schedules;

TEST_CASE("simt unscale_norm: the bits of the CPU kernel for any norm and scale",
          "[loss_scale][simt]") {
  for (const double norm : {0.0, 1.0, 3.5e4, 3e38, double(INFINITY), double(NAN)}) {
    for (const double scale : {0.0, 1.0, 65536.0, 1e-30}) {  // 0: no scale
      const auto run = [&](bool on_device) {
        const DeviceBuffer norm_buffer(from_values({norm}, {1}, kF32)), factor({1}, kF32),
            found_inf({1}, kU8), scale_buffer(from_values({scale}, {1}, kF32));
        const UnscaleNorm args{norm_buffer.as<float>(),
                               factor.as<float>(),
                               found_inf.as<uint8_t>(),
                               scale == 0.0 ? nullptr : scale_buffer.as<float>(),
                               2.0f,
                               0.5f};
        on_device ? kernels::cuda::unscale_norm(nullptr, args) : kernels::cpu::unscale_norm(args);
        return std::vector<Tensor>{norm_buffer.tensor(), factor.tensor(), found_inf.tensor()};
      };
      INFO("norm " << norm << ", scale " << scale);
      const auto expected = run(false);
      const auto actual = run_in_all_schedules([&] { return run(true); });
      if (!std::isnan(norm)) check_bitwise(actual[0], expected[0], "norm");
      check_bitwise(actual[1], expected[1], "factor");
      check_bitwise(actual[2], expected[2], "found_inf");
      CHECK(actual[2].item() == (std::isfinite(norm) ? 0 : 1));
    }
  }
}

TEST_CASE("simt update_loss_scale: follows the CPU kernel through growth, backoff and limits",
          "[loss_scale][simt]") {
  struct State {
    explicit State(bool on_device) : on_device(on_device) {}
    bool on_device;
    DeviceBuffer scale{from_values({4.0}, {1}, kF32)}, num_good{zeros({1}, kI64)},
        num_skipped{zeros({1}, kI64)}, found_inf{zeros({1}, kU8)};

    void step(uint8_t found) const {
      *found_inf.as<uint8_t>() = found;
      const UpdateLossScale args{scale.as<float>(),
                                 num_good.as<int64_t>(),
                                 num_skipped.as<int64_t>(),
                                 found_inf.as<uint8_t>(),
                                 2.0f,
                                 0.5f,
                                 1.0f,
                                 16.0f,
                                 3};
      on_device ? kernels::cuda::update_loss_scale(nullptr, args)
                : kernels::cpu::update_loss_scale(args);
    }
  };
  const State cpu(false), device(true);
  for (const uint8_t found : {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 0, 0}) {
    cpu.step(found), device.step(found);
    check_bitwise(device.scale.tensor(), cpu.scale.tensor(), "scale");
    check_bitwise(device.num_good.tensor(), cpu.num_good.tensor(), "num_good");
    check_bitwise(device.num_skipped.tensor(), cpu.num_skipped.tensor(), "num_skipped");
  }
  CHECK(*device.num_skipped.as<int64_t>() == 7);
  CHECK(*device.scale.as<float>() == 2.0f);
}

}  // namespace
}  // namespace tessera
