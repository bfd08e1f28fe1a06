#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "test/simt/simt.h"

// CUDA's names for kernels that run on the emulator. What is missing here does not compile there:
// __shared__ variables, float atomics and __activemask are absent on purpose.

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::simt::current_thread->thread_idx)
#define blockIdx (::simt::current_block->block_idx)
#define blockDim (::simt::current_block->block)
#define gridDim (::simt::current_block->grid)

constexpr int warpSize = simt::kWarpSize;

// ----- synchronization

inline void __syncthreads(simt::Where where = simt::Where::here()) {
  simt::sync_block(where);
}
inline int __syncthreads_count(int predicate, simt::Where where = simt::Where::here()) {
  return simt::sync_block_sum(predicate != 0, where);
}
inline int __syncthreads_or(int predicate, simt::Where where = simt::Where::here()) {
  return simt::sync_block_sum(predicate != 0, where) != 0;
}
inline int __syncthreads_and(int predicate, simt::Where where = simt::Where::here()) {
  return simt::sync_block_sum(predicate == 0, where) == 0;
}
inline void __syncwarp(uint32_t mask = 0xffffffffu, simt::Where where = simt::Where::here()) {
  simt::rendezvous(
      "__syncwarp", mask, nullptr, nullptr, [](const simt::Lanes&) {}, where);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// ----- shuffles: a lane outside its segment or the mask reads itself

namespace simt {

template <class T>
struct Shuffle {
  T value;
  int argument, width;
};

/// `source(lane, segment start, argument, width)` is the lane to read from.
template <class T, class Source>
T shuffle(const char* name, uint32_t mask, T value, int argument, int width, Where where) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  const Shuffle<T> in{value, argument, width};
  T out{};
  rendezvous(
      name, mask, &in, &out,
      [](const Lanes& lanes) {
        for (int lane = 0; lane < kWarpSize; ++lane) {
          if (!lanes.has(lane)) continue;
          const auto& own = lanes.in<Shuffle<T>>(lane);
          const int segment = lane / own.width * own.width;
          const int from = Source::of(lane, segment, own.argument, own.width);
          const bool valid = from >= segment && from < segment + own.width && lanes.has(from);
          lanes.out<T>(lane) = lanes.in<Shuffle<T>>(valid ? from : lane).value;
        }
      },
      where);
  return out;
}

struct ShuffleIndex {
  static int of(int, int segment, int argument, int width) {
    return segment + (argument & (width - 1));
  }
};
struct ShuffleXor {
  static int of(int lane, int, int argument, int) { return lane ^ argument; }
};
struct ShuffleUp {
  static int of(int lane, int, int argument, int) { return lane - argument; }
};
struct ShuffleDown {
  static int of(int lane, int, int argument, int) { return lane + argument; }
};

}  // namespace simt

template <class T>
T __shfl_sync(uint32_t mask, T value, int lane, int width = 32,
              simt::Where where = simt::Where::here()) {
  return simt::shuffle<T, simt::ShuffleIndex>("__shfl_sync", mask, value, lane, width, where);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = 32,
                  simt::Where where = simt::Where::here()) {
  return simt::shuffle<T, simt::ShuffleXor>("__shfl_xor_sync", mask, value, lane_mask, width,
                                            where);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32,
                 simt::Where where = simt::Where::here()) {
  return simt::shuffle<T, simt::ShuffleUp>("__shfl_up_sync", mask, value, static_cast<int>(delta),
                                           width, where);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32,
                   simt::Where where = simt::Where::here()) {
  return simt::shuffle<T, simt::ShuffleDown>("__shfl_down_sync", mask, value,
                                             static_cast<int>(delta), width, where);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate,
                              simt::Where where = simt::Where::here()) {
  uint32_t out = 0;
  simt::rendezvous(
      "__ballot_sync", mask, &predicate, &out,
      [](const simt::Lanes& lanes) {
        uint32_t ballot = 0;
        for (int i = 0; i < simt::kWarpSize; ++i)
          if (lanes.has(i) && lanes.in<int>(i) != 0) ballot |= 1u << i;
        for (int i = 0; i < simt::kWarpSize; ++i)
          if (lanes.has(i)) lanes.out<uint32_t>(i) = ballot;
      },
      where);
  return out;
}
inline int __any_sync(uint32_t mask, int predicate, simt::Where where = simt::Where::here()) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(uint32_t mask, int predicate, simt::Where where = simt::Where::here()) {
  return __ballot_sync(mask, predicate == 0, where) == 0;
}

