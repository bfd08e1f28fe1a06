#include "dist/fsdp/reproducible.h"

#include <cmath>

#include "core/autograd.h"
#include "core/elementary/kernel.h"
#include "dist/comm/transport.h"
#include "test/dist/fsdp/harness.h"
#include "test/dist/fsdp/reproducible_cases.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using dist::GradSync;
using dist::LeafTree;
using dist::Strategy;

TEST_CASE("reproducible: full and hybrid shard, f32 and bf16: 8, 4, 2 ranks have the bits of one",
          "[fsdp]") {
  for (const ReproducibleCase& c : reproducible_cases()) {
    const FsdpResult expected = run_fsdp_on_threads(1, c.run_on(1));
    CHECK(expected.losses.back() < expected.losses.front());
    for (const int world : {2, 4, 8}) {
      check_same(run_fsdp_on_threads(world, c.run_on(world)), expected,
                 fmt::format("{} on {} ranks", c.name, world));
    }
  }
}

TEST_CASE("reproducible: without it the bits depend on the number of ranks", "[fsdp]") {
  for (ReproducibleCase c : reproducible_cases()) {
    c.run.fsdp.reproducible = false;
    CHECK(run_fsdp_on_threads(4, c.run_on(4)).parameters !=
          run_fsdp_on_threads(1, c.run_on(1)).parameters);
  }
}

TEST_CASE("reproducible: other strategies, wrapping, ragged data and 12 micro-batches", "[fsdp]") {
  FsdpRun run;
  run.fsdp.reproducible = true;
  run.ragged = true;
  run.samples_per_step = 12;
  run.num_micro_batches = 12;
  const FsdpResult expected = run_fsdp_on_threads(1, run);
  for (const Strategy strategy : {Strategy::kShardGradOp, Strategy::kNoShard,
                                  Strategy::kHybridShard, Strategy::kHybridShardZero2}) {
    for (const int world : {2, 4}) {
      run.fsdp.strategy = strategy;
      run.fsdp.shard_size = strategy >= Strategy::kHybridShard ? 2 : 0;
      run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = world / 2 - 1;
      run.fsdp.communicators = world / 2;
      run.num_micro_batches = run.samples_per_step / world;
      check_same(run_fsdp_on_threads(world, run), expected,
                 fmt::format("{} on {} ranks", name_of(strategy), world));
    }
  }
}

TEST_CASE("reproducible: offload, recompute, evaluation and frozen parameters change no bit",
          "[fsdp]") {
  FsdpRun run;
  run.fsdp.reproducible = true;
  run.fsdp.precision.param_dtype = kBF16;
  run.fsdp.precision.reduce_dtype = kF32;
  run.samples_per_step = run.num_micro_batches = 8;
  run.prepare = [](nn::LanguageModel& model) {
    for (const nn::NamedParameter& p : model.named_parameters()) {
      if (p.name.find("attn.out") != std::string::npos)
        p.parameter->tensor.set_requires_grad(false);
    }
  };
  const FsdpResult expected = run_fsdp_on_threads(1, run);
  run.with_eval = true;
  run.recompute.kind = nn::RecomputePolicy::Kind::kSelective;
  for (const dist::Offload offload :
       {dist::Offload::kOptimizer, dist::Offload::kParamsAndOptimizer}) {
    for (const int world : {1, 2, 4}) {
      run.fsdp.offload = offload;
      run.fsdp.offload_window = 256;
      run.fsdp.strategy = world == 4 ? Strategy::kHybridShard : Strategy::kFullShard;
      run.fsdp.shard_size = world == 4 ? 2 : 0;
      run.num_micro_batches = 8 / world;
      check_same(run_fsdp_on_threads(world, run), expected,
                 fmt::format("offload {} on {} ranks", name_of(offload), world));
    }
  }
}

TEST_CASE("reproducible: stochastic rounding has the same bits on any ranks, wrapping and offload",
          "[fsdp]") {
  FsdpRun run;
  run.fsdp.reproducible = true;
  run.fsdp.precision.param_dtype = kBF16;
  run.fsdp.precision.reduce_dtype = kF32;
  run.fsdp.precision.norm_fp32 = true;
  run.samples_per_step = run.num_micro_batches = 8;
  const FsdpResult nearest = run_fsdp_on_threads(1, run);
  run.rounding_seed = 3;
  const FsdpResult expected = run_fsdp_on_threads(1, run);
  CHECK(expected.losses[0] == nearest.losses[0]);  // initialized to nearest
  CHECK(expected.losses[1] != nearest.losses[1]);
  run.rounding_seed = 4;
  CHECK(run_fsdp_on_threads(1, run).losses != expected.losses);
  run.rounding_seed = 3;
  for (const int world : {2, 4}) {
    run.num_micro_batches = 8 / world;
    check_same(run_fsdp_on_threads(world, run), expected, fmt::format("{} ranks", world));
  }
  run.num_micro_batches = 4;
  run.fsdp.strategy = Strategy::kNoShard;
  check_same(run_fsdp_on_threads(2, run), expected, "no_shard");
  run.fsdp.strategy = Strategy::kFullShard;
  for (const dist::Offload offload :
       {dist::Offload::kOptimizer, dist::Offload::kParamsAndOptimizer}) {
    run.fsdp.offload = offload;
    run.fsdp.offload_window = 256;
    check_same(run_fsdp_on_threads(2, run), expected, fmt::format("offload {}", name_of(offload)));
  }
}

