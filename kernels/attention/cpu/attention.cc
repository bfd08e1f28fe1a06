// Attention for the CPU.
//
// Layout   The queries of all heads that share a key/value head are rows (row = query * group +
//          head in group), taken in blocks of 64. Logits of a block and a tile of 64 keys are held
//          transposed, [keys][rows], with rows in the vector lanes: the softmax needs no horizontal
//          sums, and every product has its broadcast operand in rows of K or V as they lie in
//          memory and its vector operand in a packed tile:
//            forward   S' = K Q'         O' += V' P'
//            backward  S' = K Q'         dP' = V dO'        P' = exp(S' - lse)
//                      dV += P' dO       dK += dS' Q        dQ' += K' dS'
//          (' is transposed; dS = P (dP - rowsum(dO O)).) bf16 and f16 tiles are widened once;
//          where the processor multiplies bf16, bf16.h has the products in it instead.
// Soft-cap S' = cap tanh(K Q' / cap) before it is masked; dS counts times 1 - tanh^2.
// Masks    Each row sees the keys [first, end). Steps of 16 keys and vectors of rows that see none
//          of each other are skipped; where they see some, masked logits are -inf.
// Threads  forward: blocks of rows. backward: key/value heads times chunks of blocks; each chunk
//          sums dk and dv in its part of the workspace, the parts are added in order.
// Bits     A row's result depends on nothing it does not see: a masked key adds exact zeros and an
//          unchanged maximum scales by exactly 1. Nothing depends on the number of threads.
#include <cmath>
#include <cstring>
#include <limits>

#include "core/runtime/cpu/parallel.h"
#include "kernels/attention/cpu/bf16.h"
#include "kernels/attention/cpu/blocks.h"
#include "kernels/attention/cpu/tiles.h"
#include "kernels/attention/kernel.h"

namespace tessera::kernels::cpu {
namespace {

using tessera::cpu::parallel_for;

constexpr double kGrainFlops = 2e6;  // about 20 us

/// A tile of keys or values as A: in place if it is A already, else widened to `buffer`,
/// [keys][head_dim].
template <class A, class T>
struct Tile {
  const A* data;
  int64_t stride;

  Tile(const Rows<const T>& rows, int64_t begin, int64_t num_keys, int64_t head_dim, A* buffer) {
    if constexpr (std::is_same_v<A, T>) {
      data = rows.data + begin * rows.stride;
      stride = rows.stride;
    } else {
      data = buffer;
      stride = head_dim;
      for (int64_t k = 0; k < num_keys; ++k)
        widen(buffer + k * head_dim, rows.data + (begin + k) * rows.stride, head_dim);
    }
  }
};

/// Items a thread takes at least.
int64_t grain_of(double flops, int64_t num_items) {
  return std::max<int64_t>(
      1, static_cast<int64_t>(kGrainFlops * static_cast<double>(num_items) / (flops + 1)));
}

template <class T>
void forward_block(const AttentionFwd& a, int64_t batch, int64_t kv_head, int64_t block_index) {
  using A = ComputeType<T>;
  const AttentionShape& s = a.shape;
  const int64_t D = s.head_dim, width = padded_width(D);
  const bool has_bias = s.alibi_slopes != nullptr;
  Scratch<A, 5 * kRows * kMaxAttentionWidth + kKeys * kRows> scratch;
  A* rows = scratch.take(kRows * width);
  A* q = scratch.take(width * kRows);
  A* o = scratch.take(width * kRows);
  A* p = scratch.take(kKeys * kRows);
  A* k_buffer = scratch.take(kKeys * width);
  A* v_buffer = scratch.take(kKeys * width);

  const Block<A> block(s, batch, kv_head, block_index);
  load_rows(s, block, static_cast<const T*>(a.q), a.q_strides, width, rows);
  transpose(q, kRows, rows, width, kRows, width, static_cast<A>(s.scale));
  std::fill_n(o, width * kRows, A(0));
  const Rows<const T> k_rows(static_cast<const T*>(a.k), a.k_strides, batch, kv_head);
  const Rows<const T> v_rows(static_cast<const T*>(a.v), a.v_strides, batch, kv_head);
  OnlineSoftmax<T> softmax;

  for (int64_t tile = block.key_begin; tile < block.key_end; tile += kKeys) {
    const int64_t num_keys = std::min(kKeys, block.key_end - tile);
    Run runs[kKeys / kMaskStep];
    const int num_runs = find_runs(block, tile, num_keys, runs);
    if (num_runs == 0) continue;
    const Tile<A, T> k(k_rows, tile, num_keys, D, k_buffer);
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      const int64_t lane = run.low * kLanes<A>;
      multiply<A, false>(run.end - run.begin, run.high - run.low, p + run.begin * kRows + lane,
                         kRows, k.data + run.begin * k.stride, k.stride, q + lane, kRows, D, false);
      if (s.is_capped()) cap_run<A>(run, static_cast<A>(s.softcap), A(1), p, nullptr);
      mask_run(block, tile, run, has_bias, p);
    }
    softmax.update(p, runs, num_runs, o, D);
    const Tile<A, T> v(v_rows, tile, num_keys, D, v_buffer);
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      const int64_t lane = run.low * kLanes<A>;
      multiply<A, true>(D, run.high - run.low, o + lane, kRows, v.data + run.begin * v.stride,
                        v.stride, p + run.begin * kRows + lane, kRows, run.end - run.begin, true);
    }
  }

