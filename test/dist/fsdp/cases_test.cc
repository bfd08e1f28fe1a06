// Uses of a sharded model that other implementations were reported to get wrong. One rank that does
// the work of all is the reference.

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "dist/fsdp/guards.h"
#include "dist/fsdp/parts.h"
#include "nn/embedding.h"
#include "test/dist/fsdp/combos.h"
#include "test/dist/fsdp/net.h"
#include "test/dist/fsdp/observer.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using dist::GradSync;
using dist::Strategy;

constexpr int kWidth = 6;

struct Block : nn::Module {
  nn::Child<nn::Linear> linear{this, "linear", kWidth, kWidth};
  Tensor forward(const Tensor& x) { return gelu(linear(x)); }
};

struct Net : nn::Module {
  nn::Child<nn::Linear> in{this, "in", 5, kWidth};
  nn::ChildList<Block> blocks{this, "blocks"};
  nn::Child<nn::Linear> out{this, "out", kWidth, 3};
  explicit Net(int num_blocks = 4) {
    for (int i = 0; i < num_blocks; ++i) blocks.emplace_back();
  }
  Tensor forward(const Tensor& x) {
    Tensor h = in(x);
    for (auto& block : blocks) h = block(h);
    return out(h);
  }
};

std::unique_ptr<Net> make_net() {
  return std::make_unique<Net>();
}

Tensor input_of(int step, int part) {
  return randn({4, 5}, kF32, static_cast<uint64_t>(1 + step * 1000 + part));
}
Tensor loss_of(const Tensor& y) {
  return scale(sum(mul(y, y)), 0.05);
}

/// The run under every strategy on 2 and 4 ranks, and with one communicator and no prefetch, agrees
/// with one rank; afterwards no unit that reshards is unsharded. `check` sees each result.
void check_everywhere(const PartFn<Net>& pass, NetRun run = {},
                      const std::function<std::unique_ptr<Net>()>& make = make_net,
                      const std::function<void(const FsdpResult&)>& check = nullptr) {
  const dist::WrapPolicy wrap = run.fsdp.wrap;
  run.fsdp.strategy = Strategy::kNoShard;
  const FsdpResult one = train_net_on_threads<Net>(1, run, make, pass);
  if (check) check(one);
  run.on_step = [](int, dist::Fsdp& fsdp, dist::World&) {
    const dist::FsdpParts& parts = parts_of(fsdp);
    for (int u = 0; u < static_cast<int>(parts.units.size()); ++u) {
      const bool is_left = parts.policy.residence == dist::Residence::kReshard &&
                           parts.order.ledger().is_gathered(u);
      if (is_left || parts.order.num_calls(u).open != 0 || parts.order.num_calls(u).active != 0) {
        throw Error(parts.units[static_cast<size_t>(u)]->name() +
                    " is unsharded or in use after the step");
      }
    }
  };
  for (const int world : {2, 4}) {
    for (const Strategy strategy : kAllStrategies) {
      for (const bool is_plain : {false, true}) {
        run.fsdp = {};
        run.fsdp.wrap = wrap;
        run.fsdp.strategy = strategy;
        if (strategy >= Strategy::kHybridShard) run.fsdp.shard_size = hybrid_shard_size(world);
        if (is_plain) {
          run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = 0;
          run.fsdp.communicators = 1;
        }
        INFO(fmt::format("{}, world {}, plain {}", name_of(strategy), world, is_plain));
        const FsdpResult actual = train_net_on_threads<Net>(world, run, make, pass);
        check_near(actual, one, 1e-5, "one rank");
        if (check) check(actual);
      }
    }
  }
}

// ---- gradients and their scale

