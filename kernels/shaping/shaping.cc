#include "kernels/shaping/shaping.h"

#include <functional>
#include <numeric>

#include "core/autograd.h"
#include "core/elementary/kernel.h"
#include "kernels/destination.h"
#include "kernels/shaping/kernel.h"

namespace tessera {

namespace kernels {

Cost Gather::cost() const {
  const int64_t numel = outer * count * inner, nbytes = static_cast<int64_t>(size_of(dtype));
  return Cost(0)
      .read(x, outer * length * inner * nbytes)
      .read(index, numel * static_cast<int64_t>(size_of(index_dtype)))
      .write(y, numel * nbytes);
}

Cost ScatterAdd::cost() const {
  const int64_t numel = outer * count * inner;
  return Cost(static_cast<double>(numel))
      .read(dy, numel * static_cast<int64_t>(size_of(dtype)))
      .read(index, numel * static_cast<int64_t>(size_of(index_dtype)))
      .write_or_accumulate(sums, outer * length * inner * (dtype == kF64 ? 8 : 4), true);
}

TESSERA_DEFINE_KERNEL(gather, Gather);
TESSERA_DEFINE_KERNEL(scatter_add, ScatterAdd);

}  // namespace kernels

Tensor cat(const std::vector<Tensor>& tensors, int dim) {
  TESSERA_CHECK_SHAPE(!tensors.empty(), "cat: expected at least one tensor, got none");
  const Tensor& first = tensors[0];
  const int d = first.shape().wrap(dim);
  std::vector<int64_t> starts;
  int64_t total = 0;
  for (const Tensor& x : tensors) {
    TESSERA_CHECK_SHAPE(
        x.num_dims() == first.num_dims() && x.shape().with(d, 0) == first.shape().with(d, 0),
        "cat: the tensors must be alike but for dimension {}, got {} and {}", dim, first.shape(),
        x.shape());
    TESSERA_CHECK_EQ(x.dtype(), first.dtype(), "cat: the tensors must have one dtype");
    starts.push_back(total);
    total += x.dim(d);
  }
  const Tensor y = empty(first.shape().with(d, total), first.dtype());
  for (size_t i = 0; i < tensors.size(); ++i) {
    y.narrow(d, starts[i], tensors[i].dim(d)).copy_(tensors[i]);
  }
  const auto backward = [d, starts](std::span<const Tensor> dys, Grads& g) {
    for (size_t k = 0; k < starts.size(); ++k) {
      const int i = static_cast<int>(k);
      const GradDst dx = g.destination(i);
      if (!dx) continue;
      const Tensor part = dys[0].narrow(d, starts[k], dx.view.dim(d));
      if (dx.view.numel() != 0) {
        kernels::copy(current_stream(),
                      {dx.view.raw_data(), part.raw_data(), dx.view.dtype(), part.dtype(),
                       part.shape(), dx.view.strides(), part.strides(), dx.accumulate});
      }
      g.written(i);
    }
  };
  return record_multi("cat", tensors, {y}, backward)[0];
}

Tensor stack(const std::vector<Tensor>& tensors, int dim) {
  TESSERA_CHECK_SHAPE(!tensors.empty(), "stack: expected at least one tensor, got none");
  Shape shape;
  const Shape& each = tensors[0].shape();
  const int d = Shape(std::vector<int64_t>(static_cast<size_t>(each.num_dims()) + 1)).wrap(dim);
  for (int i = 0; i <= each.num_dims(); ++i) shape.push_back(i == d ? 1 : each[i > d ? i - 1 : i]);
  std::vector<Tensor> slices;
  for (const Tensor& x : tensors) {
    TESSERA_CHECK_EQ(x.shape(), each, "stack: the tensors must have one shape");
    slices.push_back(x.contiguous().view(shape));
  }
  return cat(slices, d);
}

Tensor gather(const Tensor& x_input, int dim, const Tensor& index_input) {
  const int d = x_input.shape().wrap(dim);
  TESSERA_CHECK_DTYPE(index_input.dtype() == kI32 || index_input.dtype() == kI64,
                      "gather: index must be i32 or i64, got {}", index_input.dtype());
  TESSERA_CHECK_SHAPE(index_input.num_dims() == x_input.num_dims() &&
                          index_input.shape().with(d, 0) == x_input.shape().with(d, 0),
                      "gather: x and index must be alike but for dimension {}, got {} and {}", dim,
                      x_input.shape(), index_input.shape());
  const Tensor x = x_input.contiguous(), index = index_input.contiguous();
  const Tensor y = empty(index.shape(), x.dtype());
  const auto product = [&](int begin, int end) {
    return std::accumulate(x.shape().begin() + begin, x.shape().begin() + end, int64_t{1},
                           std::multiplies<>());
  };
  const kernels::Gather args{.y = y.raw_data(),
                             .x = x.numel() == 0 ? nullptr : x.raw_data(),
                             .index = index.raw_data(),
                             .dtype = x.dtype(),
                             .index_dtype = index.dtype(),
                             .outer = product(0, d),
                             .length = x.dim(d),
                             .count = index.dim(d),
                             .inner = product(d + 1, x.num_dims())};
  if (y.numel() != 0) kernels::gather(current_stream(), args);
  if (!is_floating(x.dtype())) return y;
  return record("gather", {x_input}, y, [args, index = save(index)](const Tensor& dy, Grads& g) {
    if (!g.wanted(0)) return;
    const DType sums_dtype = dy.dtype() == kF64 ? kF64 : kF32;
    kernels::Destination destination(g, 0);
    const GradDst& dx = destination.claim(
        [&](const Tensor& view) { return view.is_contiguous() && view.dtype() == sums_dtype; },
        sums_dtype);
    if (!dx.accumulate) Tensor(dx.view).fill_(0);
    const Tensor dy_dense = dy.contiguous();
    if (dy.numel() != 0) {
      kernels::scatter_add(current_stream(), {.sums = dx.view.raw_data(),
                                              .dy = dy_dense.raw_data(),
                                              .index = index->raw_data(),
                                              .dtype = dy.dtype(),
                                              .index_dtype = args.index_dtype,
                                              .outer = args.outer,
                                              .length = args.length,
                                              .count = args.count,
                                              .inner = args.inner});
    }
    destination.finish();
  });
}

}  // namespace tessera
