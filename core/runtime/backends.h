#pragma once

#include "core/enum_names.h"

// Which code computes where a library offers what this project has kernels for. A Context has one
// choice of each, so that two models in one process may differ.

namespace tessera {

/// Which code computes attention on CUDA devices.
enum class AttentionBackend : unsigned char {
  kOwn,    ///< the project's kernels; bitwise repeatable
  kCudnn,  ///< cuDNN where it takes the problem (bf16 or f16, aligned, no documents, alibi, window
           ///< or softcap, all gradients wanted, none added to), else `kOwn`; its dq is summed by
           ///< atomics: not bitwise repeatable. An error where cuDNN 9 cannot be loaded
  kAuto,   ///< the faster of both: the first call of a shape times each, which waits for the device
};
constexpr auto enum_names(AttentionBackend) {
  return std::to_array<EnumName<AttentionBackend>>({{AttentionBackend::kOwn, "own"},
                                                    {AttentionBackend::kCudnn, "cudnn"},
                                                    {AttentionBackend::kAuto, "auto"}});
}

/// Which code multiplies matrices on CUDA devices.
enum class GemmBackend : unsigned char {
  kAuto,      ///< cuBLASLt where it is installed and offers the product, else `kOwn`
  kOwn,       ///< the project's tensor-core kernel
  kCublasLt,  ///< as kAuto, but an error where cuBLASLt cannot be loaded
};
constexpr auto enum_names(GemmBackend) {
  return std::to_array<EnumName<GemmBackend>>({{GemmBackend::kAuto, "auto"},
                                               {GemmBackend::kOwn, "own"},
                                               {GemmBackend::kCublasLt, "cublaslt"}});
}

struct Backends {
  AttentionBackend attention = AttentionBackend::kOwn;
  GemmBackend gemm = GemmBackend::kAuto;
  bool gemm_tf32 = false;  ///< cuBLASLt may round f32 operands to TF32
};

}  // namespace tessera
