#include <array>
#include <optional>

#include "kernels/matmul/backend.h"
#include "kernels/matmul/cuda/gemm.cuh"
#include "kernels/matmul/kernel.h"
#include "test/simt/simt_testing.h"

namespace tessera {
namespace {

using kernels::Activation;
using kernels::BiasGrad;
using kernels::Matmul;
using testing::check_close;
using testing::DeviceBuffer;
using testing::randn;
using testing::run_in_all_schedules;
using testing::tol;

/// The project's own kernel for a scope.
class OwnBackend {
 public:
  OwnBackend() { set_gemm_backend(GemmBackend::kOwn); }
  ~OwnBackend() { set_gemm_backend(GemmBackend::kAuto); }
};

/// A product and where its operands lie; rows of all matrices are `pad` elements longer than
/// needed.
struct Product {
  int64_t m, n, k;
  bool trans_a = false, trans_b = false;
  DType dtype = kBF16, c_dtype = kBF16;
  bool accumulate = false, has_residual = false;
  int bias = 0;  // 0: none, 1: of dtype, 2: f32
  std::optional<Activation> activation = std::nullopt;
  bool keeps_pre_activation = false;
  int64_t num_batches = 1;
  int64_t pad = 0;
  int64_t offset = 0;  // elements that all operands start after 256 bytes
};

std::string describe(const Product& p) {
  return fmt::format(
      "[{}, {}, {}] {} -> {}, transposed {} {}, {} batches, accumulate {}, residual {}, bias {}, "
      "activation {} {}, pad {}, offset {}",
      p.m, p.n, p.k, p.dtype, p.c_dtype, p.trans_a, p.trans_b, p.num_batches, p.accumulate,
      p.has_residual, p.bias, p.activation ? static_cast<int>(*p.activation) : -1,
      p.keeps_pre_activation, p.pad, p.offset);
}

/// c (with what lies between its rows) and the pre-activation by both kernels.
void check_product(const Product& p) {
  INFO(describe(p));
  const int64_t a_rows = p.trans_a ? p.k : p.m, lda = (p.trans_a ? p.m : p.k) + p.pad;
  const int64_t b_rows = p.trans_b ? p.n : p.k, ldb = (p.trans_b ? p.k : p.n) + p.pad;
  const int64_t ldc = p.activation ? p.n : p.n + p.pad, ld_residual = p.n + 2 * p.pad;
  const DeviceBuffer a(randn({p.num_batches, a_rows, lda}, p.dtype, 1), p.offset);
  const DeviceBuffer b(randn({p.num_batches, b_rows, ldb}, p.dtype, 2), p.offset);
  const DType bias_dtype = p.bias == 2 ? kF32 : p.dtype;
  const DeviceBuffer bias(randn({p.n}, bias_dtype, 3), p.offset);
  const DeviceBuffer residual(randn({p.m, ld_residual}, p.c_dtype, 4), p.offset);
  const Tensor before = randn({p.num_batches, p.m, ldc}, p.c_dtype, 5);
  const auto run = [&](auto fn) {
    const DeviceBuffer c(before, p.offset), pre({p.m, p.n}, p.c_dtype, p.offset);
    Matmul args{.c = c.data(),
                .a = a.data(),
                .b = b.data(),
                .dtype = p.dtype,
                .c_dtype = p.c_dtype,
                .trans_a = p.trans_a,
                .trans_b = p.trans_b,
                .accumulate = p.accumulate,
                .bias_dtype = bias_dtype,
                .m = p.m,
                .n = p.n,
                .k = p.k,
                .lda = lda,
                .ldb = ldb,
                .ldc = ldc,
                .num_batches = p.num_batches,
                .batch_stride_a = a_rows * lda,
                .batch_stride_b = b_rows * ldb,
                .batch_stride_c = p.m * ldc};
    if (p.bias != 0) args.bias = bias.data();
    if (p.has_residual) args.residual = residual.data(), args.ld_residual = ld_residual;
    if (p.activation) args.activate = true, args.activation = *p.activation;
    if (p.keeps_pre_activation) args.pre_activation = pre.data();
    fn(args);
    std::vector<Tensor> outputs{c.tensor()};
    if (p.keeps_pre_activation) outputs.push_back(pre.tensor());
    return outputs;
  };
  const auto expected = run([](const Matmul& args) { kernels::cpu::matmul(args); });
  const auto actual = run_in_all_schedules(
      [&] { return run([](const Matmul& args) { kernels::cuda::matmul(nullptr, args); }); });
  for (size_t i = 0; i < expected.size(); ++i) {
    check_close(actual[i], expected[i], tol(p.c_dtype, p.k), i == 0 ? "c" : "pre-activation");
  }
}

TEST_CASE("simt matmul: all transposes, dtypes and sizes around the tiles", "[matmul][simt]") {
  const OwnBackend own;
  for (const bool trans_a : {false, true}) {
    for (const bool trans_b : {false, true}) {
      for (const DType dtype : {kF32, kBF16, kF16}) {
        Product p{1, 1, 1, trans_a, trans_b, dtype, dtype};
        check_product(p);
        p.m = 7, p.n = 13, p.k = 5;  // nothing is aligned
        check_product(p);
        p.m = 16, p.n = 24, p.k = 40;  // everything is
        check_product(p);
        p.m = 130, p.n = 136, p.k = 264;  // all stages, ragged tiles
        check_product(p);
        p.m = 24, p.n = 16, p.k = 37, p.pad = 3;  // aligned in places
        check_product(p);
        p.k = 40, p.pad = 8;
        check_product(p);
        p.pad = 0, p.offset = 1;
        check_product(p);
      }
    }
  }
}

TEST_CASE("simt matmul: f32 results of bf16 and f16, accumulating", "[matmul][simt]") {
  const OwnBackend own;
  for (const DType dtype : {kBF16, kF16}) {
    for (const DType c_dtype : {dtype, kF32}) {
      for (const bool accumulate : {false, true}) {
        check_product({33, 40, 65, true, false, dtype, c_dtype, accumulate});
        check_product({9, 11, 17, false, true, dtype, c_dtype, accumulate});
      }
    }
  }
  check_product({33, 40, 65, true, false, kF32, kF32, true});
}

TEST_CASE("simt matmul: batches", "[matmul][simt]") {
  const OwnBackend own;
  for (const DType dtype : {kF32, kBF16}) {
    Product p{.m = 10, .n = 24, .k = 16, .dtype = dtype, .c_dtype = dtype, .num_batches = 3};
    check_product(p);
    p.trans_a = true, p.pad = 8;
    check_product(p);
    p.k = 0;
    check_product(p);
  }
}

TEST_CASE("simt matmul: bias, residual and activation in the product", "[matmul][simt]") {
  const OwnBackend own;
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const int64_t n : {8, 13, 140}) {
      Product p{.m = 18, .n = n, .k = 24, .trans_b = true, .dtype = dtype, .c_dtype = dtype};
      for (p.bias = 0; p.bias <= 2; ++p.bias) {
        p.has_residual = true;
        check_product(p);
        p.has_residual = false;
        check_product(p);
        for (const auto activation : {Activation::kRelu, Activation::kSilu, Activation::kGeluTanh,
                                      Activation::kGeluExact}) {
          Product fused = p;
          fused.activation = activation;
          fused.keeps_pre_activation = p.bias != 1;
          check_product(fused);
        }
      }
    }
    check_product({.m = 5, .n = 9, .k = 0, .dtype = dtype, .c_dtype = dtype, .bias = 1});
  }
}

