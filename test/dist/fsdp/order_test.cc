// Which collective is issued, and may start, before which call: depths of prefetch in both
// directions, and the ends of a step that a test of numbers alone does not see.

#include <atomic>
#include <future>
#include <mutex>

#include "core/autograd.h"
#include "core/profiler.h"
#include "dist/fsdp/guards.h"
#include "dist/fsdp/parts.h"
#include "dist/fsdp/shard_view.h"
#include "optim/sgd.h"
#include "test/dist/fsdp/combos.h"
#include "test/dist/fsdp/net.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using dist::Fsdp;
using dist::FsdpOptions;
using dist::Strategy;
using dist::World;

constexpr int kWidth = 6, kBlocks = 8;

/// Says when the host comes to a block in forward and in backward.
struct Block : nn::Module {
  nn::Child<nn::Linear> linear{this, "linear", kWidth, kWidth};
  std::function<void(bool is_backward)> probe;
  Tensor forward(const Tensor& x) {
    if (probe) probe(false);
    const Tensor y = gelu(linear(x));
    return record("probe", {y}, y.detach(), [this](const Tensor& dy, Grads& g) {
      if (probe) probe(true);
      g.add(0, dy);
    });
  }
};

struct Net : nn::Module {
  nn::Child<nn::Linear> in{this, "in", kWidth, kWidth};
  nn::ChildList<Block> blocks{this, "blocks"};
  nn::Child<nn::Linear> out{this, "out", kWidth, 3};
  bool skips_out = false;
  Net() {
    for (int i = 0; i < kBlocks; ++i) blocks.emplace_back();
  }
  Tensor forward(const Tensor& x) {
    Tensor h = in(x);
    for (auto& block : blocks) h = block(h);
    return skips_out ? h : out(h);
  }
};

struct Training {
  std::unique_ptr<Net> net;
  std::unique_ptr<Fsdp> fsdp;
  std::unique_ptr<optim::Sgd> sgd;

  Training(World& world, const FsdpOptions& options) {
    {
      const nn::DeferredInit deferred;
      net = std::make_unique<Net>();
    }
    fsdp = dist::fully_shard(*net, world, options);
    fsdp->initialize(3);
    sgd = std::make_unique<optim::Sgd>(fsdp->shards());
  }
  void pass(int part = 0) const {
    const Tensor y = nn::call(*net, randn({4, kWidth}, kF32, static_cast<uint64_t>(part + 1)));
    backward(scale(sum(mul(y, y)), 0.05));
  }
  void update() const {
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0);
    sgd->step(0.1f, clip.factor);
    fsdp->end_step();
  }
  /// Step 0, which finds the order.
  void warm_up() const {
    pass();
    update();
  }
};

FsdpOptions options_of(Strategy strategy, int prefetch_forward, int prefetch_backward) {
  FsdpOptions options;
  options.strategy = strategy;
  options.prefetch_forward = prefetch_forward;
  options.prefetch_backward = prefetch_backward;
  if (strategy >= Strategy::kHybridShard) options.shard_size = 2;
  return options;
}

int count_prefix(const std::string& program, const std::string& what) {
  int count = 0;
  for (size_t at = program.find(what); at != std::string::npos; at = program.find(what, at + 1)) {
    ++count;
  }
  return count;
}

/// Gathers that may be there when the forward of block p computes: embedding, the blocks up to it,
/// and `depth` units more.
int expected_forward(int p, int depth) {
  return std::min(1 + p + 1 + depth, kBlocks + 2);
}
/// The same in backward, where head and last block stayed: the blocks from the last but one to p,
/// and `depth` units before it.
int expected_backward(int p, int depth) {
  return std::min(kBlocks - 1 - p + depth, kBlocks);
}

constexpr std::pair<int, int> kDepths[] = {{0, 0}, {1, 1}, {2, 2}, {5, 5},
                                           {0, 5}, {5, 0}, {1, 2}, {2, 1}};

TEST_CASE("fsdp order: as many units are gathered ahead as prefetch says, in both directions",
          "[fsdp]") {
  for (const Strategy strategy :
       {Strategy::kFullShard, Strategy::kHybridShard, Strategy::kShardGradOp}) {
    for (const auto& [forward, backward] : kDepths) {
      std::vector<int> in_forward(kBlocks), in_backward(kBlocks);
      dist::run_ranks(2, [&, f = forward, b = backward](World& world) {
        const Training training(world, options_of(strategy, f, b));
        training.warm_up();
        for (int p = 0; world.rank() == 0 && p < kBlocks; ++p) {
          training.net->blocks[p]->probe = [&, p](bool is_backward) {
            const std::string program = dist::ShardView(*training.fsdp).program();
            (is_backward ? in_backward : in_forward)[static_cast<size_t>(p)] =
                count_prefix(program, is_backward ? "gather_backward " : "gather_forward ");
          };
        }
        training.pass();
        training.update();
      });
      for (int p = 0; p < kBlocks; ++p) {
        INFO(fmt::format("{}, prefetch {} and {}, block {}", name_of(strategy), forward, backward,
                         p));
        const auto i = static_cast<size_t>(p);
        CHECK(in_forward[i] == expected_forward(p, forward));
        CHECK(in_backward[i] ==
              (strategy == Strategy::kShardGradOp ? 0 : expected_backward(p, backward)));
      }
    }
  }
}

