// Wrong use of the C++ API is an error that names what is missing, and none that depends on timing.

#include <optional>
#include <thread>

#include "core/autograd.h"
#include "dist/fsdp/guards.h"
#include "dist/fsdp/parts.h"
#include "dist/fsdp/shard_view.h"
#include "nn/embedding.h"
#include "optim/sgd.h"
#include "test/dist/fsdp/combos.h"
#include "test/dist/fsdp/net.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using dist::Fsdp;
using dist::FsdpOptions;
using dist::Strategy;
using dist::UnshardGuard;
using dist::World;

constexpr int kWidth = 6, kBlocks = 4;

struct Block : nn::Module {
  nn::Child<nn::Linear> linear{this, "linear", kWidth, kWidth};
  Tensor forward(const Tensor& x) { return gelu(linear(x)); }
};

/// A chain, of which block `unhooked` is called by `forward` itself.
struct Net : nn::Module {
  nn::Child<nn::Linear> in{this, "in", kWidth, kWidth};
  nn::ChildList<Block> blocks{this, "blocks"};
  nn::Child<nn::Linear> out{this, "out", kWidth, 3};
  int unhooked = -1;
  bool recomputes = false;
  std::function<void()> in_backward;  // of the block before the last

  Net() {
    for (int i = 0; i < kBlocks; ++i) blocks.emplace_back();
  }
  Tensor run_block(int i, const Tensor& x) {
    return i == unhooked ? blocks[i]->forward(x) : blocks[i](x);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = in(x);
    for (int i = 0; i < kBlocks; ++i) {
      h = recomputes
              ? recompute([this, i](const std::vector<Tensor>& t) { return run_block(i, t[0]); },
                          {h})
              : run_block(i, h);
      if (i != kBlocks - 2 || !in_backward) continue;
      h = record("probe", {h}, h.detach(), [f = in_backward](const Tensor& dy, Grads& g) {
        f();
        g.add(0, dy);
      });
    }
    return out(h);
  }
};

FsdpOptions options_of(Strategy strategy, int prefetch = 1, int world_size = 2) {
  FsdpOptions options;
  options.strategy = strategy;
  options.prefetch_forward = options.prefetch_backward = prefetch;
  if (strategy >= Strategy::kHybridShard) options.shard_size = hybrid_shard_size(world_size);
  return options;
}

Tensor loss_of(Net& net, int part = 0) {
  const Tensor y = nn::call(net, randn({4, kWidth}, kF32, static_cast<uint64_t>(part + 1)));
  return sum(mul(y, y));
}

/// A model with values.
struct Sharded {
  std::unique_ptr<Net> net = std::make_unique<Net>();
  std::unique_ptr<Fsdp> fsdp;
  Sharded(World& world, const FsdpOptions& options) {
    fsdp = dist::fully_shard(*net, world, options);
    fsdp->initialize(3);
  }
  void pass(int part = 0) const { backward(loss_of(*net, part)); }
};

