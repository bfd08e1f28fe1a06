#pragma once

#include <span>

#include "core/runtime/backends.h"
#include "core/tensor.h"

// B batch, T queries, S keys, H query heads, Hk key/value heads, D head width.

namespace tessera {

/// Which keys a query sees, and what becomes of the logits.
struct AttentionOptions {
  bool causal = true;
  float scale = 0;  ///< of the logits; 0 means 1 / sqrt(D)
  /// i32 [B, T]: first position of the query's document; undefined: one document a sample.
  Tensor document_starts = {};
  Tensor alibi_slopes = {};  ///< f32 [H]; undefined: no position bias
  int64_t window = 0;        ///< keys that a query sees at most, its own the last; 0: all
  float softcap = 0;         ///< bound of the logits' magnitude; 0: none
};

/// Which code computes attention on CUDA devices: that of the current Context's options, until it
/// is set there. cuDNN's kernels have not been run on hardware yet, nor has their speed been
/// measured: the graphs are described as cuDNN 9.19 recognizes them, and its heuristics offer
/// kernels for them (compute capability 9.0).
void set_attention_backend(AttentionBackend backend);
AttentionBackend attention_backend();

/// Softmax attention with f32 statistics that never holds a T x S matrix: keys are taken a tile at
/// a time and the softmax is corrected as larger logits come (Milakov & Gimelshein 2018,
/// arXiv:1805.02867; Dao 2023, arXiv:2307.08691).
///   o[b,t,h] = sum_s p[s] v[b,s,h']
///   p = softmax_s(cap(scale q[b,t,h] . k[b,s,h']) - slope[h] |t' - s|)
///   cap(x) = softcap tanh(x / softcap), or x (Gemma 2: arXiv:2408.00118)
///   h' = h / (H / Hk);  t' = S - T + t: queries are the last positions (decoding with a cache)
/// Visible are keys s <= t' if causal, with a window those with t' - window < s too, and those of
/// the query's document: s >= document_starts[b,t] and, if not causal, s before the next document.
/// A query that sees no key gives 0. Work grows with what is visible: tiles of keys that no query of
/// a block sees are not visited.
/// Shapes   q [B, T, H, D], k and v [B, S, Hk, D], S >= T, H a multiple of Hk -> o [B, T, H, D]
/// Strides  any but in the last dimension (slices of a packed qkv are fine); gradients as well
/// Dtypes   q, k, v, o f32 | bf16 | f16; sums in f32, one rounding at the end; f64 in f64
/// Saves    q, k, v, o, log-sum-exp (4 bytes a query and head), document starts, slopes
/// Grads    dq, dk, dv; summed in an order that depends on the shape alone. Slopes have none.
///          While backward runs, a workspace of dk and dv in f32 (a few copies if B Hk < 32); on
///          CUDA of 8 bytes a query and head
/// CUDA     bf16 and f16 on tensor cores (P and dS rounded to the dtype), f32 without; no f64
/// Streams  current stream; never synchronizes (but for a measurement of `kAuto`)
/// Errors   ShapeError or DtypeError that begins with "attention:"; Error for a window without
///          causal, alibi beside a softcap, a number out of range; CudaError from cuDNN
Tensor attention(const Tensor& q_BTHD, const Tensor& k_BSHD, const Tensor& v_BSHD,
                 const AttentionOptions& options = {});

/// A step of decoding: each row's key and value are put into its cache behind the lengths[b] that it
/// holds, and its one query attends to all of these.
///   o[b,0,h] = sum_{s <= lengths[b]} p[s] v_cache[b,s,h'],  p as `attention` has it
/// A negative length is a row without a query: nothing is put there and its o is 0. A row's bits
/// depend on no other row; they are not those of `attention`, whose order of sums is another one.
/// Shapes   q [B, 1, H, D], k and v [B, 1, Hk, D], caches [B, S, Hk, D], lengths [B], each < S
///          -> o [B, 1, H, D]
/// Dtypes   q, k, v, caches, o the same floating one; sums in f32, one rounding at the end
/// Grads    none: Error if any is asked for
/// CUDA     `attention` of each row
/// Errors   ShapeError, DtypeError or Error that begins with "attention_decode:"
Tensor attention_decode(const Tensor& q_BTHD, const Tensor& k_BTHD, const Tensor& v_BTHD,
                        Tensor& k_cache_BSHD, Tensor& v_cache_BSHD,
                        std::span<const int32_t> lengths, const AttentionOptions& options = {});

}  // namespace tessera
