#include "kernels/nf4/nf4.h"

#include "kernels/nf4/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using testing::check_bitwise;
using testing::DeviceBuffer;
using testing::randn;
using testing::run_in_all_schedules;

TEST_CASE("simt nf4: codes, scales and values are the CPU's, of whole and cut blocks",
          "[nf4][simt]") {
  const Tensor map = nf4_map();
  for (const DType dtype : {kF32, kBF16, kF16}) {
    // With several nested blocks, an end inside of a block of 64, and one of a lane's 8.
    for (const int64_t numel : {int64_t{2 * 16384 + 768}, int64_t{1000}, int64_t{5}}) {
      for (const bool has_infinity : {false, true}) {
        CAPTURE(dtype, numel, has_infinity);
        Tensor values = randn({numel}, dtype, 6);
        if (has_infinity) values.narrow(0, 3, 1).fill_(INFINITY);
        if (numel > 512) values.narrow(0, 256, 64).fill_(0);
        const int64_t num_blocks = nf4_num_blocks(numel);
        const auto run = [&](bool is_cuda) {
          const DeviceBuffer x(values), records(zeros({nf4_nbytes(numel)}, kU8)),
              absmax(zeros({num_blocks})), scales(zeros({nf4_num_scales(numel)})), maps(map),
              out(zeros({numel}, dtype));
          float* const mean = scales.as<float>();
          const kernels::Nf4Quantize quantize{records.as<uint8_t>(), absmax.as<float>(), x.data(),
                                              dtype, numel};
          const kernels::Nf4Mean average{mean, absmax.as<float>(), num_blocks};
          const kernels::Nf4Compress compress{records.as<uint8_t>(),
                                              mean + 1,
                                              absmax.as<float>(),
                                              mean,
                                              maps.as<float>(),
                                              num_blocks,
                                              0,
                                              num_blocks};
          const kernels::Nf4Dequantize dequantize{
              out.data(), records.as<uint8_t>(), mean + 1, mean, maps.as<float>(), dtype, 0, numel};
          if (is_cuda) {
            kernels::cuda::nf4_quantize(nullptr, quantize);
            kernels::cuda::nf4_mean(nullptr, average);
            kernels::cuda::nf4_compress(nullptr, compress);
            kernels::cuda::nf4_dequantize(nullptr, dequantize);
          } else {
            kernels::cpu::nf4_quantize(quantize);
            kernels::cpu::nf4_mean(average);
            kernels::cpu::nf4_compress(compress);
            kernels::cpu::nf4_dequantize(dequantize);
          }
          return std::vector<Tensor>{records.tensor(), absmax.tensor(), scales.tensor(),
                                     out.tensor()};
        };
        const auto expected = run(false);
        const auto actual = run_in_all_schedules([&] { return run(true); });
        const char* names[] = {"records", "absmax", "scales", "values"};
        for (size_t i = 0; i < 4; ++i) {
          if (has_infinity && i > 0) continue;  // not a number, of whatever bits
          check_bitwise(actual[i], expected[i], names[i]);
        }
      }
    }
  }
}

TEST_CASE("simt nf4: a part of a tensor has its own scale codes and nested scales", "[nf4][simt]") {
  const int64_t numel = 3 * 16384, first = 16384 + 512, count = 16384;  // over a nested block's end
  const Tensor values = randn({numel}, kF32, 7), map = nf4_map();
  const auto run = [&](bool is_cuda) {
    const DeviceBuffer x(values), records(zeros({nf4_nbytes(count)}, kU8)),
        absmax(zeros({numel / 64})), scales(zeros({nf4_num_scales(numel)})), maps(map),
        out(zeros({count}, kBF16));
    kernels::cpu::nf4_quantize({records.as<uint8_t>(), absmax.as<float>() + first / 64,
                                x.as<float>() + first, kF32, count});
    kernels::cpu::nf4_mean({scales.as<float>(), absmax.as<float>(), numel / 64});
    const kernels::Nf4Compress compress{records.as<uint8_t>(),
                                        scales.as<float>() + 1,
                                        absmax.as<float>(),
                                        scales.as<float>(),
                                        maps.as<float>(),
                                        numel / 64,
                                        first / 64,
                                        count / 64};
    const kernels::Nf4Dequantize dequantize{out.data(),
                                            records.as<uint8_t>(),
                                            scales.as<float>() + 1,
                                            scales.as<float>(),
                                            maps.as<float>(),
                                            kBF16,
                                            first / 256,
                                            count};
    is_cuda ? kernels::cuda::nf4_compress(nullptr, compress) : kernels::cpu::nf4_compress(compress);
    is_cuda ? kernels::cuda::nf4_dequantize(nullptr, dequantize)
            : kernels::cpu::nf4_dequantize(dequantize);
    return std::vector<Tensor>{records.tensor(), scales.tensor(), out.tensor()};
  };
  const auto expected = run(false);
  const auto actual = run_in_all_schedules([&] { return run(true); });
  for (size_t i = 0; i < 3; ++i) check_bitwise(actual[i], expected[i], fmt::format("{}", i));
}

}  // namespace
}  // namespace tessera
