#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/elementwise/row_io.h"
#include "kernels/reduce/kernel.h"

namespace tessera::kernels::cpu {

namespace {

// ---- sums ---------------------------------------------------------------------------------------

using tessera::cpu::for_lanes_of;
using tessera::cpu::load_lanes;
using tessera::cpu::Vector;

/// Running sums of a block.
constexpr int kChains = 4;

/// Columns that a task sums at once.
constexpr int64_t kSumCols = 256;

/// x[offset], ... , count of them, in f32 blocks and f64 across.
template <class T>
double sum_contiguous(const Sum& p, int64_t offset, int64_t count) {
  using C = ComputeType<T>;
  const T* x = static_cast<const T*>(p.x) + offset;
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += kSumBlock) {
    Vector<C> sums[kChains] = {};
    for_lanes_of<C, kChains>(
        std::min(kSumBlock, count - begin),
        [&](int64_t i, auto lanes, auto u) { sums[u] += load_lanes<C>(x + begin + i, lanes); });
    total += static_cast<double>(tessera::cpu::sum_lanes<C>(sums));
  }
  return total;
}

/// totals[c] = sum over `count` rows of x[offset + row * inner + c].
template <class C>
void sum_rows(const Sum& p, int64_t offset, int64_t count, int64_t cols, double* totals) {
  C buffer[kSumCols], block[kSumCols];
  std::fill_n(totals, cols, 0.0);
  for (int64_t begin = 0; begin < count; begin += kSumBlock) {
    std::fill_n(block, cols, C(0));
    for (int64_t row = begin; row < std::min(begin + kSumBlock, count); ++row) {
      const C* x = load_piece(buffer, p.x, p.dtype, offset + row * p.inner, 1, cols);
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) block[c] += x[c];
    }
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) totals[c] += static_cast<double>(block[c]);
  }
}

}  // namespace

void sum(const Sum& p) {
  const int64_t chunks = num_sum_chunks(p.length);
  const int64_t chunk_length = (p.length + chunks - 1) / chunks;
  const int64_t col_blocks = (p.inner + kSumCols - 1) / kSumCols;
  const int64_t task_numel = std::max<int64_t>(1, chunk_length * std::min(p.inner, kSumCols));
  const int64_t grain = (2 * kGrainElements + task_numel - 1) / task_numel;
  // Task = (outer, chunk of the length, block of columns); partials are [outer, chunk, inner].
  tessera::cpu::parallel_for(
      p.outer * chunks * col_blocks, grain, [&](int64_t first, int64_t last) {
        for (int64_t task = first; task < last; ++task) {
          const int64_t col = task % col_blocks * kSumCols;
          const int64_t chunk = task / col_blocks % chunks, o = task / col_blocks / chunks;
          const int64_t cols = std::min(kSumCols, p.inner - col);
          const int64_t begin = std::min(chunk * chunk_length, p.length);
          const int64_t count = std::min(chunk_length, p.length - begin);
          const int64_t offset = (o * p.length + begin) * p.inner + col;
          double totals[kSumCols];
          visit_float(p.dtype, "sum", [&](auto tag) {
            using T = typename decltype(tag)::type;
            if (p.inner == 1) {
              totals[0] = sum_contiguous<T>(p, offset, count);
            } else {
              sum_rows<ComputeType<T>>(p, offset, count, cols, totals);
            }
          });
          if (chunks > 1) {
            std::copy_n(totals, cols, p.partials + (o * chunks + chunk) * p.inner + col);
            continue;
          }
          for (int64_t c = 0; c < cols; ++c) totals[c] *= p.factor;
          store_piece(p.dst, p.dst_dtype, o * p.inner + col, 1, totals, cols, p.accumulate);
        }
      });
  if (chunks == 1) return;
  for_pieces(p.outer, p.inner, [&](int64_t o, int64_t begin, int64_t end) {
    double totals[kPieceCols];
    const int64_t cols = end - begin;
    std::fill_n(totals, cols, 0.0);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const double* partials = p.partials + (o * chunks + chunk) * p.inner + begin;
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) totals[c] += partials[c];
    }
    for (int64_t c = 0; c < cols; ++c) totals[c] *= p.factor;
    store_piece(p.dst, p.dst_dtype, o * p.inner + begin, 1, totals, cols, p.accumulate);
  });
}

