#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/runtime/dispatch.h"

// [Note: NF4]
// Four-bit weights of QLoRA (Dettmers et al. 2023, arXiv:2305.14314), in the numbers of bitsandbytes.
// 64 neighbouring values share a scale, the largest magnitude among them; a value over its scale takes
// the nearest of 16 codes (quantiles of a normal distribution, with 0 and +-1), of two equally near
// ones the lower. The scales are kept in 8 bits (double quantisation): less their mean, 256 of them
// share one f32, and each has a code of the signed dynamic map (kernels/optimizer/dynamic_map.h).
//   value = nf4[code] * (map[scale code] * nested + mean),   each operation rounded in f32
// Two differences are on purpose. The mean is that of the sum in f64, in one order on every device:
// PyTorch's f32 sum is another unit in the last place away in about half of all tensors, and depends
// on the processor. Scale codes are those of the reference of bitsandbytes 0.50: its f32 kernel for
// CPUs is a table that gives 0.2 % of the scales a neighbouring code.
//
// 256 values, the granule of shards, are a record of 132 bytes: 128 bytes of codes, of two neighbours
// the first in the high half, then 4 scale codes. So a part of a tensor that begins at a multiple of
// 256 is a run of records, whoever holds it. Codes behind the end of a tensor are those of 0.

namespace tessera::kernels {

/// Values to codes and scales: `numel` values from a multiple of 256 of a tensor on; not a multiple
/// of 64 only at its end. Scale codes stay as they are. A scale is at least 1e-38 in the last block,
/// if that is not whole.
struct Nf4Quantize {
  uint8_t* records;
  float* absmax;  ///< of the blocks of 64
  const void* values;
  DType dtype;  ///< f32 | bf16 | f16
  int64_t numel;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(nf4_quantize, Nf4Quantize);

/// mean = the sum of the scales of a tensor, in f64, over their number. Element i is added to sum
/// i % 256 of 256, then halves are added to each other.
struct Nf4Mean {
  float* mean;
  const float* absmax;
  int64_t num_blocks;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(nf4_mean, Nf4Mean);

/// Scales of a tensor to 8 bits: all nested scales, and the codes of the blocks in
/// [first, first + count), which are those of `records`; `first` is a multiple of 4.
struct Nf4Compress {
  uint8_t* records;
  float* nested;  ///< [num_blocks / 256], rounded up
  const float* absmax;
  const float* mean;
  const float* map;  ///< 512: values and thresholds of the signed dynamic map
  int64_t num_blocks, first, count;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(nf4_compress, Nf4Compress);

/// `numel` values of the records from `first_record` of a tensor on, rounded once to `dtype`.
struct Nf4Dequantize {
  void* values;  ///< aligned to 16 bytes
  const uint8_t* records;
  const float* nested;
  const float* mean;
  const float* map;
  DType dtype;  ///< f32 | bf16 | f16
  int64_t first_record, numel;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(nf4_dequantize, Nf4Dequantize);

}  // namespace tessera::kernels
