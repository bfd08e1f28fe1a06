// Models of transformers (test/golden/hf, made by make_hf.py) in and out.

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/autograd.h"
#include "dist/checkpoint/huggingface.h"
#include "dist/comm/local.h"
#include "test/golden/golden.h"
#include "test/temp_dir.h"
#include "test/testing.h"

namespace tessera::dist {
namespace {

using testing::check_close;
using testing::error_of;
using testing::read_file;
using testing::TempDir;

namespace fs = std::filesystem;

constexpr double kTolerance = 1e-5;  // of logits, f32
const char* const kFamilies[] = {"gpt2", "llama2", "llama3", "mistral", "qwen2", "qwen3", "bloom"};

std::string folder(const std::string& family) {
  return testing::golden_dir() + "/hf/" + family;
}

struct Logits {
  Tensor ids_BT;
  std::vector<double> values;
};

Logits golden_logits(const std::string& family) {
  const auto object = nlohmann::json::parse(read_file(folder(family) + "/logits.json"));
  std::vector<int32_t> ids;
  for (const auto& row : object["ids"]) {
    for (const auto& id : row) ids.push_back(id);
  }
  const auto num_rows = static_cast<int64_t>(object["ids"].size());
  return {from_values(std::span<const int32_t>(ids),
                      {num_rows, static_cast<int64_t>(ids.size()) / num_rows}),
          object["logits"]};
}

/// A model under FSDP with the values of a directory.
struct Loaded {
  Loaded(const std::string& dir, World& world, const FsdpOptions& options = {}) {
    const HfReader reader(dir);
    {
      const nn::DeferredInit deferred;
      model = make_model(reader.config());
    }
    fsdp = fully_shard(*model, world, options);
    load_hf(reader, *fsdp, *model);
    model->reset_buffers();
  }
  std::vector<double> logits(const Tensor& ids_BT) {
    const NoGrad no_grad;
    std::vector<double> values = model->logits(ids_BT).to_vector();
    fsdp->end_forward();
    return values;
  }
  std::map<std::string, std::vector<double>> parameters() {
    std::map<std::string, std::vector<double>> all;
    fsdp->for_each_full(Fsdp::State::kMaster, [&](const std::string& name, const Tensor& full) {
      all.emplace(name, full.to_vector());
    });
    return all;
  }

