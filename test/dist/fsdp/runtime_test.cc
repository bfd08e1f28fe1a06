// A run does what its program says: an action less, or two in another order, and it fails as its
// state machines say. And the plan of its memory.

#include <algorithm>
#include <cmath>

#include "dist/fsdp/guards.h"
#include "dist/fsdp/parts.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/reduce/reduce.h"
#include "nn/linear.h"
#include "test/dist/fsdp/combos.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using dist::Action;
using dist::ActionKind;
using dist::Order;
using dist::Strategy;

using Edit = std::function<std::vector<Action>(const Action&)>;

/// The error of the run if rank `rank` (-1: each) executes another program than its Order says; the
/// losses if there is none.
struct Outcome {
  std::string error;
  FsdpResult result;
};

Outcome run_edited(FsdpRun run, const std::function<Edit(dist::Fsdp&)>& make_edit, int rank = -1) {
  const auto on_ready = run.on_ready;
  run.on_ready = [&](dist::Fsdp& fsdp, dist::World& world) {
    if (on_ready) on_ready(fsdp, world);
    if (rank < 0 || rank == world.rank()) parts_of(fsdp).runtime.edit = make_edit(fsdp);
  };
  Outcome outcome;
  try {
    outcome.result = run_fsdp_on_threads(2, run);
  } catch (const std::exception& error) {
    outcome.error = error.what();
  }
  return outcome;
}

FsdpRun short_run(Strategy strategy) {
  FsdpRun run;
  run.num_steps = 2;
  run.fsdp.strategy = strategy;
  return run;
}

/// Leaves out the `nth` action of a kind on a unit, counted from 0.
std::function<Edit(dist::Fsdp&)> without(ActionKind kind, const std::string& unit, int nth) {
  return [=](dist::Fsdp& fsdp) -> Edit {
    return [&fsdp, kind, unit, nth, seen = 0](const Action& action) mutable {
      const bool is_it = action.kind == kind &&
                         parts_of(fsdp).units[static_cast<size_t>(action.unit)]->name() == unit &&
                         seen++ == nth;
      return is_it ? std::vector<Action>{} : std::vector<Action>{action};
    };
  };
}

/// Does the `nth` action of a kind on a unit after the one that follows it.
std::function<Edit(dist::Fsdp&)> swapped(ActionKind kind, const std::string& unit, int nth) {
  return [=](dist::Fsdp& fsdp) -> Edit {
    return [&fsdp, kind, unit, nth, seen = 0,
            late = std::vector<Action>()](const Action& action) mutable {
      std::vector<Action> now = {action};
      if (!late.empty()) {
        now.push_back(late.back());
        late.clear();
      } else if (action.kind == kind &&
                 parts_of(fsdp).units[static_cast<size_t>(action.unit)]->name() == unit &&
                 seen++ == nth) {
        late.push_back(action);
        now.clear();
      }
      return now;
    };
  };
}