TEST_CASE("fsdp case: micro-batches add up under every strategy and sync", "[fsdp]") {
  FsdpRun run;
  run.fsdp.strategy = Strategy::kNoShard;
  const FsdpResult expected = run_fsdp_on_threads(1, run);
  for (const Strategy strategy : kAllStrategies) {
    for (const GradSync sync : {GradSync::kEveryMicroBatch, GradSync::kShard, GradSync::kLast}) {
      const bool is_hybrid = strategy >= Strategy::kHybridShard;
      if (sync == GradSync::kShard && !is_hybrid) continue;
      if (sync != GradSync::kLast && strategy == Strategy::kShardOptim) continue;
      for (const int num_micro_batches : {1, 2, 4}) {
        for (const auto offload : {dist::Offload::kNone, dist::Offload::kParamsAndOptimizer}) {
          run.fsdp = {};
          run.fsdp.strategy = strategy;
          run.fsdp.sync_every_micro_batch = sync;
          run.fsdp.offload = offload;
          run.num_micro_batches = num_micro_batches;
          const int world = is_hybrid && num_micro_batches < 4 ? 4 : 2;
          if (is_hybrid) run.fsdp.shard_size = world / 2;
          check_near(run_fsdp_on_threads(world, run), expected, 1e-5,
                     fmt::format("{}, sync {}, {} micro-batches, offload {}", name_of(strategy),
                                 dist::name_of(sync), num_micro_batches, dist::name_of(offload)));
        }
      }
    }
  }
}

TEST_CASE("fsdp case: ranks and micro-batches with unequal or no valid tokens", "[fsdp]") {
  FsdpRun run;
  run.ragged = true;  // sample 1 has no valid target: a rank of 8 with nothing
  run.fsdp.strategy = Strategy::kNoShard;
  const FsdpResult expected = run_fsdp_on_threads(1, run);
  for (const double loss : expected.losses) REQUIRE(std::isfinite(loss));
  for (const Strategy strategy : kAllStrategies) {
    run.fsdp = {};
    run.fsdp.strategy = strategy;
    if (strategy >= Strategy::kHybridShard) run.fsdp.shard_size = 4;
    check_near(run_fsdp_on_threads(8, run), expected, 1e-5, std::string(name_of(strategy)));
  }
}

TEST_CASE("fsdp case: a unit skipped on some ranks, in turns and together", "[fsdp]") {
  check_everywhere([](Net& net, int step, int part) {
    Tensor h = net.in(input_of(step, part));
    for (int i = 0; i < 4; ++i) {
      // Each part leaves out other blocks; block 3 is called by the last part alone.
      const bool is_called = i == 3 ? part == 3 : (part + i + step) % 3 != 0;
      if (is_called) h = net.blocks[i](h);
    }
    const Tensor loss = loss_of(net.out(h));
    backward(loss);
    return loss;
  });
}

TEST_CASE("fsdp case: a unit that no rank calls stays as it is", "[fsdp]") {
  NetRun run;
  run.weight_decay = 0;
  std::vector<double> before;
  {
    const auto net = make_net();
    net->materialize();
    net->initialize(5);
    before = net->parameter("blocks.2.linear.weight").tensor.to_vector();
  }
  check_everywhere(
      [](Net& net, int step, int part) {
        Tensor h = net.in(input_of(step, part));
        for (const int i : {0, 1, 3}) h = net.blocks[i](h);
        const Tensor loss = loss_of(net.out(h));
        backward(loss);
        return loss;
      },
      run, make_net,
      [&](const FsdpResult& result) {
        CHECK(result.parameters.at("blocks.2.linear.weight") == before);
        const auto& gradient = result.gradients.at("blocks.2.linear.weight");
        CHECK(std::all_of(gradient.begin(), gradient.end(), [](double g) { return g == 0; }));
      });
}

TEST_CASE("fsdp case: units called from the second step on", "[fsdp]") {
  check_everywhere([](Net& net, int step, int part) {
    Tensor h = net.in(input_of(step, part));
    for (int i = 0; i < 4; ++i) {
      if (i != 1 || step > 0) h = net.blocks[i](h);
    }
    const Tensor loss = loss_of(net.out(h));
    backward(loss);
    return loss;
  });
}

