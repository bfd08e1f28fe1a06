#pragma once

#include <algorithm>
#include <cstdint>

#include "core/runtime/cuda/launch.cuh"
#include "core/runtime/cuda/vec.cuh"
#include "kernels/attention/kernel.h"

// Arguments of the attention kernels, which keys a query sees and which queries see a key, and the
// blocks that the grids consist of.

namespace tessera::kernels::cuda {
namespace {  // a copy for each source and each of the two builds

using namespace tessera::cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

/// AttentionShape as the kernels want it. The logits are q . k (negated for a negative scale)
/// minus bias |position - key|, or capped tanh(cap_scale q . k); the softmax is
/// 2^(logit_scale * logit).
struct Problem {
  int num_queries, num_keys, num_heads, num_kv_heads, head_dim;
  int window;  // num_keys if there is none
  bool causal, negate;
  float scale, logit_scale;        // logit_scale = |scale| / ln 2, capped softcap / ln 2
  float cap_scale;                 // scale / softcap, or 0
  float bias_scale;                // of slopes: 1 / |scale|
  const int32_t* document_starts;  // [B, T], not decreasing, or null
  const float* alibi_slopes;       // [H] or null

  __device__ int group() const { return num_heads / num_kv_heads; }
  __device__ bool is_capped() const { return cap_scale != 0.0f; }
  /// Document starts of a batch row, or null.
  __device__ const int32_t* starts(int batch) const {
    return document_starts == nullptr ? nullptr
                                      : document_starts + static_cast<int64_t>(batch) * num_queries;
  }
  __device__ float bias(int head) const {
    return alibi_slopes == nullptr ? 0.0f : alibi_slopes[head] * bias_scale;
  }
};

inline Problem make_problem(const AttentionShape& s) {
  TESSERA_CHECK_SHAPE(s.num_keys < (int64_t{1} << 30),
                      "attention: the CUDA kernels take fewer than 2^30 keys, got {}", s.num_keys);
  const auto magnitude = static_cast<float>(s.scale < 0 ? -s.scale : s.scale);
  const auto cap = static_cast<float>(s.softcap);
  return {.num_queries = static_cast<int>(s.num_queries),
          .num_keys = static_cast<int>(s.num_keys),
          .num_heads = static_cast<int>(s.num_heads),
          .num_kv_heads = static_cast<int>(s.num_kv_heads),
          .head_dim = static_cast<int>(s.head_dim),
          .window = static_cast<int>(s.window > 0 ? std::min(s.window, s.num_keys) : s.num_keys),
          .causal = s.causal,
          .negate = s.scale < 0 && !s.is_capped(),
          .scale = static_cast<float>(s.scale),
          .logit_scale = (s.is_capped() ? cap : magnitude) * kLog2E,
          .cap_scale = s.is_capped() ? static_cast<float>(s.scale) / cap : 0.0f,
          .bias_scale = 1.0f / magnitude,
          .document_starts = s.document_starts,
          .alibi_slopes = s.alibi_slopes};
}

/// Rows of one head: row i is data + i * stride.
template <class T>
struct HeadRows {
  T* data;
  int64_t stride;
};

/// A [B, T, H, D] operand.
struct Operand {
  void* data;
  HeadStrides strides;

  template <class T>
  __device__ HeadRows<T> rows(int64_t batch, int64_t head) const {
    return {static_cast<T*>(data) + batch * strides.batch + head * strides.head, strides.time};
  }
  /// The same with the head's first row at hand.
  template <class T>
  __device__ HeadRows<T> rows_at(T* first) const {
    return {first, strides.time};
  }
};

/// Whether the rows of a [batch, num_rows, num_heads, D] operand can be moved 16 bytes at a time.
inline bool is_vectorizable(const Operand& x, const AttentionShape& s, int64_t num_rows,
                            int64_t num_heads) {
  const int64_t vec = 16 / static_cast<int64_t>(size_of(s.dtype));
  const auto is_whole = [&](int64_t count, int64_t stride) {
    return count <= 1 || stride % vec == 0;
  };
  return is_aligned16(x.data) && s.head_dim % vec == 0 && is_whole(s.batch, x.strides.batch) &&
         is_whole(num_rows, x.strides.time) && is_whole(num_heads, x.strides.head);
}
inline bool is_query_vectorizable(const Operand& x, const AttentionShape& s) {
  return is_vectorizable(x, s, s.num_queries, s.num_heads);
}
inline bool is_key_vectorizable(const Operand& x, const AttentionShape& s) {
  return is_vectorizable(x, s, s.num_keys, s.num_kv_heads);
}

inline HeadStrides contiguous_strides(const AttentionShape& s) {
  return {s.num_queries * s.num_heads * s.head_dim, s.num_heads * s.head_dim, s.head_dim};
}

/// What backward needs of each query: lse in powers of 2 (+inf where no key is visible, so that P
/// is 0) and delta = rowsum(d_out o), [B, H, stride] each. Queries are padded to whole tiles.
struct BwdStats {
  float* data;  // lse; delta is delta_offset behind it
  int64_t stride, delta_offset;

