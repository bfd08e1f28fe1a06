#include "dist/fsdp/coded.h"

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/files.h"
#include "dist/fsdp/guards.h"
#include "dist/fsdp/parts.h"
#include "kernels/elementwise/elementwise.h"
#include "nn/linear.h"
#include "nn/lora.h"
#include "test/dist/checkpoint/cases.h"
#include "test/dist/fsdp/combos.h"
#include "test/dist/fsdp/memory_cases.h"
#include "test/dist/fsdp/net.h"
#include "test/dist/fsdp/observer.h"
#include "test/golden/golden.h"
#include "test/testing.h"

namespace tessera::testing {
namespace {

using dist::Strategy;

bool is_block_weight(const nn::NamedParameter& p) {
  return p.name.starts_with("blocks.") && p.name.ends_with(".weight") &&
         dynamic_cast<nn::Linear*>(p.owner) != nullptr;
}

/// Adapters are trained beside linear layers of blocks that are codes.
void make_qlora(FsdpRun& run) {
  run.prepare = [](nn::LanguageModel& model) {
    nn::add_lora(model, {.targets = "all-linear", .rank = 4, .alpha = 8});
  };
  run.fsdp.parameters.quantize = is_block_weight;
}

FsdpRun qlora_run(int samples = 8) {
  FsdpRun run;
  run.samples_per_step = samples;
  make_qlora(run);
  return run;
}

// ---- the numbers of bitsandbytes

/// `weights` of test/golden/make_nf4.py.
std::vector<float> weights(int64_t count, int64_t salt) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t top = (i * 7919 + salt * 1299709) % 2003 - 1001;
    const auto value =
        static_cast<float>(static_cast<double>(top) / 1001 * (i % 5 == 0 ? 1.0 / 1024 : 1.0));
    values.push_back(value * (1 + static_cast<float>(i / 64 * 13 % 29) / 32));
  }
  return values;
}

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return text;
}

std::string fnv(const Tensor& values) {
  current_stream().synchronize();
  uint64_t hash = 0xcbf29ce484222325;
  for (int64_t i = 0; i < values.nbytes(); ++i) {
    hash = (hash ^ static_cast<const uint8_t*>(values.raw_data())[i]) * 0x100000001b3;
  }
  return fmt::format("{:016x}", hash);
}

/// Frozen layers of the golden shapes, and one that is trained.
struct Layers : nn::Module {
  nn::ChildList<nn::Linear> layers{this, "layers"};
  nn::Child<nn::Linear> last{this, "last", 8, 8};
  explicit Layers(const nlohmann::json& golden) {
    for (const auto& g : golden) {
      layers.emplace_back(g["shape"][1].get<int64_t>(), g["shape"][0].get<int64_t>(),
                          nn::LinearOptions{.bias = false});
    }
    for (auto& layer : layers) layer->parameter("weight").tensor.set_requires_grad(false);
  }
};