TEST_CASE("fsdp case: units called in another order than they are registered", "[fsdp]") {
  check_everywhere([](Net& net, int step, int part) {
    Tensor h = net.in(input_of(step, part));
    for (int i = 3; i >= 0; --i) h = net.blocks[i](h);
    const Tensor loss = loss_of(net.out(h));
    backward(loss);
    return loss;
  });
}

TEST_CASE("fsdp case: after step 0 every unit is gathered in the order of its calls", "[fsdp]") {
  NetRun run;
  const FsdpResult result =
      train_net_on_threads<Net>(2, run, make_net, [](Net& net, int step, int part) {
        Tensor h = net.in(input_of(step, part));
        for (int i = 3; i >= 0; --i) h = net.blocks[i](h);
        const Tensor loss = loss_of(net.out(h));
        backward(loss);
        return loss;
      });
  for (int i = 0; i < 4; ++i) {  // two micro-batches
    CHECK(count_lines(result.program, fmt::format("gather_forward blocks.{}", i)) == 2);
    // The block that is called last stays for backward.
    CHECK(count_lines(result.program, fmt::format("gather_backward blocks.{}", i)) ==
          (i == 0 ? 0 : 2));
    CHECK(count_lines(result.program, fmt::format("reduce blocks.{}", i)) == 2);
  }
}

TEST_CASE("fsdp case: a unit called two and three times", "[fsdp]") {
  check_everywhere([](Net& net, int step, int part) {
    Tensor h = net.in(input_of(step, part));
    h = net.blocks[0](h);
    h = net.blocks[0](h);  // in a row
    h = net.blocks[1](h);
    h = net.blocks[2](h);
    h = net.blocks[1](h);  // with others between
    h = net.blocks[3](h);
    h = net.blocks[1](h);
    const Tensor loss = loss_of(net.out(h));
    backward(loss);
    return loss;
  });
}

TEST_CASE("fsdp case: a unit called once on one rank and twice on another", "[fsdp]") {
  check_everywhere([](Net& net, int step, int part) {
    Tensor h = net.in(input_of(step, part));
    for (int i = 0; i < 4; ++i) {
      h = net.blocks[i](h);
      if ((part + i) % 2 == 0) h = net.blocks[i](h);
    }
    const Tensor loss = loss_of(net.out(h));
    backward(loss);
    return loss;
  });
}

TEST_CASE("fsdp case: two forwards, one backward", "[fsdp]") {
  check_everywhere([](Net& net, int step, int part) {
    const Tensor a = nn::call(net, input_of(step, part));
    const Tensor b = nn::call(net, input_of(step, part + 100));
    const Tensor loss = add(loss_of(a), loss_of(mul(a, b)));
    backward(loss);
    return loss;
  });
}

TEST_CASE("fsdp case: two forwards, then their two backwards", "[fsdp]") {
  for (const bool is_first_first : {true, false}) {
    check_everywhere([is_first_first](Net& net, int step, int part) {
      const Tensor a = loss_of(nn::call(net, input_of(step, part)));
      const Tensor b = loss_of(nn::call(net, input_of(step, part + 100)));
      backward(is_first_first ? a : b);
      backward(is_first_first ? b : a);
      return add(a.detach(), b.detach());
    });
  }
}

TEST_CASE("fsdp case: two losses over one trunk, two backwards", "[fsdp]") {
  check_everywhere([](Net& net, int step, int part) {
    Tensor h = net.in(input_of(step, part));
    for (auto& block : net.blocks) h = block(h);
    const Tensor a = loss_of(net.out(h)), b = loss_of(h);
    backward(a, {}, {.retain_graph = true});
    backward(b);
    return add(a.detach(), b.detach());
  });
}

TEST_CASE("fsdp case: two forward and backward passes in a micro-batch", "[fsdp]") {
  check_everywhere([](Net& net, int step, int part) {
    Tensor total = zeros({}, kF32);
    for (const int more : {0, 100}) {
      const Tensor loss = loss_of(nn::call(net, input_of(step, part + more)));
      backward(loss);
      total.add_(loss.detach());
    }
    return total;
  });
}