TEST_CASE("simt matmul: k = 0 clears c or leaves it", "[matmul][simt]") {
  const OwnBackend own;
  for (const bool accumulate : {false, true}) {
    check_product({5, 9, 0, false, false, kBF16, kF32, accumulate});
    check_product({5, 9, 0, false, false, kF32, kF32, accumulate});
  }
}

TEST_CASE("simt matmul: infinities reach the sums they belong to only", "[matmul][simt]") {
  const OwnBackend own;
  const int64_t k = 20;  // the chunk that holds columns 16 to 19 is ragged
  for (const DType dtype : {kF32, kBF16}) {
    // Rows of 24: what lies behind column 20 is NaN.
    const DeviceBuffer a({2, 24}, dtype), b({3, 24}, dtype), c({2, 3}, dtype);
    for (const DeviceBuffer* operand : {&a, &b}) {
      for (int64_t row = 0; row < operand->shape()[0]; ++row) {
        for (int64_t i = 0; i < k; ++i) {
          if (dtype == kF32) operand->as<float>()[row * 24 + i] = 1;
          if (dtype == kBF16) operand->as<BFloat16>()[row * 24 + i] = BFloat16(1.0f);
        }
      }
    }
    const Matmul args{.c = c.data(),
                      .a = a.data(),
                      .b = b.data(),
                      .dtype = dtype,
                      .c_dtype = dtype,
                      .trans_b = true,
                      .m = 2,
                      .n = 3,
                      .k = k,
                      .lda = 24,
                      .ldb = 24,
                      .ldc = 3};
    kernels::cuda::matmul(nullptr, args);
    for (const double value : c.tensor().to_vector()) CHECK(value == 20);
  }
}

