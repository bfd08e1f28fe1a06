#include <cmath>

#include "core/runtime/cpu/lanes.h"
#include "core/runtime/cpu/parallel.h"
#include "kernels/norm/kernel.h"

// One row at a time: it stays in the first cache levels between its passes, so each operand moves
// through memory once. The backward walks fixed runs of rows (NormBwd::num_chunks), each with its
// own row of partial dw and db, so that its bits do not depend on the number of threads.

namespace tessera::kernels::cpu {
namespace {

using tessera::cpu::for_lanes;
using tessera::cpu::for_lanes_of;
using tessera::cpu::load_lanes;
using tessera::cpu::parallel_for;
using tessera::cpu::store_lanes;
using tessera::cpu::sum_lanes;
using tessera::cpu::Vector;

/// Running sums of a row.
constexpr int kChains = 4;

/// x - mean, with zeros where there is no element.
template <class C, class T>
Vector<C> load_centered(const T* x, C mean, tessera::cpu::AllLanes) {
  return load_lanes<C>(x) - mean;
}
template <class C, class T>
Vector<C> load_centered(const T* x, C mean, int lanes) {
  return load_lanes<C>(x, lanes, mean) - mean;
}

template <class T, class W, bool kCentered>
void norm_fwd(const NormFwd& a) {
  using C = ComputeType<T>;
  const W* w = static_cast<const W*>(a.w);
  const W* b = static_cast<const W*>(a.b);
  const int64_t cols = a.cols;
  const C inv_cols = C(1) / static_cast<C>(cols);

  const auto one_row = [=](int64_t row) {
    const T* x = static_cast<const T*>(a.x) + a.x_rows.offset(row);
    T* y = static_cast<T*>(a.y) + row * cols;
    if (a.residual != nullptr) {
      const T* residual = static_cast<const T*>(a.residual) + a.residual_rows.offset(row);
      T* sum = static_cast<T*>(a.sum) + row * cols;
      for_lanes<C>(cols, [=](int64_t c, auto lanes) {
        store_lanes<C>(sum + c, load_lanes<C>(x + c, lanes) + load_lanes<C>(residual + c, lanes),
                       lanes);
      });
      x = sum;
    }
    C mean = 0;
    if constexpr (kCentered) {
      Vector<C> totals[kChains] = {};
      for_lanes_of<C, kChains>(
          cols, [&](int64_t c, auto lanes, auto u) { totals[u] += load_lanes<C>(x + c, lanes); });
      mean = sum_lanes<C>(totals) * inv_cols;
    }
    Vector<C> squares[kChains] = {}, shifts[kChains] = {};
    for_lanes_of<C, kChains>(cols, [&](int64_t c, auto lanes, auto u) {
      const Vector<C> d = load_centered<C>(x + c, mean, lanes);
      squares[u] += d * d;
      if constexpr (kCentered) shifts[u] += d;
    });
    C square = sum_lanes<C>(squares);
    if constexpr (kCentered) {  // `shift` is what rounding left in the mean
      const C shift = sum_lanes<C>(shifts) * inv_cols;
      square -= static_cast<C>(cols) * shift * shift;
      mean += shift;
    }
    const C rstd = C(1) / std::sqrt(square * inv_cols + static_cast<C>(a.eps));
    for_lanes<C>(cols, [=](int64_t c, auto lanes) {
      Vector<C> value = (load_lanes<C>(x + c, lanes) - mean) * rstd * load_lanes<C>(w + c, lanes);
      if (b != nullptr) value += load_lanes<C>(b + c, lanes);
      store_lanes<C>(y + c, value, lanes);
    });
    if constexpr (kCentered) static_cast<C*>(a.mean)[row] = mean;
    static_cast<C*>(a.rstd)[row] = rstd;
  };
  parallel_for(a.rows, row_grain(cols), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) one_row(row);
  });
}

/// One row: adds to the partial sums (if any) and returns mean(g) and mean(g * xhat).
template <class T, class W, class C, bool kCentered, bool kPartials>
void norm_bwd_sums(const T* dy, const T* x, const W* w, C mean, C rstd, int64_t cols, C* dw, C* db,
                   C* mean_g, C* mean_gx) {
  Vector<C> sums_g[2] = {}, sums_gx[2] = {};
  for_lanes_of<C, 2>(cols, [&](int64_t c, auto lanes, auto u) {
    const Vector<C> d = load_lanes<C>(dy + c, lanes);
    const Vector<C> xhat = (load_lanes<C>(x + c, lanes) - mean) * rstd;
    const Vector<C> g = d * load_lanes<C>(w + c, lanes);
    if constexpr (kPartials) {
      store_lanes<C>(dw + c, load_lanes<C>(dw + c, lanes) + d * xhat, lanes);
      if constexpr (kCentered) {
        store_lanes<C>(db + c, load_lanes<C>(db + c, lanes) + d, lanes);
      }
    }
    sums_g[u] += g;
    sums_gx[u] += g * xhat;
  });
  const C sum_g = sum_lanes<C>(sums_g), sum_gx = sum_lanes<C>(sums_gx);
  *mean_g = kCentered ? sum_g / static_cast<C>(cols) : C(0);
  *mean_gx = sum_gx / static_cast<C>(cols);
}