  transpose(rows, width, o, kRows, width, kRows, A(1));
  store_output<T>(a, block, softmax, rows, width);
}

/// Memory of backward for one block of rows; see the banner for the names.
template <class A>
struct BackwardTiles {
  Scratch<A, 7 * kRows * kMaxAttentionWidth + 3 * kKeys * kRows> scratch;
  A *q_rows, *do_rows, *q, *d_out, *dq, *k_buffer, *v_buffer, *p, *ds, *slopes;
  alignas(64) A lse[kRows], delta[kRows];

  explicit BackwardTiles(int64_t width) {
    for (A** rows : {&q_rows, &do_rows, &q, &d_out, &dq, &k_buffer, &v_buffer})
      *rows = scratch.take(kRows * width);
    p = scratch.take(kKeys * kRows);
    ds = scratch.take(kKeys * kRows);
    slopes = scratch.take(kKeys * kRows);  // of the soft-cap
  }
};

/// Rows of q and d_out in both layouts, lse and delta = rowsum(d_out * o).
template <class A, class T>
void load_block(const AttentionBwd& a, const Block<A>& block, BackwardTiles<A>& tiles) {
  const AttentionShape& s = a.shape;
  const int64_t D = s.head_dim, width = padded_width(D);
  const HeadStrides o_strides = contiguous_strides(s);
  A* o_rows = tiles.dq;  // not yet needed
  load_rows(s, block, static_cast<const T*>(a.q), a.q_strides, width, tiles.q_rows);
  load_rows(s, block, static_cast<const T*>(a.d_out), o_strides, width, tiles.do_rows);
  load_rows(s, block, static_cast<const T*>(a.o), o_strides, width, o_rows);
  for (int64_t i = 0; i < kRows; ++i) {
    // A row that sees nothing has lse -inf; with +inf its probabilities are exp(-inf) = 0.
    tiles.lse[i] = std::numeric_limits<A>::infinity();
    if (i < block.count) {
      const A lse = static_cast<const A*>(
          a.lse)[lse_index(s, block.batch, block.head(s, i), block.query(s, i))];
      if (lse != -std::numeric_limits<A>::infinity()) tiles.lse[i] = lse;
    }
    Vector<A> sum{};
    for (int64_t c = 0; c < width; c += kLanes<A>)
      sum += load(tiles.do_rows + i * width + c) * load(o_rows + i * width + c);
    tiles.delta[i] = A(0);
    for (int l = 0; l < kLanes<A>; ++l) tiles.delta[i] += sum[l];
  }
  transpose(tiles.q, kRows, tiles.q_rows, width, kRows, width, static_cast<A>(s.scale));
  transpose(tiles.d_out, kRows, tiles.do_rows, width, kRows, width, A(1));
  std::fill_n(tiles.dq, width * kRows, A(0));
}