/// What `body` throws on thread ranks; "" if nothing. Each rank must throw the same, so that none
/// of them waits for another.
std::string error_on_ranks(int world_size, const std::function<void(World&)>& body) {
  std::vector<std::string> texts(static_cast<size_t>(world_size));
  dist::run_ranks(world_size, [&](World& world) {
    try {
      body(world);
    } catch (const Error& error) {
      texts[static_cast<size_t>(world.rank())] = error.what();
    }
  });
  for (const std::string& text : texts) CHECK(text == texts[0]);
  return texts[0];
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

constexpr const char* kNotThere =
    "parameters of unit \"blocks.2\", which can be read from when a call";

TEST_CASE("fsdp use: block->forward(x) is the same error at every depth, strategy and rank count",
          "[fsdp]") {
  for (const int world_size : {1, 2, 3}) {
    for (const Strategy strategy : kAllStrategies) {
      for (const int prefetch : {0, 1, 2, 5}) {
        for (const bool recomputes : {false, true}) {
          const std::string text = error_on_ranks(world_size, [&](World& world) {
            const Sharded sharded(world, options_of(strategy, prefetch, world_size));
            sharded.net->recomputes = recomputes;
            for (int step = 0; step < 2; ++step) {  // step 1 knows the order of calls
              sharded.net->unhooked = step == 1 ? 2 : -1;
              sharded.pass();
              sharded.fsdp->clip_grad_norm(1.0);
              sharded.fsdp->end_step();
            }
          });
          INFO(fmt::format("{} ranks, {}, prefetch {}, recompute {}: {}", world_size,
                           name_of(strategy), prefetch, recomputes, text));
          CHECK(has(text, kNotThere));
          CHECK(has(text, "call block(x), not block->forward(x)"));
        }
      }
    }
  }
}

TEST_CASE("fsdp use: what is gathered ahead cannot be read in backward either", "[fsdp]") {
  for (const int world_size : {1, 2, 3}) {
    for (const Strategy strategy : kAllStrategies) {
      for (const int prefetch : {0, 1, 2, 5}) {
        const std::string text = error_on_ranks(world_size, [&](World& world) {
          const Sharded sharded(world, options_of(strategy, prefetch, world_size));
          sharded.pass();
          // After the backward of the last block: block 2 is next and on its way, block 1 too.
          sharded.net->in_backward = [&] { sharded.net->blocks[1]->linear->weight().raw_data(); };
          sharded.pass();
        });
        INFO(fmt::format("{} ranks, {}, prefetch {}: {}", world_size, name_of(strategy), prefetch,
                         text));
        CHECK(has(text, "parameters of unit \"blocks.1\", which can be read"));
      }
    }
  }
}

TEST_CASE("fsdp use: gradients outside of a unit's calls are an error, in a guard too", "[fsdp]") {
  for (const int world_size : {1, 2}) {
    const std::string text = error_on_ranks(world_size, [&](World& world) {
      const Sharded sharded(world, options_of(Strategy::kFullShard, 1, world_size));
      sharded.pass();  // the order is known: block 3's turn comes before the head's
      const UnshardGuard guard(*sharded.fsdp, *sharded.net);
      const Tensor y =
          sharded.net->out->forward(nn::call(*sharded.net->blocks[0], randn({4, kWidth}, kF32, 1)));
      backward(sum(mul(y, y)));
    });
    INFO(text);
    CHECK(has(text, "of unit \"head\""));
  }
}

TEST_CASE("fsdp use: a model without values is an error that names a parameter", "[fsdp]") {
  for (const bool is_deferred : {false, true}) {
    for (const int world_size : {1, 2}) {
      for (const Strategy strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
        const std::string text = error_on_ranks(world_size, [&](World& world) {
          std::optional<nn::DeferredInit> deferred;
          if (is_deferred) deferred.emplace();
          Net net;
          deferred.reset();
          const auto fsdp = dist::fully_shard(net, world, options_of(strategy));
          loss_of(net);
        });
        INFO(text);
        CHECK(has(text,
                  "forward: parameter \"in.weight\" of Net has no values (and 11 more), "
                  "expected Fsdp::initialize, Fsdp::load_full or a checkpoint before"));
      }
    }
  }
  // Each of the ways to give them.
  const auto works = [](const std::function<void(Net&)>& before,
                        const std::function<void(Net&, Fsdp&)>& after) {
    return error_on_ranks(2, [&](World& world) {
      Net net;
      if (before) before(net);
      const auto fsdp = dist::fully_shard(net, world, options_of(Strategy::kFullShard));
      if (after) after(net, *fsdp);
      backward(loss_of(net));
    });
  };
  CHECK(works([](Net& net) { net.initialize(1); }, nullptr) == "");
  CHECK(works(nullptr, [](Net&, Fsdp& fsdp) { fsdp.initialize(1); }) == "");
  CHECK(works(nullptr, [](Net& net, Fsdp& fsdp) {
          fsdp.load_full([&](const std::string& name) {
            return zeros(net.parameter(name).tensor.shape(), kF32);
          });
        }) == "");
  CHECK(works(nullptr, [](Net&, Fsdp& fsdp) {
          for (optim::FlatShard& shard : fsdp.shards()) shard.master.fill_(0.1);
          fsdp.shards_changed();
        }) == "");
  CHECK(works(nullptr, [](Net& net, Fsdp& fsdp) {
          const UnshardGuard guard(fsdp, net, UnshardGuard::Access::kWrite);
          for (const nn::NamedParameter& p : net.named_parameters()) {
            NoGrad no_grad;
            p.parameter->tensor.fill_(0.1);
          }
        }) == "");
  CHECK(has(works(nullptr,
                  [](Net&, Fsdp& fsdp) {
                    fsdp.for_each_full(Fsdp::State::kMaster,
                                       [](const std::string&, const Tensor&) {});
                  }),
            "Fsdp::for_each_full: parameter \"in.weight\" of Net has no values"));
  // Also one that is ignored.
  CHECK(has(error_on_ranks(2,
                           [](World& world) {
                             const nn::DeferredInit deferred;
                             Net net;
                             FsdpOptions options = options_of(Strategy::kFullShard);
                             options.ignored = {"out.bias"};
                             const auto fsdp = dist::fully_shard(net, world, options);
                             fsdp->shards_changed();
                             loss_of(net);
                           }),
            "forward: parameter \"out.bias\" of Net has no values"));
}

TEST_CASE("fsdp use: a missing end_step or clip_grad_norm is an error that names it", "[fsdp]") {
  using Use = std::function<void(const Sharded&, optim::Sgd&)>;
  const auto after_step = [](const Use& use) {
    return [use](const Sharded& s, optim::Sgd& sgd) {
      s.pass();
      const dist::ClippedNorm clip = s.fsdp->clip_grad_norm(1.0);
      sgd.step(0.1f, clip.factor);
      use(s, sgd);
    };
  };
  const std::string end_step =
      "after the optimizer's step of the Fsdp of Net, expected "
      "Fsdp::end_step first";
  const std::vector<std::pair<Use, std::string>> uses = {
      {after_step([](const Sharded& s, optim::Sgd&) { s.pass(1); }), "forward: " + end_step},
      {after_step([](const Sharded& s, optim::Sgd&) {
         NoGrad no_grad;
         loss_of(*s.net);
       }),
       "forward: " + end_step},
      {after_step([](const Sharded& s, optim::Sgd&) { s.fsdp->begin_micro_batch(0, 1); }),
       "Fsdp::begin_micro_batch: " + end_step},
      {after_step([](const Sharded& s, optim::Sgd&) { s.fsdp->clip_grad_norm(1.0); }),
       "Fsdp::clip_grad_norm: " + end_step},
      {after_step([](const Sharded& s, optim::Sgd&) { const UnshardGuard g(*s.fsdp, "head"); }),
       "UnshardGuard: " + end_step},
      {after_step([](const Sharded&, optim::Sgd& sgd) { sgd.step(); }),
       "Optimizer::step: shard embedding was updated in this step already, expected "
       "Fsdp::end_step between two updates"},
      {[](const Sharded& s, optim::Sgd& sgd) {
         s.pass();
         sgd.step();
       },
       "Optimizer::step: the gradients of shard embedding are not complete, expected "
       "Fsdp::clip_grad_norm first"},
      {[](const Sharded& s, optim::Sgd& sgd) {
         s.pass();
         s.fsdp->clip_grad_norm(1.0);
         s.pass();  // adds, and then the norm is another one
         sgd.step();
       },
       "Optimizer::step: the gradients of shard embedding are not complete"},
  };
  for (const int world_size : {1, 2}) {
    for (const Strategy strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
      for (const auto& [use, expected] : uses) {
        const std::string text = error_on_ranks(world_size, [&](World& world) {
          const Sharded sharded(world, options_of(strategy));
          optim::Sgd sgd(sharded.fsdp->shards());
          use(sharded, sgd);
        });
        INFO(text);
        CHECK(has(text, expected));
      }
    }
  }
  // All calls in order, twice; a norm taken twice; a step that is skipped.
  CHECK(error_on_ranks(2, [](World& world) {
          const Sharded sharded(world, options_of(Strategy::kFullShard));
          optim::Sgd sgd(sharded.fsdp->shards());
          for (int step = 0; step < 3; ++step) {
            sharded.pass();
            sharded.fsdp->clip_grad_norm(0, std::numeric_limits<double>::infinity());
            const dist::ClippedNorm clip = sharded.fsdp->clip_grad_norm(1.0);
            if (step != 1) sgd.step(0.1f, clip.factor);
            sharded.fsdp->end_step();
          }
        }) == "");
}

TEST_CASE("fsdp use: gradients are summed over ranks, or averaged if asked", "[fsdp]") {
  // Every rank has the same loss: the sum is the number of ranks times the gradient, the mean is
  // the gradient itself.
  for (const Strategy strategy :
       {Strategy::kFullShard, Strategy::kNoShard, Strategy::kShardOptim}) {
    const auto run = [&](int world_size, bool averages) {
      std::pair<double, std::vector<double>> result;
      dist::run_ranks(world_size, [&](World& world) {
        FsdpOptions options = options_of(strategy);
        options.average_gradients = averages;
        const Sharded sharded(world, options);
        optim::Sgd sgd(sharded.fsdp->shards());
        sharded.pass();
        const dist::ClippedNorm clip = sharded.fsdp->clip_grad_norm(0);
        sgd.step(0.25f, clip.factor);
        sharded.fsdp->end_step();
        const double norm = clip.norm.item();
        std::vector<double> values;
        sharded.fsdp->for_each_full(Fsdp::State::kMaster,
                                    [&](const std::string& name, const Tensor& full) {
                                      if (name == "out.weight") values = full.to_vector();
                                    });
        if (world.rank() == 0) result = {norm, values};
      });
      return result;
    };
    const auto one = run(1, false), sum = run(2, false), mean = run(2, true);
    INFO(name_of(strategy));
    CHECK(run(1, true) == one);
    CHECK(sum.first == 2 * one.first);
    CHECK(sum.second != one.second);
    CHECK(mean == one);  // a power of two: no bit differs
    const auto mean_of_3 = run(3, true);
    CHECK(std::fabs(mean_of_3.first / one.first - 1) < 1e-5);
    for (size_t i = 0; i < one.second.size(); ++i) {
      CHECK(std::fabs(mean_of_3.second[i] - one.second[i]) < 1e-5);
    }
  }
  CHECK(has(error_on_ranks(2,
                           [](World& world) {
                             FsdpOptions options = options_of(Strategy::kFullShard);
                             options.average_gradients = true;
                             const Sharded sharded(world, options);
                             optim::Sgd sgd(sharded.fsdp->shards());
                             sharded.pass();
                             sharded.fsdp->clip_grad_norm(1.0);
                             sgd.step();
                           }),
            "Optimizer::step: the gradients of shard embedding are a multiple of the true ones"));
}

TEST_CASE("fsdp use: the norm says what it leaves out", "[fsdp]") {
  dist::run_ranks(2, [](World& world) {
    FsdpOptions options = options_of(Strategy::kFullShard);
    options.ignored = {"out.bias"};
    const Sharded sharded(world, options);
    sharded.pass();
    const dist::ClippedNorm clip = sharded.fsdp->clip_grad_norm(1.0);
    if (clip.num_left_out != 3) throw Error(fmt::format("left out {}", clip.num_left_out));
    // What it leaves out is this rank's own.
    if (!sharded.net->parameter("out.bias").tensor.grad().is_defined()) throw Error("no gradient");
    if (!has(sharded.fsdp->summary(), "; 1 ignored parameters on every rank, not reduced")) {
      throw Error(sharded.fsdp->summary());
    }
  });
  dist::run_ranks(2, [](World& world) {
    const Sharded sharded(world, options_of(Strategy::kFullShard));
    sharded.pass();
    if (sharded.fsdp->clip_grad_norm(1.0).num_left_out != 0) throw Error("left something out");
  });
}

TEST_CASE("fsdp use: a forward without gradients before the first step leaves all units sharded",
          "[fsdp]") {
  for (const int num_passes : {1, 2}) {
    dist::run_ranks(2, [&](World& world) {
      const Sharded sharded(world, options_of(Strategy::kFullShard));
      for (int i = 0; i < num_passes; ++i) {
        NoGrad no_grad;
        loss_of(*sharded.net);
      }
      for (const auto& unit : parts_of(*sharded.fsdp).units) {
        if (unit->gathered.is_there()) throw Error(unit->name() + " is unsharded");
      }
      // One gather a unit and pass.
      const std::string program = dist::ShardView(*sharded.fsdp).program();
      if (count_lines(program, "gather_forward head") != num_passes) throw Error(program);
    });
  }
}

TEST_CASE("fsdp use: what has ended, is shared or is on another thread is named", "[fsdp]") {
  const FsdpOptions options = options_of(Strategy::kFullShard);
  // Sharded twice, by the same or another wrapping; the first goes on.
  CHECK(has(error_on_ranks(2,
                           [&](World& world) {
                             const Sharded sharded(world, options);
                             FsdpOptions other = options;
                             other.wrap = dist::wrap::whole_model();
                             for (const FsdpOptions& o : {options, other}) {
                               const std::string text =
                                   error_of([&] { dist::fully_shard(*sharded.net, world, o); });
                               if (!has(text, "is sharded already")) throw Error("no: " + text);
                             }
                             sharded.pass();
                             throw Error("it went on");
                           }),
            "it went on"));
  CHECK(has(error_on_ranks(2,
                           [&](World& world) {
                             const Sharded sharded(world, options);
                             dist::fully_shard(*sharded.net, world, options);
                           }),
            "fully_shard: parameter \"in.weight\" of Net is sharded already, expected one Fsdp"));
  // A model may be sharded again when the first Fsdp is gone.
  CHECK(error_on_ranks(2, [&](World& world) {
          Sharded sharded(world, options);
          sharded.fsdp.reset();
          sharded.fsdp = dist::fully_shard(*sharded.net, world, options);
          sharded.fsdp->initialize(1);
          sharded.pass();
        }) == "");
  // An optimizer, a graph, a guard and the modules after the Fsdp.
  CHECK(has(error_on_ranks(2,
                           [&](World& world) {
                             Sharded sharded(world, options);
                             optim::Sgd sgd(sharded.fsdp->shards());
                             sharded.fsdp.reset();
                             sgd.step();
                           }),
            "Optimizer::step: the Fsdp of Net has ended"));
  CHECK(has(error_on_ranks(2,
                           [&](World& world) {
                             Sharded sharded(world, options);
                             const Tensor loss = loss_of(*sharded.net);
                             sharded.fsdp.reset();
                             backward(loss);
                           }),
            "backward: the Fsdp of Net has ended"));
  CHECK(has(error_on_ranks(2,
                           [&](World& world) {
                             Sharded sharded(world, options);
                             sharded.fsdp.reset();
                             loss_of(*sharded.net);
                           }),
            "parameters of unit \"embedding\", whose Fsdp has ended"));
  CHECK(error_on_ranks(2, [&](World& world) {
          Sharded sharded(world, options);
          const UnshardGuard guard(*sharded.fsdp, "head");
          const dist::NoSync no_sync(*sharded.fsdp);
          sharded.fsdp.reset();
        }) == "");
  // Module's own verbs.
  CHECK(has(error_on_ranks(1, [&](World& world) { Sharded(world, options).net->materialize(); }),
            "Module::materialize: parameter 'in.weight' is sharded"));
  CHECK(has(error_on_ranks(1, [&](World& world) { Sharded(world, options).net->initialize(1); }),
            "Module::initialize: parameter 'in.weight' is sharded, expected Fsdp::initialize"));
  // Another thread.
  CHECK(has(error_on_ranks(1,
                           [&](World& world) {
                             const Sharded sharded(world, options);
                             std::string text;
                             std::thread other([&, context = Context::current()] {
                               const Context::Scope scope(context);
                               text = error_of([&] { sharded.fsdp->end_step(); });
                             });
                             other.join();
                             throw Error(text);
                           }),
            "Fsdp::end_step: called from another thread than the one that made the Fsdp of Net"));
}

TEST_CASE("fsdp use: a World that has ended, and a second one, are named", "[fsdp]") {
  std::optional<World> world;
  world.emplace(World::init(0, nullptr));
  CHECK(has(error_of([] { World::init(0, nullptr); }),
            "World::init: this process has a World already, expected one"));
  Sharded sharded(*world, {});
  world.reset();
  CHECK(has(error_of([&] { sharded.fsdp->end_step(); }),
            "Fsdp::end_step: the World of the Fsdp of Net has ended before it"));
  CHECK(has(error_of([&] { sharded.pass(); }), "forward: the World of the Fsdp of Net has ended"));
}

}  // namespace
}  // namespace tessera::testing
