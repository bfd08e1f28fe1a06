#include "dist/fsdp/finite_check.h"

#include <cmath>
#include <map>

#include "core/autograd.h"
#include "core/profiler.h"
#include "core/recompute.h"
#include "dist/comm/local.h"
#include "dist/fsdp/first_steps.h"
#include "dist/fsdp/shard_view.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"
#include "nn/linear.h"
#include "optim/adamw.h"
#include "test/testing.h"

namespace tessera {
namespace {

using dist::FiniteCheck;
using dist::FirstSteps;
using dist::run_ranks;
using dist::World;
using testing::randn;

/// An operation that a test breaks: y = x, but for one element of y or of dx.
enum class Fault { kNone, kForward, kBackward, kLargeGradient };
Tensor faulty(const Tensor& x, Fault fault) {
  const auto broken = [](const Tensor& like, bool is_broken, double value) {
    const NoGrad no_grad;
    const Tensor copy = like.clone();
    if (is_broken) copy.view({copy.numel()}).narrow(0, copy.numel() / 2, 1).fill_(value);
    return copy;
  };
  return record("faulty", {x}, broken(x, fault == Fault::kForward, NAN),
                [fault, broken](const Tensor& dy, Grads& g) {
                  g.add(0, fault == Fault::kLargeGradient
                               ? broken(dy, true, 3e38)
                               : broken(dy, fault == Fault::kBackward, -INFINITY));
                });
}

struct Layer : nn::Module {
  nn::Child<nn::Linear> up{this, "up", 8, 8};
  Fault fault = Fault::kNone;
  bool recomputes = false;
  Tensor forward(const Tensor& x) {
    const auto body = [this](const std::vector<Tensor>& in) { return faulty(up(in[0]), fault); };
    return recomputes ? recompute(body, {x}) : body({x});
  }
};

struct Net : nn::Module {
  nn::ChildList<Layer> blocks{this, "blocks"};
  nn::Child<nn::Linear> unused{this, "unused", 8, 8};
  Net() {
    for (int i = 0; i < 3; ++i) blocks.emplace_back();
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (auto& block : blocks) h = add(h, block(h));
    return sum(mul(h, h));
  }
};

struct Training {
  World& world;
  Net net;
  std::unique_ptr<dist::Fsdp> fsdp;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<FiniteCheck> check;  // may be null
  float lr = 1e-2f;

  Training(World& w, bool is_checked, dist::FsdpOptions options = {}) : world(w) {
    options.wrap = dist::wrap::by_class<Layer>();
    fsdp = fully_shard(net, world, options);
    fsdp->initialize(3);
    optimizer = std::make_unique<optim::AdamW>(fsdp->shards());
    if (is_checked) check = std::make_unique<FiniteCheck>(net, *fsdp, *optimizer, world);
  }
  ~Training() { check = nullptr; }