  __device__ float* lse(const Problem& p, int64_t batch, int64_t head) const {
    return data + (batch * p.num_heads + head) * stride;
  }
};

inline BwdStats make_stats(const AttentionBwd& a) {
  const int64_t stride = ceil_div(a.shape.num_queries, kAttentionBlock) * kAttentionBlock;
  return {static_cast<float*>(a.workspace), stride, a.shape.batch * a.shape.num_heads * stride};
}

/// Keys [first, end) that a query sees.
struct KeyRange {
  int first, end;
};

/// First i in [begin, end) with starts[i] > bound, or end.
__device__ inline int first_after(const int32_t* starts, int begin, int end, int bound) {
  while (begin < end) {
    const int middle = begin + (end - begin) / 2;
    if (starts[middle] > bound)
      end = middle;
    else
      begin = middle + 1;
  }
  return begin;
}

/// Of query t < T of a batch row with these document starts (or null). Both bounds grow with t.
__device__ inline KeyRange visible_keys(const Problem& p, const int32_t* starts, int t) {
  const int position = p.num_keys - p.num_queries + t;
  KeyRange range{0, p.num_keys};
  if (p.causal) range = {max(0, position + 1 - p.window), position + 1};
  if (starts == nullptr) return range;
  range.first = max(range.first, starts[t]);
  // Without causal a document ends where the next begins (T = S).
  if (!p.causal) range.end = first_after(starts, t + 1, p.num_queries, t);
  return range;
}

/// The derivative of the soft-cap where it is softcap t; 0 for a masked t = -inf.
__device__ inline float cap_slope(float t) {
  return 1.0f - fminf(t * t, 1.0f);
}

/// What rows [begin, begin + count) of queries see: a tile of keys is skipped if it lies outside
/// [first.first, last.end), and needs no mask inside [last.first, first.end).
struct alignas(16) QuerySpan {
  KeyRange first, last;

  __device__ bool sees(int key, int count) const {
    return key < last.end && key + count > first.first;
  }
  __device__ bool sees_all(int key, int count) const {
    return key >= last.first && key + count <= first.end;
  }
};

__device__ inline QuerySpan query_span(const Problem& p, const int32_t* starts, int begin,
                                       int count) {
  if (begin >= p.num_queries) return {{0, 0}, {0, 0}};  // sees nothing
  return {visible_keys(p, starts, begin),
          visible_keys(p, starts, min(begin + count, p.num_queries) - 1)};
}

/// A block of queries of one head and what stays the same for it, in shared memory: the registers
/// are for the tiles. Valid after the next barrier.
template <class T, int kWarps>
struct QueryBlock {
  QuerySpan spans[kWarps];  // of each warp's queries
  const int32_t* starts;
  const T *k, *v;  // first rows of the head
  float bias;
  int batch, head, query, key_end;

  /// The block `index` of a grid of heads x blocks, those that see most keys first.
  __device__ void set(const Problem& p, const Operand& k_operand, const Operand& v_operand,
                      int64_t index, int warp_rows) {
    const int rows = kWarps * warp_rows, num_blocks = (p.num_queries + rows - 1) / rows;
    const int batch_head = static_cast<int>(index / num_blocks);
    const int row_batch = batch_head / p.num_heads, row_head = batch_head % p.num_heads;
    const int begin = (num_blocks - 1 - static_cast<int>(index % num_blocks)) * rows;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int32_t* row_starts = p.starts(row_batch);
    if (threadIdx.x % kWarpSize == 0)
      spans[warp] = query_span(p, row_starts, begin + warp * warp_rows, warp_rows);
    if (threadIdx.x != 0) return;
    starts = row_starts;
    k = k_operand.rows<T>(row_batch, row_head / p.group()).data;
    v = v_operand.rows<T>(row_batch, row_head / p.group()).data;
    bias = p.bias(row_head);
    batch = row_batch, head = row_head, query = begin;
    key_end = query_span(p, row_starts, begin, rows).last.end;
  }
};

/// A block of keys of one key/value head and the queries [query_begin, query_end) of each of its
/// heads [head_begin, head_end) that may see some of them, in shared memory: the registers are for
/// the tiles. Valid after the next barrier.
struct KeyBlock {
  const int32_t* starts;
  int batch, kv_head, key, query_begin, query_end, head_begin, head_end;