TEST_CASE("coded: codes, scales and values are those of bitsandbytes on any number of ranks",
          "[fsdp]") {
  const auto golden = nlohmann::json::parse(std::ifstream(golden_dir() + "/nf4.json"));
  for (const int world_size : {1, 2, 3, 4, 8}) {
    for (const DType dtype : {kF32, kBF16, kF16}) {
      CAPTURE(world_size, dtype);
      WholeState state;
      std::map<std::string, std::string> hashes, full_hashes;
      dist::run_ranks(world_size, [&](dist::World& world) {
        std::unique_ptr<Layers> net;
        {
          const nn::DeferredInit deferred;
          net = std::make_unique<Layers>(golden);
        }
        dist::FsdpOptions options;
        options.wrap = dist::wrap::whole_model();
        options.precision.param_dtype = dtype;
        options.parameters.quantize = [](const nn::NamedParameter& p) {
          return p.name.starts_with("layers.");
        };
        const auto fsdp = dist::fully_shard(*net, world, options);
        fsdp->load_full([&](const std::string& name) {
          const Shape shape = net->parameter(name).tensor.shape();
          if (!name.starts_with("layers.")) return zeros(shape);
          const auto& g = golden[static_cast<size_t>(name[7] - '0')];
          const std::vector<float> values = weights(shape.numel(), g["salt"]);
          const Tensor w = from_values(std::span<const float>(values), shape, kF32);
          return g["dtype"] == "bfloat16"  ? w.to(kBF16).to(kF32)
                 : g["dtype"] == "float16" ? w.to(kF16).to(kF32)
                                           : w;
        });
        state.add({net.get(), fsdp.get(), nullptr, nullptr});
        {
          const dist::UnshardGuard guard(*fsdp, *net);
          for (const nn::NamedParameter& p : net->named_parameters()) {
            if (world.rank() == world_size - 1) hashes[p.name] = fnv(p.parameter->tensor);
          }
        }
        fsdp->for_each_full(dist::Fsdp::State::kMaster,
                            [&](const std::string& name, const Tensor& full) {
                              if (world.rank() == 0) full_hashes[name] = fnv(full);
                            });
      });
      for (size_t k = 0; k < golden.size(); ++k) {
        const auto& g = golden[k];
        const std::string name = fmt::format("layers.{}.weight", k);
        CAPTURE(name);
        const std::string& records = state.tensors().at("nf4/" + name);
        std::string codes, scale_codes;
        for (size_t at = 0; at < records.size(); at += 132) {
          codes += records.substr(at, 128), scale_codes += records.substr(at + 128, 4);
        }
        const std::string expected = g["codes"], expected_scales = g["scale_codes"];
        CHECK(hex(codes).substr(0, expected.size()) == expected);
        CHECK(hex(scale_codes).substr(0, expected_scales.size()) == expected_scales);
        std::vector<float> scales{g["mean"].get<float>()};
        for (const auto& nested : g["nested"]) scales.push_back(nested.get<float>());
        const std::string& bytes = state.tensors().at("nf4_scales/" + name);
        REQUIRE(bytes.size() == scales.size() * sizeof(float));
        CHECK(std::memcmp(bytes.data(), scales.data(), bytes.size()) == 0);
        CHECK(hashes.at(name) == g["dequantized"][fmt::format("{}", dtype)]);
        CHECK(full_hashes.at(name) == g["dequantized"]["f32"]);
      }
    }
  }
}

// ---- trainings

TEST_CASE("coded: every strategy and setting gives the same bits", "[fsdp]") {
  for (const int world_size : {3, 4}) {
    std::optional<FsdpResult> expected;
    for (const Combo& combo : pair_covering_combos()) {
      FsdpRun run = make_run(combo, world_size, Precision::kBF16);
      make_qlora(run);
      run.num_steps = 2;
      const FsdpResult result = run_fsdp_on_threads(world_size, run);
      if (!expected) expected = result;
      check_same(result, *expected, fmt::format("{} ranks: {}", world_size, combo.to_string()));
    }
  }
}

TEST_CASE("coded: reproducible runs have the same bits on 1, 2, 4 and 8 ranks", "[fsdp]") {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    std::optional<FsdpResult> expected;
    for (const int world_size : {1, 2, 4, 8}) {
      FsdpRun run = qlora_run(16);
      run.fsdp.reproducible = true;
      run.num_micro_batches = 8 / world_size;
      set_precision(run, precision);
      const FsdpResult result = run_fsdp_on_threads(world_size, run);
      if (!expected) expected = result;
      check_same(result, *expected, fmt::format("{} ranks", world_size));
    }
  }
}