TEST_CASE("fsdp case: a forward without a backward, with and without grad mode", "[fsdp]") {
  check_everywhere([](Net& net, int step, int part) {
    { const Tensor unused = nn::call(net, input_of(step, part + 50)); }
    {
      NoGrad no_grad;
      nn::call(net, input_of(step, part + 60));
    }
    const Tensor loss = loss_of(nn::call(net, input_of(step, part)));
    backward(loss);
    return loss;
  });
}

TEST_CASE("fsdp case: an exception in a forward leaves every unit sharded", "[fsdp]") {
  check_everywhere([](Net& net, int step, int part) {
    CHECK_THROWS_AS(nn::call(net, randn({4, kWidth + 1})), Error);
    const Tensor loss = loss_of(nn::call(net, input_of(step, part)));
    backward(loss);
    return loss;
  });
}

// ---- regions of recompute

/// Blocks 0 and 1 in one region, 2 and 3 in another.
Tensor pass_in_regions(Net& net, int step, int part) {
  Tensor h = net.in(input_of(step, part));
  for (const int first : {0, 2}) {
    h = recompute(
        [&net, first](const std::vector<Tensor>& x) {
          return net.blocks[first + 1](net.blocks[first](x[0]));
        },
        {h});
  }
  const Tensor loss = loss_of(net.out(h));
  backward(loss);
  return loss;
}

Tensor plain_pass(Net& net, int step, int part) {
  const Tensor loss = loss_of(nn::call(net, input_of(step, part)));
  backward(loss);
  return loss;
}

TEST_CASE("fsdp case: a region of recompute covers several units", "[fsdp]") {
  check_everywhere(pass_in_regions);
  for (const Strategy strategy : kAllStrategies) {
    NetRun run;
    run.fsdp.strategy = strategy;
    if (strategy >= Strategy::kHybridShard) run.fsdp.shard_size = 2;
    const FsdpResult expected = train_net_on_threads<Net>(4, run, make_net, plain_pass);
    const FsdpResult actual = train_net_on_threads<Net>(4, run, make_net, pass_in_regions);
    check_same(actual, expected, std::string(name_of(strategy)));
    if (strategy != Strategy::kFullShard) continue;
    for (int i = 0; i < 4; ++i) {
      CHECK(count_lines(actual.program, fmt::format("gather_forward blocks.{}", i)) == 1);
      CHECK(count_lines(actual.program, fmt::format("gather_backward blocks.{}", i)) == (i < 3));
      CHECK(count_lines(actual.program, fmt::format("reduce blocks.{}", i)) == 1);
    }
  }
}

TEST_CASE("fsdp case: units inside a recomputed unit", "[fsdp]") {
  // Every linear layer is a unit, also those inside the blocks.
  NetRun run;
  run.fsdp.wrap = dist::wrap::by_class<nn::Linear>();
  check_everywhere(pass_in_regions, run);
  // And each norm or matrix of a Llama whose blocks run again.
  FsdpRun llama;
  llama.fsdp.wrap = dist::wrap::min_num_params(500);
  const FsdpResult expected = run_fsdp_on_threads(2, llama);
  llama.recompute.kind = nn::RecomputePolicy::Kind::kFull;
  check_same(run_fsdp_on_threads(2, llama), expected, "min_num_params with recompute");
  llama.recompute.offload = true;
  check_same(run_fsdp_on_threads(2, llama), expected, "and checkpoints in host memory");
}

