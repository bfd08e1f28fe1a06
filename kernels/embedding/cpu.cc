#include <cstring>

#include "kernels/elementwise/row_io.h"
#include "kernels/embedding/kernel.h"

namespace tessera::kernels::cpu {

namespace {

template <class F>
void visit_ids(DType dtype, const void* ids, F&& f) {
  if (dtype == kI64) {
    f(static_cast<const int64_t*>(ids));
  } else {
    f(static_cast<const int32_t*>(ids));
  }
}

/// Terms that are added in f32 before the sum goes on.
constexpr int64_t kRunBlock = 256;

/// Asks for a row that is about to be read (and written).
void prefetch_row(const void* row, int64_t nbytes) {
  for (int64_t at = 0; at < nbytes; at += 64) {
    __builtin_prefetch(static_cast<const char*>(row) + at);
  }
}

/// dw[row, begin..end) from the `count` positions of that row.
template <class T>
void sum_run(const EmbeddingBwd& p, int64_t row, const int32_t* positions, int64_t count,
             int64_t begin, int64_t end) {
  using C = ComputeType<T>;
  using tessera::cpu::load_lanes;
  const T* dy = static_cast<const T*>(p.dy) + begin;
  const auto sum = [=](auto* out, bool accumulate) {
    tessera::cpu::for_lanes<C>(end - begin, [=](int64_t c, auto lanes) {
      tessera::cpu::Vector<C> total = {};
      for (int64_t first = 0; first < count; first += kRunBlock) {
        tessera::cpu::Vector<C> block = {};
        for (int64_t i = first; i < std::min(first + kRunBlock, count); ++i) {
          block += load_lanes<C>(dy + positions[i] * p.cols + c, lanes);
        }
        total += block;
      }
      if (accumulate) total += load_lanes<C>(out + c, lanes);
      tessera::cpu::store_lanes<C>(out + c, total, lanes);
    });
  };
  const int64_t at = row * p.dw_stride + begin;
  if (p.dw_dtype == dtype_of<C>) return sum(static_cast<C*>(p.dw) + at, p.accumulate);
  C total[kPieceCols];
  sum(total, false);
  store_piece(p.dw, p.dw_dtype, at, 1, total, end - begin, p.accumulate);
}

}  // namespace

void embedding_fwd(const EmbeddingFwd& p) {
  visit_ids(p.ids_dtype, p.ids, [&](const auto* ids) {
    for (int64_t r = 0; r < p.rows; ++r) {  // a throw may not leave the parallel region below
      TESSERA_CHECK(ids[r] >= 0 && ids[r] < p.vocab,
                    "embedding: id {} at position {} is out of range [0, {})", ids[r], r, p.vocab);
    }
    const int64_t row_nbytes = p.cols * static_cast<int64_t>(size_of(p.dtype));
    const int64_t grain = std::max<int64_t>(1, (int64_t{256} << 10) / row_nbytes);
    tessera::cpu::parallel_for(p.rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (r + 1 < end) {
          prefetch_row(static_cast<const char*>(p.weight) + ids[r + 1] * row_nbytes, row_nbytes);
        }
        std::memcpy(static_cast<char*>(p.y) + r * row_nbytes,
                    static_cast<const char*>(p.weight) + ids[r] * row_nbytes,
                    static_cast<size_t>(row_nbytes));
      }
    });
  });
}

void embedding_bwd(const EmbeddingBwd& p) {
  // Counting sort, stable: run_end[v] counts, then is the start of v's run and, once the positions
  // are in place, its end. O(V + R), little beside writing dw.
  int32_t* run_end = p.order;
  int32_t* positions = p.order + p.vocab;
  std::fill_n(run_end, p.vocab, 0);
  visit_ids(p.ids_dtype, p.ids, [&](const auto* ids) {
    const auto is_here = [&](int64_t r) { return ids[r] >= p.first && ids[r] < p.first + p.vocab; };
    for (int64_t r = 0; r < p.rows; ++r) {
      if (is_here(r)) ++run_end[ids[r] - p.first];
    }
    int32_t start = 0;
    for (int64_t v = 0; v < p.vocab; ++v) start += std::exchange(run_end[v], start);
    for (int64_t r = 0; r < p.rows; ++r) {
      if (is_here(r)) positions[run_end[ids[r] - p.first]++] = static_cast<int32_t>(r);
    }
  });

  // Work before row v, in rows: those summed and, unless they stay untouched, those written.
  const auto run_begin = [&](int64_t v) { return v == 0 ? 0 : int64_t{run_end[v - 1]}; };
  const auto work_before = [&](int64_t v) { return run_begin(v) + (p.accumulate ? 0 : v); };
  const auto row_at = [&](int64_t work) {
    int64_t low = 0, high = p.vocab;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (work_before(middle) < work) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  const int64_t grain = std::max<int64_t>(1, 2 * kGrainElements / p.cols);
  const int64_t row_nbytes = p.cols * static_cast<int64_t>(size_of(p.dw_dtype));
  const int64_t stride_nbytes = p.dw_stride * static_cast<int64_t>(size_of(p.dw_dtype));
  // The first row of dy and the row of dw of the next run: both are somewhere else in memory.
  const auto prefetch_next = [&](int64_t v, int64_t end_row) {
    do {
      ++v;
    } while (v < end_row && run_begin(v) == run_end[v]);
    if (v == end_row) return;
    const int64_t dy_nbytes = p.cols * static_cast<int64_t>(size_of(p.dtype));
    prefetch_row(static_cast<const char*>(p.dy) + positions[run_begin(v)] * dy_nbytes, dy_nbytes);
    if (p.accumulate) prefetch_row(static_cast<const char*>(p.dw) + v * stride_nbytes, row_nbytes);
  };
  tessera::cpu::parallel_for(work_before(p.vocab), grain, [&](int64_t first, int64_t last) {
    const int64_t end_row = row_at(last);
    for (int64_t v = row_at(first); v < end_row; ++v) {
      const int64_t begin = run_begin(v), count = run_end[v] - begin;
      if (count == 0) {
        if (!p.accumulate) {
          std::memset(static_cast<char*>(p.dw) + v * stride_nbytes, 0,
                      static_cast<size_t>(row_nbytes));
        }
        continue;
      }
      prefetch_next(v, end_row);
      visit_float(p.dtype, "embedding_bwd", [&](auto tag) {
        for (int64_t c = 0; c < p.cols; c += kPieceCols) {
          sum_run<typename decltype(tag)::type>(p, v, positions + begin, count, c,
                                                std::min(c + kPieceCols, p.cols));
        }
      });
    }
  });
}

}  // namespace tessera::kernels::cpu