TEST_CASE("simt matmul: the rows of a product do not depend on each other", "[matmul][simt]") {
  const OwnBackend own;
  const int64_t n = 40, k = 72;
  const DeviceBuffer a(randn({150, k}, kBF16, 1)), b(randn({n, k}, kBF16, 2));
  const DeviceBuffer all({150, n}, kF32), one({1, n}, kF32);
  Matmul args{.c = all.data(),
              .a = a.data(),
              .b = b.data(),
              .dtype = kBF16,
              .c_dtype = kF32,
              .trans_b = true,
              .m = 150,
              .n = n,
              .k = k,
              .lda = k,
              .ldb = k,
              .ldc = n};
  kernels::cuda::matmul(nullptr, args);
  args.m = 1;
  args.c = one.data();
  args.a = a.as<BFloat16>() + 137 * k;
  kernels::cuda::matmul(nullptr, args);
  for (int64_t i = 0; i < n; ++i) CHECK(one.as<float>()[i] == all.as<float>()[137 * n + i]);
}

TEST_CASE("simt matmul: no bank conflicts in any transpose", "[matmul][simt]") {
  const OwnBackend own;
  const DeviceBuffer a(randn({128, 128}, kBF16, 1)), b(randn({128, 128}, kBF16, 2));
  const DeviceBuffer c({128, 128}, kBF16);
  for (const bool trans_a : {false, true}) {
    for (const bool trans_b : {false, true}) {
      const simt::MatrixLoads loads;
      kernels::cuda::matmul(nullptr, {.c = c.data(),
                                      .a = a.data(),
                                      .b = b.data(),
                                      .dtype = kBF16,
                                      .c_dtype = kBF16,
                                      .trans_a = trans_a,
                                      .trans_b = trans_b,
                                      .m = 128,
                                      .n = 128,
                                      .k = 128,
                                      .lda = 128,
                                      .ldb = 128,
                                      .ldc = 128});
      // 8 steps of 16 x 8 warps x (4 fragments of a + 2 double ones of b) x 4 matrices.
      CHECK(loads.num_reads() == 8 * 8 * (4 + 2) * 4);
      CHECK(loads.num_conflicts() == 0);
    }
  }
}

TEST_CASE("simt matmul: a block for each tile of each batch, on grid.x", "[matmul][simt]") {
  Matmul p{};
  p.dtype = p.c_dtype = p.bias_dtype = kBF16;
  p.m = 129, p.n = 128, p.num_batches = 70000;
  const auto config = kernels::cuda::gemm_config(p, 1024, nullptr);
  CHECK(config.grid.x == 140000);
  CHECK(config.grid.y == 1);
  CHECK(config.block.x == 256);
  p.m = int64_t{1} << 31, p.n = 248320;
  CHECK_THAT(testing::error_of([&] { kernels::cuda::gemm_config(p, 1024, nullptr); }),
             Catch::Contains("grid_blocks: expected 0 to 2147483647 blocks"));
}

TEST_CASE("simt bias_grad: columns of any dtype, width and length", "[matmul][simt]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const DType db_dtype : {dtype, kF32}) {
      for (const auto& [rows, n, ld, offset] :
           std::vector<std::array<int64_t, 4>>{{1, 1, 1, 0},
                                               {3, 8, 8, 0},
                                               {70, 13, 13, 0},
                                               {1030, 72, 80, 0},
                                               {40, 64, 64, 1},
                                               {0, 5, 5, 0}}) {
        for (const bool accumulate : {false, true}) {
          INFO(fmt::format("[{}, {}] {} -> {}, ld {}, offset {}, accumulate {}", rows, n, dtype,
                           db_dtype, ld, offset, accumulate));
          const DeviceBuffer dy(randn({rows, ld}, dtype, 1), offset);
          const Tensor before = randn({n}, db_dtype, 2);
          const auto run = [&, rows = rows, n = n, ld = ld](auto fn) {
            const DeviceBuffer db(before), partials({BiasGrad::num_chunks(rows), n}, kF32);
            fn(BiasGrad{db.data(), partials.data(), dy.data(), db_dtype, dtype, rows, n, ld,
                        accumulate});
            return std::vector<Tensor>{db.tensor()};
          };
          const auto expected = run([](const BiasGrad& a) { kernels::cpu::bias_grad(a); });
          const auto actual = run_in_all_schedules(
              [&] { return run([](const BiasGrad& a) { kernels::cuda::bias_grad(nullptr, a); }); });
          check_close(actual[0], expected[0], tol(db_dtype, rows), "db");
        }
      }
    }
  }
}

