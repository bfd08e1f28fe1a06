#include "kernels/reduce/reduce.h"

#include <cmath>
#include <numeric>

#include "core/autograd.h"
#include "core/elementary/kernel.h"
#include "kernels/destination.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/elementwise/kernel.h"
#include "kernels/reduce/kernel.h"

namespace tessera {

namespace kernels {

Cost Sum::cost() const {
  const int64_t kept = outer * inner;
  // The partials are scratch of this call alone; they count as written, as traffic they stay in
  // cache.
  const int64_t chunks = partials == nullptr ? 0 : this->chunks();
  return Cost(static_cast<double>(kept * length))
      .read(x, kept * length * static_cast<int64_t>(size_of(dtype)))
      .write(partials, kept * chunks * static_cast<int64_t>(sizeof(double)))
      .write_or_accumulate(dst, kept * static_cast<int64_t>(size_of(dst_dtype)), accumulate);
}

Cost Cumsum::cost() const {
  const int64_t numel = outer * length * inner;
  return Cost(static_cast<double>(numel))
      .read(x, numel * static_cast<int64_t>(size_of(dtype)))
      .write_or_accumulate(y, numel * static_cast<int64_t>(size_of(y_dtype)), accumulate);
}

Cost PartialNorm::cost() const {
  return Cost(2.0 * static_cast<double>(numel))
      .read(x, numel * static_cast<int64_t>(size_of(dtype)))
      .read(segments, num_segments * 2 * static_cast<int64_t>(sizeof(int64_t)))
      .write(chunks, kMaxNormChunks * 2 * static_cast<int64_t>(sizeof(double)))
      .write(partial, sizeof(double))
      .write(has_nonfinite, 1);
}

Cost CombineNorms::cost() const {
  return Cost(static_cast<double>(num_partials))
      .read(partials, num_partials * static_cast<int64_t>(sizeof(double)))
      .write(norm, sizeof(float));
}

Cost ClipFactor::cost() const {
  return Cost(3).read(norm, sizeof(float)).write(factor, sizeof(float)).write(found_inf, 1);
}

Cost MarkNonfinite::cost() const {
  return Cost()
      .read(x, layout.span_nbytes(rows, cols, dtype))
      .write_or_accumulate(mark, sizeof(int32_t), true);
}

Cost Checksum::cost() const {
  return Cost(2.0 * static_cast<double>(numel))
      .read(x, numel * item_nbytes)
      .read(segments, num_segments * 3 * static_cast<int64_t>(sizeof(int64_t)))
      .write_or_accumulate(sums, num_segments * static_cast<int64_t>(sizeof(uint64_t)), true);
}

TESSERA_DEFINE_KERNEL(sum, Sum);
TESSERA_DEFINE_KERNEL(cumsum, Cumsum);
TESSERA_DEFINE_KERNEL(partial_norm, PartialNorm);
TESSERA_DEFINE_KERNEL(combine_norms, CombineNorms);
TESSERA_DEFINE_KERNEL(clip_factor, ClipFactor);
TESSERA_DEFINE_KERNEL(mark_nonfinite, MarkNonfinite);
TESSERA_DEFINE_KERNEL(checksum, Checksum);

}  // namespace kernels

namespace {

void check_floating(const char* op, const Tensor& x) {
  TESSERA_CHECK_DTYPE(is_floating(x.dtype()), "{}: expected a floating dtype, got {}", op,
                      x.dtype());
}

void launch_sum(const Tensor& dst, const Tensor& x, int64_t outer, int64_t length, int64_t inner,
                double factor, bool accumulate) {
  if (outer * inner == 0) return;
  const int64_t chunks = kernels::num_sum_chunks(outer, length, inner, x.device().type);
  const Tensor partials = chunks == 1 ? Tensor{} : empty({outer * chunks * inner}, kF64);
  kernels::sum(current_stream(),
               {.dst = dst.raw_data(),
                .partials = partials.is_defined() ? partials.data<double>() : nullptr,
                .x = length == 0 ? nullptr : x.raw_data(),
                .dst_dtype = dst.dtype(),
                .dtype = x.dtype(),
                .outer = outer,
                .length = length,
                .inner = inner,
                .factor = factor,
                .accumulate = accumulate,
                .num_chunks = chunks});
}

void launch_copy(const Tensor& dst, bool accumulate, const Tensor& src, const Strides& strides) {
  if (dst.numel() == 0) return;
  kernels::copy(current_stream(), {.dst = dst.raw_data(),
                                   .src = src.raw_data(),
                                   .dst_dtype = dst.dtype(),
                                   .src_dtype = src.dtype(),
                                   .shape = dst.shape(),
                                   .dst_strides = dst.strides(),
                                   .src_strides = strides,
                                   .accumulate = accumulate});
}

Tensor sum_all(const char* name, const Tensor& x, double factor) {
  check_floating(name, x);
  const Tensor y = empty({}, x.dtype() == kF64 ? kF64 : kF32);
  launch_sum(y, x.contiguous(), 1, x.numel(), 1, factor, false);
  return record(name, {x}, y, [factor](const Tensor& dy, Grads& g) {
    if (!g.wanted(0)) return;
    const GradDst dx = g.destination(0);
    Strides strides = dx.view.shape();
    for (int d = 0; d < strides.num_dims(); ++d) strides[d] = 0;
    launch_copy(dx.view, dx.accumulate, factor == 1.0 ? dy : scale(dy, factor), strides);
    g.written(0);
  });
}

double mean_factor(int64_t count, const Shape& shape) {
  TESSERA_CHECK_SHAPE(count > 0, "mean: there is no mean of nothing, got {}", shape);
  return 1.0 / static_cast<double>(count);
}

/// The dimensions in [0, num_dims), each once.
std::vector<bool> summed_dims(const char* name, const Shape& shape, const std::vector<int>& dims) {
  std::vector<bool> is_summed(static_cast<size_t>(shape.num_dims()));
  for (const int dim : dims) {
    const auto d = static_cast<size_t>(shape.wrap(dim));
    TESSERA_CHECK_SHAPE(!is_summed[d], "{}: dimension {} of {} is named twice", name, dim, shape);
    is_summed[d] = true;
  }
  return is_summed;
}

Tensor sum_dims(const char* name, const Tensor& x, const std::vector<int>& dims, bool keep_dim,
                bool is_mean) {
  check_floating(name, x);
  const std::vector<bool> is_summed = summed_dims(name, x.shape(), dims);
  Shape kept = x.shape(), shape;
  int64_t count = 1;
  for (int d = 0; d < x.num_dims(); ++d) {
    const bool is_gone = is_summed[static_cast<size_t>(d)];
    if (is_gone) count *= x.shape()[d], kept[d] = 1;
    if (!is_gone || keep_dim) shape.push_back(kept[d]);
  }
  const double factor = is_mean ? mean_factor(count, x.shape()) : 1.0;
  const Tensor y = empty(kept, x.dtype());
  sum_to(y, x.detach(), factor);
  return record(name, {x}, y.view(shape), [factor, kept](const Tensor& dy, Grads& g) {
    if (!g.wanted(0)) return;
    const GradDst dx = g.destination(0);
    const Tensor source = (factor == 1.0 ? dy : scale(dy, factor)).contiguous().view(kept);
    Strides strides = source.strides();
    for (int d = 0; d < kept.num_dims(); ++d) {
      if (kept[d] != dx.view.shape()[d]) strides[d] = 0;
    }
    launch_copy(dx.view, dx.accumulate, source, strides);
    g.written(0);
  });
}

}  // namespace

Tensor sum(const Tensor& x) {
  return sum_all("sum", x, 1.0);
}

Tensor mean(const Tensor& x) {
  return sum_all("mean", x, mean_factor(x.numel(), x.shape()));
}

Tensor sum(const Tensor& x, int dim, bool keep_dim) {
  return sum_dims("sum", x, {dim}, keep_dim, false);
}
Tensor sum(const Tensor& x, const std::vector<int>& dims, bool keep_dim) {
  return sum_dims("sum", x, dims, keep_dim, false);
}

Tensor mean(const Tensor& x, int dim, bool keep_dim) {
  return sum_dims("mean", x, {dim}, keep_dim, true);
}
Tensor mean(const Tensor& x, const std::vector<int>& dims, bool keep_dim) {
  return sum_dims("mean", x, dims, keep_dim, true);
}

namespace {

void launch_cumsum(const Tensor& y, const Tensor& x, int dim, bool reverse, bool accumulate) {
  if (x.numel() == 0) return;
  const auto product = [&](int begin, int end) {
    return std::accumulate(x.shape().begin() + begin, x.shape().begin() + end, int64_t{1},
                           std::multiplies<>());
  };
  kernels::cumsum(current_stream(), {.y = y.raw_data(),
                                     .x = x.raw_data(),
                                     .y_dtype = y.dtype(),
                                     .dtype = x.dtype(),
                                     .outer = product(0, dim),
                                     .length = x.shape()[dim],
                                     .inner = product(dim + 1, x.num_dims()),
                                     .reverse = reverse,
                                     .accumulate = accumulate});
}

}  // namespace

Tensor cumsum(const Tensor& x, int dim) {
  check_floating("cumsum", x);
  const int d = x.shape().wrap(dim);
  const Tensor y = empty_like(x);
  launch_cumsum(y, x.contiguous(), d, false, false);
  return record("cumsum", {x}, y, [d](const Tensor& dy, Grads& g) {
    if (!g.wanted(0)) return;
    kernels::Destination destination(g, 0);
    const GradDst& dx = destination.claim(kernels::is_contiguous_float, dy.dtype());
    launch_cumsum(dx.view, dy.contiguous(), d, true, dx.accumulate);
    destination.finish();
  });
}

void sum_to(const Tensor& dst, const Tensor& x, double factor, bool accumulate) {
  check_floating("sum_to", x);
  check_floating("sum_to", dst);
  TESSERA_CHECK_EQ(broadcast_shapes(dst.shape(), x.shape(), "sum_to"), x.shape(),
                   "sum_to: dst {} must broadcast to the shape of x", dst.shape());
  if (!dst.is_contiguous()) {
    const Tensor t = empty(dst.shape(), dst.dtype());
    sum_to(t, x, factor, false);
    return launch_copy(dst, accumulate, t, t.strides());
  }
  // Neighbouring dimensions that are all summed or all kept count as one; each summed group is one
  // kernel, the last group first, so that what remains is contiguous.
  struct Group {
    int64_t numel;
    bool is_summed;
  };
  std::vector<Group> groups;
  const int missing = x.num_dims() - dst.num_dims();
  for (int d = 0; d < x.num_dims(); ++d) {
    const int64_t dim = x.shape()[d];
    if (dim == 1) continue;
    const bool is_summed = d < missing || dst.shape()[d - missing] != dim;
    if (groups.empty() || groups.back().is_summed != is_summed) groups.push_back({1, is_summed});
    groups.back().numel *= dim;
  }
  const auto product = [&](size_t begin, size_t end) {
    int64_t numel = 1;
    for (size_t i = begin; i < end; ++i) numel *= groups[i].numel;
    return numel;
  };
  Tensor rest = x.contiguous();
  size_t num_summed = 0;
  for (const Group& group : groups) num_summed += group.is_summed ? 1 : 0;
  if (num_summed == 0) {
    if (x.numel() == 0) return;
    return kernels::scale(current_stream(), {.dst = dst.raw_data(),
                                             .x = rest.raw_data(),
                                             .dst_dtype = dst.dtype(),
                                             .dtype = x.dtype(),
                                             .factor = factor,
                                             .rows = 1,
                                             .cols = x.numel(),
                                             .dst_stride = x.numel(),
                                             .x_stride = x.numel(),
                                             .accumulate = accumulate});
  }
  for (size_t i = groups.size(); i-- > 0;) {
    if (!groups[i].is_summed) continue;
    const int64_t outer = product(0, i), inner = product(i + 1, groups.size());
    const bool is_final = --num_summed == 0;
    const DType sum_dtype = x.dtype() == kF64 ? kF64 : kF32;
    const Tensor next = is_final ? dst : empty({outer * inner}, sum_dtype);
    launch_sum(next, rest, outer, groups[i].numel, inner, is_final ? factor : 1.0,
               is_final && accumulate);
    groups[i].numel = 1;
    rest = next;
  }
}

// ---- norms --------------------------------------------------------------------------------------

namespace {

void check_scalar(const char* op, const char* what, const Tensor& t, DType dtype) {
  TESSERA_CHECK_DTYPE(t.dtype() == dtype, "{}: {} must be {}, got {}", op, what, dtype, t.dtype());
  TESSERA_CHECK_SHAPE(t.numel() == 1, "{}: {} must have one element, got {}", op, what, t.shape());
}

}  // namespace

Tensor segments_to_device(std::span<const Segment> segments, int64_t numel) {
  std::vector<int64_t> values;
  int64_t last = 0;
  for (const Segment& s : segments) {
    TESSERA_CHECK_SHAPE(last <= s.begin && s.begin <= s.end && s.end <= numel,
                        "segments_to_device: segment [{}, {}) must be in order and within [{}, {})",
                        s.begin, s.end, last, numel);
    values.insert(values.end(), {s.begin, s.end});
    last = s.end;
  }
  const int64_t num_segments = static_cast<int64_t>(segments.size());
  return from_values(std::span<const int64_t>(values), {num_segments, 2}, kI64);
}

void partial_norm(const Tensor& partial, const Tensor& x, const Tensor& segments, double p,
                  const Tensor& has_nonfinite) {
  TESSERA_CHECK(p > 0 && (p <= kMaxNormPower || std::isinf(p)),
                "partial_norm: p must be > 0 and at most {}, or infinity, got {}", kMaxNormPower,
                p);
  check_floating("partial_norm", x);
  check_scalar("partial_norm", "partial", partial, kF64);
  TESSERA_CHECK_SHAPE(x.num_dims() == 1 && x.is_contiguous(),
                      "partial_norm: x must be flat and contiguous, got {}", x.shape());
  TESSERA_CHECK_EQ(segments.dtype(), kI64, "partial_norm: segments must be i64");
  TESSERA_CHECK_SHAPE(segments.num_dims() == 2 && segments.dim(1) == 2 && segments.is_contiguous(),
                      "partial_norm: segments must be [num_segments, 2], got {}", segments.shape());
  if (has_nonfinite.is_defined()) {
    check_scalar("partial_norm", "has_nonfinite", has_nonfinite, kU8);
  }
  const Tensor chunks = empty({kernels::kMaxNormChunks * 2}, kF64);
  kernels::partial_norm(
      current_stream(),
      {.partial = partial.data<double>(),
       .has_nonfinite = has_nonfinite.is_defined() ? has_nonfinite.data<uint8_t>() : nullptr,
       .chunks = chunks.data<double>(),
       .x = x.numel() == 0 ? nullptr : x.raw_data(),
       .segments = segments.numel() == 0 ? nullptr : segments.data<int64_t>(),
       .dtype = x.dtype(),
       .numel = x.numel(),
       .num_segments = segments.dim(0),
       .p = p});
}

void combine_norms(const Tensor& norm, const Tensor& partials, double p) {
  TESSERA_CHECK(p > 0, "combine_norms: p must be > 0, got {}", p);
  check_scalar("combine_norms", "norm", norm, kF32);
  TESSERA_CHECK_EQ(partials.dtype(), kF64, "combine_norms: partials must be f64");
  TESSERA_CHECK_SHAPE(partials.is_contiguous(), "combine_norms: partials must be contiguous");
  kernels::combine_norms(current_stream(),
                         {.norm = norm.data<float>(),
                          .partials = partials.numel() == 0 ? nullptr : partials.data<double>(),
                          .num_partials = partials.numel(),
                          .p = p});
}

void clip_factor(const Tensor& factor, const Tensor& found_inf, const Tensor& norm,
                 double max_norm) {
  TESSERA_CHECK(max_norm > 0, "clip_factor: max_norm must be > 0, got {}", max_norm);
  check_scalar("clip_factor", "factor", factor, kF32);
  check_scalar("clip_factor", "found_inf", found_inf, kU8);
  check_scalar("clip_factor", "norm", norm, kF32);
  kernels::clip_factor(current_stream(), {.factor = factor.data<float>(),
                                          .found_inf = found_inf.data<uint8_t>(),
                                          .norm = norm.data<float>(),
                                          .max_norm = static_cast<float>(max_norm)});
}

void mark_nonfinite(const Tensor& mark, const Tensor& x, int32_t value) {
  check_scalar("mark_nonfinite", "mark", mark, kI32);
  check_floating("mark_nonfinite", x);
  if (x.numel() == 0) return;
  int64_t rows = 1, cols = x.numel();
  kernels::RowLayout layout = kernels::contiguous_rows(cols);
  if (!x.is_contiguous()) {
    const auto strided = kernels::row_layout(x.shape(), x.strides());
    TESSERA_CHECK_SHAPE(strided.has_value(),
                        "mark_nonfinite: x must be contiguous or rows of two strides, got {} with "
                        "strides {}",
                        x.shape(), x.strides());
    layout = *strided, cols = x.dim(-1), rows = x.numel() / cols;
  }
  kernels::mark_nonfinite(current_stream(), {.mark = mark.data<int32_t>(),
                                             .x = x.raw_data(),
                                             .dtype = x.dtype(),
                                             .rows = rows,
                                             .cols = cols,
                                             .layout = layout,
                                             .value = value});
}

void add_checksums(const Tensor& sums, const Tensor& x, const Tensor& segments) {
  TESSERA_CHECK_SHAPE(x.num_dims() == 1 && x.is_contiguous(),
                      "add_checksums: x must be flat and contiguous, got {}", x.shape());
  TESSERA_CHECK_DTYPE(segments.dtype() == kI64 && sums.dtype() == kI64,
                      "add_checksums: sums and segments must be i64, got {} and {}", sums.dtype(),
                      segments.dtype());
  TESSERA_CHECK_SHAPE(segments.num_dims() == 2 && segments.dim(1) == 3 && segments.is_contiguous(),
                      "add_checksums: segments must be [num_segments, 3], got {}",
                      segments.shape());
  TESSERA_CHECK_SHAPE(sums.numel() == segments.dim(0) && sums.is_contiguous(),
                      "add_checksums: expected a sum of each of the {} segments, got {}",
                      segments.dim(0), sums.shape());
  if (segments.dim(0) == 0) return;
  kernels::checksum(current_stream(), {.sums = reinterpret_cast<uint64_t*>(sums.data<int64_t>()),
                                       .x = x.numel() == 0 ? nullptr : x.raw_data(),
                                       .segments = segments.data<int64_t>(),
                                       .item_nbytes = static_cast<int64_t>(size_of(x.dtype())),
                                       .numel = x.numel(),
                                       .num_segments = segments.dim(0)});
}

}  // namespace tessera
