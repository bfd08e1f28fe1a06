#include <cmath>
#include <filesystem>

#include "optim/adafactor.h"
#include "optim/adamw.h"
#include "optim/adamw_8bit.h"
#include "optim/lion.h"
#include "optim/muon.h"
#include "optim/optimizer_set.h"
#include "optim/sgd.h"
#include "test/dist/checkpoint/cases.h"

using namespace tessera;
using namespace tessera::testing;
using dist::Strategy;

namespace {

constexpr int kSaved = 4, kSteps = 8;

/// A run of kSteps on `world_size` ranks that saves after kSaved.
struct Saved {
  TempDir dir;
  WholeState state;
  FsdpResult result;
  std::string checkpoint() const { return dir / dist::step_directory_name(kSaved); }
};

std::unique_ptr<Saved> train_and_save(int world_size, FsdpRun run) {
  auto saved = std::make_unique<Saved>();
  run.num_steps = kSteps;
  save_at(run, kSaved, {.dir = saved->dir.path(), .run = "r"}, &saved->state);
  saved->result = run_fsdp_on_threads(world_size, run);
  return saved;
}

FsdpRun plain() {
  FsdpRun run;
  run.samples_per_step = kSharedSamples;
  run.num_steps = kSteps;
  return run;
}

/// Goes on from the checkpoint; the state after loading is the saved one to the bit.
FsdpResult resume(const Saved& saved, int world_size, FsdpRun run) {
  WholeState state;
  resume_from(run, saved.checkpoint(), &state);
  FsdpResult result = run_fsdp_on_threads(world_size, run);
  CHECK(state.tensors() == saved.state.tensors());
  REQUIRE(result.losses.size() == kSteps - kSaved);
  return result;
}

std::vector<double> tail(const std::vector<double>& losses) {
  return {losses.begin() + kSaved, losses.end()};
}

void check_losses_near(const FsdpResult& actual, const Saved& saved, double tolerance) {
  const std::vector<double> expected = tail(saved.result.losses);
  for (size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(i, actual.losses[i], expected[i]);
    CHECK(std::abs(actual.losses[i] - expected[i]) <= tolerance * std::abs(expected[i]));
  }
}

}  // namespace

TEST_CASE(
    "checkpoint: resumed on the same ranks, losses and parameters are the same bits (case 35)",
    "[checkpoint]") {
  // Shards of 3 ranks end inside tensors.
  for (const int world_size : {1, 3, 4}) {
    for (const Precision precision : {Precision::kF32, Precision::kMixed}) {
      CAPTURE(world_size);
      FsdpRun run = plain();
      set_precision(run, precision);
      const auto saved = train_and_save(world_size, run);
      const FsdpResult result = resume(*saved, world_size, run);
      CHECK(result.losses == tail(saved->result.losses));
      CHECK(result.parameters == saved->result.parameters);
    }
  }
}

TEST_CASE("checkpoint: saving does not change the training", "[checkpoint]") {
  const auto saved = train_and_save(2, plain());
  check_same(saved->result, run_fsdp_on_threads(2, plain()), "with and without a save");
}

TEST_CASE("checkpoint: 4 ranks resume on 1, 2, 3 and 8 (case 34)", "[checkpoint]") {
  const auto saved = train_and_save(4, plain());
  for (const int world_size : {1, 2, 3, 8}) {
    CAPTURE(world_size);
    check_losses_near(resume(*saved, world_size, plain()), *saved, 1e-5);
  }
}

TEST_CASE("checkpoint: F16: resharded 2 to 4, 4 to 2, 2 to 1, 1 to 3", "[checkpoint]") {
  for (const auto& [from, to] : {std::pair{2, 4}, {4, 2}, {2, 1}, {1, 3}}) {
    CAPTURE(from, to);
    const auto saved = train_and_save(from, plain());
    check_losses_near(resume(*saved, to, plain()), *saved, 1e-5);
  }
}

