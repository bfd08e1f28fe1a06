// No setting of the schedule changes a bit of the result at one world size.

#include <atomic>

#include "test/dist/fsdp/combos.h"
#include "test/dist/fsdp/net.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

constexpr Precision kPrecisions[] = {Precision::kF32, Precision::kMixed, Precision::kBF16};

TEST_CASE("fsdp matrix: the full product of settings has the same bits on 4 ranks", "[fsdp]") {
  for (const Precision precision : kPrecisions) {
    const FsdpResult expected = run_fsdp_on_threads(4, make_run({{3, 0, 0, 0, 0}}, 4, precision));
    for (const Combo& combo : every_combo()) {
      check_same(run_fsdp_on_threads(4, make_run(combo, 4, precision)), expected,
                 fmt::format("{}, precision {}", combo.to_string(), static_cast<int>(precision)));
    }
  }
}

TEST_CASE("fsdp matrix: every pair of settings has the same bits on 2, 3 and 8 ranks", "[fsdp]") {
  const std::vector<Combo> combos = pair_covering_combos();
  REQUIRE(combos.size() * std::size(kPrecisions) <= 60);
  for (const int world : {2, 3, 8}) {
    for (const Precision precision : kPrecisions) {
      const auto run_of = [&](const Combo& combo) {
        FsdpRun run = make_run(combo, world, precision);
        run.num_steps = 10;
        return run;
      };
      const FsdpRun plain = run_of({{3, 0, 0, 0, 0}});
      const FsdpResult expected = run_fsdp_on_threads(world, plain);
      if (precision == Precision::kF32) {
        check_near(expected, run_fsdp_on_threads(1, plain), 1e-5, "one rank");
      }
      for (const Combo& combo : combos) {
        check_same(run_fsdp_on_threads(world, run_of(combo)), expected,
                   fmt::format("world {}, {}, precision {}", world, combo.to_string(),
                               static_cast<int>(precision)));
      }
    }
  }
}

// ---- odd shapes

/// y = x * scale + shift with 7 and 1 elements: most shards are empty.
struct OddBlock : nn::Module {
  Tensor& scale = register_parameter("scale", {7}, nn::Init::normal(1, 0.3));
  Tensor& shift = register_parameter("shift", {1}, nn::Init::normal(0, 0.3));
  Tensor forward(const Tensor& x) { return add(mul(x, scale), shift); }
};

struct OddNet : nn::Module {
  Tensor& first = register_parameter("first", {1}, nn::Init::normal(1, 0.1));
  nn::ChildList<OddBlock> blocks{this, "blocks"};
  nn::Child<nn::Linear> last{this, "last", 7, 5};
  OddNet() {
    for (int i = 0; i < 3; ++i) blocks.emplace_back();
  }
  Tensor forward(const Tensor& x) {
    Tensor h = mul(x, first);
    for (auto& block : blocks) h = block(h);
    return last(h);
  }
};

Tensor odd_pass(OddNet& net, int step, int part) {
  const auto seed = static_cast<uint64_t>(100 + step * 1000 + part);
  const Tensor x = randn({3, 7}, kF32, seed);
  const Tensor y = nn::call(net, x).to(kF32);
  const Tensor loss = scale(sum(mul(y, y)), 1e-2);
  backward(loss);
  return loss;
}

TEST_CASE("fsdp matrix: parameters of 1 and 7 elements and empty shards on 5 and 32 ranks",
          "[fsdp]") {
  const auto make = [] { return std::make_unique<OddNet>(); };
  for (const int world : {1, 2, 3, 5, 8, 32}) {
    NetRun run;
    run.num_parts = world == 3 || world == 5 ? 2 * world : 32;
    const FsdpResult one = train_net_on_threads<OddNet>(1, run, make, odd_pass);
    FsdpResult expected;
    // Six strategies, every prefetch and both numbers of communicators.
    for (const Combo& combo :
         {Combo{{3, 0, 0, 0, 0}}, Combo{{0, 0, 0, 1, 0}}, Combo{{1, 1, 0, 0, 0}},
          Combo{{2, 2, 0, 1, 0}}, Combo{{4, 1, 0, 1, 0}}, Combo{{5, 2, 0, 0, 0}}}) {
      run.fsdp = make_run(combo, world, Precision::kF32).fsdp;
      // Like for like: accumulation in another order is another sum.
      run.fsdp.sync_every_micro_batch = dist::GradSync::kLast;
      const FsdpResult actual = train_net_on_threads<OddNet>(world, run, make, odd_pass);
      if (expected.losses.empty()) expected = actual;
      check_same(actual, expected, fmt::format("world {}, {}", world, combo.to_string()));
      check_near(actual, one, 1e-5, fmt::format("one rank and {}", world));
      run.fsdp.sync_every_micro_batch = {};
      check_near(train_net_on_threads<OddNet>(world, run, make, odd_pass), one, 1e-5,
                 fmt::format("one rank and {}, default sync", world));
    }
  }
}

