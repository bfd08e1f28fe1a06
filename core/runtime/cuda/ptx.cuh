#pragma once

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/runtime/cuda/launch.cuh"

// One wrapper an instruction, for sm_80 and up, with its fragment layout as a formula; the only
// inline assembly of the project. The second body of each is test/simt's.
//
// Lanes of a warp: g = lane / 4, t = lane % 4. A register holds two 16-bit elements, the lower
// index in the lower half.

namespace tessera::cuda {
inline namespace TESSERA_CUDA_BODY {

#if defined(TESSERA_SIMT)

inline float f16_bits_to_float(uint16_t bits) {
  return Float16::decode(bits);
}
inline uint16_t float_to_f16_bits(float value) {
  return Float16::encode(value);
}
inline uint16_t float_to_bf16_bits(float value) {
  return BFloat16(value).bits;
}
template <class T>
uint32_t pack2(float lo, float hi) {
  return static_cast<uint32_t>(T(lo).bits) | static_cast<uint32_t>(T(hi).bits) << 16;
}
inline float exp2_approx(float x) {
  return exp2f(x);
}
inline float log2_approx(float x) {
  return log2f(x);
}
inline float rcp_approx(float x) {
  return 1.0f / x;
}

inline void cp_async_16(void* smem, const void* global, bool valid = true,
                        simt::Where where = simt::Where::here()) {
  simt::copy_async(smem, valid ? global : nullptr, 16, where);
}
inline void cp_async_commit() {
  simt::commit_copies();
}
template <int N>
void cp_async_wait() {
  simt::wait_copies(N);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* smem_row,
                        simt::Where where = simt::Where::here()) {
  simt::load_matrices(r, 4, smem_row, false, where);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* smem_row,
                              simt::Where where = simt::Where::here()) {
  simt::load_matrices(r, 4, smem_row, true, where);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* smem_row,
                        simt::Where where = simt::Where::here()) {
  simt::load_matrices(r, 2, smem_row, false, where);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* smem_row,
                              simt::Where where = simt::Where::here()) {
  simt::load_matrices(r, 2, smem_row, true, where);
}

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  const float (&c)[4], simt::Where where = simt::Where::here()) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
  const auto decode = [](uint16_t bits) {
    T value;
    value.bits = bits;
    return static_cast<float>(value);
  };
  simt::multiply_accumulate(d, a, b, c, +decode, where);
}

#else

__device__ inline float f16_bits_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
/// Rounds to nearest even, as do the next two.
__device__ inline uint16_t float_to_f16_bits(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ inline uint16_t float_to_bf16_bits(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
/// Two elements of T (BFloat16 or Float16) in one register.
template <class T>
__device__ inline uint32_t pack2(float lo, float hi) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
  uint32_t packed;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  }
  return packed;
}

/// 2^x with about 2 units in the last place of error; subnormal results become 0. The emulator is
/// exact here and in the next two.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Starts a copy of 16 bytes from global to shared memory, past the registers and the L1 cache;
/// both addresses are multiples of 16. Without `valid` zeros are written and nothing is read.
__device__ inline void cp_async_16(void* smem, const void* global, bool valid = true) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(smem));
  const int num_read = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(num_read)
               : "memory");
}
/// Closes this thread's group of copies.
__device__ inline void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until at most the N youngest groups of this thread are under way. Other threads see the
/// bytes after the barrier that follows.
template <int N>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/// Four (two) 8 x 8 matrices of 16-bit elements from shared memory. Lane l passes the address of
/// row l % 8 of matrix l / 8 (x2: lanes 16 to 31 are ignored), 16-byte aligned.
///   r[i] of a lane = row g, columns 2t and 2t + 1 of matrix i
///   _trans:          rows 2t and 2t + 1, column g of matrix i
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void* smem_row) {
  const auto row = static_cast<unsigned>(__cvta_generic_to_shared(smem_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* smem_row) {
  const auto row = static_cast<unsigned>(__cvta_generic_to_shared(smem_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ inline void ldmatrix_x2(uint32_t (&r)[2], const void* smem_row) {
  const auto row = static_cast<unsigned>(__cvta_generic_to_shared(smem_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}
__device__ inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* smem_row) {
  const auto row = static_cast<unsigned>(__cvta_generic_to_shared(smem_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}

/// d = a b + c of one warp: a [16, 16], b [16, 8] of T (BFloat16 or Float16), c and d [16, 8] f32.
/// Element e (0 = lower half) of register i, or register i:
///   a  row g + 8 (i % 2),  column 2t + e + 8 (i / 2)
///   b  row 2t + e + 8 i,   column g
///   c, d  row g + 8 (i / 2),  column 2t + i % 2
/// The order of the sum over k is the hardware's; the emulator adds k = 0, 1, ... to c in f32.
template <class T>
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                    const float (&c)[4]) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  }
}

#endif

}  // namespace TESSERA_CUDA_BODY
}  // namespace tessera::cuda
