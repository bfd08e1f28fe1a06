#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "core/autograd.h"
#include "core/profiler.h"
#include "core/random.h"
#include "core/runtime/cuda/cuda.h"
#include "core/runtime/staging.h"
#include "dist/comm/local.h"
#include "dist/comm/nccl.h"
#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/scaler.h"
#include "dist/fsdp/shard_view.h"
#include "nn/gpt2/gpt2.h"
#include "nn/llama/llama.h"
#include "optim/adamw.h"
#include "test/simt/fake_cuda.h"
#include "test/testing.h"

// Training under FSDP on four thread ranks, a fake device each: the runtime, NCCL and cuBLASLt are
// fakes, the kernels are those for the GPU on the emulator, and everything else is the product.

namespace tessera {
namespace {

using dist::World;

constexpr int kRanks = 4;
constexpr int64_t kTime = 16, kVocab = 64;
constexpr float kLr = 3e-3f;

struct Run {
  bool is_gpt2 = false;
  DType param_dtype = kF32;
  DeviceType device = DeviceType::kCuda;
  int num_steps = 10;
  dist::FsdpOptions fsdp = {};
  nn::RecomputePolicy recompute = {};
  NcclOptions nccl = {};
  /// Calls `submit`, which submits a step.
  std::function<void(int step, const std::function<void()>& submit)> around_step = {};
};

thread_local dist::Fsdp* current_fsdp = nullptr;  // of the rank that trains in this thread

struct Curve {
  std::vector<double> losses, grad_norms;
};

std::unique_ptr<nn::LanguageModel> make_model(bool is_gpt2) {
  if (is_gpt2) {
    nn::Gpt2Config c;
    c.vocab_size = kVocab, c.context_length = kTime;
    c.num_layers = 2, c.num_heads = 2, c.width = 32;
    c.init_stddev = 0.08;
    return std::make_unique<nn::Gpt2>(c);
  }
  nn::LlamaConfig c;
  c.vocab_size = kVocab, c.context_length = kTime;
  c.num_layers = 2, c.num_heads = 2, c.num_kv_heads = 1, c.width = 32, c.ffn_width = 48;
  c.init_stddev = 0.08;
  return std::make_unique<nn::Llama>(c);
}

/// Each rank's sample counts through the vocabulary in steps of its own.
Tensor ids_of(int rank, int64_t shift) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < kTime; ++t)
    ids.push_back(static_cast<int32_t>(((t + shift) * (2 * rank + 1) + 5 * rank) % kVocab));
  return from_values(std::span<const int32_t>(ids), {1, kTime});
}

/// What a step tells the host, which reads it a step later.
struct Pending {
  HostCopy loss_sum, grad_norm;
};

Curve train_rank(World& world, const Run& run) {
  std::unique_ptr<nn::LanguageModel> model;
  {
    nn::DeferredInit deferred;
    model = make_model(run.is_gpt2);
  }
  model->set_recompute(run.recompute);
  dist::FsdpOptions options = run.fsdp;
  options.precision.param_dtype = run.param_dtype;
  const auto fsdp = dist::fully_shard(*model, world, options);
  fsdp->initialize(5);
  current_fsdp = fsdp.get();
  optim::AdamW adamw(fsdp->shards(), {});
  const dist::LossScaler scaler({.scaling = dist::LossScaling::kNone});
  Curve curve;
  std::optional<Pending> previous;
  const auto finish = [&] {
    if (!previous) return;
    curve.losses.push_back(previous->loss_sum.item() / (kRanks * kTime));
    curve.grad_norms.push_back(previous->grad_norm.item());
  };
  for (int step = 0; step < run.num_steps; ++step) {
    Pending pending;
    const auto submit = [&] {
      random_state() = {.seed = 3,
                        .step = static_cast<uint64_t>(step),
                        .op_index = 0,
                        .sample_offset = world.rank()};
      const Tensor scale = scaler.grad_scale(1.0 / (kRanks * kTime));
      fsdp->begin_micro_batch(0, 1);
      const LossSum loss =
          model->loss(ids_of(world.rank(), 0), ids_of(world.rank(), 1), {}, {.grad_scale = scale});
      backward(loss.sum, scale);
      const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0, 2.0, scaler.scale());
      adamw.step(kLr, clip.factor, clip.found_inf);
      fsdp->end_step();
      const std::vector<Tensor> losses = {loss.sum.detach()};
      pending = {HostCopy(fsdp->sum_micro_batches(losses)), HostCopy(clip.norm)};
    };
    run.around_step ? run.around_step(step, submit) : submit();
    finish();
    previous = std::move(pending);
  }
  finish();
  return curve;
}

Curve train(const Run& run) {
  std::vector<Curve> curves(kRanks);
  dist::LocalOptions local;
  local.context.device = {run.device, 0};
  local.context.backends.nccl = run.nccl;
  dist::run_ranks(kRanks, local, [&](World& world) {
    curves[static_cast<size_t>(world.rank())] = train_rank(world, run);
  });
  for (const Curve& curve : curves) {
    CHECK(curve.losses == curves[0].losses);
    CHECK(curve.grad_norms == curves[0].grad_norms);
  }
  return curves[0];
}

