#pragma once

#include "core/runtime/cuda/vec.cuh"

// Vectors of f32 in registers, to and from memory of any device dtype: kernels that convert are
// written once for their operands' type and take the destination's dtype at run time.

namespace tessera::kernels::cuda {
inline namespace TESSERA_CUDA_BODY {

template <int N>
using Floats = tessera::cuda::Vec<float, N>;

/// By words of two elements: a vector whose 2-byte elements are read one by one takes a register
/// for each of them as long as it lives.
template <int N, class T>
__device__ inline Floats<N> to_floats(const tessera::cuda::Vec<T, N>& vec) {
  Floats<N> values;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    uint32_t words[N / 2];
    memcpy(words, &vec, sizeof(vec));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      T element;
      element.bits = static_cast<uint16_t>(i % 2 == 0 ? words[i / 2] : words[i / 2] >> 16);
      values[i] = tessera::cuda::to_float(element);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = tessera::cuda::to_float(vec[i]);
  }
  return values;
}

/// Rounds to nearest even, two elements an instruction where the type allows it.
template <class T, int N>
__device__ inline tessera::cuda::Vec<T, N> round_floats(const Floats<N>& values) {
  tessera::cuda::Vec<T, N> vec;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    uint32_t words[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      words[i] = tessera::cuda::pack2<T>(values[2 * i], values[2 * i + 1]);
    }
    memcpy(&vec, words, sizeof(vec));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) vec[i] = tessera::cuda::from_float<T>(values[i]);
  }
  return vec;
}

/// N elements from `from`, aligned to min(16, N * sizeof(T)) bytes.
template <int N, class T>
__device__ inline Floats<N> load_floats(const T* from) {
  return to_floats<N>(tessera::cuda::load_vec<N>(from));
}
template <int N, class T>
__device__ inline void store_floats(T* to, const Floats<N>& values) {
  tessera::cuda::store_vec(to, round_floats<T>(values));
}

/// to[i] = values[i], or += with `accumulate`.
template <int N, class T>
__device__ inline void store_floats(T* to, Floats<N> values, bool accumulate) {
  if (accumulate) {
    const Floats<N> old = load_floats<N>(to);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] += old[i];
  }
  store_floats(to, values);
}
/// The same into element `at` of memory whose dtype (f32, bf16 or f16) is known at run time.
template <int N>
__device__ inline void store_floats(void* to, DType dtype, int64_t at, const Floats<N>& values,
                                    bool accumulate) {
  if (dtype == kF32) {
    store_floats(static_cast<float*>(to) + at, values, accumulate);
  } else if (dtype == kBF16) {
    store_floats(static_cast<BFloat16*>(to) + at, values, accumulate);
  } else {
    store_floats(static_cast<Float16*>(to) + at, values, accumulate);
  }
}

/// UnimplementedError unless store_floats can write `dtype`.
inline void check_device_float(DType dtype, const char* op) {
  tessera::cuda::visit_device_float(dtype, op, [](auto) {});
}

}  // namespace TESSERA_CUDA_BODY
}  // namespace tessera::kernels::cuda