TEST_CASE("coded: a model of dequantized weights trains to the same bits", "[fsdp]") {
  const FsdpRun quantized = qlora_run();
  const FsdpResult expected = run_fsdp_on_threads(2, quantized);
  FsdpRun plain = quantized;
  plain.fsdp.parameters.quantize = nullptr;
  plain.on_state = [&](const dist::TrainingState& state, dist::World&) {
    std::map<std::string, Tensor> values;
    state.fsdp->for_each_full(
        dist::Fsdp::State::kMaster,
        [&](const std::string& name, const Tensor& full) { values.emplace(name, full.clone()); });
    for (auto& [name, value] : values) {
      if (expected.parameters.contains(name) && name.ends_with(".weight")) {
        const std::vector<double>& all = expected.parameters.at(name);
        std::vector<float> floats(all.begin(), all.end());
        if (state.model->parameter(name).tensor.requires_grad()) continue;
        value = from_values(std::span<const float>(floats), value.shape(), kF32);
      }
    }
    state.fsdp->load_full([&](const std::string& name) { return values.at(name); });
  };
  check_same(run_fsdp_on_threads(2, plain), expected, "plain");
}

// ---- bytes

TEST_CASE("coded: gathers move records, by the formula of the padded layout", "[fsdp]") {
  for (const int world_size : {2, 4}) {
    FsdpRun run = qlora_run();
    set_precision(run, Precision::kBF16);
    run.num_steps = 2;
    std::shared_ptr<StreamTap> tap;
    std::vector<std::string> gathers, expected;
    std::string program;
    int64_t block = 0;
    run.on_ready = [&](dist::Fsdp& fsdp, dist::World& world) {
      if (world.rank() != 0) return;
      tap = StreamTap::install(fsdp, {.records = true});
      // Forward, then backward but for the last block and the head, whose slots nobody took.
      const auto& units = parts_of(fsdp).units;
      const auto add = [&](dist::Unit& unit) {
        for (const dist::Group& g : unit.groups()) {
          int64_t numel = 0;
          for (const dist::Placement& p : g.layout.placements) {
            numel += (p.shape.numel() + 255) / 256 * 256;
          }
          numel = (numel + 256 * world_size - 1) / (256 * world_size) * (256 * world_size);
          const int64_t nbytes = g.coded != nullptr ? numel / 256 * 132 : numel * 2;
          if (unit.name() == "blocks.0") block += nbytes;
          expected.push_back(fmt::format("all_gather {}", nbytes));
        }
      };
      for (const auto& unit : units) add(*unit);
      const int64_t forward = block;
      for (size_t u = units.size() - 2; u-- > 0;) add(*units[u]);
      block = forward;
    };
    run.on_step = [&](int step, dist::Fsdp& fsdp, dist::World& world) {
      if (world.rank() != 0) return;
      gathers.clear();
      for (const TaskRecord& t : tap->take()) {
        if (t.stream == "all_gather" && t.name == "all_gather") {
          gathers.push_back(fmt::format("all_gather {}", t.bytes_written));
        }
      }
      if (step == 1) program = parts_of(fsdp).runtime.program().collectives();
    };
    run_fsdp_on_threads(world_size, run);
    CHECK(gathers == expected);
    INFO(program);  // says the same bytes
    CHECK(program.find(fmt::format("gather_forward blocks.0 ({} bytes)", block)) !=
          std::string::npos);
  }
}

TEST_CASE("coded: a unit above 1 M parameters has at most 0.52 bytes a quantized parameter",
          "[fsdp]") {
  nn::LlamaConfig config = FsdpRun::tiny_llama();
  config.num_layers = 2, config.width = 256, config.ffn_width = 1032;
  config.num_heads = config.num_kv_heads = 4;
  for (const int world_size : {1, 2, 3, 8}) {
    dist::run_ranks(world_size, [&](dist::World& world) {
      const nn::DeferredInit deferred;
      nn::Llama model(config);
      nn::add_lora(model, {.targets = "all-linear"});
      dist::FsdpOptions options;
      options.parameters.quantize = is_block_weight;
      const auto fsdp = dist::fully_shard(model, world, options);
      for (const dist::UnitPlan& unit : parts_of(*fsdp).plan.units) {
        for (const dist::GroupPlan& g : unit.groups) {
          if (!g.layout.is_coded) continue;
          int64_t numel = 0;
          for (const dist::Placement& p : g.layout.placements) numel += p.numel;
          REQUIRE(numel > 1'000'000);
          const auto nbytes = static_cast<double>(g.layout.shard_nbytes(g.layout.numel));
          CHECK(nbytes <= 0.52 * static_cast<double>(numel));
        }
      }
    });
  }
}

