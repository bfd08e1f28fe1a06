#include <algorithm>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "kernels/rank_reduce/kernel.h"

// The tree is walked for one block of elements at a time, with one buffer a level on the stack, so
// that each source is read once and partial sums stay in the first-level cache.

namespace tessera::kernels {

namespace {

constexpr int64_t kBlock = 512;
constexpr int kMaxLevels = 16;  // 65536 ranks

// The maximum of floats keeps NaN, so that a non-finite value on one rank is seen on all.
template <class C>
inline C max_of(C a, C b) {
  if constexpr (std::is_floating_point_v<C>) {
    return (b > a || b != b) ? b : a;
  } else {
    return std::max(a, b);
  }
}

template <Reduction kReduction, class C>
inline C combine(C a, C b) {
  if constexpr (kReduction == Reduction::kSum)
    return a + b;
  else
    return max_of(a, b);
}

template <Reduction kReduction, class T, class C>
class Tree {
 public:
  Tree(const void* const* sources, int64_t offset, int64_t count)
      : sources_(sources), offset_(offset), count_(count) {}

  // out = reduction over the sources [begin, end) of the current block.
  void run(C* out, int begin, int end, int level) {
    const int num = end - begin;
    const T* a = source(begin);
    if (num == 1) {
#pragma omp simd
      for (int64_t i = 0; i < count_; ++i) out[i] = static_cast<C>(a[i]);
    } else if (num == 2) {
      const T* b = source(begin + 1);
#pragma omp simd
      for (int64_t i = 0; i < count_; ++i) {
        out[i] = combine<kReduction>(static_cast<C>(a[i]), static_cast<C>(b[i]));
      }
    } else {
      const int middle = begin + (num + 1) / 2;
      C* right = buffers_[level];
      run(out, begin, middle, level + 1);
      run(right, middle, end, level + 1);
#pragma omp simd
      for (int64_t i = 0; i < count_; ++i) out[i] = combine<kReduction>(out[i], right[i]);
    }
  }

 private:
  const T* source(int index) const {
    return static_cast<const T*>(sources_[index]) + offset_;
  }

  const void* const* sources_;
  const int64_t offset_, count_;
  alignas(64) C buffers_[kMaxLevels][kBlock];
};

template <class Out, class C>
void store(Out* dst, const C* value, int64_t count, bool accumulate) {
  if (accumulate) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i)
      dst[i] = static_cast<Out>(static_cast<C>(dst[i]) + value[i]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) dst[i] = static_cast<Out>(value[i]);
  }
}

// f64 sums go to the 16-bit types through f32 as everywhere; f64 destinations accumulate in f64.
template <class Out, class C>
using StoreType = std::conditional_t<std::is_same_v<Out, double>, double, C>;

template <Reduction kReduction, class T, class C, class Out>
void reduce_blocks(const TreeReduce& a) {
  alignas(64) C block[kBlock];
  for (int64_t offset = 0; offset < a.numel; offset += kBlock) {
    const int64_t count = std::min(kBlock, a.numel - offset);
    Tree<kReduction, T, C>(a.sources, offset, count).run(block, 0, a.num_sources, 0);
    Out* dst = static_cast<Out*>(a.dst) + offset;
    if constexpr (std::is_same_v<StoreType<Out, C>, C>) {
      store(dst, block, count, a.accumulate);
    } else {
      alignas(64) StoreType<Out, C> wide[kBlock];
      std::copy(block, block + count, wide);
      store(dst, wide, count, a.accumulate);
    }
  }
}

template <class T>
void reduce_max(const TreeReduce& a) {
  reduce_blocks<Reduction::kMax, T, T, T>(a);
}

}  // namespace

void tree_reduce(const TreeReduce& a) {
  check_reduce_dtypes(a.reduction, a.src_dtype, a.dst_dtype, a.accumulate);
  if (a.reduction == Reduction::kMax) {
    if (a.src_dtype == kF32) return reduce_max<float>(a);
    return a.src_dtype == kI32 ? reduce_max<int32_t>(a) : reduce_max<uint8_t>(a);
  }
  visit_float(a.src_dtype, "tree_reduce", [&a](auto source) {
    visit_float(a.dst_dtype, "tree_reduce", [&a](auto out) {
      using T = typename decltype(source)::type;
      reduce_blocks<Reduction::kSum, T, ComputeType<T>, typename decltype(out)::type>(a);
    });
  });
}

void cpu::rank_reduce(const RankReduce& a) {
  std::vector<const void*> sources(static_cast<size_t>(a.num_ranks));
  for (int r = 0; r < a.num_ranks; ++r) {
    const int64_t place = (r < a.rank ? r : r - 1) * a.others_stride;
    sources[static_cast<size_t>(r)] =
        r == a.rank ? a.own : static_cast<const std::byte*>(a.others) + place;
  }
  tree_reduce({.dst = a.dst,
               .sources = sources.data(),
               .num_sources = a.num_ranks,
               .numel = a.numel,
               .src_dtype = a.src_dtype,
               .dst_dtype = a.dst_dtype,
               .accumulate = a.accumulate,
               .reduction = a.reduction});
}

}  // namespace tessera::kernels
