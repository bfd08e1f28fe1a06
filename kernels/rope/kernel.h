#pragma once

#include "core/dtype.h"
#include "core/runtime/dispatch.h"

namespace tessera::kernels {

/// Cosines and sines of rotary angles, f32, row r = [cos(a_0) .. cos(a_n-1), sin(a_0) ..
/// sin(a_n-1)] with n = rotary_dim / 2 and a_i = positions[r] * frequency_i, frequency_i =
/// theta^(-2 i / rotary_dim) after scaling. Angles in f64, so that the error of the cosine stays
/// below 1e-6 at any i32 position.
struct RopeTable {
  enum class Scaling : unsigned char { kNone, kLinear, kLlama3 };
  float* table;              ///< [rows, 2, rotary_dim / 2]
  const int32_t* positions;  ///< [rows], or absent: 0 .. rows - 1
  int64_t rows, rotary_dim;
  double theta;
  Scaling scaling = Scaling::kNone;
  double factor = 1;           ///< both scalings: frequencies are divided by it
  double low_freq_factor = 1;  ///< kLlama3, as the next two
  double high_freq_factor = 4;
  double original_max_position = 8192;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(rope_table, RopeTable);

/// y = x with the pairs of each head's first rotary_dim elements rotated by the table's angles, or
/// by their negatives (`inverse`: the backward). Pairs are (i, i + rotary_dim / 2), or
/// (2 i, 2 i + 1) if interleaved; the other elements are copied. y may be x (same strides).
struct Rope {
  void* y;
  const void* x;
  const float* table;
  DType dtype;
  bool interleaved, inverse, accumulate;
  int64_t batch, time, heads, head_dim, rotary_dim;
  int64_t x_strides[3], y_strides[3];  ///< elements between batches, times, heads
  int64_t table_batch_stride;          ///< floats; 0: one table for all batches
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(rope, Rope);

}  // namespace tessera::kernels