// ---- cumulative sums ----------------------------------------------------------------------------

namespace {

/// One row of the last dimension, a piece after the other.
template <class C>
void cumsum_row(const Cumsum& p, int64_t row) {
  const int64_t pieces = (p.length + kPieceCols - 1) / kPieceCols;
  double total = 0;
  for (int64_t n = 0; n < pieces; ++n) {
    const int64_t begin = (p.reverse ? pieces - 1 - n : n) * kPieceCols;
    const int64_t count = std::min(kPieceCols, p.length - begin), at = row * p.length + begin;
    C buffer[kPieceCols];
    double sums[kPieceCols];
    const C* x = load_piece(buffer, p.x, p.dtype, at, 1, count);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t i = p.reverse ? count - 1 - k : k;
      sums[i] = total += static_cast<double>(x[i]);
    }
    store_piece(p.y, p.y_dtype, at, 1, static_cast<const double*>(sums), count, p.accumulate);
  }
}

/// Columns [col, col + cols) of one of the outer dimension.
template <class C>
void cumsum_cols(const Cumsum& p, int64_t o, int64_t col, int64_t cols) {
  C buffer[kSumCols];
  double totals[kSumCols] = {};
  for (int64_t k = 0; k < p.length; ++k) {
    const int64_t n = p.reverse ? p.length - 1 - k : k, at = (o * p.length + n) * p.inner + col;
    const C* x = load_piece(buffer, p.x, p.dtype, at, 1, cols);
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) totals[c] += static_cast<double>(x[c]);
    store_piece(p.y, p.y_dtype, at, 1, static_cast<const double*>(totals), cols, p.accumulate);
  }
}

}  // namespace

void cumsum(const Cumsum& p) {
  const int64_t col_blocks = (p.inner + kSumCols - 1) / kSumCols;
  const int64_t task_numel = std::max<int64_t>(1, p.length * std::min(p.inner, kSumCols));
  visit_compute_type(p.dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    tessera::cpu::parallel_for(p.outer * col_blocks, (kGrainElements + task_numel - 1) / task_numel,
                               [&](int64_t first, int64_t last) {
                                 for (int64_t task = first; task < last; ++task) {
                                   const int64_t o = task / col_blocks,
                                                 col = task % col_blocks * kSumCols;
                                   if (p.inner == 1) {
                                     cumsum_row<C>(p, o);
                                   } else {
                                     cumsum_cols<C>(p, o, col, std::min(kSumCols, p.inner - col));
                                   }
                                 }
                               });
  });
}

// ---- norms --------------------------------------------------------------------------------------

namespace {

template <class C>
using BitsOf = std::conditional_t<std::is_same_v<C, double>, int64_t, int32_t>;

/// What one walk over a block finds: the largest magnitude as bits (as integers, NaN > infinity >
/// every finite number) and the sum of |x|^p for p = 1 or 2 as it comes out in C.
template <class C>
struct BlockNorm {
  BitsOf<C> largest;
  C sum;
};

template <int kPower, class T, class C = ComputeType<T>>
BlockNorm<C> block_norm(const T* x, int64_t count) {
  using Bits = BitsOf<C>;
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
  Vector<Bits> largest[kChains] = {};
  Vector<C> sums[kChains] = {};
  for_lanes_of<C, kChains>(count, [&](int64_t i, auto lanes, auto u) {
    const Vector<C> value = load_lanes<C>(x + i, lanes);
    const Vector<Bits> bits = (Vector<Bits>)value & kMagnitude;
    largest[u] = bits > largest[u] ? bits : largest[u];
    sums[u] += kPower == 1 ? (Vector<C>)bits : value * value;
  });
  for (int u = 1; u < kChains; ++u) {
    largest[0] = largest[u] > largest[0] ? largest[u] : largest[0];
  }
  return {tessera::cpu::max_lanes<Bits>(largest[0]), tessera::cpu::sum_lanes<C>(sums)};
}

/// sum |x|^p of a block in f64.
template <class T>
double sum_powers(const T* x, int64_t count, double p) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double magnitude = std::fabs(static_cast<double>(static_cast<ComputeType<T>>(x[i])));
    total += p == 1 ? magnitude : p == 2 ? magnitude * magnitude : std::pow(magnitude, p);
  }
  return total;
}