/// p = exp(p - lse), ds = p * (ds - delta) for one run.
template <class A>
void softmax_backward(const Run& run, BackwardTiles<A>& tiles) {
  for (int j = run.low; j < run.high; ++j) {
    const Vector<A> lse = load(tiles.lse + j * kLanes<A>),
                    delta = load(tiles.delta + j * kLanes<A>);
    for (int64_t k = run.begin; k < run.end; ++k) {
      const int64_t at = k * kRows + j * kLanes<A>;
      const Vector<A> p = exp_lanes<A>(load(tiles.p + at) - lse);
      store(tiles.p + at, p);
      store(tiles.ds + at, p * (load(tiles.ds + at) - delta));
    }
  }
}

template <class T>
void backward_block(const AttentionBwd& a, int64_t batch, int64_t kv_head, int64_t block_index,
                    BackwardTiles<ComputeType<T>>& tiles, ComputeType<T>* dk, ComputeType<T>* dv) {
  using A = ComputeType<T>;
  const AttentionShape& s = a.shape;
  const int64_t D = s.head_dim, width = padded_width(D);
  const int columns = static_cast<int>(width) / kLanes<A>;
  const Block<A> block(s, batch, kv_head, block_index);
  load_block<A, T>(a, block, tiles);
  const Rows<const T> k_rows(static_cast<const T*>(a.k), a.k_strides, batch, kv_head);
  const Rows<const T> v_rows(static_cast<const T*>(a.v), a.v_strides, batch, kv_head);

  for (int64_t tile = block.key_begin; tile < block.key_end; tile += kKeys) {
    const int64_t num_keys = std::min(kKeys, block.key_end - tile);
    Run runs[kKeys / kMaskStep];
    const int num_runs = find_runs(block, tile, num_keys, runs);
    if (num_runs == 0) continue;
    const Tile<A, T> k(k_rows, tile, num_keys, D, tiles.k_buffer);
    const Tile<A, T> v(v_rows, tile, num_keys, D, tiles.v_buffer);
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      const int64_t keys = run.end - run.begin, lane = run.low * kLanes<A>;
      const int64_t rows = (run.high - run.low) * kLanes<A>;
      const int vectors = run.high - run.low;
      A* p = tiles.p + run.begin * kRows + lane;
      A* ds = tiles.ds + run.begin * kRows + lane;
      const A* k_run = k.data + run.begin * k.stride;
      multiply<A, false>(keys, vectors, p, kRows, k_run, k.stride, tiles.q + lane, kRows, D, false);
      if (s.is_capped()) cap_run<A>(run, static_cast<A>(s.softcap), A(1), tiles.p, tiles.slopes);
      mask_run(block, tile, run, s.alibi_slopes != nullptr, tiles.p);
      multiply<A, false>(keys, vectors, ds, kRows, v.data + run.begin * v.stride, v.stride,
                         tiles.d_out + lane, kRows, D, false);
      softmax_backward(run, tiles);
      if (s.is_capped()) multiply_run(run, tiles.ds, tiles.slopes);
      const int64_t at = (tile + run.begin) * width;
      if (a.dv != nullptr)
        multiply<A, false>(keys, columns, dv + at, width, p, kRows, tiles.do_rows + lane * width,
                           width, rows, true);
      if (a.dk != nullptr)
        multiply<A, false>(keys, columns, dk + at, width, ds, kRows, tiles.q_rows + lane * width,
                           width, rows, true);
      if (a.dq != nullptr)
        multiply<A, true>(D, vectors, tiles.dq + lane, kRows, k_run, k.stride, ds, kRows, keys,
                          true);
    }
  }

  if (a.dq == nullptr) return;
  A* rows = tiles.q_rows;
  transpose(rows, width, tiles.dq, kRows, width, kRows, static_cast<A>(s.scale));
  for (int64_t i = 0; i < block.count; ++i) {
    T* dst = static_cast<T*>(a.dq) + batch * a.dq_strides.batch +
             block.query(s, i) * a.dq_strides.time + block.head(s, i) * a.dq_strides.head;
    store_row(dst, rows + i * width, D, A(1), a.accumulate_dq);
  }
}