// ----- memory

template <class T>
T __ldg(const T* data, simt::Where where = simt::Where::here()) {
  simt::check_aligned(data, sizeof(T), "__ldg", where);
  return *data;
}
template <class T>
T __ldcs(const T* data, simt::Where where = simt::Where::here()) {
  simt::check_aligned(data, sizeof(T), "__ldcs", where);
  return *data;
}
template <class T>
T __ldcg(const T* data, simt::Where where = simt::Where::here()) {
  simt::check_aligned(data, sizeof(T), "__ldcg", where);
  return *data;
}
template <class T>
void __stcs(T* data, std::type_identity_t<T> value, simt::Where where = simt::Where::here()) {
  simt::check_aligned(data, sizeof(T), "__stcs", where);
  *data = value;
}
template <class T>
void __stcg(T* data, std::type_identity_t<T> value, simt::Where where = simt::Where::here()) {
  simt::check_aligned(data, sizeof(T), "__stcg", where);
  *data = value;
}

// Atomics need no locks: fibers of one launch do not run at the same time.
template <class T>
T atomicAdd(T* data, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>, "sums of floats in an order that varies are not repeatable");
  const T old = *data;
  *data = old + value;
  return old;
}
template <class T>
T atomicMax(T* data, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  const T old = *data;
  if (value > old) *data = value;
  return old;
}
template <class T>
T atomicOr(T* data, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  const T old = *data;
  *data = old | value;
  return old;
}
template <class T>
T atomicExch(T* data, std::type_identity_t<T> value) {
  const T old = *data;
  *data = value;
  return old;
}

// ----- arithmetic

inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline long long __double_as_longlong(double x) {
  return std::bit_cast<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return std::bit_cast<double>(x);
}
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline int __ffs(int x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
// Of the same type on both sides; CUDA converts.
template <class T>
constexpr T min(T a, std::type_identity_t<T> b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, std::type_identity_t<T> b) {
  return a < b ? b : a;
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline double rsqrt(double x) {
  return 1.0 / std::sqrt(x);
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __log2f(float x) {
  return std::log2(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fsqrt_rn(float x) {
  return std::sqrt(x);
}
// Never contracted into a fused operation, as in CUDA.
[[gnu::noinline]] inline float __fmul_rn(float a, float b) {
  return a * b;
}
[[gnu::noinline]] inline float __fadd_rn(float a, float b) {
  return a + b;
}
[[gnu::noinline]] inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
[[gnu::noinline]] inline double __dmul_rn(double a, double b) {
  return a * b;
}
[[gnu::noinline]] inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline float __int2float_rn(int x) {
  return static_cast<float>(x);
}
inline float __saturatef(float x) {
  return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f;
}
inline void sincospif(float x, float* s, float* c) {
  constexpr double kPi = 3.14159265358979323846;
  const double reduced = std::remainder(static_cast<double>(x), 2.0) * kPi;
  *s = static_cast<float>(std::sin(reduced));
  *c = static_cast<float>(std::cos(reduced));
}
inline float sinpif(float x) {
  float s = 0, c = 0;
  sincospif(x, &s, &c);
  return s;
}
inline float cospif(float x) {
  float s = 0, c = 0;
  sincospif(x, &s, &c);
  return c;
}
