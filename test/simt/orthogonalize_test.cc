#include "kernels/orthogonalize/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::MatrixCombine;
using kernels::RowSquares;
using kernels::ScaleByNorm;
using testing::check_close;
using testing::DeviceBuffer;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

constexpr DType kDTypes[] = {kF32, kBF16};

TEST_CASE("simt orthogonalize: sums of rows and the norm are the CPU's", "[orthogonalize][simt]") {
  for (const DType dtype : kDTypes) {
    for (const auto& [rows, cols] : {std::pair{3, 700}, {300, 5}, {1, 1}}) {
      const auto run = [&, rows = int64_t{rows}, cols = int64_t{cols}](bool is_cuda) {
        const DeviceBuffer x(randn({rows, cols}, dtype, 1)), sums(zeros({rows}));
        const RowSquares squares{sums.data(), x.data(), dtype, rows, cols};
        const ScaleByNorm scale{x.data(), sums.data(), dtype, rows, cols, 1.02f, 1e-7f};
        if (is_cuda) {
          kernels::cuda::row_squares(nullptr, squares);
          kernels::cuda::scale_by_norm(nullptr, scale);
        } else {
          kernels::cpu::row_squares(squares);
          kernels::cpu::scale_by_norm(scale);
        }
        return std::vector<Tensor>{sums.tensor(), x.tensor()};
      };
      const auto expected = run(false);
      const auto actual = run_in_all_schedules([&] { return run(true); });
      check_close(actual[0], expected[0], tol(kF32, cols) * static_cast<double>(cols), "sums");
      check_close(actual[1], expected[1], tol(dtype), "scaled");
    }
  }
}

TEST_CASE("simt orthogonalize: combinations are the CPU's, half of a symmetric operand is not read",
          "[orthogonalize][simt]") {
  for (const DType dtype : kDTypes) {
    for (const bool is_symmetric : {false, true}) {
      for (const bool has_x : {false, true}) {
        const int64_t rows = 37, cols = is_symmetric ? 37 : 50;
        Tensor values = randn({rows, cols}, kF32, 2);
        for (int64_t i = 0; is_symmetric && i < rows; ++i) {
          values.narrow(0, i, 1).narrow(1, i + 1, cols - i - 1).fill_(NAN);
        }
        const auto run = [&](bool is_cuda) {
          const DeviceBuffer x(randn({rows, cols}, dtype, 1)), y(values),
              out(zeros({rows, cols}, dtype));
          const MatrixCombine p{out.data(), has_x ? x.data() : nullptr,
                                y.data(),   dtype,
                                kF32,       rows,
                                cols,       3.4445,
                                -4.775,     is_symmetric};
          is_cuda ? kernels::cuda::matrix_combine(nullptr, p) : kernels::cpu::matrix_combine(p);
          return std::vector<Tensor>{out.tensor()};
        };
        const auto expected = run(false);
        for (const double value : expected[0].to_vector()) CHECK(!std::isnan(value));
        check_close(run_in_all_schedules([&] { return run(true); })[0], expected[0],
                    8 * tol(dtype));
      }
    }
  }
}

}  // namespace
}  // namespace tessera
