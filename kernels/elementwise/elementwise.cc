#include "kernels/elementwise/elementwise.h"

#include <numeric>

#include "core/autograd.h"
#include "kernels/destination.h"
#include "kernels/elementwise/kernel.h"
#include "kernels/elementwise/row_view.h"

namespace tessera {

namespace kernels {

namespace {

/// Bytes from the first to the last element of a row-strided operand.
int64_t rows_nbytes(int64_t rows, int64_t cols, int64_t stride, DType dtype) {
  return rows == 0 ? 0 : ((rows - 1) * stride + cols) * static_cast<int64_t>(size_of(dtype));
}

/// Operations of one value or derivative; exp, tanh, erf and a division count as one each.
double flops_of(Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return 1;
    case Activation::kSilu:
      return 4;
    case Activation::kGeluTanh:
      return 8;
    case Activation::kGeluExact:
      return 5;
  }
  return 0;
}

}  // namespace

Cost Scale::cost() const {
  return Cost(static_cast<double>(rows * cols) * (accumulate ? 2 : 1))
      .read(x, rows_nbytes(rows, cols, x_stride, dtype))
      .write_or_accumulate(dst, rows_nbytes(rows, cols, dst_stride, dst_dtype), accumulate);
}

Cost ActivationFwd::cost() const {
  return Cost(static_cast<double>(rows * cols) * flops_of(activation))
      .read(x, rows_nbytes(rows, cols, x_stride, dtype))
      .write(y, rows_nbytes(rows, cols, cols, dtype));
}

Cost ActivationBwd::cost() const {
  return Cost(static_cast<double>(rows * cols) * (2 * flops_of(activation) + 1))
      .read(dy, rows_nbytes(rows, cols, dy_stride, dtype))
      .read(x, rows_nbytes(rows, cols, x_stride, dtype))
      .write_or_accumulate(dx, rows_nbytes(rows, cols, dx_stride, dx_dtype), accumulate);
}

Cost SwigluFwd::cost() const {
  return Cost(static_cast<double>(rows * cols) * 5)
      .read(gate, rows_nbytes(rows, cols, gate_stride, dtype))
      .read(up, rows_nbytes(rows, cols, up_stride, dtype))
      .write(y, rows_nbytes(rows, cols, cols, dtype));
}

Cost SwigluBwd::cost() const {
  return Cost(static_cast<double>(rows * cols) * 12)
      .read(dy, rows_nbytes(rows, cols, dy_stride, dtype))
      .read(gate, rows_nbytes(rows, cols, gate_stride, dtype))
      .read(up, rows_nbytes(rows, cols, up_stride, dtype))
      .write_or_accumulate(dgate, rows_nbytes(rows, cols, dgate_stride, dgate_dtype),
                           accumulate_dgate)
      .write_or_accumulate(dup, rows_nbytes(rows, cols, dup_stride, dup_dtype), accumulate_dup);
}

TESSERA_DEFINE_KERNEL(scale, Scale);
TESSERA_DEFINE_KERNEL(activation_fwd, ActivationFwd);
TESSERA_DEFINE_KERNEL(activation_bwd, ActivationBwd);
TESSERA_DEFINE_KERNEL(swiglu_fwd, SwigluFwd);
TESSERA_DEFINE_KERNEL(swiglu_bwd, SwigluBwd);

}  // namespace kernels

namespace {

using kernels::Activation;
using kernels::Destination;

void check_floating(const char* op, const Tensor& x) {
  TESSERA_CHECK_DTYPE(is_floating(x.dtype()), "{}: expected a floating dtype, got {}", op,
                      x.dtype());
}

void launch_scale(const Tensor& dst, bool accumulate, const Tensor& x, double factor) {
  const Rows r({dst, x});
  if (r.rows == 0) return;
  kernels::scale(current_stream(), {.dst = dst.raw_data(),
                                    .x = x.raw_data(),
                                    .dst_dtype = dst.dtype(),
                                    .dtype = x.dtype(),
                                    .factor = factor,
                                    .rows = r.rows,
                                    .cols = r.cols,
                                    .dst_stride = r.stride(dst),
                                    .x_stride = r.stride(x),
                                    .accumulate = accumulate});
}

}  // namespace