TEST_CASE("checkpoint: every strategy, wrapping and offload loads every other's", "[checkpoint]") {
  struct Setting {
    const char* name;
    std::function<void(FsdpRun&)> apply;
  };
  const auto strategy = [](Strategy value) {
    return [value](FsdpRun& run) {
      run.fsdp.strategy = value;
      if (value >= Strategy::kHybridShard) run.fsdp.shard_size = 2;
    };
  };
  const std::vector<Setting> settings = {
      {"full_shard", strategy(Strategy::kFullShard)},
      {"shard_grad_op", strategy(Strategy::kShardGradOp)},
      {"shard_optim", strategy(Strategy::kShardOptim)},
      {"no_shard", strategy(Strategy::kNoShard)},
      {"hybrid_shard", strategy(Strategy::kHybridShard)},
      {"hybrid_shard_zero2", strategy(Strategy::kHybridShardZero2)},
      {"whole_model", [](FsdpRun& run) { run.fsdp.wrap = dist::wrap::whole_model(); }},
      {"every_n_blocks", [](FsdpRun& run) { run.fsdp.wrap = dist::wrap::every_n_blocks(2); }},
      {"min_num_params", [](FsdpRun& run) { run.fsdp.wrap = dist::wrap::min_num_params(1000); }},
      {"offload optimizer",
       [](FsdpRun& run) {
         run.fsdp.offload = dist::Offload::kOptimizer;
         run.fsdp.offload_window = 256;
       }},
      {"offload all",
       [](FsdpRun& run) {
         run.fsdp.offload = dist::Offload::kParamsAndOptimizer;
         run.fsdp.offload_window = 256;
       }},
      {"reproducible", [](FsdpRun& run) { run.fsdp.reproducible = true; }},
  };
  for (const Precision precision : {Precision::kF32, Precision::kMixed}) {
    FsdpRun base = plain();
    set_precision(base, precision);
    for (size_t i = 0; i < settings.size(); ++i) {
      FsdpRun writes = base, reads = base;
      settings[i].apply(writes);
      // Each writes once and is read by its neighbour in the list; all are read from full_shard.
      const Setting& next = settings[(i + 1) % settings.size()];
      next.apply(reads);
      CAPTURE(settings[i].name, next.name);
      const auto saved = train_and_save(4, writes);
      check_losses_near(resume(*saved, 4, reads), *saved,
                        precision == Precision::kF32 ? 1e-5 : 1e-3);
    }
    const auto saved = train_and_save(4, base);
    for (const Setting& setting : settings) {
      CAPTURE(setting.name);
      FsdpRun reads = base;
      setting.apply(reads);
      const FsdpResult result = resume(*saved, 4, reads);
      check_losses_near(result, *saved, 1e-5);
      // At one world size all of these have the same bits.
      const bool same_sums = std::string_view(setting.name) != "reproducible" &&
                             std::string_view(setting.name) != "whole_model" &&
                             std::string_view(setting.name) != "every_n_blocks" &&
                             std::string_view(setting.name) != "min_num_params";
      if (same_sums) CHECK(result.losses == tail(saved->result.losses));
    }
  }
}

TEST_CASE("checkpoint: in reproducible mode a run moves between 1, 2, 4 and 8 ranks bit by bit",
          "[checkpoint]") {
  const auto reproducible = [](int world_size) {
    FsdpRun run;
    run.num_steps = kSteps;
    run.samples_per_step = 8;
    run.num_micro_batches = 8 / world_size;
    run.fsdp.reproducible = true;
    return run;
  };
  const auto saved = train_and_save(4, reproducible(4));
  for (const int world_size : {1, 2, 4, 8}) {
    CAPTURE(world_size);
    const FsdpResult result = resume(*saved, world_size, reproducible(world_size));
    CHECK(result.losses == tail(saved->result.losses));
    CHECK(result.parameters == saved->result.parameters);
  }
}

namespace {

template <class T>
std::unique_ptr<optim::Optimizer> make(std::vector<optim::FlatShard> shards) {
  return std::make_unique<T>(std::move(shards));
}
/// Muon for the matrices of blocks, AdamW for the rest.
std::unique_ptr<optim::Optimizer> make_muon(std::vector<optim::FlatShard> shards) {
  return std::make_unique<optim::OptimizerSet>(
      std::move(shards), std::map<std::string, optim::OptimizerSet::Make>{
                             {"", make<optim::AdamW>}, {"muon", make<optim::Muon>}});
}

}  // namespace

