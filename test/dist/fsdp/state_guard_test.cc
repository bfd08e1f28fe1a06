#include "dist/fsdp/state_guard.h"

#include "core/random.h"
#include "core/runtime/context.h"
#include "dist/comm/local.h"
#include "dist/fsdp/parts.h"
#include "optim/adamw.h"
#include "test/dist/fsdp/harness.h"
#include "test/testing.h"

namespace tessera {
namespace {

using dist::Fsdp;
using dist::FsdpOptions;
using dist::run_ranks;
using dist::StateGuard;
using dist::StateGuardOptions;
using dist::Strategy;
using dist::World;
using testing::error_of;
using testing::FsdpRun;
using testing::kStrategies;

/// A rank's training and its guard; steps count from 1.
struct Training {
  std::unique_ptr<nn::Llama> model;
  std::unique_ptr<Fsdp> fsdp;
  std::unique_ptr<optim::AdamW> adamw;
  std::unique_ptr<StateGuard> guard;  // may be null
  World& world;
  int64_t step = 0;
  std::vector<double> losses;

  Training(World& w, const FsdpOptions& options, const StateGuardOptions* guards) : world(w) {
    {
      const nn::DeferredInit deferred;
      model = std::make_unique<nn::Llama>(FsdpRun::tiny_llama());
    }
    fsdp = fully_shard(*model, world, options);
    fsdp->initialize(7);
    adamw = std::make_unique<optim::AdamW>(fsdp->shards());
    if (guards != nullptr)
      guard = std::make_unique<StateGuard>(*model, *fsdp, *adamw, world, *guards);
  }

