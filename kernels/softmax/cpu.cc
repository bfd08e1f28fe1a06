#include <algorithm>
#include <cmath>

#include "core/runtime/cpu/lanes.h"
#include "core/runtime/cpu/parallel.h"
#include "kernels/softmax/exponentials.h"
#include "kernels/softmax/kernel.h"

// Rows in batches that stay in the first cache level between the passes: what a pass ends with (a
// maximum or sum over lanes) is then waited for while the next row is under way. A row's result
// does not depend on the others.

namespace tessera::kernels::cpu {
namespace {

using tessera::cpu::for_groups;
using tessera::cpu::for_groups_of;
using tessera::cpu::kGroup;
using tessera::cpu::kParts;
using tessera::cpu::load_group;
using tessera::cpu::store_group;

constexpr int kBatch = 8;                 // rows
constexpr int64_t kBatchElements = 4096;  // of all rows of a batch, but for longer rows

template <class T>
int64_t groups_of(int64_t cols) {
  return (cols + kGroup<T> - 1) / kGroup<T>;
}

/// Rows [first, first + count) of x and y, which is to be their softmax.
template <class T>
struct Batch {
  using C = ComputeType<T>;
  const SoftmaxFwd& a;
  const int64_t first, count;
  C max[kBatch];

  Batch(const SoftmaxFwd& args, int64_t first_row, int64_t num_rows)
      : a(args), first(first_row), count(num_rows) {
    for (int64_t r = 0; r < count; ++r) max[r] = max_logit(x(r), a.cols);
  }
  const T* x(int64_t r) const { return static_cast<const T*>(a.x) + a.x_rows.offset(first + r); }
  T* y(int64_t r) const { return static_cast<T*>(a.y) + (first + r) * a.cols; }
};

/// y = value(c, lanes) by groups.
template <class T, class Value>
void write_row(T* y, int64_t cols, Value&& value) {
  for_groups<T>(cols, [=](int64_t c, auto lanes) { store_group(y + c, value(c, lanes), lanes); });
}

template <class T, class C = ComputeType<T>>
[[gnu::flatten]] void softmax_rows(const Batch<T>& batch) {
  // Exponentials lie in y between the passes or, where that is too narrow, in a buffer; those of
  // rows too long for it are computed again.
  constexpr bool kInPlace = std::is_same_v<T, C>;
  Group<T> buffer[kInPlace ? 1 : kBatchElements / kGroup<T>];
  const int64_t cols = batch.a.cols, groups = groups_of<T>(cols);
  const bool is_kept = groups * batch.count * kGroup<T> <= kBatchElements;
  C scale[kBatch];
  for (int64_t r = 0; r < batch.count; ++r) {
    Group<T>* const kept = buffer + r * groups;
    T* const y = batch.y(r);
    const auto keep = [=](int64_t c, const Group<T>& group, auto lanes) {
      if constexpr (kInPlace) {
        store_group(y + c, group, lanes);
      } else if (is_kept) {
        kept[c / kGroup<T>] = group;
        __builtin_prefetch(y + c, 1);
      }
    };
    scale[r] = C(1) / sum_exponentials<T>(batch.x(r), cols, batch.max[r], batch.count * cols, keep);
  }
  for (int64_t r = 0; r < batch.count; ++r) {
    const Group<T>* const kept = buffer + r * groups;
    T* const y = batch.y(r);
    write_row(y, cols,
              [=, x = batch.x(r), max = batch.max[r], s = scale[r]](int64_t c, auto lanes) {
                Group<T> group;
                if constexpr (kInPlace) {
                  group = load_group(y + c, lanes);
                } else if (is_kept) {
                  group = kept[c / kGroup<T>];
                } else {
                  group = load_group(x + c, lanes);
                  for (Vector<C>& v : group.part) v = tessera::cpu::exp_lanes<T>(v - max);
                }
                for (Vector<C>& v : group.part) v *= s;
                return group;
              });
  }
}

template <class T, class C = ComputeType<T>>
[[gnu::flatten]] void log_softmax_rows(const Batch<T>& batch) {
  // Of 16-bit logits within 2^-16: the sum's logarithm is off by far less than the result's
  // rounding.
  using E = std::conditional_t<sizeof(T) == 2, Float16, T>;
  const int64_t cols = batch.a.cols;
  C sum[kBatch];
  for (int64_t r = 0; r < batch.count; ++r) {
    sum[r] = sum_exponentials<E>(
        batch.x(r), cols, batch.max[r], batch.count * cols,
        [y = batch.y(r)](int64_t c, auto&&...) { __builtin_prefetch(y + c, 1); });
  }
  for (int64_t r = 0; r < batch.count; ++r) {
    write_row(
        batch.y(r), cols,
        [x = batch.x(r), max = batch.max[r], log_sum = std::log(sum[r])](int64_t c, auto lanes) {
          Group<T> group = load_group(x + c, lanes);
          for (Vector<C>& v : group.part) v = (v - max) - log_sum;
          return group;
        });
  }
}

/// dx = value(dy, y), or +=, by vectors.
template <class T, class Value>
void write_dx(T* dx, bool accumulate, const T* dy, const T* y, int64_t cols, Value&& value) {
  write_row(dx, cols, [=](int64_t c, auto lanes) {
    Group<T> group = load_group(dy + c, lanes);
    const Group<T> of_y = load_group(y + c, lanes);
    const Group<T> before = accumulate ? load_group(dx + c, lanes) : Group<T>{};
    for (int i = 0; i < kParts<T>; ++i) {
      group.part[i] = value(group.part[i], of_y.part[i]);
      if (accumulate) group.part[i] += before.part[i];
    }
    return group;
  });
}

/// Of softmax the sum of dy y, of log-softmax that of dy.
template <bool kLog, class T, class C = ComputeType<T>>
C row_total(const T* dy, const T* y, int64_t cols) {
  constexpr int kUnroll = kChains / kParts<T>;
  Vector<C> sums[kChains] = {};
  for_groups_of<T, kUnroll>(cols, [&](int64_t c, auto lanes, auto u) {
    const Group<T> of_dy = load_group(dy + c, lanes);
    const Group<T> of_y = kLog ? Group<T>{} : load_group(y + c, lanes);
    for (int i = 0; i < kParts<T>; ++i) {
      sums[u + kUnroll * i] += kLog ? of_dy.part[i] : of_dy.part[i] * of_y.part[i];
    }
  });
  return tessera::cpu::sum_lanes<C>(sums);
}

template <bool kLog, class T, class C = ComputeType<T>>
[[gnu::flatten]] void backward_row(T* dx, bool accumulate, const T* dy, const T* y, int64_t cols) {
  const C total = row_total<kLog>(dy, y, cols);
  write_dx(dx, accumulate, dy, y, cols, [=](Vector<C> of_dy, Vector<C> of_y) {
    if constexpr (kLog) return of_dy - tessera::cpu::exp_lanes<T>(of_y) * total;
    return of_y * (of_dy - total);
  });
}

/// Calls f(type tag, first row, last row) in parallel.
template <class Args, class F>
void for_each_range(const char* op, const Args& a, F&& f) {
  visit_float(a.dtype, op, [&](auto tag) {
    tessera::cpu::parallel_for(a.rows, row_grain(4 * a.cols),
                               [&](int64_t begin, int64_t end) { f(tag, begin, end); });
  });
}

template <bool kLog>
void forward(const char* op, const SoftmaxFwd& a) {
  for_each_range(op, a, [&](auto tag, int64_t begin, int64_t end) {
    using T = typename decltype(tag)::type;
    const int64_t row_elements = std::max<int64_t>(1, groups_of<T>(a.cols) * kGroup<T>);
    const int64_t rows = std::clamp<int64_t>(kBatchElements / row_elements, 1, kBatch);
    for (int64_t row = begin; row < end; row += rows) {
      const Batch<T> batch(a, row, std::min(rows, end - row));
      kLog ? log_softmax_rows(batch) : softmax_rows(batch);
    }
  });
}

template <bool kLog>
void backward(const char* op, const SoftmaxBwd& a) {
  for_each_range(op, a, [&](auto tag, int64_t begin, int64_t end) {
    using T = typename decltype(tag)::type;
    for (int64_t row = begin; row < end; ++row) {
      backward_row<kLog>(static_cast<T*>(a.dx) + a.dx_rows.offset(row), a.accumulate,
                         static_cast<const T*>(a.dy) + row * a.cols,
                         static_cast<const T*>(a.y) + row * a.cols, a.cols);
    }
  });
}

}  // namespace

void softmax_fwd(const SoftmaxFwd& a) {
  forward<false>("softmax", a);
}

void log_softmax_fwd(const SoftmaxFwd& a) {
  forward<true>("log_softmax", a);
}

void softmax_bwd(const SoftmaxBwd& a) {
  backward<false>("softmax", a);
}

void log_softmax_bwd(const SoftmaxBwd& a) {
  backward<true>("log_softmax", a);
}

}  // namespace tessera::kernels::cpu
