#pragma once

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "core/runtime/dispatch.h"

// Cross entropy of rows of logits. Statistics and sums in f32 (f64 for f64); totals in f64.

namespace tessera::kernels {

/// The targets of `rows` rows: class indices in [0, vocab), or `ignore_index` for no loss.
/// On the CPU a kernel that reads them throws from its task if one is neither, naming `op`, the
/// target and its position (`first_row` + row); on CUDA that row's loss and gradient are NaN.
struct Targets {
  const void* data;
  DType dtype;  ///< i32 or i64
  int64_t ignore_index;
  int64_t first_row;
  const char* op;  ///< a literal
};

/// losses[r] = log(sum(exp(x[r] - max))) - (x[r][target] - max), 0 for an ignored row;
/// stats[r] = {max, log(sum(exp(x[r] - max)))}: log p = (x - max) - log sum without cancellation.
/// With a soft-cap x = softcap tanh(logits / softcap), else x = logits. With label smoothing e in place
/// of x[r][target] (1 - e) x[r][target] + e mean(x[r]); with a z-loss z (max + log sum)^2 is added.
struct CrossEntropyFwd {
  void* losses;  ///< [rows], f32 (f64)
  void* stats;   ///< [rows, 2], f32 (f64); absent if no backward follows
  const void* logits;
  Targets targets;
  DType dtype;  ///< of logits
  int64_t rows, vocab;
  int64_t row_stride;  ///< elements between rows of logits
  float softcap = 0;   ///< 0: none
  float z_loss = 0, label_smoothing = 0;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(cross_entropy_fwd, CrossEntropyFwd);

/// dlogits[r][c] = (exp(log p[r][c]) - [c == target]) * scale, 0 for an ignored row; with a soft-cap
/// times its derivative, 1 - tanh(logits / softcap)^2. With label smoothing e over V classes
/// [c == target] is (1 - e) [c == target] + e / V; with a z-loss exp(log p) counts times
/// 1 + 2 z log(sum(exp(x))).
/// dlogits may be logits, also if its dtype is narrower: a row then starts at the same byte.
/// Columns [first, first + vocab) of all classes, with the bits that they have beside the others.
struct CrossEntropyBwd {
  void* dlogits;
  const void* logits;
  const void* stats;  ///< [rows, 2] of the forward; with `of_fused`, what CrossEntropyFused left
  Targets targets;
  const void* scale;    ///< f32 (f64 for f64 logits) on the device: the upstream gradient
  DType dtype;          ///< of logits
  DType dlogits_dtype;  ///< dtype, or bf16 or f16 beside f32 logits
  bool accumulate;
  int64_t rows, vocab;
  int64_t row_stride, dlogits_row_stride;  ///< elements
  float softcap = 0;                       ///< that of the forward
  int64_t first = 0, num_classes = 0;      ///< num_classes = 0: vocab, all of them
  bool of_fused = false;     ///< the bits of CrossEntropyFused, which has nothing of the below
  int64_t stats_stride = 2;  ///< elements between rows of stats
  float z_loss = 0, label_smoothing = 0;  ///< those of the forward
  int64_t scale_stride = 0;               ///< 1: each row has a scale of its own
  int64_t last_class() const { return num_classes > 0 ? num_classes : vocab; }
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(cross_entropy_bwd, CrossEntropyBwd);

/// Losses and gradients in one call, with one exponential an element; without a soft-cap, a z-loss or
/// label smoothing. The logits are scratch and are overwritten by dlogits (f32 logits may become bf16 or f16; rows start at the same byte).
struct CrossEntropyFused {
  void* losses;  ///< [rows], f32 (f64)
  void* logits;  ///< becomes dlogits
  Targets targets;
  const void* scale;  ///< as in CrossEntropyBwd
  DType dtype;        ///< of logits: f32 or f64
  DType dlogits_dtype;
  int64_t rows, vocab;
  int64_t row_stride;  ///< elements of logits
  /// [rows, stats_stride], f32 (f64), by which CrossEntropyBwd makes the same gradients again, or
  /// absent: maximum, sum of the exponentials, on the CPU also the maximum that each block's were
  /// taken against.
  void* stats = nullptr;
  int64_t stats_stride = 0;  ///< num_stats
  static int64_t num_stats(DeviceType device, int64_t vocab) {
    return 2 +
           (device == DeviceType::kCpu ? (vocab + block_cols(vocab) - 1) / block_cols(vocab) : 0);
  }
  static constexpr int64_t kMaxBlocks = 512;
  /// Columns of a block on the CPU: no more than kMaxBlocks of them.
  static int64_t block_cols(int64_t vocab) {
    return std::max<int64_t>(1024, (vocab / kMaxBlocks / 256 + 1) * 256);
  }
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(cross_entropy_fused, CrossEntropyFused);

/// sum = sum of losses in f64, in a fixed order, rounded once; count = number of targets not
/// ignored.
struct LossTotal {
  void* sum;    ///< one value of `dtype`
  void* count;  ///< one value of `dtype`
  const void* losses;
  Targets targets;
  DType dtype;  ///< f32 or f64
  int64_t rows;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(loss_total, LossTotal);

}  // namespace tessera::kernels