/// Gathers that rank 0 has begun while its compute stream stands in block p. The host is far ahead
/// and the slots are those of the deeper direction: what holds the others back is the depth.
int begun_while_in(int p, bool is_backward, int forward, int backward) {
  std::atomic<int> count = -1;
  dist::run_ranks(2, [&](World& world) {
    const Training training(world, options_of(Strategy::kFullShard, forward, backward));
    training.warm_up();
    current_stream().synchronize();
    world.control().barrier();
    std::promise<void> gate;
    if (world.rank() == 0) {
      profiler::start();
      training.net->blocks[p]->probe = [&](bool now_backward) {
        if (now_backward != is_backward) return;
        current_stream().submit("gate", [future = gate.get_future().share()] { future.wait(); });
      };
    }
    training.pass();
    if (world.rank() == 0) {
      // Long enough for whatever may begin; one that began later would only be missed.
      std::this_thread::sleep_for(std::chrono::milliseconds(60));
      const int64_t opened = profiler::now_ns();
      gate.set_value();
      training.net->blocks[p]->probe = nullptr;
      training.update();
      current_stream().synchronize();
      const int stream = parts_of(*training.fsdp).lanes.all_gather.id();
      parts_of(*training.fsdp).lanes.all_gather.synchronize();
      profiler::stop();
      int begun = 0;
      for (const TraceEvent& e : profiler::events()) {
        begun += e.stream_id == stream && std::string_view(e.name).starts_with("all_gather") &&
                 e.begin_ns < opened;
      }
      count = begun;
    } else {
      training.update();
    }
    world.control().barrier();
  });
  return count;
}

TEST_CASE("fsdp order: no gather begins further ahead of compute than prefetch says", "[fsdp]") {
  constexpr int kAt = 3;
  for (const int depth : {0, 1, 2}) {
    INFO("depth " << depth);
    CHECK(begun_while_in(kAt, false, depth, 5) == expected_forward(kAt, depth));
    CHECK(begun_while_in(kAt, true, 5, depth) == kBlocks + 2 + expected_backward(kAt, depth));
  }
}

TEST_CASE("fsdp order: communicators = 1 is one stream for gathers and reduces", "[fsdp]") {
  for (const int communicators : {1, 2}) {
    dist::run_ranks(2, [&](World& world) {
      FsdpOptions options;
      options.communicators = communicators;
      const Training training(world, options);
      const dist::Lanes& lanes = parts_of(*training.fsdp).lanes;
      const bool is_one = lanes.all_gather.id() == lanes.reduce_scatter.id();
      if (is_one != (communicators == 1) || (lanes.reduce_comm == nullptr) != is_one) {
        throw Error("the number of streams is another");
      }
      training.warm_up();
    });
  }
}

TEST_CASE("fsdp order: programs that differ after step 0 end with both names", "[fsdp]") {
  // Each communicator sees the same order on all ranks, so that nobody hangs; the order between
  // them is another one.
  std::string text;
  std::mutex mutex;
  CHECK_THROWS_AS(
      dist::run_ranks(
          2,
          [&](World& world) {
            const Training training(world, options_of(Strategy::kFullShard, 1, 7));
            training.warm_up();
            std::unique_ptr<dist::UnshardGuard> guard;
            // Everything but the head is gathered by then.
            training.net->blocks[world.rank() == 0 ? 6 : 4]->probe = [&](bool is_backward) {
              if (is_backward) {
                guard = std::make_unique<dist::UnshardGuard>(*training.fsdp, "head");
              }
            };
            training.pass();
            guard.reset();
            training.fsdp->clip_grad_norm(1.0);
            try {
              training.fsdp->end_step();
            } catch (const CommError& error) {
              const std::lock_guard lock(mutex);
              text = error.what();
              throw;
            }
          }),
      CommError);
  INFO(text);
  CHECK(text.find("fsdp: the ranks issue different collectives in step 1") != std::string::npos);
  CHECK(text.find("gather_unshard head") != std::string::npos);
}

