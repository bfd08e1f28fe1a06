#pragma once

#include "kernels/matmul/kernel.h"

namespace tessera::kernels::cpu {

/// The product without activation, of one batch, through f32 panels: any floating dtype but f64.
/// What `matmul` does for f16, and for bf16 where the processor cannot multiply it.
void product_panels(const Matmul& p);

}  // namespace tessera::kernels::cpu
