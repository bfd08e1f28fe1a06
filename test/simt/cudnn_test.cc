#include "kernels/attention/cuda/cudnn.h"

#include <cmath>

#include "core/autograd.h"
#include "core/runtime/context.h"
#include "kernels/attention/attention.h"
#include "kernels/tuning/tuning.h"
#include "test/simt/fake_cuda.h"
#include "test/stderr_of.h"
#include "test/testing.h"

// Attention as a graph of cuDNN, computed by the fake operation by operation, beside the CPU's.

namespace tessera {
namespace {

using testing::check_close;
using testing::randn;
using testing::stderr_of;
using testing::tol;

using Values = std::vector<std::vector<double>>;

struct Problem {
  int64_t batch = 2, num_queries = 5, num_keys = 5, num_heads = 2, num_kv_heads = 2, width = 16;
  bool causal = true, is_packed = false;
  DType dtype = kBF16;
};

/// o, dq, dk and dv on a device.
Values attend(DeviceType device, const Problem& p, AttentionBackend backend) {
  const auto context = std::make_shared<Context>(ContextOptions{
      .device = {device, 0}, .num_threads = 1, .poison = true, .backends = {.attention = backend}});
  const Context::Scope scope(context);
  const auto leaf = [&](int64_t times, int64_t heads, uint64_t seed) {
    return randn({p.batch, times, heads, p.width}, p.dtype, seed).set_requires_grad(true);
  };
  Tensor q, k, v;
  Tensor packed;
  if (p.is_packed) {  // views of one tensor of all heads
    packed = leaf(p.num_queries, 3 * p.num_heads, 1);
    q = packed.narrow(2, 0, p.num_heads);
    k = packed.narrow(2, p.num_heads, p.num_heads);
    v = packed.narrow(2, 2 * p.num_heads, p.num_heads);
  } else {
    q = leaf(p.num_queries, p.num_heads, 1);
    k = leaf(p.num_keys, p.num_kv_heads, 2);
    v = leaf(p.num_keys, p.num_kv_heads, 3);
  }
  const Tensor o = attention(q, k, v, {.causal = p.causal});
  backward(o, randn(o.shape(), p.dtype, 4));
  if (p.is_packed) return {o.to_vector(), packed.grad().to_vector()};
  return {o.to_vector(), q.grad().to_vector(), k.grad().to_vector(), v.grad().to_vector()};
}

TEST_CASE("simt cudnn: the graphs of attention compute what the formula says",
          "[attention][cuda][simt]") {
  const std::vector<Problem> problems = {
      {},
      {.causal = false},
      {.num_queries = 3, .num_keys = 7},  // the queries are the last positions
      {.num_queries = 3, .num_keys = 7, .causal = false},
      {.num_heads = 4, .num_kv_heads = 2},
      {.num_heads = 4, .num_kv_heads = 1, .width = 32, .dtype = kF16},
      {.batch = 1, .num_queries = 33, .num_keys = 33, .is_packed = true},
  };
  for (const Problem& p : problems) {
    INFO(fmt::format("{} queries, {} keys, {} and {} heads, causal {}, packed {}", p.num_queries,
                     p.num_keys, p.num_heads, p.num_kv_heads, p.causal, p.is_packed));
    const Values expected = attend(DeviceType::kCpu, p, AttentionBackend::kOwn);
    simt::take_calls();
    const Values actual = attend(DeviceType::kCuda, p, AttentionBackend::kCudnn);
    CHECK(simt::take_calls()["cudnnBackendExecute"] == 2);
    // The graph rounds in between: probabilities, and the key gradients of each query head.
    for (size_t i = 0; i < expected.size(); ++i)
      check_close(actual[i], expected[i], 2 * tol(p.dtype, 4 * p.num_keys),
                  fmt::format("result {}", i));
  }
  CHECK(simt::take_mistakes().empty());
}

TEST_CASE("simt cudnn: without a kernel for a shape our own computes it",
          "[attention][cuda][simt]") {
  const Problem p{.batch = 3};  // of no other test: plans are kept
  const Values own = attend(DeviceType::kCuda, p, AttentionBackend::kOwn);
  Values actual;
  simt::set_cudnn({.num_configs = 0});
  const std::string text =
      stderr_of([&] { actual = attend(DeviceType::kCuda, p, AttentionBackend::kCudnn); });
  simt::set_cudnn({.num_configs = 3, .num_refused = 3});
  const Problem other{.batch = 4};
  simt::take_calls();
  CHECK(attend(DeviceType::kCuda, other, AttentionBackend::kCudnn) ==
        attend(DeviceType::kCuda, other, AttentionBackend::kOwn));
  CHECK(simt::take_calls()["cudnnBackendExecute"] == 0);
  simt::set_cudnn({});
  CHECK(actual == own);
  CHECK_THAT(text,
             Catch::Contains("attention: cuDNN has no kernel for the forward of 2 heads of 16, "
                             "5 queries and 5 keys of bf16; own kernels compute it"));
}

TEST_CASE("simt cudnn: a version with a wrong backward is asked for the forward alone",
          "[attention][cuda][simt]") {
  const Problem p{.batch = 1, .num_queries = 6, .num_keys = 6};
  const Values expected = attend(DeviceType::kCpu, p, AttentionBackend::kOwn);
  simt::set_cudnn({.version = 91500});
  simt::take_calls();
  const Values actual = attend(DeviceType::kCuda, p, AttentionBackend::kCudnn);
  CHECK(simt::take_calls()["cudnnBackendExecute"] == 1);
  simt::set_cudnn({});
  for (size_t i = 0; i < expected.size(); ++i)
    check_close(actual[i], expected[i], tol(p.dtype, 4 * p.num_keys), fmt::format("result {}", i));
}

TEST_CASE("simt cudnn: auto takes the faster for all calls once it has been timed",
          "[attention][cuda][simt]") {
  simt::set_planted_times(true);
  for (const bool is_cudnn_faster : {false, true}) {
    // Of our own kernels one takes 1 ms.
    simt::set_cudnn({.ms = is_cudnn_faster ? 0.25 : 100});
    const auto context = std::make_shared<Context>(
        ContextOptions{.device = {DeviceType::kCuda, 0},
                       .num_threads = 1,
                       .backends = {.attention = AttentionBackend::kAuto}});
    const Context::Scope scope(context);
    Tuning tuning(/*has_gemms=*/false);
    const auto run = [&] {
      Tensor q = randn({2, 5, 2, 16}, kBF16, 1).set_requires_grad(true);
      simt::take_calls();
      const Tensor o = attention(q, q.detach().set_requires_grad(true),
                                 q.detach().set_requires_grad(true), {.causal = true});
      backward(o, o.detach());
      current_stream().synchronize();
      return simt::take_calls()["cudnnBackendExecute"];
    };
    CHECK(run() == 0);  // nobody times anything
    const Tuning::Scope tuned(tuning);
    CHECK(run() == 0);
    CHECK(tuning.wanted().size() == 2);
    tuning.add(kernels::measure_choices(tuning.wanted()));
    CHECK(run() == (is_cudnn_faster ? 2 : 0));
    for (const auto& [key, choice] : tuning.choices()) {
      CHECK(choice == (is_cudnn_faster ? "cudnn" : "own"));
      CHECK(kernels::is_choice(key, choice));
      CHECK(!kernels::is_choice(key, "fastest"));
    }
  }
  simt::set_cudnn({});
  simt::set_planted_times(false);
  CHECK(simt::take_mistakes().empty());
}

}  // namespace
}  // namespace tessera