/// a maximum that keeps NaN.
double max_or_nan(double a, double b) {
  return a != a || a > b ? a : b;
}

/// Blocks [first, last) of the segments' blocks, counted through all segments: the sum (maximum)
/// and whether an element is not finite.
template <class T, class C = ComputeType<T>>
std::pair<double, bool> norm_of_blocks(const PartialNorm& args, int64_t first, int64_t last) {
  constexpr BitsOf<C> kInfinity = std::bit_cast<BitsOf<C>>(std::numeric_limits<C>::infinity());
  double total = 0;
  bool has_nonfinite = false;
  int64_t block = 0;  // of the current segment's begin
  for (int64_t s = 0; s < args.num_segments && block < last; ++s) {
    const int64_t begin = args.segments[2 * s], end = args.segments[2 * s + 1];
    const int64_t num_blocks = (end - begin + kSumBlock - 1) / kSumBlock;
    for (int64_t b = std::max<int64_t>(0, first - block); b < std::min(num_blocks, last - block);
         ++b) {
      const int64_t offset = begin + b * kSumBlock, count = std::min(kSumBlock, end - offset);
      const T* x = static_cast<const T*>(args.x) + offset;
      const BlockNorm<C> norm = args.p == 1 ? block_norm<1>(x, count) : block_norm<2>(x, count);
      const C largest = std::bit_cast<C>(norm.largest);
      has_nonfinite |= norm.largest >= kInfinity;
      // With these the terms stay normal numbers and their sum finite.
      const bool fits =
          args.p == 1 ? largest < C(1e36) : args.p == 2 && largest > C(1e-15) && largest < C(1e17);
      if (std::isinf(args.p)) {
        total = max_or_nan(total, static_cast<double>(largest));
      } else if (fits) {
        total += static_cast<double>(norm.sum);
      } else if (largest != C(0)) {
        total += sum_powers(x, count, args.p);
      }
    }
    block += num_blocks;
  }
  return {total, has_nonfinite};
}

bool is_finite(float x) {
  constexpr uint32_t kExponent = 0x7f800000;
  return (std::bit_cast<uint32_t>(x) & kExponent) != kExponent;
}

}  // namespace

void partial_norm(const PartialNorm& p) {
  int64_t num_blocks = 0;
  for (int64_t s = 0; s < p.num_segments; ++s) {
    num_blocks += (p.segments[2 * s + 1] - p.segments[2 * s] + kSumBlock - 1) / kSumBlock;
  }
  const int64_t chunks = std::min(num_blocks, kMaxSumChunks);
  const int64_t chunk_numel = chunks == 0 ? 1 : num_blocks / chunks * kSumBlock;
  const int64_t grain = (2 * kGrainElements + chunk_numel - 1) / chunk_numel;
  tessera::cpu::parallel_for(chunks, grain, [&](int64_t begin, int64_t end) {
    visit_float(p.dtype, "partial_norm", [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (int64_t c = begin; c < end; ++c) {
        const auto [total, has_nonfinite] =
            norm_of_blocks<T>(p, num_blocks * c / chunks, num_blocks * (c + 1) / chunks);
        p.chunks[2 * c] = total;
        p.chunks[2 * c + 1] = has_nonfinite ? 1 : 0;
      }
    });
  });
  double total = 0;
  bool has_nonfinite = false;
  for (int64_t c = 0; c < chunks; ++c) {
    total = std::isinf(p.p) ? max_or_nan(total, p.chunks[2 * c]) : total + p.chunks[2 * c];
    has_nonfinite |= p.chunks[2 * c + 1] != 0;
  }
  *p.partial = total;
  if (p.has_nonfinite != nullptr) *p.has_nonfinite = has_nonfinite ? 1 : 0;
}