TEST_CASE("fsdp case: units inside an MLP that computes in tiles", "[fsdp]") {
  FsdpRun llama;
  llama.recompute.mlp_tile = 9;
  const FsdpResult expected = run_fsdp_on_threads(2, llama);
  for (const auto& wrap : {dist::wrap::min_num_params(500), dist::wrap::by_class<nn::SwiGlu>(),
                           dist::wrap::by_class<nn::Linear>()}) {
    for (const auto kind : {nn::RecomputePolicy::Kind::kNone, nn::RecomputePolicy::Kind::kFull}) {
      for (const Strategy strategy : {Strategy::kFullShard, Strategy::kShardGradOp}) {
        FsdpRun run = llama;
        run.fsdp.wrap = wrap;
        run.fsdp.strategy = strategy;
        run.recompute.kind = kind;
        check_same(run_fsdp_on_threads(2, run), expected,
                   fmt::format("{}, policy {}", name_of(strategy), name_of(kind)));
      }
    }
  }
}

TEST_CASE("fsdp case: recompute gathers a block twice, or once where it stays", "[fsdp]") {
  for (const Strategy strategy : kAllStrategies) {
    FsdpResult plain;
    for (const bool recompute : {false, true}) {
      for (const int prefetch : {0, 1, 2}) {
        FsdpRun run;
        run.fsdp.strategy = strategy;
        if (strategy >= Strategy::kHybridShard) run.fsdp.shard_size = 2;
        run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
        if (recompute) run.recompute.kind = nn::RecomputePolicy::Kind::kFull;
        const FsdpResult result = run_fsdp_on_threads(4, run);
        if (plain.losses.empty()) plain = result;
        check_same(result, plain, "recompute and prefetch");
        const bool reshards =
            strategy == Strategy::kFullShard || strategy == Strategy::kHybridShard;
        const bool gathers = strategy != Strategy::kNoShard;
        INFO(fmt::format("{}, recompute {}, prefetch {}\n{}", name_of(strategy), recompute,
                         prefetch, result.program));
        // The last block and the head are there when backward begins.
        for (const char* unit : {"embedding", "blocks.0", "blocks.1", "blocks.2", "head"}) {
          const bool stays = unit == std::string_view("blocks.2") || unit[0] == 'h';
          CHECK(count_lines(result.program, fmt::format("gather_forward {}", unit)) == gathers);
          CHECK(count_lines(result.program, fmt::format("gather_backward {}", unit)) ==
                (reshards && !stays));
          CHECK(count_lines(result.program, fmt::format("reduce {}", unit)) == 1);
        }
      }
    }
  }
}

// ---- units of other policies

/// Where `line` is in a program; -1: nowhere.
int line_of(const std::string& program, const std::string& line) {
  std::istringstream in(program);
  int index = 0;
  for (std::string text; std::getline(in, text); ++index) {
    if (text == line) return index;
  }
  return -1;
}

TEST_CASE("fsdp case: units of any policy are gathered ahead of their use", "[fsdp]") {
  FsdpRun run;
  const FsdpResult expected = run_fsdp_on_threads(2, run);
  for (const dist::WrapPolicy& wrap :
       {dist::wrap::min_num_params(500), dist::wrap::min_num_params(4000),
        dist::wrap::by_class<nn::Linear>()}) {  // norms are left over: used between the others
    for (const int prefetch : {0, 1}) {
      run.fsdp.wrap = wrap;
      run.fsdp.prefetch_forward = run.fsdp.prefetch_backward = prefetch;
      const FsdpResult actual = run_fsdp_on_threads(2, run);
      check_near(actual, expected, 1e-5, "blocks as units");
      std::vector<std::string> units;  // in the order of their use
      std::istringstream in(actual.program);
      for (std::string what, name; in >> what >> name;) {
        if (what == "gather_forward") units.push_back(name);
      }
      INFO(fmt::format("prefetch {}\n{}\n{}", prefetch, actual.summary, actual.program));
      int num_seen = 0;
      for (size_t i = 1; i < units.size(); ++i) {
        const int gather = line_of(actual.program, "gather_backward " + units[i - 1]);
        const int reduce = line_of(actual.program, "reduce " + units[i]);
        // Not of a unit that stayed; embedding and head may be used between others.
        const bool are_layers = units[i - 1][0] == 'b' && units[i][0] == 'b';
        if (gather < 0 || !are_layers) continue;
        CHECK((gather < reduce) == (prefetch == 1));
        ++num_seen;
      }
      CHECK(num_seen >= 2);
    }
  }
}

