#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/runtime/dispatch.h"

namespace tessera::kernels {

/// dst[i] = x[i] * factor, rounded to dst's dtype; *found_inf = 1 if one of them is not finite,
/// else left as it is. f32, bf16 and f16; dst may be x.
struct ScaleCheck {
  void* dst;
  const void* x;
  uint8_t* found_inf;
  DType dst_dtype, dtype;
  float factor;
  int64_t numel;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(scale_check, ScaleCheck);

/// What clipping makes of the norm of scaled gradients; inverse = grad_factor / *scale:
///   *found_inf = *norm is not finite;   *norm = *norm * inverse
///   *factor = min(1, max_norm / (*norm + 1e-6)) * inverse, 0 if the norm is not finite
struct UnscaleNorm {
  float* norm;
  float* factor;
  uint8_t* found_inf;
  const float* scale;  ///< or absent: 1
  float grad_factor, max_norm;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(unscale_norm, UnscaleNorm);

/// The rule of a dynamic loss scale:
///   *found_inf:  *scale = max(min_scale, *scale * backoff), *num_good = 0, *num_skipped += 1
///   otherwise:   *num_good += 1; at `interval` *scale = min(max_scale, *scale * growth) and
///                *num_good = 0
struct UpdateLossScale {
  float* scale;
  int64_t* num_good;
  int64_t* num_skipped;
  const uint8_t* found_inf;
  float growth, backoff, min_scale, max_scale;
  int64_t interval;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(update_loss_scale, UpdateLossScale);

}  // namespace tessera::kernels
