#pragma once

namespace tessera {

/// Which code multiplies matrices on CUDA devices.
enum class GemmBackend : unsigned char {
  kAuto,      ///< cuBLASLt where it is installed and offers the product, else `kOwn`
  kOwn,       ///< the project's tensor-core kernel
  kCublasLt,  ///< as kAuto, but an error where cuBLASLt cannot be loaded
};

/// For all products submitted from now on, in all threads. The two backends add in different
/// orders: results agree within rounding, each is bitwise repeatable.
void set_gemm_backend(GemmBackend backend);
GemmBackend gemm_backend();

/// Whether cuBLASLt may round f32 operands to TF32 (10 bits) to use tensor cores; false at first.
/// bf16 and f16 products are not affected, nor is the project's own kernel.
void set_gemm_tf32(bool is_allowed);
bool gemm_tf32();

}  // namespace tessera
