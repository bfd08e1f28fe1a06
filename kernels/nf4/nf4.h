#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace tessera {

inline constexpr int64_t kNf4Block = 64;          ///< values that share a scale
inline constexpr int64_t kNf4Record = 256;        ///< values of a record
inline constexpr int64_t kNf4RecordNbytes = 132;  ///< codes of 4 bits and 4 scale codes

/// Bytes of the codes and scale codes of `numel` values: 132 for each 256, rounded up.
constexpr int64_t nf4_nbytes(int64_t numel) {
  return (numel + kNf4Record - 1) / kNf4Record * kNf4RecordNbytes;
}
/// Blocks of 64 values, and so scales.
constexpr int64_t nf4_num_blocks(int64_t numel) {
  return (numel + kNf4Block - 1) / kNf4Block;
}
/// f32 values that a tensor has beside its records: the mean of its scales, and a nested scale for
/// each 16,384 values.
constexpr int64_t nf4_num_scales(int64_t numel) {
  return 1 + (numel + 16383) / 16384;
}

/// NF4 with double quantisation ([Note: NF4] in kernels/nf4/kernel.h says what is in a record) in
/// three steps, so that ranks can share a tensor out: values to codes and f32 scales, part by part;
/// the scales of the whole tensor to 8 bits; and back. None is differentiable.
/// Shapes   values [n] from element `first` of a tensor of N on, a multiple of 256, n a multiple of
///          256 or up to the end; records [nf4_nbytes(n)] u8; absmax [nf4_num_blocks(n)] f32 of that
///          part (nf4_compress: of all N); scales [nf4_num_scales(N)] f32; map: `nf4_map()`
/// Dtypes   values f32 | bf16 | f16; computed in f32, dequantised values rounded once
/// Values that are not finite make all of the tensor's dequantised values not a number.
/// Streams  current stream; never synchronizes; the same bits on every device
/// Errors   ShapeError, DtypeError if an argument is not as above
void nf4_quantize(const Tensor& records, const Tensor& absmax, const Tensor& values);
/// Sets `scales`, and the scale codes of `records`, which begin with element `first`.
void nf4_compress(const Tensor& records, const Tensor& scales, const Tensor& absmax,
                  const Tensor& map, int64_t first = 0);
void nf4_dequantize(const Tensor& values, const Tensor& records, const Tensor& scales,
                    const Tensor& map, int64_t first = 0);
/// [512] f32 on the current device: the signed dynamic map and its thresholds.
Tensor nf4_map();

}  // namespace tessera
