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

TEST_CASE("simt scale_check: the bits and the verdict of the CPU kernel, any dtype and alignment",
          "[loss_scale][simt]") {
  for (const DType from : {kF32, kBF16, kF16}) {
    for (const DType to : {kF32, kBF16, kF16}) {
      for (const int64_t numel : {1, 7, 263, 5000}) {
        for (const int64_t bad : {int64_t{-1}, int64_t{0}, numel / 2, numel - 1}) {
          for (const int64_t offset : {0, 1}) {
            Tensor x = testing::randn({numel}, from, 3);
            // Beyond the range of f16 only, or not a number at all.
            if (bad >= 0) x.narrow(0, bad, 1).fill_(offset == 0 ? 1e6 : double(NAN));
            const auto run = [&](bool on_device) {
              const DeviceBuffer x_buffer(x, offset), dst(zeros({numel}, to), offset),
                  found(zeros({1}, kU8));
              const kernels::ScaleCheck args{
                  dst.data(), x_buffer.data(), found.as<uint8_t>(), to, from, 0.5f, numel};
              on_device ? kernels::cuda::scale_check(nullptr, args)
                        : kernels::cpu::scale_check(args);
              return std::vector<Tensor>{dst.tensor(), found.tensor()};
            };
            INFO(fmt::format("{} to {}, {} elements, {} is bad, offset {}", from, to, numel, bad,
                             offset));
            const auto expected = run(false);
            const auto actual = run_in_all_schedules([&] { return run(true); });
            if (offset == 0 || bad < 0) check_bitwise(actual[0], expected[0], "dst");
            check_bitwise(actual[1], expected[1], "found_inf");
            const bool is_beyond = offset == 1 || from == kF16 || to == kF16;
            CHECK(actual[1].item() == (bad >= 0 && is_beyond ? 1 : 0));
          }
        }
      }
    }
  }
  kernels::ScaleCheck args{};
  kernels::cuda::scale_check(nullptr, args);  // nothing to do
  args.numel = 1, args.dtype = kF64;
  CHECK(testing::error_of([&] {
          kernels::cuda::scale_check(nullptr, args);
        }).find("scale_check: no CUDA kernel for dtype f64") == 0);
}

TEST_CASE("simt scale_check: first and last block of arrays above 2^32 bytes",
          "[loss_scale][simt]") {
  const int64_t numel = (int64_t{1} << 30) + 5;
  const simt::ReservedBuffer x(numel * 4), dst(numel * 4);
  const DeviceBuffer found(zeros({1}, kU8));
  x.as<float>()[0] = 2, x.as<float>()[numel - 1] = INFINITY;
  const simt::OnlyBlocks ends({0, -1});
  // Elements far from both ends are strided over: too many to emulate, so the grid sees few.
  for (const int64_t first : {int64_t{0}, numel - 1000}) {
    kernels::cuda::scale_check(nullptr, {dst.as<float>() + first, x.as<float>() + first,
                                         found.as<uint8_t>(), kF32, kF32, 0.5f, 1000});
    CHECK(*found.as<uint8_t>() == (first == 0 ? 0 : 1));
  }
  CHECK(dst.as<float>()[0] == 1);
  CHECK(std::isinf(dst.as<float>()[numel - 1]));
}

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