TEST_CASE("coded: a 7B model with adapters of rank 16 has less than 6 GB of states on a rank",
          "[fsdp]") {
  nn::LlamaConfig config;
  config.vocab_size = 32000, config.context_length = 2048;
  config.num_layers = 32, config.width = 4096, config.ffn_width = 11008;
  config.num_heads = config.num_kv_heads = 32;
  const nn::DeferredInit deferred;
  nn::Llama model(config);
  nn::add_lora(model, {.targets = "all-linear", .rank = 16});
  dist::FsdpOptions options;
  options.precision.param_dtype = kBF16;
  options.parameters.quantize = is_block_weight;
  for (const auto& [world_size, most] : {std::pair{1, 6e9}, {8, 2e9}}) {
    const dist::Policy policy = dist::resolve_policy(options, world_size, 0, world_size, false);
    const auto no_staging = [](int64_t, DType) { return int64_t{0}; };
    const dist::Plan plan =
        dist::make_plan(policy.options.wrap(model), policy, no_staging, no_staging,
                        dist::parameter_table(model, options.parameters));
    double nbytes = 0, num_coded = 0;
    for (const dist::UnitPlan& unit : plan.units) {
      for (const dist::GroupPlan& g : unit.groups) {
        nbytes += static_cast<double>(g.layout.shard_nbytes(g.shard_numel));
        if (g.layout.is_coded) {
          nbytes += 4.0 * static_cast<double>(dist::num_scales(g.layout));
          num_coded += static_cast<double>(g.layout.numel);
        }
        // A master, a gradient and two moments.
        if (g.layout.is_trainable) nbytes += 16.0 * static_cast<double>(g.shard_numel);
      }
    }
    for (const dist::PoolPlan& pool : plan.pools) {
      nbytes += static_cast<double>(pool.nbytes) * pool.num_slots;
    }
    INFO(fmt::format("{} ranks: {:.2f} GB", world_size, nbytes * 1e-9));
    CHECK(num_coded > 6.4e9);
    CHECK(nbytes < most);
  }
}

TEST_CASE("coded: memory is what is said of it, under every strategy", "[fsdp]") {
  check_memory_cases(make_qlora);
}

/// Bytes that advice says a setting saves; -1: it does not name it.
double advised_less(const std::string& text, const std::string& setting) {
  const size_t at = text.find("    " + setting + " ");
  if (at == std::string::npos) return -1;
  std::istringstream words(text.substr(text.find("about ", at) + 6));
  double value = 0;
  std::string unit;
  words >> value >> unit;
  return value * (unit == "GiB" ? 1 << 30 : unit == "MiB" ? 1 << 20 : unit == "KiB" ? 1 << 10 : 1);
}

