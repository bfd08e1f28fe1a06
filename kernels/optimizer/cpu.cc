// Optimizer updates on the CPU: one pass over each byte. The shard is cut into pieces of a fixed
// size; a piece finds the segments that it meets, so that a few large or many small ones spread
// over the threads alike.

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/elementwise/row_io.h"
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

}  // namespace

void adamw_step(const AdamWStep& p) {
  const auto t = static_cast<double>(*p.step);
  const double correction1 = 1 - std::pow(p.beta1, t);
  const float root2 = static_cast<float>(1 / std::sqrt(1 - std::pow(p.beta2, t)));
  const float beta2 = static_cast<float>(p.beta2), eps = static_cast<float>(p.eps);
  const float weight1 = static_cast<float>(1 - p.beta1), weight2 = static_cast<float>(1 - p.beta2);
  const float scale = scale_of(p);
  for_segments(p, [&](int64_t offset, int64_t count, int64_t segment) {
    const double lr = static_cast<double>(p.lr) * static_cast<double>(p.factors[2 * segment]);
    const double decay =
        static_cast<double>(p.weight_decay) * static_cast<double>(p.factors[2 * segment + 1]);
    const float keep = static_cast<float>(1 - lr * decay);
    const float step_size = static_cast<float>(lr / correction1);
    float buffer[kPieceCols];
    const float* __restrict grad = load_piece(buffer, p.grad, p.grad_dtype, offset, 1, count);
    float* __restrict master = p.master + offset;
    float* __restrict m = p.exp_avg + offset;
    float* __restrict v = p.exp_avg_sq + offset;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float g = grad[i] * scale;
      m[i] += weight1 * (g - m[i]);
      v[i] = beta2 * v[i] + weight2 * g * g;
      master[i] = keep * master[i] - step_size * m[i] / (std::sqrt(v[i]) * root2 + eps);
    }
    store_low(p, offset, count, segment);
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
        b[i] = p.momentum * b[i] + g;
        master[i] -= lr * (of_g * g + of_b * b[i]);
      }
    }
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

void round_low(const RoundLow& p) {
  for_segments(p, [&](int64_t offset, int64_t count, int64_t segment) {
    store_low(p, offset, count, segment);
  });
}

void advance_step(const AdvanceStep& p) {
  if (p.skip == nullptr || *p.skip == 0) ++*p.step;
}

}  // namespace tessera::kernels::cpu