/// A tree of modules, each with a parameter.
struct Twig : nn::Module {
  nn::ChildList<Twig> children{this, "children"};
  explicit Twig(std::mt19937& random, int depth) {
    register_parameter("w", {1}, nn::Init::ones());
    for (int i = 0; depth > 0 && i < 2 + static_cast<int>(random() % 10); ++i) {
      children.emplace_back(random, depth - 1);
    }
  }
};

TEST_CASE("fsdp case: a parameter is in the unit of the nearest chosen module above it", "[fsdp]") {
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    Twig root(random, 3);
    std::set<std::string> chosen;
    for (const nn::NamedModule& m : root.named_modules()) {
      if (!m.name.empty() && random() % 4 == 0) chosen.insert(m.name);
    }
    const bool nested = round % 2 == 0;
    const auto predicate = [&](const std::string& name, const nn::Module&) {
      return chosen.contains(name);
    };
    std::map<std::string, std::string> unit_of;
    for (const dist::UnitSpec& unit : dist::wrap::by_predicate(predicate, nested)(root)) {
      for (const nn::NamedParameter& p : unit.parameters) unit_of[p.name] = unit.name;
    }
    for (const nn::NamedParameter& p : root.named_parameters()) {
      std::string expected;  // the longest chosen name above it, or without nesting the shortest
      for (size_t dot = p.name.find('.'); dot != std::string::npos;
           dot = p.name.find('.', dot + 1)) {
        const std::string above = p.name.substr(0, dot);
        if (chosen.contains(above) && (nested || expected.empty())) expected = above;
      }
      CAPTURE(p.name);
      const std::string& unit = unit_of.at(p.name);
      CHECK((expected.empty() ? unit == "embedding" || unit == "head" || unit == "root"
                              : unit == expected));
    }
  }
}

TEST_CASE("fsdp case: a unit much larger than the others does not make their slots as large",
          "[fsdp]") {
  FsdpRun run;
  run.model.vocab_size = 1000;  // an embedding of 24,000 beside matrices of 576 to 1920
  run.fsdp.wrap = dist::wrap::min_num_params(500);
  run.on_ready = [](dist::Fsdp& fsdp, dist::World& world) {
    if (world.rank() != 0) return;
    int num_blocks = 0;
    int64_t slot = 0;
    for (const auto& unit : parts_of(fsdp).units) {
      const bool is_layer = unit->name().rfind("blocks.", 0) == 0;
      CHECK(unit->spec().is_block == is_layer);
      if (!is_layer) continue;
      ++num_blocks;
      slot = std::max(slot, unit->plan().gathered_nbytes);
      CHECK(unit->gathered.pool()->num_slots() == 2);
    }
    CHECK(num_blocks == 12);
    CHECK(slot == 2048 * 4);
  };
  run_fsdp_on_threads(2, run);
}

// ---- frozen and tied parameters

