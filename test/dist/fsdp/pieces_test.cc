// Gradients of an embedding and a head in pieces: the bits of the whole, in the slots of blocks.

#include <algorithm>
#include <set>

#include "dist/fsdp/guards.h"
#include "dist/fsdp/parts.h"
#include "kernels/embedding/embedding.h"
#include "test/dist/fsdp/memory_cases.h"
#include "test/dist/fsdp/net.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using dist::Action;
using dist::ActionKind;
using dist::Strategy;

constexpr int64_t kVocab = 517;  // of a table that is several blocks; rows end in no rank's part

FsdpRun large_vocab(Strategy strategy, int world_size) {
  FsdpRun run;
  run.model.vocab_size = kVocab;
  run.num_steps = 2;
  run.samples_per_step = 8;
  run.fsdp.strategy = strategy;
  run.fsdp.sync_every_micro_batch = dist::GradSync::kEveryMicroBatch;
  if (strategy >= Strategy::kHybridShard) run.fsdp.shard_size = hybrid_shard_size(world_size);
  return run;
}

/// Runs with and without pieces, and the most pieces that a unit had.
void check_same_in_pieces(int world_size, FsdpRun run, const std::string& what) {
  const FsdpResult whole = run_fsdp_on_threads(world_size, run);
  run.fsdp.gradient_pieces = true;
  const FsdpResult pieces = run_fsdp_on_threads(world_size, run);
  INFO(what);
  CHECK(whole.program.find(", piece ") == std::string::npos);
  CHECK(pieces.program.find("reduce embedding, piece 2\n") != std::string::npos);
  check_same(pieces, whole, what);
}

TEST_CASE("fsdp pieces: the bits of whole gradients, under every strategy", "[fsdp]") {
  for (const int world_size : {1, 2, 4}) {
    for (const Strategy strategy : kAllStrategies) {
      if (strategy == Strategy::kShardOptim) continue;  // keeps whole gradients
      for (const int num_micro_batches : {1, 2}) {
        FsdpRun run = large_vocab(strategy, world_size);
        run.num_micro_batches = num_micro_batches;
        check_same_in_pieces(world_size, run,
                             fmt::format("{}, {} ranks, {} micro-batches", name_of(strategy),
                                         world_size, num_micro_batches));
      }
    }
  }
}

TEST_CASE("fsdp pieces: the bits of whole gradients, whatever else is set", "[fsdp]") {
  const auto check = [](const char* what, const std::function<void(FsdpRun&)>& change,
                        int world_size = 2, Strategy strategy = Strategy::kFullShard) {
    FsdpRun run = large_vocab(strategy, world_size);
    change(run);
    check_same_in_pieces(world_size, run, what);
  };
  check("bf16", [](FsdpRun& run) { set_precision(run, Precision::kBF16); });
  check(
      "bf16, one rank", [](FsdpRun& run) { set_precision(run, Precision::kBF16); }, 1);
  check("bf16, gradients in f32", [](FsdpRun& run) { set_precision(run, Precision::kMixed); });
  check("a bf16 wire, norms in f32", [](FsdpRun& run) {
    run.fsdp.precision.param_dtype = kBF16;
    run.fsdp.precision.reduce_dtype = kF32;
    run.fsdp.precision.wire_dtype = kBF16;
    run.fsdp.precision.norm_fp32 = true;
  });
  check("f16 with a loss scale", [](FsdpRun& run) {
    run.fsdp.precision.param_dtype = kF16;
    run.loss_scale = dist::LossScaleOptions{};
  });
  check("tied", [](FsdpRun& run) { run.model.tied = true; });
  check("tied, two micro-batches of ragged samples", [](FsdpRun& run) {
    run.model.tied = true;
    run.ragged = true;
    run.num_micro_batches = 2;
  });
  check("a soft-cap", [](FsdpRun& run) { run.model.logit_softcap = 2; });
  check("recompute", [](FsdpRun& run) { run.recompute.kind = nn::RecomputePolicy::Kind::kFull; });
  check("one communicator, prefetch 2", [](FsdpRun& run) {
    run.fsdp.communicators = 1;
    run.fsdp.prefetch_backward = run.fsdp.prefetch_forward = 2;
  });
  check("two backwards a micro-batch, and evaluations", [](FsdpRun& run) {
    run.num_micro_batches = 2;
    run.twice = run.with_eval = true;
  });
  check("optimizer states on the host",
        [](FsdpRun& run) { run.fsdp.offload = dist::Offload::kOptimizer; });
  for (const int world_size : {1, 4}) {
    check(
        "reproducible",
        [](FsdpRun& run) {
          run.fsdp.reproducible = true;
          run.model.vocab_size = 2500;  // a block is padded for 64 ranks
          run.num_micro_batches = 2;
          run.fsdp.precision.param_dtype = kBF16;
        },
        world_size);
  }
  check(
      "hybrid, replicas summed at the end",
      [](FsdpRun& run) {
        run.fsdp.sync_every_micro_batch = dist::GradSync::kShard;
        run.num_micro_batches = 2;
      },
      4, Strategy::kHybridShard);
  check(
      "hybrid, a backward after the last micro-batch",
      [](FsdpRun& run) {
        run.fsdp.sync_every_micro_batch = dist::GradSync::kShard;
        run.twice = true;
      },
      4, Strategy::kHybridShardZero2);
  check("the head is frozen", [](FsdpRun& run) {
    run.prepare = [](nn::LanguageModel& model) {
      model.parameter("head.weight").tensor.set_requires_grad(false);
    };
  });
  // Kept on this rank: reduced with the next backward, and when the step is completed.
  for (const int kept : {0, 1}) {
    for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
      check("no_sync", [&](FsdpRun& run) {
        set_precision(run, precision);
        run.num_micro_batches = 2;
        run.scope = [kept](int a, dist::Fsdp& fsdp, nn::LanguageModel&) {
          return a >= kept ? std::shared_ptr<void>()
                           : std::shared_ptr<void>(std::make_shared<dist::NoSync>(fsdp));
        };
        if (kept == 0) {
          run.scope = [](int, dist::Fsdp& fsdp, nn::LanguageModel&) -> std::shared_ptr<void> {
            return std::make_shared<dist::NoSync>(fsdp);
          };
        }
      });
    }
  }
}