TEST_CASE("simt matmul: errors", "[matmul][simt]") {
  const OwnBackend own;
  Matmul p{};
  p.dtype = p.c_dtype = kF64;
  p.m = p.n = p.k = 1;
  CHECK_THAT(testing::error_of([&] { kernels::cuda::matmul(nullptr, p); }),
             Catch::Contains("matmul: no CUDA kernel for dtype f64"));
  p.dtype = p.c_dtype = kF32;
  p.row_sums = &p;
  CHECK_THAT(testing::error_of([&] { kernels::cuda::matmul(nullptr, p); }),
             Catch::Contains("matmul: row_sums without cuBLASLt"));
  BiasGrad db{};
  db.dtype = kF64, db.n = 1;
  CHECK_THAT(testing::error_of([&] { kernels::cuda::bias_grad(nullptr, db); }),
             Catch::Contains("bias_grad: no CUDA kernel for dtype f64"));
}

TEST_CASE("simt matmul: first and last block above 2^32 bytes", "[matmul][simt]") {
  const OwnBackend own;
  const simt::OnlyBlocks ends({0, -1});
  // a and c of more than 2^32 bytes: 70,000 rows, far apart.
  const int64_t m = 70000, k = 16, n = 3, ld = 31360;
  REQUIRE((m - 1) * ld * 2 > int64_t{1} << 32);
  for (const DType dtype : {kBF16, kF32}) {
    const auto width = static_cast<int64_t>(size_of(dtype));
    const simt::ReservedBuffer a(m * ld * width), c(m * ld * width);
    const DeviceBuffer b(randn({n, k}, dtype, 1));
    const auto set = [&](int64_t row, float value) {
      for (int64_t i = 0; i < k; ++i) {
        if (dtype == kF32) a.as<float>()[row * ld + i] = i == 2 ? value : 0;
        if (dtype == kBF16) a.as<BFloat16>()[row * ld + i] = BFloat16(i == 2 ? value : 0.0f);
      }
    };
    set(0, 1);
    set(m - 1, 2);
    const Matmul args{.c = c.data(),
                      .a = a.data(),
                      .b = b.data(),
                      .dtype = dtype,
                      .c_dtype = dtype,
                      .trans_b = true,
                      .m = m,
                      .n = n,
                      .k = k,
                      .lda = ld,
                      .ldb = k,
                      .ldc = ld};
    kernels::cuda::matmul(nullptr, args);
    const auto at = [dtype](const void* data, int64_t i) {
      return dtype == kF32 ? static_cast<const float*>(data)[i]
                           : static_cast<float>(static_cast<const BFloat16*>(data)[i]);
    };
    for (int64_t col = 0; col < n; ++col) {
      CHECK(at(c.data(), col) == at(b.data(), col * k + 2));
      CHECK(at(c.data(), (m - 1) * ld + col) == 2 * at(b.data(), col * k + 2));
    }
  }
}

TEST_CASE("simt bias_grad: the last column block of rows above 2^32 bytes", "[matmul][simt]") {
  const simt::OnlyBlocks ends({0, -1});
  const int64_t rows = 33, n = int64_t{1} << 26;
  const simt::ReservedBuffer dy(rows * n * 2), db(n * 4);
  const simt::ReservedBuffer partials(BiasGrad::num_chunks(rows) * n * 4);
  REQUIRE(BiasGrad::num_chunks(rows) == 2);
  for (int64_t row = 0; row < rows; ++row) dy.as<BFloat16>()[row * n + n - 1] = BFloat16(1.0f);
  partials.as<float>()[n - 1] = 16;  // of the first chunk, whose last block the emulator leaves out
  kernels::cuda::bias_grad(nullptr,
                           {db.data(), partials.data(), dy.data(), kF32, kBF16, rows, n, n, false});
  CHECK(partials.as<float>()[2 * n - 1] == 17);
  CHECK(db.as<float>()[n - 1] == 33);
}

}  // namespace
}  // namespace tessera