TEST_CASE("checkpoint: every optimizer goes on with its bits on other numbers of ranks",
          "[checkpoint]") {
  using Make = std::unique_ptr<optim::Optimizer> (*)(std::vector<optim::FlatShard>);
  for (const auto& [name, make_optimizer] :
       {std::pair<const char*, Make>{"adamw", make<optim::AdamW>},
        {"adamw_8bit", make<optim::AdamW8bit>},
        {"adafactor", make<optim::Adafactor>},
        {"lion", make<optim::Lion>},
        {"sgd", make<optim::Sgd>},
        {"muon", make_muon}}) {
    const auto reproducible = [&, of = make_optimizer](int world_size) {
      FsdpRun run;
      run.num_steps = kSteps;
      run.samples_per_step = 8;
      run.num_micro_batches = 8 / world_size;
      run.fsdp.reproducible = true;
      run.make_optimizer = of;
      if (of == make_muon) {
        run.fsdp.parameters.optimizer = [](const nn::NamedParameter& p) {
          const bool is_hidden =
              p.parameter->tensor.shape().num_dims() == 2 && p.name.starts_with("blocks.");
          return std::string(is_hidden ? "muon" : "");
        };
      }
      return run;
    };
    const auto saved = train_and_save(2, reproducible(2));
    for (const int world_size : {1, 4}) {
      CAPTURE(name, world_size);
      const FsdpResult result = resume(*saved, world_size, reproducible(world_size));
      CHECK(result.losses == tail(saved->result.losses));
      CHECK(result.parameters == saved->result.parameters);
    }
  }
}

TEST_CASE("checkpoint: frozen and ignored parameters are in it (case 13)", "[checkpoint]") {
  for (const Precision precision : {Precision::kF32, Precision::kMixed}) {
    FsdpRun run = plain();
    set_precision(run, precision);
    run.prepare = [](nn::LanguageModel& model) {
      int index = 0;
      for (const nn::NamedParameter& p : model.named_parameters()) {
        if (index++ % 2 == 1) p.parameter->tensor.set_requires_grad(false);
      }
    };
    run.fsdp.ignored = {"norm.weight"};
    const auto saved = train_and_save(4, run);
    const dist::CheckpointReader reader(saved->checkpoint());
    const nn::Llama model(run.model);
    for (const nn::NamedParameter& p : const_cast<nn::Llama&>(model).named_parameters()) {
      CAPTURE(p.name);
      const dist::TensorRecord* tensor = reader.manifest().find("parameters/" + p.name);
      REQUIRE(tensor != nullptr);
      CHECK(tensor->shape == p.parameter->tensor.shape());
    }
    const FsdpResult result = resume(*saved, 4, run);
    CHECK(result.losses == tail(saved->result.losses));
    check_losses_near(resume(*saved, 2, run), *saved, precision == Precision::kF32 ? 1e-5 : 1e-3);
  }
}

TEST_CASE("checkpoint: the loss scale goes on where it was", "[checkpoint]") {
  FsdpRun run = plain();
  run.fsdp.precision.param_dtype = kF16;
  run.fsdp.precision.norm_fp32 = true;
  run.loss_scale = dist::LossScaleOptions{.init = 1 << 10, .rule = {.interval = 2}};
  const auto saved = train_and_save(2, run);
  const FsdpResult result = resume(*saved, 2, run);
  CHECK(result.loss_scales == tail(saved->result.loss_scales));
  CHECK(result.losses == tail(saved->result.losses));
  CHECK(saved->result.loss_scales.front() != saved->result.loss_scales[kSaved]);
  // A run without a loss scale leaves it aside, and one with it can start from a checkpoint
  // without.
  FsdpRun without = plain();
  check_losses_near(run_fsdp_on_threads(2,
                                        [&] {
                                          FsdpRun other = without;
                                          resume_from(other, saved->checkpoint());
                                          return other;
                                        }()),
                    *saved, 1e-2);
  const auto plain_saved = train_and_save(2, without);
  FsdpRun scaled = run;
  resume_from(scaled, plain_saved->checkpoint());
  CHECK(run_fsdp_on_threads(2, scaled).loss_scales.front() == 1 << 10);
}

