#include "kernels/matmul/cuda/cublaslt.h"

#include <array>
#include <optional>

#include "core/autograd.h"
#include "core/runtime/context.h"
#include "core/runtime/order_check.h"
#include "kernels/embedding/embedding.h"
#include "kernels/loss/loss.h"
#include "kernels/matmul/backend.h"
#include "kernels/matmul/cuda/matmul.h"
#include "kernels/matmul/matmul.h"
#include "test/simt/fake_cuda.h"
#include "test/stderr_of.h"
#include "test/testing.h"

// Ops with matrix products on a CUDA device: over the fake of cuBLASLt and by the emulated kernels
// of the project, beside the CPU.

namespace tessera {
namespace {

using kernels::Activation;
using kernels::Matmul;
using testing::check_close;
using testing::error_of;
using testing::randint;
using testing::randn;
using testing::tol;

class BackendGuard {
 public:
  explicit BackendGuard(GemmBackend backend) : previous_(gemm_backend()) {
    set_gemm_backend(backend);
  }
  ~BackendGuard() { set_gemm_backend(previous_); }
  BackendGuard(const BackendGuard&) = delete;
  BackendGuard& operator=(const BackendGuard&) = delete;

 private:
  GemmBackend previous_;
};

using Values = std::vector<std::vector<double>>;

/// Runs `f`, which makes its inputs and reads its results, on a device of its own.
Values run_on(DeviceType device, const std::function<Values()>& f, const Backends& backends = {}) {
  const auto context = std::make_shared<Context>(ContextOptions{.device = {device, 0},
                                                                .num_threads = 1,
                                                                .poison = true,
                                                                .order_check = true,
                                                                .backends = backends});
  const Context::Scope scope(context);
  const Values values = f();
  context->compute().synchronize();
  context->order_check()->throw_if_conflicts();
  return values;
}

/// The results of `f` on the device, by each backend, are those of the CPU.
void check_on_device(const std::function<Values()>& f, double tolerance, bool tf32 = false) {
  const Values expected = run_on(DeviceType::kCpu, f);
  for (const auto backend : {GemmBackend::kAuto, GemmBackend::kCublasLt, GemmBackend::kOwn}) {
    INFO("backend " << static_cast<int>(backend));
    const Values actual = run_on(DeviceType::kCuda, f, {.gemm = backend, .gemm_tf32 = tf32});
    REQUIRE(actual.size() == expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      check_close(actual[i], expected[i], tolerance, fmt::format("result {}", i));
    }
  }
  CHECK(simt::take_mistakes().empty());
}

Tensor leaf(const Shape& shape, DType dtype, uint64_t seed) {
  return randn(shape, dtype, seed).set_requires_grad(true);
}

/// y and the gradients of `leaves`, after two backwards: the second adds.
Values forward_and_twice_backward(const std::function<Tensor()>& op,
                                  const std::vector<Tensor>& leaves) {
  Tensor y = op();
  const Tensor dy = randn(y.shape(), y.dtype(), 9);
  backward(y, dy);
  backward(op(), dy);
  Values values{y.to_vector()};
  for (const Tensor& tensor : leaves) values.push_back(tensor.grad().to_vector());
  return values;
}

TEST_CASE("simt products: linear layers and their gradients", "[matmul][cuda][simt]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const auto& [rows, n, k] : std::vector<std::array<int64_t, 3>>{{6, 16, 24}, {5, 7, 9}}) {
      INFO(fmt::format("{} [{}, {}, {}]", dtype, rows, n, k));
      const auto run = [&, rows = rows, n = n, k = k](int kind) {
        return [=] {
          const Tensor x = leaf({2, rows, k}, dtype, 1), w = leaf({n, k}, dtype, 2);
          const Tensor bias = leaf({n}, dtype, 3), residual = leaf({2, rows, n}, dtype, 4);
          return forward_and_twice_backward(
              [&] {
                switch (kind) {
                  case 0:
                    return linear(x, w, bias);
                  case 1:
                    return linear_gelu(x, w, bias, Gelu::kTanh);
                  case 2:
                    return linear_gelu(x, w, bias, Gelu::kExact);
                  default:
                    return linear_residual(x, w, bias, residual);
                }
              },
              kind == 3 ? std::vector<Tensor>{x, w, bias, residual}
                        : std::vector<Tensor>{x, w, bias});
        };
      };
      for (int kind = 0; kind < 4; ++kind) check_on_device(run(kind), tol(dtype, 2 * rows * k));
    }
  }
}

