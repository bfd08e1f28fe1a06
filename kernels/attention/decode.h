#pragma once

#include "kernels/attention/kernel.h"

namespace tessera::kernels {

/// One query a row, which sees the row's keys in a cache and its own (num_queries is 1, num_keys the
/// cache's capacity). Of each row b: its key and value become those at lengths[b] of the cache, and
/// o [B, 1, H, D], contiguous, is the attention to keys 0 .. lengths[b]; a negative length is a row
/// without a query, whose o is 0. flops and bytes are those of full caches.
struct AttentionDecode {
  void *o, *k_cache, *v_cache;  // caches [B, capacity, Hk, D]
  const void *q, *k, *v;        // [B, 1, H or Hk, D]
  HeadStrides k_cache_strides, v_cache_strides, q_strides, k_strides, v_strides;
  const int32_t* lengths;  // [B], below the capacity
  AttentionShape shape;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(attention_decode, AttentionDecode);

}  // namespace tessera::kernels
