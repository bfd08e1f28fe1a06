#include <cmath>

#include "core/runtime/cpu/parallel.h"
#include "kernels/norm/kernel.h"

// One row at a time: it stays in the first cache levels between its passes, so each operand moves
// through memory once. The backward walks fixed runs of rows (NormBwd::num_chunks), each with its
// own row of partial dw and db, so that its bits do not depend on the number of threads.

namespace tessera::kernels::cpu {
namespace {

using tessera::cpu::parallel_for;

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
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) assign(sum[c], C(x[c]) + C(residual[c]));
      x = sum;
    }
    C mean = 0;
    if constexpr (kCentered) {
      C total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t c = 0; c < cols; ++c) total += C(x[c]);
      mean = total * inv_cols;
    }
    C square = 0, shift = 0;
#pragma omp simd reduction(+ : square, shift)
    for (int64_t c = 0; c < cols; ++c) {
      const C d = C(x[c]) - mean;
      square += d * d;
      shift += d;
    }
    if constexpr (kCentered) {  // `shift` is what rounding left in the mean
      shift *= inv_cols;
      square -= static_cast<C>(cols) * shift * shift;
      mean += shift;
    }
    const C rstd = C(1) / std::sqrt(square * inv_cols + static_cast<C>(a.eps));
    if (b != nullptr) {
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) {
        assign(y[c], (C(x[c]) - mean) * rstd * C(w[c]) + C(b[c]));
      }
    } else {
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) assign(y[c], (C(x[c]) - mean) * rstd * C(w[c]));
    }
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
  C sum_g = 0, sum_gx = 0;
#pragma omp simd reduction(+ : sum_g, sum_gx)
  for (int64_t c = 0; c < cols; ++c) {
    const C d = C(dy[c]), xhat = (C(x[c]) - mean) * rstd, g = d * C(w[c]);
    if constexpr (kPartials) {
      dw[c] += d * xhat;
      if constexpr (kCentered) db[c] += d;
    }
    sum_g += g;
    sum_gx += g * xhat;
  }
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
    const auto value = [=](int64_t c) {
      const C xhat = (C(x[c]) - mean) * rstd;
      return rstd * (C(dy[c]) * C(w[c]) - mean_g - xhat * mean_gx);
    };
    const T* d_sum = static_cast<const T*>(a.d_sum) + (a.d_sum != nullptr ? row * cols : 0);
    if (a.d_sum != nullptr && a.accumulate_dx) {
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) assign(dx[c], C(dx[c]) + C(d_sum[c]) + value(c));
    } else if (a.d_sum != nullptr) {
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) assign(dx[c], C(d_sum[c]) + value(c));
    } else if (a.accumulate_dx) {
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) assign(dx[c], C(dx[c]) + value(c));
    } else {
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) assign(dx[c], value(c));
    }
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
        if (accumulate) {
#pragma omp simd
          for (int64_t c = 0; c < width; ++c) assign(out[c], C(out[c]) + total[c]);
        } else {
#pragma omp simd
          for (int64_t c = 0; c < width; ++c) assign(out[c], total[c]);
        }
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
