#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/runtime/dispatch.h"

namespace tessera::kernels {

/// How the low-precision copy is rounded if not to nearest: stochastically, up or down, so that its
/// expectation is the master (kernels/optimizer/rounding.h). Word e % 4 of the Philox block (high =
/// *step, low = e / 4) is that of element e of a parameter: the bits depend on neither the sharding
/// nor the device.
struct StochasticRounding {
  /// num_segments pairs: the Philox key (k0, and k1 in the high half); which element of its
  /// parameter element 0 of the shard would be. Absent: to nearest.
  const int64_t* segments = nullptr;
  const int64_t* step = nullptr;
};

/// What all optimizer kernels have in common. Elements [first, first + numel) of a flat shard are
/// updated, as far as segments cover them; every pointer is to element `first`, so that a large
/// shard can pass through small buffers. Segments are in ascending order and do not overlap.
struct FlatUpdate {
  float* master;
  void* low;         ///< rounded copy of the new master, or absent
  const void* grad;  ///< f32 | bf16 | f16
  DType low_dtype, grad_dtype;
  int64_t first, numel;
  const int64_t* bounds;  ///< num_segments pairs begin, end of the shard's elements
  const float* factors;   ///< num_segments pairs: factor of lr, factor of weight_decay
  int64_t num_segments;
  const float* grad_scale;  ///< device scalar that multiplies the gradient, or absent
  const uint8_t* skip;      ///< device flag: not 0 leaves everything as it is; or absent
  float lr, weight_decay;
  StochasticRounding rounding = {};
  Cost cost(double flops_per_element) const;
};

/// AdamW (Loshchilov & Hutter 2019), as PyTorch computes it; t = *step counts from 1:
///   g = grad * grad_scale;   p = p (1 - lr weight_decay)
///   m = m + (1 - beta1) (g - m);   v = beta2 v + (1 - beta2) g^2
///   p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps);   low = p rounded
struct AdamWStep : FlatUpdate {
  float* exp_avg;     ///< m
  float* exp_avg_sq;  ///< v
  const int64_t* step;
  double beta1, beta2, eps;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(adamw_step, AdamWStep);

/// Gradient descent with momentum, as PyTorch computes it (dampening 0):
///   g = grad * grad_scale + weight_decay p;   b = momentum b + g
///   p = p - lr d   with d = b, or g + momentum b with `nesterov`, or g without momentum_buffer
struct SgdStep : FlatUpdate {
  float* momentum_buffer;  ///< b, zero before the first step; absent without momentum
  float momentum;
  bool nesterov;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(sgd_step, SgdStep);

/// Lion (Chen et al. 2023):
///   g = grad * grad_scale;   p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)
///   m = beta2 m + (1 - beta2) g;   low = p rounded;   sign(0) = 0
struct LionStep : FlatUpdate {
  float* exp_avg;  ///< m
  double beta1, beta2;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(lion_step, LionStep);

/// low = the master, as the update before rounded it: to nearest if *rounding.step is 0.
struct RoundLow : FlatUpdate {
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(round_low, RoundLow);

/// *step += 1 unless *skip.
struct AdvanceStep {
  int64_t* step;
  const uint8_t* skip;  ///< or absent
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(advance_step, AdvanceStep);

}  // namespace tessera::kernels
