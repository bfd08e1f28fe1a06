// Attention of one query a row with a cache, for the CPU: bound by the time to read keys and values.
//
// Threads   share the key/value heads of all rows; each reads its keys and values once for all
//           query heads that share them (up to 8 at a time).
// Softmax   tiles of 64 keys, corrected as larger logits come, as in attention.cc. The tiles begin
//           at the first key that the query sees: a row's bits depend on its own keys alone.
#include "kernels/attention/decode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/runtime/cpu/parallel.h"
#include "kernels/attention/cpu/tiles.h"

namespace tessera::kernels::cpu {
namespace {

using tessera::cpu::load_lanes;
using tessera::cpu::sum_lanes;

constexpr int64_t kQueries = 8;  // query heads that share a walk over keys and values
constexpr int64_t kTileKeys = 64;

/// What the query heads [first, first + count) of a key/value head hold during the walk.
template <class A>
struct Queries {
  alignas(64) A q[kQueries][kMaxAttentionWidth];  // times the scale, padded by zeros
  alignas(64) A o[kQueries][kMaxAttentionWidth];
  alignas(64) A p[kQueries][kTileKeys];
  A highest[kQueries], total[kQueries];
};

/// sum_d q[d] k[d], lanes beyond the width being zero in q.
template <class A, class T>
A dot(const A* q, const T* k, int64_t width) {
  Vector<A> sum{};
  tessera::cpu::for_lanes<A>(
      width, [&](int64_t d, auto lanes) { sum += load(q + d) * load_lanes<A>(k + d, lanes); });
  return sum_lanes<A>(sum);
}

/// The logits of a tile become probabilities relative to the highest logit so far.
template <class A>
void update_softmax(Queries<A>& state, int64_t query, int64_t num_keys, int64_t width) {
  A* const p = state.p[query];
  A highest = state.highest[query];
  for (int64_t s = 0; s < num_keys; ++s) highest = std::max(highest, p[s]);
  std::fill(p + num_keys, p + kTileKeys, -std::numeric_limits<A>::infinity());
  if (highest > state.highest[query]) {
    const A factor = static_cast<A>(std::exp(state.highest[query] - highest));
    state.highest[query] = highest;
    state.total[query] *= factor;
    for (int64_t d = 0; d < width; d += kLanes<A>) {
      store(state.o[query] + d, load(state.o[query] + d) * factor);
    }
  }
  Vector<A> sum{};
  for (int64_t s = 0; s < kTileKeys; s += kLanes<A>) {
    const Vector<A> value = exp_lanes<A>(load(p + s) - highest);
    store(p + s, value);
    sum += value;
  }
  state.total[query] += sum_lanes<A>(sum);
}

template <class T>
struct Head {
  using A = ComputeType<T>;
  const AttentionDecode& a;
  int64_t batch, kv_head, num_keys;

  const T* key(int64_t s) const {
    const HeadStrides& strides = a.k_cache_strides;
    return static_cast<const T*>(a.k_cache) + batch * strides.batch + s * strides.time +
           kv_head * strides.head;
  }
  const T* value(int64_t s) const {
    const HeadStrides& strides = a.v_cache_strides;
    return static_cast<const T*>(a.v_cache) + batch * strides.batch + s * strides.time +
           kv_head * strides.head;
  }

  /// Query heads [first, first + count) of the model.
  void attend(int64_t first, int64_t count) const {
    const AttentionShape& shape = a.shape;
    const int64_t D = shape.head_dim, width = padded_width(D);
    const int64_t begin = shape.window > 0 ? std::max<int64_t>(0, num_keys - shape.window) : 0;
    Queries<A> state;
    for (int64_t i = 0; i < count; ++i) {
      const T* q =
          static_cast<const T*>(a.q) + batch * a.q_strides.batch + (first + i) * a.q_strides.head;
      std::fill_n(state.q[i], width, A(0));
      std::fill_n(state.o[i], width, A(0));
      for (int64_t d = 0; d < D; ++d) {
        state.q[i][d] = static_cast<A>(q[d]) * static_cast<A>(shape.scale);
      }
      state.highest[i] = -std::numeric_limits<A>::infinity();
      state.total[i] = 0;
    }
    for (int64_t tile = begin; tile < num_keys; tile += kTileKeys) {
      const int64_t keys = std::min(kTileKeys, num_keys - tile);
      for (int64_t i = 0; i < count; ++i) set_logits(state, first, i, tile, keys);
      for (int64_t i = 0; i < count; ++i) update_softmax(state, i, keys, width);
      for (int64_t i = 0; i < count; ++i) add_values(state, i, tile, keys);
    }
    for (int64_t i = 0; i < count; ++i) {
      T* o = static_cast<T*>(a.o) + (batch * shape.num_heads + first + i) * D;
      const A factor = A(1) / state.total[i];
      tessera::cpu::for_lanes<A>(D, [&](int64_t d, auto lanes) {
        tessera::cpu::store_lanes<A>(o + d, load(state.o[i] + d) * factor, lanes);
      });
    }
  }

