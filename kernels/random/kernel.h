#pragma once

#include "core/dtype.h"
#include "core/random.h"
#include "core/runtime/dispatch.h"

// Random words: four a Philox block. Word w of block b is what element 4 b + w of a sequence uses.

namespace tessera::kernels {

/// y = word >= threshold ? x * factor : 0, or += with `accumulate`. The words of a row come from
/// blocks (high = first_row + row, low = column / 4). Forward on x, backward on dy.
struct Dropout {
  void* y;
  const void* x;
  DType y_dtype, dtype;
  PhiloxKey key;
  uint32_t threshold;
  double factor;
  int64_t first_row, rows, cols, y_stride, x_stride;
  bool accumulate = false;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(dropout, Dropout);

/// x[i] = mean + stddev * (normal number first_element + i). Words from blocks (high = 0).
struct FillNormal {
  void* x;
  DType dtype;
  PhiloxKey key;
  int64_t first_element, numel;
  double mean, stddev;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(fill_normal, FillNormal);

/// x[i] = low + (high - low) * (uniform number first_element + i).
struct FillUniform {
  void* x;
  DType dtype;
  PhiloxKey key;
  int64_t first_element, numel;
  double low, high;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(fill_uniform, FillUniform);

}  // namespace tessera::kernels