TEST_CASE("coded: an out-of-memory error advises what another setting really takes less",
          "[fsdp]") {
  nn::LlamaConfig config = FsdpRun::tiny_llama();
  config.num_layers = 12, config.width = 256, config.ffn_width = 1024;
  config.num_heads = config.num_kv_heads = 4;
  constexpr int kWorld = 4;
  // Of parameters, gradients, gathered units and two moments.
  const auto nbytes_with = [&](const dist::FsdpOptions& options, std::string* advice) {
    double nbytes = 0;
    dist::LocalOptions local;
    local.context.poison = false;
    dist::run_ranks(kWorld, local, [&](dist::World& world) {
      const nn::DeferredInit deferred;
      nn::Llama model(config);
      nn::add_lora(model, {.targets = "all-linear"});
      const auto fsdp = dist::fully_shard(model, world, options);
      if (world.rank() != 0) return;
      const dist::MemoryPlan plan = fsdp->memory();
      for (const MemoryClass c :
           {MemoryClass::kParameters, MemoryClass::kGradients, MemoryClass::kGathered}) {
        nbytes += static_cast<double>(plan.nbytes_of(c));
      }
      for (const optim::FlatShard& shard : fsdp->shards()) {
        nbytes += 8.0 * static_cast<double>(shard.master.numel());
      }
      if (advice == nullptr) return;
      OutOfMemory oom{};
      oom.memory_class = MemoryClass::kParameters;
      *advice = dist::memory_advice(dist::parts_of(*fsdp), oom);
    });
    return nbytes;
  };
  for (const Strategy strategy : {Strategy::kNoShard, Strategy::kShardGradOp}) {
    for (const bool is_coded : {true, false}) {
      dist::FsdpOptions options;
      options.strategy = strategy;
      options.precision.param_dtype = kBF16;
      if (is_coded) options.parameters.quantize = is_block_weight;
      std::string advice;
      const double now = nbytes_with(options, &advice);
      dist::FsdpOptions sharded = options;
      sharded.strategy = Strategy::kFullShard;
      const double less = now - nbytes_with(sharded, nullptr);
      INFO(fmt::format("{}, coded {}: {} less, now {}\n{}", name_of(strategy), is_coded, less, now,
                       advice));
      CHECK(std::abs(advised_less(advice, "FsdpOptions::strategy=full_shard") - less) < 0.1 * now);
    }
  }
}

// ---- values from outside

TEST_CASE("coded: what an UnshardGuard writes becomes codes", "[fsdp]") {
  for (const int world_size : {1, 3}) {
    FsdpRun run = qlora_run(2 * world_size * 1);
    run.num_steps = 1;
    const std::string name = "blocks.0.attn.out.weight";
    std::vector<double> written, others_before, others_after;
    run.on_state = [&](const dist::TrainingState& state, dist::World& world) {
      const auto read = [&](std::vector<double>& one, std::vector<double>& other) {
        state.fsdp->for_each_full(dist::Fsdp::State::kMaster,
                                  [&](const std::string& n, const Tensor& full) {
                                    if (world.rank() != 0) return;
                                    if (n == name) one = full.to_vector();
                                    if (n == "blocks.1.attn.out.weight") other = full.to_vector();
                                  });
      };
      std::vector<double> before;
      read(before, others_before);
      {
        const dist::UnshardGuard guard(*state.fsdp, "blocks.0", dist::UnshardGuard::Access::kWrite);
        const NoGrad no_grad;
        Tensor w = state.model->parameter(name).tensor;
        w.copy_(scale(w, 2));
      }
      read(written, others_after);
      if (world.rank() != 0) return;
      // The values were those of codes: twice the scales, but for what 8 bits make of those.
      REQUIRE(written.size() == before.size());
      double largest = 0, error = 0;
      for (size_t i = 0; i < before.size(); ++i) {
        largest = std::max(largest, std::abs(before[i]));
        error = std::max(error, std::abs(written[i] - 2 * before[i]));
      }
      CHECK(error <= 0.02 * largest);
      CHECK(written != before);
    };
    run_fsdp_on_threads(world_size, run);
    CHECK(others_before == others_after);
  }
}

