// A key's value reaches what it is for: seen in units, names, streams, memory and numbers, not in
// the resolved configuration.
#include "apps/options.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "apps/saved_model.h"
#include "apps/trainer.h"
#include "core/autograd.h"
#include "dist/comm/local.h"
#include "dist/fsdp/parts.h"
#include "test/temp_dir.h"
#include "test/testing.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;
using tessera::testing::read_file;
using tessera::testing::TempDir;

namespace {

Config small_config(const TempDir& dir, std::vector<std::string> extra = {}) {
  std::string text;
  for (int i = 0; i < 200; ++i) text += "line " + std::to_string(i * i) + " of a text\n";
  std::vector<std::string> overrides = {"--data.text=" + dir.write("text.txt", text),
                                        "--output.dir=" + dir / "out",
                                        "--device=cpu",
                                        "--model.layers=4",
                                        "--model.heads=2",
                                        "--model.width=24",
                                        "--model.context=16",
                                        "--train.steps=4",
                                        "--train.micro_batch=2",
                                        "--train.log_every=1000",
                                        "--optim.lr=0.01",
                                        "--optim.warmup_steps=0"};
  overrides.insert(overrides.end(), extra.begin(), extra.end());
  return load_config("", overrides);
}

std::vector<nlohmann::json> run(int world_size, const std::vector<std::string>& extra) {
  const TempDir dir;
  const Config config = small_config(dir, extra);
  dist::run_ranks(world_size, [&](dist::World& world) { train(config, world); });
  std::vector<nlohmann::json> steps;
  std::istringstream lines(read_file(dir / "out/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) steps.push_back(nlohmann::json::parse(line));
  return steps;
}

/// Final parameters of a run, by name.
std::map<std::string, std::vector<double>> parameters_after(int world_size,
                                                            const std::vector<std::string>& extra) {
  const TempDir dir;
  const Config config = small_config(dir, extra);
  dist::run_ranks(world_size, [&](dist::World& world) { train(config, world); });
  const SavedModel saved = load_model(dir / "out");
  std::map<std::string, std::vector<double>> values;
  for (const nn::NamedParameter& p : saved.model->named_parameters()) {
    values[p.name] = p.parameter->tensor.to_vector();
  }
  return values;
}

/// Names of the units that a configuration makes.
std::vector<std::string> units_of(const std::vector<std::string>& extra) {
  const TempDir dir;
  const Config config = small_config(dir, extra);
  std::vector<std::string> names;
  dist::run_ranks(1, [&](dist::World& world) {
    const nn::DeferredInit deferred;
    const auto model = make_model(config, 256);
    freeze_parameters(config, *model);
    const auto fsdp = dist::fully_shard(*model, world, fsdp_options(config, *model));
    for (const auto& unit : parts_of(*fsdp).units) names.push_back(unit->name());
  });
  return names;
}

}  // namespace

TEST_CASE("options: every value of fsdp.wrap makes other units", "[options]") {
  using Names = std::vector<std::string>;
  const Names blocks = {"embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"};
  CHECK(units_of({}) == blocks);
  CHECK(units_of({"--fsdp.wrap=transformer_block"}) == blocks);
  CHECK(units_of({"--fsdp.wrap=whole_model"}) == Names{"root"});
  CHECK(units_of({"--fsdp.wrap=every_n_blocks"}) ==
        Names{"embedding", "blocks.0-1", "blocks.2-3", "head"});
  CHECK(units_of({"--fsdp.wrap=every_n_blocks", "--fsdp.wrap_every=3"}) ==
        Names{"embedding", "blocks.0-2", "blocks.3", "head"});
  const auto large = units_of({"--fsdp.wrap=min_num_params", "--fsdp.min_num_params=5000"});
  const auto small = units_of({"--fsdp.wrap=min_num_params", "--fsdp.min_num_params=1000"});
  CHECK(large.size() > 1);
  CHECK(small.size() > large.size());
  CHECK(units_of({"--fsdp.wrap=min_num_params", "--fsdp.min_num_params=1000000"}) == Names{"root"});
  CHECK(units_of({"--fsdp.wrap=class", "--fsdp.wrap_class=LlamaBlock"}) == blocks);
  const auto parts = units_of({"--fsdp.wrap=class", "--fsdp.wrap_class=Attention, SwiGlu"});
  CHECK(std::count(parts.begin(), parts.end(), "blocks.2.attn") == 1);
  CHECK(std::count(parts.begin(), parts.end(), "blocks.2.mlp") == 1);
}

TEST_CASE("options: a class of fsdp.wrap_class that no module has is named", "[options]") {
  CHECK(
      error_of([] {
        units_of({"--fsdp.wrap=class", "--fsdp.wrap_class=Attention,BertBlok"});
      })
          .starts_with(
              "command line: fsdp.wrap_class: no module is a BertBlok, expected some of Attention, "
              "Embedding, Linear, LlamaBlock, LmHead, ModuleList, RmsNorm, SwiGlu"));
  CHECK(error_of([] {
          units_of({"--fsdp.wrap=class"});
        }).starts_with("command line: fsdp.wrap = class, expected fsdp.wrap_class with some of "));
}

TEST_CASE("options: what an out-of-memory error advises is said in keys", "[options]") {
  const TempDir dir;
  const Config config = small_config(dir);
  const auto model = make_model(config, 256);
  const auto name = fsdp_options(config, *model).name_option;
  const std::pair<const char*, const char*> names[] = {
      {"FsdpOptions::strategy", "fsdp.strategy"},
      {"FsdpOptions::sync_every_micro_batch", "fsdp.sync_every_micro_batch"},
      {"FsdpOptions::offload", "fsdp.offload"},
      {"FsdpOptions::prefetch_forward", "fsdp.prefetch_forward"},
      {"FsdpOptions::prefetch_backward", "fsdp.prefetch_backward"},
      {"FsdpOptions::wrap", "fsdp.wrap"},
      {"FsdpOptions::gradient_pieces", "fsdp.gradient_pieces"},
      {"PrecisionOptions::param_dtype", "precision.param_dtype"},
      {"RecomputePolicy::kind", "recompute.policy"},
      {"RecomputePolicy::mlp_tile", "recompute.mlp_tile"},
      {"batch", "train.micro_batch"},
      {"sequence", "model.context"},
      {"FsdpOptions::unknown", "FsdpOptions::unknown"}};
  for (const auto& [option, key] : names) CHECK(name(option) == key);
  // In a run whose states do not fit, and in one whose activations do not.
  const auto message = [&](const std::vector<std::string>& extra) {
    return error_of([&] { run(1, extra); });
  };
  const std::string states = message({"--memory.limit=400KiB"});
  const std::string activations = message({"--memory.limit=6MiB", "--train.micro_batch=128"});
  INFO(states << activations);
  CHECK(states.find("\n    2 ranks instead of 1 ") != std::string::npos);
  CHECK(states.find("\n    fsdp.offload=optimizer ") != std::string::npos);
  CHECK(activations.find("\n    train.micro_batch, half of it ") != std::string::npos);
  CHECK(activations.find("\n    recompute.policy=full, or selective ") != std::string::npos);
  CHECK(activations.find("\n    recompute.mlp_tile=1024 ") != std::string::npos);
  CHECK(activations.find("\n    model.context, half of it ") != std::string::npos);
  for (const std::string& text : {states, activations}) {
    CHECK(text.find("Options::") == std::string::npos);
    CHECK(text.find("RecomputePolicy") == std::string::npos);
  }
}

TEST_CASE("options: frozen and ignored parameters keep their values, the others do not",
          "[options]") {
  const auto start = parameters_after(1, {"--train.steps=1", "--optim.lr=0", "--optim.final_lr=0"});
  for (const int world_size : {1, 2}) {
    for (const char* key : {"--model.frozen=", "--fsdp.ignored="}) {
      CAPTURE(world_size, key);
      const auto after =
          parameters_after(world_size, {std::string(key) + "embed.*, blocks.1.*.weight"});
      REQUIRE(after.size() == start.size());
      int num_kept = 0;
      for (const auto& [name, values] : after) {
        CAPTURE(name);
        const bool is_kept = name.starts_with("embed.") ||
                             (name.starts_with("blocks.1.") && name.ends_with(".weight"));
        num_kept += is_kept;
        CHECK((values == start.at(name)) == is_kept);
      }
      CHECK(num_kept > 2);
    }
  }
  const TempDir dir;
  const auto message_of = [&](const std::string& argument) {
    const Config config = small_config(dir, {argument});
    return error_of([&] { dist::run_ranks(1, [&](dist::World& world) { train(config, world); }); });
  };
  for (const std::string key : {"model.frozen", "fsdp.ignored"}) {
    CHECK_THAT(
        message_of("--" + key + "=embed.*,blocks.9.*"),
        Catch::Contains(key + ": no parameter is called \"blocks.9.*\", expected a name such "
                              "as embed.weight or "));
    CHECK_THAT(message_of("--" + key + "=*"),
               Catch::Contains(key + " = * leaves no parameter to train"));
  }
}

TEST_CASE("options: quantized weights are frozen, and the same on any number of ranks",
          "[options]") {
  const TempDir dir;
  const auto message_of = [&](const std::vector<std::string>& arguments) {
    const Config config = small_config(dir, arguments);
    return error_of([&] { dist::run_ranks(1, [&](dist::World& world) { train(config, world); }); });
  };
  CHECK_THAT(message_of({"--model.quantize=nf4"}),
             Catch::Contains("command line: model.quantize = nf4, but blocks.0.attn.qkv.weight is "
                             "trained, expected it frozen by model.frozen"));
  CHECK_THAT(message_of({"--model.quantize=nf4", "--model.frozen=blocks.0.*"}),
             Catch::Contains("model.quantize = nf4, but blocks.1.attn.qkv.weight is trained"));
  const std::vector<std::string> qlora = {"--model.frozen=blocks.*.weight", "--model.quantize=nf4"};
  const auto first = parameters_after(1, qlora);
  for (const int world_size : {2, 4}) {
    for (const auto& [name, values] : parameters_after(world_size, qlora)) {
      CAPTURE(world_size, name);
      if (name.starts_with("blocks.") && name.ends_with(".weight")) {
        CHECK(values == first.at(name));
      }
    }
  }
}

TEST_CASE("options: groups of parameters: what fits no parameter, two groups or no matrix is named",
          "[options]") {
  const TempDir dir;
  const auto message_of = [&](const std::vector<std::string>& arguments) {
    const Config config = small_config(dir, arguments);
    return error_of([&] { dist::run_ranks(1, [&](dist::World& world) { train(config, world); }); });
  };
  CHECK_THAT(message_of({"--optim.groups=blocks.9.*: frozen"}),
             Catch::Contains("command line: optim.groups: no parameter is called \"blocks.9.*\""));
  CHECK_THAT(message_of({"--optim.groups=*.norm1.*: frozen; blocks.0.*: lr_scale=2"}),
             Catch::Contains("command line: optim.groups: blocks.0.norm1.weight is in two groups, "
                             "\"*.norm1.*\" and \"blocks.0.*\", expected one"));
  CHECK_THAT(message_of({"--optim.groups=*.norm1.*: optimizer=muon"}),
             Catch::Contains("command line: optim.groups: Muon: blocks.0.norm1.weight is ["));
}

TEST_CASE("options: Nesterov momentum changes what sgd does", "[options]") {
  const std::vector<std::string> sgd = {"--optim.name=sgd", "--optim.momentum=0.9"};
  std::vector<std::string> nesterov = sgd;
  nesterov.push_back("--optim.nesterov=true");
  const auto plain = run(1, sgd), ahead = run(1, nesterov);
  CHECK(plain[0]["loss"] == ahead[0]["loss"]);
  CHECK(plain[1]["loss"] != ahead[1]["loss"]);
}

TEST_CASE("options: keys of memory reach the allocator", "[options]") {
  // A step with blocks of more than 1 MiB, some of which are free at its end.
  const auto reserved = [](const std::string& key) {
    const auto steps = run(1, {key, "--train.micro_batch=32", "--model.context=64",
                               "--model.width=64", "--model.layers=2"});
    return steps.at(2)["reserved_bytes"].get<int64_t>();
  };
  const int64_t usual = reserved("--memory.empty_cache_every=0");
  CHECK(usual > 0);
  CHECK(reserved("--memory.empty_cache_every=1") < usual);
  const TempDir dir;
  for (const char* key : {"memory.limit", "memory.split"}) {
    CHECK_THAT(error_of([&] { small_config(dir, {std::string("--") + key + "=much"}); }),
               Catch::Contains(std::string(key) + ": \"much\" is not a number of bytes"));
  }
}

TEST_CASE("options: a low wire or reduce dtype rounds the gradients of f32 parameters",
          "[options]") {
  const auto norm = [](const std::vector<std::string>& extra) {
    return run(2, extra).at(0)["grad_norm"].get<double>();
  };
  const double exact = norm({});
  const double wire = norm({"--fsdp.wire_dtype=bf16"});
  CHECK(wire != exact);
  CHECK(std::fabs(wire / exact - 1) < 1e-2);
  CHECK(norm({"--precision.reduce_dtype=bf16"}) == wire);
  const TempDir dir;
  CHECK_THAT(error_of([&] {
               run(2, {"--precision.reduce_dtype=bf16", "--fsdp.wire_dtype=f32"});
             }),
             Catch::Contains("command line: fsdp.wire_dtype: f32 with reduce_dtype bf16 and f32 "
                             "parameters, whose gradients are rounded as they travel; expected "
                             "bf16"));
}

TEST_CASE("options: an evaluation is of the same samples on any number of ranks", "[options]") {
  // One model: without a step of any size all ranks have the initial parameters.
  for (const char* batches : {"0", "1", "3", "6"}) {
    const auto val_loss = [&](int world_size) {
      const auto steps = run(
          world_size, {"--train.steps=1", "--optim.lr=0", "--optim.final_lr=0",
                       "--data.val_fraction=0.2", std::string("--train.eval_batches=") + batches});
      return steps.back()["val_loss"].get<double>();
    };
    CAPTURE(batches);
    const double expected = val_loss(1);
    for (const int world_size : {2, 3, 4}) {
      CAPTURE(world_size);
      CHECK(val_loss(world_size) == expected);
    }
  }
  // They are those of the first batches alone.
  const auto of = [&](const char* batches) {
    return run(1, {"--train.steps=1", "--optim.lr=0", "--optim.final_lr=0",
                   "--data.val_fraction=0.2", std::string("--train.eval_batches=") + batches})
        .back()["val_loss"];
  };
  CHECK(of("1") != of("3"));
  CHECK(of("0") == of("1000000"));
}

TEST_CASE("options: in reproducible mode val_loss has the same bits on 1, 2 and 4 ranks",
          "[options]") {
  const auto curve = [](int world_size) {
    std::vector<double> losses;
    for (const auto& step : run(world_size, {"--train.reproducible=true", "--train.global_batch=8",
                                             "--train.eval_every=2", "--train.eval_batches=3"})) {
      if (step.contains("val_loss")) losses.push_back(step["val_loss"].get<double>());
    }
    return losses;
  };
  const auto one = curve(1);
  REQUIRE(one.size() == 2);
  CHECK(curve(2) == one);
  CHECK(curve(4) == one);
}
