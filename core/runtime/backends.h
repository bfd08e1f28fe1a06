#pragma once

#include <cstdint>

#include "core/enum_names.h"

// Which code computes where a library offers what this project has kernels for, and how libraries
// are used. A Context has one choice of each, so that two models in one process may differ.

namespace tessera {

/// Which code computes attention on CUDA devices.
enum class AttentionBackend : unsigned char {
  kOwn,    ///< the project's kernels; bitwise repeatable
  kCudnn,  ///< cuDNN where it takes the problem (bf16 or f16, aligned, no documents, alibi, window
           ///< or softcap, all gradients wanted, none added to), else `kOwn`; its dq is summed by
           ///< atomics: not bitwise repeatable. An error where cuDNN 9 cannot be loaded
  kAuto,   ///< the faster of both, as the current Tuning has timed them (kernels/tuning); else kOwn
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

/// Of NCCL's communicators, taken where they are made and inherited by those split from them.
struct NcclOptions {
  /// reduce_scatter by NCCL's own sum where out == wire and nothing is accumulated: fewer bytes of
  /// staging, but the order of the sum is NCCL's, and so are the bits.
  bool native_reduce_scatter = false;
  /// Thread blocks a communicator may use at once; 0 = NCCL's choice. Two communicators at work
  /// take them from compute twice.
  int max_ctas = 0;
  /// `Comm::allocate` of fewer bytes gives ordinary memory: NCCL's comes in pieces of 2 MiB.
  int64_t min_registered_nbytes = int64_t{1} << 20;
};

struct Backends {
  AttentionBackend attention = AttentionBackend::kOwn;
  GemmBackend gemm = GemmBackend::kAuto;
  bool gemm_tf32 = false;  ///< cuBLASLt may round f32 operands to TF32
  NcclOptions nccl = {};
};

}  // namespace tessera
