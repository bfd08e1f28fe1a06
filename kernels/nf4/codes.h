#pragma once

#include <cstdint>

#include "kernels/nf4/nf4.h"

// The 16 codes, for host and device.

#if defined(__CUDACC__)
#define TESSERA_NF4_FUNCTION __host__ __device__ constexpr
#else
#define TESSERA_NF4_FUNCTION constexpr
#endif

namespace tessera::kernels {

/// Ascending.
TESSERA_NF4_FUNCTION float nf4_value(int code) {
  constexpr float kValues[16] = {
      -1.0f,
      -0.6961928009986877f,
      -0.5250730514526367f,
      -0.39491748809814453f,
      -0.28444138169288635f,
      -0.18477343022823334f,
      -0.09105003625154495f,
      0.0f,
      0.07958029955625534f,
      0.16093020141124725f,
      0.24611230194568634f,
      0.33791524171829224f,
      0.44070982933044434f,
      0.5626170039176941f,
      0.7229568362236023f,
      1.0f,
  };
  return kValues[code];
}
inline constexpr int kNf4Zero = 7;  ///< the code of 0

/// The largest scaled value that takes code `i` or a lower one: the middle of two codes.
TESSERA_NF4_FUNCTION float nf4_threshold(int i) {
  return (nf4_value(i) + nf4_value(i + 1)) / 2.0f;
}

inline constexpr float kNf4LeastScale = 1e-38f;
inline constexpr int64_t kNf4CodeBytes = kNf4Record / 2;  ///< of a record
inline constexpr int64_t kNf4RecordBlocks = kNf4Record / kNf4Block;
inline constexpr int64_t kNf4NestedBlock = 256;  ///< scales that share a nested one

}  // namespace tessera::kernels
