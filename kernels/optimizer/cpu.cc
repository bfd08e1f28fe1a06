// Optimizer updates on the CPU: one pass over each byte. The shard is cut into pieces of a fixed
// size; a piece finds the segments that it meets, so that a few large or many small ones spread
// over the threads alike. What a loop has stored it does not load again: a load of 64 bytes waits
// until they are in the cache.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/check.h"
#include "kernels/elementwise/row_io.h"
#include "kernels/optimizer/code_table.h"
#include "kernels/optimizer/kernel.h"
#include "kernels/optimizer/rounding.h"
#include "kernels/random/words.h"

namespace tessera::kernels::cpu {
namespace {

/// The runs of elements that a segment and a piece share: f(offset from `first`, count <=
/// kPieceCols, segment), in parallel.
template <class F>
void for_segments(const FlatUpdate& p, F&& f) {
  if (p.skip != nullptr && *p.skip != 0) return;
  constexpr int64_t kPiece = 16384;
  const int64_t pieces = (p.numel + kPiece - 1) / kPiece;
  tessera::cpu::parallel_for(pieces, 1, [&](int64_t first_piece, int64_t last_piece) {
    const int64_t end = p.first + std::min(last_piece * kPiece, p.numel);
    int64_t at = p.first + first_piece * kPiece;
    int64_t s = 0, upper = p.num_segments;  // the first segment that ends behind `at`
    while (s < upper) {
      const int64_t middle = s + (upper - s) / 2;
      p.bounds[2 * middle + 1] <= at ? s = middle + 1 : upper = middle;
    }
    for (; s < p.num_segments && p.bounds[2 * s] < end; ++s) {
      const int64_t run_end = std::min(p.bounds[2 * s + 1], end);
      for (at = std::max(p.bounds[2 * s], at); at < run_end;) {
        const int64_t count = std::min(kPieceCols, run_end - at);
        f(at - p.first, count, s);
        at += count;
      }
    }
  });
}

float scale_of(const FlatUpdate& p) {
  return p.grad_scale == nullptr ? 1.0f : *p.grad_scale;
}

/// Elements [offset, offset + count) of `low`, each with its own word of chance.
template <class T>
void store_stochastic(const FlatUpdate& p, int64_t offset, int64_t count, int64_t segment) {
  const auto packed = static_cast<uint64_t>(p.rounding.segments[2 * segment]);
  const PhiloxKey key{static_cast<uint32_t>(packed), static_cast<uint32_t>(packed >> 32)};
  const int64_t element = p.rounding.segments[2 * segment + 1] + p.first + offset;
  const int64_t first_block = element / 4, skipped = element % 4;
  uint32_t words[kPieceCols + 2 * kPhiloxWords];
  for (int64_t w = 0; w < skipped + count; w += kPhiloxWords) {
    random_words(key, static_cast<uint64_t>(*p.rounding.step),
                 static_cast<uint64_t>(first_block + w / 4), words + w);
  }
  T* low = static_cast<T*>(p.low) + offset;
  const float* master = p.master + offset;
  const uint32_t* word = words + skipped;
  for (int64_t i = 0; i < count; ++i) {
    low[i].bits =
        round_stochastic<T>(std::bit_cast<uint32_t>(master[i]), word[i], T(master[i]).bits);
  }
}

void store_low(const FlatUpdate& p, int64_t offset, int64_t count, int64_t segment) {
  if (p.low == nullptr) return;
  if (p.rounding.segments != nullptr && *p.rounding.step > 0 && p.low_dtype == kBF16) {
    store_stochastic<BFloat16>(p, offset, count, segment);
  } else if (p.rounding.segments != nullptr && *p.rounding.step > 0 && p.low_dtype == kF16) {
    store_stochastic<Float16>(p, offset, count, segment);
  } else {
    store_piece(p.low, p.low_dtype, offset, 1, static_cast<const float*>(p.master + offset), count,
                false);
  }
}

/// What AdamW has of a step, rounded to f32 once, and of a segment in it.
struct AdamWFactors {
  /// P: AdamWStep or AdamW8bitStep.
  template <class P>
  explicit AdamWFactors(const P& p)
      : correction1(1 - std::pow(p.beta1, static_cast<double>(*p.step))),
        root2(
            static_cast<float>(1 / std::sqrt(1 - std::pow(p.beta2, static_cast<double>(*p.step))))),
        beta1(static_cast<float>(p.beta1)),
        beta2(static_cast<float>(p.beta2)),
        weight1(static_cast<float>(1 - p.beta1)),
        weight2(static_cast<float>(1 - p.beta2)),
        eps(static_cast<float>(p.eps)) {}