/// How backward deals the blocks of a head to chunks: to and fro, so that causal chunks have equal
/// work; if a chunk is no shorter than the window, side by side, so that each sums few keys.
class Chunks {
 public:
  explicit Chunks(const AttentionBwd& a)
      : shape_(a.shape),
        count_(a.num_chunks()),
        is_local_(shape_.window > 0 && shape_.window * count_ <= shape_.num_keys) {}

  int64_t count() const { return count_; }

  template <class F>
  void for_blocks(int64_t chunk, F&& f) const {
    const int64_t num_blocks = shape_.num_blocks();
    if (is_local_) {
      for (int64_t block = begin_of(chunk); block < begin_of(chunk + 1); ++block) f(block);
      return;
    }
    for (int64_t round = 0; round * count_ < num_blocks; ++round) {
      const int64_t block = round * count_ + (round % 2 == 0 ? chunk : count_ - 1 - chunk);
      if (block < num_blocks) f(block);
    }
  }

  struct Keys {
    int64_t begin, end;
    bool contain(int64_t key) const { return key >= begin && key < end; }
  };
  /// Those that the blocks of a chunk may see, in whole tiles.
  Keys keys(int64_t chunk) const {
    if (!is_local_) return {0, shape_.num_keys};
    if (begin_of(chunk) == begin_of(chunk + 1)) return {0, 0};
    const int64_t rows = begin_of(chunk + 1) * kRows, offset = shape_.num_keys - shape_.num_queries;
    const int64_t first = offset + begin_of(chunk) * kRows / shape_.group();
    const int64_t last = offset + (std::min(rows, shape_.rows_per_kv_head()) - 1) / shape_.group();
    return {std::max<int64_t>(0, first + 1 - shape_.window) / kKeys * kKeys, last + 1};
  }

 private:
  int64_t begin_of(int64_t chunk) const { return shape_.num_blocks() * chunk / count_; }

  const AttentionShape& shape_;
  int64_t count_;
  bool is_local_;
};

template <class T>
void backward_chunk(const AttentionBwd& a, const Chunks& chunks, int64_t item) {
  using A = ComputeType<T>;
  const AttentionShape& s = a.shape;
  const int64_t chunk = item % chunks.count(), head = item / chunks.count();
  const int64_t width = padded_width(s.head_dim), numel = s.num_keys * width;
  A* dk = static_cast<A*>(a.workspace) + item * 2 * numel;
  A* dv = dk + numel;
  const Chunks::Keys keys = chunks.keys(chunk);
  for (A* sums : {dk, dv}) std::fill(sums + keys.begin * width, sums + keys.end * width, A(0));
  const auto for_blocks = [&](auto&& one_block) {
    chunks.for_blocks(chunk, [&](int64_t block) {
      one_block(head / s.num_kv_heads, head % s.num_kv_heads, block);
    });
  };
#if TESSERA_ATTENTION_BF16
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (s.scale > 0) {
      BackwardPairs tiles;
      return for_blocks([&](int64_t batch, int64_t kv_head, int64_t block) {
        backward_block_bf16(a, batch, kv_head, block, tiles, dk, dv);
      });
    }
  }
#endif
  BackwardTiles<A> tiles(padded_width(s.head_dim));
  for_blocks([&](int64_t batch, int64_t kv_head, int64_t block) {
    backward_block<T>(a, batch, kv_head, block, tiles, dk, dv);
  });
}