TEST_CASE("fsdp order: a step whose last micro-batch has no backward is summed over replicas",
          "[fsdp]") {
  const auto gradients = [](Strategy strategy, int num_announced) {
    std::map<std::string, std::vector<double>> result;
    dist::run_ranks(4, [&](World& world) {
      const Training training(world, options_of(strategy, 1, 1));
      training.fsdp->begin_micro_batch(0, num_announced);
      training.pass(world.rank());
      // The others: nothing to do for anybody.
      training.fsdp->clip_grad_norm(1.0);
      std::map<std::string, std::vector<double>> mine;
      training.fsdp->for_each_full(
          Fsdp::State::kGradient,
          [&](const std::string& name, const Tensor& full) { mine[name] = full.to_vector(); });
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  const auto expected = gradients(Strategy::kNoShard, 1);
  for (const Strategy strategy : kAllStrategies) {
    INFO(name_of(strategy));
    CHECK(gradients(strategy, 2) == expected);
  }
}

TEST_CASE("fsdp order: the norm waits for gathers that nobody used", "[fsdp]") {
  // The last unit is not called on odd ranks, and its parameters are kept: its gather on these
  // ranks has no reader, and still sends the shard that the optimizer writes. The checker of the
  // thread ranks reports it if no event orders the two.
  for (const Strategy strategy :
       {Strategy::kShardGradOp, Strategy::kHybridShardZero2, Strategy::kFullShard}) {
    INFO(name_of(strategy));
    CHECK_NOTHROW(dist::run_ranks(2, [&](World& world) {
      const Training training(world, options_of(strategy, 0, 0));
      training.warm_up();
      training.net->skips_out = world.rank() == 1;
      for (int step = 0; step < 3; ++step) {
        training.pass(step);
        training.update();
      }
    }));
  }
}

TEST_CASE("fsdp order: strategies have the same bits at one sync mode, whose default differs",
          "[fsdp]") {
  FsdpRun run;
  run.num_micro_batches = 2;
  const auto result_of = [&](Strategy strategy, std::optional<dist::GradSync> sync) {
    run.fsdp = {};
    run.fsdp.strategy = strategy;
    run.fsdp.sync_every_micro_batch = sync;
    if (strategy >= Strategy::kHybridShard) run.fsdp.shard_size = 2;
    return run_fsdp_on_threads(4, run);
  };
  const FsdpResult expected = result_of(Strategy::kNoShard, dist::GradSync::kLast);
  const FsdpResult by_default = result_of(Strategy::kNoShard, std::nullopt);
  for (const Strategy strategy : kAllStrategies) {
    check_same(result_of(strategy, dist::GradSync::kLast), expected, "sync = false");
    const FsdpResult own = result_of(strategy, std::nullopt);
    check_near(own, by_default, 1e-5, "by default");
    const bool is_usual = strategy != Strategy::kShardOptim && strategy < Strategy::kHybridShard;
    INFO(name_of(strategy));
    CHECK((own.parameters == by_default.parameters) == is_usual);
  }
}

TEST_CASE("fsdp order: shard_optim with a low reduce dtype differs for tied models alone",
          "[fsdp]") {
  for (const bool tied : {false, true}) {
    FsdpRun run;
    run.model.tied = tied;
    set_precision(run, Precision::kBF16);
    run.fsdp.strategy = Strategy::kNoShard;
    const FsdpResult expected = run_fsdp_on_threads(2, run);
    run.fsdp.strategy = Strategy::kShardOptim;
    const FsdpResult actual = run_fsdp_on_threads(2, run);
    INFO("tied " << tied);
    CHECK((actual.gradients == expected.gradients) == !tied);
    check_near(actual, expected, 0.05, "within rounding");
    // With gradients in f32 there is nothing to round.
    set_precision(run, Precision::kMixed);
    const FsdpResult f32 = run_fsdp_on_threads(2, run);
    run.fsdp.strategy = Strategy::kNoShard;
    check_same(run_fsdp_on_threads(2, run), f32, "f32 gradients");
  }
}

TEST_CASE(
    "fsdp order: hybrid over 3 replicas differs from a flat sum by rounding, over 2 not at all",
    "[fsdp]") {
  for (const int replicas : {2, 3}) {
    FsdpRun run;
    run.samples_per_step = 12;
    run.fsdp.strategy = Strategy::kFullShard;
    const FsdpResult flat = run_fsdp_on_threads(2 * replicas, run);
    run.fsdp.strategy = Strategy::kHybridShard;
    run.fsdp.shard_size = 2;
    const FsdpResult hybrid = run_fsdp_on_threads(2 * replicas, run);
    INFO(replicas << " replicas");
    CHECK((hybrid.gradients == flat.gradients) == (replicas == 2));
    check_near(hybrid, flat, 1e-5, "within rounding");
  }
}

TEST_CASE("fsdp order: waits for a slow network are seen as exposed time", "[fsdp]") {
  constexpr double kLatencyUs = 2000;
  dist::LocalOptions local;
  local.latency_us = kLatencyUs;
  double gather_ms = 0, reduce_ms = 0;
  dist::run_ranks(2, local, [&](World& world) {
    const Training training(world, options_of(Strategy::kFullShard, 0, 0));
    training.warm_up();
    training.fsdp->exposed_times();
    training.pass();
    training.update();
    const auto times = training.fsdp->exposed_times();
    current_stream().synchronize();
    if (world.rank() == 0) gather_ms = times->gather_ms(), reduce_ms = times->reduce_ms();
  });
  // Nothing is gathered ahead: compute waits for each of the gathers; the last reduce has nothing
  // to hide behind.
  INFO(gather_ms << " ms for gathers, " << reduce_ms << " ms for reduces");
  CHECK(gather_ms > 0.5e-3 * kLatencyUs * (kBlocks + 2));
  CHECK(reduce_ms > 0.5e-3 * kLatencyUs);
}

}  // namespace
}  // namespace tessera::testing