TEST_CASE("coded: a run goes on from a checkpoint bit by bit on another number of ranks",
          "[fsdp]") {
  FsdpRun run = qlora_run(kSharedSamples);
  run.fsdp.reproducible = true;
  run.num_steps = 4;
  set_precision(run, Precision::kBF16);
  const auto with = [](FsdpRun r, int world_size) {
    r.num_micro_batches = 8 / world_size;
    return r;
  };
  TempDir dir;
  WholeState then;
  FsdpRun saving = with(run, 2);
  save_at(saving, 2, {.dir = dir.path(), .run = "r"}, &then);
  const FsdpResult expected = run_fsdp_on_threads(2, saving);
  CHECK(then.tensors().contains("nf4/blocks.0.mlp.down.weight"));
  CHECK_FALSE(then.tensors().contains("parameters/blocks.0.mlp.down.weight"));
  const std::string checkpoint = dir / dist::step_directory_name(2);
  for (const int world_size : {1, 2, 4, 8}) {
    CAPTURE(world_size);
    FsdpRun resumed = with(run, world_size);
    WholeState state;
    resume_from(resumed, checkpoint, &state);
    const FsdpResult result = run_fsdp_on_threads(world_size, resumed);
    CHECK(state.tensors() == then.tensors());
    CHECK(result.parameters == expected.parameters);
    CHECK(result.losses == std::vector<double>(expected.losses.begin() + 2, expected.losses.end()));
  }
  // As a source of parameters it has the dequantized values, from anywhere.
  const dist::CheckpointReader reader(checkpoint);
  CHECK(reader.names().size() == expected.parameters.size());
  for (const std::string& name : reader.names()) {
    if (!then.tensors().contains("nf4/" + name)) continue;
    const std::vector<double>& all = expected.parameters.at(name);
    const int64_t numel = reader.shape_of(name).numel();
    REQUIRE(numel == std::ssize(all));
    for (const int64_t begin : {int64_t{0}, int64_t{1}, int64_t{300}, numel - 1}) {
      std::vector<float> values(static_cast<size_t>(numel - begin));
      reader.read(name, begin, numel, values.data());
      CHECK(std::equal(values.begin(), values.end(), all.begin() + begin));
    }
  }
}

// ---- errors

TEST_CASE("coded: a parameter that is trained is no code", "[fsdp]") {
  FsdpRun run;
  run.fsdp.parameters.quantize = is_block_weight;
  const std::string error = error_of([&] { run_fsdp_on_threads(2, run); });
  CHECK(error.find("FsdpOptions::parameters: blocks.0.attn.qkv.weight is quantized and trained, "
                   "expected it frozen, and adapters (LoRA) to train") != std::string::npos);
}

TEST_CASE("coded: a checkpoint of codes does not load as values, nor of another shape", "[fsdp]") {
  FsdpRun run = qlora_run(kSharedSamples);
  run.num_steps = 1;
  TempDir dir;
  FsdpRun saving = run;
  save_at(saving, 1, {.dir = dir.path(), .run = "r"});
  run_fsdp_on_threads(2, saving);
  const std::string checkpoint = dir / dist::step_directory_name(1);
  FsdpRun plain = run;
  plain.fsdp.parameters.quantize = nullptr;
  plain.num_steps = 2;
  resume_from(plain, checkpoint);
  CHECK(error_of([&] {
          run_fsdp_on_threads(2, plain);
        }).find("missing parameters/blocks.0.attn.qkv.weight") != std::string::npos);
}

/// A frozen layer that is codes, and one that is trained.
struct TwoLayers : nn::Module {
  nn::Child<nn::Linear> frozen, last{this, "last", 8, 8};
  TwoLayers(int64_t num_inputs, int64_t num_outputs) {
    frozen.emplace(this, "frozen", num_inputs, num_outputs, nn::LinearOptions{.bias = false});
    frozen->parameter("weight").tensor.set_requires_grad(false);
  }
};

TEST_CASE("coded: a store of values is quantized as it is read, as values are that were there",
          "[fsdp]") {
  TempDir dir;
  dist::FsdpOptions plain;
  plain.wrap = dist::wrap::whole_model();
  dist::FsdpOptions options = plain;
  options.parameters.quantize = [](const nn::NamedParameter& p) {
    return p.name == "frozen.weight";
  };
  // More than a piece.
  constexpr int64_t kInputs = 1030, kOutputs = 1100;
  static_assert(kInputs * kOutputs > dist::Coded::kPieceNumel);
  const auto make = [&] {
    auto net = std::make_unique<TwoLayers>(kInputs, kOutputs);
    net->initialize(1);
    return net;
  };
  WholeState expected;
  dist::run_ranks(1, [&](dist::World& world) {
    const auto net = make(), other = make();
    const auto fsdp = dist::fully_shard(*net, world, plain);
    dist::CheckpointWriter writer(world, {net.get(), fsdp.get(), nullptr, nullptr},
                                  {.dir = dir.path(), .run = "r"});
    writer.begin(progress_of(1));
    CHECK(writer.finish()->error.empty());
    const auto coded = dist::fully_shard(*other, world, options);
    expected.add({other.get(), coded.get(), nullptr, nullptr});
  });
  for (const int world_size : {1, 2, 3}) {
    CAPTURE(world_size);
    WholeState state;
    dist::run_ranks(world_size, [&](dist::World& world) {
      std::unique_ptr<TwoLayers> net;
      {
        const nn::DeferredInit deferred;
        net = std::make_unique<TwoLayers>(kInputs, kOutputs);
      }
      const auto fsdp = dist::fully_shard(*net, world, options);
      const dist::CheckpointReader reader(dir / dist::step_directory_name(1));
      dist::load_parameters(reader, *fsdp, *net);
      state.add({net.get(), fsdp.get(), nullptr, nullptr});
    });
    CHECK(state.tensors() == expected.tensors());
  }
}

