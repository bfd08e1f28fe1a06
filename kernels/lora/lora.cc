#include "kernels/lora/lora.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "core/autograd.h"
#include "kernels/destination.h"
#include "kernels/elementwise/kernel.h"
#include "kernels/matmul/kernel.h"
#include "kernels/random/random.h"

namespace tessera {
namespace {

using kernels::Destination;

Tensor row_strided(const Tensor& t) {
  return t.is_row_strided() ? t : t.contiguous();
}

/// All leading dimensions of a row-strided tensor as rows of one matrix, or a part of it.
class Matrix {
 public:
  explicit Matrix(const Tensor& t)
      : tensor_(t),
        rows_(t.numel() / std::max<int64_t>(1, t.dim(-1))),
        cols_(t.dim(-1)),
        ld_(std::max<int64_t>(1, t.numel() == 0 ? cols_ : t.row_stride())) {}

  Matrix row_range(int64_t first, int64_t count) const {
    Matrix part = *this;
    part.offset_ += first * ld_, part.rows_ = count;
    return part;
  }
  Matrix col_range(int64_t first, int64_t count) const {
    Matrix part = *this;
    part.offset_ += first, part.cols_ = count;
    return part;
  }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t ld() const { return ld_; }
  DType dtype() const { return tensor_.dtype(); }
  void* data() const {
    return static_cast<char*>(tensor_.raw_data()) +
           offset_ * static_cast<int64_t>(size_of(dtype()));
  }

 private:
  Tensor tensor_;
  int64_t offset_ = 0, rows_, cols_, ld_;
};

/// An operand as it is stored, or with rows and columns exchanged.
struct Operand {
  const Matrix& matrix;
  bool is_transposed = false;
};
Operand transposed(const Matrix& m) {
  return {m, true};
}

/// c = a b, or c += a b.
void product(const Matrix& c, bool accumulate, Operand a, Operand b) {
  if (c.rows() == 0 || c.cols() == 0) return;
  kernels::matmul(current_stream(), {.c = c.data(),
                                     .a = a.matrix.data(),
                                     .b = b.matrix.data(),
                                     .dtype = a.matrix.dtype(),
                                     .c_dtype = c.dtype(),
                                     .trans_a = a.is_transposed,
                                     .trans_b = b.is_transposed,
                                     .accumulate = accumulate,
                                     .m = c.rows(),
                                     .n = c.cols(),
                                     .k = a.is_transposed ? a.matrix.rows() : a.matrix.cols(),
                                     .lda = a.matrix.ld(),
                                     .ldb = b.matrix.ld(),
                                     .ldc = c.ld()});
}

/// What products of operands of a dtype are summed in.
DType sum_dtype(DType dtype) {
  return dtype == kF64 ? kF64 : kF32;
}

/// factor * t, of dtype `dtype`, with one rounding: in place if t has that dtype.
Tensor scaled(const Tensor& t, double factor, DType dtype) {
  if (t.dtype() == dtype && factor == 1) return t;
  const Tensor y = t.dtype() == dtype ? t : empty(t.shape(), dtype);
  if (t.numel() == 0) return y;
  kernels::scale(current_stream(), {.dst = y.raw_data(),
                                    .x = t.raw_data(),
                                    .dst_dtype = dtype,
                                    .dtype = t.dtype(),
                                    .factor = factor,
                                    .rows = 1,
                                    .cols = t.numel(),
                                    .dst_stride = t.numel(),
                                    .x_stride = t.numel()});
  return y;
}

/// The adapters of one layer.
struct Adapters {
  std::vector<LoraColumns> columns;
  int64_t rank;
  double scale;

  int64_t width() const { return rank * static_cast<int64_t>(columns.size()); }
  /// Calls f(columns of y, columns of h, rows of b) for each.
  template <class F>
  void for_each(F&& f) const {
    int64_t first_h = 0, first_b = 0;
    for (const LoraColumns& c : columns) {
      f(c, LoraColumns{first_h, rank}, LoraColumns{first_b, c.count});
      first_h += rank;
      first_b += c.count;
    }
  }