void check_clean() {
  CHECK(simt::take_mistakes().empty());
  CHECK(simt::live_objects().empty());
}

void compare_with_cpu(Run run, double loss_tolerance, double norm_tolerance) {
  const Curve actual = train(run);
  check_clean();
  run.device = DeviceType::kCpu;
  const Curve expected = train(run);
  REQUIRE(actual.losses.size() == static_cast<size_t>(run.num_steps));
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    INFO(fmt::format("step {}: loss {} on cpu {}, gradient norm {} on cpu {}", i, actual.losses[i],
                     expected.losses[i], actual.grad_norms[i], expected.grad_norms[i]));
    CHECK(std::fabs(actual.losses[i] - expected.losses[i]) <= loss_tolerance * expected.losses[i]);
    CHECK(std::fabs(actual.grad_norms[i] - expected.grad_norms[i]) <=
          norm_tolerance * expected.grad_norms[i]);
  }
  CHECK(actual.losses.front() - actual.losses.back() >= 0.5);
}

TEST_CASE("simt train: GPT-2 under full_shard follows the CPU in f32", "[train][simt]") {
  compare_with_cpu({.is_gpt2 = true}, 1e-5, 1e-5);
}

TEST_CASE("simt train: Llama under full_shard follows the CPU in f32", "[train][simt]") {
  compare_with_cpu({}, 1e-5, 1e-5);
}

TEST_CASE("simt train: GPT-2 under full_shard follows the CPU in bf16", "[train][simt]") {
  compare_with_cpu({.is_gpt2 = true, .param_dtype = kBF16}, 1e-3, 1.5e-2);
}

TEST_CASE("simt train: Llama under full_shard follows the CPU in bf16", "[train][simt]") {
  compare_with_cpu({.param_dtype = kBF16}, 1e-3, 1.5e-2);
}

