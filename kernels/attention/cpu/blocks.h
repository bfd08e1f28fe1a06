#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/attention/cpu/tiles.h"
#include "kernels/attention/kernel.h"

// Blocks of query rows, what they see of a tile of keys, and their online softmax. Private to the
// kernels in this folder (cpu.cc has the layout).

namespace tessera::kernels::cpu {

inline constexpr int64_t kRows = kAttentionBlock;
inline constexpr int64_t kKeys = 64;      // of a tile
inline constexpr int64_t kMaskStep = 16;  // keys that are masked or skipped together

template <class A>
inline constexpr int kRowVectors = static_cast<int>(kRows) / kLanes<A>;

/// Integers as wide as A: lane-wise comparisons need equal widths.
template <class A>
using LaneInt = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;

/// Tile memory of one task, on its stack; only what is taken is touched.
template <class A, int64_t kCapacity>
class Scratch {
 public:
  A* take(int64_t numel) {
    A* taken = data_ + used_;
    used_ += numel;
    return taken;
  }

 private:
  alignas(64) A data_[kCapacity];
  int64_t used_ = 0;
};

/// Keys [begin, end) of a tile and the vectors of rows [low, high) that see some of them.
struct Run {
  int64_t begin, end;
  int low, high;
};

/// One block of rows and what they see. Logits may stand in tiles divided by `unit`.
template <class A>
struct Block {
  int64_t batch, kv_head, begin, count;
  alignas(64) LaneInt<A> first[kRows], end[kRows], position[kRows];
  alignas(64) A slope[kRows];
  LaneInt<A> first_min[kRowVectors<A>], first_max[kRowVectors<A>], end_min[kRowVectors<A>],
      end_max[kRowVectors<A>];
  int64_t key_begin = 0, key_end = 0;

  Block(const AttentionShape& s, int64_t batch_index, int64_t head, int64_t block, A unit = 1)
      : batch(batch_index),
        kv_head(head),
        begin(block * kRows),
        count(std::min(kRows, s.rows_per_kv_head() - begin)) {
    set_positions(s, unit);
    if (!s.causal) end_documents(s);
    set_bounds();
  }

  int64_t query(const AttentionShape& s, int64_t i) const { return (begin + i) / s.group(); }
  int64_t head(const AttentionShape& s, int64_t i) const {
    return kv_head * s.group() + (begin + i) % s.group();
  }

 private:
  void set_positions(const AttentionShape& s, A unit) {
    const int64_t offset = s.num_keys - s.num_queries;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = query(s, i);
      position[i] = static_cast<LaneInt<A>>(offset + t);
      end[i] = static_cast<LaneInt<A>>(s.causal ? offset + t + 1 : s.num_keys);
      first[i] = 0;
      if (s.window > 0) first[i] = static_cast<LaneInt<A>>(std::max<int64_t>(0, end[i] - s.window));
      if (s.document_starts != nullptr)
        first[i] = std::max<LaneInt<A>>(first[i], s.document_starts[batch * s.num_queries + t]);
      slope[i] =
          s.alibi_slopes != nullptr ? static_cast<A>(s.alibi_slopes[head(s, i)]) / unit : A(0);
    }
    for (int64_t i = count; i < kRows; ++i) {  // see nothing, and nothing before the last row does
      first[i] = first[count - 1];
      end[i] = position[i] = 0;
      slope[i] = A(0);
    }
  }

  /// Without causal a document ends where the next begins: at the first later query whose document
  /// starts behind this query.
  void end_documents(const AttentionShape& s) {
    if (s.document_starts == nullptr) return;
    const int32_t* starts = s.document_starts + batch * s.num_queries;
    int64_t next = query(s, count - 1) + 1;
    const int64_t last = next - 1;
    while (next < s.num_queries && starts[next] <= last) ++next;
    for (int64_t i = count - 1; i >= 0; --i) {
      const int64_t t = query(s, i);
      if (t + 1 < next && starts[t + 1] > t) next = t + 1;
      end[i] = static_cast<LaneInt<A>>(next);
    }
  }

  void set_bounds() {
    key_begin = std::numeric_limits<int64_t>::max();
    for (int j = 0; j < kRowVectors<A>; ++j) {
      const LaneInt<A>*f = first + j * kLanes<A>, *e = end + j * kLanes<A>;
      first_min[j] = *std::min_element(f, f + kLanes<A>);
      first_max[j] = *std::max_element(f, f + kLanes<A>);
      end_min[j] = *std::min_element(e, e + kLanes<A>);
      end_max[j] = *std::max_element(e, e + kLanes<A>);
      if (end_max[j] <= first_min[j]) continue;
      key_begin = std::min<int64_t>(key_begin, first_min[j]);
      key_end = std::max<int64_t>(key_end, end_max[j]);
    }
    key_begin = key_begin / kKeys * kKeys;
  }
};

