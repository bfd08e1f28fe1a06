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

/// dw[row, begin..end) from the `count` positions of that row.
template <class C>
void sum_run(const EmbeddingBwd& p, int64_t row, const int32_t* positions, int64_t count,
             int64_t begin, int64_t end) {
  C buffer[kPieceCols], block[kPieceCols], total[kPieceCols];
  const int64_t cols = end - begin;
  std::fill_n(total, cols, C(0));
  for (int64_t first = 0; first < count; first += kRunBlock) {
    std::fill_n(block, cols, C(0));
    for (int64_t i = first; i < std::min(first + kRunBlock, count); ++i) {
      const C* dy = load_piece(buffer, p.dy, p.dtype, positions[i] * p.cols + begin, 1, cols);
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) block[c] += dy[c];
    }
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) total[c] += block[c];
  }
  store_piece(p.dw, p.dw_dtype, row * p.dw_stride + begin, 1, total, cols, p.accumulate);
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
    for (int64_t r = 0; r < p.rows; ++r) ++run_end[ids[r]];
    int32_t start = 0;
    for (int64_t v = 0; v < p.vocab; ++v) start += std::exchange(run_end[v], start);
    for (int64_t r = 0; r < p.rows; ++r) {
      positions[run_end[ids[r]]++] = static_cast<int32_t>(r);
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
      for (int64_t c = 0; c < p.cols; c += kPieceCols) {
        const int64_t end = std::min(c + kPieceCols, p.cols);
        if (p.dtype == kF64) {
          sum_run<double>(p, v, positions + begin, count, c, end);
        } else {
          sum_run<float>(p, v, positions + begin, count, c, end);
        }
      }
    }
  });
}

}  // namespace tessera::kernels::cpu
