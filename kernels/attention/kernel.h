#pragma once

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "core/runtime/dispatch.h"

namespace tessera::kernels {

/// Head widths a kernel takes (its tiles live on the stack).
inline constexpr int64_t kMaxAttentionWidth = 256;
/// Rows of a query block (row = one query of one head) and keys of a tile.
inline constexpr int64_t kAttentionBlock = 64;

/// What forward and backward agree on. B batch, T queries, S keys, H query and Hk key/value heads,
/// D head width. The queries are positions [S - T, S). With a window (causal only) the query at
/// position i sees no key before i - window + 1; with a soft-cap a logit x counts as
/// softcap tanh(x / softcap).
struct AttentionShape {
  DType dtype;
  int64_t batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim;
  double scale;
  bool causal;
  const int32_t* document_starts;  // [B, T] or null
  const float* alibi_slopes;       // [H] or null, null beside a soft-cap
  int64_t window = 0;              // keys that a query sees at most; 0: all
  double softcap = 0;              // 0: none

  bool is_capped() const { return softcap > 0; }
  /// The first key that any query sees.
  int64_t key_begin() const {
    return window > 0 ? std::max<int64_t>(0, num_keys - num_queries + 1 - window) : 0;
  }
  int64_t group() const { return num_heads / num_kv_heads; }
  /// Query rows that share one key/value head; row r is query r / group of head r % group.
  int64_t rows_per_kv_head() const { return num_queries * group(); }
  int64_t num_blocks() const {
    return (rows_per_kv_head() + kAttentionBlock - 1) / kAttentionBlock;
  }
  /// (query, key) pairs of all heads that are visible with one document a row:
  ///   B H T S, if causal B H (T (S - T) + T (T + 1) / 2), with a window at most that many a query.
  double num_visible_pairs() const;
};

/// Element strides of a [B, T, H, D] view whose last dimension is contiguous.
struct HeadStrides {
  int64_t batch, time, head;

  /// Elements from the first to one past the last.
  int64_t span(int64_t batches, int64_t times, int64_t heads, int64_t head_dim) const;
};

/// o [B, T, H, D] and lse [B, H, T] (log-sum-exp of the logits, f32; f64 for f64; -inf where no key
/// is visible), both contiguous. flops = 4 D num_visible_pairs: two products of D multiply-adds.
/// Keys before the first that is seen are not read.
struct AttentionFwd {
  void *o, *lse;
  const void *q, *k, *v;
  HeadStrides q_strides, k_strides, v_strides;
  AttentionShape shape;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(attention_fwd, AttentionFwd);

/// Gradients; a null destination is not wanted. flops = 10 D num_visible_pairs: the logits and
/// their gradient again, then dq, dk, dv.
struct AttentionBwd {
  void *dq, *dk, *dv;  // dtype of the shape
  bool accumulate_dq, accumulate_dk, accumulate_dv;
  HeadStrides dq_strides, dk_strides, dv_strides;
  /// `workspace_numel` elements of f32 (f64 for f64): on the CPU dk and dv of each chunk of query
  /// blocks, on CUDA the log-sum-exp and rowsum(d_out o) of each query.
  void* workspace;
  const void *d_out, *o, *lse;  // contiguous
  const void *q, *k, *v;
  HeadStrides q_strides, k_strides, v_strides;
  AttentionShape shape;
  DeviceType device = DeviceType::kCpu;  // whose workspace it is

  /// Query blocks of a key/value head are dealt to this many partial sums, so that a small batch
  /// has work for many threads. A function of the shape alone, as the order of sums depends on it.
  int64_t num_chunks() const;
  int64_t workspace_numel() const;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(attention_bwd, AttentionBwd);

/// Head width rounded up so that rows of the tiles are whole vectors of any kind.
inline int64_t padded_width(int64_t head_dim) {
  return (head_dim + 15) / 16 * 16;
}

}  // namespace tessera::kernels