TEST_CASE("simt products: matmul of batches and of transposed views", "[matmul][cuda][simt]") {
  for (const DType dtype : {kF32, kBF16}) {
    check_on_device(
        [&] {
          const Tensor a = leaf({3, 8, 16}, dtype, 1), b = leaf({3, 24, 16}, dtype, 2);
          return forward_and_twice_backward([&] { return matmul(a, b.transpose(1, 2)); }, {a, b});
        },
        tol(dtype, 32));
    check_on_device(
        [&] {
          const Tensor a = leaf({16, 8}, dtype, 1), b = leaf({16, 11}, dtype, 2);
          return forward_and_twice_backward([&] { return matmul(a.transpose(0, 1), b); }, {a, b});
        },
        tol(dtype, 32));
  }
}

TEST_CASE("simt products: linear_cross_entropy in chunks, both ways", "[loss][cuda][simt]") {
  for (const DType dtype : {kF32, kBF16}) {
    for (const bool is_early : {false, true}) {
      INFO(fmt::format("{}, gradients in the forward {}", dtype, is_early));
      check_on_device(
          [&] {
            const Tensor x = leaf({2, 7, 16}, dtype, 1), w = leaf({37, 16}, dtype, 2);
            const Tensor targets = randint(0, 37, {2, 7}, kI32, 3);
            LinearCrossEntropyOptions options{.ignore_index = 5, .chunk_rows = 5};
            const Tensor scale = full({}, 0.5, kF32);
            if (is_early) options.grad_scale = scale;
            const LossSum loss = linear_cross_entropy(x, w, targets, options);
            backward(loss.sum, scale);
            return Values{loss.sum.to_vector(), loss.count.to_vector(), x.grad().to_vector(),
                          w.grad().to_vector()};
          },
          tol(dtype, 16 * 37));
    }
  }
}

TEST_CASE("simt products: cross_entropy and embedding as ops", "[loss][embedding][cuda][simt]") {
  check_on_device(
      [] {
        const Tensor weight = leaf({19, 8}, kBF16, 1), ids = randint(0, 17, {3, 9}, kI64, 2);
        const Tensor rows = embedding(ids, weight);
        const LossSum loss = cross_entropy(rows, randint(0, 8, {3, 9}, kI32, 3), 4);
        backward(loss.sum, full({}, 0.25, kF32));
        return Values{rows.to_vector(), loss.sum.to_vector(), loss.count.to_vector(),
                      weight.grad().to_vector()};
      },
      tol(kBF16, 8));
}

/// A product on the device and what it needs.
struct OnDevice {
  std::shared_ptr<Context> context = std::make_shared<Context>(
      ContextOptions{.device = {DeviceType::kCuda, 0}, .num_threads = 1, .poison = true});
  Context::Scope scope{context};
  Tensor a = randn({16, 32}, kBF16, 1), b = randn({24, 32}, kBF16, 2);
  Tensor c = zeros({16, 24}, kBF16), bias = randn({32}, kBF16, 3), f32_bias = randn({24}, kF32, 4);
  Tensor pre = zeros({16, 24}, kBF16), sums = zeros({16}, kBF16);

  Matmul args() const {
    return {.c = c.raw_data(),
            .a = a.raw_data(),
            .b = b.raw_data(),
            .dtype = kBF16,
            .c_dtype = kBF16,
            .trans_b = true,
            .bias_dtype = kBF16,
            .m = 16,
            .n = 24,
            .k = 32,
            .lda = 32,
            .ldb = 32,
            .ldc = 24};
  }
};

