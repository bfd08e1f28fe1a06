#include "kernels/nf4/nf4.h"

#include <vector>

#include "kernels/nf4/codes.h"
#include "kernels/nf4/kernel.h"
#include "kernels/optimizer/dynamic_map.h"

namespace tessera {
namespace kernels {

Cost Nf4Quantize::cost() const {
  return Cost(20.0 * static_cast<double>(numel))
      .write(records, nf4_nbytes(numel))
      .write(absmax, nf4_num_blocks(numel) * static_cast<int64_t>(sizeof(float)))
      .read(values, numel * static_cast<int64_t>(size_of(dtype)));
}

Cost Nf4Mean::cost() const {
  return Cost(static_cast<double>(num_blocks))
      .write(mean, sizeof(float))
      .read(absmax, num_blocks * static_cast<int64_t>(sizeof(float)));
}

Cost Nf4Compress::cost() const {
  constexpr auto kItem = static_cast<int64_t>(sizeof(float));
  return Cost(10.0 * static_cast<double>(num_blocks))
      .write_or_accumulate(records, nf4_nbytes(count * kNf4Block), true)
      .write(nested, (num_blocks + kNf4NestedBlock - 1) / kNf4NestedBlock * kItem)
      .read(absmax, num_blocks * kItem)
      .read(mean, kItem)
      .read(map, 512 * kItem);
}

Cost Nf4Dequantize::cost() const {
  constexpr auto kItem = static_cast<int64_t>(sizeof(float));
  const int64_t first = first_record / (kNf4NestedBlock / kNf4RecordBlocks);
  const int64_t last = (first_record + (numel + kNf4Record - 1) / kNf4Record - 1) /
                       (kNf4NestedBlock / kNf4RecordBlocks);
  return Cost(static_cast<double>(numel))
      .write(values, numel * static_cast<int64_t>(size_of(dtype)))
      .read(records, nf4_nbytes(numel))
      .read(nested + first, (last + 1 - first) * kItem)
      .read(mean, kItem)
      .read(map, 256 * kItem);
}

TESSERA_DEFINE_KERNEL(nf4_quantize, Nf4Quantize);
TESSERA_DEFINE_KERNEL(nf4_mean, Nf4Mean);
TESSERA_DEFINE_KERNEL(nf4_compress, Nf4Compress);
TESSERA_DEFINE_KERNEL(nf4_dequantize, Nf4Dequantize);

}  // namespace kernels

namespace {

void check(const char* op, const char* name, const Tensor& t, DType dtype, int64_t numel) {
  TESSERA_CHECK_DTYPE(t.dtype() == dtype, "{}: {} must be {}, got {}", op, name, dtype, t.dtype());
  TESSERA_CHECK_SHAPE(t.num_dims() == 1 && t.numel() == numel && t.is_contiguous(),
                      "{}: {} must be [{}], got {}", op, name, numel, t.shape());
}

void check_values(const char* op, const Tensor& values) {
  TESSERA_CHECK_DTYPE(values.dtype() == kF32 || values.dtype() == kBF16 || values.dtype() == kF16,
                      "{}: values must be f32, bf16 or f16, got {}", op, values.dtype());
  TESSERA_CHECK_SHAPE(values.is_contiguous(), "{}: values must be contiguous, got strides {} of {}",
                      op, fmt::join(values.strides(), ", "), values.shape());
}

void check_first(const char* op, int64_t first) {
  TESSERA_CHECK_SHAPE(first >= 0 && first % kNf4Record == 0,
                      "{}: the first element must be a multiple of {}, got {}", op, kNf4Record,
                      first);
}

}  // namespace

void nf4_quantize(const Tensor& records, const Tensor& absmax, const Tensor& values) {
  constexpr const char* kOp = "nf4_quantize";
  check_values(kOp, values);
  check(kOp, "records", records, kU8, nf4_nbytes(values.numel()));
  check(kOp, "absmax", absmax, kF32, nf4_num_blocks(values.numel()));
  if (values.numel() == 0) return;
  kernels::nf4_quantize(current_stream(),
                        {static_cast<uint8_t*>(records.raw_data()), absmax.data<float>(),
                         values.raw_data(), values.dtype(), values.numel()});
}

void nf4_compress(const Tensor& records, const Tensor& scales, const Tensor& absmax,
                  const Tensor& map, int64_t first) {
  constexpr const char* kOp = "nf4_compress";
  check_first(kOp, first);
  const int64_t num_blocks = absmax.numel();
  check(kOp, "absmax", absmax, kF32, num_blocks);
  check(kOp, "scales", scales, kF32, nf4_num_scales(num_blocks * kNf4Block));
  check(kOp, "map", map, kF32, 512);
  const int64_t first_block = first / kNf4Block;
  const int64_t count = std::min(records.numel() / kNf4RecordNbytes * kernels::kNf4RecordBlocks,
                                 num_blocks - first_block);
  check(kOp, "records", records, kU8, nf4_nbytes(std::max<int64_t>(0, count) * kNf4Block));
  if (num_blocks == 0) return;
  float* const mean = scales.data<float>();
  kernels::nf4_mean(current_stream(), {mean, absmax.data<float>(), num_blocks});
  kernels::nf4_compress(current_stream(),
                        {static_cast<uint8_t*>(records.raw_data()), mean + 1, absmax.data<float>(),
                         mean, map.data<float>(), num_blocks, first_block, count});
}

void nf4_dequantize(const Tensor& values, const Tensor& records, const Tensor& scales,
                    const Tensor& map, int64_t first) {
  constexpr const char* kOp = "nf4_dequantize";
  check_values(kOp, values);
  check_first(kOp, first);
  check(kOp, "records", records, kU8, nf4_nbytes(values.numel()));
  check(kOp, "map", map, kF32, 512);
  TESSERA_CHECK_DTYPE(scales.dtype() == kF32, "{}: scales must be f32, got {}", kOp,
                      scales.dtype());
  TESSERA_CHECK_SHAPE(
      scales.num_dims() == 1 && scales.numel() >= nf4_num_scales(first + values.numel()),
      "{}: scales must be [{}] or more, got {}", kOp, nf4_num_scales(first + values.numel()),
      scales.shape());
  if (values.numel() == 0) return;
  const float* const mean = scales.data<float>();
  kernels::nf4_dequantize(
      current_stream(),
      {values.raw_data(), static_cast<const uint8_t*>(records.raw_data()), mean + 1, mean,
       map.data<float>(), values.dtype(), first / kNf4Record, values.numel()});
}

Tensor nf4_map() {
  const kernels::DynamicMap& map = kernels::dynamic_map(/*is_signed=*/true);
  std::vector<float> values(map.values.begin(), map.values.end());
  values.insert(values.end(), map.thresholds.begin(), map.thresholds.end());
  return from_values(std::span<const float>(values), {512}, kF32);
}

}  // namespace tessera