  /// y[:, c] += h_p b_p^T.
  void expand(const Matrix& y, const Matrix& h, const Matrix& b) const {
    for_each([&](LoraColumns cy, LoraColumns ch, LoraColumns rb) {
      const Matrix h_p = h.col_range(ch.first, ch.count), b_p = b.row_range(rb.first, rb.count);
      product(y.col_range(cy.first, cy.count), true, {h_p}, transposed(b_p));
    });
  }
  /// scale dy[:, c] b_p for each, next to each other.
  Tensor reduce(const Tensor& dy, const Matrix& b) const {
    const Tensor dh = empty(dy.shape().with(-1, width()), sum_dtype(dy.dtype()));
    const Matrix whole(dh), dy_rows(dy);
    for_each([&](LoraColumns cy, LoraColumns ch, LoraColumns rb) {
      const Matrix dy_p = dy_rows.col_range(cy.first, cy.count);
      const Matrix b_p = b.row_range(rb.first, rb.count);
      product(whole.col_range(ch.first, ch.count), false, {dy_p}, {b_p});
    });
    return scaled(dh, scale, dy.dtype());
  }
  /// db_p = dy[:, c]^T h_p.
  void expand_backward(const GradDst& db, const Matrix& dy, const Matrix& h) const {
    const Matrix db_rows(db.view);
    for_each([&](LoraColumns cy, LoraColumns ch, LoraColumns rb) {
      const Matrix dy_p = dy.col_range(cy.first, cy.count), h_p = h.col_range(ch.first, ch.count);
      product(db_rows.row_range(rb.first, rb.count), db.accumulate, transposed(dy_p), {h_p});
    });
  }
};

void check(const Tensor& y, const Tensor& x, const Tensor& a, const Tensor& b,
           const Adapters& adapters, double dropout) {
  TESSERA_CHECK_DTYPE(is_floating(y.dtype()) && x.dtype() == y.dtype() && a.dtype() == y.dtype() &&
                          b.dtype() == y.dtype(),
                      "lora_add_: y, x, a and b must have the same floating dtype, got {}, {}, {} "
                      "and {}",
                      y.dtype(), x.dtype(), a.dtype(), b.dtype());
  TESSERA_CHECK_SHAPE(
      x.num_dims() >= 1 && y.num_dims() == x.num_dims() &&
          y.shape().with(-1, 1) == x.shape().with(-1, 1) && y.is_row_strided(),
      "lora_add_: y [..., N] must be row-strided and have the leading dimensions of "
      "x [..., K], got {} and {}",
      y.shape(), x.shape());
  int64_t end = 0, count = 0;
  for (const LoraColumns& c : adapters.columns) {
    TESSERA_CHECK_SHAPE(
        c.first >= end && c.count > 0 && c.first + c.count <= y.dim(-1),
        "lora_add_: columns [{}, {}) after [..., {}), expected some in order of the "
        "{} of y",
        c.first, c.first + c.count, end, y.dim(-1));
    end = c.first + c.count;
    count += c.count;
  }
  TESSERA_CHECK_SHAPE(adapters.rank > 0 && a.shape() == Shape({adapters.width(), x.dim(-1)}) &&
                          b.shape() == Shape({count, adapters.rank}) && a.is_row_strided() &&
                          b.is_row_strided(),
                      "lora_add_: of {} adapters of rank {} a must be [{}, {}] and b [{}, {}], got "
                      "{} and {}",
                      adapters.columns.size(), adapters.rank, adapters.width(), x.dim(-1), count,
                      adapters.rank, a.shape(), b.shape());
  TESSERA_CHECK(dropout >= 0 && dropout < 1, "lora_add_: dropout must be in [0, 1), got {}",
                dropout);
}

}  // namespace

Tensor lora_add_(const Tensor& y, const Tensor& x, const Tensor& a, const Tensor& b,
                 std::span<const LoraColumns> columns, const LoraAddOptions& options) {
  const Adapters adapters{{columns.begin(), columns.end()}, options.rank, options.scale};
  check(y, x, a, b, adapters, options.dropout);
  const DType dtype = y.dtype();
  const Tensor input = row_strided(x);
  std::optional<DropoutMask> mask;
  if (options.dropout > 0) mask = draw_dropout_mask(input, options.dropout);
  /// What the adapters read: again in backward, to the same bits.
  const auto dropped = [mask](const Tensor& t) {
    if (!mask) return t;
    const Tensor out = empty(t.shape(), t.dtype());
    apply_dropout(*mask, out, false, t);
    return out;
  };
  Tensor h = empty(x.shape().with(-1, adapters.width()), sum_dtype(dtype));
  const Matrix b_rows(b);
  {
    const Tensor read = dropped(input);
    product(Matrix(h), false, {Matrix(read)}, transposed(Matrix(a)));
  }
  h = scaled(h, options.scale, dtype);
  adapters.expand(Matrix(y), Matrix(h), b_rows);
  ++*y.impl()->version;
  return record("lora_add_", {y, x, a, b}, y,
                [adapters, mask, dropped, x = save(input), a = save(a), b = save(b), h = save(h)](
                    const Tensor& dy, Grads& g) {
                  const Tensor dy_rows = row_strided(dy);
                  const DType dtype = dy.dtype();
                  const auto can_write = [dtype](const Tensor& view) {
                    return view.is_row_strided() &&
                           (view.dtype() == dtype || view.dtype() == sum_dtype(dtype));
                  };
                  g.add(0, dy);
                  if (g.wanted(3)) {
                    Destination destination(g, 3);
                    const GradDst& db = destination.claim(can_write, sum_dtype(dtype));
                    adapters.expand_backward(db, Matrix(dy_rows), Matrix(h));
                    destination.finish();
                  }
                  if (!g.wanted(1) && !g.wanted(2)) return;
                  const Matrix dh(adapters.reduce(dy_rows, Matrix(b)));
                  if (g.wanted(2)) {
                    Destination destination(g, 2);
                    const GradDst& da = destination.claim(can_write, sum_dtype(dtype));
                    const Tensor read = dropped(x);
                    product(Matrix(da.view), da.accumulate, transposed(dh), {Matrix(read)});
                    destination.finish();
                  }
                  if (!g.wanted(1)) return;
                  Destination destination(g, 1);
                  const GradDst& dx = destination.claim(can_write, sum_dtype(dtype));
                  if (mask) {
                    const Tensor d = empty(x->shape(), dtype);
                    product(Matrix(d), false, {dh}, {Matrix(a)});
                    apply_dropout(*mask, dx.view, dx.accumulate, d);
                  } else {
                    product(Matrix(dx.view), dx.accumulate, {dh}, {Matrix(a)});
                  }
                  destination.finish();
                });
}

}  // namespace tessera