  struct OfSegment {
    float keep, step_size;
  };
  OfSegment of_segment(const FlatUpdate& p, int64_t segment) const {
    const double lr = static_cast<double>(p.lr) * static_cast<double>(p.factors[2 * segment]);
    const double decay =
        static_cast<double>(p.weight_decay) * static_cast<double>(p.factors[2 * segment + 1]);
    return {static_cast<float>(1 - lr * decay), static_cast<float>(lr / correction1)};
  }

  double correction1;
  float root2, beta1, beta2, weight1, weight2, eps;
};

/// The largest magnitudes of a block; not a number if a value is not finite.
struct BlockScales {
  float m, v;
};

/// AdamW of a block whose moments were decoded.
BlockScales update_block(const AdamWFactors& factors, const AdamWFactors::OfSegment& segment,
                         float scale, float* master, float* m, float* v, const float* grad,
                         int64_t count) {
  using tessera::cpu::broadcast, tessera::cpu::fused_multiply_add;
  using Lanes = tessera::cpu::Vector<float>;
  const Lanes beta1 = broadcast(factors.beta1), beta2 = broadcast(factors.beta2);
  const Lanes weight1 = broadcast(factors.weight1), weight2 = broadcast(factors.weight2);
  const Lanes root2 = broadcast(factors.root2), eps = broadcast(factors.eps), zero{};
  const Lanes keep = broadcast(segment.keep), step_size = broadcast(segment.step_size);
  Lanes m_most{}, v_most{}, m_poison{}, v_poison{};
  tessera::cpu::for_lanes<float>(count, [&](int64_t i, auto lanes) {
    const Lanes g = tessera::cpu::load_lanes<float>(grad + i, lanes) * scale;
    // One rounding each, said and not left to the compiler: a last bit more or less moves codes, and
    // what they stand for is what the next step begins with.
    const Lanes first =
        fused_multiply_add(weight1, g, beta1 * tessera::cpu::load_lanes<float>(m + i, lanes));
    const Lanes second =
        fused_multiply_add(weight2 * g, g, beta2 * tessera::cpu::load_lanes<float>(v + i, lanes));
    // Rounded before the update, as PyTorch does it.
    const Lanes kept =
        fused_multiply_add(keep, tessera::cpu::load_lanes<float>(master + i, lanes), zero);
    const Lanes divisor = fused_multiply_add(tessera::cpu::sqrt_lanes<float>(second), root2, eps);
    tessera::cpu::store_lanes<float>(master + i, kept - step_size * first / divisor, lanes);
    tessera::cpu::store_lanes<float>(m + i, first, lanes);
    tessera::cpu::store_lanes<float>(v + i, second, lanes);
    const Lanes magnitude = tessera::cpu::abs_of<float>(first);
    m_most = magnitude > m_most ? magnitude : m_most;
    v_most = second > v_most ? second : v_most;
    m_poison += first * 0.0f;  // not a number if one of them is none, or infinite
    v_poison += second * 0.0f;
  });
  constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();
  return {tessera::cpu::sum_lanes<float>(m_poison) == 0 ? tessera::cpu::max_lanes<float>(m_most)
                                                        : kNotANumber,
          tessera::cpu::sum_lanes<float>(v_poison) == 0 ? tessera::cpu::max_lanes<float>(v_most)
                                                        : kNotANumber};
}

}  // namespace

void adamw_step(const AdamWStep& p) {
  const AdamWFactors factors(p);
  const float root2 = factors.root2, beta2 = factors.beta2, eps = factors.eps;
  const float weight1 = factors.weight1, weight2 = factors.weight2, scale = scale_of(p);
  for_segments(p, [&](int64_t offset, int64_t count, int64_t segment) {
    const auto [keep, step_size] = factors.of_segment(p, segment);
    float buffer[kPieceCols];
    const float* __restrict grad = load_piece(buffer, p.grad, p.grad_dtype, offset, 1, count);
    float* __restrict master = p.master + offset;
    float* __restrict m = p.exp_avg + offset;
    float* __restrict v = p.exp_avg_sq + offset;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float g = grad[i] * scale;
      const float first = m[i] + weight1 * (g - m[i]);
      const float second = beta2 * v[i] + weight2 * g * g;
      master[i] = keep * master[i] - step_size * first / (std::sqrt(second) * root2 + eps);
      m[i] = first;
      v[i] = second;
    }
    store_low(p, offset, count, segment);
  });
}

