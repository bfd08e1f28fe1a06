#include "core/runtime/cpu/math.h"
#include "kernels/elementwise/activation.h"
#include "kernels/elementwise/kernel.h"
#include "kernels/elementwise/row_io.h"

namespace tessera::kernels::cpu {

namespace {

template <class F>
void visit_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kRelu:
      return f(Relu{});
    case Activation::kSilu:
      return f(Silu{});
    case Activation::kGeluTanh:
      return f(GeluTanh{});
    case Activation::kGeluExact:
      return f(GeluExact{});
  }
}

template <class C>
void apply(BinaryOp op, C* __restrict out, const C* a, const C* b, int64_t count) {
  switch (op) {
    case BinaryOp::kAdd:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
      return;
    case BinaryOp::kSub:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) out[i] = a[i] - b[i];
      return;
    case BinaryOp::kMul:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) out[i] = a[i] * b[i];
      return;
  }
}

/// Offset of row `row` of the leading dimensions of `shape`.
int64_t row_offset(int64_t row, const Shape& shape, const Strides& strides) {
  int64_t offset = 0;
  for (int d = shape.num_dims() - 2; d >= 0; --d) {
    offset += row % shape[d] * strides[d];
    row /= shape[d];
  }
  return offset;
}

}  // namespace

void binary(const Binary& p) {
  const int last = p.shape.num_dims() - 1;
  const int64_t cols = p.shape[last], rows = cols == 0 ? 0 : p.shape.numel() / cols;
  const int64_t dst_stride = p.dst_strides[last], a_stride = p.a_strides[last],
                b_stride = p.b_strides[last];
  visit_compute_type(p.dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    for_pieces(rows, cols, [&](int64_t row, int64_t begin, int64_t end) {
      C a_buffer[kPieceCols], b_buffer[kPieceCols], out_buffer[kPieceCols];
      const int64_t count = end - begin;
      const int64_t a_at = row_offset(row, p.shape, p.a_strides) + begin * a_stride;
      const int64_t b_at = row_offset(row, p.shape, p.b_strides) + begin * b_stride;
      const int64_t dst_at = row_offset(row, p.shape, p.dst_strides) + begin * dst_stride;
      const C* a = load_piece(a_buffer, p.a, p.dtype, a_at, a_stride, count);
      const C* b = load_piece(b_buffer, p.b, p.dtype, b_at, b_stride, count);
      C* out = piece_target(out_buffer, p.dst, p.dst_dtype, dst_at, dst_stride, p.accumulate);
      apply(p.op, out, a, b, count);
      store_piece(p.dst, p.dst_dtype, dst_at, dst_stride, out, count, p.accumulate);
    });
  });
}

void scale(const Scale& p) {
  visit_compute_type(p.dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    const C factor = static_cast<C>(p.factor);
    for_pieces(p.rows, p.cols, [&](int64_t row, int64_t begin, int64_t end) {
      C x_buffer[kPieceCols], out_buffer[kPieceCols];
      const int64_t count = end - begin, dst_at = row * p.dst_stride + begin;
      const C* x = load_piece(x_buffer, p.x, p.dtype, row * p.x_stride + begin, 1, count);
      C* out = piece_target(out_buffer, p.dst, p.dst_dtype, dst_at, 1, p.accumulate);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) out[i] = factor * x[i];
      store_piece(p.dst, p.dst_dtype, dst_at, 1, out, count, p.accumulate);
    });
  });
}

void activation_fwd(const ActivationFwd& p) {
  visit_compute_type(p.dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    visit_activation(p.activation, [&](auto function) {
      using Function = decltype(function);
      for_pieces(p.rows, p.cols, [&](int64_t row, int64_t begin, int64_t end) {
        C x_buffer[kPieceCols], y_buffer[kPieceCols];
        const int64_t count = end - begin, y_at = row * p.cols + begin;
        const C* x = load_piece(x_buffer, p.x, p.dtype, row * p.x_stride + begin, 1, count);
        C* y = piece_target(y_buffer, p.y, p.dtype, y_at, 1, false);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) y[i] = Function::value(x[i]);
        store_piece(p.y, p.dtype, y_at, 1, y, count, false);
      });
    });
  });
}

void activation_bwd(const ActivationBwd& p) {
  visit_compute_type(p.dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    visit_activation(p.activation, [&](auto function) {
      using Function = decltype(function);
      for_pieces(p.rows, p.cols, [&](int64_t row, int64_t begin, int64_t end) {
        C x_buffer[kPieceCols], dy_buffer[kPieceCols], dx_buffer[kPieceCols];
        const int64_t count = end - begin, dx_at = row * p.dx_stride + begin;
        const C* x = load_piece(x_buffer, p.x, p.dtype, row * p.x_stride + begin, 1, count);
        const C* dy = load_piece(dy_buffer, p.dy, p.dtype, row * p.dy_stride + begin, 1, count);
        C* dx = piece_target(dx_buffer, p.dx, p.dx_dtype, dx_at, 1, p.accumulate);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) dx[i] = dy[i] * Function::derivative(x[i]);
        store_piece(p.dx, p.dx_dtype, dx_at, 1, dx, count, p.accumulate);
      });
    });
  });
}

void swiglu_fwd(const SwigluFwd& p) {
  visit_compute_type(p.dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    for_pieces(p.rows, p.cols, [&](int64_t row, int64_t begin, int64_t end) {
      C gate_buffer[kPieceCols], up_buffer[kPieceCols], y_buffer[kPieceCols];
      const int64_t count = end - begin, y_at = row * p.cols + begin;
      const C* gate =
          load_piece(gate_buffer, p.gate, p.dtype, row * p.gate_stride + begin, 1, count);
      const C* up = load_piece(up_buffer, p.up, p.dtype, row * p.up_stride + begin, 1, count);
      C* y = piece_target(y_buffer, p.y, p.dtype, y_at, 1, false);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) y[i] = Silu::value(gate[i]) * up[i];
      store_piece(p.y, p.dtype, y_at, 1, y, count, false);
    });
  });
}

void swiglu_bwd(const SwigluBwd& p) {
  visit_compute_type(p.dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    for_pieces(p.rows, p.cols, [&](int64_t row, int64_t begin, int64_t end) {
      C gate_buffer[kPieceCols], up_buffer[kPieceCols], dy_buffer[kPieceCols],
          dgate_buffer[kPieceCols], dup_buffer[kPieceCols];
      const int64_t count = end - begin;
      const C* gate =
          load_piece(gate_buffer, p.gate, p.dtype, row * p.gate_stride + begin, 1, count);
      const C* up = load_piece(up_buffer, p.up, p.dtype, row * p.up_stride + begin, 1, count);
      const C* dy = load_piece(dy_buffer, p.dy, p.dtype, row * p.dy_stride + begin, 1, count);
      // One pass for both: they share the sigmoid, which is most of the work.
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const Logistic<C> s(gate[i]);
        dgate_buffer[i] = dy[i] * up[i] * (s.value * (C(1) + gate[i] * s.complement));
        dup_buffer[i] = dy[i] * (gate[i] * s.value);
      }
      if (p.dgate != nullptr) {
        store_piece(p.dgate, p.dgate_dtype, row * p.dgate_stride + begin, 1, dgate_buffer, count,
                    p.accumulate_dgate);
      }
      if (p.dup != nullptr) {
        store_piece(p.dup, p.dup_dtype, row * p.dup_stride + begin, 1, dup_buffer, count,
                    p.accumulate_dup);
      }
    });
  });
}

}  // namespace tessera::kernels::cpu
