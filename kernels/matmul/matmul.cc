#include "kernels/matmul/matmul.h"

#include <optional>

#include "core/autograd.h"
#include "core/runtime/allocator.h"
#include "core/runtime/context.h"
#include "kernels/matmul/backend.h"
#include "kernels/matmul/cpu/few_rows.h"
#include "kernels/matmul/cuda/matmul.h"
#include "kernels/matmul/kernel.h"

namespace tessera {
namespace {

template <class T>
void set_backend(T Backends::*member, T value) {
  Context& context = *Context::current();
  Backends backends = context.options().backends;
  backends.*member = value;
  context.set_backends(backends);
}

}  // namespace

void set_gemm_backend(GemmBackend backend) {
  set_backend(&Backends::gemm, backend);
}
GemmBackend gemm_backend() {
  return Context::current()->options().backends.gemm;
}
void set_gemm_tf32(bool is_allowed) {
  set_backend(&Backends::gemm_tf32, is_allowed);
}
bool gemm_tf32() {
  return Context::current()->options().backends.gemm_tf32;
}

namespace kernels {
namespace {

int64_t matrix_nbytes(int64_t rows, int64_t cols, int64_t ld, int64_t num_batches,
                      int64_t batch_stride, DType dtype) {
  if (rows == 0 || cols == 0 || num_batches == 0) return 0;
  const int64_t last = (rows - 1) * ld + (num_batches - 1) * batch_stride + cols;
  return last * static_cast<int64_t>(size_of(dtype));
}

}  // namespace

/// 2 m n k floating-point operations; what is added to the product is not counted.
Cost Matmul::cost() const {
  const int64_t a_rows = trans_a ? k : m, a_cols = trans_a ? m : k;
  const int64_t b_rows = trans_b ? n : k, b_cols = trans_b ? k : n;
  const int64_t nbytes_c = matrix_nbytes(m, n, ldc, num_batches, batch_stride_c, c_dtype);
  Cost cost(2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) *
            static_cast<double>(num_batches));
  cost.read(a, matrix_nbytes(a_rows, a_cols, lda, num_batches, batch_stride_a, dtype))
      .read(b, matrix_nbytes(b_rows, b_cols, ldb, num_batches, batch_stride_b, dtype))
      .read(bias, n * static_cast<int64_t>(size_of(bias_dtype)))
      .read(residual, matrix_nbytes(m, n, ld_residual, 1, 0, c_dtype))
      .write(pre_activation, matrix_nbytes(m, n, n, 1, 0, c_dtype))
      .write(row_sums, m * static_cast<int64_t>(size_of(c_dtype)))
      .write(workspace, workspace_nbytes)
      .write_or_accumulate(c, nbytes_c, accumulate);
  return cost;
}

Cost BiasGrad::cost() const {
  const int64_t sum_nbytes = dtype == kF64 ? 8 : 4;
  Cost cost(static_cast<double>(rows) * static_cast<double>(n));
  cost.read(dy, matrix_nbytes(rows, n, ld_dy, 1, 0, dtype))
      .write(partials, num_chunks(rows) * n * sum_nbytes)
      .write_or_accumulate(db, n * static_cast<int64_t>(size_of(db_dtype)), accumulate);
  return cost;
}

void matmul(const Stream& s, const Matmul& p) {
  Matmul a = p;
  Tensor workspace;  // given back at once: the stream's next task comes after this product
  TESSERA_IF_CUDA(if (s.device().type == DeviceType::kCuda) {
    const MemoryScope scope(MemoryClass::kOther);
    const StreamGuard guard(s);
    a.workspace_nbytes = cuda::matmul_workspace_nbytes(p);
    if (a.workspace_nbytes > 0) workspace = empty({a.workspace_nbytes}, DType::kU8);
    if (workspace.is_defined()) a.workspace = workspace.raw_data();
  })
  if (s.is_observed()) s.declare("matmul", a.cost());
  switch (s.device().type) {
    case DeviceType::kCpu:
      s.submit("matmul", [a] { cpu::matmul(a); });
      return;
    case DeviceType::kCuda:
      TESSERA_IF_CUDA(const CudaTask task(s, "matmul"); cuda::matmul(s.cuda(), a); return;)
      break;
  }
  TESSERA_UNIMPLEMENTED("matmul: no kernel for device {}", s.device());
}

bool fuses_row_sums(const Stream& s, const Matmul& p) {
  TESSERA_IF_CUDA(if (s.device().type == DeviceType::kCuda) return cuda::matmul_fuses_row_sums(p);)
  static_cast<void>(s), static_cast<void>(p);
  return false;
}

TESSERA_DEFINE_KERNEL(bias_grad, BiasGrad);

}  // namespace kernels

