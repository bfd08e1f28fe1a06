#include "dist/fsdp/guards.h"

#include <mutex>

#include "core/random.h"
#include "core/runtime/context.h"
#include "dist/comm/local.h"
#include "dist/fsdp/parts.h"
#include "dist/fsdp/shard_view.h"
#include "nn/generate.h"
#include "test/dist/fsdp/harness.h"
#include "test/dist/fsdp/net.h"
#include "test/testing.h"

namespace tessera {
namespace {

using dist::Fsdp;
using dist::FsdpOptions;
using dist::GradSync;
using dist::NoSync;
using dist::Residence;
using dist::run_ranks;
using dist::Strategy;
using dist::UnshardGuard;
using dist::World;
using testing::check_near;
using testing::check_same;
using testing::count_lines;
using testing::error_of;
using testing::FsdpResult;
using testing::FsdpRun;
using testing::kStrategies;
using testing::run_fsdp_on_threads;

FsdpOptions options_of(Strategy strategy, int world_size) {
  FsdpOptions options;
  options.strategy = strategy;
  if (strategy >= Strategy::kHybridShard) options.shard_size = world_size == 4 ? 2 : 1;
  return options;
}

/// The tiny model with its initial values.
struct Sharded {
  std::unique_ptr<nn::Llama> model;
  std::unique_ptr<Fsdp> fsdp;