// ---- unary --------------------------------------------------------------------------------------

Tensor scale(const Tensor& x, double factor) {
  check_floating("scale", x);
  const Tensor y = empty(x.shape(), x.dtype());
  launch_scale(y, false, row_addressable(x), factor);
  return record("scale", {x}, y, [factor](const Tensor& dy, Grads& g) {
    if (!g.wanted(0)) return;
    Destination destination(g, 0);
    const GradDst& dx = destination.claim(is_row_addressable, dy.dtype());
    launch_scale(dx.view, dx.accumulate, row_addressable(dy), factor);
    destination.finish();
  });
}

namespace {

Tensor activation(const char* name, Activation kind, const Tensor& input) {
  check_floating(name, input);
  const Tensor x = row_addressable(input);
  const Tensor y = empty(x.shape(), x.dtype());
  const Rows r({x});
  if (r.rows != 0) {
    kernels::activation_fwd(current_stream(), {.y = y.raw_data(),
                                               .x = x.raw_data(),
                                               .dtype = x.dtype(),
                                               .activation = kind,
                                               .rows = r.rows,
                                               .cols = r.cols,
                                               .x_stride = r.stride(x)});
  }
  // The next op usually saves y anyway, so that relu, which can, keeps y rather than x.
  const Tensor& kept = kind == Activation::kRelu ? y : x;
  return record(name, {input}, y, [kind, x = save(kept)](const Tensor& dy_any, Grads& g) {
    if (!g.wanted(0)) return;
    const Tensor dy = row_addressable(dy_any);
    Destination destination(g, 0);
    const GradDst& dx = destination.claim(is_row_addressable, dy.dtype());
    const Rows r({dx.view, dy, x});
    if (r.rows != 0) {
      kernels::activation_bwd(current_stream(), {.dx = dx.view.raw_data(),
                                                 .dy = dy.raw_data(),
                                                 .x = x->raw_data(),
                                                 .dx_dtype = dx.view.dtype(),
                                                 .dtype = dy.dtype(),
                                                 .activation = kind,
                                                 .rows = r.rows,
                                                 .cols = r.cols,
                                                 .dx_stride = r.stride(dx.view),
                                                 .dy_stride = r.stride(dy),
                                                 .x_stride = r.stride(x),
                                                 .accumulate = dx.accumulate});
    }
    destination.finish();
  });
}

}  // namespace

Tensor gelu(const Tensor& x, Gelu kind) {
  return activation("gelu", kind == Gelu::kTanh ? Activation::kGeluTanh : Activation::kGeluExact,
                    x);
}

Tensor relu(const Tensor& x) {
  return activation("relu", Activation::kRelu, x);
}

Tensor silu(const Tensor& x) {
  return activation("silu", Activation::kSilu, x);
}

// ---- swiglu -------------------------------------------------------------------------------------

namespace {

/// Undefined views: that gradient is not wanted.
void launch_swiglu_bwd(const GradDst& dgate, const GradDst& dup, const Tensor& dy,
                       const Tensor& gate, const Tensor& up) {
  const Rows r({dgate.view.is_defined() ? dgate.view : dy, dup.view.is_defined() ? dup.view : dy,
                dy, gate, up});
  if (r.rows == 0) return;
  const auto data = [](const Tensor& t) { return t.is_defined() ? t.raw_data() : nullptr; };
  const auto dtype = [&](const Tensor& t) { return t.is_defined() ? t.dtype() : dy.dtype(); };
  const auto stride = [&](const Tensor& t) { return t.is_defined() ? r.stride(t) : r.cols; };
  kernels::swiglu_bwd(current_stream(), {.dgate = data(dgate.view),
                                         .dup = data(dup.view),
                                         .dy = dy.raw_data(),
                                         .gate = gate.raw_data(),
                                         .up = up.raw_data(),
                                         .dgate_dtype = dtype(dgate.view),
                                         .dup_dtype = dtype(dup.view),
                                         .dtype = dy.dtype(),
                                         .rows = r.rows,
                                         .cols = r.cols,
                                         .dgate_stride = stride(dgate.view),
                                         .dup_stride = stride(dup.view),
                                         .dy_stride = r.stride(dy),
                                         .gate_stride = r.stride(gate),
                                         .up_stride = r.stride(up),
                                         .accumulate_dgate = dgate.accumulate,
                                         .accumulate_dup = dup.accumulate});
}

}  // namespace

