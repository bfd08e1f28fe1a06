#pragma once

#include "core/runtime/cuda/ptx.cuh"
#include "kernels/elementwise/kernel.h"

// Activations in the epilogue of a product, in f32, one value at a time. The formulas are those of
// elementwise/activation.h; exponential and reciprocal are the hardware's approximations, two units
// in the last place each, as a product's own rounding error hides them.

namespace tessera::kernels::cuda {
inline namespace TESSERA_CUDA_BODY {

/// 1 / (1 + exp(-x)); 0 for x = -inf, 1 for inf.
__device__ inline float sigmoid(float x) {
  constexpr float kLog2E = 1.44269504f;
  return tessera::cuda::rcp_approx(1.0f + tessera::cuda::exp2_approx(-kLog2E * x));
}

/// 2 u of GeluTanh: x (1 + tanh(u)) / 2 = x sigmoid(2 u).
__device__ inline float gelu_argument(float x) {
  constexpr float kSlope = 1.59576912f, kCubic = 0.044715f * kSlope;
  return x * (kSlope + kCubic * x * x);
}

__device__ inline float activation_value(Activation activation, float x) {
  constexpr float kSqrtHalf = 0.707106781f;
  switch (activation) {
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kGeluTanh:
      return x * sigmoid(gelu_argument(x));
    case Activation::kGeluExact:
      break;
  }
  return 0.5f * x * (1.0f + erff(x * kSqrtHalf));
}

}  // namespace TESSERA_CUDA_BODY
}  // namespace tessera::kernels::cuda
