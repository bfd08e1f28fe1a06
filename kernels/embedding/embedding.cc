#include "kernels/embedding/embedding.h"

#include <limits>

#include "core/autograd.h"
#include "core/row_gradients.h"
#include "kernels/destination.h"
#include "kernels/elementwise/row_view.h"
#include "kernels/embedding/kernel.h"

namespace tessera {

namespace kernels {

Cost EmbeddingFwd::cost() const {
  const int64_t width = static_cast<int64_t>(size_of(dtype));
  return Cost(0)
      .read(ids, rows * static_cast<int64_t>(size_of(ids_dtype)))
      .read(weight, vocab * cols * width)
      .write(y, rows * cols * width);
}

Cost EmbeddingBwd::cost() const {
  const int64_t dw_numel = vocab == 0 ? 0 : (vocab - 1) * dw_stride + cols;
  const int64_t dw_nbytes = dw_numel * static_cast<int64_t>(size_of(dw_dtype));
  return Cost(static_cast<double>(rows * cols))
      .read(dy, rows * cols * static_cast<int64_t>(size_of(dtype)))
      .read(ids, rows * static_cast<int64_t>(size_of(ids_dtype)))
      .write(order, (vocab + rows) * static_cast<int64_t>(sizeof(int32_t)))
      .write_or_accumulate(dw, dw_nbytes, accumulate);
}

TESSERA_DEFINE_KERNEL(embedding_fwd, EmbeddingFwd);
TESSERA_DEFINE_KERNEL(embedding_bwd, EmbeddingBwd);

}  // namespace kernels

namespace {

/// Rows [first, first + dw.view.dim(0)) of the table's gradient.
void add_up_rows(const GradDst& dw, int64_t first, const Tensor& ids, const Tensor& dy) {
  if (dw.view.numel() == 0) return;
  const int64_t vocab = dw.view.dim(0), cols = dw.view.dim(1);
  const Tensor order =
      empty({kernels::EmbeddingBwd::order_numel(dy.device().type, vocab, ids.numel())}, kI32);
  kernels::embedding_bwd(current_stream(),
                         {.dw = dw.view.raw_data(),
                          .order = order.data<int32_t>(),
                          .dy = dy.raw_data(),
                          .ids = ids.raw_data(),
                          .dw_dtype = dw.view.dtype(),
                          .dtype = dy.dtype(),
                          .ids_dtype = ids.dtype(),
                          .rows = ids.numel(),
                          .cols = cols,
                          .vocab = vocab,
                          .dw_stride = dw.view.is_contiguous() ? cols : dw.view.row_stride(),
                          .accumulate = dw.accumulate,
                          .first = first});
}

}  // namespace

Tensor embedding(const Tensor& ids_input, const Tensor& weight_input) {
  TESSERA_CHECK_DTYPE(ids_input.dtype() == kI32 || ids_input.dtype() == kI64,
                      "embedding: ids must be i32 or i64, got {}", ids_input.dtype());
  TESSERA_CHECK_DTYPE(is_floating(weight_input.dtype()),
                      "embedding: expected a floating dtype, got {}", weight_input.dtype());
  TESSERA_CHECK_SHAPE(weight_input.num_dims() == 2, "embedding: weight must be [V, C], got {}",
                      weight_input.shape());
  TESSERA_CHECK_SHAPE(ids_input.numel() <= std::numeric_limits<int32_t>::max(),
                      "embedding: at most 2^31 - 1 ids, got {}", ids_input.numel());
  const Tensor ids = ids_input.contiguous(), weight = weight_input.contiguous();
  const int64_t vocab = weight.dim(0), cols = weight.dim(1);
  Shape shape = ids.shape();
  shape.push_back(cols);
  const Tensor y = empty(shape, weight.dtype());
  if (y.numel() != 0) {
    kernels::embedding_fwd(current_stream(), {.y = y.raw_data(),
                                              .ids = ids.raw_data(),
                                              .weight = vocab == 0 ? nullptr : weight.raw_data(),
                                              .dtype = weight.dtype(),
                                              .ids_dtype = ids.dtype(),
                                              .rows = ids.numel(),
                                              .cols = cols,
                                              .vocab = vocab});
  }
  // Not held where it is the result of an op: only a leaf has an owner that may want rows.
  const Tensor leaf = weight_input.is_leaf() ? weight_input : Tensor{};
  return record(
      "embedding", {weight_input}, y, [ids = save(ids), leaf](const Tensor& dy, Grads& g) {
        if (!g.wanted(0)) return;
        const Tensor dy_rows = dy.contiguous();
        if (RowGradSink* sink = row_sink(leaf)) {
          return sink->add_rows(leaf, [ids = ids.get(), dy_rows](const GradDst& dw, int64_t begin) {
            add_up_rows(dw, begin, ids, dy_rows);
          });
        }
        kernels::Destination destination(g, 0);
        add_up_rows(destination.claim(is_row_addressable, dy.dtype()), 0, ids.get(), dy_rows);
        destination.finish();
      });
}

}  // namespace tessera
