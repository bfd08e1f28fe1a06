#pragma once

#include <cstdint>

#include "core/enum_names.h"
#include "core/tensor.h"

namespace tessera {

/// The polynomials of Newton-Schulz steps.
enum class MuonCoefficients : unsigned char {
  kOriginal,      ///< (3.4445, -4.7750, 2.0315) in every step
  kPolarExpress,  ///< one set a step (Amsel et al. 2025, arXiv:2505.16932), of a norm 1.02 below
};
constexpr auto enum_names(MuonCoefficients) {
  return std::to_array<EnumName<MuonCoefficients>>(
      {{MuonCoefficients::kOriginal, "original"},
       {MuonCoefficients::kPolarExpress, "polar_express"}});
}

/// Approximately the orthogonal factor of a matrix: U V^T of g = U S V^T. Five Newton-Schulz steps,
/// with x = g / max(|g|_F, 1e-7), or its transpose if g has more rows than columns:
///   A = x x^T;   B = b A + c A A;   x = a x + B x
/// Shapes   g [R, C], contiguous -> [R, C]
/// Dtypes   f32 | bf16 | f64, the same for the result and for the operands of the products, whose
///          sums are in f32 (f64)
/// Bits     the same for any number of threads
/// Streams  current stream; never synchronizes. No gradient.
/// Errors   ShapeError if g is no matrix; DtypeError for another dtype
/// Of the symmetric products only the blocks on and below the diagonal are computed.
Tensor orthogonalize(const Tensor& g, MuonCoefficients coefficients);

/// Floating-point operations of its products, with what symmetry saves, and without.
struct OrthogonalizeFlops {
  double computed, whole;
};
OrthogonalizeFlops orthogonalize_flops(int64_t rows, int64_t cols);

}  // namespace tessera
