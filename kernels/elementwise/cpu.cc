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

}  // namespace

void scale(const Scale& p) {
  visit_float(p.dtype, "scale", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto factor = static_cast<ComputeType<T>>(p.factor);
    map_rows<T>(
        p.rows, p.cols, {p.dst, p.dst_dtype, p.dst_stride, p.accumulate},
        [=](Lanes<T> x) { return factor * x; }, RowsIn{p.x, p.x_stride});
  });
}

void activation_fwd(const ActivationFwd& p) {
  visit_float(p.dtype, "activation_fwd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    visit_activation(p.activation, [&](auto function) {
      using Function = decltype(function);
      map_rows<T>(
          p.rows, p.cols, {p.y, p.dtype, p.cols},
          [](Lanes<T> x) { return Function::template value<T>(x); }, RowsIn{p.x, p.x_stride});
    });
  });
}

void activation_bwd(const ActivationBwd& p) {
  visit_float(p.dtype, "activation_bwd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    visit_activation(p.activation, [&](auto function) {
      using Function = decltype(function);
      map_rows<T>(
          p.rows, p.cols, {p.dx, p.dx_dtype, p.dx_stride, p.accumulate},
          [](Lanes<T> x, Lanes<T> dy) { return dy * Function::template derivative<T>(x); },
          RowsIn{p.x, p.x_stride}, RowsIn{p.dy, p.dy_stride});
    });
  });
}

void swiglu_fwd(const SwigluFwd& p) {
  visit_float(p.dtype, "swiglu_fwd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    map_rows<T>(
        p.rows, p.cols, {p.y, p.dtype, p.cols},
        [](Lanes<T> gate, Lanes<T> up) { return Silu::value<T>(gate) * up; },
        RowsIn{p.gate, p.gate_stride}, RowsIn{p.up, p.up_stride});
  });
}

namespace {

/// One piece of gradients of T's compute type, or of T itself: they share the sigmoid.
template <class T, class D>
void swiglu_bwd_piece(D* dgate, D* dup, const T* dy, const T* gate, const T* up, int64_t count) {
  using C = ComputeType<T>;
  tessera::cpu::for_lanes<C>(count, [=](int64_t i, auto lanes) {
    const Lanes<T> g = tessera::cpu::load_lanes<C>(gate + i, lanes);
    const Lanes<T> d = tessera::cpu::load_lanes<C>(dy + i, lanes);
    const Lanes<T> u = tessera::cpu::load_lanes<C>(up + i, lanes);
    const Logistic<T> s(g * C(Logistic<T>::kUnit));
    const Lanes<T> scaled = d * s.value;
    tessera::cpu::store_lanes<C>(dgate + i, scaled * u * (C(1) + g * s.complement), lanes);
    tessera::cpu::store_lanes<C>(dup + i, scaled * g, lanes);
  });
}

}  // namespace

void swiglu_bwd(const SwigluBwd& p) {
  visit_float(p.dtype, "swiglu_bwd", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeType<T>;
    const bool direct = p.dgate != nullptr && p.dup != nullptr && p.dgate_dtype == p.dtype &&
                        p.dup_dtype == p.dtype && !p.accumulate_dgate && !p.accumulate_dup;
    for_pieces(p.rows, p.cols, [&](int64_t row, int64_t begin, int64_t end) {
      const int64_t count = end - begin, dgate_at = row * p.dgate_stride + begin,
                    dup_at = row * p.dup_stride + begin;
      const T* dy = static_cast<const T*>(p.dy) + row * p.dy_stride + begin;
      const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride + begin;
      const T* up = static_cast<const T*>(p.up) + row * p.up_stride + begin;
      if (direct) {
        return swiglu_bwd_piece(static_cast<T*>(p.dgate) + dgate_at,
                                static_cast<T*>(p.dup) + dup_at, dy, gate, up, count);
      }
      C dgate[kPieceCols], dup[kPieceCols];
      swiglu_bwd_piece(dgate, dup, dy, gate, up, count);
      if (p.dgate != nullptr) {
        store_piece(p.dgate, p.dgate_dtype, dgate_at, 1, dgate, count, p.accumulate_dgate);
      }
      if (p.dup != nullptr) {
        store_piece(p.dup, p.dup_dtype, dup_at, 1, dup, count, p.accumulate_dup);
      }
    });
  });
}

}  // namespace tessera::kernels::cpu