/// The runs of a tile that starts at key `tile` and has `num_keys` keys; returns their number.
template <class A>
int find_runs(const Block<A>& block, int64_t tile, int64_t num_keys,
              Run (&runs)[kKeys / kMaskStep]) {
  int num_runs = 0;
  for (int64_t k = 0; k < num_keys; k += kMaskStep) {
    Run run{k, std::min(k + kMaskStep, num_keys), kRowVectors<A>, 0};
    for (int j = 0; j < kRowVectors<A>; ++j) {
      if (block.first_min[j] >= tile + run.end || block.end_max[j] <= tile + run.begin) continue;
      run.low = std::min(run.low, j);
      run.high = j + 1;
    }
    if (run.low >= run.high) continue;
    Run* previous = num_runs > 0 ? &runs[num_runs - 1] : nullptr;
    if (previous != nullptr && previous->end == run.begin && previous->low == run.low &&
        previous->high == run.high)
      previous->end = run.end;
    else
      runs[num_runs++] = run;
  }
  return num_runs;
}

/// cap tanh(x / cap) of the logits x of one run, which stand divided by `unit`; the results do not.
/// Their derivatives by x, 1 - tanh^2, go to `slopes` unless it is null.
template <class A>
void cap_run(const Run& run, A cap, A unit, A* logits, A* slopes) {
  const A inner = unit / cap;
  for (int64_t k = run.begin; k < run.end; ++k) {
    for (int j = run.low; j < run.high; ++j) {
      const int64_t at = k * kRows + j * kLanes<A>;
      const Vector<A> t = tessera::cpu::tanh_lanes<A>(load(logits + at) * inner);
      store(logits + at, t * cap);
      if (slopes != nullptr) store(slopes + at, A(1) - t * t);
    }
  }
}

/// dst *= factors in one run.
template <class A>
void multiply_run(const Run& run, A* dst, const A* factors) {
  for (int64_t k = run.begin; k < run.end; ++k) {
    for (int j = run.low; j < run.high; ++j) {
      const int64_t at = k * kRows + j * kLanes<A>;
      store(dst + at, load(dst + at) * load(factors + at));
    }
  }
}

/// Adds the position bias and masks the logits of one run.
template <class A>
void mask_run(const Block<A>& block, int64_t tile, const Run& run, bool has_bias, A* logits) {
  using Int = Vector<LaneInt<A>>;
  for (int j = run.low; j < run.high; ++j) {
    const int64_t lane = j * kLanes<A>;
    const bool is_masked =
        block.first_max[j] > tile + run.begin || block.end_min[j] < tile + run.end;
    if (!is_masked && !has_bias) continue;
    const Int first = load(block.first + lane), end = load(block.end + lane),
              position = load(block.position + lane);
    const Vector<A> slope = load(block.slope + lane);
    const Vector<A> hidden = broadcast(-std::numeric_limits<A>::infinity());
    for (int64_t k = run.begin; k < run.end; ++k) {
      A* at = logits + k * kRows + lane;
      const Int key = broadcast(static_cast<LaneInt<A>>(tile + k));
      const Int distance = key > position ? key - position : position - key;
      const Vector<A> biased = load(at) - slope * __builtin_convertvector(distance, Vector<A>);
      store(at, (key >= first) & (key < end) ? biased : hidden);
    }
  }
}

/// Rows of one key/value head of a [B, T, H, D] view.
template <class T>
struct Rows {
  T* data;
  int64_t stride;

  Rows(T* base, const HeadStrides& strides, int64_t batch, int64_t head)
      : data(base + batch * strides.batch + head * strides.head), stride(strides.time) {}
};

/// dst[i] = row i of the block, [kRows][width], zero where there is no row or column.
template <class A, class T>
void load_rows(const AttentionShape& s, const Block<A>& block, const T* base,
               const HeadStrides& strides, int64_t width, A* dst) {
  for (int64_t i = 0; i < kRows; ++i, dst += width) {
    const int64_t cols = i < block.count ? s.head_dim : 0;
    if (cols > 0)
      widen(dst,
            base + block.batch * strides.batch + block.query(s, i) * strides.time +
                block.head(s, i) * strides.head,
            cols);
    std::fill(dst + cols, dst + width, A(0));
  }
}

/// dst = factor * src, or dst += with `accumulate`; one rounding.
template <class A, class T>
inline void store_row(T* dst, const A* src, int64_t cols, A factor, bool accumulate) {
  using tessera::cpu::load_lanes;
  tessera::cpu::for_lanes<A>(cols, [=](int64_t c, auto lanes) {
    Vector<A> value = load_lanes<A>(src + c, lanes) * factor;
    if (accumulate) value += load_lanes<A>(dst + c, lanes);
    tessera::cpu::store_lanes<A>(dst + c, value, lanes);
  });
}