void combine_norms(const CombineNorms& p) {
  double total = 0;
  for (int64_t i = 0; i < p.num_partials; ++i) {
    total = std::isinf(p.p) ? max_or_nan(total, p.partials[i]) : total + p.partials[i];
  }
  if (p.p == 2) {
    total = std::sqrt(total);
  } else if (p.p != 1 && !std::isinf(p.p)) {
    total = std::pow(total, 1 / p.p);
  }
  *p.norm = static_cast<float>(total);
}

void clip_factor(const ClipFactor& p) {
  const float norm = *p.norm;
  const bool finite = is_finite(norm);
  *p.found_inf = finite ? 0 : 1;
  *p.factor = finite ? std::min(1.0f, p.max_norm / (norm + 1e-6f)) : 0.0f;
}

namespace {

/// Among `count` elements with these bits is an infinity or a NaN: as integers both are at least
/// `infinity` without their sign.
template <class Bits>
bool has_nonfinite(const Bits* x, int64_t count, Bits infinity) {
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max() / 2;
  Bits largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    const Bits magnitude = x[i] & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest >= infinity;
}

template <class Bits>
void mark_nonfinite_bits(const MarkNonfinite& p, Bits infinity) {
  const Bits* const x = static_cast<const Bits*>(p.x);
  std::atomic<bool> is_found = false;
  const auto look = [&](int64_t offset, int64_t count) {
    if (has_nonfinite(x + offset, count, infinity)) is_found.store(true, std::memory_order_relaxed);
  };
  if (p.rows == 1) {
    tessera::cpu::parallel_for(p.cols, 8 * kGrainElements,
                               [&](int64_t begin, int64_t end) { look(begin, end - begin); });
  } else {
    const int64_t grain = (8 * kGrainElements + p.cols - 1) / p.cols;
    tessera::cpu::parallel_for(p.rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) look(p.layout.offset(row), p.cols);
    });
  }
  if (is_found) *p.mark = std::max(*p.mark, p.value);
}

}  // namespace

void mark_nonfinite(const MarkNonfinite& p) {
  visit_float(p.dtype, "mark_nonfinite", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      mark_nonfinite_bits<uint16_t>(p, std::is_same_v<T, BFloat16> ? 0x7f80 : 0x7c00);
    } else if constexpr (sizeof(T) == 4) {
      mark_nonfinite_bits<uint32_t>(p, 0x7f800000);
    } else {
      mark_nonfinite_bits<uint64_t>(p, 0x7ff0000000000000);
    }
  });
}

void checksum(const Checksum& p) {
  visit_checksum_item(p.item_nbytes, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t s = 0; s < p.num_segments; ++s) {
      const int64_t begin = p.segments[3 * s], offset = p.segments[3 * s + 2];
      const T* x = static_cast<const T*>(p.x) + begin;
      tessera::cpu::parallel_for(
          p.segments[3 * s + 1] - begin, 2 * kGrainElements, [&](int64_t first, int64_t last) {
            uint64_t total = 0;
#pragma omp simd reduction(+ : total)
            for (int64_t i = first; i < last; ++i) {
              total += static_cast<uint64_t>(x[i]) * checksum_weight(offset + i);
            }
            // Sums of integers have no order.
            std::atomic_ref(p.sums[s]).fetch_add(total, std::memory_order_relaxed);
          });
    }
  });
}

}  // namespace tessera::kernels::cpu