  std::unique_ptr<nn::LanguageModel> model;
  std::unique_ptr<Fsdp> fsdp;
};

/// A copy of a family's files to damage.
std::string copy_of(const std::string& family, const TempDir& temp) {
  const std::string dir = temp.path() + "/" + family;
  fs::copy(folder(family), dir);
  return dir;
}

void replace_in(const std::string& path, const std::string& from, const std::string& to) {
  std::string text = read_file(path);
  const size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  text.replace(at, from.size(), to);
  std::ofstream(path, std::ios::binary) << text;
}

TEST_CASE("huggingface: every family gives transformers' logits, on any number of ranks",
          "[huggingface]") {
  for (const char* family : kFamilies) {
    for (const int world_size : {1, 3}) {
      INFO(family << " on " << world_size);
      run_ranks(world_size, [&](World& world) {
        Loaded loaded(folder(family), world);
        const Logits golden = golden_logits(family);
        check_close(loaded.logits(golden.ids_BT), golden.values, kTolerance, family);
      });
    }
  }
}

TEST_CASE("huggingface: what is exported is imported bit by bit, under another sharding",
          "[huggingface]") {
  for (const char* family : kFamilies) {
    INFO(family);
    const TempDir temp;
    const std::string dir = temp.path() + "/out";
    std::map<std::string, std::vector<double>> before, after;
    run_ranks(2, [&](World& world) {
      Loaded loaded(folder(family), world);
      export_hf(dir, *loaded.model, *loaded.fsdp, world, {.max_file_nbytes = 4096});
      auto parameters = loaded.parameters();
      if (world.rank() == 0) before = std::move(parameters);
    });
    CHECK(fs::exists(dir + "/model.safetensors.index.json"));  // a small file limit
    run_ranks(3, [&](World& world) {
      FsdpOptions options;
      options.strategy = Strategy::kShardGradOp;
      options.wrap = wrap::whole_model();
      Loaded loaded(dir, world, options);
      auto parameters = loaded.parameters();
      if (world.rank() == 0) after = std::move(parameters);
    });
    CHECK(before == after);
    CHECK(before.size() == hf_parameters(HfReader(dir).config()).size());
  }
}

TEST_CASE("huggingface: an export has the names and keys of the original", "[huggingface]") {
  for (const char* family : kFamilies) {
    INFO(family);
    const TempDir temp;
    const HfReader original(folder(family));
    HfWriter writer(temp.path(), original.config(), {.token_ids = original.token_ids()});
    for (const HfParameter& p : original.parameters()) {
      std::vector<float> values(static_cast<size_t>(p.shape.numel()));
      original.read(p.name, 0, p.shape.numel(), values.data());
      writer.write(p.name, values.data(), p.shape.numel());
    }
    writer.finish();
    // Every tensor has the bytes of the original, whatever files they are in.
    std::map<std::string, std::vector<float>> ours, theirs;
    const auto add = [](const std::string& path, auto& all) {
      const SafetensorsFile file(path);
      for (const SafetensorsEntry& e : file.entries()) {
        std::vector<float> values;
        for (int64_t i = 0; i < e.shape.numel(); ++i) {
          float value = 0;
          uint16_t half = 0;
          const char* data = static_cast<const char*>(file.data(e));
          if (e.dtype == kF32) {
            std::memcpy(&value, data + 4 * i, 4);
          } else {
            std::memcpy(&half, data + 2 * i, 2);
            value = std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
          }
          values.push_back(value);
        }
        all.emplace(e.name, std::move(values));
      }
    };
    add(temp.path() + "/model.safetensors", ours);
    for (const auto& entry : fs::directory_iterator(folder(family))) {
      if (entry.path().extension() == ".safetensors") add(entry.path().string(), theirs);
    }
    CHECK(ours == theirs);
    const auto mine = nlohmann::json::parse(read_file(temp.path() + "/config.json"));
    const auto golden = nlohmann::json::parse(read_file(folder(family) + "/config.json"));
    CHECK(mine["vocab_size"] == golden["vocab_size"]);
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
      CAPTURE(key);
      CHECK(mine.contains(key) == !golden[key].is_null());
      if (mine.contains(key)) CHECK(mine[key] == golden[key]);
    }
    // Mistral without a window is a Llama by another name.
    if (std::string(family) != "mistral") {
      CHECK(mine["architectures"] == golden["architectures"]);
      CHECK(mine["model_type"] == golden["model_type"]);
    }
  }
}

// For check_hf_export.py, which reads the result with transformers.
TEST_CASE("huggingface: exports of all families into a folder", "[.hf-export]") {
  const char* const out = std::getenv("TESSERA_HF_EXPORT");
  REQUIRE(out != nullptr);
  for (const char* family : kFamilies) {
    run_ranks(2, [&](World& world) {
      Loaded loaded(folder(family), world);
      export_hf(std::string(out) + "/" + family, *loaded.model, *loaded.fsdp, world,
                {.token_ids = HfReader(folder(family)).token_ids()});
    });
  }
}

TEST_CASE("huggingface: a rank holds its shards and a buffer, not the model", "[huggingface]") {
  const TempDir temp;
  nn::LlamaConfig config;
  config.vocab_size = 512;
  config.num_layers = 8;
  config.num_heads = config.num_kv_heads = 4;
  config.width = 128, config.head_width = 32, config.ffn_width = 384;
  config.context_length = 32;
  {
    HfWriter writer(temp.path(), config);
    for (const HfParameter& p : writer.parameters()) {
      const std::vector<float> values(static_cast<size_t>(p.shape.numel()), 0.5f);
      writer.write(p.name, values.data(), p.shape.numel());
    }
    writer.finish();
  }
  const auto model_nbytes = static_cast<int64_t>(fs::file_size(temp.path() + "/model.safetensors"));
  run_ranks(8, [&](World& world) {
    Context::current()->allocator()->reset_peak();
    const int64_t host_before = Context::current()->host_allocator()->stats().allocated;
    Loaded loaded(temp.path(), world);
    const AllocatorStats stats = Context::current()->allocator()->stats();
    const int64_t host = Context::current()->host_allocator()->stats().allocated - host_before;
    // Masters, gradients, and rings of the largest units: well under the model's own size.
    if (stats.peak_allocated >= model_nbytes * 3 / 4 || host >= model_nbytes / 4) {
      throw Error(fmt::format("{} bytes on the device and {} on the host for a model of {}",
                              stats.peak_allocated, host, model_nbytes));
    }
  });
}

TEST_CASE("huggingface: configs that are not supported are named", "[huggingface]") {
  const auto error = [](const std::string& text) {
    return error_of([&] { parse_hf_config("config.json", text); });
  };
  CHECK(error("[]").starts_with("config.json: "));
  CHECK(error("{}") ==
        "config.json: architecture missing, expected one of BloomForCausalLM, "
        "GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
        "Qwen3ForCausalLM");
  CHECK(error(R"({"architectures": ["GemmaForCausalLM"]})")
            .starts_with("config.json: architecture GemmaForCausalLM, expected one of"));
  const std::string gpt2 = R"("model_type": "gpt2", "vocab_size": 8, "n_positions": 4, "n_embd": 4,
                              "n_layer": 1)";
  CHECK(error("{" + gpt2 + "}") ==
        "config.json: n_head is missing, expected an integer in [1, 2147483647]");
  CHECK(error("{" + gpt2 + R"(, "n_head": 0})") ==
        "config.json: n_head is 0, expected an integer in [1, 2147483647]");
  CHECK(error("{" + gpt2 + R"(, "n_head": "2"})") ==
        "config.json: n_head is \"2\", expected an integer in [1, 2147483647]");
  CHECK(
      error("{" + gpt2 + R"(, "n_head": 2, "activation_function": "relu"})") ==
      "config.json: activation_function is \"relu\", expected gelu_new, gelu_pytorch_tanh or gelu");
  CHECK(error("{" + gpt2 + R"(, "n_head": 2, "scale_attn_weights": false})") ==
        "config.json: scale_attn_weights is false, expected true (nothing else is supported)");
  CHECK(error("{" + gpt2 + R"(, "n_head": 2, "frobnicate": 3})") ==
        "config.json: key frobnicate = 3 is not supported for GPT2LMHeadModel");
  CHECK(error("{" + gpt2 + R"(, "n_head": 2, "layer_norm_epsilon": -1})") ==
        "config.json: layer_norm_epsilon is -1, expected a positive number");
  CHECK(error("{" + gpt2 + R"(, "n_head": 2, "tie_word_embeddings": 1})") ==
        "config.json: tie_word_embeddings is 1, expected true or false");
  CHECK_NOTHROW(
      parse_hf_config("config.json", "{" + gpt2 + R"(, "n_head": 2, "new_thing": null})"));
  const std::string llama = R"("model_type": "llama", "vocab_size": 8, "hidden_size": 8,
      "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8)";
  CHECK(error("{" + llama + R"(, "attention_bias": true})") ==
        "config.json: attention_bias is true, expected false (nothing else is supported)");
  CHECK(error("{" + llama + R"(, "hidden_act": 5})")
            .starts_with("config.json: hidden_act is 5, expected \"silu\""));
  CHECK(error("{" + llama + R"(, "rope_scaling": {"type": "yarn", "factor": 2.0}})") ==
        "config.json: rope scaling: rope_type is missing, expected default, linear or llama3");
  CHECK(error("{" + llama + R"(, "rope_parameters": {"rope_type": "yarn"}})") ==
        "config.json: rope scaling: rope_type is \"yarn\", expected default, linear or llama3");
}

