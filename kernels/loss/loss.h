#pragma once

#include "core/tensor.h"

namespace tessera {

/// A loss before its division: add sums and counts over micro-batches and ranks, divide once.
/// Scalars [] on the device, f32 (f64 for f64 inputs).
struct LossSum {
  Tensor sum;    ///< sum over valid targets of -log p[target]
  Tensor count;  ///< number of valid targets; not differentiable
};

/// Options of `cross_entropy`.
struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  /// Weight of log(sum_v exp(logits[r, v]))^2, which keeps logits from drifting (Chowdhery et al. 2022,
  /// arXiv:2204.02311).
  float z_loss = 0;
  /// In [0, 1]: the target distribution is (1 - e) of the target and e of all classes alike (Szegedy
  /// et al. 2015, arXiv:1512.00567).
  float label_smoothing = 0;
};

/// Cross entropy of logits against class indices.
///   sum = sum over rows of log(sum_v exp(logits[r, v])) - logits[r, targets[r]]
/// With label smoothing e the second term is (1 - e) logits[r, targets[r]] + e mean_v(logits[r, v]);
/// a z-loss z adds z log(sum_v exp(logits[r, v]))^2 to a row.
/// Shapes   logits [..., V] (rows may be strided: a slice of a padded vocabulary), targets [...]
/// Dtypes   logits f32 | bf16 | f16 | f64, targets i32 | i64; rows in f32, the total in f64
/// Saves    logits, targets, 8 bytes per row
/// Grads    dlogits = (softmax - one_hot) * dsum; zero for targets equal to `ignore_index`
/// Streams  current stream; never synchronizes
/// Errors   ShapeError, DtypeError; a target outside [0, V) that is not `ignore_index` is an Error
///          of the stream (thrown at its synchronization) with the target, its position and V; on
///          CUDA it makes the sum NaN; Error for a z-loss or label smoothing out of range
LossSum cross_entropy(const Tensor& logits, const Tensor& targets,
                      const CrossEntropyOptions& options);
LossSum cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore_index = -100);

/// Options of `linear_cross_entropy`.
struct LinearCrossEntropyOptions {
  int64_t ignore_index = -100;
  /// Rows whose logits exist at a time; 0 = as many as 64 MiB hold, at least 128 (on CUDA 512 MiB
  /// and 1024: every chunk reads w and adds into dw once).
  int64_t chunk_rows = 0;
  /// Bound of the logits' magnitude: they count as softcap tanh(logits / softcap); 0: as they are.
  float softcap = 0;
  float z_loss = 0, label_smoothing = 0;  ///< as in CrossEntropyOptions
  /// The gradient that `backward` will bring to `sum`, if it is known by now: a scalar [] of the
  /// loss's dtype on the device (1 / global number of valid targets, times the loss scale). See
  /// [Note: Gradients in the forward].
  Tensor grad_scale = {};
};

/// cross_entropy(x w^T, targets) without ever holding all logits: they are made, used and dropped
/// in chunks of rows. A soft-cap bounds them within the loss's own passes.
/// Shapes   x [..., C], w [V, C], targets [...]
/// Dtypes   x f32 | bf16 | f16 | f64, w the same, targets i32 | i64; logits f32 (f64 for f64)
/// Memory   chunk_rows * V * 4 bytes of logits (V rounded up to 64 on CUDA), linear in rows for
///          everything else. Chunks that add into a dw destination of bf16 or f16 go through V * C
///          f32 values (one rounding).
/// Saves    x, w, targets, 8 bytes per row; the backward makes each chunk's logits again. With
///          `grad_scale`: dx only
/// Grads    dx, dw; the same bits whatever the number of threads
/// Streams  current stream; never synchronizes
/// Errors   as cross_entropy; Error for a softcap that is negative or not finite
///
/// [Note: Gradients in the forward]
/// With `grad_scale` the forward makes each chunk's gradients while its logits are there, so that
/// no matrix product is repeated (3 instead of 4). It keeps dx for the backward, and adds dw into
/// the gradient of the leaf w at once (`leaf_destination`); if w is not a leaf, dw is kept also.
/// The backward only hands over what was kept and does not read its upstream gradient: the caller
/// promises that it will run `backward` once, with exactly `grad_scale` as the gradient of `sum`.
/// Without grad mode, or if neither x nor w requires a gradient, `grad_scale` is ignored.
LossSum linear_cross_entropy(const Tensor& x, const Tensor& w, const Tensor& targets,
                             const LinearCrossEntropyOptions& options = {});

/// The losses that linear_cross_entropy adds up, each by itself, so that what is made of them may weigh
/// them differently: 0 for an ignored row.
///   y[...] = log(sum_v exp(x[...] w^T)) - x[...] w[targets[...]]
/// Shapes   x [..., C], w [V, C], targets [...] -> y [...]
/// Saves    x, w, targets, 8 bytes per row; the backward makes each chunk's logits again
/// Grads    dx, dw, by rows of dy
/// Dtypes, memory, streams and errors: as linear_cross_entropy; y is f32 (f64 for f64). Error for a
/// `grad_scale`: the gradient is dy
Tensor linear_cross_entropy_rows(const Tensor& x, const Tensor& w, const Tensor& targets,
                                 const LinearCrossEntropyOptions& options = {});

/// Mean-squared error: y = mean over all elements of (x - target)^2.
/// Shapes   x, target any, alike -> y []
/// Dtypes   x, target f32 | bf16 | f16 | f64, the same -> y f32 (f64 for f64); each square is
///          rounded to x's dtype, their sum is as in `mean`
/// Saves    x, target
/// Grads    dx = 2 (x - target) dy / numel, dtarget = -dx
/// Streams  current stream; never synchronizes
/// Errors   ShapeError if the shapes differ or there are no elements; DtypeError if a dtype is not
///          floating or they differ
Tensor mse_loss(const Tensor& x, const Tensor& target);

}  // namespace tessera