TEST_CASE("checkpoint: ranks read what they need and write each element once", "[checkpoint]") {
  for (const Strategy strategy :
       {Strategy::kFullShard, Strategy::kNoShard, Strategy::kHybridShard}) {
    FsdpRun run = plain();
    run.fsdp.strategy = strategy;
    if (strategy == Strategy::kHybridShard) run.fsdp.shard_size = 2;
    const auto saved = train_and_save(4, run);
    const dist::CheckpointReader reader(saved->checkpoint());
    reader.check_sizes();
    reader.check_files();
    int64_t total = 0;
    for (const dist::TensorRecord& t : reader.manifest().tensors) {
      total += t.shape.numel() * static_cast<int64_t>(size_of(t.dtype));
    }
    // Every rank writes about a quarter (chunks are whole numbers of 256 elements).
    REQUIRE(reader.manifest().files.size() == 4);
    int64_t data = 0;
    for (const dist::FileRecord& file : reader.manifest().files) {
      const SafetensorsFile f(saved->checkpoint() + "/" + file.name);
      for (const auto& entry : f.entries()) data += entry.nbytes();
      CHECK(file.nbytes < total / 2);
    }
    CHECK(data == total);
    // A rank of four of full_shard reads its part only.
    FsdpRun loads = plain();
    std::mutex mutex;
    int64_t read = 0;
    loads.num_steps = 0;
    loads.on_state = [&](const dist::TrainingState& state, dist::World& world) {
      const dist::CheckpointReader mine(saved->checkpoint());
      load_state(mine, state);
      int64_t held = 0;
      for (const dist::Slice& s : dist::held_slices(state)) held += s.values.nbytes();
      const std::lock_guard lock(mutex);
      CHECK(mine.num_bytes_read() == held);
      CHECK(held < total * 2 / world.world_size());
      read += held;
    };
    run_fsdp_on_threads(4, loads);
    CHECK(read >= total);
    CHECK(read <= total + 4 * 8);  // the step count is on every rank
  }
}

TEST_CASE("checkpoint: a model or optimizer that does not fit is refused with names (F12)",
          "[checkpoint]") {
  const auto saved = train_and_save(2, plain());
  FsdpRun deeper = plain();
  deeper.model.num_layers = 4;
  resume_from(deeper, saved->checkpoint());
  std::string message = error_of([&] { run_fsdp_on_threads(2, deeper); });
  CHECK(message.starts_with(saved->checkpoint() +
                            ": tensors do not fit this model and optimizer: missing "));
  CHECK_THAT(message, Catch::Contains("missing parameters/blocks.3.") &&
                          Catch::Contains("missing exp_avg/blocks.3.") &&
                          !Catch::Contains("unexpected"));
  FsdpRun shallower = plain();
  shallower.model.num_layers = 2;
  resume_from(shallower, saved->checkpoint());
  message = error_of([&] { run_fsdp_on_threads(2, shallower); });
  // 6 tensors of a block, with their two states: some names and how many more.
  CHECK_THAT(message, Catch::Contains("unexpected exp_avg/blocks.2.attn.out.weight; ") &&
                          Catch::EndsWith(" and 10 more"));
  FsdpRun wider = plain();
  wider.model.ffn_width = 48;
  resume_from(wider, saved->checkpoint());
  CHECK_THAT(error_of([&] { run_fsdp_on_threads(2, wider); }),
             Catch::Contains("is [24, 40], expected [24, 48]; "));
}

TEST_CASE("checkpoint: the last K and the best stay", "[checkpoint]") {
  using Rank = dist::CheckpointRank;
  const std::vector<Rank> all = {{50, 2.0}, {40, 1.5}, {30, std::nullopt}, {20, 1.0}, {10, 1.2}};
  CHECK(dist::superfluous_checkpoints(all, 2, true) == std::vector<size_t>{2, 4});
  CHECK(dist::superfluous_checkpoints(all, 2, false) == std::vector<size_t>{2, 3, 4});
  CHECK(dist::superfluous_checkpoints(all, 5, true).empty());
  CHECK(dist::superfluous_checkpoints({}, 2, true).empty());
  const std::vector<Rank> newest_is_best = {{30, 1.0}, {20, 2.0}, {10, 3.0}};
  CHECK(dist::superfluous_checkpoints(newest_is_best, 1, true) == std::vector<size_t>{1, 2});
  const std::vector<Rank> unknown = {{2, std::nullopt}, {1, std::nan("")}};
  CHECK(dist::superfluous_checkpoints(unknown, 1, true) == std::vector<size_t>{1});
}
