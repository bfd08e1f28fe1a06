#include <algorithm>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "core/runtime/cpu/lanes.h"
#include "kernels/rank_reduce/kernel.h"

// The tree is walked for one block of elements at a time. Subtrees of up to four sources are summed
// in registers, larger ones in one buffer a level on the stack, so that each source is read once
// and partial sums stay in the first-level cache.

namespace tessera::kernels {

namespace {

using tessera::cpu::AllLanes;
using tessera::cpu::for_lanes;
using tessera::cpu::Group;
using tessera::cpu::load_lanes;
using tessera::cpu::store_lanes;
using tessera::cpu::Vector;

constexpr int64_t kBlock = 1024;
constexpr int kMaxLevels = 16;  // 65536 ranks and more
constexpr int kMaxInRegisters = 4;

// The maximum of floats keeps NaN, so that a non-finite value on one rank is seen on all.
template <Reduction kReduction, class C>
inline Vector<C> combine(Vector<C> a, Vector<C> b) {
  if constexpr (kReduction == Reduction::kSum) {
    return a + b;
  } else {
    return (b > a) | (b != b) ? b : a;
  }
}

template <class T, class Lanes, class V>
inline void copy_lanes(T* p, const V& value, Lanes lanes) {
  size_t nbytes = sizeof value;
  if constexpr (!std::is_same_v<Lanes, AllLanes>) nbytes = static_cast<size_t>(lanes) * sizeof(T);
  std::memcpy(static_cast<void*>(p), &value, nbytes);
}

// p[0, lanes) = value, rounded to nearest even; results below 2^-126 in bf16 as well, unlike the
// processor's own instruction, so that every device has the same bits.
template <class C, class T, class Lanes>
inline void store_rounded(T* p, Vector<C> value, Lanes lanes) {
  if constexpr (std::is_same_v<T, C>) {
    copy_lanes(p, value, lanes);
#if TESSERA_AVX512
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    typedef uint32_t Bits __attribute__((vector_size(64)));
    const auto bits = (Bits)value;
    const Bits rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Bits result = value != value ? bits >> 16 | 0x40 : rounded;
    copy_lanes(p, _mm512_maskz_cvtepi32_epi16(tessera::cpu::kEveryLane, (__m512i)result), lanes);
#endif
  } else {
    store_lanes<C>(p, value, lanes);
  }
}

// The reduction over kNum sources, of the elements of one vector.
template <Reduction kReduction, int kNum, class C, class T, class Lanes>
inline Vector<C> combine_sources(const T* const* sources, int64_t i, Lanes lanes) {
  if constexpr (kNum == 1) {
    return load_lanes<C>(sources[0] + i, lanes);
  } else {
    constexpr int kLeft = (kNum + 1) / 2;
    return combine<kReduction, C>(
        combine_sources<kReduction, kLeft, C>(sources, i, lanes),
        combine_sources<kReduction, kNum - kLeft, C>(sources + kLeft, i, lanes));
  }
}

// Calls f(i, lanes, value) for the vectors of the reduction over `num` <= kMaxInRegisters sources.
template <Reduction kReduction, class C, class T, class F>
inline void for_each_vector(const T* const* sources, int num, int64_t count, F&& f) {
  const auto run = [&]<int kNum>(std::integral_constant<int, kNum>) {
    const T* held[kNum];  // the compiler cannot know that stores leave the array alone
    std::copy(sources, sources + kNum, held);
    for_lanes<C>(count, [&](int64_t i, auto lanes) {
      f(i, lanes, combine_sources<kReduction, kNum, C>(held, i, lanes));
    });
  };
  switch (num) {
    case 1:
      return run(std::integral_constant<int, 1>{});
    case 2:
      return run(std::integral_constant<int, 2>{});
    case 3:
      return run(std::integral_constant<int, 3>{});
    default:
      return run(std::integral_constant<int, 4>{});
  }
}

#if TESSERA_AVX512_BF16
// bf16 sums of up to kMaxInRegisters bf16 sources, 32 elements at a time.

template <int kNum, class Lanes>
inline Group<BFloat16> sum_groups(const BFloat16* const* sources, int64_t i, Lanes lanes) {
  if constexpr (kNum == 1) {
    return tessera::cpu::load_group(sources[0] + i, lanes);
  } else {
    constexpr int kLeft = (kNum + 1) / 2;
    Group<BFloat16> sum = sum_groups<kLeft>(sources, i, lanes);
    const auto right = sum_groups<kNum - kLeft>(sources + kLeft, i, lanes);
    for (int p = 0; p < 2; ++p) sum.part[p] += right.part[p];
    return sum;
  }
}

// As store_rounded: by the instruction where that has the same bits, which is where no value is
// subnormal.
template <class Lanes>
inline void store_rounded_group(BFloat16* p, const Group<BFloat16>& group, Lanes lanes) {
  constexpr int kSubnormal = 0x20;
  const auto small = [&](int part) {
    return _mm512_fpclass_ps_mask((__m512)group.part[part], kSubnormal);
  };
  if ((small(0) | small(1)) == 0) [[likely]]
    return tessera::cpu::store_group(p, group, lanes);
  int count = tessera::cpu::kGroup<BFloat16>;
  if constexpr (!std::is_same_v<Lanes, AllLanes>) count = lanes;
  for (int i = 0; i < count; ++i) p[i] = BFloat16(group.part[i % 2][i / 2]);
}

template <int kNum>
[[gnu::flatten]] void sum_bf16_sources(const TreeReduce& a) {
  const BFloat16* sources[kNum];
  for (int r = 0; r < kNum; ++r) sources[r] = static_cast<const BFloat16*>(a.sources[r]);
  BFloat16* const dst = static_cast<BFloat16*>(a.dst);
  const bool accumulate = a.accumulate;
  tessera::cpu::for_groups<BFloat16>(a.numel, [&](int64_t i, auto lanes) {
    Group<BFloat16> sum = sum_groups<kNum>(sources, i, lanes);
    if (accumulate) {
      const auto before = tessera::cpu::load_group(dst + i, lanes);
      for (int p = 0; p < 2; ++p) sum.part[p] = before.part[p] + sum.part[p];
    }
    store_rounded_group(dst + i, sum, lanes);
  });
}

void sum_bf16(const TreeReduce& a) {
  switch (a.num_sources) {
    case 1:
      return sum_bf16_sources<1>(a);
    case 2:
      return sum_bf16_sources<2>(a);
    case 3:
      return sum_bf16_sources<3>(a);
    default:
      return sum_bf16_sources<4>(a);
  }
}
#endif

// out = reduction over `num` sources.
template <Reduction kReduction, class C, class T>
void reduce_block(C* out, const T* const* sources, int num, int64_t count, C (*buffers)[kBlock]) {
  if (num <= kMaxInRegisters) {
    for_each_vector<kReduction, C>(
        sources, num, count,
        [&](int64_t i, auto lanes, Vector<C> value) { store_rounded<C>(out + i, value, lanes); });
    return;
  }
  const int middle = (num + 1) / 2;
  C* right = *buffers;
  reduce_block<kReduction>(out, sources, middle, count, buffers + 1);
  reduce_block<kReduction>(right, sources + middle, num - middle, count, buffers + 1);
  for_lanes<C>(count, [&](int64_t i, auto lanes) {
    store_rounded<C>(
        out + i,
        combine<kReduction, C>(load_lanes<C>(out + i, lanes), load_lanes<C>(right + i, lanes)),
        lanes);
  });
}

template <Reduction kReduction, class T, class C, class Out>
void reduce_blocks(const TreeReduce& a) {
  // f64 sums go to the 16-bit types through f32 as everywhere; f64 destinations accumulate in f64.
  constexpr bool kIsMixed = std::is_same_v<C, double> != std::is_same_v<Out, double>;
  const bool in_registers = !kIsMixed && a.num_sources <= kMaxInRegisters;
  std::vector<const T*> sources(static_cast<size_t>(a.num_sources));
  alignas(64) C block[kBlock];
  std::vector<C> levels(in_registers ? 0 : static_cast<size_t>(kMaxLevels * kBlock));
  for (int64_t offset = 0; offset < a.numel; offset += kBlock) {
    const int64_t count = std::min(kBlock, a.numel - offset);
    for (size_t r = 0; r < sources.size(); ++r) {
      sources[r] = static_cast<const T*>(a.sources[r]) + offset;
    }
    Out* dst = static_cast<Out*>(a.dst) + offset;
    if constexpr (kIsMixed) {
      reduce_block<kReduction>(block, sources.data(), a.num_sources, count,
                               reinterpret_cast<C(*)[kBlock]>(levels.data()));
      for (int64_t i = 0; i < count; ++i) {
        using Wide = std::conditional_t<std::is_same_v<Out, double>, double, C>;
        const Wide sum = static_cast<Wide>(block[i]);
        dst[i] = static_cast<Out>(a.accumulate ? static_cast<Wide>(dst[i]) + sum : sum);
      }
    } else {
      const auto finish = [&](int64_t i, auto lanes, Vector<C> value) {
        if (a.accumulate) value = load_lanes<C>(dst + i, lanes) + value;
        store_rounded<C>(dst + i, value, lanes);
      };
      if (in_registers) {
        for_each_vector<kReduction, C>(sources.data(), a.num_sources, count, finish);
        continue;
      }
      reduce_block<kReduction>(block, sources.data(), a.num_sources, count,
                               reinterpret_cast<C(*)[kBlock]>(levels.data()));
      for_lanes<C>(
          count, [&](int64_t i, auto lanes) { finish(i, lanes, load_lanes<C>(block + i, lanes)); });
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
#if TESSERA_AVX512_BF16
  if (a.src_dtype == kBF16 && a.dst_dtype == kBF16 && a.num_sources <= kMaxInRegisters) {
    return sum_bf16(a);
  }
#endif
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
