#include "dist/fsdp/groups.h"

#include "dist/fsdp/shard_view.h"
#include "optim/adamw.h"
#include "optim/lion.h"
#include "optim/optimizer_set.h"
#include "optim/sgd.h"
#include "test/dist/fsdp/harness.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using dist::ParameterGroup;
using dist::ParameterRules;

nn::Llama tiny() {
  return nn::Llama(FsdpRun::tiny_llama());
}

std::string table_error(std::vector<ParameterGroup> groups) {
  return error_of([&] {
    nn::Llama model = tiny();
    dist::parameter_table(model,
                          {.groups = groups, .optimizer = {}, .row_blocks = {}, .quantize = {}});
  });
}

TEST_CASE("groups: patterns without a parameter, parameters of two groups are named", "[fsdp]") {
  CHECK(
      table_error({{.match = "*.norm1.*, blok*"}})
          .starts_with("FsdpOptions::parameters: no parameter is called \"blok*\", expected a name "
                       "such as embed.weight or "));
  CHECK(table_error({{.match = "*.norm1.*"}, {.match = "blocks.0.*"}})
            .starts_with("FsdpOptions::parameters: blocks.0.norm1.weight is in two groups, "
                         "\"*.norm1.*\" and \"blocks.0.*\", expected one"));
  nn::Llama model = tiny();
  const std::vector<ParameterGroup> twice = {{.match = "blocks.0.*, *.0.norm1.*", .lr_scale = 2}};
  dist::parameter_table(
      model, {.groups = twice, .optimizer = {}, .row_blocks = {}, .quantize = {}});  // is once
  CHECK(table_error({{.match = "*", .frozen = true}})
            .starts_with("FsdpOptions::parameters: the groups leave no parameter to train"));
  CHECK(table_error({{.match = "*", .lr_scale = -1}})
            .starts_with("FsdpOptions::parameters: lr_scale of \"*\" must be at least 0, got -1"));
  CHECK(table_error({{.match = "*", .weight_decay = -1}})
            .starts_with("FsdpOptions::parameters: weight_decay of \"*\" must be at least 0"));
}

TEST_CASE("groups: the table counts tensors and elements of each", "[fsdp]") {
  nn::Llama model = tiny();
  const ParameterRules rules{.groups = {{.match = "*norm*", .lr_scale = 0.5, .weight_decay = 0.25},
                                        {.match = "embed.*", .frozen = true}},
                             .optimizer =
                                 [](const nn::NamedParameter& p) {
                                   return std::string(p.name.starts_with("head") ? "sgd" : "");
                                 },
                             .row_blocks = {},
                             .quantize = {}};
  dist::parameter_table(model, rules);
  // 3 blocks of qkv (24 + 24 = 48 rows), out, gate_up and down: 1152 + 576 + 1920 + 960 elements.
  CHECK(dist::describe_groups(model, rules, "adamw") ==
        "parameters  optimizer  lr x  weight decay  tensors     elements\n"
        "*norm*      adamw      0.5   0.25                7          168\n"
        "embed.*     frozen     -     -                   1         1608\n"
        "others      adamw      1     of matrices        12        13824\n"
        "others      sgd        1     of matrices         1         1608");
}

/// AdamW, Lion for norms, SGD for the embedding.
std::unique_ptr<optim::Optimizer> three(const std::vector<optim::FlatShard>& shards) {
  using Shards = std::vector<optim::FlatShard>;
  return std::make_unique<optim::OptimizerSet>(
      shards, std::map<std::string, optim::OptimizerSet::Make>{
                  {"", [](Shards s) { return std::make_unique<optim::AdamW>(std::move(s)); }},
                  {"lion", [](Shards s) { return std::make_unique<optim::Lion>(std::move(s)); }},
                  {"sgd", [](Shards s) {
                     return std::make_unique<optim::Sgd>(std::move(s),
                                                         optim::SgdOptions{.momentum = 0.9});
                   }}});
}

FsdpRun grouped_run() {
  FsdpRun run;
  run.make_optimizer = three;
  run.fsdp.parameters.groups = {{.match = "*norm*", .lr_scale = 0.5, .optimizer = "lion"},
                                {.match = "embed.*", .weight_decay = 0.0, .optimizer = "sgd"},
                                {.match = "blocks.1.*.out.*", .frozen = true}};
  return run;
}

TEST_CASE(
    "groups: three optimizers: the same bits on 1, 2 and 4 ranks, under each strategy and "
    "offload",
    "[fsdp]") {
  FsdpRun run = grouped_run();
  run.fsdp.reproducible = true;
  run.num_micro_batches = 8;
  const FsdpResult expected = run_fsdp_on_threads(1, run);
  FsdpRun plain;
  plain.fsdp.reproducible = true;
  plain.num_micro_batches = 8;
  const FsdpResult without = run_fsdp_on_threads(1, plain);
  CHECK(without.losses[0] == expected.losses[0]);
  CHECK(without.losses[2] != expected.losses[2]);
  for (const dist::Strategy strategy :
       {dist::Strategy::kFullShard, dist::Strategy::kShardGradOp, dist::Strategy::kHybridShard}) {
    for (const int world : {2, 4}) {
      run.fsdp.strategy = strategy;
      run.fsdp.shard_size = strategy == dist::Strategy::kHybridShard ? 2 : 0;
      run.num_micro_batches = 8 / world;
      run.fsdp.offload =
          world == 4 ? dist::Offload::kParamsAndOptimizer : dist::Offload::kOptimizer;
      check_same(run_fsdp_on_threads(world, run), expected,
                 fmt::format("{} on {} ranks", name_of(strategy), world));
    }
  }
}

TEST_CASE("groups: rate 0 and frozen leave a parameter as it was, weight_decay is of vectors too",
          "[fsdp]") {
  FsdpRun run;
  run.num_steps = 1;
  run.fsdp.parameters.groups = {{.match = "blocks.0.*.out.*", .lr_scale = 0},
                                {.match = "blocks.1.*.out.*", .frozen = true},
                                {.match = "*.norm1.*", .weight_decay = 0.5}};
  const FsdpResult result = run_fsdp_on_threads(2, run);
  run.num_steps = 0;
  const FsdpResult start = run_fsdp_on_threads(2, run);
  run.num_steps = 1;
  run.fsdp.parameters.groups.pop_back();
  const FsdpResult plain = run_fsdp_on_threads(2, run);
  int num_still = 0;
  for (const auto& [name, values] : result.parameters) {
    num_still += values == start.parameters.at(name);
    if (name.find(".norm1.") == std::string::npos) {
      CHECK(values == plain.parameters.at(name));
      continue;
    }
    // Of weights of 1, decayed by lr x 0.5 = 0.005.
    for (size_t i = 0; i < values.size(); ++i) {
      CHECK(std::abs(plain.parameters.at(name)[i] - values[i] - 0.005) < 1e-6);
    }
  }
  CHECK(num_still == 2);
}

TEST_CASE("groups: an optimizer that is not there is named", "[fsdp]") {
  FsdpRun run = grouped_run();
  run.fsdp.parameters.groups[0].optimizer = "adam";
  CHECK(error_of([&] {
          run_fsdp_on_threads(1, run);
        }).find("OptimizerSet: shard blocks.0 is of optimizer \"adam\", which is not there") !=
        std::string::npos);
}

}  // namespace
}  // namespace tessera::testing
