#include "kernels/pointwise/pointwise.h"

#include <algorithm>
#include <cmath>

#include "core/autograd.h"
#include "core/elementary/kernel.h"
#include "kernels/pointwise/kernel.h"
#include "kernels/reduce/reduce.h"

namespace tessera {

namespace kernels {

namespace {

double flops_of(PointwiseOp op) {
#define TESSERA_POINTWISE_FLOPS(name, flops, value) \
  case PointwiseOp::k##name:                        \
    return flops;
  switch (op) {
    TESSERA_POINTWISE_OPS_OF_1(TESSERA_POINTWISE_FLOPS)
    TESSERA_POINTWISE_OPS_OF_2(TESSERA_POINTWISE_FLOPS)
    TESSERA_POINTWISE_OPS_OF_3(TESSERA_POINTWISE_FLOPS)
  }
#undef TESSERA_POINTWISE_FLOPS
  return 0;
}

}  // namespace

DType Pointwise::compute_dtype() const {
  DType compute = kF32;
  for (const Operand& x : in) {
    if (x.data == nullptr) continue;
    if (x.dtype == kF64) compute = kF64;
    if (x.dtype == kI32 || x.dtype == kI64) compute = kI64;
  }
  return compute;
}

Cost Pointwise::cost() const {
  Cost cost(static_cast<double>(shape.numel()) * (flops_of(op) + (accumulate ? 1 : 0)));
  for (const Operand& x : in) {
    if (x.data != nullptr) cost.read(x.data, span_nbytes(shape, x.strides, x.dtype));
  }
  return cost.write_or_accumulate(dst, span_nbytes(shape, dst_strides, dst_dtype), accumulate);
}

TESSERA_DEFINE_KERNEL(pointwise, Pointwise);

}  // namespace kernels

namespace {

using kernels::PointwiseOp;
using Operands = std::initializer_list<Operand>;

/// Strides of `x`, maybe a number, seen as `shape`, which it broadcasts to.
Strides broadcast_strides(const Tensor& x, const Shape& shape) {
  Strides strides = shape;
  const int missing = shape.num_dims() - (x.is_defined() ? x.num_dims() : 0);
  for (int d = 0; d < shape.num_dims(); ++d) {
    const bool repeated = d < missing || (x.shape()[d - missing] == 1 && shape[d] != 1);
    strides[d] = repeated ? 0 : x.strides()[d - missing];
  }
  return strides;
}

/// Drops dimensions of 1 and merges neighbours that all operands walk through evenly, so that
/// the kernel's rows are as long as possible.
void coalesce(kernels::Pointwise& p) {
  Strides* all[] = {&p.dst_strides, &p.in[0].strides, &p.in[1].strides, &p.in[2].strides};
  const Shape wide = p.shape;
  const Strides from[] = {*all[0], *all[1], *all[2], *all[3]};
  p.shape = {};
  for (Strides* strides : all) *strides = {};
  for (int d = 0; d < wide.num_dims(); ++d) {
    if (wide[d] == 1) continue;
    const int top = p.shape.num_dims() - 1;
    bool merges = top >= 0;
    for (size_t i = 0; i < 4; ++i) merges = merges && (*all[i])[top] == from[i][d] * wide[d];
    if (merges) {
      p.shape[top] *= wide[d];
      for (size_t i = 0; i < 4; ++i) (*all[i])[top] = from[i][d];
    } else {
      p.shape.push_back(wide[d]);
      for (size_t i = 0; i < 4; ++i) all[i]->push_back(from[i][d]);
    }
  }
  if (p.shape.num_dims() > 0) return;
  p.shape = {1};
  for (Strides* strides : all) *strides = {1};
}

void launch(PointwiseOp op, const Tensor& dst, bool accumulate, Operands in) {
  if (dst.numel() == 0) return;
  kernels::Pointwise p{.dst = dst.raw_data(),
                       .dst_dtype = dst.dtype(),
                       .op = op,
                       .shape = dst.shape(),
                       .dst_strides = dst.strides(),
                       .in = {},
                       .accumulate = accumulate};
  for (size_t i = 0; i < p.in.size(); ++i) {
    const Operand x = i < in.size() ? in.begin()[i] : 0;
    p.in[i].number = x.number();
    p.in[i].strides = broadcast_strides(x.tensor(), dst.shape());
    if (!x.tensor().is_defined()) continue;
    p.in[i].data = x.tensor().raw_data();
    p.in[i].dtype = x.tensor().dtype();
  }
  coalesce(p);
  kernels::pointwise(current_stream(), p);
}

Shape common_shape(const char* name, Operands in) {
  Shape shape;
  for (const Operand& x : in) {
    if (x.tensor().is_defined()) shape = broadcast_shapes(shape, x.tensor().shape(), name);
  }
  return shape;
}

/// The dtype of the tensors among the operands.
DType common_dtype(const char* name, Operands in, bool is_any_dtype) {
  const Tensor* first = nullptr;
  for (const Operand& x : in) {
    if (!x.tensor().is_defined()) continue;
    if (first == nullptr) first = &x.tensor();
    TESSERA_CHECK_DTYPE(is_any_dtype || is_floating(x.tensor().dtype()),
                        "{}: expected a floating dtype, got {}", name, x.tensor().dtype());
    TESSERA_CHECK_EQ(first->dtype(), x.tensor().dtype(), "{}: the operands must have one dtype",
                     name);
  }
  TESSERA_CHECK(first != nullptr, "{}: at least one operand must be a tensor, got numbers", name);
  return first->dtype();
}

Tensor apply(const char* name, PointwiseOp op, DType dtype, Operands in) {
  for (const Operand& x : in) {
    const Device device = Context::current()->device();
    TESSERA_CHECK(!x.tensor().is_defined() || x.tensor().device() == device,
                  "{}: expected an operand on {}, where this thread computes, got one on {}", name,
                  device, x.tensor().device());
  }
  const Tensor y = empty(common_shape(name, in), dtype);
  launch(op, y, false, in);
  return y;
}

/// The gradient of input i: op(in), summed over the dimensions that it was broadcast in.
void add_gradient(Grads& g, int i, PointwiseOp op, Operands in) {
  if (!g.wanted(i)) return;
  const Shape shape = common_shape("backward", in);
  const GradDst d = g.destination(i);
  if (d.view.shape() == shape) {
    launch(op, d.view, d.accumulate, in);
  } else {
    const bool is_wide = std::any_of(in.begin(), in.end(), [](const Operand& x) {
      return x.tensor().is_defined() && x.tensor().dtype() == kF64;
    });
    const Tensor products = empty(shape, is_wide ? kF64 : kF32);
    launch(op, products, false, in);
    sum_to(d.view, products, 1.0, d.accumulate);
  }
  g.written(i);
}

/// The gradient of input i of a sum: factor * dy, summed over the dimensions it was broadcast in.
void add_term_gradient(Grads& g, int i, const Shape& shape, const Tensor& dy, double factor) {
  if (!g.wanted(i)) return;
  if (shape == dy.shape() && factor == 1.0) return g.add(i, dy);
  if (shape == dy.shape()) return add_gradient(g, i, PointwiseOp::kMul, {dy, factor});
  const GradDst d = g.destination(i);
  sum_to(d.view, dy, factor, d.accumulate);
  g.written(i);
}

/// An operand that backward reads, or nothing if it does not.
class Kept {
 public:
  explicit Kept(const Operand& x, bool is_needed = true)
      : tensor_(save(is_needed ? x.tensor() : Tensor{})), number_(x.number()) {}

