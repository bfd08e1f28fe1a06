// Adapters of peft (test/golden/lora, made by make_lora.py) in and out, and in training.

#include "dist/checkpoint/peft.h"

#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>

#include "core/autograd.h"
#include "core/runtime/allocator.h"
#include "dist/checkpoint/huggingface.h"
#include "dist/checkpoint/state.h"
#include "dist/comm/local.h"
#include "dist/fsdp/fully_shard.h"
#include "nn/gpt2/gpt2.h"
#include "nn/linear.h"
#include "optim/adamw.h"
#include "test/dist/fsdp/combos.h"
#include "test/dist/fsdp/observer.h"
#include "test/golden/golden.h"
#include "test/temp_dir.h"
#include "test/testing.h"

namespace tessera::dist {
namespace {

using namespace testing;
using nlohmann::json;
namespace fs = std::filesystem;

constexpr double kTolerance = 1e-5;  // of logits, f32
const char* const kFamilies[] = {"qwen3", "gpt2", "bloom", "bert", "llama3", "qwen2"};

std::string base_of(const std::string& family) {
  return golden_dir() + "/hf/" + family;
}
std::string adapter_of(const std::string& family) {
  return golden_dir() + "/lora/" + family;
}

/// Full values by name.
class Values final : public ParameterSource {
 public:
  std::map<std::string, Tensor, std::less<>> all;

  const std::string& path() const override { return path_; }
  std::vector<std::string> names() const override {
    std::vector<std::string> names;
    for (const auto& entry : all) names.push_back(entry.first);
    return names;
  }
  Shape shape_of(std::string_view name) const override { return all.find(name)->second.shape(); }

 private:
  void do_read(std::string_view name, int64_t begin, int64_t end, float* dst) const override {
    const std::vector<float> values = all.find(name)->second.to_vector_of<float>();
    std::copy(values.begin() + begin, values.begin() + end, dst);
  }
  std::string path_ = "values";
};

/// A base model with adapters under FSDP.
struct Adapted {
  Adapted(const std::string& base, const std::string& adapter, World& world,
          const FsdpOptions& options = {}) {
    const HfReader reader(base);
    PeftReader adapters(adapter);
    {
      const nn::DeferredInit deferred;
      model = reader.config().make_model();
      nn::add_lora(*model, adapters.options());
    }
    adapters.attach(*model);
    fsdp = fully_shard(*model, world, options);
    load_parameters(reader, *fsdp, *model,
                    [](const nn::NamedParameter& p) { return !nn::is_lora(p); });
    const std::vector<std::string> names = adapters.names();
    load_parameters(adapters, *fsdp, *model, [&](const nn::NamedParameter& p) {
      return std::find(names.begin(), names.end(), p.name) != names.end();
    });
    model->reset_buffers();
  }
  Values values() {
    Values values;
    fsdp->for_each_full(Fsdp::State::kMaster, [&](const std::string& name, const Tensor& full) {
      values.all.emplace(name, full.clone());
    });
    return values;
  }

