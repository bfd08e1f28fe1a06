#pragma once

#include <array>

#include "core/dtype.h"
#include "core/runtime/dispatch.h"
#include "core/shape.h"
#include "kernels/pointwise/ops.h"

namespace tessera::kernels {

#define TESSERA_POINTWISE_ENUMERATOR(name, flops, value) k##name,
enum class PointwiseOp : unsigned char {
  TESSERA_POINTWISE_OPS_OF_1(TESSERA_POINTWISE_ENUMERATOR)
      TESSERA_POINTWISE_OPS_OF_2(TESSERA_POINTWISE_ENUMERATOR)
          TESSERA_POINTWISE_OPS_OF_3(TESSERA_POINTWISE_ENUMERATOR)
};
#undef TESSERA_POINTWISE_ENUMERATOR

constexpr int num_operands(PointwiseOp op) {
  return op <= PointwiseOp::kAbs ? 1 : op <= PointwiseOp::kSigmoidBwd ? 2 : 3;
}

/// dst = op(in[0], in[1], in[2]) as ops.h has it, or dst += with `accumulate`. Computed in f32, in
/// f64 if an operand is f64, in i64 if one is an integer of more than a byte (comparisons only);
/// rounded once. Strides count elements; 0 repeats an operand along that dimension.
struct Pointwise {
  struct Operand {
    const void* data = nullptr;  ///< null: `number` everywhere
    DType dtype = kF32;          ///< any
    Strides strides = {};
    double number = 0;
  };

  void* dst;
  DType dst_dtype;  ///< floating or, without `accumulate`, u8
  PointwiseOp op;
  Shape shape;
  Strides dst_strides;
  std::array<Operand, 3> in;
  bool accumulate = false;

  /// What it computes in: kF32, kF64 or kI64.
  DType compute_dtype() const;
  Cost cost() const;
};
TESSERA_DECLARE_KERNEL(pointwise, Pointwise);

/// Calls f(XValue{}) for op kX, one of kOperands operands (kIsInteger: a comparison).
template <int kOperands, bool kIsInteger, class F>
TESSERA_POINTWISE_FUNCTION void visit_pointwise(PointwiseOp op, F&& f) {
#define TESSERA_POINTWISE_CASE(name, flops, value) \
  case PointwiseOp::k##name:                       \
    return f(name##Value{});
  if constexpr (kIsInteger) {
    switch (op) {
      TESSERA_POINTWISE_COMPARISONS(TESSERA_POINTWISE_CASE)
      default:
        return;
    }
  } else if constexpr (kOperands == 1) {
    switch (op) {
      TESSERA_POINTWISE_OPS_OF_1(TESSERA_POINTWISE_CASE)
      default:
        return;
    }
  } else if constexpr (kOperands == 2) {
    switch (op) {
      TESSERA_POINTWISE_OPS_OF_2(TESSERA_POINTWISE_CASE)
      default:
        return;
    }
  } else {
    switch (op) {
      TESSERA_POINTWISE_OPS_OF_3(TESSERA_POINTWISE_CASE)
      default:
        return;
    }
  }
#undef TESSERA_POINTWISE_CASE
}

}  // namespace tessera::kernels