TEST_CASE("simt cublaslt: offers what its documentation does, and no more",
          "[matmul][cuda][simt]") {
  const OnDevice on;
  namespace cuda = kernels::cuda;
  CHECK(cuda::cublaslt_problem().empty());
  Matmul p = on.args();
  CHECK(cuda::cublaslt_supports(p));
  p.bias = on.bias.raw_data();
  CHECK(cuda::cublaslt_supports(p));
  p.bias = static_cast<const char*>(p.bias) + 2;
  CHECK(!cuda::cublaslt_supports(p));  // read in vectors
  p.bias = on.f32_bias.raw_data(), p.bias_dtype = kF32;
  CHECK(!cuda::cublaslt_supports(p));  // its bias has the type of c
  p = on.args();
  p.activate = true;
  p.activation = Activation::kGeluTanh;
  p.pre_activation = on.pre.raw_data();
  CHECK(cuda::cublaslt_supports(p));
  p.n = 23;
  CHECK(!cuda::cublaslt_supports(p));  // the auxiliary output's rows are multiples of 8
  p.n = 24;
  p.activation = Activation::kSilu;
  CHECK(!cuda::cublaslt_supports(p));
  p = on.args();
  p.row_sums = on.sums.raw_data();
  CHECK(cuda::cublaslt_supports(p));
  CHECK(cuda::matmul_fuses_row_sums(p));
  p.bias = on.bias.raw_data();
  CHECK(!cuda::cublaslt_supports(p));
  for (int64_t Matmul::*size : {&Matmul::m, &Matmul::n, &Matmul::k, &Matmul::num_batches}) {
    p = on.args();
    p.*size = 0;
    CHECK(!cuda::cublaslt_supports(p));
    p.*size = int64_t{1} << 31;
    CHECK(!cuda::cublaslt_supports(p));
    CHECK(cuda::cublaslt_workspace_nbytes(p) == 0);
  }
  p = on.args();
  p.dtype = kF64;
  CHECK(!cuda::cublaslt_supports(p));
}

TEST_CASE("simt cublaslt: the product takes its workspace from the allocator of the device",
          "[matmul][cuda][simt]") {
  const OnDevice on;
  const int64_t nbytes = kernels::cuda::matmul_workspace_nbytes(on.args());
  CHECK(nbytes > 0);
  CHECK(nbytes <= kernels::cuda::kCublasLtMaxWorkspace);
  {
    const BackendGuard own(GemmBackend::kOwn);
    CHECK(kernels::cuda::matmul_workspace_nbytes(on.args()) == 0);
    Matmul p = on.args();
    p.row_sums = on.sums.raw_data();
    CHECK(!kernels::cuda::matmul_fuses_row_sums(p));
  }
  kernels::matmul(current_stream(), on.args());  // from now on the pool has it
  const auto before = on.context->allocator()->stats();
  kernels::matmul(current_stream(), on.args());
  const auto after = on.context->allocator()->stats();
  CHECK(after.num_allocations == before.num_allocations + 1);
  CHECK(after.num_backend_allocations == before.num_backend_allocations);
  CHECK(after.allocated == before.allocated);
  current_stream().synchronize();
  CHECK(simt::take_mistakes().empty());
}

TEST_CASE("simt cublaslt: errors name the call, the sizes and the library's words",
          "[matmul][cuda][simt]") {
  const OnDevice on;
  Matmul p = on.args();
  CHECK_THAT(error_of([&] { kernels::cuda::cublaslt_matmul(current_stream().cuda(), p); }),
             Catch::Contains("matmul: cuBLASLt needs 4096 bytes of workspace, got 0"));
  const Tensor workspace = empty({4096}, kU8);
  p.workspace = workspace.raw_data(), p.workspace_nbytes = 4096;
  CHECK_THAT(error_of([&] { kernels::cuda::cublaslt_matmul(nullptr, p); }),
             Catch::Contains("matmul: cublasLtMatmul of m 16, n 24, k 32, 1 batches of bf16 into "
                             "bf16: CUBLAS_STATUS_EXECUTION_FAILED (status 13)"));
  CHECK(!simt::take_mistakes().empty());
}

TEST_CASE("simt cublaslt: an algorithm is for the alignment of the epilogue's pointers too",
          "[matmul][cuda][simt]") {
  const OnDevice on;
  const Tensor vectors = zeros({256}, kBF16), wide = zeros({16, 64}, kBF16);
  Matmul with_bias = on.args(), with_aux = on.args(), with_sums = on.args();
  with_aux.activate = true, with_aux.activation = Activation::kGeluTanh;
  // First of the widest alignment, then of 16 bytes.
  for (const int64_t shift : {0, 8}) {
    with_bias.bias = vectors.data<BFloat16>() + shift;
    with_sums.row_sums = vectors.data<BFloat16>() + shift;
    with_aux.pre_activation = wide.data<BFloat16>() + shift;
    for (const Matmul& p : {with_bias, with_sums, with_aux}) {
      kernels::matmul(current_stream(), p);
    }
  }
  current_stream().synchronize();
  CHECK(simt::take_mistakes().empty());
}

