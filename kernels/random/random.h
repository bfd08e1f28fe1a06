#pragma once

#include "core/random.h"
#include "core/tensor.h"

namespace tessera {

/// Dropout (Srivastava et al. 2014): zeroes each element with probability p, scales the others.
///   y = keep ? x / (1 - p) : 0
/// Random   element (row, column) is a function of `random_state()`'s seed, step and op index, of
///          the row's global index (sample_offset * rows per sample + row) and of the column, so
///          that it depends neither on threads and ranks nor on how samples are batched. Counts
///          op_index up by one.
/// Shapes   x [B, ...] -> y the same; a sample is one index of B, a row one of the last dimension
///          ([B]: one element). x may be row-strided (others are copied first)
/// Dtypes   f32 | bf16 | f16 | f64; p is taken to 2^-32
/// Saves    nothing: backward draws the mask again
/// Streams  current stream; never synchronizes
/// Errors   Error unless 0 <= p < 1; DtypeError if x is not floating
Tensor dropout(const Tensor& x, double p);

/// One mask of `dropout`: all that an element's word depends on but its row and column.
struct DropoutMask {
  PhiloxKey key;
  double p = 0;
  int64_t first_row = 0;
};
/// The mask that `dropout(x, p)` would take here, for ops with a dropout inside. Counts op_index up
/// by one.
DropoutMask draw_dropout_mask(const Tensor& x, double p);
/// y = masked and scaled x, or y += it; of one shape, row-addressable.
void apply_dropout(const DropoutMask& mask, const Tensor& y, bool accumulate, const Tensor& x);

/// In place: element i of x becomes element first_element + i of the endless sequence of normal
/// numbers that `key` names, times `stddev` plus `mean` (Box-Muller over Philox, up to 5.8 sigma).
/// The sequence does not depend on how it is cut into calls.
/// Shapes   x any, contiguous
/// Dtypes   f32 | bf16 | f16 | f64; computed in f32 whatever the dtype, one rounding
/// Streams  current stream; never synchronizes; not differentiable
/// Errors   ShapeError if x is not contiguous; DtypeError if it is not floating; Error if
///          first_element < 0
void fill_normal(const Tensor& x, double mean, double stddev, PhiloxKey key,
                 int64_t first_element = 0);

/// The same with uniform numbers in [low, high) (rounding to the dtype may give `high`).
void fill_uniform(const Tensor& x, double low, double high, PhiloxKey key,
                  int64_t first_element = 0);

}  // namespace tessera