TEST_CASE("simt train: the host submits a step while the device stands still", "[train][simt]") {
  std::atomic<int> num_blocked{0};
  Run run{.num_steps = 4};
  run.around_step = [&](int step, const std::function<void()>& submit) {
    if (step < 2) return submit();  // memory has been taken after the first
    const Stream& compute = Context::current()->compute();
    HostGate gate(compute.device());
    const uint32_t ticket = gate.wait_on(compute);
    std::atomic<bool> is_submitted{false};
    std::thread opener([&] {
      for (int i = 0; i < 3000 && !is_submitted; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (!is_submitted) ++num_blocked;
      gate.open(ticket);
    });
    submit();
    is_submitted = true;
    opener.join();
    compute.synchronize();
  };
  train(run);
  CHECK(num_blocked == 0);
  check_clean();
}

TEST_CASE("simt train: late tasks, offload and hybrid sharding leave the bits as they are",
          "[train][simt]") {
  const Curve expected = train({.num_steps = 3});
  const auto check_same = [&](const dist::FsdpOptions& options, const char* what) {
    INFO(what);
    const Curve actual = train({.num_steps = 3, .fsdp = options});
    CHECK(actual.losses == expected.losses);
    CHECK(actual.grad_norms == expected.grad_norms);
  };
  simt::set_random_delays(100, 11);
  check_same({}, "delays");
  dist::FsdpOptions options;
  options.communicators = 1;
  check_same(options, "one communicator");
  simt::set_random_delays(0, 0);
  options = {};
  options.offload = dist::Offload::kParamsAndOptimizer;
  check_same(options, "offload");
  options = {};
  options.strategy = dist::Strategy::kHybridShard;
  options.shard_size = 2;
  check_same(options, "hybrid");
  check_clean();
}

TEST_CASE("simt train: checkpoints in host memory leave the bits, an MLP in tiles the losses",
          "[train][simt]") {
  using Kind = nn::RecomputePolicy::Kind;
  for (const bool is_gpt2 : {true, false}) {
    const auto curve = [&](const nn::RecomputePolicy& recompute, int delay_us = 0) {
      simt::set_random_delays(delay_us, 7);
      const Curve c =
          train({.is_gpt2 = is_gpt2, .param_dtype = kBF16, .num_steps = 3, .recompute = recompute});
      simt::set_random_delays(0, 0);
      return c;
    };
    const Curve expected = curve({});
    for (const int delay_us : {0, 100}) {
      const Curve away = curve({.kind = Kind::kFull, .offload = true}, delay_us);
      CHECK(away.losses == expected.losses);
      CHECK(away.grad_norms == expected.grad_norms);
    }
    const Curve tiled = curve({.kind = Kind::kFull, .mlp_tile = 5});
    const Curve both = curve({.kind = Kind::kFull, .offload = true, .mlp_tile = 5}, 100);
    CHECK(both.losses == tiled.losses);
    CHECK(both.grad_norms == tiled.grad_norms);
    for (size_t i = 0; i < expected.losses.size(); ++i) {
      CHECK(std::fabs(tiled.losses[i] - expected.losses[i]) <= 1e-3 * expected.losses[i]);
      CHECK(std::fabs(tiled.grad_norms[i] - expected.grad_norms[i]) <=
            1e-2 * expected.grad_norms[i]);
    }
  }
  check_clean();
}

TEST_CASE("simt train: waits for collectives are measured and traced by unit", "[train][simt]") {
  std::mutex mutex;
  Run run{.num_steps = 4};
  int num_measured = 0;
  run.around_step = [&](int step, const std::function<void()>& submit) {
    dist::Fsdp& fsdp = *current_fsdp;
    submit();
    const auto exposed = fsdp.exposed_times();
    Context::current()->compute().synchronize();
    const std::lock_guard lock(mutex);
    REQUIRE(exposed->entries().size() == static_cast<size_t>(dist::ShardView(fsdp).num_units()));
    if (step == 0) {  // not measured yet
      CHECK(exposed->gather_ms() + exposed->reduce_ms() == 0);
      return;
    }
    ++num_measured;
    for (const auto& entry : exposed->entries()) {
      INFO(entry.unit);
      CHECK(entry.time.gather_ns > 0);
      CHECK(entry.time.reduce_ns > 0);
    }
    CHECK(exposed->longest(1)[0].time.total_ns() >= exposed->longest(9).back().time.total_ns());
  };
  profiler::start();
  simt::set_random_delays(100, 3);
  train(run);
  simt::set_random_delays(0, 0);
  profiler::stop();
  CHECK(num_measured == kRanks * 3);
  std::map<std::string, std::set<std::string>> units;
  for (const TraceEvent& e : profiler::events()) units[e.name].insert(e.unit);
  for (const char* unit : {"blocks.0", "blocks.1"}) {
    INFO(unit);
    CHECK(units["all_gather"].count(unit) == 1);
    CHECK(units["reduce_scatter"].count(unit) == 1);
    CHECK(units["wait"].count(unit) == 1);
  }
  CHECK(units["matmul"] == std::set<std::string>{""});
  CHECK(units["adamw_step"].size() == 1);
  profiler::start();  // forgets
  profiler::stop();
  check_clean();
}

TEST_CASE("simt train: ranks that share devices follow through host memory", "[train][simt]") {
  const Curve expected = train({.num_steps = 3});
  simt::set_num_devices(2);
  const Curve actual = train({.num_steps = 3});
  simt::set_num_devices(8);
  CHECK(actual.losses == expected.losses);
  CHECK(actual.grad_norms == expected.grad_norms);
  check_clean();
}

TEST_CASE("simt train: all memory that NCCL moves in a step is registered, and no bit changes",
          "[train][simt]") {
  constexpr int64_t kScalars = 512;  // bytes of partial norms and losses of all ranks
  const auto options_of = [](dist::Strategy strategy) {
    dist::FsdpOptions options;
    options.strategy = strategy;
    if (strategy >= dist::Strategy::kHybridShard) options.shard_size = 2;
    return options;
  };
  std::vector<dist::FsdpOptions> all;
  for (const dist::Strategy strategy : {dist::Strategy::kFullShard, dist::Strategy::kShardOptim,
                                        dist::Strategy::kNoShard, dist::Strategy::kHybridShard}) {
    all.push_back(options_of(strategy));
  }
  all.push_back(options_of(dist::Strategy::kFullShard));
  all.back().reshard_after_forward = 2;
  all.back().communicators = 1;
  all.push_back(options_of(dist::Strategy::kFullShard));
  all.back().precision.reduce_dtype = kF32;
  all.back().precision.wire_dtype = kBF16;
  for (const dist::FsdpOptions& options : all) {
    const DType dtype = options.precision.wire_dtype.value_or(kF32);
    Run run{.param_dtype = dtype, .num_steps = 2, .fsdp = options};
    INFO(name_of(options.strategy) << " " << name_of(dtype));
    simt::take_nccl_buffers();
    const Curve expected = train(run);
    CHECK(simt::take_nccl_buffers().largest_other > kScalars);  // all of it is small
    for (const bool is_native : {false, true}) {
      run.nccl = {.native_reduce_scatter = is_native, .min_registered_nbytes = 1};
      const Curve actual = train(run);
      const simt::NcclBuffers buffers = simt::take_nccl_buffers();
      INFO(buffers.num_registered << " registered, " << buffers.num_others << " others");
      CHECK(buffers.num_registered > 0);
      CHECK(buffers.largest_other <= kScalars);
      if (!is_native) {
        CHECK(actual.losses == expected.losses);
        CHECK(actual.grad_norms == expected.grad_norms);
      }
    }
  }
  check_clean();
}

}  // namespace
}  // namespace tessera
