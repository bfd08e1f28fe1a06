#include <map>

#include "core/random.h"
#include "dist/fsdp/shard_view.h"
#include "optim/adafactor.h"
#include "optim/adamw.h"
#include "optim/adamw_8bit.h"
#include "optim/muon.h"
#include "optim/optimizer_set.h"
#include "test/dist/fsdp/combos.h"
#include "test/dist/fsdp/harness.h"
#include "test/testing.h"

// Optimizers whose states or work are not an element's: eight-bit AdamW, Adafactor, Muon.

namespace tessera::testing {
namespace {

using dist::Offload;
using dist::Strategy;
using Shards = std::vector<optim::FlatShard>;
using Make = std::function<std::unique_ptr<optim::Optimizer>(const Shards&)>;
using Values = std::map<std::string, std::vector<double>>;

std::unique_ptr<optim::Optimizer> eight_bit(const Shards& shards) {
  return std::make_unique<optim::AdamW8bit>(shards);
}
std::unique_ptr<optim::Optimizer> adafactor(const Shards& shards) {
  return std::make_unique<optim::Adafactor>(shards, optim::AdafactorOptions{.weight_decay = 0.1});
}
/// Muon for what the rules give it, AdamW for the rest.
std::unique_ptr<optim::Optimizer> muon(const Shards& shards) {
  return std::make_unique<optim::OptimizerSet>(
      shards, std::map<std::string, optim::OptimizerSet::Make>{
                  {"", [](Shards s) { return std::make_unique<optim::AdamW>(std::move(s)); }},
                  {"muon", [](Shards s) { return std::make_unique<optim::Muon>(std::move(s)); }}});
}
dist::ParameterRules muon_rules() {
  dist::ParameterRules rules;
  rules.optimizer = [](const nn::NamedParameter& p) {
    const bool is_hidden =
        p.parameter->tensor.shape().num_dims() == 2 && p.name.starts_with("blocks.");
    return std::string(is_hidden ? "muon" : "");
  };
  rules.row_blocks = [](const nn::NamedParameter& p) {  // 4 heads and 2 x 2 of width 6
    return p.name.find("qkv.weight") == std::string::npos ? std::vector<int64_t>()
                                                          : std::vector<int64_t>{24, 12, 12};
  };
  return rules;
}

struct Kind {
  const char* name;
  Make make;
  dist::ParameterRules rules;
};
std::vector<Kind> kinds() {
  return {
      {"adamw_8bit", eight_bit, {}}, {"adafactor", adafactor, {}}, {"muon", muon, muon_rules()}};
}

/// Gradients that are a formula of parameter and element go into the shards of each rank, without a
/// backward: three steps, and then all parameters.
Values steps_on_equal_gradients(int world_size, const Kind& kind, Strategy strategy,
                                Offload offload, DType dtype = kF32, bool skips = true) {
  Values values;
  dist::run_ranks(world_size, [&](dist::World& world) {
    std::unique_ptr<nn::LanguageModel> model;
    {
      const nn::DeferredInit deferred;
      model = std::make_unique<nn::Llama>(FsdpRun::tiny_llama());
    }
    dist::FsdpOptions options;
    options.strategy = strategy;
    if (is_hybrid(strategy)) options.shard_size = hybrid_shard_size(world_size);
    options.offload = offload;
    options.offload_window = 512;
    options.precision.param_dtype = dtype;
    options.precision.reduce_dtype = kF32;
    options.parameters = kind.rules;
    auto fsdp = dist::fully_shard(*model, world, options);
    fsdp->initialize(5);
    Shards shards = fsdp->shards();
    for (optim::FlatShard& shard : shards) shard.owner = nullptr;  // no backward comes before
    const auto optimizer = kind.make(shards);
    for (int step = 0; step < 3; ++step) {
      for (const optim::FlatShard& shard : shards) {
        for (const optim::Segment& s : shard.segments) {
          const PhiloxKey key = make_key(static_cast<uint64_t>(step), hash_name(s.parameter));
          std::vector<float> grad;
          for (int64_t i = s.offset; i < s.offset + s.end - s.begin; ++i) {
            const uint32_t word = philox(key, 0, static_cast<uint64_t>(i))[0];
            grad.push_back(static_cast<float>(word % 2001) / 1000 - 1);
          }
          Tensor(shard.grad)
              .narrow(0, s.begin, s.end - s.begin)
              .copy_(from_values(std::span<const float>(grad), {std::ssize(grad)}, kF32));
        }
      }
      optimizer->step(1e-2f, full({}, 0.5, kF32));
      if (skips) optimizer->step(1e-2f, {}, from_values({1}, {}, kU8));
    }
    fsdp->shards_changed(optimizer.get());
    fsdp->for_each_full(dist::Fsdp::State::kMaster, [&](const std::string& name, const Tensor& t) {
      if (world.rank() == 0) values[name] = t.to_vector();
    });
  });
  return values;
}

TEST_CASE(
    "optimizers: equal gradients: the same bits on 1, 2, 3, 4 and 8 ranks under each strategy",
    "[fsdp]") {
  for (const Kind& kind : kinds()) {
    const Values expected = steps_on_equal_gradients(1, kind, Strategy::kNoShard, Offload::kNone);
    REQUIRE(!expected.empty());
    CHECK(steps_on_equal_gradients(1, kind, Strategy::kNoShard, Offload::kNone, kF32,
                                   /*skips=*/false) == expected);  // skipped steps change nothing
    for (const int world : {2, 3, 4, 8}) {
      for (const Strategy strategy : kAllStrategies) {
        INFO(kind.name << " " << name_of(strategy) << " on " << world << " ranks");
        CHECK(steps_on_equal_gradients(world, kind, strategy, Offload::kNone) == expected);
      }
    }
  }
}

TEST_CASE("optimizers: windows of shards in host memory and bf16 copies change no bit", "[fsdp]") {
  for (const Kind& kind : kinds()) {
    const Values expected = steps_on_equal_gradients(1, kind, Strategy::kNoShard, Offload::kNone);
    for (const Offload offload : {Offload::kOptimizer, Offload::kParamsAndOptimizer}) {
      for (const DType dtype : {kF32, kBF16}) {
        INFO(kind.name << " " << name_of(offload) << " " << name_of(dtype));
        CHECK(steps_on_equal_gradients(2, kind, Strategy::kFullShard, offload, dtype) == expected);
      }
    }
  }
}

TEST_CASE("optimizers: whole runs: the bits of one rank on 2, 4 and 8 in reproducible mode",
          "[fsdp]") {
  FsdpRun plain;
  plain.fsdp.reproducible = true;
  plain.num_micro_batches = 8;
  const FsdpResult without = run_fsdp_on_threads(1, plain);  // AdamW
  for (const Kind& kind : kinds()) {
    FsdpRun run;
    run.make_optimizer = kind.make;
    run.fsdp.parameters = kind.rules;
    run.fsdp.reproducible = true;
    run.num_micro_batches = 8;
    const FsdpResult expected = run_fsdp_on_threads(1, run);
    CHECK(expected.losses[2] != without.losses[2]);
    for (const int world : {2, 4, 8}) {
      run.num_micro_batches = 8 / world;
      check_same(run_fsdp_on_threads(world, run), expected,
                 fmt::format("{} on {} ranks", kind.name, world));
    }
  }
}

}  // namespace
}  // namespace tessera::testing