TEST_CASE("reproducible: low-precision gradients", "[fsdp]") {
  for (const DType wire : {kBF16, kF32}) {
    FsdpRun run;
    run.fsdp.reproducible = true;
    run.fsdp.precision.param_dtype = kBF16;
    run.fsdp.precision.wire_dtype = wire;  // reduce_dtype: bf16
    run.num_micro_batches = 8;
    const FsdpResult expected = run_fsdp_on_threads(1, run);
    run.num_micro_batches = 2;
    check_same(run_fsdp_on_threads(4, run), expected, fmt::format("wire {}", wire));
  }
}

TEST_CASE("reproducible: micro-batches are added like a binary counter counts", "[fsdp]") {
  // Powers of ten that round differently in every order.
  const auto leaf = [](int64_t i) {
    return static_cast<float>(std::pow(10.0, static_cast<double>(i * 7 % 5)) / 3);
  };
  const auto tree = [&](const auto& self, int64_t begin, int64_t end) -> float {
    if (end - begin == 1) return leaf(begin);
    int64_t half = 1;  // the largest power of two below the number
    while (half * 2 < end - begin) half *= 2;
    return self(self, begin, begin + half) + self(self, begin + half, end);
  };
  const auto serial = [&](int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += leaf(i);
    return sum;
  };
  int num_different = 0;
  for (int64_t count = 1; count <= 33; ++count) {
    INFO(count << " leaves");
    const float expected = tree(tree, 0, count);
    num_different += expected != serial(count);
    for (int64_t ranks = 1; ranks <= count && count % ranks == 0; ranks *= 2) {
      std::vector<Tensor> sums;
      for (int64_t a = 0; a < count / ranks; ++a) {
        std::vector<float> values(static_cast<size_t>(ranks));
        std::vector<const void*> sources;
        for (int64_t r = 0; r < ranks; ++r) {
          values[static_cast<size_t>(r)] = leaf(a * ranks + r);
          sources.push_back(&values[static_cast<size_t>(r)]);
        }
        float sum = 0;
        dist::tree_reduce({&sum, sources.data(), static_cast<int>(ranks), 1, kF32, kF32});
        sums.push_back(from_values(std::vector<float>{sum}, {1}));
      }
      CHECK(static_cast<float>(dist::sum_in_tree(sums).item()) == expected);
    }
  }
  CHECK(num_different > 10);
}

TEST_CASE("reproducible: log2(micro-batches) - 1 buffers, kept from step to step", "[fsdp]") {
  const Stream stream = current_stream();
  for (const auto& [count, num_buffers] :
       std::vector<std::pair<int, int>>{{1, 0}, {2, 0}, {4, 1}, {8, 2}, {12, 2}, {64, 5}}) {
    const Tensor result = zeros({3}, kF32);
    LeafTree tree;
    for (int step = 0; step < 2; ++step) {
      for (int i = 0; i < count; ++i) {
        tree.begin(result);
        const auto [data, accumulate] = tree.destination();
        const Tensor one = full({3}, 1.0, kF32);
        kernels::copy(stream, {data, one.raw_data(), kF32, kF32, {3}, {1}, {1}, accumulate});
        tree.end(stream);
      }
      tree.finish(stream);
      CHECK(result.to_vector() == std::vector<double>(3, count));
      CHECK(tree.num_buffers() == num_buffers);
      tree.reset();
    }
  }
}

TEST_CASE("reproducible: a second backward of a micro-batch is an error", "[fsdp]") {
  FsdpRun run;
  run.fsdp.reproducible = true;
  nn::LanguageModel* model = nullptr;
  run.prepare = [&](nn::LanguageModel& m) { model = &m; };
  std::string message;
  run.on_ready = [&](dist::Fsdp& fsdp, dist::World&) {
    const Tensor ids_BT = zeros({1, 4}, kI32);
    const auto pass = [&] { backward(model->loss(ids_BT, ids_BT).sum); };
    fsdp.begin_micro_batch(0, 2);
    pass();
    fsdp.begin_micro_batch(1, 2);
    pass();
    message = error_of(pass);
    fsdp.end_step();
  };
  run.num_steps = 0;
  run_fsdp_on_threads(1, run);
  CHECK_THAT(message, Catch::Contains("reproducible mode: unit head has the gradients of 2 "
                                      "backwards before that of micro-batch 1, expected one a "
                                      "micro-batch, each after begin_micro_batch"));
}

TEST_CASE("reproducible: what cannot give the same bits is refused", "[fsdp]") {
  const auto error = [](int world, Strategy strategy, std::optional<GradSync> sync) {
    FsdpRun run;
    run.fsdp.strategy = strategy;
    run.fsdp.sync_every_micro_batch = sync;
    run.fsdp.reproducible = true;
    run.samples_per_step = world;
    const std::string message = error_of([&] { run_fsdp_on_threads(world, run); });
    return message.substr(0, message.rfind(" dist/fsdp/"));
  };
  CHECK(error(3, Strategy::kFullShard, {}) ==
        "FsdpOptions::reproducible: 3 ranks, expected a power of two up to 64");
  CHECK(
      error(2, Strategy::kShardOptim, {}) ==
      "FsdpOptions::reproducible: strategy is shard_optim, which adds the micro-batches before the "
      "ranks; expected another one");
  CHECK(error(2, Strategy::kFullShard, GradSync::kLast) ==
        "FsdpOptions::reproducible: sync_every_micro_batch is false, expected true");
  CHECK(error(2, Strategy::kHybridShard, GradSync::kShard) ==
        "FsdpOptions::reproducible: sync_every_micro_batch is shard, expected true");
}

}  // namespace
}  // namespace tessera::testing
