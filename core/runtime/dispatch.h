#pragma once

#include "core/runtime/stream.h"

// The whole backend seam for kernels. A family's `kernel.h` declares each kernel with
// TESSERA_DECLARE_KERNEL(rms_norm_fwd, RmsNormFwd), its `.cc` defines the dispatch with
// TESSERA_DEFINE_KERNEL, and `cpu.cc` (`cuda.cu`) defines `cpu::rms_norm_fwd` (`cuda::...`).
// An argument struct is plain: pointers, sizes, flags and `Cost cost() const`; no Tensor.

#if TESSERA_CUDA_KERNELS
#include "core/runtime/cuda/cuda.h"
#define TESSERA_IF_CUDA(...) __VA_ARGS__
#else
#define TESSERA_IF_CUDA(...)
#endif

#define TESSERA_DECLARE_KERNEL(fn, Args)              \
  void fn(const ::tessera::Stream& s, const Args& a); \
  namespace cpu {                                     \
  void fn(const Args& a);                             \
  }                                                   \
  namespace cuda {                                    \
  void fn(CUstream_st* s, const Args& a);             \
  }                                                   \
  static_assert(true)

#define TESSERA_DEFINE_KERNEL(fn, Args)                                                         \
  void fn(const ::tessera::Stream& s, const Args& a) {                                          \
    if (s.is_observed()) s.declare(#fn, a.cost());                                              \
    switch (s.device().type) {                                                                  \
      case ::tessera::DeviceType::kCpu:                                                         \
        s.submit(#fn, [a] { cpu::fn(a); });                                                     \
        return;                                                                                 \
      case ::tessera::DeviceType::kCuda:                                                        \
        TESSERA_IF_CUDA(const ::tessera::CudaTask task(s, #fn); cuda::fn(s.cuda(), a); return;) \
        break;                                                                                  \
    }                                                                                           \
    TESSERA_UNIMPLEMENTED("{}: no kernel for device {}", #fn, s.device());                      \
  }                                                                                             \
  static_assert(true)
