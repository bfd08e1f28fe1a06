#pragma once

#include "core/random.h"
#include "core/runtime/cuda/launch.cuh"

namespace tessera::kernels::cuda {
inline namespace TESSERA_CUDA_BODY {

/// A block of Philox: what four elements use.
struct Words {
  uint32_t values[4];
};

/// tessera::philox on the device.
__device__ inline Words philox_words(PhiloxKey key, uint64_t high, uint64_t low) {
  Words c{{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
           static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)}};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c.values[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c.values[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.values[1] ^ key.k0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.values[3] ^ key.k1, static_cast<uint32_t>(p0)}};
    key.k0 += 0x9E3779B9u;
    key.k1 += 0xBB67AE85u;
  }
  return c;
}

}  // namespace TESSERA_CUDA_BODY
}  // namespace tessera::kernels::cuda
