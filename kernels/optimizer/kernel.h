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

/// AdamW whose moments are 8-bit codes ([Note: Eight-bit states]). Both are decoded, updated and
/// used in f32, and then coded again; the rest as in AdamWStep, but for the order of
///   m = beta1 m + (1 - beta1) g
/// Moments have the same bits on every device: products are rounded, sums with them once.
/// Blocks begin with the segments, at multiples of kStateBlock of the shard, as does `first`.
struct AdamW8bitStep : FlatUpdate {
  uint8_t* exp_avg;          ///< codes of m
  uint8_t* exp_avg_sq;       ///< codes of v
  float* exp_avg_absmax;     ///< of the blocks of m
  float* exp_avg_sq_absmax;  ///< of v
  const float* maps;         ///< 4 x 256: `dynamic_maps()`
  const int64_t* step;
  double beta1, beta2, eps;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(adamw_8bit_step, AdamW8bitStep);

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

/// The first half of Muon (Jordan et al. 2024), before whole matrices are orthogonalized:
///   g = grad * grad_scale;   b = b + (1 - momentum) (g - b)
///   direction = g + momentum (b - g) with `nesterov`, else b; rounded
/// Neither master nor low is touched.
struct MuonDirection : FlatUpdate {
  float* momentum_buffer;  ///< b
  BFloat16* direction;
  float momentum;
  bool nesterov;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(muon_direction, MuonDirection);

/// The second half: p = p (1 - lr weight_decay) - lr scale o;   low = p rounded. No gradient is read.
struct MuonApply : FlatUpdate {
  const BFloat16* orthogonal;  ///< o
  const float* scales;         ///< of the segments
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(muon_apply, MuonApply);

/// Lion (Chen et al. 2023):
///   g = grad * grad_scale;   p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)
///   m = beta2 m + (1 - beta2) g;   low = p rounded;   sign(0) = 0
struct LionStep : FlatUpdate {
  float* exp_avg;  ///< m
  double beta1, beta2;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(lion_step, LionStep);

/// The first of three parts of Adafactor: what the factors of whole parameters are made of.
///   scaled = grad * grad_scale;   squares[k] = sum of master^2 over 256 elements
/// Segments begin at multiples of 256 of the shard, as does `first`.
struct AdafactorCollect : FlatUpdate {
  float* scaled;
  float* squares;  ///< [numel / 256], rounded up
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(adafactor_collect, AdafactorCollect);

/// The second: of one whole parameter. `next` and `values` are rows, columns and two scalars one
/// after the other: of the step before, and of this. The scalars are max(mean of rows, eps1) and
/// what the update is multiplied by. A vector has no rows, and its second moments are the columns.
struct AdafactorFactors {
  float* next;
  const float* values;
  const float* g;        ///< [rows, cols] scaled gradient
  const float* squares;  ///< of the parameter
  float* workspace;      ///< `workspace_numel` values
  const int64_t* step;
  const uint8_t* skip;  ///< not 0: next = values; or absent
  int64_t rows, cols;
  double lr, beta2_decay, eps1, eps2, d;
  static constexpr int64_t kParts = 256;  ///< of the norm of an update
  static int64_t workspace_numel() { return kParts; }
  int64_t numel() const { return rows == 0 ? cols : rows * cols; }
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(adafactor_factors, AdafactorFactors);

/// The third: p = p (1 - lr weight_decay) - scalar u;   low = p rounded. No gradient is read but
/// `scaled`.
struct AdafactorApply : FlatUpdate {
  const float* scaled;
  const float* values;
  /// Of each segment: where rows, columns and scalars begin in `values`, the number of columns (0: a
  /// vector), and which element of the parameter element 0 of the shard would be.
  const int64_t* places;
  float least;             ///< eps1^2
  int64_t num_values = 0;  ///< of `values`
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(adafactor_apply, AdafactorApply);

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