namespace {

thread_local bool has_few_rows = false;

}  // namespace

FewRows::FewRows() : was_active_(has_few_rows) {
  has_few_rows = true;
}
FewRows::~FewRows() {
  has_few_rows = was_active_;
}
bool FewRows::is_active() {
  return has_few_rows;
}

namespace {

using kernels::BiasGrad;
using kernels::Matmul;

/// Matrices as they lie in memory, with their tensor. `trans`: stored with rows and columns
/// exchanged.
struct Matrices {
  Tensor tensor;
  bool trans = false;
  int64_t rows = 0, cols = 0, ld = 0;  // rows and cols as seen, ld between stored rows
  int64_t num_batches = 1, batch_stride = 0;
};

/// The leading dimensions of t but its last two as one evenly spaced one.
bool merge_batches(const Tensor& t, Matrices& m) {
  m.num_batches = 1;
  m.batch_stride = 0;
  for (int i = t.num_dims() - 3; i >= 0; --i) {
    if (t.shape()[i] == 1) continue;
    if (m.num_batches == 1) {
      m.batch_stride = t.strides()[i];
    } else if (t.strides()[i] != m.num_batches * m.batch_stride) {
      return false;
    }
    m.num_batches *= t.shape()[i];
  }
  return true;
}

/// The last two dimensions as matrices, where they lie; nothing if a copy is needed.
std::optional<Matrices> matrices_in_place(const Tensor& t) {
  Matrices m{.tensor = t, .rows = t.dim(-2), .cols = t.dim(-1)};
  if (!merge_batches(t, m)) return std::nullopt;
  const int last = t.num_dims() - 1;
  const int64_t row_stride = t.strides()[last - 1], col_stride = t.strides()[last];
  if ((col_stride == 1 || m.cols <= 1) && (row_stride >= m.cols || m.rows <= 1)) {
    m.ld = m.rows <= 1 ? std::max<int64_t>(m.cols, 1) : row_stride;
    return m;
  }
  if ((row_stride == 1 || m.rows <= 1) && (col_stride >= m.rows || m.cols <= 1)) {
    m.trans = true;
    m.ld = m.cols <= 1 ? std::max<int64_t>(m.rows, 1) : col_stride;
    return m;
  }
  return std::nullopt;
}

Matrices matrices(const Tensor& t) {
  if (auto m = matrices_in_place(t)) return *m;
  return *matrices_in_place(t.contiguous());
}

/// All leading dimensions as rows of one matrix.
Matrices as_rows(const Tensor& t) {
  const Tensor rows = t.is_row_strided() ? t : t.contiguous();
  const int64_t cols = t.dim(-1);
  const int64_t ld = std::max<int64_t>(rows.numel() == 0 ? cols : rows.row_stride(), 1);
  return {.tensor = rows,
          .rows = cols == 0 ? t.shape().with(-1, 1).numel() : t.numel() / cols,
          .cols = cols,
          .ld = ld};
}

Matrices transposed(Matrices m) {
  m.trans = !m.trans;
  std::swap(m.rows, m.cols);
  return m;
}

/// The product of a and b into c; the caller adds what an epilogue needs.
Matmul product(const Matrices& c, const Matrices& a, const Matrices& b) {
  return {.c = c.tensor.raw_data(),
          .a = a.tensor.raw_data(),
          .b = b.tensor.raw_data(),
          .dtype = a.tensor.dtype(),
          .c_dtype = c.tensor.dtype(),
          .trans_a = a.trans,
          .trans_b = b.trans,
          .m = a.rows,
          .n = b.cols,
          .k = a.cols,
          .lda = a.ld,
          .ldb = b.ld,
          .ldc = c.ld,
          .num_batches = a.num_batches,
          .batch_stride_a = a.batch_stride,
          .batch_stride_b = b.batch_stride,
          .batch_stride_c = c.batch_stride};
}

/// Writes the gradient a b of input i into its destination, directly if the kernel can.
/// `flat`: the gradient's leading dimensions are rows of one matrix.
void write_gradient(Grads& g, int i, const Matrices& a, const Matrices& b, bool flat) {
  if (!g.wanted(i)) return;
  const GradDst dst = g.destination(i);
  const DType dtype = a.tensor.dtype(), dst_dtype = dst.view.dtype();
  const bool has_dtype = dst_dtype == dtype || (dst_dtype == kF32 && dtype != kF64);
  std::optional<Matrices> c;
  if (has_dtype && flat && dst.view.is_row_strided()) c = as_rows(dst.view);
  if (has_dtype && !flat) c = matrices_in_place(dst.view);
  if (c && !c->trans) {
    Matmul args = product(*c, a, b);
    args.accumulate = dst.accumulate;
    kernels::matmul(current_stream(), args);
  } else {
    Tensor whole = empty(dst.view.shape(), dtype == kF64 ? kF64 : kF32), view = dst.view;
    kernels::matmul(current_stream(), product(flat ? as_rows(whole) : matrices(whole), a, b));
    dst.accumulate ? view.add_(whole) : view.copy_(whole);
  }
  g.written(i);
}

void write_bias_gradient(Grads& g, int i, const Matrices& dy) {
  if (!g.wanted(i)) return;
  const GradDst dst = g.destination(i);
  const DType dtype = dy.tensor.dtype();
  const Tensor partials =
      empty({BiasGrad::num_chunks(dy.rows), dy.cols}, dtype == kF64 ? kF64 : kF32);
  kernels::bias_grad(current_stream(),
                     {dst.view.raw_data(), partials.raw_data(), dy.tensor.raw_data(),
                      dst.view.dtype(), dtype, dy.rows, dy.cols, dy.ld, dst.accumulate});
  g.written(i);
}

void check_linear(const char* op, const Tensor& x, const Tensor& w, const Tensor& bias) {
  TESSERA_CHECK_SHAPE(x.num_dims() >= 1 && w.num_dims() == 2 && w.dim(1) == x.dim(-1),
                      "{}: w must be [N, K] with K = {} of x, got x {} and w {}", op,
                      x.num_dims() == 0 ? 0 : x.dim(-1), x.shape(), w.shape());
  TESSERA_CHECK_DTYPE(is_floating(x.dtype()) && w.dtype() == x.dtype(),
                      "{}: x and w must have the same floating dtype, got {} and {}", op, x.dtype(),
                      w.dtype());
  if (!bias.is_defined()) return;
  TESSERA_CHECK_EQ(bias.shape(), Shape{w.dim(0)}, "{}: bias must be [N]", op);
  TESSERA_CHECK_DTYPE(bias.dtype() == x.dtype() || (bias.dtype() == kF32 && x.dtype() != kF64),
                      "{}: bias must have x's dtype {} or f32, got {}", op, x.dtype(),
                      bias.dtype());
}

/// y = x w^T + bias, not yet submitted.
Matmul linear_args(const Matrices& y, const Matrices& x, const Matrices& w, const Tensor& bias) {
  Matmul args = product(y, x, transposed(w));
  if (bias.is_defined()) {
    args.bias = bias.raw_data();
    args.bias_dtype = bias.dtype();
  }
  return args;
}

/// Submits what `linear_args` made.
void submit_linear(const Matmul& args) {
  const Stream& s = current_stream();
  const bool few = FewRows::is_active() && kernels::takes_few_rows(s, args);
  few ? kernels::matmul_few_rows(s, args) : kernels::matmul(s, args);
}

/// dw and dbias in one product, where that is offered and both are to be written, not added to.
bool write_fused_gradients(Grads& g, const Matrices& dy, const Matrices& x) {
  if (!g.wanted(1) || !g.wanted(2)) return false;
  const GradDst dw = g.destination(1), db = g.destination(2);
  const DType dtype = dw.view.dtype();
  if (db.view.dtype() != dtype || db.accumulate || !db.view.is_contiguous()) return false;
  if (!dw.view.is_row_strided()) return false;
  if (dtype != x.tensor.dtype() && dtype != kF32) return false;
  Matmul args = product(as_rows(dw.view), transposed(dy), x);
  args.accumulate = dw.accumulate;
  args.row_sums = db.view.raw_data();
  if (!kernels::fuses_row_sums(current_stream(), args)) return false;
  kernels::matmul(current_stream(), args);
  g.written(1);
  g.written(2);
  return true;
}

/// What backward needs of x: nothing beside a frozen w.
Saved save_input(const Tensor& x, const Tensor& w) {
  return save(w.requires_grad() ? x : Tensor{});
}

/// Gradients of inputs x (0), w (1) and bias (2) for dy; x as `save_input` has it.
void linear_backward(Grads& g, const Tensor& dy, const Tensor& x, const Tensor& w) {
  const Matrices dy_rows = as_rows(dy);
  write_gradient(g, 0, dy_rows, as_rows(w), true);
  if (!g.wanted(1)) return write_bias_gradient(g, 2, dy_rows);
  if (current_stream().device().type == DeviceType::kCuda &&
      write_fused_gradients(g, dy_rows, as_rows(x))) {
    return;
  }
  write_gradient(g, 1, transposed(dy_rows), as_rows(x), true);
  write_bias_gradient(g, 2, dy_rows);
}

kernels::Activation activation_of(Gelu kind) {
  return kind == Gelu::kTanh ? kernels::Activation::kGeluTanh : kernels::Activation::kGeluExact;
}

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
  TESSERA_CHECK_SHAPE(a.num_dims() >= 2 && b.num_dims() >= 2,
                      "matmul: a and b must have at least two dimensions, got {} and {}", a.shape(),
                      b.shape());
  TESSERA_CHECK_DTYPE(is_floating(a.dtype()) && a.dtype() == b.dtype(),
                      "matmul: a and b must have the same floating dtype, got {} and {}", a.dtype(),
                      b.dtype());
  TESSERA_CHECK_SHAPE(a.dim(-1) == b.dim(-2),
                      "matmul: the columns of a must be the rows of b, got {} and {}", a.shape(),
                      b.shape());
  const bool flat = b.num_dims() == 2 && a.num_dims() > 2;  // one b for all of a's rows
  if (!flat) {
    const auto leading = [](const Tensor& t) { return t.shape().with(-1, 1).with(-2, 1); };
    TESSERA_CHECK_SHAPE(leading(a) == leading(b),
                        "matmul: a and b must have the same leading dimensions, got {} and {}",
                        a.shape(), b.shape());
  }
  Tensor y = empty(a.shape().with(-1, b.dim(-1)), a.dtype());
  const auto view = [flat](const Tensor& t) { return flat ? as_rows(t) : matrices(t); };
  kernels::matmul(current_stream(), product(view(y), view(a), matrices(b)));
  return record("matmul", {a, b}, y, [a = save(a), b = save(b), flat](const Tensor& dy, Grads& g) {
    const auto view = [flat](const Tensor& t) { return flat ? as_rows(t) : matrices(t); };
    write_gradient(g, 0, view(dy), transposed(matrices(b)), flat);
    write_gradient(g, 1, transposed(view(a)), view(dy), false);
  });
}

