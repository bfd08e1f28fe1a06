#include "kernels/elementwise/row_io.h"
#include "kernels/pointwise/kernel.h"

namespace tessera::kernels::cpu {

namespace {

using tessera::cpu::kLanes;
using tessera::cpu::load_lanes;
using tessera::cpu::Vector;

/// Elementary functions of vectors.
template <class C>
struct Functions {
  using V = Vector<C>;

  static V exp(V x) {
    if constexpr (std::is_same_v<C, double>) return tessera::cpu::exp_lanes<C>(x);
    const V limit = tessera::cpu::broadcast(C(88.72283));
    const V y = tessera::cpu::exp_lanes<C>(tessera::cpu::min_of<C>(limit, x));
    return x > limit ? V{} + C(INFINITY) : y;
  }
  static V log(V x) { return tessera::cpu::log_lanes<C>(x); }
  static V sqrt(V x) { return tessera::cpu::sqrt_lanes<C>(x); }
  static V tanh(V x) { return tessera::cpu::tanh_lanes<C>(x); }
  static V abs(V x) { return tessera::cpu::abs_of<C>(x); }
  static V pow(V x, V exponent) {
    if (all_are(exponent, 1)) return x;
    if (all_are(exponent, 2)) return x * x;
    if (all_are(exponent, 3)) return x * x * x;
    for (int i = 0; i < kLanes<C>; ++i) x[i] = std::pow(x[i], exponent[i]);
    return x;
  }

 private:
  static bool all_are(V x, C value) {
    bool all = true;
    for (int i = 0; i < kLanes<C>; ++i) all = all && x[i] == value;
    return all;
  }
};

/// Element offset of row `row` of the leading dimensions of `shape`.
int64_t row_offset(int64_t row, const Shape& shape, const Strides& strides) {
  int64_t offset = 0;
  for (int d = shape.num_dims() - 2; d >= 0; --d) {
    offset += row % shape[d] * strides[d];
    row /= shape[d];
  }
  return offset;
}

/// Elements [begin, begin + count) of row `row` of an operand as C: in place or in `buffer`.
template <class C>
const C* load_operand(C* buffer, const Pointwise& p, size_t i, int64_t row, int64_t begin,
                      int64_t count) {
  const Pointwise::Operand& in = p.in[i];
  if (in.data == nullptr) {
    std::fill_n(buffer, count, static_cast<C>(in.number));
    return buffer;
  }
  const int64_t stride = in.strides.dim(-1);
  const int64_t at = row_offset(row, p.shape, in.strides) + begin * stride;
  if constexpr (std::is_floating_point_v<C>) {
    if (is_floating(in.dtype)) {
      return load_piece(buffer, in.data, in.dtype, at, stride, count);
    }
  }
  visit_dtype(in.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = static_cast<const T*>(in.data) + at;
    for (int64_t k = 0; k < count; ++k) buffer[k] = static_cast<C>(from[k * stride]);
  });
  return buffer;
}

template <class C, int kOperands>
void run(const Pointwise& p) {
  constexpr bool kIsInteger = std::is_same_v<C, int64_t>;
  const int64_t cols = p.shape.dim(-1), rows = cols == 0 ? 0 : p.shape.numel() / cols;
  const int64_t dst_stride = p.dst_strides.dim(-1);
  for_pieces(rows, cols, [&](int64_t row, int64_t begin, int64_t end) {
    C buffers[kOperands][kPieceCols], out_buffer[kPieceCols];
    const int64_t count = end - begin;
    const C* in[3] = {};
    for (size_t i = 0; i < kOperands; ++i) {
      in[i] = load_operand(buffers[i], p, i, row, begin, count);
    }
    const int64_t dst_at = row_offset(row, p.shape, p.dst_strides) + begin * dst_stride;
    C* out = piece_target(out_buffer, p.dst, p.dst_dtype, dst_at, dst_stride, p.accumulate);
    visit_pointwise<kOperands, kIsInteger>(p.op, [&](auto value) {
      tessera::cpu::for_lanes<C>(count, [&](int64_t k, auto lanes) {
        const Vector<C> a = load_lanes<C>(in[0] + k, lanes);
        Vector<C> b{}, c{};
        if constexpr (kOperands >= 2) b = load_lanes<C>(in[1] + k, lanes);
        if constexpr (kOperands >= 3) c = load_lanes<C>(in[2] + k, lanes);
        const auto y = decltype(value)::template of<Functions<C>, Vector<C>, C>(a, b, c, C(1));
        tessera::cpu::store_lanes<C>(out + k, y, lanes);
      });
    });
    if (p.dst_dtype == kU8) {
      uint8_t* dst = static_cast<uint8_t*>(p.dst) + dst_at;
      for (int64_t k = 0; k < count; ++k) dst[k * dst_stride] = out[k] != 0;
    } else if constexpr (!kIsInteger) {
      store_piece(p.dst, p.dst_dtype, dst_at, dst_stride, out, count, p.accumulate);
    }
  });
}

}  // namespace

void pointwise(const Pointwise& p) {
  const auto visit_operands = [&]<class C>(TypeTag<C>) {
    switch (num_operands(p.op)) {
      case 1:
        return run<C, 1>(p);
      case 2:
        return run<C, 2>(p);
      default:
        return run<C, 3>(p);
    }
  };
  const DType compute = p.compute_dtype();
  if (compute == kI64) return run<int64_t, 2>(p);
  compute == kF64 ? visit_operands(TypeTag<double>{}) : visit_operands(TypeTag<float>{});
}

}  // namespace tessera::kernels::cpu