  void set_logits(Queries<A>& state, int64_t first, int64_t i, int64_t tile, int64_t keys) const {
    const AttentionShape& shape = a.shape;
    A* const p = state.p[i];
    for (int64_t s = 0; s < keys; ++s) p[s] = dot<A>(state.q[i], key(tile + s), shape.head_dim);
    if (shape.is_capped()) {
      const A cap = static_cast<A>(shape.softcap);
      for (int64_t s = 0; s < keys; ++s) p[s] = cap * std::tanh(p[s] / cap);
    }
    if (shape.alibi_slopes != nullptr) {
      const A slope = static_cast<A>(shape.alibi_slopes[first + i]);
      for (int64_t s = 0; s < keys; ++s) p[s] -= slope * static_cast<A>(num_keys - 1 - tile - s);
    }
  }

  /// o += p v, a vector of o at a time.
  void add_values(Queries<A>& state, int64_t i, int64_t tile, int64_t keys) const {
    const T* const v = value(tile);
    const int64_t stride = a.v_cache_strides.time;
    tessera::cpu::for_lanes<A>(a.shape.head_dim, [&](int64_t d, auto lanes) {
      Vector<A> sum = load(state.o[i] + d);
      for (int64_t s = 0; s < keys; ++s) {
        sum += state.p[i][s] * load_lanes<A>(v + s * stride + d, lanes);
      }
      store(state.o[i] + d, sum);
    });
  }
};

template <class T>
void copy_row(void* to, const HeadStrides& to_strides, int64_t to_time, const void* from,
              const HeadStrides& from_strides, int64_t batch, int64_t head, int64_t width) {
  std::memcpy(static_cast<T*>(to) + batch * to_strides.batch + to_time * to_strides.time +
                  head * to_strides.head,
              static_cast<const T*>(from) + batch * from_strides.batch + head * from_strides.head,
              static_cast<size_t>(width) * sizeof(T));
}

template <class T>
void decode(const AttentionDecode& a) {
  const AttentionShape& shape = a.shape;
  const int64_t G = shape.num_kv_heads, D = shape.head_dim, group = shape.group();
  constexpr int64_t kGrainKeys = 1024;  // of 64 elements: about 20 us
  const int64_t keys = std::max<int64_t>(1, shape.num_keys * D / 64);
  tessera::cpu::parallel_for(
      shape.batch * G, std::max<int64_t>(1, kGrainKeys / keys), [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
          const int64_t batch = item / G, kv_head = item % G, length = a.lengths[batch];
          if (length < 0) {
            std::fill_n(static_cast<T*>(a.o) + (batch * shape.num_heads + kv_head * group) * D,
                        group * D, T(0));
            continue;
          }
          copy_row<T>(a.k_cache, a.k_cache_strides, length, a.k, a.k_strides, batch, kv_head, D);
          copy_row<T>(a.v_cache, a.v_cache_strides, length, a.v, a.v_strides, batch, kv_head, D);
          const Head<T> head{a, batch, kv_head, length + 1};
          for (int64_t i = 0; i < group; i += kQueries) {
            head.attend(kv_head * group + i, std::min(kQueries, group - i));
          }
        }
      });
}

}  // namespace

void attention_decode(const AttentionDecode& a) {
  visit_float(a.shape.dtype, "attention_decode",
              [&](auto tag) { decode<typename decltype(tag)::type>(a); });
}

}  // namespace tessera::kernels::cpu