/// Does the `nth` action of a kind on a unit twice.
std::function<Edit(dist::Fsdp&)> twice(ActionKind kind, const std::string& unit, int nth) {
  return [=](dist::Fsdp& fsdp) -> Edit {
    return [&fsdp, kind, unit, nth, seen = 0](const Action& action) mutable {
      const bool is_it = action.kind == kind &&
                         parts_of(fsdp).units[static_cast<size_t>(action.unit)]->name() == unit &&
                         seen++ == nth;
      return std::vector<Action>(is_it ? 2 : 1, action);
    };
  };
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Linear layers that are called in an order of the test's.
struct Chain : nn::Module {
  nn::ChildList<nn::Linear> blocks{this, "blocks"};
  std::vector<size_t> called = {0, 1, 2};
  Chain() {
    for (int i = 0; i < 3; ++i) blocks.emplace_back(8, 8);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (const size_t i : called) h = gelu(blocks[i](h));
    return h;
  }
};

/// The error of two ranks that run `body`, each with a Chain whose program is edited.
std::string error_of_chain(const std::function<Edit(dist::Fsdp&)>& make_edit,
                           const std::function<void(Chain&, dist::Fsdp&)>& body) {
  try {
    dist::run_ranks(2, [&](dist::World& world) {
      Chain net;
      net.initialize(1);
      dist::FsdpOptions options;
      options.wrap = dist::wrap::by_class<nn::Linear>();
      options.prefetch_forward = options.prefetch_backward = 1;
      const auto fsdp = dist::fully_shard(net, world, options);
      if (make_edit) parts_of(*fsdp).runtime.edit = make_edit(*fsdp);
      body(net, *fsdp);
    });
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void train_chain(Chain& net, dist::Fsdp& fsdp) {
  for (int step = 0; step < 2; ++step) {
    if (step == 1) net.called = {0, 1};  // the last unit is gathered for nobody
    backward(sum(nn::call(net, full({2, 8}, 1))));
    fsdp.clip_grad_norm(1.0);
    fsdp.end_step();
  }
}

void hold_all(Chain&, dist::Fsdp& fsdp) {
  const dist::UnshardGuard first(fsdp, "blocks.0"), second(fsdp, "blocks.1"),
      third(fsdp, "blocks.2");  // one more than the ring has slots
}

TEST_CASE("fsdp runtime: a run without one action fails as its state machines say", "[fsdp]") {
  struct Case {
    Strategy strategy;
    ActionKind kind;
    const char* unit;
    int nth;
    const char* expected;
  };
  const Case cases[] = {
      {Strategy::kFullShard, ActionKind::kGather, "blocks.1", 0,
       "the program says wait of unit \"blocks.1\", whose parameters are sharded"},
      {Strategy::kFullShard, ActionKind::kWait, "blocks.1", 0,
       "parameters of unit \"blocks.1\", which can be read from when a call"},
      {Strategy::kFullShard, ActionKind::kRelease, "blocks.0", 0,
       "the program says gather of unit \"blocks.2\", but no slot of its ring is free"},
      {Strategy::kFullShard, ActionKind::kReduce, "blocks.1", 0,
       "the program has not reduced the gradients of unit \"blocks.1\""},
      {Strategy::kFullShard, ActionKind::kFinish, "blocks.1", 0,
       "clip_grad_norm: the gradients of unit \"blocks.1\" are not complete"},
      {Strategy::kShardGradOp, ActionKind::kClose, "blocks.1", 0,
       "the program says wait of unit \"blocks.1\", whose parameters are open"},
      {Strategy::kShardGradOp, ActionKind::kExpire, "blocks.1", 0,
       "the program says gather of unit \"blocks.1\", whose parameters are gathered"},
      {Strategy::kShardOptim, ActionKind::kReduce, "blocks.1", 0,
       "the program says finish of unit \"blocks.1\", which has gradients that were not reduced"},
      {Strategy::kFullShard, ActionKind::kGatherFull, "blocks.1", 0,
       "the program has not gathered the full values of unit \"blocks.1\""},
      {Strategy::kFullShard, ActionKind::kDropFull, "blocks.1", 0,
       "the program says gather_full of unit \"blocks.1\", whose full values are there"},
  };
  for (const Case& c : cases) {
    const Outcome outcome = run_edited(short_run(c.strategy), without(c.kind, c.unit, c.nth));
    INFO(name_of(c.strategy) << " without " << name_of(c.kind) << " of " << c.unit << ": "
                             << outcome.error);
    CHECK(contains(outcome.error, c.expected));
  }
}

TEST_CASE("fsdp runtime: a run with an action too many fails as its state machines say", "[fsdp]") {
  struct Case {
    Strategy strategy;
    ActionKind kind;
    const char* expected;
  };
  const Case cases[] = {
      {Strategy::kFullShard, ActionKind::kGather,
       "the program says gather of unit \"blocks.1\", whose parameters are being gathered"},
      {Strategy::kFullShard, ActionKind::kWait,
       "the program says wait of unit \"blocks.1\", whose parameters are open"},
      {Strategy::kFullShard, ActionKind::kRelease,
       "the program says release of unit \"blocks.1\", whose parameters are sharded"},
      {Strategy::kShardGradOp, ActionKind::kClose,
       "the program says close of unit \"blocks.1\", whose parameters are gathered"},
      {Strategy::kFullShard, ActionKind::kGatherFull,
       "the program says gather_full of unit \"blocks.1\", whose full values are there"},
      {Strategy::kFullShard, ActionKind::kDropFull,
       "the program says drop_full of unit \"blocks.1\", whose full values are not there"},
  };
  for (const Case& c : cases) {
    const Outcome outcome = run_edited(short_run(c.strategy), twice(c.kind, "blocks.1", 0));
    INFO(name_of(c.strategy) << " with two of " << name_of(c.kind) << ": " << outcome.error);
    CHECK(contains(outcome.error, c.expected));
  }
  const std::string join = error_of_chain(twice(ActionKind::kJoin, "blocks.2", 0), train_chain);
  INFO(join);
  CHECK(
      contains(join, "the program says join of unit \"blocks.2\", whose parameters are gathered"));
}

TEST_CASE("fsdp runtime: a slot that is given back is filled with NaN where memory is poisoned",
          "[fsdp]") {
  for (const bool poison : {false, true}) {
    dist::LocalOptions local;
    local.context.poison = poison;
    local.context.order_check = false;
    std::vector<double> after(2);
    dist::run_ranks(2, local, [&](dist::World& world) {
      Chain net;
      net.initialize(1);
      dist::FsdpOptions options;
      options.wrap = dist::wrap::by_class<nn::Linear>();
      const auto fsdp = dist::fully_shard(net, world, options);
      const float* values = nullptr;
      {
        const dist::UnshardGuard guard(*fsdp, "blocks.1");
        values = net.parameter("blocks.1.weight").tensor.data<float>();
      }
      world.control().barrier();
      current_stream().synchronize();
      after[static_cast<size_t>(world.rank())] = values[0];
      world.control().barrier();
    });
    for (const double value : after) CHECK(std::isnan(value) == poison);
  }
}

TEST_CASE("fsdp runtime: without keep, gradients of no_sync are missed when backward ends",
          "[fsdp]") {
  FsdpRun run = short_run(Strategy::kFullShard);
  run.num_micro_batches = 2;
  run.scope = [](int micro_batch, dist::Fsdp& fsdp, nn::LanguageModel&) -> std::shared_ptr<void> {
    if (micro_batch == 0) return std::make_shared<dist::NoSync>(fsdp);
    return nullptr;
  };
  CHECK(run_edited(run, [](dist::Fsdp&) { return Edit(); }).error.empty());
  const Outcome outcome = run_edited(run, without(ActionKind::kKeep, "blocks.1", 0));
  INFO(outcome.error);
  CHECK(contains(outcome.error, "the program has not reduced the gradients of unit \"blocks.1\""));
}

TEST_CASE("fsdp runtime: a run without a join or a slot more fails as its state machines say",
          "[fsdp]") {
  CHECK(error_of_chain(nullptr, train_chain).empty());
  CHECK(error_of_chain(nullptr, hold_all).empty());
  const std::string join = error_of_chain(without(ActionKind::kJoin, "blocks.2", 0), train_chain);
  INFO(join);
  CHECK(contains(
      join, "the program says release of unit \"blocks.2\", whose parameters are being gathered"));
  const std::string slot = error_of_chain(without(ActionKind::kAddSlot, "blocks.2", 0), hold_all);
  INFO(slot);
  CHECK(contains(slot,
                 "the program says gather of unit \"blocks.2\", but no slot of its ring is free"));
}

TEST_CASE("fsdp runtime: actions in another order fail, or give the same bits where they may",
          "[fsdp]") {
  FsdpRun run = short_run(Strategy::kFullShard);
  run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = 0;
  const FsdpResult expected = run_fsdp_on_threads(2, run);
  const auto check = [&](ActionKind kind, const std::string& unit, const std::string& error) {
    const Outcome outcome = run_edited(run, swapped(kind, unit, 0));
    INFO(name_of(kind) << " of " << unit << ": " << outcome.error);
    CHECK(contains(outcome.error, error));
  };
  check(ActionKind::kGather, "blocks.1",
        "the program says wait of unit \"blocks.1\", whose parameters are sharded");
  check(ActionKind::kRelease, "blocks.0",
        "the program says gather of unit \"blocks.1\", but no slot of its ring is free");
  check(ActionKind::kWait, "blocks.0",
        "parameters of unit \"blocks.0\", which can be read from when a call");
  // A reduce needs no parameters: they may go before it.
  const Outcome outcome = run_edited(run, swapped(ActionKind::kReduce, "blocks.1", 0));
  CHECK(outcome.error.empty());
  check_same(outcome.result, expected, "a reduce behind the release that follows it");
}

TEST_CASE("fsdp runtime: an action that one rank leaves out is named before anybody hangs",
          "[fsdp]") {
  for (const ActionKind kind :
       {ActionKind::kGather, ActionKind::kReduce, ActionKind::kGatherFull}) {
    const Outcome outcome =
        run_edited(short_run(Strategy::kFullShard), without(kind, "blocks.1", 0), /*rank=*/1);
    INFO(name_of(kind) << ": " << outcome.error);
    const bool is_announced =
        contains(outcome.error, "fsdp: the ranks issue different collectives in step 0") &&
        contains(outcome.error, std::string(name_of(kind)));
    // The rank itself may come to what is missing first.
    CHECK((is_announced || contains(outcome.error, "the program")));
  }
}

TEST_CASE("fsdp runtime: a run executes what the pure machine says of its calls", "[fsdp]") {
  for (const int prefetch : {0, 1, 2}) {
    FsdpRun run = short_run(Strategy::kFullShard);
    run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
    std::string predicted;
    run.on_ready = [&](dist::Fsdp& fsdp, dist::World& world) {
      if (world.rank() != 0) return;
      const dist::FsdpParts& parts = parts_of(fsdp);
      struct Names final : dist::Issuer {
        explicit Names(const dist::FsdpParts& p) : program(names_of(p)) {}
        static std::vector<std::string> names_of(const dist::FsdpParts& p) {
          std::vector<std::string> names;
          for (const dist::UnitPlan& u : p.plan.units) names.push_back(u.name);
          return names;
        }
        void act(const Action& action) override { program.add(action); }
        bool agree(const dist::Turns::Hashes&) override { return true; }
        dist::Program program;
      } names(parts);
      const dist::FsdpOptions& options = parts.policy.options;
      Order order(parts.plan.uses(parts.policy), parts.plan.num_gathered_slots(),
                  {options.prefetch_forward, options.prefetch_backward, false, false}, names);
      for (int step = 0; step < 2; ++step) {
        names.program.clear();
        std::vector<size_t> calls;
        for (int u = 0; u < static_cast<int>(parts.units.size()); ++u) {
          // The head has two modules: the last norm and the output.
          for (size_t k = 0; k < parts.specs[static_cast<size_t>(u)].modules.size(); ++k) {
            order.begin_call(u, Order::Mode::kTrain);
            calls.push_back(order.end_call(u, Order::Mode::kTrain));
          }
        }
        const int64_t generation = order.generation();
        for (size_t i = calls.size(); i-- > 0;) order.enter_backward(generation, calls[i]);
        order.end_backward(true);
        order.complete_gradients();
        predicted = names.program.to_string();
        order.end_step();
      }
    };
    const FsdpResult result = run_fsdp_on_threads(2, run);
    INFO("prefetch " << prefetch);
    CHECK(result.program == predicted);
  }
}

// ---- the plan of the memory

TEST_CASE("fsdp runtime: a plan has slots and scratch before a byte is allocated", "[fsdp]") {
  const nn::DeferredInit deferred;
  nn::LlamaConfig config = FsdpRun::tiny_llama();
  config.num_layers = 3;
  nn::Llama model(config);
  dist::FsdpOptions options;
  options.prefetch_forward = 2;
  options.strategy = Strategy::kHybridShard;
  options.shard_size = 2;
  options.precision.param_dtype = kBF16;
  options.precision.wire_dtype = kF32;
  const dist::Policy policy = dist::resolve_policy(options, 4, 3, 1, false);
  CHECK((policy.mesh.shard_rank == 1 && policy.mesh.replicate_rank == 1));
  const auto twice = [](int64_t numel, DType wire) {
    return 2 * numel * static_cast<int64_t>(size_of(wire));
  };
  const dist::Plan plan = make_plan(options.wrap ? options.wrap(model) : policy.options.wrap(model),
                                    policy, twice, twice);
  REQUIRE(plan.units.size() == 5);  // embedding, three blocks, head
  const int64_t block = plan.units[1].groups[0].layout.numel;
  const int64_t head = plan.units[4].groups[0].layout.numel;
  const int64_t other = std::max(plan.units[0].groups[0].layout.numel, head);
  CHECK(block % (256 * 4) == 0);
  REQUIRE(plan.pools.size() == 4);
  const auto check_pool = [&plan](int index, int64_t nbytes, int num_slots, bool is_gathered) {
    const dist::PoolPlan& pool = plan.pools[static_cast<size_t>(index)];
    INFO("pool " << index);
    CHECK(
        (pool.nbytes == nbytes && pool.num_slots == num_slots && pool.is_gathered == is_gathered));
  };
  check_pool(plan.units[0].gathered_pool, 2 * other, 1, true);
  check_pool(plan.units[0].gradient_pool, 2 * other, 1, false);
  check_pool(plan.units[1].gathered_pool, 2 * block, 3, true);
  check_pool(plan.units[1].gradient_pool, 2 * block, 2, false);
  CHECK(plan.num_gathered_slots() == std::vector<int>{1, 0, 3, 0});
  const int64_t largest = std::max(block, other);
  CHECK(plan.scratch.staging_nbytes == 2 * (largest / 2) * 4);
  CHECK(plan.scratch.replicate_staging_nbytes == 2 * (largest / 4) * 4);
  CHECK(plan.scratch.wire_nbytes == largest * 4);  // collected in bf16, sent in f32
  CHECK(plan.scratch.partial_numel == largest / 2);
  CHECK(!plan.scratch.has_partial);  // sync is "shard"
  CHECK(plan.host_gradient_numel == 0);

  // Parameters that stay have a slot a unit, which is there from the beginning.
  dist::FsdpOptions stays;
  stays.strategy = Strategy::kShardGradOp;
  const dist::Policy keep = dist::resolve_policy(stays, 4, 0, 1, false);
  const dist::Plan kept = make_plan(keep.options.wrap(model), keep, twice, twice);
  for (const dist::UnitPlan& unit : kept.units) {
    CHECK(kept.num_gathered_slots()[static_cast<size_t>(unit.gathered_pool)] == 1);
  }
}

}  // namespace
}  // namespace tessera::testing