  /// The block `index` of a grid of key/value heads x blocks; queries begin at a whole tile.
  __device__ void set(const Problem& p, int64_t index, int num_keys, int query_tile) {
    if (threadIdx.x != 0) return;
    const int num_blocks = (p.num_keys + num_keys - 1) / num_keys;
    const int batch_head = static_cast<int>(index / num_blocks);
    key = static_cast<int>(index % num_blocks) * num_keys;
    batch = batch_head / p.num_kv_heads;
    kv_head = batch_head % p.num_kv_heads;
    head_begin = kv_head * p.group();
    head_end = head_begin + p.group();
    starts = p.starts(batch);
    int begin = 0;
    query_end = p.num_queries;
    if (p.causal) {
      const int diagonal = key - (p.num_keys - p.num_queries);  // the query at the first key
      begin = max(0, diagonal);
      const int last = diagonal + num_keys - 1;
      query_end = last + min(p.window, query_end - last);
    }
    if (starts != nullptr) {
      query_end = min(query_end, first_after(starts, 0, p.num_queries, key + num_keys - 1));
      // Without causal T = S: the first query of the document that has the first key.
      if (!p.causal) begin = max(0, starts[key]);
    }
    query_begin = begin / query_tile * query_tile;
    if (begin >= query_end) head_end = head_begin;  // nothing sees these keys
  }
};

struct FwdParams {
  Problem problem;
  Operand q, k, v, o;
  float* lse;
  bool is_vectorized, is_output_vectorized;
};

inline FwdParams make_fwd_params(const AttentionFwd& a) {
  FwdParams params{.problem = make_problem(a.shape),
                   .q = {const_cast<void*>(a.q), a.q_strides},
                   .k = {const_cast<void*>(a.k), a.k_strides},
                   .v = {const_cast<void*>(a.v), a.v_strides},
                   .o = {a.o, contiguous_strides(a.shape)},
                   .lse = static_cast<float*>(a.lse),
                   .is_vectorized = false,
                   .is_output_vectorized = false};
  params.is_vectorized = is_query_vectorizable(params.q, a.shape) &&
                         is_key_vectorizable(params.k, a.shape) &&
                         is_key_vectorizable(params.v, a.shape);
  params.is_output_vectorized = is_query_vectorizable(params.o, a.shape);
  return params;
}

struct BwdParams {
  Problem problem;
  Operand q, k, v, d_out;
  Operand dq, dk, dv;
  BwdStats stats;
  bool accumulate_dq, accumulate_dk, accumulate_dv;
  bool is_vectorized, is_dq_vectorized, is_dk_vectorized, is_dv_vectorized;
};

inline BwdParams make_bwd_params(const AttentionBwd& a) {
  const AttentionShape& s = a.shape;
  BwdParams params{.problem = make_problem(s),
                   .q = {const_cast<void*>(a.q), a.q_strides},
                   .k = {const_cast<void*>(a.k), a.k_strides},
                   .v = {const_cast<void*>(a.v), a.v_strides},
                   .d_out = {const_cast<void*>(a.d_out), contiguous_strides(s)},
                   .dq = {a.dq, a.dq_strides},
                   .dk = {a.dk, a.dk_strides},
                   .dv = {a.dv, a.dv_strides},
                   .stats = make_stats(a),
                   .accumulate_dq = a.accumulate_dq,
                   .accumulate_dk = a.accumulate_dk,
                   .accumulate_dv = a.accumulate_dv,
                   .is_vectorized = false,
                   .is_dq_vectorized = false,
                   .is_dk_vectorized = false,
                   .is_dv_vectorized = false};
  params.is_vectorized = is_query_vectorizable(params.q, s) && is_key_vectorizable(params.k, s) &&
                         is_key_vectorizable(params.v, s) && is_query_vectorizable(params.d_out, s);
  params.is_dq_vectorized = is_query_vectorizable(params.dq, s);
  params.is_dk_vectorized = is_key_vectorizable(params.dk, s);
  params.is_dv_vectorized = is_key_vectorizable(params.dv, s);
  return params;
}

}  // namespace
}  // namespace tessera::kernels::cuda