void adamw_8bit_step(const AdamW8bitStep& p) {
  static const CodeTable kSigned(true), kUnsigned(false);
  const AdamWFactors factors(p);
  const float scale = scale_of(p);
  for_segments(p, [&](int64_t begin, int64_t run, int64_t segment) {
    const auto of_segment = factors.of_segment(p, segment);
    float buffer[kPieceCols], m[kStateBlock], v[kStateBlock];
    const float* const grads = load_piece(buffer, p.grad, p.grad_dtype, begin, 1, run);
    for (int64_t first = 0; first < run; first += kStateBlock) {
      const int64_t offset = begin + first, count = std::min(kStateBlock, run - first);
      const int64_t block = offset / kStateBlock;
      kSigned.decode(m, p.exp_avg + offset, p.exp_avg_absmax[block], count);
      kUnsigned.decode(v, p.exp_avg_sq + offset, p.exp_avg_sq_absmax[block], count);
      const BlockScales scales =
          update_block(factors, of_segment, scale, p.master + offset, m, v, grads + first, count);
      kSigned.encode(p.exp_avg + offset, m, scales.m, count);
      kUnsigned.encode(p.exp_avg_sq + offset, v, scales.v, count);
      p.exp_avg_absmax[block] = scales.m;
      p.exp_avg_sq_absmax[block] = scales.v;
    }
    store_low(p, begin, run, segment);
  });
}

void sgd_step(const SgdStep& p) {
  const float scale = scale_of(p);
  for_segments(p, [&](int64_t offset, int64_t count, int64_t segment) {
    const float lr = p.lr * p.factors[2 * segment];
    const float decay = p.weight_decay * p.factors[2 * segment + 1];
    float buffer[kPieceCols];
    const float* __restrict grad = load_piece(buffer, p.grad, p.grad_dtype, offset, 1, count);
    float* __restrict master = p.master + offset;
    if (p.momentum_buffer == nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        master[i] -= lr * (grad[i] * scale + decay * master[i]);
      }
    } else {
      float* __restrict b = p.momentum_buffer + offset;
      // d = b, or g + momentum b: one formula without a branch in the loop.
      const float of_g = p.nesterov ? 1.0f : 0.0f, of_b = p.nesterov ? p.momentum : 1.0f;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const float g = grad[i] * scale + decay * master[i];
        const float next = p.momentum * b[i] + g;
        master[i] -= lr * (of_g * g + of_b * next);
        b[i] = next;
      }
    }
    store_low(p, offset, count, segment);
  });
}

void muon_direction(const MuonDirection& p) {
  const float scale = scale_of(p), weight = 1 - p.momentum;
  const float of_b = p.nesterov ? p.momentum : 1.0f;
  for_segments(p, [&](int64_t offset, int64_t count, int64_t) {
    float buffer[kPieceCols], out[kPieceCols];
    const float* __restrict grad = load_piece(buffer, p.grad, p.grad_dtype, offset, 1, count);
    float* __restrict b = p.momentum_buffer + offset;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float g = grad[i] * scale;
      const float next = b[i] + weight * (g - b[i]);
      out[i] = g + of_b * (next - g);
      b[i] = next;
    }
    store_piece(p.direction, kBF16, offset, 1, static_cast<const float*>(out), count, false);
  });
}