Tensor swiglu(const Tensor& gate_input, const Tensor& up_input) {
  check_floating("swiglu", gate_input);
  TESSERA_CHECK_EQ(gate_input.dtype(), up_input.dtype(), "swiglu: gate and up must have one dtype");
  TESSERA_CHECK_EQ(gate_input.shape(), up_input.shape(), "swiglu: gate and up must have one shape");
  const Tensor gate = row_addressable(gate_input), up = row_addressable(up_input);
  const Tensor y = empty(gate.shape(), gate.dtype());
  const Rows r({gate, up});
  if (r.rows != 0) {
    kernels::swiglu_fwd(current_stream(), {.y = y.raw_data(),
                                           .gate = gate.raw_data(),
                                           .up = up.raw_data(),
                                           .dtype = y.dtype(),
                                           .rows = r.rows,
                                           .cols = r.cols,
                                           .gate_stride = r.stride(gate),
                                           .up_stride = r.stride(up)});
  }
  return record("swiglu", {gate_input, up_input}, y,
                [gate = save(gate), up = save(up)](const Tensor& dy_any, Grads& g) {
                  const Tensor dy = row_addressable(dy_any);
                  Destination gate_destination(g, 0), up_destination(g, 1);
                  launch_swiglu_bwd(gate_destination.claim(is_row_addressable, dy.dtype()),
                                    up_destination.claim(is_row_addressable, dy.dtype()), dy, gate,
                                    up);
                  gate_destination.finish();
                  up_destination.finish();
                });
}

// ---- split --------------------------------------------------------------------------------------

std::vector<Tensor> split(const Tensor& x, std::span<const int64_t> sizes, int dim) {
  const int d = x.shape().wrap(dim);
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  TESSERA_CHECK_SHAPE(total == x.dim(d) &&
                          std::all_of(sizes.begin(), sizes.end(), [](int64_t s) { return s >= 0; }),
                      "split: the sizes [{}] must be >= 0 and sum to dimension {} of {}",
                      fmt::join(sizes, ", "), dim, x.shape());

  const Tensor base = x.detach();
  std::vector<int64_t> starts(sizes.size());
  std::vector<Tensor> parts;
  for (size_t i = 0; i < sizes.size(); ++i) {
    starts[i] = i == 0 ? 0 : starts[i - 1] + sizes[i - 1];
    parts.push_back(base.narrow(d, starts[i], sizes[i]));
  }

  // The buffer of a walk: made when the first consumer asks for its slice, dropped with the walk.
  struct Buffer {
    Shape shape;
    DType dtype;
    int dim;
    std::vector<int64_t> starts, sizes;
    Tensor tensor;

    Tensor slice(size_t i) {
      if (!tensor.is_defined()) tensor = empty(shape, dtype);
      return tensor.narrow(dim, starts[i], sizes[i]);
    }
  };
  auto buffer = std::make_shared<Buffer>(
      Buffer{x.shape(), x.dtype(), d, starts, {sizes.begin(), sizes.end()}, Tensor{}});
  const auto backward = [buffer](std::span<const Tensor> dys, Grads& g) {
    for (size_t i = 0; i < dys.size(); ++i) {
      Tensor slice = buffer->slice(i);
      if (!dys[i].is_defined()) {
        slice.fill_(0);
      } else if (dys[i].storage() != slice.storage() ||
                 dys[i].storage_offset() != slice.storage_offset()) {
        slice.copy_(dys[i]);
      }
    }
    g.add(0, std::exchange(buffer->tensor, Tensor{}));
  };
  return record_multi("split", {x}, parts, backward,
                      [buffer](int i) { return buffer->slice(static_cast<size_t>(i)); });
}

}  // namespace tessera