TEST_CASE("fsdp pieces: a loss that backward differentiates, without a known scale", "[fsdp]") {
  NetRun run;
  run.num_steps = 2;
  const auto make = [] {
    nn::LlamaConfig config = FsdpRun::tiny_llama();
    config.vocab_size = kVocab;
    return std::make_unique<nn::Llama>(config);
  };
  const PartFn<nn::Llama> pass = [](nn::Llama& model, int step, int part) {
    const auto seed = static_cast<uint64_t>(8 * step + part);
    const LossSum loss = model.loss(randint(0, kVocab, {2, 16}, kI32, seed),
                                    randint(0, kVocab, {2, 16}, kI32, seed + 100));
    backward(loss.sum, full({}, 0.01));
    return loss.sum;
  };
  for (const int world_size : {1, 2}) {
    run.fsdp.gradient_pieces = false;
    const FsdpResult whole = train_net_on_threads<nn::Llama>(world_size, run, make, pass);
    run.fsdp.gradient_pieces = true;
    const FsdpResult pieces = train_net_on_threads<nn::Llama>(world_size, run, make, pass);
    CHECK(pieces.program.find("reduce head, piece 2\n") != std::string::npos);
    check_same(pieces, whole, fmt::format("{} ranks", world_size));
  }
}

/// A table that is looked up and multiplied by, of which only the first gives rows of a gradient.
struct Table : nn::Module {
  static constexpr int64_t kRows = 301, kWidth = 24;
  Tensor& weight = register_parameter("weight", {kRows, kWidth}, nn::Init::normal(0, 0.1));
  bool looks_up_first = false;
  Tensor forward(const Tensor& ids) {
    const auto multiply = [this] { return matmul(randn({4, kRows}, kF32, 3), weight); };
    if (!looks_up_first) {
      const Tensor product = multiply();
      return add(embedding(ids, weight), product);
    }
    const Tensor rows = embedding(ids, weight);
    return add(rows, multiply());
  }
};
struct TableNet : nn::Module {
  nn::Child<Table> table{this, "table"};
  nn::ChildList<nn::Linear> blocks{this, "blocks"};
  TableNet() {
    for (int i = 0; i < 2; ++i) blocks.emplace_back(Table::kWidth, Table::kWidth);
  }
  Tensor forward(const Tensor& ids) {
    Tensor h = table(ids);
    for (int i = 0; i < 2; ++i) h = gelu(blocks[i](h));
    return sum(mul(h, h));
  }
};

TEST_CASE("fsdp pieces: ops that give a gradient as a whole are cut afterwards", "[fsdp]") {
  NetRun run;
  run.num_steps = 2;
  const PartFn<TableNet> pass = [](TableNet& net, int step, int part) {
    const auto seed = static_cast<uint64_t>(8 * step + part);
    const Tensor loss = nn::call(net, randint(0, Table::kRows, {4}, kI32, seed));
    backward(loss);
    return loss;
  };
  for (const bool looks_up_first : {false, true}) {
    const auto make = [&] {
      auto net = std::make_unique<TableNet>();
      net->table->looks_up_first = looks_up_first;
      return net;
    };
    for (const int world_size : {1, 2}) {
      INFO(looks_up_first << ", " << world_size << " ranks");
      run.fsdp.gradient_pieces = false;
      const FsdpResult whole = train_net_on_threads<TableNet>(world_size, run, make, pass);
      run.fsdp.gradient_pieces = true;
      const FsdpResult pieces = train_net_on_threads<TableNet>(world_size, run, make, pass);
      CHECK(pieces.program.find("reduce embedding, piece 2\n") != std::string::npos);
      check_same(pieces, whole, "as a whole");
    }
  }
}

