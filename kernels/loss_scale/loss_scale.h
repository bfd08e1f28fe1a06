#pragma once

#include <cstdint>

#include "core/tensor.h"

// A loss scale lives on the device: which value it has depends on the step's numbers, and the host
// never waits for those. Not differentiable.

namespace tessera {

/// x * factor in x's dtype (f32, bf16 or f16; contiguous), in one pass that looks for what is not
/// finite: `found_inf` (u8, one element) becomes 1 if an element of the result is not, else it
/// stays.
/// Streams  current stream; never synchronizes
/// Errors   DtypeError, ShapeError if an argument is not as above
Tensor scale_check(const Tensor& x, double factor, const Tensor& found_inf);

/// What gradient clipping does with the norm of gradients that are scaled, on the device. The
/// gradients hold scale / grad_factor times their true values.
///   norm      f32, one element: of the scaled gradients; replaced by the true one
///   factor    f32, one element, written: what the optimizer multiplies the scaled gradients by,
///             min(1, max_norm / (norm + 1e-6)) * grad_factor / scale; 0 if the norm is not finite
///   found_inf u8, one element, written: 1 if the norm is not finite (the step is to be skipped)
///   scale     f32, one element, or undefined: 1
///   max_norm  > 0; infinity: never clip
/// Powers of two for scale and grad_factor change no bit of the norm.
/// Streams  current stream; never synchronizes
/// Errors   Error if max_norm <= 0 or NaN or grad_factor <= 0; ShapeError,
///          DtypeError if an argument is not as above
void unscale_norm(const Tensor& norm, const Tensor& factor, const Tensor& found_inf,
                  const Tensor& scale, double grad_factor, double max_norm);

/// How a dynamic loss scale moves.
struct LossScaleRule {
  double growth = 2, backoff = 0.5;
  int64_t interval = 2000;  ///< steps without a non-finite gradient until the scale grows
  double min_scale = 1, max_scale = 1 << 24;
};

/// One step of the rule, on the device: with found_inf (u8 []) the scale (f32 []) falls and
/// num_skipped (i64 []) counts, else num_good (i64 []) counts and the scale grows at `interval`.
/// Streams  current stream; never synchronizes
/// Errors   ShapeError, DtypeError if an argument is not as above
void update_loss_scale(const Tensor& scale, const Tensor& num_good, const Tensor& num_skipped,
                       const Tensor& found_inf, const LossScaleRule& rule);

}  // namespace tessera
