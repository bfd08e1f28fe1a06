#pragma once

#include <span>
#include <vector>

#include "core/tensor.h"

namespace tessera {

/// Sum and mean of all elements.
/// Shapes   x any -> y []
/// Dtypes   x f32 | bf16 | f16 | f64 -> y f32 (f64 for f64)
/// Sums     f32 over 256 elements, f64 across, in an order that depends on the shape only
/// Saves    nothing
/// Grads    dx = dy (sum), dy / numel (mean) everywhere
/// Streams  current stream; never synchronizes
/// Errors   DtypeError if x is not floating; ShapeError for the mean of nothing
Tensor sum(const Tensor& x);
Tensor mean(const Tensor& x);

/// Sum and mean over one dimension or several.
/// Shapes   x [..., n, ...] -> y without those dimensions, or with each as 1 if `keep_dim`
/// Dtypes   f32 | bf16 | f16 | f64; y has x's dtype; one rounding
/// Errors   ShapeError if a dimension is not one of x's or is named twice
/// The rest as above.
Tensor sum(const Tensor& x, int dim, bool keep_dim = false);
Tensor mean(const Tensor& x, int dim, bool keep_dim = false);
Tensor sum(const Tensor& x, const std::vector<int>& dims, bool keep_dim = false);
Tensor mean(const Tensor& x, const std::vector<int>& dims, bool keep_dim = false);

/// Sums of all elements so far along one dimension: y[..., i, ...] = sum_{j <= i} x[..., j, ...].
/// Shapes   x any but [] -> y the same
/// Dtypes   f32 | bf16 | f16 | f64; y has x's dtype; each element rounded once
/// Sums     f64 on the CPU; on CUDA f32 within 1024 elements, f64 across; in an order that depends
///          on the shape only. A row of the last dimension is one block's work there
/// Saves    nothing
/// Grads    dx[..., i, ...] = sum_{j >= i} dy[..., j, ...]
/// Streams  current stream; never synchronizes
/// Errors   DtypeError if x is not floating; ShapeError if x has no dimension `dim`
Tensor cumsum(const Tensor& x, int dim);

/// dst = factor * (x summed over the dimensions in which dst is broadcast to x's shape), or
/// dst += ... with `accumulate`. Not differentiable; for backward functions.
/// Shapes   x any, dst broadcastable to it
/// Dtypes   any two floating ones; sums as in `sum`, one rounding into dst
/// Errors   ShapeError if dst does not broadcast to x's shape
void sum_to(const Tensor& dst, const Tensor& x, double factor = 1.0, bool accumulate = false);

/// Elements [begin, end) of a flat buffer.
struct Segment {
  int64_t begin, end;
};

/// The segments as an i64 tensor [num_segments, 2] on the device, for `partial_norm`; made once.
/// Errors   ShapeError if a segment is not within [0, numel) or starts before its predecessor ends
Tensor segments_to_device(std::span<const Segment> segments, int64_t numel);

/// Largest finite p of a norm: |x|^p of what f32 gradients are (1e-19 to 1e19) is within f64.
inline constexpr double kMaxNormPower = 16;

/// The contribution of one flat buffer to a norm: sum_i |x_i|^p over its segments, max_i |x_i| for
/// p = infinity; 0 without elements. Elements outside the segments (padding) are never read.
///   partial       f64, one element, written
///   x             flat, contiguous, f32 | bf16 | f16 | f64
///   segments      from `segments_to_device`
///   has_nonfinite u8, one element, written (1 if an element is inf or NaN, by a test of its bits);
///                 may be undefined. `partial` is then inf or NaN too.
/// Sums     f32 in fixed order over 256 elements from each segment's begin, f64 across: the same
///          bits on every number of threads. A block whose f32 sum over- or underflows is summed
///          in f64.
/// Streams  current stream; never synchronizes; not differentiable
/// Errors   Error if p <= 0 or NaN, or above kMaxNormPower and finite; ShapeError, DtypeError if an
///          argument is not as above
void partial_norm(const Tensor& partial, const Tensor& x, const Tensor& segments, double p,
                  const Tensor& has_nonfinite = {});

/// norm = (sum of the partials, in order)^(1/p), or their maximum for p = infinity; NaN stays NaN.
///   norm f32, one element, written;  partials f64, contiguous
/// Streams, errors as `partial_norm`.
void combine_norms(const Tensor& norm, const Tensor& partials, double p);

/// What gradient clipping does with a norm, on the device.
///   factor    f32, one element, written: min(1, max_norm / (norm + 1e-6)); 0 if the norm is not
///             finite
///   found_inf u8, one element, written: 1 if the norm is not finite (the step is to be skipped)
///   max_norm  > 0; infinity: never clip
/// Streams  current stream; never synchronizes
/// Errors   Error if max_norm <= 0 or NaN; ShapeError, DtypeError if an argument is not as above
void clip_factor(const Tensor& factor, const Tensor& found_inf, const Tensor& norm,
                 double max_norm);

/// mark = max(mark, value) if an element of `x` is inf or NaN, by a test of its bits; else `mark`
/// stays. One pass over `x`.
///   mark     i32, one element
///   x        f32 | bf16 | f16 | f64, contiguous or rows that two strides describe (a slice)
/// Streams  current stream; never synchronizes; not differentiable
/// Errors   DtypeError, ShapeError if an argument is not as above
void mark_nonfinite(const Tensor& mark, const Tensor& x, int32_t value);

/// sums[s] += sum_i bits(x[i]) w(offset_s + i - begin_s) mod 2^64 over segment s, elements taken as
/// unsigned integers, w(k) = (k + 1) 0x9e3779b1 mod 2^32 with its lowest bit set. Any one flipped
/// bit changes the sum. That of a tensor is the sum of those of its parts, whoever has them, if
/// `offset` says where each begins.
///   sums      i64 [num_segments] (the bits of unsigned ones)
///   x         flat, contiguous, any dtype; what lies outside the segments is never read
///   segments  i64 [num_segments, 3], on the device: begin, end, offset, elements within x
/// Bits     the same on every device and number of threads
/// Streams  current stream; never synchronizes; not differentiable
/// Errors   ShapeError, DtypeError if an argument is not as above
void add_checksums(const Tensor& sums, const Tensor& x, const Tensor& segments);

}  // namespace tessera
