#include "kernels/orthogonalize/orthogonalize.h"

#include <algorithm>
#include <array>

#include "core/autograd.h"
#include "kernels/matmul/kernel.h"
#include "kernels/orthogonalize/kernel.h"

namespace tessera {
namespace kernels {
namespace {

int64_t nbytes_of(DType dtype, int64_t numel) {
  return numel * static_cast<int64_t>(size_of(dtype));
}
DType sum_dtype(DType dtype) {
  return dtype == kF64 ? kF64 : kF32;
}

}  // namespace

Cost RowSquares::cost() const {
  return Cost(2.0 * static_cast<double>(rows * cols))
      .write(sums, nbytes_of(sum_dtype(dtype), rows))
      .read(x, nbytes_of(dtype, rows * cols));
}

Cost ScaleByNorm::cost() const {
  return Cost(static_cast<double>(rows * cols))
      .write_or_accumulate(x, nbytes_of(dtype, rows * cols), true)
      .read(sums, nbytes_of(sum_dtype(dtype), rows));
}

Cost MatrixCombine::cost() const {
  return Cost(3.0 * static_cast<double>(rows * cols))
      .write(out, nbytes_of(dtype, rows * cols))
      .read(x, nbytes_of(dtype, rows * cols))
      .read(y, nbytes_of(y_dtype, rows * cols));
}

TESSERA_DEFINE_KERNEL(row_squares, RowSquares);
TESSERA_DEFINE_KERNEL(scale_by_norm, ScaleByNorm);
TESSERA_DEFINE_KERNEL(matrix_combine, MatrixCombine);

}  // namespace kernels

namespace {

constexpr int kNumSteps = 5;
constexpr float kEps = 1e-7f;

struct Polynomial {
  double a, b, c;
};
using Polynomials = std::array<Polynomial, kNumSteps>;

constexpr Polynomials kOriginal = {{{3.4445, -4.7750, 2.0315},
                                    {3.4445, -4.7750, 2.0315},
                                    {3.4445, -4.7750, 2.0315},
                                    {3.4445, -4.7750, 2.0315},
                                    {3.4445, -4.7750, 2.0315}}};
constexpr Polynomials kPolarExpress = {
    {{8.156554524902461, -22.48329292557795, 15.878769915207462},
     {4.042929935166739, -2.808917465908714, 0.5000178451051316},
     {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
     {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
     {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}}};
constexpr float kPolarExpressNorm = 1.02f;

/// Rows of a block of a symmetric product: an eighth, but no thin ones.
int64_t block_rows(int64_t m) {
  constexpr int64_t kBlocks = 8, kLeast = 64;
  return std::max(kLeast, (m + kBlocks - 1) / kBlocks);
}

/// y = x x^T, of x [m, k]: blocks of rows, each up to its part of the diagonal.
void symmetric_product(const Tensor& y, const Tensor& x) {
  const int64_t m = x.dim(0), k = x.dim(1), rows = block_rows(m);
  const auto item = static_cast<int64_t>(size_of(x.dtype()));
  const auto y_item = static_cast<int64_t>(size_of(y.dtype()));
  for (int64_t first = 0; first < m; first += rows) {
    const int64_t count = std::min(rows, m - first);
    kernels::Matmul p{};
    p.c = static_cast<char*>(y.raw_data()) + first * m * y_item;
    p.a = static_cast<const char*>(x.raw_data()) + first * k * item;
    p.b = x.raw_data();
    p.dtype = x.dtype(), p.c_dtype = y.dtype();
    p.trans_b = true;
    p.m = count, p.n = first + count, p.k = k;
    p.lda = p.ldb = k, p.ldc = m;
    kernels::matmul(current_stream(), p);
  }
}

void combine(const Tensor& out, double a, const Tensor& x, double b, const Tensor& y,
             bool is_symmetric) {
  kernels::matrix_combine(current_stream(),
                          {out.raw_data(), x.is_defined() ? x.raw_data() : nullptr, y.raw_data(),
                           out.dtype(), y.dtype(), out.dim(0), out.dim(1), a, b, is_symmetric});
}

}  // namespace

Tensor orthogonalize(const Tensor& g, MuonCoefficients coefficients) {
  TESSERA_CHECK_SHAPE(g.num_dims() == 2 && g.is_contiguous(),
                      "orthogonalize: g must be a contiguous matrix, got {}", g.shape());
  TESSERA_CHECK_DTYPE(g.dtype() == kF32 || g.dtype() == kBF16 || g.dtype() == kF64,
                      "orthogonalize: g must be f32, bf16 or f64, got {}", g.dtype());
  const NoGrad no_grad;
  const bool is_tall = g.dim(0) > g.dim(1);
  const int64_t m = std::min(g.dim(0), g.dim(1)), n = std::max(g.dim(0), g.dim(1));
  if (m == 0) return zeros(g.shape(), g.dtype());
  const DType sums = g.dtype() == kF64 ? kF64 : kF32;
  const bool is_express = coefficients == MuonCoefficients::kPolarExpress;
  Tensor x = empty({m, n}, g.dtype());
  x.copy_(is_tall ? g.transpose(0, 1) : g);
  const Tensor norms = empty({m}, sums), gram = empty({m, m}, g.dtype()),
               polynomial = empty({m, m}, g.dtype()), square = empty({m, m}, sums),
               product = empty({m, n}, sums);
  kernels::row_squares(current_stream(), {norms.raw_data(), x.raw_data(), x.dtype(), m, n});
  kernels::scale_by_norm(current_stream(), {x.raw_data(), norms.raw_data(), x.dtype(), m, n,
                                            is_express ? kPolarExpressNorm : 1.0f, kEps});
  for (const Polynomial& p : is_express ? kPolarExpress : kOriginal) {
    symmetric_product(square, x);
    combine(gram, 0, {}, 1, square, true);
    symmetric_product(square, gram);  // A A = A A^T
    combine(polynomial, p.b, gram, p.c, square, true);
    kernels::Matmul times{};
    times.c = product.raw_data(), times.a = polynomial.raw_data(), times.b = x.raw_data();
    times.dtype = x.dtype(), times.c_dtype = sums;
    times.m = m, times.n = n, times.k = m;
    times.lda = m, times.ldb = times.ldc = n;
    kernels::matmul(current_stream(), times);
    combine(x, p.a, x, 1, product, false);
  }
  if (!is_tall) return x;
  Tensor result = empty(g.shape(), g.dtype());
  result.copy_(x.transpose(0, 1));
  return result;
}

OrthogonalizeFlops orthogonalize_flops(int64_t rows, int64_t cols) {
  const int64_t m = std::min(rows, cols), n = std::max(rows, cols), block = block_rows(m);
  double half = 0;  // elements of a symmetric product
  for (int64_t first = 0; first < m; first += block) {
    const int64_t count = std::min(block, m - first);
    half += static_cast<double>(count) * static_cast<double>(first + count);
  }
  const auto M = static_cast<double>(m), N = static_cast<double>(n);
  return {kNumSteps * 2 * (half * N + half * M + M * M * N),
          kNumSteps * 2 * (M * M * N + M * M * M + M * M * N)};
}

}  // namespace tessera