TEST_CASE("coded: a checkpoint says which codes are of another shape or not complete", "[fsdp]") {
  TempDir dir;
  dist::FsdpOptions options;
  options.wrap = dist::wrap::whole_model();
  options.parameters.quantize = [](const nn::NamedParameter& p) {
    return p.name == "frozen.weight";
  };
  const auto with = [&](int64_t num_inputs, int64_t num_outputs, const auto& f) {
    dist::run_ranks(1, [&](dist::World& world) {
      TwoLayers net(num_inputs, num_outputs);
      net.initialize(1);
      const auto fsdp = dist::fully_shard(net, world, options);
      f(dist::TrainingState{&net, fsdp.get(), nullptr, nullptr}, world);
    });
  };
  with(24, 48, [&](const dist::TrainingState& state, dist::World& world) {
    dist::CheckpointWriter writer(world, state, {.dir = dir.path(), .run = "r"});
    writer.begin(progress_of(1));
    CHECK(writer.finish()->error.empty());
  });
  const std::string checkpoint = dir / dist::step_directory_name(1);
  CHECK(dist::CheckpointReader(checkpoint).shape_of("frozen.weight") == Shape{48, 24});
  with(48, 24, [&](const dist::TrainingState& state, dist::World&) {
    const dist::CheckpointReader reader(checkpoint);
    CHECK(error_of([&] {
            dist::check_tensors(reader, state);
          }).find("frozen.weight is [48, 24], expected [24, 48]") != std::string::npos);
  });
  const dist::Manifest whole = dist::CheckpointReader(checkpoint).manifest();
  const auto error_after =
      [&](const std::function<void(std::vector<dist::TensorRecord>&)>& change) {
        dist::Manifest manifest = whole;
        change(manifest.tensors);
        write_file_atomically(checkpoint + "/" + dist::kManifestName, dist::to_json(manifest));
        return error_of([&] { dist::CheckpointReader(checkpoint).shape_of("frozen.weight"); });
      };
  const auto at = [](std::vector<dist::TensorRecord>& tensors, std::string_view name) {
    return std::find_if(tensors.begin(), tensors.end(),
                        [&](const dist::TensorRecord& t) { return t.name == name; });
  };
  using Tensors = std::vector<dist::TensorRecord>;
  CHECK(error_after([&](Tensors& t) {
          t.erase(at(t, "nf4_scales/frozen.weight"));
        }).find(checkpoint + ": tensor nf4_scales/frozen.weight is missing, expected f32 [2]") ==
        0);
  CHECK(error_after([&](Tensors& t) {
          t.erase(at(t, "nf4_shape/frozen.weight"));
        }).find(checkpoint + ": tensor nf4_shape/frozen.weight is missing, expected i64 [1]") == 0);
  CHECK(error_after([&](Tensors& t) {
          auto& codes = *at(t, "nf4/frozen.weight");
          codes.shape = {132}, codes.slices = {codes.slices[0]}, codes.slices[0].end = 132;
        }).find(checkpoint + ": tensor nf4/frozen.weight is u8 [132], expected u8 [660]") == 0);
}

}  // namespace
}  // namespace tessera::testing