TEST_CASE("huggingface: ids of begin, end and padding are a number, several or none",
          "[huggingface]") {
  const HfTokenIds ids = parse_hf_token_ids("config.json", R"({"bos_token_id": 128000,
      "eos_token_id": [128001, 128008], "pad_token_id": -1})");
  CHECK(ids.bos == std::vector<int64_t>{128000});
  CHECK(ids.eos == std::vector<int64_t>{128001, 128008});
  CHECK(ids.pad.empty());
  const auto json = nlohmann::json::parse(hf_config_json(nn::LlamaConfig{}, kF32, ids));
  CHECK(json["bos_token_id"] == 128000);
  CHECK(json["eos_token_id"] == std::vector<int>{128001, 128008});
  CHECK_FALSE(json.contains("pad_token_id"));
  const auto error = [](const std::string& value) {
    return error_of(
        [&] { parse_hf_token_ids("config.json", R"({"eos_token_id": )" + value + "}"); });
  };
  for (const std::string bad : {"\"</s>\"", "1.5", "[1,\"2\"]", "-2", "4294967296", "{}"}) {
    CHECK(error(bad) == "config.json: eos_token_id is " + bad +
                            ", expected an integer in [0, 2147483647], or several");
  }
}

TEST_CASE("huggingface: a sliding window shorter than the context limits it", "[huggingface]") {
  const HfModelConfig config = parse_hf_config("config.json", R"({"model_type": "mistral",
      "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
      "intermediate_size": 8, "max_position_embeddings": 64, "sliding_window": 16})");
  CHECK(std::get<nn::LlamaConfig>(config).context_length == 16);
}

