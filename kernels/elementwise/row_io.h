#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/runtime/cpu/lanes.h"
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
  if constexpr (std::is_same_v<To, BFloat16>) {  // keeps subnormal numbers
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      out[i].bits = BFloat16(static_cast<float>(in[i])).bits;  // GCC vectorizes no class here
    }
    return;
  }
  using C = std::conditional_t<std::is_same_v<From, double>, double, ComputeType<To>>;
  tessera::cpu::for_lanes<C>(count, [=](int64_t i, auto lanes) {
    tessera::cpu::store_lanes<C>(out + i, tessera::cpu::load_lanes<C>(in + i, lanes), lanes);
  });
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
      tessera::cpu::for_lanes<C>(count, [=](int64_t i, auto lanes) {
        const auto old = tessera::cpu::load_lanes<C>(to + i, lanes);
        tessera::cpu::store_lanes<C>(to + i, old + tessera::cpu::load_lanes<C>(values + i, lanes),
                                     lanes);
      });
    } else {
      convert_piece(to, values, count);
    }
  });
}

/// An operand of `map_rows`: row r begins at element r * stride.
struct RowsIn {
  const void* data;
  int64_t stride;
};
struct RowsOut {
  void* data;
  DType dtype;
  int64_t stride;
  bool accumulate = false;
};

/// f of each part of groups of T.
template <class T, class F, class... In>
[[gnu::always_inline]] inline tessera::cpu::Group<T> map_group(const F& f, const In&... in) {
  tessera::cpu::Group<T> value;
  for (int p = 0; p < tessera::cpu::kParts<T>; ++p) value.part[p] = f(in.part[p]...);
  return value;
}

/// out = f(operands), or +=, for `count` elements of a row.
template <class T, class D, class F, class... In>
[[gnu::flatten]] inline void map_row(D* out, bool accumulate, int64_t count, const F& f,
                                     const In*... in) {
  using C = ComputeType<T>;
  if constexpr (std::is_same_v<D, T>) {
    tessera::cpu::for_groups<T>(count, [=](int64_t i, auto lanes) {
      auto value = map_group<T>(f, tessera::cpu::load_group(in + i, lanes)...);
      if (accumulate) {
        value = map_group<T>([](auto a, auto b) { return a + b; }, value,
                             tessera::cpu::load_group(out + i, lanes));
      }
      tessera::cpu::store_group(out + i, value, lanes);
    });
  } else {
    tessera::cpu::for_lanes<C>(count, [=](int64_t i, auto lanes) {
      auto value = f(tessera::cpu::load_lanes<C>(in + i, lanes)...);
      if (accumulate) value += tessera::cpu::load_lanes<C>(out + i, lanes);
      tessera::cpu::store_lanes<C>(out + i, value, lanes);
    });
  }
}

/// dst = f(operands), or += with `accumulate`, in one pass, by vectors of T's compute type. T is
/// the type of the operands; dst may be one of them, at the same place.
template <class T, class F, class... In>
void map_rows(int64_t rows, int64_t cols, const RowsOut& dst, F&& f, const In&... in) {
  using C = ComputeType<T>;
  for_pieces(rows, cols, [&](int64_t row, int64_t begin, int64_t end) {
    const int64_t at = row * dst.stride + begin;
    const auto run = [&](auto* out, bool accumulate) {
      // The operands' addresses stay in registers.
      map_row<T>(out, accumulate, end - begin, f,
                 static_cast<const T*>(in.data) + row * in.stride + begin...);
    };
    if (dst.dtype == dtype_of<T>) return run(static_cast<T*>(dst.data) + at, dst.accumulate);
    if (dst.dtype == dtype_of<C>) return run(static_cast<C*>(dst.data) + at, dst.accumulate);
    C buffer[kPieceCols];
    run(buffer, false);
    store_piece(dst.data, dst.dtype, at, 1, buffer, end - begin, dst.accumulate);
  });
}

}  // namespace tessera::kernels::cpu