TEST_CASE("fsdp case: frozen matrices, units and inputs", "[fsdp]") {
  struct Freeze {
    const char* what;
    std::function<bool(const std::string& name)> is_frozen;
  };
  const auto is_block = [](const std::string& name, int i) {
    return name.rfind(fmt::format("blocks.{}.", i), 0) == 0;
  };
  const Freeze cases[] = {
      {"every weight but biases", [](const std::string& n) { return n.back() == 't'; }},
      {"every second unit", [&](const std::string& n) { return is_block(n, 1) || is_block(n, 3); }},
      {"the first units", [&](const std::string& n) { return n[0] == 'i' || is_block(n, 0); }},
      {"the last unit", [](const std::string& n) { return n[0] == 'o'; }},
      {"all but one bias", [](const std::string& n) { return n != "blocks.2.linear.bias"; }},
  };
  for (const Freeze& freeze : cases) {
    INFO(freeze.what);
    const auto make = [&freeze] {
      auto net = make_net();
      for (const nn::NamedParameter& p : net->named_parameters()) {
        if (freeze.is_frozen(p.name)) p.parameter->tensor.set_requires_grad(false);
      }
      return net;
    };
    std::map<std::string, std::vector<double>> initial;
    {
      const auto net = make_net();
      net->materialize();
      net->initialize(5);
      for (const nn::NamedParameter& p : net->named_parameters()) {
        initial[p.name] = p.parameter->tensor.to_vector();
      }
    }
    check_everywhere(plain_pass, {}, make, [&](const FsdpResult& result) {
      for (const auto& [name, values] : initial) {
        INFO(name);
        CHECK((result.parameters.at(name) == values) == freeze.is_frozen(name));
        CHECK(result.gradients.count(name) == (freeze.is_frozen(name) ? 0 : 1));
      }
      for (int i = 0; i < 4; ++i) {
        const std::string unit = fmt::format("blocks.{}", i);
        const bool is_trained =
            !freeze.is_frozen(unit + ".linear.weight") || !freeze.is_frozen(unit + ".linear.bias");
        if (!is_trained) CHECK(count_lines(result.program, "reduce " + unit) == 0);
      }
    });
  }
}

TEST_CASE("fsdp case: no reduce bytes for frozen parameters", "[fsdp]") {
  std::array<int64_t, 2> nbytes{};
  for (const bool is_frozen : {false, true}) {
    FsdpRun run;
    run.prepare = [is_frozen](nn::LanguageModel& model) {
      for (const nn::NamedParameter& p : model.named_parameters()) {
        if (is_frozen && p.name.find("mlp") != std::string::npos) {
          p.parameter->tensor.set_requires_grad(false);
        }
      }
    };
    std::shared_ptr<StreamTap> tap;
    run.on_ready = [&](dist::Fsdp& fsdp, dist::World& world) {
      if (world.rank() == 0) tap = StreamTap::install(fsdp, {.records = true});
    };
    run.on_step = [&](int step, dist::Fsdp&, dist::World& world) {
      if (world.rank() != 0) return;
      for (const TaskRecord& task : tap->take()) {
        if (step == 1 && task.name == "reduce_scatter") nbytes[is_frozen] += task.bytes_read;
      }
    };
    run_fsdp_on_threads(2, run);
  }
  // Three blocks with gate_up [2 x 40, 24] and down [24, 40], f32, padded to 512 elements.
  int64_t whole = 0, rest = 0;
  for (const int64_t numel : {24, (4 + 2 * 2) * 6 * 24, 24 * 24, 24}) {
    rest += (numel + 255) / 256 * 256;
  }
  for (const int64_t numel : {2 * 40 * 24, 24 * 40}) whole += (numel + 255) / 256 * 256;
  const auto padded = [](int64_t numel) { return (numel + 511) / 512 * 512; };
  CHECK(nbytes[0] - nbytes[1] == 3 * 4 * (padded(whole + rest) - padded(rest)));
}

struct TiedNet : nn::Module {
  nn::Child<nn::Embedding> embed{this, "embed", 11, kWidth};
  nn::ChildList<Block> blocks{this, "blocks"};
  struct Head : nn::Module {
    Tensor& weight;
    explicit Head(nn::Embedding& embedding) : weight(tie("weight", embedding, "weight")) {}
    Tensor forward(const Tensor& x) { return linear(x, weight); }
  };
  nn::Child<Head> head;
  TiedNet() {
    for (int i = 0; i < 3; ++i) blocks.emplace_back();
    head.emplace(this, "head", *embed);
  }
  Tensor forward(const Tensor& ids) {
    Tensor h = embed(ids);
    for (auto& block : blocks) h = block(h);
    return head(h);
  }
};

Tensor tied_pass(TiedNet& net, int step, int part) {
  const Tensor ids = randint(0, 11, {5}, kI32, static_cast<uint64_t>(1 + step * 100 + part));
  const Tensor loss = loss_of(nn::call(net, ids));
  backward(loss);
  return loss;
}