TEST_CASE("huggingface: models that transformers has no name for are not exported",
          "[huggingface]") {
  nn::LlamaConfig both;
  both.qk_norm = both.qkv_bias = true;
  CHECK(error_of([&] {
          hf_config_json(both, kF32);
        }).starts_with("export: qk_norm and qkv_bias together"));
  nn::LlamaConfig partial;
  partial.rope.interleaved = true;
  CHECK(error_of([&] {
          hf_config_json(partial, kF32);
        }).starts_with("export: interleaved or partial rotary positions"));
  nn::LlamaConfig wide;
  wide.qkv_bias = true, wide.head_width = 7;
  CHECK(error_of([&] { hf_config_json(wide, kF32); }).starts_with("export: head width 7"));
  nn::Gpt2Config bare;
  bare.bias = false;
  CHECK(error_of([&] {
          hf_config_json(bare, kF32);
        }).starts_with("export: transformers' GPT-2 always has biases"));
  const TempDir temp;
  CHECK(error_of([&] {
          HfWriter(temp.path(), nn::Gpt2Config{}, {.dtype = kF64});
        }).starts_with("export: dtype f64, expected f32, bf16 or f16"));
}

TEST_CASE("huggingface: weights that are cut while they are read are named", "[huggingface]") {
  const TempDir temp;
  const std::string dir = copy_of("qwen2", temp), path = dir + "/model.safetensors";
  const HfReader reader(dir);
  const auto nbytes = fs::file_size(path);
  fs::resize_file(path, nbytes - 100);
  for (const HfParameter& p : reader.parameters()) {
    std::vector<float> values(static_cast<size_t>(p.shape.numel()));
    CHECK(error_of([&] { reader.read(p.name, 0, p.shape.numel(), values.data()); }) ==
          fmt::format("{}: cut to {} bytes while it was read, expected {} as before", path,
                      nbytes - 100, nbytes));
  }
}

