#pragma once

#include "core/runtime/backends.h"

namespace tessera {

/// Which code multiplies matrices on CUDA devices: that of the current Context's options, until it
/// is set there. The two backends add in different orders: results agree within rounding, each is
/// bitwise repeatable.
void set_gemm_backend(GemmBackend backend);
GemmBackend gemm_backend();

/// Whether cuBLASLt may round f32 operands to TF32 (10 bits) to use tensor cores, in the current
/// Context. bf16 and f16 products are not affected, nor is the project's own kernel.
void set_gemm_tf32(bool is_allowed);
bool gemm_tf32();

}  // namespace tessera