TEST_CASE("simt cublaslt: what it does not take is told once, but for products it is never asked",
          "[matmul][cuda][simt]") {
  const OnDevice on;
  const std::string text = testing::stderr_of([&] {
    Matmul p = on.args();
    p.bias = on.f32_bias.raw_data(), p.bias_dtype = kF32;  // its bias has the type of c
    for (int i = 0; i < 2; ++i) kernels::matmul(current_stream(), p);
    p.k = 0;
    kernels::matmul(current_stream(), p);
    current_stream().synchronize();
  });
  CHECK(text ==
        "matmul: cuBLASLt does not take m 16, n 24, k 32, 1 batches of bf16 into bf16 with a "
        "bias; own kernels compute this and others that it does not take\n");
}

TEST_CASE("simt cublaslt: more shapes than are kept", "[matmul][cuda][simt]") {
  const OnDevice on;
  Matmul p = on.args();
  p.m = 1;
  for (int64_t stride = 0; stride < 4200; ++stride) {
    p.batch_stride_a = stride;
    CHECK(kernels::cuda::cublaslt_supports(p));
  }
  kernels::matmul(current_stream(), on.args());
  current_stream().synchronize();
}

TEST_CASE("simt cublaslt: TF32 is off until it is asked for", "[matmul][cuda][simt]") {
  CHECK(!gemm_tf32());
  check_on_device(
      [] {
        CHECK(gemm_tf32() == (Context::current()->device().type == DeviceType::kCuda));
        const Tensor a = leaf({8, 16}, kF32, 1), b = leaf({16, 8}, kF32, 2);
        return forward_and_twice_backward([&] { return matmul(a, b); }, {a, b});
      },
      tol(kF16, 16), /*tf32=*/true);  // as many bits of fraction
  CHECK(!gemm_tf32());
  const auto product = [] {
    const Tensor x = full({1, 1}, 1 + 0x1p-12, kF32), one = full({1, 1}, 1.0, kF32);
    return Values{matmul(x, one).to_vector()};
  };
  CHECK(run_on(DeviceType::kCuda, product) == Values{{1 + 0x1p-12}});
  CHECK(run_on(DeviceType::kCuda, product, {.gemm_tf32 = true}) == Values{{1.0}});
}

/// A linear layer on a device of its own; `step` gives its outputs and gradients so far.
class Layer {
 public:
  explicit Layer(GemmBackend gemm)
      : context_(std::make_shared<Context>(ContextOptions{
            .device = {DeviceType::kCuda, 0}, .num_threads = 1, .backends = {.gemm = gemm}})) {
    const Context::Scope scope(context_);
    w_ = leaf({24, 512}, kF32, 2);
  }
  Values step(uint64_t seed) {
    const Context::Scope scope(context_);
    const Tensor x = randn({16, 512}, kF32, seed);
    const Tensor y = linear(x, w_, {});
    backward(y, randn(y.shape(), kF32, seed + 1));
    return {y.to_vector(), w_.grad().to_vector()};
  }

 private:
  std::shared_ptr<Context> context_;
  Tensor w_;
};

TEST_CASE("simt products: two models with different backends, interleaved, give the bits of each",
          "[matmul][cuda][simt]") {
  const auto alone = [](GemmBackend gemm) {
    Layer layer(gemm);
    return std::vector<Values>{layer.step(5), layer.step(7), layer.step(9)};
  };
  const auto own = alone(GemmBackend::kOwn), library = alone(GemmBackend::kCublasLt);
  CHECK(own != library);  // they add in other orders
  Layer first(GemmBackend::kOwn), second(GemmBackend::kCublasLt);
  for (size_t i = 0; i < own.size(); ++i) {
    CHECK(first.step(5 + 2 * i) == own[i]);
    CHECK(second.step(5 + 2 * i) == library[i]);
  }
  CHECK(simt::take_mistakes().empty());
}

}  // namespace
}  // namespace tessera