void muon_apply(const MuonApply& p) {
  for_segments(p, [&](int64_t offset, int64_t count, int64_t segment) {
    const float lr = p.lr * p.factors[2 * segment];
    const float keep = 1 - lr * p.weight_decay * p.factors[2 * segment + 1];
    const float step = lr * p.scales[segment];
    float buffer[kPieceCols];
    const float* __restrict o = load_piece(buffer, p.orthogonal, kBF16, offset, 1, count);
    float* __restrict master = p.master + offset;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) master[i] = keep * master[i] - step * o[i];
    store_low(p, offset, count, segment);
  });
}

void lion_step(const LionStep& p) {
  const float beta1 = static_cast<float>(p.beta1), beta2 = static_cast<float>(p.beta2);
  const float weight1 = static_cast<float>(1 - p.beta1), weight2 = static_cast<float>(1 - p.beta2);
  const float scale = scale_of(p);
  for_segments(p, [&](int64_t offset, int64_t count, int64_t segment) {
    const float lr = p.lr * p.factors[2 * segment];
    const float keep = 1 - lr * p.weight_decay * p.factors[2 * segment + 1];
    float buffer[kPieceCols];
    const float* __restrict grad = load_piece(buffer, p.grad, p.grad_dtype, offset, 1, count);
    float* __restrict master = p.master + offset;
    float* __restrict m = p.exp_avg + offset;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float g = grad[i] * scale;
      const float u = beta1 * m[i] + weight1 * g;
      m[i] = beta2 * m[i] + weight2 * g;
      // What is not a number stays one.
      const float sign = u > 0 ? 1.0f : u < 0 ? -1.0f : u;
      master[i] = keep * master[i] - lr * sign;
    }
    store_low(p, offset, count, segment);
  });
}

void adafactor_collect(const AdafactorCollect& p) {
  const float scale = scale_of(p);
  for_segments(p, [&](int64_t offset, int64_t count, int64_t) {
    float buffer[kPieceCols];
    const float* __restrict grad = load_piece(buffer, p.grad, p.grad_dtype, offset, 1, count);
    float* __restrict out = p.scaled + offset;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) out[i] = grad[i] * scale;
    for (int64_t first = 0; first < count; first += kStateBlock) {
      const float* const master = p.master + offset + first;
      const int64_t n = std::min(kStateBlock, count - first);
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; ++i) sum += master[i] * master[i];
      p.squares[(offset + first) / kStateBlock] = sum;
    }
  });
}