TEST_CASE("fsdp pieces: the plan has them in the ring of blocks, no slot of a whole", "[fsdp]") {
  const nn::DeferredInit deferred;
  nn::LlamaConfig config = FsdpRun::tiny_llama();
  config.vocab_size = kVocab;
  nn::Llama model(config);
  const auto staging = [](int64_t numel, DType wire) {
    return numel * static_cast<int64_t>(size_of(wire));
  };
  const auto plan_of = [&](bool pieces, int world_size) {
    dist::FsdpOptions options;
    options.gradient_pieces = pieces;
    const dist::Policy policy = dist::resolve_policy(options, world_size, 0, 1, false);
    return make_plan(policy.options.wrap(model), policy, staging, staging);
  };
  for (const int world_size : {1, 2, 4}) {
    const dist::Plan whole = plan_of(false, world_size), pieces = plan_of(true, world_size);
    const auto gradient_slots = [](const dist::Plan& plan) {
      int64_t nbytes = 0;
      for (const dist::PoolPlan& pool : plan.pools) {
        if (!pool.is_gathered) nbytes += pool.num_slots * pool.nbytes;
      }
      return nbytes;
    };
    const int64_t block = whole.units[1].gradient_nbytes;
    const int64_t head = whole.units.back().gradient_nbytes;
    INFO(world_size << " ranks");
    CHECK(gradient_slots(whole) == 2 * block + head);
    CHECK(gradient_slots(pieces) == 2 * block + 1024);  // the weight of the last norm
    CHECK(pieces.scratch.staging_nbytes < whole.scratch.staging_nbytes + (world_size == 1));
    for (const dist::UnitPlan* u : {&pieces.units.front(), &pieces.units.back()}) {
      CHECK(u->num_pieces > 2);
      CHECK(u->piece_nbytes <= block);
      CHECK(u->piece_pool == pieces.units[1].gradient_pool);
      // One piece less would not do.
      const dist::GroupPlan& g = u->groups[0];
      CHECK((u->num_pieces - 1) * g.piece_numel * world_size < g.layout.numel);
      CHECK(u->num_pieces * g.piece_numel * world_size >= g.layout.numel);
    }
    for (size_t i = 1; i + 1 < pieces.units.size(); ++i) CHECK(pieces.units[i].num_pieces == 1);
  }
  // Nothing is cut where that has no effect.
  dist::FsdpOptions options;
  options.gradient_pieces = true;
  options.strategy = Strategy::kShardOptim;
  const dist::Policy keeps = dist::resolve_policy(options, 2, 0, 1, false);
  for (const dist::UnitPlan& u :
       make_plan(keeps.options.wrap(model), keeps, staging, staging).units) {
    CHECK(u.num_pieces == 1);
  }
}

TEST_CASE("fsdp pieces: what is said of the memory is what the allocator sees", "[fsdp]") {
  for (const Strategy strategy : kAllStrategies) {
    if (strategy == Strategy::kShardOptim) continue;
    for (const int world_size : {1, 2, 4}) {
      for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
        FsdpRun run = large_vocab(strategy, world_size);
        set_precision(run, precision);
        run.num_micro_batches = 2;
        run.fsdp.gradient_pieces = true;
        std::vector<std::string> problems(static_cast<size_t>(world_size));
        dist::LocalOptions local;
        local.context.poison = false;
        dist::run_ranks(world_size, local, [&](dist::World& world) {
          problems[static_cast<size_t>(world.rank())] = memory_problem(world, run);
        });
        INFO(fmt::format("{}, {} ranks", name_of(strategy), world_size));
        for (const std::string& problem : problems) CHECK(problem == "");
      }
    }
  }
}

TEST_CASE("fsdp pieces: a program that leaves one out is an error on all ranks", "[fsdp]") {
  FsdpRun run = large_vocab(Strategy::kFullShard, 2);
  run.fsdp.gradient_pieces = true;
  run.on_ready = [](dist::Fsdp& fsdp, dist::World&) {
    parts_of(fsdp).runtime.edit = [&fsdp](const Action& action) -> std::vector<Action> {
      const bool is_embedding =
          parts_of(fsdp).units[static_cast<size_t>(action.unit)]->name() == "embedding";
      if (action.kind == ActionKind::kReduce && is_embedding && action.piece == 1) return {};
      return {action};
    };
  };
  std::vector<std::string> errors(2);
  dist::run_ranks(2, [&](dist::World& world) {
    try {
      run_fsdp(world, run);
    } catch (const InternalError& error) {
      errors[static_cast<size_t>(world.rank())] = error.what();
    }
  });
  for (const std::string& error : errors) {
    CHECK(error.find("reduce of unit \"embedding\", piece 2, expected piece 1 of ") !=
          std::string::npos);
  }
}

}  // namespace
}  // namespace tessera::testing