  /// `in_step` runs after the backward.
  void run_step(const std::function<void()>& in_step = nullptr) {
    ++step;
    const Tensor ids = testing::randint(0, 67, {2, 16}, kI32, 10 * step + world.rank());
    const Tensor targets = testing::randint(0, 67, {2, 16}, kI32, 10 * step + world.rank() + 5);
    const LossSum loss = model->loss(ids, targets);
    backward(loss.sum);
    losses.push_back(loss.sum.item());
    const dist::ClippedNorm clip = fsdp->clip_grad_norm(1.0);
    if (in_step) in_step();
    if (guard != nullptr) guard->before_update(step);
    adamw->step(1e-2f, clip.factor, clip.found_inf);
    if (guard != nullptr) guard->after_update();
    fsdp->end_step();
    if (guard != nullptr) guard->check(step - 1);
  }
};

FsdpOptions options_of(Strategy strategy, DType dtype) {
  FsdpOptions options;
  options.strategy = strategy;
  options.precision.param_dtype = dtype;
  if (strategy >= Strategy::kHybridShard) options.shard_size = 2;
  return options;
}

/// Bit `bit` of element `index` changes, unseen by everybody.
void flip(const Tensor& tensor, int64_t index, int bit) {
  current_stream().synchronize();
  auto* byte = static_cast<unsigned char*>(tensor.raw_data()) +
               index * static_cast<int64_t>(size_of(tensor.dtype())) + bit / 8;
  *byte = static_cast<unsigned char>(*byte ^ 1u << bit % 8);
}

/// The last tensor that this rank has a part of: its place and how a message calls it.
struct Place {
  size_t shard;
  int64_t index;
  std::string name;
};
Place last_place(Fsdp& fsdp) {
  for (size_t i = fsdp.shards().size(); i-- > 0;) {
    const optim::FlatShard& shard = fsdp.shards()[i];
    if (shard.segments.empty()) continue;
    const optim::Segment& s = shard.segments.back();
    return {i, s.end - 1, fmt::format("{} (unit {})", s.parameter, shard.name)};
  }
  throw Error("a rank without parameters");
}

TEST_CASE("state_guard: a run without a fault is quiet, and its bits are the same", "[fsdp]") {
  for (const Strategy strategy : kStrategies) {
    for (const DType dtype : {kF32, kBF16}) {
      for (const dist::Offload offload : {dist::Offload::kNone, dist::Offload::kOptimizer}) {
        INFO(name_of(strategy) << " " << name_of(dtype) << " " << name_of(offload));
        std::vector<std::vector<double>> losses;
        for (const bool is_guarded : {false, true}) {
          const StateGuardOptions guards{.replica_every = 2, .checks_state = true};
          run_ranks(4, [&](World& world) {
            FsdpOptions options = options_of(strategy, dtype);
            options.offload = offload;
            Training training(world, options, is_guarded ? &guards : nullptr);
            for (int i = 0; i < 5; ++i) training.run_step();
            if (world.rank() == 0) losses.push_back(training.losses);
          });
        }
        CHECK(losses[0] == losses[1]);
      }
    }
  }
}

TEST_CASE("state_guard: a bit flipped in one replica is named under every strategy", "[fsdp]") {
  for (const Strategy strategy : kStrategies) {
    for (const DType dtype : {kF32, kBF16}) {
      constexpr int kRank = 2;
      std::string expected;
      const std::string message = error_of([&] {
        run_ranks(4, [&](World& world) {
          const StateGuardOptions guards{.replica_every = 1};
          FsdpOptions options = options_of(strategy, dtype);
          if (strategy == Strategy::kFullShard) options.ignored = {"norm.weight"};
          Training training(world, options, &guards);
          for (int i = 0; i < 3; ++i) training.run_step();
          const bool is_mine = world.rank() == kRank;
          const Place place = last_place(*training.fsdp);
          if (strategy == Strategy::kNoShard || strategy >= Strategy::kHybridShard) {
            if (is_mine) {
              flip(training.adamw->state()[0].tensors[place.shard], place.index, 3);
              // Two replicas of a shard disagree, and nobody knows which of them is right.
              expected = strategy == Strategy::kNoShard
                             ? "rank 2: exp_avg of " + place.name
                             : "ranks 0, 2: exp_avg of " + place.name +
                                   " (which of them is right cannot be told)";
            }
            training.run_step();
          } else if (strategy == Strategy::kFullShard) {  // what every rank has whole
            if (is_mine) {
              flip(training.model->parameter("norm.weight").tensor, 5, 0);
              expected = "rank 2: ignored parameter norm.weight";
            }
            training.run_step();
          } else {  // gathered, and kept for the step: another rank's part
            training.run_step([&] {
              if (!is_mine) return;
              const auto& unit = parts_of(*training.fsdp).units.front();
              const dist::Group& g = unit->groups().front();
              flip(unit->gathered.values(g), 0, 7);
              expected = fmt::format("rank 2: gathered parameters of {} (unit {})",
                                     g.layout.placements.front().name, unit->name());
            });
          }
          for (int i = 0; i < 2; ++i) training.run_step();
        });
      });
      INFO(name_of(strategy) << " " << name_of(dtype));
      CHECK(message ==
            fmt::format("step 4: replicas have drifted apart, expected the same bits: {}; memory "
                        "has changed by itself, or a rank computes other numbers; "
                        "replica_every = 0 compares nothing",
                        expected));
    }
  }
}

TEST_CASE("state_guard: a bit flipped in a shard between two updates is named", "[fsdp]") {
  for (const Strategy strategy : kStrategies) {
    for (const char* kind : {"master", "exp_avg_sq"}) {
      constexpr int kRank = 1;
      std::string expected;
      const std::string message = error_of([&] {
        run_ranks(4, [&](World& world) {
          const StateGuardOptions guards{.checks_state = true};
          Training training(world, options_of(strategy, kBF16), &guards);
          for (int i = 0; i < 3; ++i) training.run_step();
          if (world.rank() == kRank) {
            const Place place = last_place(*training.fsdp);
            flip(kind[0] == 'm' ? training.fsdp->shards()[place.shard].master
                                : training.adamw->state()[1].tensors[place.shard],
                 place.index, 30);
            expected = fmt::format("{} of {}", kind, place.name);
          }
          for (int i = 0; i < 3; ++i) training.run_step();
        });
      });
      INFO(name_of(strategy));
      CHECK(message == fmt::format("step 4: rank 1: {} changed since the last update wrote it, "
                                   "expected the same bits: memory has changed by itself",
                                   expected));
    }
  }
}

TEST_CASE("state_guard: states that were written from outside are no fault, and long lists are cut",
          "[fsdp]") {
  const StateGuardOptions guards{.replica_every = 1, .checks_state = true};
  run_ranks(2, [&](World& world) {
    Training training(world, options_of(Strategy::kNoShard, kF32), &guards);
    for (int i = 0; i < 2; ++i) training.run_step();
    for (const optim::FlatShard& shard : training.fsdp->shards()) Tensor(shard.master).fill_(0.5);
    training.fsdp->shards_changed();
    training.guard->states_changed();
    for (int i = 0; i < 3; ++i) training.run_step();
  });
  const std::string message = error_of([&] {
    run_ranks(3, [&](World& world) {
      Training training(world, options_of(Strategy::kNoShard, kF32), &guards);
      training.run_step();
      if (world.rank() == 2) training.fsdp->initialize(8);
      training.guard->states_changed();
      for (int i = 0; i < 3; ++i) training.run_step();
    });
  });
  INFO(message);
  CHECK(
      message.starts_with("step 2: replicas have drifted apart, expected the same bits: rank 2: "
                          "parameters of "));
  CHECK(message.find(" more; memory has changed by itself") != std::string::npos);
  CHECK(message.size() < 500);
}

}  // namespace
}  // namespace tessera