  operator Operand() const {
    return tensor_.get().is_defined() ? Operand(tensor_.get()) : Operand(number_);
  }

 private:
  Saved tensor_;
  double number_;
};

using BinaryBackward = void (*)(Grads& g, const Tensor& dy, const Operand& a, const Operand& b);

Tensor sum_or_difference(const char* name, PointwiseOp op, const Operand& a, const Operand& b,
                         double factor_b) {
  const DType dtype = common_dtype(name, {a, b}, false);
  const auto shape_of = [](const Operand& x) {
    return x.tensor().is_defined() ? x.tensor().shape() : Shape{};
  };
  return record(name, {a.tensor(), b.tensor()}, apply(name, op, dtype, {a, b}),
                [=, a_shape = shape_of(a), b_shape = shape_of(b)](const Tensor& dy, Grads& g) {
                  add_term_gradient(g, 0, a_shape, dy, 1.0);
                  add_term_gradient(g, 1, b_shape, dy, factor_b);
                });
}

/// `keeps_a`, `keeps_b`: what `backward` reads.
Tensor binary(const char* name, PointwiseOp op, const Operand& a, const Operand& b, bool keeps_a,
              bool keeps_b, BinaryBackward backward) {
  const DType dtype = common_dtype(name, {a, b}, false);
  return record(name, {a.tensor(), b.tensor()}, apply(name, op, dtype, {a, b}),
                [backward, a = Kept(a, keeps_a), b = Kept(b, keeps_b)](const Tensor& dy, Grads& g) {
                  // One gradient after the other: the second may add to the first (mul(x, x)).
                  backward(g, dy, a, b);
                });
}

/// y = op(x), dx = bwd(dy, y) or bwd(dy, x).
Tensor unary(const char* name, PointwiseOp op, const Tensor& x, PointwiseOp bwd, bool keeps_y) {
  const DType dtype = common_dtype(name, {x}, false);
  const Tensor y = apply(name, op, dtype, {x});
  return record(name, {x}, y, [bwd, kept = save(keeps_y ? y : x)](const Tensor& dy, Grads& g) {
    add_gradient(g, 0, bwd, {dy, kept.get()});
  });
}

Tensor compare(const char* name, PointwiseOp op, const Operand& a, const Operand& b) {
  const DType dtype = common_dtype(name, {a, b}, true);
  const auto in_dtype = [&](const Operand& x) -> Operand {
    if (x.tensor().is_defined()) return x;
    TESSERA_CHECK(is_floating(dtype) || std::trunc(x.number()) == x.number(),
                  "{}: beside {} a number must be whole, got {}", name, dtype, x.number());
    const auto number = static_cast<float>(x.number());
    if (dtype == kBF16) return static_cast<double>(BFloat16(number));
    if (dtype == kF16) return static_cast<double>(Float16(number));
    return x;
  };
  return apply(name, op, kU8, {in_dtype(a), in_dtype(b)});
}

void check_mask(const char* name, const Tensor& mask) {
  TESSERA_CHECK_DTYPE(mask.dtype() == kU8, "{}: a mask must be u8, got {}", name, mask.dtype());
}

}  // namespace

// ---- two operands -------------------------------------------------------------------------------

Tensor add(const Operand& a, const Operand& b) {
  return sum_or_difference("add", PointwiseOp::kAdd, a, b, 1);
}

Tensor sub(const Operand& a, const Operand& b) {
  return sum_or_difference("sub", PointwiseOp::kSub, a, b, -1);
}

Tensor mul(const Operand& a, const Operand& b) {
  return binary("mul", PointwiseOp::kMul, a, b, needs_grad({b.tensor()}), needs_grad({a.tensor()}),
                [](Grads& g, const Tensor& dy, const Operand& a, const Operand& b) {
                  add_gradient(g, 0, PointwiseOp::kMul, {dy, b});
                  add_gradient(g, 1, PointwiseOp::kMul, {dy, a});
                });
}

Tensor div(const Operand& a, const Operand& b) {
  return binary("div", PointwiseOp::kDiv, a, b, needs_grad({b.tensor()}), true,
                [](Grads& g, const Tensor& dy, const Operand& a, const Operand& b) {
                  add_gradient(g, 0, PointwiseOp::kDiv, {dy, b});
                  add_gradient(g, 1, PointwiseOp::kDivBwd, {dy, a, b});
                });
}

Tensor pow(const Operand& base, const Operand& exponent) {
  return binary("pow", PointwiseOp::kPow, base, exponent, true, true,
                [](Grads& g, const Tensor& dy, const Operand& a, const Operand& b) {
                  add_gradient(g, 0, PointwiseOp::kPowBwd, {dy, a, b});
                  add_gradient(g, 1, PointwiseOp::kExponentBwd, {dy, a, b});
                });
}

Tensor maximum(const Operand& a, const Operand& b) {
  return binary("maximum", PointwiseOp::kMaximum, a, b, true, true,
                [](Grads& g, const Tensor& dy, const Operand& a, const Operand& b) {
                  add_gradient(g, 0, PointwiseOp::kMaximumBwd, {dy, a, b});
                  add_gradient(g, 1, PointwiseOp::kMaximumBwd, {dy, b, a});
                });
}

Tensor minimum(const Operand& a, const Operand& b) {
  return binary("minimum", PointwiseOp::kMinimum, a, b, true, true,
                [](Grads& g, const Tensor& dy, const Operand& a, const Operand& b) {
                  // The smaller one is where the other would win a maximum.
                  add_gradient(g, 0, PointwiseOp::kMaximumBwd, {dy, b, a});
                  add_gradient(g, 1, PointwiseOp::kMaximumBwd, {dy, a, b});
                });
}

Tensor squared_difference(const Operand& a, const Operand& b) {
  return binary("squared_difference", PointwiseOp::kSquaredDifference, a, b, true, true,
                [](Grads& g, const Tensor& dy, const Operand& a, const Operand& b) {
                  add_gradient(g, 0, PointwiseOp::kSquaredDifferenceBwd, {dy, a, b});
                  add_gradient(g, 1, PointwiseOp::kSquaredDifferenceBwd, {dy, b, a});
                });
}

// ---- one operand --------------------------------------------------------------------------------

Tensor exp(const Tensor& x) {
  return unary("exp", PointwiseOp::kExp, x, PointwiseOp::kMul, true);
}
Tensor log(const Tensor& x) {
  return unary("log", PointwiseOp::kLog, x, PointwiseOp::kDiv, false);
}
Tensor sqrt(const Tensor& x) {
  return unary("sqrt", PointwiseOp::kSqrt, x, PointwiseOp::kSqrtBwd, true);
}
Tensor rsqrt(const Tensor& x) {
  return unary("rsqrt", PointwiseOp::kRsqrt, x, PointwiseOp::kRsqrtBwd, true);
}
Tensor tanh(const Tensor& x) {
  return unary("tanh", PointwiseOp::kTanh, x, PointwiseOp::kTanhBwd, true);
}
Tensor sigmoid(const Tensor& x) {
  return unary("sigmoid", PointwiseOp::kSigmoid, x, PointwiseOp::kSigmoidBwd, true);
}
Tensor abs(const Tensor& x) {
  return unary("abs", PointwiseOp::kAbs, x, PointwiseOp::kAbsBwd, false);
}
Tensor neg(const Tensor& x) {
  const DType dtype = common_dtype("neg", {x}, false);
  return record(
      "neg", {x}, apply("neg", PointwiseOp::kMul, dtype, {x, -1}),
      [shape = x.shape()](const Tensor& dy, Grads& g) { add_term_gradient(g, 0, shape, dy, -1); });
}

Tensor clamp(const Tensor& x, double low, double high) {
  const DType dtype = common_dtype("clamp", {x}, false);
  const Tensor y = apply("clamp", PointwiseOp::kClamp, dtype, {x, low, high});
  if (!needs_grad({x})) return y;
  const Tensor inside = apply("clamp", PointwiseOp::kIsInside, kU8, {x, low, high});
  return record("clamp", {x}, y, [inside = save(inside)](const Tensor& dy, Grads& g) {
    add_gradient(g, 0, PointwiseOp::kWhere, {inside.get(), dy, 0});
  });
}

// ---- masks --------------------------------------------------------------------------------------

Tensor eq(const Operand& a, const Operand& b) {
  return compare("eq", PointwiseOp::kEq, a, b);
}
Tensor ne(const Operand& a, const Operand& b) {
  return compare("ne", PointwiseOp::kNe, a, b);
}
Tensor lt(const Operand& a, const Operand& b) {
  return compare("lt", PointwiseOp::kLt, a, b);
}
Tensor le(const Operand& a, const Operand& b) {
  return compare("le", PointwiseOp::kLe, a, b);
}
Tensor gt(const Operand& a, const Operand& b) {
  return compare("gt", PointwiseOp::kLt, b, a);
}
Tensor ge(const Operand& a, const Operand& b) {
  return compare("ge", PointwiseOp::kLe, b, a);
}

Tensor logical_and(const Tensor& a, const Tensor& b) {
  check_mask("logical_and", a), check_mask("logical_and", b);
  return compare("logical_and", PointwiseOp::kAnd, a, b);
}
Tensor logical_or(const Tensor& a, const Tensor& b) {
  check_mask("logical_or", a), check_mask("logical_or", b);
  return compare("logical_or", PointwiseOp::kOr, a, b);
}
Tensor logical_not(const Tensor& mask) {
  check_mask("logical_not", mask);
  return compare("logical_not", PointwiseOp::kEq, mask, 0);
}

Tensor where(const Tensor& mask, const Operand& a, const Operand& b) {
  check_mask("where", mask);
  const DType dtype = common_dtype("where", {a, b}, false);
  return record("where", {a.tensor(), b.tensor()},
                apply("where", PointwiseOp::kWhere, dtype, {mask, a, b}),
                [mask = save(mask)](const Tensor& dy, Grads& g) {
                  add_gradient(g, 0, PointwiseOp::kWhere, {mask.get(), dy, 0});
                  add_gradient(g, 1, PointwiseOp::kWhere, {mask.get(), 0, dy});
                });
}

Tensor masked_fill(const Tensor& x, const Tensor& mask, double number) {
  return where(mask, number, x);
}

}  // namespace tessera
