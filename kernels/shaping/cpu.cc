#include "core/runtime/cpu/parallel.h"
#include "kernels/shaping/kernel.h"

namespace tessera::kernels::cpu {

namespace {

/// Calls f(o, begin, end) in parallel for blocks of columns of each of the outer dimension.
template <class Args, class F>
void for_columns(const Args& p, F&& f) {
  constexpr int64_t kCols = 256, kGrain = 32768;
  const int64_t blocks = (p.inner + kCols - 1) / kCols;
  const int64_t numel = std::max<int64_t>(1, p.count * std::min(p.inner, kCols));
  tessera::cpu::parallel_for(p.outer * blocks, (kGrain + numel - 1) / numel,
                             [&](int64_t first, int64_t last) {
                               for (int64_t task = first; task < last; ++task) {
                                 const int64_t begin = task % blocks * kCols;
                                 f(task / blocks, begin, std::min(p.inner, begin + kCols));
                               }
                             });
}

/// Calls f(to, from) with the offsets of each element of [outer, count, inner] and of what its
/// index names in [outer, length, inner], in order of the dimension `count`.
template <class Index, class Args, class F>
void for_indexed(const Args& p, F&& f) {
  const Index* index = static_cast<const Index*>(p.index);
  for_columns(p, [&](int64_t o, int64_t begin, int64_t end) {
    for (int64_t m = 0; m < p.count; ++m) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t at = (o * p.count + m) * p.inner + i;
        f(at, (o * p.length + index[at]) * p.inner + i);
      }
    }
  });
}

template <class Args, class F>
void visit_index(const Args& p, F&& f) {
  p.index_dtype == kI64 ? f(TypeTag<int64_t>{}) : f(TypeTag<int32_t>{});
}

}  // namespace

void gather(const Gather& p) {
  visit_index(p, [&](auto index_tag) {
    using Index = typename decltype(index_tag)::type;
    const Index* index = static_cast<const Index*>(p.index);
    for (int64_t k = 0; k < p.outer * p.count * p.inner; ++k) {  // a throw may not leave a region
      TESSERA_CHECK(index[k] >= 0 && index[k] < p.length,
                    "gather: index {} at position {} is out of range [0, {})", index[k], k,
                    p.length);
    }
    visit_dtype(p.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for_indexed<Index>(p, [y = static_cast<T*>(p.y), x = static_cast<const T*>(p.x)](
                                int64_t to, int64_t from) { y[to] = x[from]; });
    });
  });
}

void scatter_add(const ScatterAdd& p) {
  visit_index(p, [&](auto index_tag) {
    using Index = typename decltype(index_tag)::type;
    visit_float(p.dtype, "scatter_add", [&](auto tag) {
      using T = typename decltype(tag)::type;
      using C = ComputeType<T>;
      for_indexed<Index>(p,
                         [sums = static_cast<C*>(p.sums), dy = static_cast<const T*>(p.dy)](
                             int64_t from, int64_t to) { sums[to] += static_cast<C>(dy[from]); });
    });
  });
}

}  // namespace tessera::kernels::cpu
