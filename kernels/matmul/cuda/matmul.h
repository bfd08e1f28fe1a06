#pragma once

#include "kernels/matmul/kernel.h"

namespace tessera::kernels::cuda {

/// Bytes of `Matmul::workspace` for this product on the current device, as things are set now.
int64_t matmul_workspace_nbytes(const Matmul& p);

/// Whether the product also computes `row_sums`, which is set.
bool matmul_fuses_row_sums(const Matmul& p);

}  // namespace tessera::kernels::cuda