  std::unique_ptr<nn::LanguageModel> model;
  std::unique_ptr<Fsdp> fsdp;
};

std::vector<double> logits_of(nn::LanguageModel& model, const std::string& family) {
  const json golden = json::parse(read_file(base_of(family) + "/logits.json"));
  nn::ForwardOptions options;
  if (golden.contains("token_types")) options.token_types = rows_of(golden["token_types"]);
  const NoGrad no_grad;
  return model.logits(rows_of(golden["ids"]), options).to_vector();
}

TEST_CASE("peft: adapters of every family give peft's logits, also merged, on any number of ranks",
          "[peft]") {
  for (const std::string family : kFamilies) {
    const std::vector<double> expected =
        json::parse(read_file(adapter_of(family) + "/logits.json"))["logits"];
    for (const int world_size : {1, 3}) {
      INFO(family << " on " << world_size);
      run_ranks(world_size, [&](World& world) {
        Adapted adapted(base_of(family), adapter_of(family), world);
        check_close(logits_of(*adapted.model, family), expected, kTolerance, family);
        adapted.fsdp->end_forward();
        const Values values = adapted.values();
        const MergedSource merged(values, *adapted.model);
        const auto plain = HfReader(base_of(family)).config().make_model();
        CHECK(merged.names().size() == plain->named_parameters().size());
        for (const nn::NamedParameter& p : plain->named_parameters()) {
          const NoGrad no_grad;
          const Shape shape = p.parameter->tensor.shape();
          std::vector<float> all(static_cast<size_t>(shape.numel()));
          merged.read(p.name, 0, shape.numel(), all.data());
          p.parameter->tensor.copy_(from_values(std::span<const float>(all), shape));
          // Any part is a part of the whole.
          const int64_t begin = shape.numel() / 3, end = shape.numel() - shape.numel() / 5;
          std::vector<float> part(static_cast<size_t>(end - begin));
          merged.read(p.name, begin, end, part.data());
          CHECK(std::equal(part.begin(), part.end(), all.begin() + begin));
        }
        plain->reset_buffers();
        check_close(logits_of(*plain, family), expected, kTolerance, family);
      });
    }
  }
}

TEST_CASE("peft: what is written again is what peft wrote", "[peft]") {
  const TempDir temp;
  for (const std::string family : kFamilies) {
    INFO(family);
    const std::string dir = temp.path() + "/" + family;
    run_ranks(1, [&](World& world) {
      Adapted adapted(base_of(family), adapter_of(family), world);
      const nn::LoraOptions options = PeftReader(adapter_of(family)).options();
      const Values values = adapted.values();
      write_peft(dir, *adapted.model, values, {.lora = options, .base = "somewhere"});
    });
    const SafetensorsFile ours(dir + "/adapter_model.safetensors"),
        theirs(adapter_of(family) + "/adapter_model.safetensors");
    CHECK(ours.entries().size() == theirs.entries().size());
    for (const SafetensorsEntry& entry : theirs.entries()) {
      const SafetensorsEntry& own = ours.find(entry.name);
      REQUIRE(own.shape == entry.shape);
      CHECK(std::memcmp(ours.data(own), theirs.data(entry), static_cast<size_t>(own.nbytes())) ==
            0);
    }
    const json config = json::parse(read_file(dir + "/adapter_config.json")),
               golden = json::parse(read_file(adapter_of(family) + "/adapter_config.json"));
    CHECK(config["base_model_name_or_path"] == "somewhere");
    for (const char* key :
         {"bias", "fan_in_fan_out", "inference_mode", "lora_alpha", "lora_dropout",
          "modules_to_save", "peft_type", "r", "task_type", "use_dora", "use_rslora"}) {
      // A tied head is there under both names, of which peft has one.
      if (family == "qwen2" && key == std::string("modules_to_save")) continue;
      INFO(key);
      CHECK(config[key] == golden[key]);
    }
    // Its names mean the same layers.
    const nn::DeferredInit deferred;
    const auto model = HfReader(base_of(family)).config().make_model();
    PeftReader again(dir);
    nn::add_lora(*model, again.options());
    again.attach(*model);
  }
  // Last components alone where they mean these layers and no others.
  const auto targets = [&](const std::string& family) {
    return json::parse(
        read_file(temp.path() + "/" + family + "/adapter_config.json"))["target_modules"];
  };
  CHECK(targets("qwen3") ==
        json{"down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"});
  CHECK(targets("llama3") ==
        json{"model.layers.1.mlp.down_proj", "model.layers.1.self_attn.k_proj"});
  CHECK(targets("gpt2") == json{"c_attn", "c_proj"});
  const json tied = json::parse(read_file(temp.path() + "/qwen2/adapter_config.json"));
  CHECK(tied["ensure_weight_tying"] == true);
  CHECK(tied["modules_to_save"] == json{"lm_head", "model.embed_tokens"});
}

/// 30 steps on 1, 2, 3 and 4 ranks, on the rows of lora/sft, have the losses and norms of `golden`.
void check_steps(const json& golden, const std::string& base, const std::string& adapter,
                 const FsdpOptions& options) {
  const json rows = json::parse(read_file(adapter_of("sft") + "/run.json"));
  const int64_t batch = rows["batch"], T = rows["num_tokens"].get<int64_t>() - 1;
  const std::vector<int32_t> ids = rows["ids"], first = rows["first"];
  const std::vector<double> losses = golden["loss"], norms = golden["grad_norm"];
  REQUIRE(losses.size() == 30);
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(world_size, [&](World& world) {
      Adapted adapted(base, adapter, world, options);
      optim::AdamW adamw(adapted.fsdp->shards(), {.weight_decay = 0});
      const int64_t own_rows = batch / world_size;
      for (size_t step = 0; step < losses.size(); ++step) {
        std::vector<int32_t> inputs, targets;
        int64_t num_valid = 0;
        for (int64_t i = 0; i < batch; ++i) {
          const int64_t row = static_cast<int64_t>(step) * batch + i;
          const bool is_own = i / own_rows == world.rank();
          for (int64_t t = 0; t < T; ++t) {
            const bool counts = t + 1 >= first[static_cast<size_t>(row)];
            num_valid += counts;
            if (!is_own) continue;
            const auto at = static_cast<size_t>(row * (T + 1) + t);
            inputs.push_back(ids[at]);
            targets.push_back(counts ? ids[at + 1] : -100);
          }
        }
        const Tensor scale = full({}, 1.0 / static_cast<double>(num_valid));
        const LossSum loss = adapted.model->loss(from_values(inputs, {own_rows, T}),
                                                 from_values(targets, {own_rows, T}));
        backward(loss.sum, scale);
        const Tensor sum = adapted.fsdp->sum_micro_batches({{loss.sum.detach()}});
        const ClippedNorm clip = adapted.fsdp->clip_grad_norm(rows["clip"]);
        adamw.step(golden["lr"], clip.factor, clip.found_inf);
        adapted.fsdp->end_step();
        INFO("step " << step << " on " << world_size << " ranks");
        const double mean = sum.item() / static_cast<double>(num_valid);
        CHECK(std::fabs(mean / losses[step] - 1) < 1e-5);
        CHECK(std::fabs(clip.norm.item() / norms[step] - 1) < 1e-4);
      }
    });
  }
}

TEST_CASE("peft: 30 steps on 1, 2, 3 and 4 ranks have the losses of trl's SFTTrainer", "[peft]") {
  check_steps(json::parse(read_file(adapter_of("sft") + "/run.json")), base_of("qwen3"),
              adapter_of("sft"), {});
}

TEST_CASE("peft: 30 steps beside NF4 weights have the losses of trl on layers of bitsandbytes",
          "[peft]") {
  FsdpOptions options;
  options.parameters.quantize = [](const nn::NamedParameter& p) {
    return p.name.starts_with("blocks.") && dynamic_cast<nn::Linear*>(p.owner) != nullptr;
  };
  check_steps(json::parse(read_file(adapter_of("qlora") + "/run.json")),
              adapter_of("qlora") + "/base", adapter_of("qlora"), options);
}

// ---- under FSDP

FsdpRun lora_run(Precision precision) {
  FsdpRun run;
  run.model.tied = true;
  run.num_steps = 2;
  run.samples_per_step = run.num_micro_batches = 8;
  run.fsdp.reproducible = true;
  set_precision(run, precision);
  run.prepare = [](nn::LanguageModel& model) {
    const nn::DeferredInit deferred;
    nn::add_lora(model, {.targets = "all-linear",
                         .rank = 3,
                         .alpha = 6,
                         .dropout = 0.2,
                         .modules_to_save = "norm1"});
  };
  return run;
}

TEST_CASE("lora: the same bits under every strategy, recompute, offload and number of ranks",
          "[peft]") {
  const std::pair<Precision, int64_t> cases[] = {
      {Precision::kF32, 0}, {Precision::kMixed, 0}, {Precision::kMixed, 7}};
  for (const auto& [precision, mlp_tile] : cases) {
    FsdpRun run = lora_run(precision);
    run.recompute.mlp_tile = mlp_tile;
    run.fsdp.strategy = Strategy::kNoShard;
    const FsdpResult expected = run_fsdp_on_threads(1, run);
    CHECK(expected.gradients.count("blocks.0.attn.qkv.lora.B") == 1);
    CHECK(expected.gradients.count("blocks.0.norm1.weight") == 1);
    CHECK(expected.gradients.count("blocks.0.attn.qkv.weight") == 0);
    int variant = 0;
    for (const Strategy strategy : kAllStrategies) {
      const int world = ++variant % 2 == 0 ? 4 : 2;
      run.fsdp.strategy = strategy;
      run.fsdp.shard_size = is_hybrid(strategy) ? world / 2 : 0;
      run.fsdp.sync_every_micro_batch = GradSync::kEveryMicroBatch;
      if (strategy == Strategy::kShardOptim) continue;  // keeps whole gradients: not reproducible
      run.num_micro_batches = 8 / world;
      using Kind = nn::RecomputePolicy::Kind;
      run.recompute.kind = variant % 3 == 0   ? Kind::kNone
                           : variant % 3 == 1 ? Kind::kFull
                                              : Kind::kSelective;
      run.recompute.offload = run.recompute.kind == Kind::kFull;
      run.fsdp.offload = variant == 1 ? Offload::kParamsAndOptimizer : Offload::kNone;
      run.fsdp.offload_window = 256;
      check_same(run_fsdp_on_threads(world, run), expected,
                 fmt::format("{} on {} ranks, tile {}", name_of(strategy), world, mlp_tile));
    }
  }
}

TEST_CASE("lora: shard_optim has the bits of no_shard at one number of ranks", "[peft]") {
  FsdpRun run = lora_run(Precision::kF32);
  run.fsdp.reproducible = false;
  run.num_micro_batches = 2;
  run.fsdp.sync_every_micro_batch = GradSync::kLast;
  run.fsdp.strategy = Strategy::kNoShard;
  const FsdpResult expected = run_fsdp_on_threads(2, run);
  run.fsdp.strategy = Strategy::kShardOptim;
  check_same(run_fsdp_on_threads(2, run), expected, "shard_optim");
}

TEST_CASE("lora: of the base no gradient, no optimizer state and no byte of a reduce", "[peft]") {
  constexpr int kWorld = 2;
  const auto padded = [](int64_t numel, int64_t to) { return (numel + to - 1) / to * to; };
  FsdpRun run = lora_run(Precision::kF32);
  run.fsdp.reproducible = false;
  run.num_micro_batches = 1;
  run.prepare = [](nn::LanguageModel& model) {
    const nn::DeferredInit deferred;
    nn::add_lora(model, {.targets = "q_proj,v_proj,down_proj", .rank = 3});
  };
  std::shared_ptr<StreamTap> tap;
  int64_t nbytes_reduced = 0, nbytes_gradients = -1, nbytes_states = -1;
  run.on_ready = [&](Fsdp& fsdp, World& world) {
    if (world.rank() != 0) return;
    const AllocatorStats stats = Context::current()->allocator()->stats();
    const auto of = [&](MemoryClass c) { return stats.allocated_by_class[static_cast<size_t>(c)]; };
    nbytes_gradients = of(MemoryClass::kGradients);
    nbytes_states = of(MemoryClass::kOptimizer);
    tap = StreamTap::install(fsdp, {.records = true});
  };
  run.on_step = [&](int step, Fsdp&, World& world) {
    if (world.rank() != 0) return;
    for (const TaskRecord& task : tap->take()) {
      if (step == 1 && task.name == "reduce_scatter") nbytes_reduced += task.bytes_read;
    }
  };
  run_fsdp_on_threads(kWorld, run);
  // Three blocks: A [2 x 3, 24] and B [24 + 12, 3] of q and v, A [3, 40] and B [24, 3] of down.
  int64_t numel = 0;
  for (const int64_t each : {2 * 3 * 24, (24 + 12) * 3, 3 * 40, 24 * 3}) numel += padded(each, 256);
  const int64_t adapters = 3 * padded(numel, 256 * kWorld);
  CHECK(nbytes_reduced == adapters * 4);
  CHECK(nbytes_gradients == adapters * 4 / kWorld);
  // Two moments, and small tables of each unit's shard; the base would have 50 times as much.
  CHECK(nbytes_states >= 2 * adapters * 4 / kWorld);
  CHECK(nbytes_states < 2 * adapters * 4 / kWorld + 3 * 2048);
}

// ---- what is wrong

TEST_CASE("peft: adapters of another base are named", "[peft]") {
  const auto error = [](const std::string& base, const std::string& adapter) {
    const nn::DeferredInit deferred;
    const auto model = HfReader(base_of(base)).config().make_model();
    PeftReader reader(adapter);
    return error_of([&] {
      nn::add_lora(*model, reader.options());
      reader.attach(*model);
    });
  };
  CHECK(
      error("qwen3", adapter_of("gpt2")) ==
      "LoraOptions::targets: no linear layer is called \"c_attn\", expected all-linear or some of "
      "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj");
  // Heads of another width.
  const std::string shapes = error("llama3", adapter_of("qwen3"));
  CHECK(shapes.find(adapter_of("qwen3") +
                    ": tensors are not those of adapter_config.json for this model: ") == 0);
  CHECK(
      shapes.find("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight is f32 [32, 3], "
                  "expected f32, bf16 or f16 [16, 3]") != std::string::npos);

  const TempDir temp;
  const std::string dir = temp.path() + "/adapter";
  fs::copy(adapter_of("bloom"), dir);
  const std::string config = read_file(dir + "/adapter_config.json");
  const auto with = [&](const std::string& key, const json& value) {
    json object = json::parse(config);
    object[key] = value;
    std::ofstream(dir + "/adapter_config.json") << object.dump();
    std::string text = error_of([&] {
      const nn::DeferredInit deferred;
      const auto model = HfReader(base_of("bloom")).config().make_model();
      PeftReader reader(dir);
      nn::add_lora(*model, reader.options());
      reader.attach(*model);
    });
    const std::string prefix = dir + "/adapter_config.json: ";
    return text.starts_with(prefix) ? text.substr(prefix.size()) : text;
  };
  CHECK(with("peft_type", "IA3") == "peft_type is \"IA3\", expected \"LORA\"");
  CHECK(with("r", 0).find("r is 0, expected") == 0);
  CHECK(with("lora_alpha", "x").find("lora_alpha is \"x\", expected") == 0);
  CHECK(with("lora_dropout", 1) == "lora_dropout is 1, expected a number in [0, 1)");
  CHECK(with("target_modules", nullptr) ==
        "target_modules is null, expected a list of names, or a pattern");
  CHECK(with("target_modules", {1}) == "target_modules is [1], expected a list of names");
  CHECK(with("bias", "all").find("bias is \"all\", expected") == 0);
  CHECK(with("use_dora", true).find("use_dora is true, expected") == 0);
  CHECK(with("rank_pattern", {{"c_attn", 3}}).find("rank_pattern is {\"c_attn\":3}, expected") ==
        0);
  CHECK(with("init_lora_weights", "pissa").find("init_lora_weights is \"pissa\", expected") == 0);
  CHECK(with("use_magic", true) == "key use_magic = true is not supported for adapters");
  CHECK(with("r", 3).find("lora_A.weight is f32 [2, 24], expected f32, bf16 or f16 [3, 24]") !=
        std::string::npos);
  CHECK(with("target_modules", {"query_key_value", "dense"})
            .find("missing base_model.model.transformer.h.0.self_attention.dense.lora_A.weight") !=
        std::string::npos);
  CHECK(
      with("modules_to_save", {"ln_f"}).find("missing base_model.model.transformer.ln_f.weight") !=
      std::string::npos);
  fs::remove(dir + "/adapter_model.safetensors");
  CHECK(with("r", 2).find("adapter_model.safetensors: No such file") != std::string::npos);
}

}  // namespace
}  // namespace tessera::dist
