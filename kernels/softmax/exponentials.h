#pragma once

#include <limits>

#include "core/runtime/cpu/lanes.h"

// Maxima and sums of exponentials of a row or a part of one, for CPU kernels (softmax, loss).

namespace tessera::kernels::cpu {

using tessera::cpu::AllLanes;
using tessera::cpu::Group;
using tessera::cpu::Vector;

/// Running maxima or sums of a row.
inline constexpr int kChains = 4;

template <class C>
inline constexpr C kLowest = -std::numeric_limits<C>::infinity();

/// x[0 ...] with the elements that are not there at -inf.
template <class T>
inline Group<T> load_logits(const T* x, AllLanes) {
  return tessera::cpu::load_group(x);
}
template <class T>
inline Group<T> load_logits(const T* x, int lanes) {
  return tessera::cpu::load_group(x, lanes, kLowest<ComputeType<T>>);
}

#if TESSERA_AVX512_BF16
/// bf16 values as integers of the same order, and back; a NaN lies beyond its infinity.
inline __m512i ordered_bits(__m512i bits) {
  const __m512i sign = _mm512_maskz_srai_epi16(~__mmask32{0}, bits, 15);
  // Negative ones get all bits but the sign turned over: bits ^ (sign & 0x7fff).
  return _mm512_ternarylogic_epi32(bits, sign, _mm512_set1_epi16(0x7fff), 0x78);
}

inline float max_logit(const BFloat16* x, int64_t count) {
  const __m512i lowest = _mm512_set1_epi16(static_cast<int16_t>(BFloat16(kLowest<float>).bits));
  __m512i max[2] = {ordered_bits(lowest), ordered_bits(lowest)};
  tessera::cpu::for_groups_of<BFloat16, 2>(count, [&](int64_t c, auto lanes, auto u) {
    __m512i bits;
    if constexpr (std::is_same_v<decltype(lanes), int>) {
      bits = _mm512_mask_loadu_epi16(lowest, static_cast<__mmask32>((1u << lanes) - 1), x + c);
    } else {
      bits = _mm512_loadu_si512(x + c);
    }
    max[u] = _mm512_maskz_max_epi16(~__mmask32{0}, max[u], ordered_bits(bits));
  });
  const __m512i both = _mm512_maskz_max_epi16(~__mmask32{0}, max[0], max[1]);
  const Group<BFloat16> group = tessera::cpu::widen_pairs(ordered_bits(both));
  return tessera::cpu::max_lanes<float>(tessera::cpu::max_of<float>(group.part[0], group.part[1]));
}
#endif

/// The largest of `count` elements; -inf without any. A NaN may count or not: it shows in the sum.
template <class T, class C = ComputeType<T>>
inline C max_logit(const T* x, int64_t count) {
  using tessera::cpu::max_of;
  Vector<C> max[kChains];
  for (Vector<C>& chain : max) chain = tessera::cpu::broadcast(kLowest<C>);
  tessera::cpu::for_groups_of<T, kChains>(count, [&](int64_t c, auto lanes, auto u) {
    for (const Vector<C>& part : load_logits(x + c, lanes).part) max[u] = max_of<C>(part, max[u]);
  });
  return tessera::cpu::max_lanes<C>(
      max_of<C>(max_of<C>(max[0], max[1]), max_of<C>(max[2], max[3])));
}

/// The sum of exp(x - reference), as accurate as results of type E want them; `store(c, group,
/// lanes)` sees the exponentials. Meanwhile fetches what lies `ahead` elements further, the part
/// whose maximum is wanted next: looking for it is little else than waiting for memory.
template <class E, class T, class Store, class C = ComputeType<T>>
inline C sum_exponentials(const T* x, int64_t count, C reference, int64_t ahead, Store&& store) {
  constexpr int kUnroll = kChains / tessera::cpu::kParts<T>;
  Vector<C> sums[kChains] = {};
  tessera::cpu::for_groups_of<T, kUnroll>(count, [&](int64_t c, auto lanes, auto u) {
    __builtin_prefetch(x + c + ahead);
    Group<T> group = load_logits(x + c, lanes);
    for (int i = 0; i < tessera::cpu::kParts<T>; ++i) {
      group.part[i] = tessera::cpu::exp_lanes<E>(group.part[i] - reference);
      sums[u + kUnroll * i] += group.part[i];
    }
    store(c, group, lanes);
  });
  return tessera::cpu::sum_lanes<C>(sums);
}

}  // namespace tessera::kernels::cpu