void adafactor_factors(const AdafactorFactors& p) {
  const int64_t count = p.rows + p.cols + 2;
  if (p.skip != nullptr && *p.skip != 0) {
    std::copy(p.values, p.values + count, p.next);
    return;
  }
  const bool is_vector = p.rows == 0;
  const int64_t rows = std::max<int64_t>(p.rows, 1), cols = p.cols;
  const auto t = static_cast<double>(*p.step);
  const float weight = static_cast<float>(std::pow(t, p.beta2_decay));
  const float least = static_cast<float>(p.eps1 * p.eps1);
  float* const row = p.next;
  float* const col = p.next + p.rows;
  const float* const old_row = p.values;
  const float* const old_col = p.values + p.rows;
  const auto follow = [weight](float old, float value) { return old + weight * (value - old); };
  if (!is_vector) {
    tessera::cpu::parallel_for(rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        const float* const g = p.g + r * cols;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < cols; ++c) sum += g[c] * g[c];
        row[r] = follow(old_row[r], sum / static_cast<float>(cols));
      }
    });
  }
  constexpr int64_t kColumns = 256;
  tessera::cpu::parallel_for((cols + kColumns - 1) / kColumns, 1, [&](int64_t from, int64_t to) {
    for (int64_t first = from * kColumns; first < std::min(to * kColumns, cols);
         first += kColumns) {
      const int64_t n = std::min(kColumns, cols - first);
      float sums[kColumns] = {};
      for (int64_t r = 0; r < rows; ++r) {
        const float* const g = p.g + r * cols + first;
#pragma omp simd
        for (int64_t c = 0; c < n; ++c) sums[c] += g[c] * g[c];
      }
      for (int64_t c = 0; c < n; ++c) {
        col[first + c] = follow(old_col[first + c], sums[c] / static_cast<float>(rows));
      }
    }
  });
  double mean = 0;
  for (int64_t r = 0; r < p.rows; ++r) mean += static_cast<double>(row[r]);
  const float divisor = is_vector ? 1.0f
                                  : std::max(static_cast<float>(mean / static_cast<double>(rows)),
                                             static_cast<float>(p.eps1));
  // The norm of the update, in parts that do not depend on the threads.
  const int64_t part_rows =
      is_vector ? 1 : (rows + AdafactorFactors::kParts - 1) / AdafactorFactors::kParts;
  const int64_t parts = (rows + part_rows - 1) / part_rows;
  tessera::cpu::parallel_for(parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      float sum = 0;
      for (int64_t r = part * part_rows; r < std::min((part + 1) * part_rows, rows); ++r) {
        const float of_row = is_vector ? 1.0f : row[r];
        const float* const g = p.g + r * cols;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < cols; ++c) {
          const float v = std::max(of_row * col[c] / divisor, least);
          sum += g[c] * g[c] / v;
        }
      }
      p.workspace[part] = sum;
    }
  });
  double update_squares = 0, squares = 0;
  for (int64_t i = 0; i < parts; ++i) update_squares += static_cast<double>(p.workspace[i]);
  const int64_t blocks = state_blocks(p.numel());
  for (int64_t i = 0; i < blocks; ++i) squares += static_cast<double>(p.squares[i]);
  const auto numel = static_cast<double>(p.numel());
  const double rho = std::min(p.lr, 1 / std::sqrt(t));
  const double alpha = std::max(p.eps2, std::sqrt(squares / numel)) * rho;
  p.next[count - 2] = divisor;
  p.next[count - 1] =
      static_cast<float>(alpha / std::max(1.0, std::sqrt(update_squares / numel) / p.d));
}

void adafactor_apply(const AdafactorApply& p) {
  for_segments(p, [&](int64_t offset, int64_t count, int64_t segment) {
    const float lr = p.lr * p.factors[2 * segment];
    const float keep = 1 - lr * p.weight_decay * p.factors[2 * segment + 1];
    const int64_t* const place = p.places + 5 * segment;
    const float* const rows = p.values + place[0];
    const float* const cols = p.values + place[1];
    const float divisor = p.values[place[2]], step = p.values[place[2] + 1];
    const int64_t num_cols = place[3];
    const float* __restrict g = p.scaled + offset;
    float* __restrict master = p.master + offset;
    int64_t element = place[4] + p.first + offset;
    for (int64_t i = 0; i < count;) {
      // Up to the end of a row.
      const int64_t row = num_cols == 0 ? 0 : element / num_cols;
      const int64_t col = num_cols == 0 ? element : element % num_cols;
      const int64_t n = num_cols == 0 ? count - i : std::min(count - i, num_cols - col);
      const float of_row = num_cols == 0 ? 1.0f : rows[row];
      const float* __restrict of_col = cols + col;
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) {
        const float v = std::max(of_row * of_col[k] / divisor, p.least);
        master[i + k] = keep * master[i + k] - step * (g[i + k] / std::sqrt(v));
      }
      i += n, element += n;
    }
    store_low(p, offset, count, segment);
  });
}

void round_low(const RoundLow& p) {
  for_segments(p, [&](int64_t offset, int64_t count, int64_t segment) {
    store_low(p, offset, count, segment);
  });
}

void advance_step(const AdvanceStep& p) {
  if (p.skip == nullptr || *p.skip == 0) ++*p.step;
}

}  // namespace tessera::kernels::cpu
