// Differentiable ops and a training on a CUDA device, through the runtime and the libraries
// beneath, beside the CPU. On a device in suite `cuda`, over the fakes of test/simt in suite
// `simt`.

#include <memory>
#include <utility>

#include "core/autograd.h"
#include "core/runtime/context.h"
#include "dist/comm/local.h"
#include "dist/fsdp/fully_shard.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/cuda/cudnn.h"
#include "kernels/matmul/backend.h"
#include "kernels/matmul/cuda/cublaslt.h"
#include "kernels/matmul/matmul.h"
#include "nn/gpt2/gpt2.h"
#include "optim/adamw.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using Values = std::vector<std::vector<double>>;

/// Runs `f`, which makes its inputs and reads its results, on a device.
Values run_on(DeviceType device, const std::function<Values()>& f, const Backends& backends = {}) {
  const auto context = std::make_shared<Context>(
      ContextOptions{.device = {device, 0}, .num_threads = 1, .backends = backends});
  const Context::Scope scope(context);
  return f();
}

void check_on_device(const std::function<Values()>& f, const Values& expected, double tolerance,
                     const Backends& backends = {}) {
  const Values actual = run_on(DeviceType::kCuda, f, backends);
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    check_close(actual[i], expected[i], tolerance, fmt::format("result {}", i));
  }
}

Tensor leaf(const Shape& shape, DType dtype, uint64_t seed) {
  return randn(shape, dtype, seed).set_requires_grad(true);
}

/// y and the gradients of `leaves`; backward runs twice and the second adds.
Values forward_and_backward(const std::function<Tensor()>& op, const std::vector<Tensor>& leaves) {
  const Tensor y = op();
  const Tensor dy = randn(y.shape(), y.dtype(), 9);
  backward(y, dy);
  backward(op(), dy);
  Values values{y.to_vector()};
  for (const Tensor& tensor : leaves) values.push_back(tensor.grad().to_vector());
  return values;
}

TEST_CASE("device: products by each backend are those of the CPU", "[cuda]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const auto& [rows, n, k] :
         std::vector<std::array<int64_t, 3>>{{6, 16, 24}, {5, 7, 9}, {33, 128, 64}}) {
      const auto run = [dtype = dtype, rows = rows, n = n, k = k] {
        const Tensor x = leaf({rows, k}, dtype, 1), w = leaf({n, k}, dtype, 2),
                     bias = leaf({n}, dtype, 3), residual = leaf({rows, n}, dtype, 4);
        Values values = forward_and_backward([&] { return linear_gelu(x, w, bias, Gelu::kTanh); },
                                             {x, w, bias});
        for (const auto& more : forward_and_backward(
                 [&] { return linear_residual(x, w, bias, residual); }, {residual})) {
          values.push_back(more);
        }
        return values;
      };
      const Values expected = run_on(DeviceType::kCpu, run);
      for (const GemmBackend backend : {GemmBackend::kOwn, GemmBackend::kCublasLt}) {
        if (backend == GemmBackend::kCublasLt && !kernels::cuda::cublaslt_problem().empty()) {
          WARN("skipped: " << kernels::cuda::cublaslt_problem());
          continue;
        }
        INFO(fmt::format("{} [{}, {}, {}], backend {}", dtype, rows, n, k,
                         backend == GemmBackend::kOwn ? "own" : "cublaslt"));
        check_on_device(run, expected, tol(dtype, 2 * rows * k), {.gemm = backend});
      }
    }
  }
}

/// Causal attention with grouped heads, and the gradients of q, k and v after one backward.
Values attend(DType dtype, int64_t D) {
  const Tensor q = leaf({2, 67, 4, D}, dtype, 1), k = leaf({2, 67, 2, D}, dtype, 2),
               v = leaf({2, 67, 2, D}, dtype, 3);
  const Tensor y = attention(q, k, v);
  backward(y, randn(y.shape(), dtype, 4));
  return {y.to_vector(), q.grad().to_vector(), k.grad().to_vector(), v.grad().to_vector()};
}

