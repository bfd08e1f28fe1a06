#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/runtime/cpu/parallel.h"

// Pieces of rows in and out of CPU kernels. A kernel is written once for its compute type C (f32 or
// f64) and works on pieces of at most kPieceCols elements: `load_piece` hands it C values (the
// operand itself where no conversion is needed), `store_piece` rounds them into the destination.

namespace tessera::kernels::cpu {

inline constexpr int64_t kPieceCols = 1024;

/// Elements of a piece loop that are worth a thread.
inline constexpr int64_t kGrainElements = 32768;

/// Calls f(row, begin, end) in parallel for pieces [begin, end) of each row.
template <class F>
void for_pieces(int64_t rows, int64_t cols, F&& f) {
  const int64_t pieces = (cols + kPieceCols - 1) / kPieceCols;
  const int64_t grain =
      std::max<int64_t>(1, kGrainElements / std::clamp(cols, int64_t{1}, kPieceCols));
  tessera::cpu::parallel_for(rows * pieces, grain, [&](int64_t first, int64_t last) {
    int64_t row = first / pieces, piece = first % pieces;
    for (int64_t i = first; i < last; ++i) {
      f(row, piece * kPieceCols, std::min((piece + 1) * kPieceCols, cols));
      if (++piece == pieces) piece = 0, ++row;
    }
  });
}

/// C for a dtype: f(TypeTag<double>) for f64, else f(TypeTag<float>).
template <class F>
void visit_compute_type(DType dtype, F&& f) {
  if (dtype == kF64) {
    f(TypeTag<double>{});
  } else {
    f(TypeTag<float>{});
  }
}

/// out[i] = in[i] for contiguous elements, rounding once.
template <class To, class From>
void convert_piece(To* out, const From* in, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)  // compilers do not vectorize the scalar conversion
  if constexpr (std::is_same_v<From, Float16> && std::is_same_v<To, float>) {
    for (; i + 8 <= count; i += 8) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
    }
  } else if constexpr (std::is_same_v<From, float> && std::is_same_v<To, Float16>) {
    for (; i + 8 <= count; i += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
    }
  }
#endif
#pragma omp simd
  for (int64_t j = i; j < count; ++j) {
    const auto value = static_cast<ComputeType<To>>(in[j]);
    if constexpr (std::is_same_v<To, BFloat16>) {
      out[j].bits = BFloat16(value).bits;  // GCC vectorizes no assignment of a class here
    } else {
      out[j] = static_cast<To>(value);
    }
  }
}

/// src[offset + i * stride], i < count <= kPieceCols, as C: src itself or `buffer`.
template <class C>
const C* load_piece(C* buffer, const void* src, DType dtype, int64_t offset, int64_t stride,
                    int64_t count) {
  if (dtype == dtype_of<C> && stride == 1) return static_cast<const C*>(src) + offset;
  visit_float(dtype, "load_piece", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = static_cast<const T*>(src) + offset;
    if (stride == 1) {
      convert_piece(buffer, from, count);
    } else if (stride == 0) {
      std::fill_n(buffer, count, static_cast<C>(from[0]));
    } else {
      for (int64_t i = 0; i < count; ++i) buffer[i] = static_cast<C>(from[i * stride]);
    }
  });
  return buffer;
}

/// Where to compute values that `store_piece` stores: the destination itself or `buffer`.
template <class C>
C* piece_target(C* buffer, void* dst, DType dtype, int64_t offset, int64_t stride,
                bool accumulate) {
  const bool direct = dtype == dtype_of<C> && stride == 1 && !accumulate;
  return direct ? static_cast<C*>(dst) + offset : buffer;
}

/// dst[offset + i * stride] = values[i], or += with `accumulate`.
template <class C>
void store_piece(void* dst, DType dtype, int64_t offset, int64_t stride, const C* values,
                 int64_t count, bool accumulate) {
  visit_float(dtype, "store_piece", [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = static_cast<T*>(dst) + offset;
    if constexpr (std::is_same_v<T, C>) {
      if (to == values) return;
    }
    const auto add = [](T old, C value) {
      return static_cast<T>(static_cast<ComputeType<T>>(static_cast<C>(old) + value));
    };
    if (stride != 1) {
      for (int64_t i = 0; i < count; ++i) {
        to[i * stride] = accumulate ? add(to[i * stride], values[i])
                                    : static_cast<T>(static_cast<ComputeType<T>>(values[i]));
      }
    } else if (accumulate) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) to[i] = add(to[i], values[i]);
    } else {
      convert_piece(to, values, count);
    }
  });
}

}  // namespace tessera::kernels::cpu
