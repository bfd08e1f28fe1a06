#pragma once

#include <cstring>
#include <utility>

#include "core/dtype.h"
#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/ptx.cuh"

// Elements and 16-byte vectors of them. Memory-bound kernels move 16 bytes an access and compute
// in f32.

namespace tessera::cuda {
inline namespace TESSERA_CUDA_BODY {

/// The value in f32, exactly.
__device__ inline float to_float(float value) {
  return value;
}
/// The value in f32, exactly.
__device__ inline float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
/// The value in f32, exactly.
__device__ inline float to_float(Float16 value) {
  return f16_bits_to_float(value.bits);
}

/// Rounds to nearest even; NaN stays NaN.
template <class T>
__device__ inline T from_float(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    T rounded;
    if constexpr (std::is_same_v<T, BFloat16>) {
      rounded.bits = float_to_bf16_bits(value);
    } else {
      static_assert(std::is_same_v<T, Float16>, "f32, bf16 or f16");
      rounded.bits = float_to_f16_bits(value);
    }
    return rounded;
  }
}

/// Elements of T in 16 bytes.
template <class T>
constexpr int kVec = 16 / static_cast<int>(sizeof(T));

/// N elements that are loaded and stored together: 2 to 16 bytes in one access, else 16 at a time.
template <class T, int N = kVec<T>>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vec {
  T values[N];

  __host__ __device__ T& operator[](int i) { return values[i]; }
  __host__ __device__ const T& operator[](int i) const { return values[i]; }
};

namespace detail {

template <size_t kBytes>
struct WordOf {
  static_assert(kBytes % 16 == 0, "a vector has 2, 4, 8 or a multiple of 16 bytes");
  using type = uint4;
};
template <>
struct WordOf<1> {
  using type = unsigned char;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<4> {
  using type = unsigned;
};
template <>
struct WordOf<8> {
  using type = uint2;
};

// Moves as whole words: the compiler would split a struct of 2-byte elements.
template <class V, class Load>
__device__ inline V load_words(const void* from, Load load) {
  using Word = typename WordOf<sizeof(V)>::type;
  constexpr int kWords = sizeof(V) / sizeof(Word);
  Word words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = load(static_cast<const Word*>(from) + i);
  V vec;
  memcpy(&vec, words, sizeof(V));
  return vec;
}
template <class V, class Store>
__device__ inline void store_words(void* to, const V& vec, Store store) {
  using Word = typename WordOf<sizeof(V)>::type;
  constexpr int kWords = sizeof(V) / sizeof(Word);
  Word words[kWords];
  memcpy(words, &vec, sizeof(V));
#pragma unroll
  for (int i = 0; i < kWords; ++i) store(static_cast<Word*>(to) + i, words[i]);
}

#if defined(TESSERA_SIMT)
inline void check_vector(const void* data, size_t alignment, simt::Where where) {
  simt::check_aligned(data, alignment, "vector access", where);
}
#define TESSERA_VEC_WHERE , simt::Where where = simt::Where::here()
#define TESSERA_VEC_CHECK(data, V) detail::check_vector(data, alignof(V), where)
#else
#define TESSERA_VEC_WHERE
#define TESSERA_VEC_CHECK(data, V) static_cast<void>(0)
#endif

}  // namespace detail

/// N elements from memory aligned to min(16, N * sizeof(T)) bytes.
template <int N, class T>
__device__ inline Vec<T, N> load_vec(const T* from TESSERA_VEC_WHERE) {
  using V = Vec<T, N>;
  TESSERA_VEC_CHECK(from, V);
  return detail::load_words<V>(from, [](const auto* word) { return *word; });
}
/// N elements to memory of that alignment.
template <class T, int N>
__device__ inline void store_vec(T* to, const Vec<T, N>& vec TESSERA_VEC_WHERE) {
  using V = Vec<T, N>;
  TESSERA_VEC_CHECK(to, V);
  detail::store_words(to, vec, [](auto* word, const auto& value) { *word = value; });
}

/// The same for data that is used once (ld.cs, st.cs): evicted first from the caches.
template <int N, class T>
__device__ inline Vec<T, N> load_streaming(const T* from TESSERA_VEC_WHERE) {
  using V = Vec<T, N>;
  TESSERA_VEC_CHECK(from, V);
  return detail::load_words<V>(from, [](const auto* word) { return __ldcs(word); });
}
/// The same for data that is not read again soon.
template <class T, int N>
__device__ inline void store_streaming(T* to, const Vec<T, N>& vec TESSERA_VEC_WHERE) {
  using V = Vec<T, N>;
  TESSERA_VEC_CHECK(to, V);
  detail::store_words(to, vec, [](auto* word, const auto& value) { __stcs(word, value); });
}

#undef TESSERA_VEC_WHERE
#undef TESSERA_VEC_CHECK

/// Whether 16-byte vectors may start at `data`; for launchers, which choose the scalar path else.
inline bool is_aligned16(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

/// Calls f(TypeTag<T>{}) with the C++ type of f32, bf16 or f16.
/// Errors   UnimplementedError that names `op` and the dtype for any other
template <class F>
decltype(auto) visit_device_float(DType dtype, const char* op, F&& f) {
  switch (dtype) {
    case kF32:
      return f(TypeTag<float>{});
    case kBF16:
      return f(TypeTag<BFloat16>{});
    case kF16:
      return f(TypeTag<Float16>{});
    default:
      break;
  }
  TESSERA_UNIMPLEMENTED("{}: no CUDA kernel for dtype {}", op, name_of(dtype));
}

}  // namespace TESSERA_CUDA_BODY
}  // namespace tessera::cuda