TEST_CASE("device: attention by each backend is that of the CPU", "[cuda]") {
  for (const DType dtype : {kF32, kBF16, kF16}) {
    for (const int64_t D : {64, 128}) {
      const auto run = [=] { return attend(dtype, D); };
      const Values expected = run_on(DeviceType::kCpu, run);
      INFO(fmt::format("{}, head width {}", dtype, D));
      check_on_device(run, expected, 2 * tol(dtype, 4 * 67));
#if !defined(TESSERA_SIMT)
      if (dtype == kF32) continue;
      if (!kernels::cudnn_problem().empty()) {
        WARN("skipped: " << kernels::cudnn_problem());
        continue;
      }
      for (const AttentionBackend backend : {AttentionBackend::kCudnn, AttentionBackend::kAuto}) {
        INFO("backend " << static_cast<int>(backend));
        check_on_device(run, expected, 2 * tol(dtype, 4 * 67), {.attention = backend});
      }
#endif
    }
  }
}

/// Losses and gradient norms of ten steps on one device, of a batch that is learnt by heart.
Values train(DeviceType device, DType param_dtype) {
  constexpr int64_t kTime = 24, kVocab = 61;
  Values curve(2);
  dist::LocalOptions local;
  local.context.device = {device, 0};
  local.context.poison = local.context.order_check = false;
  dist::run_ranks(1, local, [&](dist::World& world) {
    nn::Gpt2Config c;
    c.vocab_size = kVocab, c.context_length = kTime;
    c.num_layers = 2, c.num_heads = 2, c.width = 32, c.init_stddev = 0.08;
    std::unique_ptr<nn::Gpt2> model;
    {
      const nn::DeferredInit deferred;
      model = std::make_unique<nn::Gpt2>(c);
    }
    dist::FsdpOptions options;
    options.precision.param_dtype = param_dtype;
    const auto fsdp = dist::fully_shard(*model, world, options);
    fsdp->initialize(5);
    optim::AdamW adamw(fsdp->shards(), {});
    const Tensor ids = randint(0, kVocab, {2, kTime}, kI32, 1),
                 targets = randint(0, kVocab, {2, kTime}, kI32, 2),
                 scale = full({}, 1.0 / (2 * kTime));
    for (int step = 0; step < 10; ++step) {
      const LossSum loss = model->loss(ids, targets, {}, {.grad_scale = scale});
      backward(loss.sum, scale);
      const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0);
      adamw.step(3e-3f, clip.factor, clip.found_inf);
      fsdp->end_step();
      curve[0].push_back(loss.sum.item() / (2 * kTime));
      curve[1].push_back(clip.norm.item());
    }
  });
  return curve;
}

TEST_CASE("device: ten steps of GPT-2 follow the CPU", "[cuda]") {
  for (const auto& [dtype, loss_tolerance, norm_tolerance] :
       std::vector<std::tuple<DType, double, double>>{{kF32, 1e-5, 1e-5}, {kBF16, 1e-3, 1.5e-2}}) {
    const Values expected = train(DeviceType::kCpu, dtype),
                 actual = train(DeviceType::kCuda, dtype);
    INFO(fmt::format("{}", dtype));
    for (size_t i = 0; i < expected[0].size(); ++i) {
      INFO(fmt::format("step {}: loss {} on cpu {}, gradient norm {} on cpu {}", i, actual[0][i],
                       expected[0][i], actual[1][i], expected[1][i]));
      CHECK(std::abs(actual[0][i] - expected[0][i]) <= loss_tolerance * expected[0][i]);
      CHECK(std::abs(actual[1][i] - expected[1][i]) <= norm_tolerance * expected[1][i]);
    }
    CHECK(expected[0].front() - expected[0].back() > 0.5);
  }
}

}  // namespace
}  // namespace tessera::testing