template <class T, class W, bool kCentered, bool kPartials>
void norm_bwd_rows(const NormBwd& a) {
  using C = ComputeType<T>;
  const W* w = static_cast<const W*>(a.w);
  const int64_t cols = a.cols, rows = a.rows, chunks = NormBwd::num_chunks(rows);
  constexpr int64_t kOutputs = kCentered ? 2 : 1;

  const auto one_row = [=](int64_t row, C* dw, C* db) {
    const T* dy = static_cast<const T*>(a.dy) + row * cols;
    const T* x = static_cast<const T*>(a.x) + a.x_rows.offset(row);
    const C mean = kCentered ? static_cast<const C*>(a.mean)[row] : C(0);
    const C rstd = static_cast<const C*>(a.rstd)[row];
    C mean_g, mean_gx;
    norm_bwd_sums<T, W, C, kCentered, kPartials>(dy, x, w, mean, rstd, cols, dw, db, &mean_g,
                                                 &mean_gx);
    if (a.dx == nullptr) return;
    T* dx = static_cast<T*>(a.dx) + a.dx_rows.offset(row);
    const T* d_sum = static_cast<const T*>(a.d_sum) + (a.d_sum != nullptr ? row * cols : 0);
    const bool has_sum = a.d_sum != nullptr, accumulate = a.accumulate_dx;
    for_lanes<C>(cols, [=](int64_t c, auto lanes) {
      const Vector<C> xhat = (load_lanes<C>(x + c, lanes) - mean) * rstd;
      const Vector<C> g = load_lanes<C>(dy + c, lanes) * load_lanes<C>(w + c, lanes);
      Vector<C> value = rstd * (g - mean_g - xhat * mean_gx);
      if (has_sum) value += load_lanes<C>(d_sum + c, lanes);
      if (accumulate) value += load_lanes<C>(dx + c, lanes);
      store_lanes<C>(dx + c, value, lanes);
    });
  };
  const int64_t chunk_rows = std::max<int64_t>(1, rows / chunks);
  parallel_for(chunks, (row_grain(cols) + chunk_rows - 1) / chunk_rows,
               [=](int64_t begin, int64_t end) {
                 for (int64_t k = begin; k < end; ++k) {
                   C* dw = nullptr;
                   C* db = nullptr;
                   if constexpr (kPartials) {
                     dw = static_cast<C*>(a.partials) + k * kOutputs * cols;
                     db = dw + (kOutputs - 1) * cols;
                     std::fill(dw, dw + kOutputs * cols, C(0));
                   }
                   for (int64_t row = rows * k / chunks; row < rows * (k + 1) / chunks; ++row) {
                     one_row(row, dw, db);
                   }
                 }
               });
}

/// dst[c] (+)= sum over chunks of partials[chunk * stride + c], chunks in order.
template <class C>
void add_partials(void* dst, DType dst_dtype, bool accumulate, const C* partials, int64_t chunks,
                  int64_t stride, int64_t cols) {
  constexpr int64_t kBlock = 256;
  visit_float(dst_dtype, "norm", [=](auto tag) {
    using D = typename decltype(tag)::type;
    const int64_t blocks = (cols + kBlock - 1) / kBlock;
    parallel_for(blocks, std::max<int64_t>(1, 128 / chunks), [=](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * kBlock, width = std::min(kBlock, cols - first);
        D* out = static_cast<D*>(dst) + first;
        C total[kBlock] = {};
        for (int64_t k = 0; k < chunks; ++k) {
          const C* row = partials + k * stride + first;
#pragma omp simd
          for (int64_t c = 0; c < width; ++c) total[c] += row[c];
        }
        for_lanes<C>(width, [&](int64_t c, auto lanes) {
          Vector<C> value = load_lanes<C>(total + c, lanes);
          if (accumulate) value += load_lanes<C>(out + c, lanes);
          store_lanes<C>(out + c, value, lanes);
        });
      }
    });
  });
}

template <class T, class W, bool kCentered>
void norm_bwd(const NormBwd& a) {
  using C = ComputeType<T>;
  if (a.partials == nullptr) {
    norm_bwd_rows<T, W, kCentered, false>(a);
    return;
  }
  norm_bwd_rows<T, W, kCentered, true>(a);
  const C* partials = static_cast<const C*>(a.partials);
  const int64_t chunks = NormBwd::num_chunks(a.rows), stride = (kCentered ? 2 : 1) * a.cols;
  if (a.dw != nullptr) {
    add_partials(a.dw, a.dw_dtype, a.accumulate_dw, partials, chunks, stride, a.cols);
  }
  if (a.db != nullptr) {
    add_partials(a.db, a.db_dtype, a.accumulate_db, partials + a.cols, chunks, stride, a.cols);
  }
}

/// Calls f with the C++ types of the rows and of w.
template <class F>
void visit_types(DType dtype, DType w_dtype, F&& f) {
  visit_float(dtype, "norm", [&](auto tag) {
    if (w_dtype == dtype) {
      f(tag, tag);
    } else {
      f(tag, TypeTag<float>{});
    }
  });
}

}  // namespace

void layer_norm_fwd(const NormFwd& a) {
  visit_types(a.dtype, a.w_dtype, [&](auto t, auto w) {
    norm_fwd<typename decltype(t)::type, typename decltype(w)::type, true>(a);
  });
}

void rms_norm_fwd(const NormFwd& a) {
  visit_types(a.dtype, a.w_dtype, [&](auto t, auto w) {
    norm_fwd<typename decltype(t)::type, typename decltype(w)::type, false>(a);
  });
}

void layer_norm_bwd(const NormBwd& a) {
  visit_types(a.dtype, a.w_dtype, [&](auto t, auto w) {
    norm_bwd<typename decltype(t)::type, typename decltype(w)::type, true>(a);
  });
}

void rms_norm_bwd(const NormBwd& a) {
  visit_types(a.dtype, a.w_dtype, [&](auto t, auto w) {
    norm_bwd<typename decltype(t)::type, typename decltype(w)::type, false>(a);
  });
}

}  // namespace tessera::kernels::cpu