inline HeadStrides contiguous_strides(const AttentionShape& s) {
  return {s.num_queries * s.num_heads * s.head_dim, s.num_heads * s.head_dim, s.head_dim};
}

inline int64_t lse_index(const AttentionShape& s, int64_t batch, int64_t head, int64_t query) {
  return (batch * s.num_heads + head) * s.num_queries + query;
}

/// The online softmax of one block: running maximum and sum of each row.
template <class T>
struct OnlineSoftmax {
  using A = ComputeType<T>;
  /// How accurate the exponentials are: their sum is lse's, which is f32 beside bf16 too.
  using Accuracy = std::conditional_t<std::is_same_v<T, BFloat16>, Float16, T>;
  alignas(64) A maximum[kRows], sum[kRows];

  OnlineSoftmax() {
    std::fill_n(maximum, kRows, -std::numeric_limits<A>::infinity());
    std::fill_n(sum, kRows, A(0));
  }

  /// Turns the logits of a tile, which stand there divided by `unit`, into exp(logit - maximum),
  /// and rescales what was summed with the former maximum: `sum` and the [cols][kRows] accumulator.
  void update(A* logits, const Run* runs, int num_runs, A* accumulator, int64_t cols, A unit = 1) {
    for (int j = 0; j < kRowVectors<A>; ++j) {
      const int64_t lane = j * kLanes<A>;
      const Vector<A> former = load(maximum + lane);
      Vector<A> latest = broadcast(-std::numeric_limits<A>::infinity());
      for (const Run* run = runs; run < runs + num_runs; ++run) {
        if (j < run->low || j >= run->high) continue;
        latest = tessera::cpu::max_of<A>(latest, max_of_keys(logits + lane, *run));
      }
      latest = tessera::cpu::max_of<A>(former, latest * unit);
      // A row that has seen nothing keeps -inf, and exp(-inf - 0) = 0 keeps it free of NaN.
      const Vector<A> shift = latest == -std::numeric_limits<A>::infinity() ? Vector<A>{} : latest;
      Vector<A> added{};
      for (const Run* run = runs; run < runs + num_runs; ++run) {
        if (j < run->low || j >= run->high) continue;
        for (int64_t k = run->begin; k < run->end; ++k) {
          const Vector<A> p = exp_lanes<Accuracy>(load(logits + k * kRows + lane) * unit - shift);
          store(logits + k * kRows + lane, p);
          added += p;
        }
      }
      const Vector<A> factor = exp_lanes<Accuracy>(former - shift);
      store(maximum + lane, latest);
      store(sum + lane, load(sum + lane) * factor + added);
      if (is_one(factor)) continue;
      for (int64_t c = 0; c < cols; ++c) {
        A* at = accumulator + c * kRows + lane;
        store(at, load(at) * factor);
      }
    }
  }

 private:
  /// Four running maxima: one would wait for itself.
  static Vector<A> max_of_keys(const A* logits, const Run& run) {
    using tessera::cpu::max_of;
    Vector<A> max[4];
    for (Vector<A>& chain : max) chain = broadcast(-std::numeric_limits<A>::infinity());
    int64_t k = run.begin;
    for (; k + 4 <= run.end; k += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) max[i] = max_of<A>(max[i], load(logits + (k + i) * kRows));
    }
    for (; k < run.end; ++k) max[0] = max_of<A>(max[0], load(logits + k * kRows));
    return max_of<A>(max_of<A>(max[0], max[1]), max_of<A>(max[2], max[3]));
  }

  static bool is_one(Vector<A> factor) {
    const Vector<A> one = broadcast(A(1));
    return std::memcmp(&factor, &one, sizeof factor) == 0;
  }
};

/// Writes o and lse of a block from its sums by rows, [kRows][width].
template <class T>
void store_output(const AttentionFwd& a, const Block<ComputeType<T>>& block,
                  const OnlineSoftmax<T>& softmax, const ComputeType<T>* rows, int64_t width) {
  using A = ComputeType<T>;
  const AttentionShape& s = a.shape;
  const HeadStrides strides = contiguous_strides(s);
  for (int64_t i = 0; i < block.count; ++i) {
    const int64_t t = block.query(s, i), h = block.head(s, i);
    const A sum = softmax.sum[i];
    T* dst =
        static_cast<T*>(a.o) + block.batch * strides.batch + t * strides.time + h * strides.head;
    store_row(dst, rows + i * width, s.head_dim, sum == A(0) ? A(0) : A(1) / sum, false);
    static_cast<A*>(a.lse)[lse_index(s, block.batch, h, t)] = softmax.maximum[i] + std::log(sum);
  }
}

}  // namespace tessera::kernels::cpu
