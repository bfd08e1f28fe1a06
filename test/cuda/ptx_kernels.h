#pragma once

#include <cstdint>

// The wrappers of core/runtime/cuda/ptx.cuh in one warp: compiled once for the device and once for
// the emulator, so that a test can compare the two.

namespace tessera::testing {

constexpr int kLanes = 32;

/// What `run_ptx` reads; 16-byte aligned, in memory that the host and the device see.
struct PtxIn {
  alignas(16) uint16_t a[16 * 16];  ///< row-major, bits of T
  alignas(16) uint16_t b[16 * 8];   ///< [k, n]
  alignas(16) uint16_t bt[8 * 16];  ///< the same as [n, k]
  float c[4][kLanes];               ///< fragments
  float x[kLanes];                  ///< positive
};

/// What it writes. Registers by lane; fragments of products of a and b by both ways to load b.
struct PtxOut {
  uint32_t a[4][kLanes], a_trans[4][kLanes], b[2][kLanes], bt[2][kLanes];
  float d[4][kLanes], dt[4][kLanes];
  uint32_t copied[4][kLanes];  ///< 16 bytes of a a lane by cp.async, zeros on odd lanes
  uint32_t packed[kLanes];     ///< x and -0.3 x
  float exp2[kLanes], log2[kLanes], rcp[kLanes];
};

namespace compiled {
void run_ptx_bf16(PtxOut* out, const PtxIn* in);
void run_ptx_f16(PtxOut* out, const PtxIn* in);
}  // namespace compiled
namespace emulated {
void run_ptx_bf16(PtxOut* out, const PtxIn* in);
void run_ptx_f16(PtxOut* out, const PtxIn* in);
}  // namespace emulated

}  // namespace tessera::testing
