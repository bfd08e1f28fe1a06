// Scalars of loss scaling on the CPU. What is not finite is found by its bits.

#include <algorithm>
#include <bit>

#include "kernels/loss_scale/kernel.h"

namespace tessera::kernels::cpu {

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
