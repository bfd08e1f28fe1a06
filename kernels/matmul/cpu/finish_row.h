#pragma once

#include "kernels/elementwise/row_io.h"
#include "kernels/matmul/kernel.h"

namespace tessera::kernels::cpu {

/// c[row, begin + i] = sums[i] + what else a row gets. C is the type that sums are in.
template <class C>
void finish_row(const Matmul& p, int64_t row, int64_t begin, C* sums, int64_t count) {
  C buffer[kPieceCols];
  const auto add = [&](const void* values, DType dtype, int64_t offset) {
    const C* terms = load_piece(buffer, values, dtype, offset, 1, count);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) sums[i] += terms[i];
  };
  if (p.bias != nullptr) add(p.bias, p.bias_dtype, begin);
  if (p.residual != nullptr) add(p.residual, p.c_dtype, row * p.ld_residual + begin);
  store_piece(p.c, p.c_dtype, row * p.ldc + begin, 1, sums, count, p.accumulate);
}

}  // namespace tessera::kernels::cpu
