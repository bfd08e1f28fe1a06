#include "kernels/norm/norm.h"

#include "core/autograd.h"
#include "kernels/destination.h"
#include "kernels/norm/kernel.h"

namespace tessera {
namespace kernels {

Cost NormFwd::cost() const {
  const int64_t size = static_cast<int64_t>(size_of(dtype)), numel = rows * cols;
  const int64_t stat_size = dtype == kF64 ? 8 : 4;
  const int64_t w_nbytes = cols * static_cast<int64_t>(size_of(w_dtype));
  Cost cost(static_cast<double>(numel) * (mean != nullptr ? 8 : 4));
  cost.read(x, x_rows.span_nbytes(rows, cols, dtype)).read(w, w_nbytes).read(b, w_nbytes);
  if (residual != nullptr) cost.read(residual, residual_rows.span_nbytes(rows, cols, dtype));
  cost.write(y, numel * size).write(sum, numel * size);
  return cost.write(mean, rows * stat_size).write(rstd, rows * stat_size);
}

Cost NormBwd::cost() const {
  const int64_t numel = rows * cols, nbytes = numel * static_cast<int64_t>(size_of(dtype));
  const int64_t stat_size = dtype == kF64 ? 8 : 4;
  const int64_t num_outputs = mean != nullptr ? 2 : 1;
  Cost cost(static_cast<double>(numel) * (mean != nullptr ? 14 : 12));
  cost.read(dy, nbytes).read(d_sum, nbytes).read(x, x_rows.span_nbytes(rows, cols, dtype));
  cost.read(w, cols * static_cast<int64_t>(size_of(w_dtype)));
  cost.read(mean, rows * stat_size).read(rstd, rows * stat_size);
  if (dx != nullptr) {
    cost.write_or_accumulate(dx, dx_rows.span_nbytes(rows, cols, dtype), accumulate_dx);
  }
  cost.write_or_accumulate(dw, cols * static_cast<int64_t>(size_of(dw_dtype)), accumulate_dw);
  cost.write_or_accumulate(db, cols * static_cast<int64_t>(size_of(db_dtype)), accumulate_db);
  return cost.write(partials, partial_rows() * num_outputs * cols * stat_size);
}

TESSERA_DEFINE_KERNEL(layer_norm_fwd, NormFwd);
TESSERA_DEFINE_KERNEL(rms_norm_fwd, NormFwd);
TESSERA_DEFINE_KERNEL(layer_norm_bwd, NormBwd);
TESSERA_DEFINE_KERNEL(rms_norm_bwd, NormBwd);

}  // namespace kernels

namespace {

using kernels::Destination;
using kernels::is_contiguous_float;
using kernels::NormBwd;
using kernels::NormFwd;
using kernels::row_layout;
using kernels::RowLayout;

DType stats_dtype(DType dtype) {
  return dtype == kF64 ? kF64 : kF32;
}

void check_inputs(const char* op, const Tensor& x, const Tensor& w, const Tensor& b) {
  TESSERA_CHECK_SHAPE(x.num_dims() >= 1, "{}: x must have at least one dimension, got {}", op,
                      x.shape());
  TESSERA_CHECK_SHAPE(x.dim(-1) >= 1, "{}: the last dimension of x is empty: {}", op, x.shape());
  TESSERA_CHECK_DTYPE(is_floating(x.dtype()), "{}: x must be floating, got {}", op, x.dtype());
  TESSERA_CHECK_EQ(w.shape(), Shape{x.dim(-1)}, "{}: w must be [C]", op);
  TESSERA_CHECK_DTYPE(w.dtype() == x.dtype() || w.dtype() == kF32,
                      "{}: w must have x's dtype ({}) or f32, got {}", op, x.dtype(), w.dtype());
  if (b.is_defined()) {
    TESSERA_CHECK_EQ(b.shape(), Shape{x.dim(-1)}, "{}: b must be [C]", op);
    TESSERA_CHECK_EQ(b.dtype(), w.dtype(), "{}: b must have w's dtype", op);
  }
}

/// Itself if its rows can be walked, else a copy.
Tensor with_rows(const Tensor& t) {
  return row_layout(t.shape(), t.strides()) ? t : t.contiguous();
}

struct NormForward {
  Tensor y, sum, mean, rstd;
};

NormForward forward(bool centered, const Tensor& x, const Tensor& residual, const Tensor& w,
                    const Tensor& b, float eps) {
  const int64_t cols = x.dim(-1), rows = x.numel() / cols;
  NormForward f;
  f.y = empty(x.shape(), x.dtype());
  f.rstd = empty({rows}, stats_dtype(x.dtype()));
  if (centered) f.mean = empty({rows}, stats_dtype(x.dtype()));
  if (residual.is_defined()) f.sum = empty(x.shape(), x.dtype());

  const auto data = [](const Tensor& t) { return t.is_defined() ? t.raw_data() : nullptr; };
  NormFwd a{};
  a.y = data(f.y), a.sum = data(f.sum), a.mean = data(f.mean), a.rstd = data(f.rstd);
  a.x = data(x), a.residual = data(residual), a.w = data(w), a.b = data(b);
  a.dtype = x.dtype(), a.w_dtype = w.dtype();
  a.rows = rows, a.cols = cols, a.eps = eps;
  a.x_rows = *row_layout(x.shape(), x.strides());
  if (residual.is_defined()) a.residual_rows = *row_layout(residual.shape(), residual.strides());
  if (centered) {
    kernels::layer_norm_fwd(current_stream(), a);
  } else {
    kernels::rms_norm_fwd(current_stream(), a);
  }
  return f;
}

struct NormSaved {
  bool centered;
  Saved x, w, mean, rstd;  // x: the normalized tensor (the sum in the fused ops)
};

void backward_kernel(const NormSaved& saved, const Tensor& dy, const Tensor& d_sum,
                     const GradDst& dx, const GradDst& dw, const GradDst& db) {
  const Tensor& x = saved.x;
  const int64_t cols = x.dim(-1), rows = x.numel() / cols;
  Tensor partials;
  if (dw || db) {
    partials = empty({NormBwd::num_chunks(rows, x.device().type), saved.centered ? 2 : 1, cols},
                     stats_dtype(x.dtype()));
  }
  const auto data = [](const Tensor& t) { return t.is_defined() ? t.raw_data() : nullptr; };
  NormBwd a{};
  a.dx = data(dx.view), a.dw = data(dw.view), a.db = data(db.view), a.partials = data(partials);
  a.dy = data(dy), a.d_sum = data(d_sum), a.x = data(x), a.w = data(saved.w);
  a.mean = saved.centered ? data(saved.mean) : nullptr, a.rstd = data(saved.rstd);
  a.dtype = x.dtype(), a.w_dtype = saved.w->dtype();
  a.dw_dtype = dw ? dw.view.dtype() : kF32, a.db_dtype = db ? db.view.dtype() : kF32;
  a.accumulate_dx = dx.accumulate, a.accumulate_dw = dw.accumulate;
  a.accumulate_db = db.accumulate;
  a.rows = rows, a.cols = cols;
  a.num_partials = partials.is_defined() ? partials.dim(0) : 0;
  a.x_rows = *row_layout(x.shape(), x.strides());
  if (dx) a.dx_rows = *row_layout(dx.view.shape(), dx.view.strides());
  if (saved.centered) {
    kernels::layer_norm_bwd(current_stream(), a);
  } else {
    kernels::rms_norm_bwd(current_stream(), a);
  }
}

Tensor norm(const char* op, bool centered, const Tensor& x_in, const Tensor& w_in,
            const Tensor& b_in, float eps) {
  check_inputs(op, x_in, w_in, b_in);
  const Tensor x = with_rows(x_in), w = w_in.contiguous();
  const Tensor b = b_in.is_defined() ? b_in.contiguous() : b_in;
  NormForward f = forward(centered, x, {}, w, b, eps);
  NormSaved saved{centered, save(x), save(w), save(f.mean), save(f.rstd)};
  return record(op, {x, w, b}, f.y, [saved = std::move(saved)](const Tensor& dy_in, Grads& g) {
    const Tensor dy = dy_in.contiguous();
    const Tensor &x = saved.x, &w = saved.w;
    Destination dx(g, 0), dw(g, 1), db(g, 2);
    const auto rows_of_x = [&](const Tensor& t) {
      return t.dtype() == x.dtype() && row_layout(t.shape(), t.strides());
    };
    const GradDst& dx_slot = dx.claim(rows_of_x, x.dtype());
    const GradDst& dw_slot = dw.claim(is_contiguous_float, w.dtype());
    const GradDst& db_slot = db.claim(is_contiguous_float, w.dtype());
    backward_kernel(saved, dy, {}, dx_slot, dw_slot, db_slot);
    dx.finish(), dw.finish(), db.finish();
  });
}

ResidualNorm add_norm(const char* op, bool centered, const Tensor& x_in, const Tensor& residual_in,
                      const Tensor& w_in, const Tensor& b_in, float eps) {
  check_inputs(op, x_in, w_in, b_in);
  TESSERA_CHECK_EQ(residual_in.shape(), x_in.shape(), "{}: residual must have x's shape", op);
  TESSERA_CHECK_EQ(residual_in.dtype(), x_in.dtype(), "{}: residual must have x's dtype", op);
  const Tensor x = with_rows(x_in), residual = with_rows(residual_in), w = w_in.contiguous();
  const Tensor b = b_in.is_defined() ? b_in.contiguous() : b_in;
  NormForward f = forward(centered, x, residual, w, b, eps);
  NormSaved saved{centered, save(f.sum), save(w), save(f.mean), save(f.rstd)};
  std::vector<Tensor> outputs =
      record_multi(op, {x, residual, w, b}, {f.y, f.sum},
                   [saved = std::move(saved)](std::span<const Tensor> dys, Grads& g) {
                     if (!dys[0].is_defined()) {  // nobody used y: an addition
                       if (dys[1].is_defined()) g.add(0, dys[1]), g.add(1, dys[1]);
                       return;
                     }
                     const Tensor dy = dys[0].contiguous();
                     const Tensor d_sum = dys[1].is_defined() ? dys[1].contiguous() : Tensor{};
                     GradDst dx;
                     if (g.wanted(0) || g.wanted(1))
                       dx.view = empty(saved.x->shape(), saved.x->dtype());
                     Destination dw(g, 2), db(g, 3);
                     const GradDst& dw_slot = dw.claim(is_contiguous_float, saved.w->dtype());
                     const GradDst& db_slot = db.claim(is_contiguous_float, saved.w->dtype());
                     backward_kernel(saved, dy, d_sum, dx, dw_slot, db_slot);
                     if (dx) g.add(0, dx.view), g.add(1, dx.view);
                     dw.finish(), db.finish();
                   });
  return {outputs[0], outputs[1]};
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& w, const Tensor& b, float eps) {
  return norm("layer_norm", true, x, w, b, eps);
}

Tensor rms_norm(const Tensor& x, const Tensor& w, float eps) {
  return norm("rms_norm", false, x, w, {}, eps);
}

ResidualNorm add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& w,
                            const Tensor& b, float eps) {
  return add_norm("add_layer_norm", true, x, residual, w, b, eps);
}

ResidualNorm add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& w, float eps) {
  return add_norm("add_rms_norm", false, x, residual, w, {}, eps);
}

}  // namespace tessera