  std::optional<FiniteCheck::Found> step(int num_passes = 1) {
    std::optional<OpObserverScope> scope;
    if (check != nullptr) scope.emplace(check.get());
    for (int pass = 0; pass < num_passes; ++pass) {
      if (check != nullptr) check->begin_pass(pass);
      fsdp->begin_micro_batch(pass, num_passes);
      backward(nn::call(net, scale(randn({2, 8}, kF32, 7 + world.rank()), 8)));
    }
    scope.reset();
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0);
    optimizer->step(lr, clip.factor, clip.found_inf);
    std::shared_ptr<const FiniteCheck::Checked> checked;
    if (check != nullptr) {
      check->after_update();
      checked = check->end_step();
    }
    fsdp->end_step();
    return checked == nullptr ? std::nullopt : check->find(*checked);
  }
};

const dist::Strategy kSome[] = {dist::Strategy::kFullShard, dist::Strategy::kShardOptim,
                                dist::Strategy::kNoShard};

/// What all ranks are told of a step whose fault `plant` plants.
std::string found_on(int world_size, dist::FsdpOptions options, int num_passes,
                     const std::function<void(Training&)>& plant) {
  std::vector<std::string> texts(static_cast<size_t>(world_size));
  run_ranks(world_size, [&](World& world) {
    Training training(world, /*is_checked=*/true, options);
    CHECK_FALSE(training.step(num_passes).has_value());
    plant(training);
    const auto found = training.step(num_passes);
    texts[static_cast<size_t>(world.rank())] = found ? found->text : "";
  });
  for (const std::string& text : texts) CHECK(text == texts[0]);
  return texts[0];
}

TEST_CASE("finite_check: the first output that is not finite is named", "[fsdp]") {
  CHECK(found_on(1, {}, 1, [](Training& t) { t.net.blocks[1]->fault = Fault::kForward; }) ==
        "output of faulty in forward of blocks.1 (Layer, unit blocks.1), pass 0");
  for (const dist::Strategy strategy : kSome) {
    INFO(name_of(strategy));
    dist::FsdpOptions options;
    options.strategy = strategy;
    CHECK(found_on(2, options, 2, [](Training& t) {
            if (t.world.rank() == 1) t.net.blocks[2]->fault = Fault::kForward;
          }) == "output of faulty in forward of blocks.2 (Layer, unit blocks.2), pass 0, rank 1");
  }
}

TEST_CASE("finite_check: the first gradient that is not finite is named", "[fsdp]") {
  for (const bool recomputes : {false, true}) {
    for (const int world_size : {1, 2}) {
      CAPTURE(recomputes, world_size);
      CHECK(found_on(world_size, {}, 1,
                     [&](Training& t) {
                       for (auto& block : t.net.blocks) block->recomputes = recomputes;
                       if (t.world.rank() == world_size - 1)
                         t.net.blocks[1]->fault = Fault::kBackward;
                     }) ==
            std::string("gradient of input 0 that faulty writes in backward of blocks.1 (Layer, "
                        "unit blocks.1), pass 0") +
                (world_size == 2 ? ", rank 1" : ""));
    }
  }
}

TEST_CASE("finite_check: a gradient of a parameter is named with it", "[fsdp]") {
  // One dy of 3e38 times an x above 1.2 is outside of f32, times a weight below 0.36 it is not.
  for (const int world_size : {1, 2}) {
    const std::string text = found_on(
        world_size, {}, 1, [](Training& t) { t.net.blocks[0]->fault = Fault::kLargeGradient; });
    CHECK_THAT(text, Catch::StartsWith("gradient of parameter blocks.0.up.weight that "));
    CHECK_THAT(text, Catch::Contains(" in backward of blocks.0.up (Linear"));
    CHECK_THAT(text, Catch::Contains(", unit blocks.0), pass 0"));
  }
}

TEST_CASE("finite_check: what the optimizer writes is named by parameter and state", "[fsdp]") {
  for (const int world_size : {1, 2}) {
    CAPTURE(world_size);
    const auto plant_state = [&](Training& t) {
      for (const optim::NamedState& state : t.optimizer->state()) {
        if (state.name != "exp_avg_sq") continue;
        for (size_t i = 0; i < state.tensors.size(); ++i) {
          const optim::FlatShard& shard = t.optimizer->shards()[i];
          if (shard.name != "blocks.1" || shard.segments.empty()) continue;
          if (t.world.rank() == 0) state.tensors[i].narrow(0, shard.segments[0].begin, 1).fill_(-1);
        }
      }
    };
    const std::string text = found_on(world_size, {}, 1, plant_state);
    CHECK(text.find("parameter blocks.1.up.weight (1 of the ") == 0);
    CHECK(text.find(world_size == 1 ? " in unit blocks.1" : " in unit blocks.1, rank 0") !=
          std::string::npos);
  }
  run_ranks(2, [&](World& world) {
    Training training(world, true);
    training.lr = INFINITY;
    const auto found = training.step();
    REQUIRE(found.has_value());
    CHECK(found->is_update);
  });
}

TEST_CASE("finite_check: an imported weight is named before the first step", "[fsdp]") {
  for (const int world_size : {1, 2}) {
    CAPTURE(world_size);
    run_ranks(world_size, [&](World& world) {
      Training training(world, true);
      CHECK_FALSE(training.check->find_in_parameters().has_value());
      training.fsdp->load_full([](const std::string& name) {
        const Tensor values = zeros(name.ends_with("bias") ? Shape{8} : Shape{8, 8});
        if (name == "blocks.2.up.bias") values.narrow(0, 5, 1).fill_(NAN);
        return values;
      });
      const auto found = training.check->find_in_parameters();
      REQUIRE(found.has_value());
      const int rank = world_size - 1 - (world_size > 1 && found->text.ends_with("rank 0") ? 1 : 0);
      CHECK(found->text == "parameter blocks.2.up.bias (1 of the 8 values here) in unit blocks.2" +
                               (world_size == 1 ? std::string() : fmt::format(", rank {}", rank)));
      // Frozen ones, too, and the check is ready for the first step.
      training.fsdp->initialize(3);
      CHECK_FALSE(training.step().has_value());
    });
  }
}

TEST_CASE("finite_check: off it adds no task and no wait, on one look a new value", "[fsdp]") {
  struct Counted {
    std::map<std::string, int> tasks;
    std::string program;
  };
  const auto count = [](bool is_checked) {
    Counted counted;
    run_ranks(1, [&](World& world) {
      Training training(world, is_checked);
      training.step();
      Context::current()->compute().synchronize();
      profiler::start();
      training.fsdp->begin_micro_batch(0, 1);
      {
        std::optional<OpObserverScope> scope;
        if (is_checked) scope.emplace(training.check.get());
        backward(nn::call(training.net, randn({2, 8}, kF32, 7)));
      }
      Context::current()->compute().synchronize();
      profiler::stop();
      for (const TraceEvent& e : profiler::events()) ++counted.tasks[e.name];
      counted.program = dist::ShardView(*training.fsdp).program();
      training.fsdp->clip_grad_norm(1.0);
    });
    return counted;
  };
  const Counted off = count(false);
  Counted on = count(true);
  CHECK(off.tasks.count("mark_nonfinite") == 0);
  // Of 3 blocks: linear, faulty, add; mul and sum. Of their gradients dx, dw and db of the linear
  // ones, faulty's, those of mul, which adds both, and of sum; an add hands on what it is given.
  CHECK(on.tasks["mark_nonfinite"] >= 11 + 3 * 3);
  on.tasks.erase("mark_nonfinite");
  CHECK(on.tasks == off.tasks);
  CHECK(on.program == off.program);
}

TEST_CASE("finite_check: the loss is the same with it, and hooks are as they were", "[fsdp]") {
  std::vector<std::vector<double>> values;
  for (const bool is_checked : {false, true}) {
    run_ranks(2, [&](World& world) {
      Training training(world, is_checked);
      for (int i = 0; i < 3; ++i) training.step();
      training.check = nullptr;
      training.step();
      std::vector<double> all;
      training.fsdp->for_each_full(dist::Fsdp::State::kMaster, [&](auto&, const Tensor& full) {
        const auto some = full.to_vector();
        all.insert(all.end(), some.begin(), some.end());
      });
      if (world.rank() == 0) values.push_back(all);
    });
  }
  CHECK(values[0] == values[1]);
}

// ---- first steps

FirstSteps::Found watch(World& world, int num_steps, const std::function<void(Training&)>& plant) {
  Training training(world, /*is_checked=*/false);
  plant(training);
  FirstSteps steps(*training.fsdp, world, num_steps);
  for (int i = 0; i < num_steps + 2; ++i) {
    CHECK(steps.is_over() == (i >= num_steps));
    backward(nn::call(training.net, randn({2, 8}, kF32, 20 + i)));
    const dist::ClippedNorm clip = training.fsdp->clip_grad_norm(1.0);
    steps.before_update();
    training.optimizer->step(training.lr, clip.factor, clip.found_inf);
    steps.after_update();
    training.fsdp->end_step();
  }
  return steps.find();
}

TEST_CASE("first_steps: parameters without gradient and unchanged ones are named", "[fsdp]") {
  using Names = std::vector<std::string>;
  for (const int world_size : {1, 2, 3}) {
    CAPTURE(world_size);
    run_ranks(world_size, [&](World& world) {
      // AdamW's decay changes the weight that nobody uses.
      const FirstSteps::Found dead = watch(world, 5, [](Training&) {});
      CHECK(dead.without_gradient == Names{"unused.weight", "unused.bias"});
      CHECK(dead.unchanged.empty());
      const FirstSteps::Found still = watch(world, 5, [](Training& t) { t.lr = 0; });
      CHECK(still.without_gradient == Names{"unused.weight", "unused.bias"});
      CHECK(still.unchanged.size() == 6);
      CHECK(still.unchanged[0] == "blocks.0.up.weight");
    });
  }
}

TEST_CASE("first_steps: one step with a gradient is enough, on one rank", "[fsdp]") {
  run_ranks(2, [&](World& world) {
    Training training(world, false);
    FirstSteps steps(*training.fsdp, world, 8);
    for (int i = 0; i < 8; ++i) {
      // The first step, which is always looked at, is the only one with a gradient.
      const Tensor x = randn({2, 8}, kF32, 20 + i + 100 * world.rank());
      const double factor = i == 0 && world.rank() == 1 ? 1.0 : 0.0;
      backward(scale(nn::call(training.net, x), factor));
      const dist::ClippedNorm clip = training.fsdp->clip_grad_norm(1.0);
      steps.before_update();
      training.optimizer->step(1e-2f, clip.factor, clip.found_inf);
      steps.after_update();
      training.fsdp->end_step();
    }
    CHECK(steps.find().without_gradient ==
          std::vector<std::string>{"unused.weight", "unused.bias"});
  });
}

}  // namespace
}  // namespace tessera
