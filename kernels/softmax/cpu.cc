#include <cmath>
#include <limits>

#include "core/runtime/cpu/lanes.h"
#include "core/runtime/cpu/parallel.h"
#include "kernels/softmax/kernel.h"

// One row at a time, in cache between its passes. A row's result does not depend on the others.

namespace tessera::kernels::cpu {
namespace {

using tessera::cpu::exp_lanes;
using tessera::cpu::for_lanes;
using tessera::cpu::for_lanes_of;
using tessera::cpu::load_lanes;
using tessera::cpu::parallel_for;
using tessera::cpu::store_lanes;
using tessera::cpu::Vector;

/// Running sums or maxima of a row.
constexpr int kChains = 4;

template <class T, class C = ComputeType<T>>
C row_max(const T* x, int64_t cols) {
  constexpr C kLowest = -std::numeric_limits<C>::infinity();
  Vector<C> max[kChains];
  std::fill_n(max, kChains, tessera::cpu::broadcast(kLowest));
  for_lanes_of<C, kChains>(cols, [&](int64_t c, auto lanes, auto u) {
    Vector<C> value;
    if constexpr (std::is_same_v<decltype(lanes), int>) {
      value = load_lanes<C>(x + c, lanes, kLowest);
    } else {
      value = load_lanes<C>(x + c);
    }
    max[u] = tessera::cpu::max_of<C>(value, max[u]);
  });
  using tessera::cpu::max_of;
  return tessera::cpu::max_lanes<C>(
      max_of<C>(max_of<C>(max[0], max[1]), max_of<C>(max[2], max[3])));
}

/// The sum of exp(x - max), which `store(c, values, lanes)` sees by vectors. E says how accurate
/// the exponentials are.
template <class E, class T, class Store, class C = ComputeType<T>>
C sum_exponentials(const T* x, int64_t cols, C max, Store&& store) {
  Vector<C> sums[kChains] = {};
  for_lanes_of<C, kChains>(cols, [&](int64_t c, auto lanes, auto u) {
    Vector<C> e;
    if constexpr (std::is_same_v<decltype(lanes), int>) {  // absent ones add exp(-inf) = 0
      e = exp_lanes<E>(load_lanes<C>(x + c, lanes, -std::numeric_limits<C>::infinity()) - max);
    } else {
      e = exp_lanes<E>(load_lanes<C>(x + c) - max);
    }
    store(c, e, lanes);
    sums[u] += e;
  });
  return tessera::cpu::sum_lanes<C>(sums);
}

template <class T, class C = ComputeType<T>>
void softmax_row(T* y, const T* x, int64_t cols) {
  constexpr int64_t kBufferCols = 4096;
  const C max = row_max(x, cols);
  const auto scale_row = [=](const C* e, C sum) {
    const C scale = C(1) / sum;
    for_lanes<C>(cols, [=](int64_t c, auto lanes) {
      store_lanes<C>(y + c, load_lanes<C>(e + c, lanes) * scale, lanes);
    });
  };
  const auto run = [=](C* e) {  // e: where the row of exponentials lies between the passes
    scale_row(e, sum_exponentials<T>(x, cols, max, [=](int64_t c, Vector<C> value, auto lanes) {
                store_lanes<C>(e + c, value, lanes);
              }));
  };
  if constexpr (std::is_same_v<T, C>) {
    run(y);
  } else if (cols <= kBufferCols) {
    C buffer[kBufferCols];
    run(buffer);
  } else {  // the exponentials again: a low-precision y cannot hold them
    const C scale = C(1) / sum_exponentials<T>(x, cols, max, [](auto&&...) {});
    for_lanes<C>(cols, [=](int64_t c, auto lanes) {
      store_lanes<C>(y + c, exp_lanes<T>(load_lanes<C>(x + c, lanes) - max) * scale, lanes);
    });
  }
}

template <class T, class C = ComputeType<T>>
void log_softmax_row(T* y, const T* x, int64_t cols) {
  const C max = row_max(x, cols);
  const C log_sum = std::log(sum_exponentials<C>(x, cols, max, [](auto&&...) {}));
  for_lanes<C>(cols, [=](int64_t c, auto lanes) {
    store_lanes<C>(y + c, (load_lanes<C>(x + c, lanes) - max) - log_sum, lanes);
  });
}

template <class F>
void for_each_row(int64_t rows, int64_t cols, F&& f) {
  parallel_for(rows, row_grain(4 * cols), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

/// dx = value(c, lanes), or +=.
template <class T, class Value, class C = ComputeType<T>>
void write_dx(T* dx, bool accumulate, int64_t cols, Value&& value) {
  for_lanes<C>(cols, [=](int64_t c, auto lanes) {
    Vector<C> d = value(c, lanes);
    if (accumulate) d += load_lanes<C>(dx + c, lanes);
    store_lanes<C>(dx + c, d, lanes);
  });
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
      Vector<C> dots[kChains] = {};
      for_lanes_of<C, kChains>(a.cols, [&](int64_t c, auto lanes, auto u) {
        dots[u] += load_lanes<C>(dy + c, lanes) * load_lanes<C>(y + c, lanes);
      });
      const C dot = tessera::cpu::sum_lanes<C>(dots);
      write_dx(static_cast<T*>(a.dx) + a.dx_rows.offset(row), a.accumulate, a.cols,
               [=](int64_t c, auto lanes) {
                 return load_lanes<C>(y + c, lanes) * (load_lanes<C>(dy + c, lanes) - dot);
               });
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
      Vector<C> sums[kChains] = {};
      for_lanes_of<C, kChains>(
          a.cols, [&](int64_t c, auto lanes, auto u) { sums[u] += load_lanes<C>(dy + c, lanes); });
      const C sum = tessera::cpu::sum_lanes<C>(sums);
      write_dx(static_cast<T*>(a.dx) + a.dx_rows.offset(row), a.accumulate, a.cols,
               [=](int64_t c, auto lanes) {
                 return load_lanes<C>(dy + c, lanes) -
                        exp_lanes<T>(load_lanes<C>(y + c, lanes)) * sum;
               });
    });
  });
}

}  // namespace tessera::kernels::cpu