/// Adds the chunks of keys [begin, end) of one key/value head and writes dk and dv.
template <class T>
void write_keys(const AttentionBwd& a, const Chunks& chunks, int64_t head, int64_t begin,
                int64_t end) {
  using A = ComputeType<T>;
  const AttentionShape& s = a.shape;
  const int64_t width = padded_width(s.head_dim), numel = s.num_keys * width;
  const int64_t batch = head / s.num_kv_heads, kv_head = head % s.num_kv_heads;
  const auto write = [&](void* dst, const HeadStrides& strides, int64_t part, A factor,
                         bool accumulate) {
    if (dst == nullptr) return;
    const Rows<T> rows(static_cast<T*>(dst), strides, batch, kv_head);
    for (int64_t k = begin; k < end; ++k) {
      A* const first =
          static_cast<A*>(a.workspace) + (head * chunks.count() * 2 + part) * numel + k * width;
      A* sum = nullptr;
      for (int64_t c = 0; c < chunks.count(); ++c) {
        if (!chunks.keys(c).contain(k)) continue;
        A* const other = first + c * 2 * numel;
        if (sum == nullptr) {
          sum = other;
        } else {
          for (int64_t d = 0; d < width; ++d) sum[d] += other[d];
        }
      }
      if (sum == nullptr) std::fill_n(sum = first, width, A(0));  // nothing sees this key
      store_row(rows.data + k * rows.stride, sum, s.head_dim, factor, accumulate);
    }
  };
  write(a.dk, a.dk_strides, 0, static_cast<A>(s.scale), a.accumulate_dk);
  write(a.dv, a.dv_strides, 1, A(1), a.accumulate_dv);
}

}  // namespace

void attention_fwd(const AttentionFwd& a) {
  const AttentionShape& s = a.shape;
  const int64_t num_blocks = s.num_blocks(), items = s.batch * s.num_kv_heads * num_blocks;
  if (items == 0) return;
  visit_float(s.dtype, "attention_fwd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const double flops = 4.0 * static_cast<double>(s.head_dim) * s.num_visible_pairs();
    parallel_for(items, grain_of(flops, items), [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t head = item / num_blocks, i = item % num_blocks;
        // Late blocks see more keys: pairs of an early and a late one are equal work.
        const int64_t block = i % 2 == 0 ? i / 2 : num_blocks - 1 - i / 2;
#if TESSERA_ATTENTION_BF16
        if (std::is_same_v<T, BFloat16> && s.scale > 0) {
          forward_block_bf16(a, head / s.num_kv_heads, head % s.num_kv_heads, block);
          continue;
        }
#endif
        forward_block<T>(a, head / s.num_kv_heads, head % s.num_kv_heads, block);
      }
    });
  });
}

void attention_bwd(const AttentionBwd& a) {
  const AttentionShape& s = a.shape;
  const Chunks chunks(a);
  const int64_t num_heads = s.batch * s.num_kv_heads, items = num_heads * chunks.count();
  if (items == 0 || s.num_keys == 0) return;
  visit_float(s.dtype, "attention_bwd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const double flops = 10.0 * static_cast<double>(s.head_dim) * s.num_visible_pairs();
    // With one chunk a head's sums are complete, and still in the cache.
    const bool is_one_pass = chunks.count() == 1;
    parallel_for(items, grain_of(flops, items), [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        backward_chunk<T>(a, chunks, item);
        if (is_one_pass) write_keys<T>(a, chunks, item, 0, s.num_keys);
      }
    });
    if (is_one_pass) return;
    const int64_t tiles = (s.num_keys + kKeys - 1) / kKeys;
    parallel_for(num_heads * tiles, 4, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t tile = item % tiles * kKeys;
        write_keys<T>(a, chunks, item / tiles, tile, std::min(tile + kKeys, s.num_keys));
      }
    });
  });
}

}  // namespace tessera::kernels::cpu
