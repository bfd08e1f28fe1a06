#include <cmath>
#include <limits>

#include "core/runtime/cpu/math.h"
#include "core/runtime/cpu/parallel.h"
#include "kernels/softmax/kernel.h"

// One row at a time, in cache between its passes. A row's result does not depend on the others.

namespace tessera::kernels::cpu {
namespace {

using tessera::cpu::parallel_for;

template <class T>
ComputeType<T> row_max(const T* x, int64_t cols) {
  using C = ComputeType<T>;
  C max = -std::numeric_limits<C>::infinity();
#pragma omp simd reduction(max : max)
  for (int64_t c = 0; c < cols; ++c) max = C(x[c]) > max ? C(x[c]) : max;
  return max;
}

template <class T>
void softmax_row(T* y, const T* x, int64_t cols) {
  using C = ComputeType<T>;
  const C max = row_max(x, cols);
  C sum = 0;
  if constexpr (std::is_same_v<T, C>) {
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < cols; ++c) {
      const C e = tessera::cpu::exp(x[c] - max);
      y[c] = e;
      sum += e;
    }
    const C scale = C(1) / sum;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) y[c] *= scale;
  } else {  // the exponentials again: a low-precision y cannot hold them
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < cols; ++c) sum += tessera::cpu::exp(C(x[c]) - max);
    const C scale = C(1) / sum;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) assign(y[c], tessera::cpu::exp(C(x[c]) - max) * scale);
  }
}

template <class T>
void log_softmax_row(T* y, const T* x, int64_t cols) {
  using C = ComputeType<T>;
  const C max = row_max(x, cols);
  C sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < cols; ++c) sum += tessera::cpu::exp(C(x[c]) - max);
  const C log_sum = std::log(sum);
#pragma omp simd
  for (int64_t c = 0; c < cols; ++c) assign(y[c], (C(x[c]) - max) - log_sum);
}

template <class F>
void for_each_row(int64_t rows, int64_t cols, F&& f) {
  parallel_for(rows, row_grain(4 * cols), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

template <class T, class Value>
void write_dx(T* dx, bool accumulate, int64_t cols, Value&& value) {
  using C = ComputeType<T>;
  if (accumulate) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) assign(dx[c], C(dx[c]) + value(c));
  } else {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) assign(dx[c], value(c));
  }
}

}  // namespace

void softmax_fwd(const SoftmaxFwd& a) {
  visit_float(a.dtype, "softmax", [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_row(a.rows, a.cols, [&](int64_t row) {
      softmax_row(static_cast<T*>(a.y) + row * a.cols,
                  static_cast<const T*>(a.x) + a.x_rows.offset(row), a.cols);
    });
  });
}

void log_softmax_fwd(const SoftmaxFwd& a) {
  visit_float(a.dtype, "log_softmax", [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_row(a.rows, a.cols, [&](int64_t row) {
      log_softmax_row(static_cast<T*>(a.y) + row * a.cols,
                      static_cast<const T*>(a.x) + a.x_rows.offset(row), a.cols);
    });
  });
}

void softmax_bwd(const SoftmaxBwd& a) {
  visit_float(a.dtype, "softmax", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    for_each_row(a.rows, a.cols, [&](int64_t row) {
      const T* dy = static_cast<const T*>(a.dy) + row * a.cols;
      const T* y = static_cast<const T*>(a.y) + row * a.cols;
      C dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t c = 0; c < a.cols; ++c) dot += C(dy[c]) * C(y[c]);
      write_dx(static_cast<T*>(a.dx) + a.dx_rows.offset(row), a.accumulate, a.cols,
               [=](int64_t c) { return C(y[c]) * (C(dy[c]) - dot); });
    });
  });
}

void log_softmax_bwd(const SoftmaxBwd& a) {
  visit_float(a.dtype, "log_softmax", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    for_each_row(a.rows, a.cols, [&](int64_t row) {
      const T* dy = static_cast<const T*>(a.dy) + row * a.cols;
      const T* y = static_cast<const T*>(a.y) + row * a.cols;
      C sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < a.cols; ++c) sum += C(dy[c]);
      write_dx(static_cast<T*>(a.dx) + a.dx_rows.offset(row), a.accumulate, a.cols,
               [=](int64_t c) { return C(dy[c]) - tessera::cpu::exp(C(y[c])) * sum; });
    });
  });
}

}  // namespace tessera::kernels::cpu