TEST_CASE("fsdp matrix: loading, saving and clipping through empty shards", "[fsdp]") {
  for (const int world_size : {1, 2, 5, 32}) {
    for (const dist::Strategy strategy : kAllStrategies) {
      dist::FsdpOptions options;
      options.strategy = strategy;
      if (strategy >= dist::Strategy::kHybridShard) {
        options.shard_size = hybrid_shard_size(world_size);
      }
      std::atomic<int> num_empty = 0;
      INFO(fmt::format("{}, world {}", name_of(strategy), world_size));
      dist::run_ranks(world_size, [&](dist::World& world) {
        OddNet net;
        net.initialize(1);
        const auto fsdp = dist::fully_shard(net, world, options);
        std::map<std::string, Tensor> values;
        for (const nn::NamedParameter& p : net.named_parameters()) {
          const uint64_t seed = 3 + values.size();
          values[p.name] = randn(p.parameter->tensor.shape(), kF32, seed);
        }
        fsdp->load_full([&](const std::string& name) { return values.at(name); });
        std::map<std::string, Tensor> saved;
        fsdp->for_each_full(dist::Fsdp::State::kMaster,
                            [&](const std::string& name, const Tensor& full) {
                              check_bitwise(full, values.at(name), name);
                              saved[name] = full;
                            });
        if (saved.size() != values.size()) throw Error("parameters are missing");
        for (const optim::FlatShard& shard : fsdp->shards()) num_empty += shard.segments.empty();
        odd_pass(net, 0, world.rank());
        const double norm = fsdp->clip_grad_norm(0).norm.item();
        double squares = 0;
        fsdp->for_each_full(dist::Fsdp::State::kGradient,
                            [&](const std::string&, const Tensor& full) {
                              for (const double g : full.to_vector()) squares += g * g;
                            });
        if (!(std::fabs(norm - std::sqrt(squares)) <= 1e-5 * norm)) {
          throw Error(fmt::format("a norm of {}, expected {}", norm, std::sqrt(squares)));
        }
      });
      if (world_size > 2 && strategy == dist::Strategy::kFullShard) CHECK(num_empty > 0);
    }
  }
}

/// Matrices of 8 x 128, 13 x 8 and 17 x 13.
struct ShapeNet : nn::Module {
  nn::Child<nn::Linear> a{this, "a", 128, 8}, b{this, "b", 8, 13}, c{this, "c", 13, 17};
  Tensor forward(const Tensor& x) { return c(gelu(b(gelu(a(x))))); }
};

Tensor shape_pass(ShapeNet& net, int step, int part) {
  const Tensor y = nn::call(net, randn({2, 128}, kF32, static_cast<uint64_t>(step * 100 + part)));
  const Tensor loss = scale(sum(mul(y, y)), 1e-2);
  backward(loss);
  return loss;
}

TEST_CASE("fsdp matrix: small and prime matrices on more ranks than rows", "[fsdp]") {
  const auto make = [] { return std::make_unique<ShapeNet>(); };
  for (const int world : {2, 3, 5, 8, 32}) {
    NetRun run;
    run.num_parts = world;
    const FsdpResult one = train_net_on_threads<ShapeNet>(1, run, make, shape_pass);
    for (const dist::WrapPolicy& wrap :
         {dist::wrap::by_class<nn::Linear>(), dist::wrap::whole_model()}) {
      FsdpResult expected;
      for (const dist::Strategy strategy : kAllStrategies) {
        run.fsdp = {};
        run.fsdp.wrap = wrap;
        run.fsdp.strategy = strategy;
        if (strategy >= dist::Strategy::kHybridShard)
          run.fsdp.shard_size = hybrid_shard_size(world);
        const FsdpResult actual = train_net_on_threads<ShapeNet>(world, run, make, shape_pass);
        if (expected.losses.empty()) expected = actual;
        check_same(actual, expected, fmt::format("world {}, {}", world, name_of(strategy)));
        check_near(actual, one, 1e-5, fmt::format("one rank and {}", world));
      }
    }
  }
}

struct LargeNet : nn::Module {
  nn::Child<nn::Linear> a{this, "a", 4096, 1024, nn::LinearOptions{.bias = false}};
  Tensor forward(const Tensor& x) { return a(x); }
};

TEST_CASE("fsdp matrix: 1024 x 4096 over 3 ranks", "[fsdp]") {
  const auto make = [] { return std::make_unique<LargeNet>(); };
  const PartFn<LargeNet> pass = [](LargeNet& net, int step, int part) {
    const Tensor y = nn::call(net, randn({1, 4096}, kF32, static_cast<uint64_t>(step * 10 + part)));
    const Tensor loss = scale(sum(mul(y, y)), 1e-2);
    backward(loss);
    return loss;
  };
  NetRun run;
  run.num_parts = 3;
  run.num_steps = 2;
  run.local.context.poison = false;
  const FsdpResult one = train_net_on_threads<LargeNet>(1, run, make, pass);
  check_near(train_net_on_threads<LargeNet>(3, run, make, pass), one, 1e-5, "one rank and 3");
}

}  // namespace
}  // namespace tessera::testing
