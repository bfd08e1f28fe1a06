#include "dist/fsdp/offload.h"

#include <array>
#include <cmath>
#include <limits>

#include "core/runtime/order_check.h"
#include "dist/fsdp/fully_shard.h"
#include "dist/fsdp/parts.h"
#include "optim/adamw.h"
#include "optim/sgd.h"
#include "test/dist/fsdp/harness.h"
#include "test/testing.h"

namespace tessera {
namespace {

using dist::GradSync;
using dist::Offload;
using dist::Strategy;
using testing::check_near;
using testing::check_same;
using testing::FsdpResult;
using testing::FsdpRun;
using testing::kStrategies;
using testing::run_fsdp_on_threads;

constexpr Offload kOffloads[] = {Offload::kOptimizer, Offload::kParamsAndOptimizer};

dist::FsdpOptions options_of(Strategy strategy, int world, Offload offload) {
  dist::FsdpOptions options;
  options.strategy = strategy;
  options.offload = offload;
  options.offload_window = 512;  // several windows a shard, the last one shorter
  if (strategy >= Strategy::kHybridShard) options.shard_size = world == 4 ? 2 : 1;
  return options;
}

TEST_CASE("offload: the bits are those without, under every strategy", "[fsdp]") {
  for (const int world : {1, 2, 4}) {
    for (const DType dtype : {kF32, kBF16}) {
      FsdpRun run;
      run.fsdp.precision.param_dtype = dtype;
      const FsdpResult expected = run_fsdp_on_threads(world, run);
      for (const Strategy strategy : kStrategies) {
        for (const Offload offload : kOffloads) {
          run.fsdp = options_of(strategy, world, offload);
          run.fsdp.precision.param_dtype = dtype;
          run.fsdp.precision.reduce_dtype = dtype;
          // With full f32 gradients a sum of bf16 ones is not rounded on the way.
          const bool is_other_sum = dtype != kF32 && strategy == Strategy::kShardOptim;
          const std::string what =
              fmt::format("{} {} world {} {}", name_of(strategy), name_of(offload), world, dtype);
          if (is_other_sum) {
            FsdpRun plain = run;
            plain.fsdp.offload = Offload::kNone;
            check_same(run_fsdp_on_threads(world, run), run_fsdp_on_threads(world, plain), what);
          } else {
            check_same(run_fsdp_on_threads(world, run), expected, what);
          }
        }
      }
    }
  }
}

TEST_CASE("offload: gradients on the host add up over micro-batches", "[fsdp]") {
  for (const Strategy strategy : kStrategies) {
    for (const GradSync sync : {GradSync::kEveryMicroBatch, GradSync::kShard, GradSync::kLast}) {
      if (sync == GradSync::kShard && strategy < Strategy::kHybridShard) continue;
      if (sync != GradSync::kLast && strategy == Strategy::kShardOptim) continue;
      FsdpRun run;
      run.num_micro_batches = 2;
      run.ragged = true;
      run.with_eval = true;
      run.fsdp = options_of(strategy, 4, Offload::kNone);
      run.fsdp.sync_every_micro_batch = sync;
      const FsdpResult expected = run_fsdp_on_threads(4, run);
      for (const Offload offload : kOffloads) {
        run.fsdp.offload = offload;
        check_same(
            run_fsdp_on_threads(4, run), expected,
            fmt::format("{} {} sync {}", name_of(strategy), name_of(offload), name_of(sync)));
      }
    }
  }
}

TEST_CASE("offload: the same bits whatever the window, prefetch, delays and recompute", "[fsdp]") {
  FsdpRun run;
  run.fsdp = options_of(Strategy::kFullShard, 4, Offload::kNone);
  const FsdpResult expected = run_fsdp_on_threads(4, run);
  run.fsdp.offload = Offload::kParamsAndOptimizer;
  for (const int64_t window : {256, 768, 1 << 20}) {
    for (const int prefetch : {0, 1, 2}) {
      run.fsdp.offload_window = window;
      run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
      run.fsdp.communicators = prefetch == 1 ? 1 : 2;
      run.recompute.kind =
          prefetch == 2 ? nn::RecomputePolicy::Kind::kFull : nn::RecomputePolicy::Kind::kNone;
      run.local.max_random_delay_us = 200;
      run.local.delay_seed = static_cast<uint64_t>(window + prefetch);
      check_same(run_fsdp_on_threads(4, run), expected,
                 fmt::format("window {} prefetch {}", window, prefetch));
    }
  }
}

TEST_CASE("offload: parts of a unit that stay gathered in smaller groups are as sent", "[fsdp]") {
  FsdpRun run;
  run.num_micro_batches = 2;
  run.fsdp = options_of(Strategy::kFullShard, 4, Offload::kNone);
  const FsdpResult expected = run_fsdp_on_threads(4, run);
  run.fsdp.reshard_after_forward = 2;
  for (const Offload offload : kOffloads) {
    run.fsdp.offload = offload;
    check_same(run_fsdp_on_threads(4, run), expected, std::string(name_of(offload)));
  }
}

TEST_CASE("offload: frozen parameters come from the host and have no gradient there", "[fsdp]") {
  FsdpRun run;
  run.prepare = [](nn::LanguageModel& model) {
    for (const nn::NamedParameter& p : model.named_parameters()) {
      if (p.name.find("blocks.1") != std::string::npos)
        p.parameter->tensor.set_requires_grad(false);
    }
  };
  for (const DType dtype : {kF32, kBF16}) {
    run.fsdp = options_of(Strategy::kFullShard, 2, Offload::kNone);
    run.fsdp.precision.param_dtype = dtype;
    const FsdpResult expected = run_fsdp_on_threads(2, run);
    for (const Offload offload : kOffloads) {
      run.fsdp.offload = offload;
      check_same(run_fsdp_on_threads(2, run), expected,
                 fmt::format("{} {}", name_of(offload), dtype));
    }
  }
}

struct Figures {
  int64_t numel = 0, largest = 0, num_shards = 0;
  AllocatorStats device, host;
};

Figures figures(Offload offload, DType dtype, int num_layers) {
  Figures result;
  FsdpRun run;
  run.num_steps = 2;
  run.model.num_layers = num_layers;
  run.fsdp = options_of(Strategy::kFullShard, 2, offload);
  run.fsdp.precision.param_dtype = dtype;
  run.on_step = [&](int step, dist::Fsdp& fsdp, dist::World& world) {
    if (step != 1 || world.rank() != 0) return;
    for (const optim::FlatShard& shard : fsdp.shards()) {
      result.numel += shard.master.numel();
      result.largest = std::max(result.largest, shard.master.numel());
      ++result.num_shards;
    }
    result.device = Context::current()->allocator()->stats();
    result.host = Context::current()->host_allocator()->stats();
  };
  run_fsdp_on_threads(2, run);
  return result;
}

TEST_CASE("offload: bytes on the device fall to the rings, the host has the rest", "[fsdp]") {
  const auto of = [](const AllocatorStats& stats, MemoryClass c) {
    return stats.allocated_by_class[static_cast<size_t>(c)];
  };
  constexpr int64_t kWindow = 512, kSlots = 3;
  for (const DType dtype : {kF32, kBF16}) {
    for (const int num_layers : {2, 8}) {
      const Figures none = figures(Offload::kNone, dtype, num_layers);
      const int64_t n = none.numel, low = static_cast<int64_t>(size_of(dtype));
      const bool has_low = dtype != kF32;
      CHECK(none.host.allocated == 0);
      // Segment tables and the step count: one granule each.
      const int64_t tables = of(none.device, MemoryClass::kOptimizer) - 8 * n;
      CHECK(tables > 0);
      CHECK(tables <= 512 * (2 * none.num_shards + 1) * 2);

      const Figures optimizer = figures(Offload::kOptimizer, dtype, num_layers);
      CHECK(of(optimizer.device, MemoryClass::kOptimizer) - tables ==
            kSlots * kWindow * 4 * (has_low ? 3 : 2));
      CHECK(of(optimizer.host, MemoryClass::kOptimizer) == 8 * n);
      CHECK(of(optimizer.host, MemoryClass::kParameters) == (has_low ? 4 * n : 0));
      CHECK(of(none.device, MemoryClass::kParameters) -
                of(optimizer.device, MemoryClass::kParameters) ==
            (has_low ? 4 * n : 0));
      CHECK(of(none.device, MemoryClass::kGradients) ==
            of(optimizer.device, MemoryClass::kGradients));
      CHECK(optimizer.host.allocated == (has_low ? 12 : 8) * n);

      const Figures all = figures(Offload::kParamsAndOptimizer, dtype, num_layers);
      CHECK(of(all.device, MemoryClass::kOptimizer) - tables ==
            kSlots * kWindow * 4 * (has_low ? 5 : 4));
      CHECK(of(none.device, MemoryClass::kParameters) - of(all.device, MemoryClass::kParameters) ==
            (has_low ? 4 + low : 4) * n);
      CHECK(of(none.device, MemoryClass::kGradients) - of(all.device, MemoryClass::kGradients) ==
            4 * n - 2 * 4 * all.largest);
      CHECK(of(all.host, MemoryClass::kGradients) == 4 * n);
      CHECK(all.host.allocated == (has_low ? 16 + low : 16) * n);
    }
  }
}

/// Three steps on two shards of unequal length; what comes out.
template <class Optimizer, class Options>
std::vector<std::vector<double>> optimize(const Options& options, DType low_dtype,
                                          std::shared_ptr<dist::Offloader> store, Offload offload) {
  const bool all_on_host = offload == Offload::kParamsAndOptimizer;
  std::vector<optim::FlatShard> shards;
  for (const int64_t numel : {int64_t{1280}, int64_t{256}}) {
    const auto make = [&](DType dtype, bool on_host, double value) {
      Tensor t = on_host ? dist::empty_on_host(numel, dtype) : empty({numel}, dtype);
      t.fill_(value);
      return t;
    };
    optim::FlatShard shard;
    shard.name = "unit";
    shard.store = store;
    shard.master = make(kF32, store != nullptr && (all_on_host || low_dtype != kF32), 0);
    shard.grad = make(kF32, all_on_host, 0);
    if (low_dtype != kF32) shard.low = make(low_dtype, all_on_host, 0);
    std::vector<float> values(static_cast<size_t>(numel));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = 0.01f * static_cast<float>(i % 97) - 0.4f;
    shard.grad.copy_(from_values(std::span<const float>(values), {numel}));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = 0.02f * static_cast<float>(i % 89) - 0.7f;
    shard.master.copy_(from_values(std::span<const float>(values), {numel}));
    // Segments that begin and end inside windows, with padding between them.
    shard.segments = {{"a", 0, 7, 1, true}, {"b", 100, numel - 3, 0.5f, false}};
    shards.push_back(shard);
  }
  Optimizer optimizer(shards, options);
  const Tensor skip = from_values({1}, {}, kU8);
  for (int step = 0; step < 3; ++step) {
    optimizer.step(1e-2f, full({}, 0.5, kF32));
    optimizer.step(1e-2f, {}, skip);  // changes nothing
  }
  std::vector<std::vector<double>> result;
  for (const optim::FlatShard& shard : shards) {
    result.push_back(shard.master.to_vector());
    if (shard.low.is_defined()) result.push_back(shard.low.to_vector());
  }
  for (const optim::NamedState& state : optimizer.state()) {
    for (const Tensor& t : state.tensors) result.push_back(t.to_vector());
  }
  return result;
}

TEST_CASE("offload: AdamW and SGD through windows change what they would change", "[fsdp]") {
  auto context = std::make_shared<Context>(ContextOptions{
      .device = {}, .num_threads = 1, .memory_limit = 0, .poison = true, .order_check = true});
  const Context::Scope scope(context);
  for (const DType low : {kF32, kBF16, kF16}) {
    for (const Offload offload : kOffloads) {
      for (const int64_t window : {256, 512, 4096}) {
        INFO(name_of(low) << " " << name_of(offload) << " window " << window);
        const auto check = [&](auto run) {
          const auto expected = run(nullptr, Offload::kNone);
          CHECK(run(std::make_shared<dist::Offloader>(offload, window, true, true), offload) ==
                expected);
          CHECK(expected[0][5] != expected[0][8]);  // a change beside padding
        };
        check([&](auto store, Offload o) {
          return optimize<optim::AdamW>(optim::AdamWOptions{}, low, store, o);
        });
        check([&](auto store, Offload o) {
          return optimize<optim::Sgd>(optim::SgdOptions{.momentum = 0.9f, .nesterov = true}, low,
                                      store, o);
        });
        check([&](auto store, Offload o) {
          return optimize<optim::Sgd>(optim::SgdOptions{.weight_decay = 0.1f}, low, store, o);
        });
      }
    }
  }
  context->order_check()->throw_if_conflicts();
}

TEST_CASE("offload: each wait is needed: without it the checker reports a conflict", "[fsdp]") {
  using dist::OffloadWait;
  std::vector<FsdpRun> runs;
  for (const Strategy strategy : {Strategy::kFullShard, Strategy::kHybridShard}) {
    for (const DType dtype : {kF32, kBF16}) {
      FsdpRun run;
      run.num_steps = 2;
      run.num_micro_batches = 2;
      run.fsdp = options_of(strategy, 4, Offload::kParamsAndOptimizer);
      run.fsdp.sync_every_micro_batch = GradSync::kEveryMicroBatch;
      run.fsdp.precision.param_dtype = dtype;
      runs.push_back(run);
      run.fsdp.offload = Offload::kOptimizer;
      runs.push_back(run);
    }
  }
  for (int point = 0; point < static_cast<int>(OffloadWait::kCount); ++point) {
    if (point == static_cast<int>(OffloadWait::kStatesReady)) continue;  // the next case
    bool is_reported = false;
    for (FsdpRun& run : runs) {
      run.on_ready = [point](dist::Fsdp& fsdp, dist::World&) {
        parts_of(fsdp).lanes.offloader->wait.hidden = static_cast<OffloadWait>(point);
      };
      try {
        run_fsdp_on_threads(4, run);
      } catch (const InternalError& error) {
        is_reported = std::string(error.what()).find("order check") != std::string::npos;
      }
      if (is_reported) break;
    }
    INFO("wait " << point);
    CHECK(is_reported == (point != static_cast<int>(OffloadWait::kNone)));
  }
}

TEST_CASE("offload: states set between steps are waited for", "[fsdp]") {
  using dist::OffloadWait;
  for (const OffloadWait hidden : {OffloadWait::kNone, OffloadWait::kStatesReady}) {
    auto context = std::make_shared<Context>(ContextOptions{
        .device = {}, .num_threads = 1, .memory_limit = 0, .poison = true, .order_check = true});
    const Context::Scope scope(context);
    auto store = std::make_shared<dist::Offloader>(Offload::kOptimizer, 512, true, true);
    store->wait.hidden = hidden;
    optim::FlatShard shard;
    shard.master = zeros({1024});
    shard.grad = full({1024}, 0.5);
    shard.segments = {{"a", 0, 1000, 1, true}};
    shard.store = store;
    optim::AdamW adamw({shard});
    adamw.step();
    for (const optim::NamedState& state : adamw.state()) Tensor(state.tensors[0]).fill_(0.25);
    adamw.step();
    CHECK(context->order_check()->conflicts().empty() == (hidden == OffloadWait::kNone));
    CHECK(std::abs(adamw.state()[0].tensors[0].to_vector()[0] - 0.275) < 1e-6);
    store->drain();
  }
}

TEST_CASE("offload: clipping with gradients on the host, any norm, also without a gradient",
          "[fsdp]") {
  for (const Strategy strategy : {Strategy::kFullShard, Strategy::kHybridShard}) {
    for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
      std::array<double, 2> norms{};
      for (const Offload offload : {Offload::kNone, Offload::kParamsAndOptimizer}) {
        FsdpRun run;
        run.fsdp = options_of(strategy, 4, offload);
        double& norm = norms[offload == Offload::kNone ? 0 : 1];
        run.num_steps = 1;
        run.on_ready = [](dist::Fsdp& fsdp, dist::World&) {
          if (fsdp.clip_grad_norm(1.0).norm.item() != 0) throw Error("a norm before backward");
          fsdp.end_step();
        };
        run.norm_p = p;
        norm = run_fsdp_on_threads(4, run).grad_norms.at(0);
      }
      CHECK(norms[0] == norms[1]);
      CHECK(norms[0] > 0);
    }
  }
}

TEST_CASE("offload: a step that overflows changes nothing in host memory either", "[fsdp]") {
  FsdpRun run;
  run.fsdp = options_of(Strategy::kFullShard, 4, Offload::kNone);
  run.fsdp.precision.param_dtype = kF16;
  run.loss_scale = dist::LossScaleOptions{};
  run.loss_scale->init = 1 << 20;  // overflows in the first steps
  run.num_steps = 7;
  const auto result = [&run] {  // of rank 0; norms are NaN where a step overflows
    FsdpResult result;
    dist::run_ranks(4, run.local, [&](dist::World& world) {
      FsdpResult mine = testing::run_fsdp(world, run);
      if (world.rank() == 0) result = std::move(mine);
    });
    return result;
  };
  const FsdpResult expected = result();
  CHECK(expected.loss_scales.back() < expected.loss_scales.front());
  CHECK(!std::isfinite(expected.grad_norms.front()));
  CHECK(std::isfinite(expected.grad_norms.back()));
  for (const Offload offload : kOffloads) {
    run.fsdp.offload = offload;
    const FsdpResult actual = result();
    CHECK(actual.loss_scales == expected.loss_scales);
    CHECK(actual.parameters == expected.parameters);
    CHECK(actual.losses == expected.losses);
  }
}

TEST_CASE("offload: reproducible mode keeps gradient shards on the device and the bits", "[fsdp]") {
  FsdpRun run;
  run.num_micro_batches = 2;
  run.fsdp = options_of(Strategy::kFullShard, 2, Offload::kNone);
  run.fsdp.reproducible = true;
  const FsdpResult expected = run_fsdp_on_threads(2, run);
  for (const Offload offload : kOffloads) {
    run.fsdp.offload = offload;
    check_same(run_fsdp_on_threads(2, run), expected, std::string(name_of(offload)));
  }
}

TEST_CASE("offload: names and ranges are checked", "[fsdp]") {
  for (const Offload offload :
       {Offload::kNone, Offload::kOptimizer, Offload::kParamsAndOptimizer}) {
    CHECK(enum_from_name<dist::Offload>(name_of(offload), "offload") == offload);
  }
  CHECK_THROWS_WITH(
      enum_from_name<dist::Offload>("cpu", "offload"),
      Catch::Contains("offload: unknown name \"cpu\", expected one of none, optimizer, "
                      "params_and_optimizer"));
  FsdpRun run;
  run.fsdp.offload_window = 100;
  CHECK_THROWS_WITH(
      run_fsdp_on_threads(1, run),
      Catch::Contains("FsdpOptions::offload_window: 100, expected a multiple of 256"));
}

}  // namespace
}  // namespace tessera
