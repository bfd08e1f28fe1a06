#include "kernels/softmax/softmax.h"

#include "core/autograd.h"
#include "kernels/destination.h"
#include "kernels/softmax/kernel.h"

namespace tessera {
namespace kernels {

Cost SoftmaxFwd::cost() const {
  const int64_t numel = rows * cols;
  return Cost(5.0 * static_cast<double>(numel))
      .read(x, x_rows.span_nbytes(rows, cols, dtype))
      .write(y, numel * static_cast<int64_t>(size_of(dtype)));
}

Cost SoftmaxBwd::cost() const {
  const int64_t nbytes = rows * cols * static_cast<int64_t>(size_of(dtype));
  return Cost(4.0 * static_cast<double>(rows * cols))
      .read(dy, nbytes)
      .read(y, nbytes)
      .write_or_accumulate(dx, dx_rows.span_nbytes(rows, cols, dtype), accumulate);
}

TESSERA_DEFINE_KERNEL(softmax_fwd, SoftmaxFwd);
TESSERA_DEFINE_KERNEL(log_softmax_fwd, SoftmaxFwd);
TESSERA_DEFINE_KERNEL(softmax_bwd, SoftmaxBwd);
TESSERA_DEFINE_KERNEL(log_softmax_bwd, SoftmaxBwd);

}  // namespace kernels

namespace {

using kernels::row_layout;

using ForwardKernel = void (*)(const Stream&, const kernels::SoftmaxFwd&);
using BackwardKernel = void (*)(const Stream&, const kernels::SoftmaxBwd&);

Tensor softmax_like(const char* op, ForwardKernel fwd, BackwardKernel bwd, const Tensor& x_in) {
  TESSERA_CHECK_SHAPE(x_in.num_dims() >= 1, "{}: x must have at least one dimension, got {}", op,
                      x_in.shape());
  TESSERA_CHECK_SHAPE(x_in.dim(-1) >= 1, "{}: the last dimension of x is empty: {}", op,
                      x_in.shape());
  TESSERA_CHECK_DTYPE(is_floating(x_in.dtype()), "{}: x must be floating, got {}", op,
                      x_in.dtype());
  const Tensor x = row_layout(x_in.shape(), x_in.strides()) ? x_in : x_in.contiguous();
  const int64_t cols = x.dim(-1), rows = x.numel() / cols;
  Tensor y = empty(x.shape(), x.dtype());
  fwd(current_stream(),
      {y.raw_data(), x.raw_data(), x.dtype(), rows, cols, *row_layout(x.shape(), x.strides())});
  return record(op, {x}, y, [bwd, rows, cols, y = save(y)](const Tensor& dy_in, Grads& g) {
    const Tensor dy = dy_in.contiguous();
    kernels::Destination dx(g, 0);
    const GradDst& slot = dx.claim(
        [&](const Tensor& t) {
          return t.dtype() == y->dtype() && row_layout(t.shape(), t.strides());
        },
        y->dtype());
    bwd(current_stream(),
        {slot.view.raw_data(), dy.raw_data(), y->raw_data(), y->dtype(), slot.accumulate, rows,
         cols, *row_layout(slot.view.shape(), slot.view.strides())});
    dx.finish();
  });
}

}  // namespace

Tensor softmax(const Tensor& x) {
  return softmax_like("softmax", kernels::softmax_fwd, kernels::softmax_bwd, x);
}

Tensor log_softmax(const Tensor& x) {
  return softmax_like("log_softmax", kernels::log_softmax_fwd, kernels::log_softmax_bwd, x);
}

}  // namespace tessera