TEST_CASE("fsdp case: a tied parameter in one unit and across units", "[fsdp]") {
  const auto make = [] { return std::make_unique<TiedNet>(); };
  NetRun run;
  const FsdpResult one = train_net_on_threads<TiedNet>(1, run, make, tied_pass);
  CHECK(one.parameters.count("embed.weight") == 1);
  CHECK(one.parameters.count("head.weight") == 0);
  const std::pair<const char*, dist::WrapPolicy> wraps[] = {
      {"embedding", dist::wrap::transformer_block()},
      {"root", dist::wrap::whole_model()},
      {"embedding", dist::wrap::every_n_blocks(2)}};
  for (const auto& [unit, wrap] : wraps) {
    for (const Strategy strategy : kAllStrategies) {
      for (const int world : {2, 4}) {
        run.fsdp = {};
        run.fsdp.wrap = wrap;
        run.fsdp.strategy = strategy;
        if (strategy >= Strategy::kHybridShard) run.fsdp.shard_size = hybrid_shard_size(world);
        run.num_parts = 4;
        const FsdpResult actual = train_net_on_threads<TiedNet>(world, run, make, tied_pass);
        INFO(fmt::format("{} in {}, world {}\n{}", name_of(strategy), unit, world, actual.program));
        check_near(actual, one, 1e-5, "one rank");
        const int num_reduces = run.num_parts / world;
        if (strategy != Strategy::kShardOptim) {
          CHECK(count_lines(actual.program, fmt::format("reduce {}", unit)) == num_reduces);
        }
      }
    }
  }
}

TEST_CASE("fsdp case: a tie survives deferred initialization, loading and export", "[fsdp]") {
  for (const dist::WrapPolicy& wrap :
       {dist::wrap::transformer_block(), dist::wrap::whole_model()}) {
    for (const Strategy strategy : kAllStrategies) {
      INFO(name_of(strategy));
      dist::run_ranks(4, [&](dist::World& world) {
        std::unique_ptr<TiedNet> net;
        {
          nn::DeferredInit deferred;
          net = std::make_unique<TiedNet>();
        }
        dist::FsdpOptions options;
        options.wrap = wrap;
        options.strategy = strategy;
        if (strategy >= Strategy::kHybridShard) options.shard_size = 2;
        const auto fsdp = dist::fully_shard(*net, world, options);
        const auto exported = [&] {
          std::map<std::string, Tensor> values;
          fsdp->for_each_full(dist::Fsdp::State::kMaster,
                              [&](const std::string& name, const Tensor& full) {
                                if (values.count(name) != 0) throw Error("twice: " + name);
                                values[name] = full.contiguous();
                              });
          if (values.count("embed.weight") != 1 || values.count("head.weight") != 0) {
            throw Error("the export has the tie under one name");
          }
          return values;
        };
        const auto check_is_one = [&](const Tensor& expected, const char* when) {
          // Both uses see the same memory, whatever it holds now.
          const dist::UnshardGuard embedding(*fsdp, *net->embed), head(*fsdp, *net->head);
          const Tensor a = net->parameter("embed.weight").tensor, b = net->head->weight;
          if (a.raw_data() != b.raw_data() || a.storage() != b.storage()) throw Error(when);
          check_bitwise(b, expected, when);
        };
        fsdp->initialize(5);
        check_is_one(exported().at("embed.weight"), "after deferred initialization");
        std::map<std::string, Tensor> values;
        uint64_t seed = 9;
        for (const nn::NamedParameter& p : net->named_parameters()) {
          values[p.name] = randn(p.parameter->tensor.shape(), kF32, seed++);
        }
        fsdp->load_full([&](const std::string& name) { return values.at(name); });
        for (const auto& [name, full] : exported()) check_bitwise(full, values.at(name), name);
        check_is_one(values.at("embed.weight"), "after loading");
      });
    }
  }
}

}  // namespace
}  // namespace tessera::testing