Tensor linear(const Tensor& x, const Tensor& w, const Tensor& bias) {
  check_linear("linear", x, w, bias);
  Tensor y = empty(x.shape().with(-1, w.dim(0)), x.dtype());
  submit_linear(linear_args(as_rows(y), as_rows(x), as_rows(w), bias));
  return record("linear", {x, w, bias}, y,
                [x = save_input(x, w), w = save(w)](const Tensor& dy, Grads& g) {
                  linear_backward(g, dy, x, w);
                });
}

Tensor linear_gelu(const Tensor& x, const Tensor& w, const Tensor& bias, Gelu kind) {
  check_linear("linear_gelu", x, w, bias);
  const Shape shape = x.shape().with(-1, w.dim(0));
  Tensor y = empty(shape, x.dtype());
  Tensor pre = needs_grad({x, w, bias}) ? empty(shape, x.dtype()) : Tensor{};
  Matmul args = linear_args(as_rows(y), as_rows(x), as_rows(w), bias);
  args.activate = true;
  args.activation = activation_of(kind);
  args.pre_activation = pre.is_defined() ? pre.raw_data() : nullptr;
  submit_linear(args);
  return record(
      "linear_gelu", {x, w, bias}, y,
      [x = save_input(x, w), w = save(w), pre = save(pre), kind](const Tensor& dy, Grads& g) {
        const Tensor ds = empty(pre->shape(), pre->dtype());
        const Matrices dy_rows = as_rows(dy);
        kernels::activation_bwd(current_stream(),
                                {ds.raw_data(), dy_rows.tensor.raw_data(), pre->raw_data(),
                                 ds.dtype(), ds.dtype(), activation_of(kind), dy_rows.rows,
                                 dy_rows.cols, dy_rows.cols, dy_rows.ld, dy_rows.cols});
        linear_backward(g, ds, x, w);
      });
}

Tensor linear_residual(const Tensor& x, const Tensor& w, const Tensor& bias,
                       const Tensor& residual) {
  check_linear("linear_residual", x, w, bias);
  Tensor y = empty(x.shape().with(-1, w.dim(0)), x.dtype());
  TESSERA_CHECK_EQ(residual.shape(), y.shape(),
                   "linear_residual: residual must have the result's shape");
  TESSERA_CHECK_EQ(residual.dtype(), y.dtype(),
                   "linear_residual: residual must have the dtype of x");
  const Matrices residual_rows = as_rows(residual);
  Matmul args = linear_args(as_rows(y), as_rows(x), as_rows(w), bias);
  args.residual = residual_rows.tensor.raw_data();
  args.ld_residual = residual_rows.ld;
  submit_linear(args);
  return record("linear_residual", {x, w, bias, residual}, y,
                [x = save_input(x, w), w = save(w)](const Tensor& dy, Grads& g) {
                  linear_backward(g, dy, x, w);
                  g.add(3, dy);
                });
}

}  // namespace tessera