// export.json: the files of our export, written by check_hf_export.py when transformers had loaded
// them and given the golden logits.
TEST_CASE("huggingface: exports are those that transformers has loaded, byte by byte",
          "[huggingface]") {
  for (const char* family : kFamilies) {
    INFO(family);
    const TempDir temp;
    const std::string dir = temp.path() + "/out";
    run_ranks(2, [&](World& world) {
      Loaded loaded(folder(family), world);
      export_hf(dir, *loaded.model, *loaded.fsdp, world,
                {.token_ids = HfReader(folder(family)).token_ids()});
    });
    CHECK(nlohmann::json::parse(read_file(dir + "/" + kExportListName)) ==
          nlohmann::json::parse(read_file(folder(family) + "/export.json")));
  }
}

TEST_CASE("huggingface: missing and unexpected tensors and files are all named", "[huggingface]") {
  const TempDir temp;
  const std::string dir = copy_of("qwen2", temp);
  replace_in(dir + "/model.safetensors", "model.norm.weight", "model.morn.weight");
  CHECK(error_of([&] { HfReader reader(dir); }) ==
        dir +
            ": tensors are not those of config.json: missing model.norm.weight; unexpected "
            "model.morn.weight");
  replace_in(dir + "/config.json", "\"intermediate_size\": 24", "\"intermediate_size\": 25");
  CHECK(error_of([&] { HfReader reader(dir); })
            .find("mlp.up_proj.weight is f32 [24, 16], expected "
                  "f32, bf16 or f16 [25, 16]") != std::string::npos);
  fs::remove(dir + "/model.safetensors");
  CHECK(error_of([&] { HfReader reader(dir); }) ==
        dir + ": no model.safetensors and no model.safetensors.index.json");
  std::ofstream(dir + "/pytorch_model.bin") << "x";
  CHECK(error_of([&] { HfReader reader(dir); }).find("is a Python pickle") != std::string::npos);
}

TEST_CASE("F18: an index with paths, absolute names or links is refused", "[huggingface]") {
  const TempDir temp;
  const std::string dir = copy_of("llama3", temp);
  const std::string index = dir + "/model.safetensors.index.json";
  const std::string good = read_file(index);
  const std::string name = "model-00001-of-";
  for (const std::string bad :
       {"../model-00001-of-", "/tmp/model-00001-of-", "a\\\\model-00001-of-"}) {
    replace_in(index, name, bad);
    CHECK(error_of([&] { HfReader reader(dir); }).find("expected the name of a file beside it") !=
          std::string::npos);
    std::ofstream(index, std::ios::binary) << good;
  }
  std::ofstream(index, std::ios::binary) << R"({"weight_map": {"a": 3}})";
  CHECK(error_of([&] { HfReader reader(dir); }) ==
        index + ": tensor a is in 3, expected the name of a file beside it");
  std::ofstream(index, std::ios::binary) << "{}";
  CHECK(error_of([&] { HfReader reader(dir); }).find("no weight_map") != std::string::npos);
  std::ofstream(index, std::ios::binary) << good;
  for (const auto& entry : fs::directory_iterator(dir)) {
    if (entry.path().extension() != ".safetensors") continue;
    fs::rename(entry.path(), temp.path() + "/elsewhere");
    fs::create_symlink(temp.path() + "/elsewhere", entry.path());
    break;
  }
  CHECK(error_of([&] { HfReader reader(dir); }).find("is a link, expected a file in the") !=
        std::string::npos);
}

TEST_CASE("F17: other things given as weights are named", "[huggingface]") {
  const TempDir temp;
  const std::string dir = copy_of("gpt2", temp);
  const std::pair<std::string, std::string> cases[] = {
      {"GGUF and more text here", "GGUF file"},
      {"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"},
      {std::string("\x80\x02}q\x00 12345678", 13), "Python pickle"},
      {"<!DOCTYPE html><html></html>", "web page"}};
  for (const auto& [content, kind] : cases) {
    std::ofstream(dir + "/model.safetensors", std::ios::binary) << content;
    CHECK(error_of([&] { HfReader reader(dir); }).find(kind) != std::string::npos);
  }
}

}  // namespace
}  // namespace tessera::dist
