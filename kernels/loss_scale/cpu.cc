// Loss scaling on the CPU. What is not finite is found by its bits.

#include <algorithm>
#include <atomic>
#include <bit>

#include "kernels/elementwise/row_io.h"
#include "kernels/loss_scale/kernel.h"

namespace tessera::kernels::cpu {

namespace {

constexpr uint32_t exponent_bits(DType dtype) {
  return dtype == kF32 ? 0x7f800000u : dtype == kBF16 ? 0x7f80u : 0x7c00u;
}

/// Whether one of `count` elements, as they are stored, is not finite.
template <class Bits>
bool has_nonfinite(const void* elements, uint32_t exponent, int64_t count) {
  const auto* bits = static_cast<const Bits*>(elements);
  const auto mask = static_cast<Bits>(exponent);
  uint32_t found = 0;
#pragma omp simd reduction(| : found)
  for (int64_t i = 0; i < count; ++i) found |= (bits[i] & mask) == mask ? 1u : 0u;
  return found != 0;
}

}  // namespace

void scale_check(const ScaleCheck& p) {
  const auto nbytes = static_cast<int64_t>(size_of(p.dst_dtype));
  const uint32_t exponent = exponent_bits(p.dst_dtype);
  for_pieces(1, p.numel, [&](int64_t, int64_t begin, int64_t end) {
    float buffer[kPieceCols], scaled[kPieceCols];
    const float* x = load_piece(buffer, p.x, p.dtype, begin, 1, end - begin);
#pragma omp simd
    for (int64_t i = 0; i < end - begin; ++i) scaled[i] = x[i] * p.factor;
    store_piece(p.dst, p.dst_dtype, begin, 1, static_cast<const float*>(scaled), end - begin,
                false);
    const void* stored = static_cast<const char*>(p.dst) + begin * nbytes;
    const bool found = nbytes == 4 ? has_nonfinite<uint32_t>(stored, exponent, end - begin)
                                   : has_nonfinite<uint16_t>(stored, exponent, end - begin);
    if (found) std::atomic_ref(*p.found_inf).store(1, std::memory_order_relaxed);
  });
}

void unscale_norm(const UnscaleNorm& p) {
  constexpr uint32_t kExponent = 0x7f800000;
  const float inverse = p.scale == nullptr ? p.grad_factor : p.grad_factor / *p.scale;
  const bool finite = (std::bit_cast<uint32_t>(*p.norm) & kExponent) != kExponent;
  const float norm = *p.norm * inverse;
  *p.norm = norm;
  *p.found_inf = finite ? 0 : 1;
  *p.factor = finite ? std::min(1.0f, p.max_norm / (norm + 1e-6f)) * inverse : 0.0f;
}

void update_loss_scale(const UpdateLossScale& p) {
  if (*p.found_inf != 0) {
    *p.scale = std::max(p.min_scale, *p.scale * p.backoff);
    *p.num_good = 0;
    ++*p.num_skipped;
  } else if (++*p.num_good >= p.interval) {
    *p.scale = std::min(p.max_scale, *p.scale * p.growth);
    *p.num_good = 0;
  }
}

}  // namespace tessera::kernels::cpu