  Sharded(World& world, const FsdpOptions& options) {
    {
      nn::DeferredInit deferred;
      model = std::make_unique<nn::Llama>(FsdpRun::tiny_llama());
    }
    fsdp = fully_shard(*model, world, options);
    fsdp->initialize(7);
  }
};

std::map<std::string, std::vector<double>> masters_of(Fsdp& fsdp) {
  std::map<std::string, std::vector<double>> values;
  fsdp.for_each_full(Fsdp::State::kMaster, [&](const std::string& name, const Tensor& full) {
    values[name] = full.to_vector();
  });
  return values;
}

/// Throws on the rank's thread, where the test framework's checks are not allowed.
void expect(bool condition, const std::string& what) {
  if (!condition) throw Error("expected: " + what);
}

void expect_sharded(Fsdp& fsdp, const std::string& when) {
  for (const auto& unit : parts_of(fsdp).units) {
    if (unit->lanes().policy.residence != Residence::kReshard) continue;
    expect(!unit->gathered.is_there(), fmt::format("{} is sharded {}", unit->name(), when));
  }
}

// ---- unshard

TEST_CASE("unshard: shows full parameters on every rank and leaves the unit sharded", "[fsdp]") {
  for (const DType dtype : {kF32, kBF16}) {
    for (const int world_size : {1, 2, 4}) {
      for (const Strategy strategy : kStrategies) {
        INFO(name_of(strategy) << " world " << world_size << " " << name_of(dtype));
        REQUIRE_NOTHROW(run_ranks(world_size, [&](World& world) {
          FsdpOptions options = options_of(strategy, world_size);
          options.precision.param_dtype = dtype;
          const Sharded sharded(world, options);
          const auto& [model, fsdp] = sharded;
          const auto masters = masters_of(*fsdp);
          const auto check = [&](const std::string& name) {
            const Tensor& tensor = sharded.model->parameter(name).tensor;
            const std::vector<double> shown = tensor.to_vector();
            const std::vector<double>& expected = masters.at(name);
            expect(shown.size() == expected.size(), name + " has all its elements");
            for (size_t i = 0; i < shown.size(); ++i) {
              const double rounded = dtype == kF32
                                         ? expected[i]
                                         : static_cast<double>(static_cast<float>(
                                               BFloat16(static_cast<float>(expected[i]))));
              expect(shown[i] == rounded, name + " has its values");
            }
          };
          {
            const UnshardGuard guard(*fsdp, "blocks.1");
            for (const nn::NamedParameter& p : model->named_parameters()) {
              if (p.name.rfind("blocks.1.", 0) == 0) check(p.name);
            }
          }
          expect_sharded(*fsdp, "after a guard");
          {
            const UnshardGuard all(*fsdp, *model);
            { const UnshardGuard nested(*fsdp, "blocks.1"); }
            for (const nn::NamedParameter& p : model->named_parameters()) check(p.name);
          }
          expect_sharded(*fsdp, "after nested guards");
          expect(masters_of(*fsdp) == masters, "reading changes nothing");
          fsdp->end_step();
        }));
      }
    }
  }
}

/// Writes one parameter in a guard: masters and gathers have it, and nothing else has changed.
void write_in_guard(World& world, const FsdpOptions& options) {
  const Sharded sharded(world, options);
  const auto& [model, fsdp] = sharded;
  auto expected = masters_of(*fsdp);
  std::string written;
  {
    const UnshardGuard guard(*fsdp, "blocks.2", UnshardGuard::Access::kWrite);
    for (const nn::NamedParameter& p : model->named_parameters()) {
      if (p.name.rfind("blocks.2.", 0) != 0 || p.parameter->tensor.num_dims() != 2) continue;
      NoGrad no_grad;
      p.parameter->tensor.fill_(0.25);
      written = p.name;
      break;
    }
  }
  for (double& x : expected.at(written)) x = 0.25;
  expect(masters_of(*fsdp) == expected, "only " + written + " has changed");
  // What modules see is what the shards hold.
  const UnshardGuard guard(*fsdp, "blocks.2");
  expect(model->parameter(written).tensor.to_vector() == expected.at(written),
         "the next gather sends it");
}

TEST_CASE("unshard: what is written goes to the shards, all else keeps its bits", "[fsdp]") {
  for (const dist::Offload offload :
       {dist::Offload::kNone, dist::Offload::kOptimizer, dist::Offload::kParamsAndOptimizer}) {
    for (const DType dtype : {kF32, kBF16}) {
      for (const int world_size : {1, 2, 4}) {
        for (const Strategy strategy : kStrategies) {
          INFO(name_of(strategy) << " world " << world_size << " " << name_of(dtype) << " offload "
                                 << name_of(offload));
          FsdpOptions options = options_of(strategy, world_size);
          options.precision.param_dtype = dtype;
          options.offload = offload;
          REQUIRE_NOTHROW(
              run_ranks(world_size, [&](World& world) { write_in_guard(world, options); }));
        }
      }
    }
  }
}

TEST_CASE("unshard: guards around a micro-batch change no bit", "[fsdp]") {
  for (const Strategy strategy : {Strategy::kFullShard, Strategy::kShardGradOp}) {
    for (const int prefetch : {0, 1}) {
      FsdpRun run;
      run.num_micro_batches = 2;
      run.fsdp.strategy = strategy;
      run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
      const FsdpResult expected = run_fsdp_on_threads(2, run);
      run.scope = [](int, Fsdp& fsdp, nn::LanguageModel&) {
        return std::make_shared<UnshardGuard>(fsdp, "blocks.1");
      };
      const FsdpResult actual = run_fsdp_on_threads(2, run);
      check_same(actual, expected, std::string(name_of(strategy)));
      if (strategy != Strategy::kFullShard) continue;
      // Once for each of two micro-batches instead of twice.
      CHECK(count_lines(expected.program, "gather_backward blocks.1") == 2);
      CHECK(count_lines(actual.program, "gather_unshard blocks.1") == 2);
      CHECK(count_lines(actual.program, "gather_forward blocks.1") == 0);
      CHECK(count_lines(actual.program, "gather_backward blocks.1") == 0);
    }
  }
}

TEST_CASE("unshard: an unknown unit is named", "[fsdp]") {
  run_ranks(1, [](World& world) {
    nn::Llama model(FsdpRun::tiny_llama());
    const auto fsdp = fully_shard(model, world);
    const std::string error = error_of([&] { const UnshardGuard guard(*fsdp, "blocks.9"); });
    expect(error.find("no unit is called \"blocks.9\"; there are embedding, blocks.0") !=
               std::string::npos,
           "the units are listed: " + error);
  });
}

// ---- no_sync

TEST_CASE("no_sync: toggled anywhere in an accumulation, the gradients are those of one batch",
          "[fsdp]") {
  FsdpRun run;
  run.ragged = true;
  run.fsdp.strategy = Strategy::kNoShard;
  const FsdpResult expected = run_fsdp_on_threads(1, run);
  run.samples_per_step = 8;
  for (const int world_size : {1, 2, 4}) {
    for (const Strategy strategy : kStrategies) {
      for (const std::optional<GradSync> sync :
           {std::optional<GradSync>(), std::optional(GradSync::kLast)}) {
        for (const unsigned without : {0b01u, 0b10u, 0b11u}) {
          run.num_micro_batches = 2;
          run.fsdp = options_of(strategy, world_size);
          run.fsdp.sync_every_micro_batch = sync;
          run.scope = [without](int a, Fsdp& fsdp, nn::LanguageModel&) {
            return (without >> a & 1) != 0 ? std::make_shared<NoSync>(fsdp) : nullptr;
          };
          const FsdpResult actual = run_fsdp_on_threads(world_size, run);
          check_near(actual, expected, 1e-5,
                     fmt::format("{} world {} sync {} without {}", name_of(strategy), world_size,
                                 sync ? name_of(*sync) : "default", without));
          // One reduce for the micro-batches in the guard and the next one; two if the guard is
          // around the last and the first has reduced.
          const bool keeps = sync == GradSync::kLast || strategy == Strategy::kShardOptim;
          const int num_reduces = without == 0b10 && !keeps ? 2 : 1;
          if (world_size > 1) CHECK(count_lines(actual.program, "reduce blocks.1") == num_reduces);
        }
      }
    }
  }
}

TEST_CASE("no_sync: gradients kept in f32 are rounded once to what travels", "[fsdp]") {
  FsdpRun run;
  run.num_micro_batches = 4;
  run.fsdp.precision.param_dtype = kBF16;
  run.fsdp.sync_every_micro_batch = GradSync::kLast;
  const FsdpResult expected = run_fsdp_on_threads(2, run);
  run.fsdp.sync_every_micro_batch = GradSync::kEveryMicroBatch;
  run.scope = [](int a, Fsdp& fsdp, nn::LanguageModel&) {
    return a < 3 ? std::make_shared<NoSync>(fsdp) : nullptr;
  };
  check_near(run_fsdp_on_threads(2, run), expected, 2e-2, "bf16");
}

TEST_CASE("no_sync: reproducible mode refuses it", "[fsdp]") {
  run_ranks(1, [](World& world) {
    nn::Llama model(FsdpRun::tiny_llama());
    FsdpOptions options;
    options.reproducible = true;
    const auto fsdp = fully_shard(model, world, options);
    expect(error_of([&] { const NoSync guard(*fsdp); }).find("not in reproducible mode") !=
               std::string::npos,
           "the setting is named");
  });
}

// ---- reshard_after_forward = g

TEST_CASE("reshard_after_forward: a group size changes no bit", "[fsdp]") {
  for (const int world_size : {4, 8}) {
    for (const bool mixed : {false, true}) {
      FsdpRun run;
      run.num_micro_batches = world_size == 4 ? 2 : 1;
      run.with_eval = true;
      if (mixed) run.fsdp.precision.param_dtype = kBF16;
      const FsdpResult expected = run_fsdp_on_threads(world_size, run);
      for (const int group_size : {2, 4}) {
        for (const int prefetch : {0, 1, 2}) {
          for (const bool recompute : {false, true}) {
            run.fsdp.reshard_after_forward = group_size;
            run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
            run.recompute = {recompute ? nn::RecomputePolicy::Kind::kFull
                                       : nn::RecomputePolicy::Kind::kNone};
            check_same(run_fsdp_on_threads(world_size, run), expected,
                       fmt::format("world {} group {} prefetch {} recompute {}", world_size,
                                   group_size, prefetch, recompute));
          }
        }
      }
    }
  }
  FsdpRun run;
  run.fsdp.strategy = Strategy::kHybridShard;
  run.fsdp.shard_size = 4;
  const FsdpResult expected = run_fsdp_on_threads(8, run);
  run.fsdp.reshard_after_forward = 2;
  check_same(run_fsdp_on_threads(8, run), expected, "hybrid");
}

TEST_CASE("reshard_after_forward: a group size costs 1/g of each unit", "[fsdp]") {
  const auto gathered_bytes = [](std::optional<std::variant<bool, int>> reshard) {
    int64_t peak = 0, full = 0;
    FsdpRun run;
    run.fsdp.reshard_after_forward = reshard;
    run.on_step = [&](int step, Fsdp& fsdp, World& world) {
      if (step != 2 || world.rank() != 0) return;
      peak = Context::current()->allocator()->stats().allocated_by_class[static_cast<size_t>(
          MemoryClass::kGathered)];
      for (const auto& unit : parts_of(fsdp).units) full += unit->plan().gathered_nbytes;
    };
    run_fsdp_on_threads(4, run);
    return std::pair(peak, full);
  };
  const auto [without, full] = gathered_bytes(true);
  const auto [with, same] = gathered_bytes(2);
  CHECK(full == same);
  CHECK(std::abs(static_cast<double>(with - without - full / 2)) <=
        0.02 * static_cast<double>(full));
}

TEST_CASE("reshard_after_forward: values that contradict are named", "[fsdp]") {
  const auto error = [](Strategy strategy, std::variant<bool, int> reshard) {
    return error_of([&] {
      run_ranks(4, [&](World& world) {
        nn::Llama model(FsdpRun::tiny_llama());
        FsdpOptions options;
        options.strategy = strategy;
        options.reshard_after_forward = reshard;
        fully_shard(model, world, options);
      });
    });
  };
  const std::string divisor = "expected true, false or a divisor of the shard group's 4 ranks";
  CHECK(error(Strategy::kFullShard, 3).find("FsdpOptions::reshard_after_forward: 3, " + divisor) ==
        0);
  CHECK(error(Strategy::kFullShard, 1).find("FsdpOptions::reshard_after_forward: 1, " + divisor) ==
        0);
  CHECK(error(Strategy::kFullShard, false)
            .find("FsdpOptions::reshard_after_forward: false contradicts") == 0);
  CHECK(error(Strategy::kShardGradOp, true)
            .find("FsdpOptions::reshard_after_forward: true contradicts") == 0);
  CHECK(error(Strategy::kNoShard, 2).find("FsdpOptions::reshard_after_forward: 2 contradicts") ==
        0);
}

TEST_CASE("fsdp: guards and groups change nothing where states live in host memory", "[fsdp]") {
  FsdpRun run;
  run.num_micro_batches = 2;
  const FsdpResult plain = run_fsdp_on_threads(4, run);
  run.scope = [](int a, Fsdp& fsdp, nn::LanguageModel&) {
    return a == 0 ? std::make_shared<NoSync>(fsdp) : nullptr;
  };
  const FsdpResult kept = run_fsdp_on_threads(4, run);
  for (const dist::Offload offload :
       {dist::Offload::kOptimizer, dist::Offload::kParamsAndOptimizer}) {
    run.fsdp.offload = offload;
    check_same(run_fsdp_on_threads(4, run), kept, "no_sync");
    FsdpRun grouped;
    grouped.num_micro_batches = 2;
    grouped.fsdp.offload = offload;
    grouped.fsdp.reshard_after_forward = 2;
    grouped.scope = [](int, Fsdp& fsdp, nn::LanguageModel&) {
      return std::make_shared<UnshardGuard>(fsdp, "blocks.1");
    };
    check_same(run_fsdp_on_threads(4, grouped), plain, "groups of 2 and a guard");
  }
}

// ---- what else may come between micro-batches, and what is not sharded

TEST_CASE("fsdp: evaluation and generation between micro-batches change no bit", "[fsdp]") {
  for (const Strategy strategy :
       {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kHybridShard}) {
    for (const int prefetch : {0, 2}) {
      FsdpRun run;
      run.num_micro_batches = 2;
      run.fsdp = options_of(strategy, 2);
      if (strategy == Strategy::kHybridShard) run.fsdp.shard_size = 2;
      run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
      const FsdpResult expected = run_fsdp_on_threads(2, run);
      std::vector<int32_t> texts[2];
      std::mutex mutex;
      run.scope = [&](int a, Fsdp& fsdp, nn::LanguageModel& model) -> std::shared_ptr<void> {
        nn::GenerateOptions options;
        options.num_tokens = 5 + a;
        const std::vector<int32_t> prompt = {1, 2, 3};
        const std::vector<int32_t> text = nn::generate(model, prompt, options);
        fsdp.end_forward();
        if (strategy != Strategy::kShardGradOp) expect_sharded(fsdp, "after generation");
        random_state().op_index = 0;
        const std::lock_guard lock(mutex);
        texts[a].insert(texts[a].end(), text.begin(), text.end());
        return nullptr;
      };
      const FsdpResult actual = run_fsdp_on_threads(2, run);
      check_same(actual, expected, fmt::format("{} prefetch {}", name_of(strategy), prefetch));
      CHECK(texts[0].size() == 5u * 2 * 3);
      CHECK(texts[1].size() == 6u * 2 * 3);
    }
  }
}

/// A square matrix that is shared out, one that is not, and buffers of both kinds.
struct BufferedNet : nn::Module {
  BufferedNet()
      : weight(register_parameter("weight", {12, 12}, nn::Init::normal(0, 0.3))),
        left_alone(register_parameter("left_alone", {12, 12}, nn::Init::normal(0, 0.3))),
        table(register_buffer("table", new_tensor({12}, kF32), /*persistent=*/false)),
        offset(register_buffer("offset", full({12}, 0.5), /*persistent=*/true)) {
    if (!nn::DeferredInit::is_active()) reset_buffers();
  }
  void reset_buffers() override {
    std::vector<float> values(12);
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.1f * static_cast<float>(i);
    NoGrad no_grad;
    table.copy_(from_values(std::span<const float>(values), {12}));
  }
  Tensor forward(const Tensor& x) {
    return linear(add(add(linear(x, weight), table), offset), left_alone);
  }
  Tensor &weight, &left_alone, &table, &offset;
};

TEST_CASE("fsdp: ignored parameters and buffers are whole on every rank", "[fsdp]") {
  std::vector<double> expected;
  for (const int world_size : {1, 2, 4}) {
    for (const Strategy strategy :
         {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard}) {
      std::vector<std::vector<double>> outputs(static_cast<size_t>(world_size));
      run_ranks(world_size, [&](World& world) {
        std::unique_ptr<BufferedNet> net;
        {
          nn::DeferredInit deferred;
          net = std::make_unique<BufferedNet>();
        }
        FsdpOptions options = options_of(strategy, world_size);
        options.ignored = {"left_alone"};
        options.wrap = dist::wrap::whole_model();
        const auto fsdp = fully_shard(*net, world, options);
        fsdp->initialize(3);
        const auto masters = masters_of(*fsdp);
        expect(
            masters.size() == 2 && masters.count("weight") == 1 && masters.count("left_alone") == 1,
            "the whole model is there, what is ignored too");
        expect(dist::ShardView(*fsdp).num_parameters() == 144, "only weight is counted");
        expect(net->left_alone.storage()->is_materialized(), "left_alone has bytes");
        expect(net->offset.to_vector() == std::vector<double>(12, 0.5), "offset is as it was");
        const std::vector<double> before = net->left_alone.to_vector();
        const Tensor y = nn::call(*net, full({2, 12}, 0.5));
        outputs[static_cast<size_t>(world.rank())] = y.to_vector();
        backward(sum(y));
        fsdp->clip_grad_norm(1.0);
        expect(net->left_alone.grad().is_defined(), "its gradient stays with it");
        fsdp->end_step();
        expect(net->left_alone.to_vector() == before, "nothing has changed left_alone");
        expect(net->table.to_vector()[3] == static_cast<double>(0.3f), "the table is whole");
      });
      if (expected.empty()) expected = outputs[0];
      for (const auto& output : outputs) CHECK(output == expected);
    }
  }
  const auto unknown = [] {
    run_ranks(1, [](World& world) {
      BufferedNet net;
      FsdpOptions options;
      options.ignored = {"no_such"};
      fully_shard(net, world, options);
    });
  };
  CHECK(error_of(unknown).find("no_such") != std::string::npos);
}

// ---- programs that differ between ranks

TEST_CASE("fsdp: ranks that call units in different orders end with both names", "[fsdp]") {
  struct TwoBlocks : nn::Module {
    nn::ChildList<nn::Linear> blocks{this, "blocks"};
    TwoBlocks() {
      for (int i = 0; i < 4; ++i) blocks.emplace_back(8, 8);
    }
    Tensor forward(const Tensor& x, bool swapped) {
      const Tensor h = blocks[0](x);
      return blocks[3](swapped ? blocks[1](blocks[2](h)) : blocks[2](blocks[1](h)));
    }
  };
  for (const int swapped_step : {0, 2}) {
    for (const int prefetch : {0, 1}) {
      const std::string error = error_of([&] {
        run_ranks(2, [&](World& world) {
          TwoBlocks net;
          net.initialize(1);
          FsdpOptions options;
          options.wrap = dist::wrap::by_class<nn::Linear>();
          options.prefetch_forward = options.prefetch_backward = prefetch;
          const auto fsdp = fully_shard(net, world, options);
          for (int step = 0; step < 3; ++step) {
            backward(sum(net.forward(full({2, 8}, 1), world.rank() == 1 && step == swapped_step)));
            fsdp->clip_grad_norm(1.0);
            fsdp->end_step();
            current_stream().synchronize();
          }
        });
      });
      INFO(error);
      CHECK(error.find("blocks.") != std::string::npos);
      CHECK(error.find("rank 0 ") != std::string::npos);
      CHECK(error.find("rank 1 ") != std::string::npos);
    }
  }
}

TEST_CASE("comm_local: calls of one size for different units never exchange data", "[comm]") {
  const std::string error = error_of([] {
    run_ranks(2, [](World& world) {
      const auto comm = world.make_comm();
      const Stream stream = Context::current()->make_stream("comm");
      std::vector<float> full(16), shard(8);
      const char* unit = world.rank() == 0 ? "blocks.1" : "blocks.2";
      comm->all_gather(stream, full.data(), shard.data(), 8, kF32, {"gather_forward", unit, 2});
      stream.synchronize();
    });
  });
  CHECK(error ==
        "all_gather: the ranks disagree: rank 0 calls all_gather of blocks.1, gather_forward (32 "
        "bytes), rank 1 calls all_gather of blocks.2, gather_forward (32 bytes)");
}

}  // namespace
}  // namespace tessera
