#include "apps/model_from.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "apps/checkpoint_command.h"
#include "apps/saved_model.h"
#include "apps/trainer.h"
#include "core/autograd.h"
#include "core/files.h"
#include "dist/checkpoint/huggingface.h"
#include "dist/checkpoint/peft.h"
#include "dist/comm/local.h"
#include "nn/bert/bert.h"
#include "nn/llama/llama.h"
#include "test/golden/golden.h"
#include "test/stderr_of.h"
#include "test/temp_dir.h"
#include "test/testing.h"

namespace tessera::apps {
namespace {

using testing::error_of;
using testing::read_file;
using testing::stderr_of;
using testing::TempDir;

std::string folder(const std::string& family) {
  return testing::golden_dir() + "/hf/" + family;
}

/// A shard of tokens below 40, which the golden models have.
std::string write_tokens(const TempDir& dir) {
  std::vector<int32_t> header(256, 0);
  header[0] = 20240520, header[1] = 1, header[2] = 600;
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  for (int i = 0; i < 600; ++i) {
    bytes += static_cast<char>(i * i % 40);
    bytes += '\0';
  }
  return dir.write("tokens.bin", bytes);
}

Config config_for(const TempDir& dir, const std::string& family,
                  const std::vector<std::string>& extra = {}) {
  std::vector<std::string> overrides = {"--model.from=" + folder(family),
                                        "--data.tokens=" + write_tokens(dir),
                                        "--output.dir=" + dir / "out",
                                        "--device=cpu",
                                        "--train.steps=3",
                                        "--train.micro_batch=4",
                                        "--train.log_every=1000",
                                        "--model.context=8",
                                        "--optim.lr=0.01"};
  overrides.insert(overrides.end(), extra.begin(), extra.end());
  return load_config("", overrides);
}

TEST_CASE("model_from: the sizes are those of config.json", "[model_from]") {
  const TempDir dir;
  const Config llama = config_for(dir, "llama3");
  CHECK(llama.model.kind == "llama");
  CHECK(llama.model.vocab == 40);
  CHECK(llama.model.context == 8);  // shorter than the file's 32
  CHECK(llama.model.max_positions == 32);
  const auto& sizes = llama.model.selected().as<nn::LlamaConfig>();
  CHECK(sizes.num_kv_heads == 2);
  CHECK(sizes.rope.scaling == RopeScaling::kLlama3);
  CHECK(sizes.rope.theta == 100);
  CHECK(sizes.norm_eps == 1e-6f);
  CHECK(config_for(dir, "bloom").model.kind == "bloom");
  CHECK(config_for(dir, "qwen3").model.selected().as<nn::LlamaConfig>().qk_norm);
  const Config mistral = config_for(dir, "mistral_window"), qwen2 = config_for(dir, "qwen2_window");
  CHECK(mistral.model.selected().as<nn::LlamaConfig>().window == 4);
  CHECK(mistral.model.selected().as<nn::LlamaConfig>().window_layers == "w");
  CHECK(qwen2.model.selected().as<nn::LlamaConfig>().window == 3);
  CHECK(qwen2.model.selected().as<nn::LlamaConfig>().window_layers == "fw");
  const Config roberta = config_for(dir, "roberta", {"--data.mask_token=3"});
  CHECK(roberta.model.kind == "bert");
  CHECK(roberta.model.max_positions == 24);
  CHECK(roberta.model.selected().as<nn::BertConfig>().position_offset == 2);
  CHECK(error_of([&] { config_for(dir, "../hf_hidden/bert_model", {"--data.mask_token=3"}); })
            .ends_with(": model.kind = \"bert\", expected a model with a head that predicts masked "
                       "tokens"));
  CHECK(error_of([&] { config_for(dir, "gpt2", {"--model.context=1000"}); }) ==
        "command line: model.context = 1000, expected 24 of " + folder("gpt2") + "/config.json");
}

TEST_CASE("model_from: keys that are to be ignored give no warning, and hide no error",
          "[model_from]") {
  const TempDir dir;
  const std::string model = dir / "model";
  std::filesystem::copy(folder("llama2"), model);
  const auto set = [&](const char* key, const nlohmann::json& value) {
    auto object = nlohmann::json::parse(read_file(model + "/config.json"));
    object[key] = value;
    dir.write("model/config.json", object.dump());
  };
  const auto load = [&](const std::vector<std::string>& extra) {
    std::vector<std::string> options = {"--model.from=" + model};
    options.insert(options.end(), extra.begin(), extra.end());
    return config_for(dir, "llama2", options);
  };
  set("one_thing", 3);
  set("other_thing", "x");
  CHECK(stderr_of([&] { load({"--model.ignore_keys=one_thing, other_thing"}); }) == "");
  const Config config = load({"--model.ignore_keys=one_thing"});
  CHECK(stderr_of([&] { load({"--model.ignore_keys=one_thing"}); }) == "");  // said before
  CHECK(ignored_keys(config.model) == std::vector<std::string>{"one_thing"});
  CHECK(dump_config(config).find("ignore_keys") == std::string::npos);
  // Training opens the model again, with the same keys.
  const auto text = stderr_of([&] {
    dist::run_ranks(1, [&](dist::World& world) {
      train(load({"--model.ignore_keys=one_thing,other_thing"}), world);
    });
  });
  CHECK(text.find("warning: ") == std::string::npos);
  set("my_scale", 2);
  CHECK(error_of([&] { load({"--model.ignore_keys=my_scale"}); }) ==
        model + "/config.json: key my_scale = 2 is not supported for LlamaForCausalLM");
}

TEST_CASE("model_from: a weight that is not finite, or not in f16, is named before the first step",
          "[model_from]") {
  const std::string family = "llama2";
  const auto error = [&](int world_size, const std::string& value, const char* dtype) {
    const TempDir dir;
    std::filesystem::copy(folder(family), dir / "hf", std::filesystem::copy_options::recursive);
    if (!value.empty()) {
      std::fstream file(dir / "hf/model.safetensors",
                        std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(-4, std::ios::end);
      file.write(value.data(), 4);
    }
    Config config = config_for(dir, family,
                               {"--debug.nan=on", "--guard.max_skips=100",
                                std::string("--precision.param_dtype=") + dtype});
    config.model.from = dir / "hf";
    std::string text;
    try {
      dist::run_ranks(world_size, [&](dist::World& world) { train(config, world); });
    } catch (const Error& e) {
      text = e.what();
      CHECK(e.exit_status() == 3);
      CHECK(text.starts_with(dir / "hf"));
      text = text.substr((dir / "hf").size());
    }
    return text;
  };
  const std::string nan("\x00\x00\xc0\x7f", 4), million("\x00\x24\x74\x49", 4);
  for (const int world_size : {1, 2}) {
    CAPTURE(world_size);
    CHECK(error(world_size, "", "f16").empty());
    CHECK(error(world_size, million, "f32").empty());
    CHECK(error(world_size, nan, "f32") ==
          "/model.safetensors: tensor model.norm.weight has a value that is nan, expected finite "
          "ones");
    const std::string text = error(world_size, million, "f16");
    CHECK_THAT(text, Catch::StartsWith(": low-precision copy of parameter norm.weight (1 of the "));
    CHECK_THAT(text, Catch::Contains(" values here) in unit head") &&
                         Catch::EndsWith(" is not finite, expected finite numbers to start from"));
  }
}

TEST_CASE("model_from: sizes that the files do not bear out get no further", "[model_from]") {
  const TempDir dir;
  const std::string model = dir / "model";
  const auto error_with = [&](const char* key, const nlohmann::json& value, bool has_weights) {
    std::filesystem::remove_all(model);
    std::filesystem::copy(folder("llama2"), model);
    if (!has_weights) std::filesystem::remove(model + "/model.safetensors");
    auto object = nlohmann::json::parse(read_file(model + "/config.json"));
    object[key] = value;
    dir.write("model/config.json", object.dump());
    return error_of([&] { config_for(dir, "llama2", {"--model.from=" + model}); });
  };
  const int64_t most = 2147483647;
  CHECK_THAT(error_with("num_hidden_layers", most, true),
             Catch::Contains("2147483647 layers, expected no more than the "));
  CHECK(error_with("num_hidden_layers", most, false) ==
        model + "/config.json: model.layers = 2147483647, expected an integer in [1, 10000]");
  for (const bool has_weights : {true, false}) {
    CHECK_THAT(error_with("num_attention_heads", most, has_weights),
               Catch::EndsWith("num_attention_heads is 2147483647, expected an integer in [1, "
                               "65536]"));
  }
  CHECK_THAT(error_with("hidden_size", 1 << 20, true),
             Catch::Contains("tensors are not those of config.json"));
  CHECK_THAT(error_with("rms_norm_eps", 1e-40, false),
             Catch::Contains("model.norm_eps = 1e-40, expected a number in ["));
}

TEST_CASE("model_from: ids of begin, end and padding go through a checkpoint into an export",
          "[model_from]") {
  const TempDir dir;
  const auto export_of = [&](const Config& config) {
    dist::run_ranks(2, [&](dist::World& world) { train(config, world); });
    std::FILE* out = std::fopen((dir / "log").c_str(), "w");
    const int status = checkpoint_command({"export", config.output.dir, dir / "hf"}, out);
    std::fclose(out);
    CHECK(status == 0);
    return nlohmann::json::parse(read_file(dir / "hf/config.json"));
  };
  const Config imported = config_for(dir, "llama3", {"--checkpoint.every=3"});
  CHECK(imported.model.bos_ids == "1");
  const auto json = export_of(imported);
  CHECK(json["bos_token_id"] == 1);
  CHECK(json["eos_token_id"] == 2);
  CHECK_FALSE(json.contains("pad_token_id"));  // null there
  // Other ones may be given; what a model does not have is left out.
  const auto given = export_of(config_for(dir, "llama3",
                                          {"--checkpoint.every=3", "--model.eos_ids=2,7",
                                           "--model.pad_ids=0", "--output.dir=" + dir / "given"}));
  CHECK(given["bos_token_id"] == 1);
  CHECK(given["eos_token_id"] == std::vector<int>{2, 7});
  CHECK(given["pad_token_id"] == 0);
  const auto none =
      export_of(config_for(dir, "qwen3", {"--checkpoint.every=3", "--output.dir=" + dir / "none"}));
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    CHECK_FALSE(none.contains(key));
  }
}

TEST_CASE("model_from: an export has the tokenizer and the generation of the source",
          "[model_from]") {
  const TempDir dir;
  namespace fs = std::filesystem;
  const std::string source = dir / "source";
  fs::copy(folder("llama3"), source);
  const std::map<std::string, std::string> files = {{"tokenizer.json", "{\"a\": 1}"},
                                                    {"tokenizer_config.json", "{\"b\": 2}"},
                                                    {"special_tokens_map.json", "{}"},
                                                    {"chat_template.jinja", "{{ x }}"}};
  for (const auto& [name, text] : files) dir.write("source/" + name, text);
  dir.write("source/README.md", "of the model");
  dir.write("source/generation_config.json",
            R"({"bos_token_id": 1, "eos_token_id": [2, 9], "temperature": 0.6})");
  const auto export_to = [&](const Config& config, const std::string& target) {
    const auto close = [](std::FILE* file) { std::fclose(file); };
    const std::unique_ptr<std::FILE, decltype(close)> out(std::fopen((dir / "log").c_str(), "w"),
                                                          close);
    return checkpoint_command({"export", config.output.dir, target}, out.get());
  };
  const auto refusal = [&](const Config& config, const std::string& target) {
    return error_of([&] { export_to(config, target); });
  };
  const auto trained = [&](const std::string& name, const std::vector<std::string>& more) {
    std::vector<std::string> extra = {"--checkpoint.every=3", "--model.from=" + source,
                                      "--output.dir=" + dir / name};
    extra.insert(extra.end(), more.begin(), more.end());
    const Config config = config_for(dir, "llama3", extra);
    dist::run_ranks(1, [&](dist::World& world) { train(config, world); });
    return config;
  };
  const auto generation_of = [&](const std::string& target) {
    return nlohmann::json::parse(read_file(target + "/generation_config.json"));
  };
  const Config config = trained("out", {});
  CHECK(export_to(config, dir / "hf") == 0);
  for (const auto& [name, text] : files) CHECK(read_file(dir / "hf/" + name) == text);
  CHECK_FALSE(fs::exists(dir / "hf/README.md"));
  const auto generation = generation_of(dir / "hf");
  CHECK(generation["eos_token_id"] == std::vector<int>{2, 9});  // more than its config.json has
  CHECK(generation["temperature"] == 0.6);
  // Ids that were given are those of both files.
  const Config given = trained("given", {"--model.eos_ids=2,7"});
  CHECK(export_to(given, dir / "hf") == 0);  // in place of the first
  CHECK(generation_of(dir / "hf")["eos_token_id"] == std::vector<int>{2, 7});
  CHECK(generation_of(dir / "hf")["temperature"] == 0.6);
  CHECK(nlohmann::json::parse(read_file(dir / "hf/config.json"))["eos_token_id"] ==
        std::vector<int>{2, 7});
  // Never onto the source, nor onto a model of somebody else.
  CHECK(refusal(config, source + "/") ==
        source +
            "/: has the model that this one was made from (model.from), expected another "
            "directory");
  fs::copy(folder("llama3"), dir / "other");
  CHECK_THAT(refusal(config, dir / "other"), Catch::Contains("which no export has written"));
  CHECK(fs::exists(dir / "other/model.safetensors.index.json"));
}

TEST_CASE("model_from: training at a shorter context keeps the model's own limit", "[model_from]") {
  for (const auto& [family, limit_key, limit] :
       {std::tuple{"gpt2", "n_positions", 24}, std::tuple{"llama3", "max_position_embeddings", 32},
        std::tuple{"bloom", "seq_length", 0}}) {
    CAPTURE(family);
    const TempDir dir;
    const Config config = config_for(dir, family, {"--checkpoint.every=3"});
    CHECK(config.model.context == 8);
    dist::run_ranks(2, [&](dist::World& world) { train(config, world); });
    std::FILE* out = std::fopen((dir / "log").c_str(), "w");
    CHECK(checkpoint_command({"export", config.output.dir, dir / "hf"}, out) == 0);
    std::fclose(out);
    const auto before = nlohmann::json::parse(read_file(folder(family) + "/config.json"));
    const auto after = nlohmann::json::parse(read_file(dir / "hf/config.json"));
    const int expected = limit != 0 ? limit : before.value(limit_key, 2048);
    CHECK(after[limit_key] == expected);
    if (std::string(family) == "gpt2") {  // all rows of the position embedding
      const SavedModel saved = load_model(dir / "out");
      CHECK(saved.model->parameter("position.weight").tensor.shape() == Shape{24, 16});
    }
  }
}

TEST_CASE("model_from: a text needs the tokenizer of the model", "[model_from]") {
  const TempDir dir;
  const std::string model = dir / "model";
  std::filesystem::copy(folder("gpt2"), model, std::filesystem::copy_options::recursive);
  const auto load = [&](std::vector<std::string> extra) {
    extra.push_back("--model.from=" + model);
    extra.push_back("--data.text=" + dir.write("text", "abcabcbbcacbabcabcabbacbabc"));
    return load_config("", extra);
  };
  const auto refusal = [&](const std::string& why) {
    return "command line: data.text with model.from = " + model +
           ", whose tokenizer cannot be used (" + model + "/tokenizer.json: " + why +
           "): a text would become other ids than the model knows; expected data.tokenizer, the path of "
           "the model's, or data.tokens, shards of its ids";
  };
  CHECK(error_of([&] { load({}); }) == refusal("No such file or directory, expected a file"));
  std::ofstream(model + "/tokenizer.json")
      << "{\"version\": \"1.0\", \"model\": {\"type\": \"Unigram\"}}";
  CHECK(error_of([&] { load({}); }) ==
        refusal("model.type = \"Unigram\", expected one of BPE, WordPiece, WordLevel"));
  // One of Hugging Face's.
  std::ofstream(model + "/tokenizer.json")
      << R"({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated",
             "invert": false}, "model": {"type": "WordLevel", "unk_token": "c",
             "vocab": {"c": 0, "a": 7, "b": 39}}})";
  const Data other = load_data(load({}));
  CHECK(other.tokenizer->name() == "WordLevel");
  CHECK(other.vocab_size == 40);
  CHECK(other.train.shards[0][0] == 7);
  CHECK(other.train.shards[0][1] == 39);
  // Ours: its ids, not those that the text alone would give.
  std::ofstream(model + "/tokenizer.json")
      << "{\"type\": \"char\", \"chars\": [\"x\", \"c\", \"b\", \"a\"]}";
  const Config config = load({});
  CHECK(config.data.tokenizer == model);
  const Data data = load_data(config);
  CHECK(data.vocab_size == 40);
  CHECK(data.train.shards[0][0] == 3);
  CHECK(data.train.shards[0][2] == 1);
  CHECK(error_of([&] { load({"--data.tokenizer=byte"}); }) ==
        "command line: data.tokenizer = byte, expected char of " + model);
  // A file that is named is taken.
  const std::string named =
      dir.write("t.json", "{\"type\": \"char\", \"chars\": [\"a\", \"b\", \"c\"]}");
  CHECK(load_data(load({"--data.tokenizer=" + named})).train.shards[0][2] == 2);
  // More ids than the model's.
  std::ofstream(model + "/tokenizer.json")
      << R"({"model": {"type": "WordLevel", "unk_token": "c", "vocab": {"c": 0, "a": 40}}})";
  CHECK(error_of([&] { load_data(load({})); }) ==
        model + "/config.json: model.vocab = 40, expected at least the tokenizer's 41");
  // Sources of shards need none; of texts it is that of the model.
  std::filesystem::remove(model + "/tokenizer.json");
  const auto sources = [&](const std::string& text) {
    return load_data(
        load_config("", std::vector<std::string>{"--model.from=" + model, "--data.separator=0",
                                                 "--data.sources=" + text}));
  };
  CHECK(sources(write_tokens(dir)).tokenizer == nullptr);
  CHECK(error_of([&] { sources(dir.write("s.jsonl", "{\"text\": \"ab\"}\n")); }) ==
        model + "/tokenizer.json: No such file or directory, expected a file");
  std::ofstream(model + "/tokenizer.json")
      << R"({"model": {"type": "WordLevel", "unk_token": "c", "vocab": {"c": 0, "ab": 39}}})";
  CHECK(sources(dir / "s.jsonl").train.shards[0][0] == 39);
}

TEST_CASE("model_from: the learning rate of fine-tuning is 1e-5 unless it is given",
          "[model_from]") {
  const TempDir dir;
  const auto load = [&](std::vector<std::string> extra) {
    extra.push_back("--model.from=" + folder("gpt2"));
    extra.push_back("--data.tokens=" + write_tokens(dir));
    return load_config("", extra);
  };
  CHECK(load({}).optim.schedule.peak_lr == 1e-5);
  CHECK(load({}).optim.schedule.final_lr == 1e-6);
  CHECK(derived_defaults(load({})) ==
        "optim.lr = 1e-05 (that of fine-tuning, since model.from is given); optim.final_lr = 1e-06 "
        "(a tenth of optim.lr)");
  CHECK(load({"--optim.lr=0.01"}).optim.schedule.peak_lr == 0.01);
  CHECK(load({"--optim.lr=0.01"}).optim.schedule.final_lr == 0.001);
}

TEST_CASE("model_from: the resolved configuration stands on its own", "[model_from]") {
  const TempDir dir;
  const Config config = config_for(dir, "llama3");
  const Config again = parse_config(dump_config(config), "resolved");
  CHECK(again.model.from.empty());
  CHECK(dump_config(again) == dump_config(config));
}

TEST_CASE("model_from: a key that contradicts the file is named", "[model_from]") {
  const TempDir dir;
  CHECK(error_of([&] { config_for(dir, "gpt2", {"--model.width=64"}); }) ==
        "command line: model.width = 64, expected 16 of " + folder("gpt2") + "/config.json");
  CHECK_NOTHROW(config_for(dir, "gpt2", {"--model.width=16", "--model.dropout=0.1"}));
  CHECK(error_of([&] { config_for(dir, "nowhere"); }).find("nowhere/config.json") !=
        std::string::npos);
}

TEST_CASE("model_from: fine-tuning begins at the imported model, on any number of ranks",
          "[model_from]") {
  for (const char* family : {"gpt2", "llama3", "qwen3", "bloom"}) {
    INFO(family);
    std::vector<double> first_losses;
    for (const int world_size : {1, 2}) {
      const TempDir dir;
      const Config config =
          config_for(dir, family, {"--train.global_batch=8", "--train.micro_batch=4"});
      dist::run_ranks(world_size, [&](dist::World& world) { train(config, world); });
      std::istringstream lines(read_file(dir / "out/metrics.jsonl"));
      std::vector<double> losses;
      for (std::string line; std::getline(lines, line);) {
        losses.push_back(nlohmann::json::parse(line)["loss"]);
      }
      REQUIRE(losses.size() == 3);
      CHECK(losses[2] < losses[0]);
      first_losses.push_back(losses[0]);
      // What was trained can be read back without the original.
      const SavedModel saved = load_model(dir / "out");
      CHECK(saved.config.model.kind == config.model.kind);
    }
    CHECK(std::abs(first_losses[0] - first_losses[1]) <= 1e-5 * first_losses[0]);
    // The golden models know these tokens no better than chance, but not as a fresh one would.
    CHECK(std::abs(first_losses[0] - std::log(40.0)) > 0.05);
  }
}

// ---- adapters

std::string adapter(const std::string& family) {
  return testing::golden_dir() + "/lora/" + family;
}

std::vector<double> losses_of(const std::string& out) {
  std::vector<double> losses;
  std::istringstream lines(read_file(out + "/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    losses.push_back(nlohmann::json::parse(line)["loss"]);
  }
  return losses;
}

std::vector<double> logits_of(nn::LanguageModel& model) {
  const NoGrad no_grad;
  model.train(false);
  return model.logits(testing::randint(0, 40, {2, 8})).to_vector();
}

void export_to(const std::vector<std::string>& arguments) {
  std::FILE* const null = std::fopen("/dev/null", "w");
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> closed(null, std::fclose);
  const int status = checkpoint_command(arguments, null);
  CHECK(status == 0);
}

TEST_CASE(
    "model_from: adapters go on with the same bits on other ranks, and out as peft's or merged",
    "[model_from]") {
  const TempDir dir;
  const auto config = [&](const std::string& name, const std::vector<std::string>& extra = {}) {
    std::vector<std::string> keys = {"--lora.from=" + adapter("qwen3"),
                                     "--lora.dropout=0.1",
                                     "--train.reproducible=true",
                                     "--train.micro_batch=1",
                                     "--train.global_batch=4",
                                     "--train.steps=4",
                                     "--checkpoint.every=2",
                                     "--output.dir=" + dir / name};
    keys.insert(keys.end(), extra.begin(), extra.end());
    return config_for(dir, "qwen3", keys);
  };
  const auto train_on = [](int world_size, const Config& c) {
    dist::run_ranks(world_size, [&](dist::World& world) { train(c, world); });
  };
  train_on(2, config("out"));
  const std::string out = dir / "out";
  const std::vector<double> expected = losses_of(out);
  REQUIRE(expected.size() == 4);
  for (const int world_size : {1, 4}) {
    const std::string name = "on_" + std::to_string(world_size);
    std::filesystem::copy(out, dir / name, std::filesystem::copy_options::recursive);
    std::filesystem::remove_all(dir / name + "/step-00000004");
    train_on(world_size, config(name, {"--checkpoint.resume=auto"}));
    CHECK(losses_of(dir / name) == expected);
    CHECK(read_file(dir / name + "/model.safetensors") == read_file(out + "/model.safetensors"));
  }

  // As peft's: the options, and the values that were trained.
  export_to({"export", out, dir / "adapter"});
  dist::PeftReader reader(dir / "adapter");
  CHECK(reader.options().rank == 3);
  CHECK(reader.options().rslora);
  CHECK(reader.options().dropout == 0.1);
  const SavedModel saved = load_model(out);
  reader.attach(*saved.model);
  CHECK(reader.names().size() == 16);
  for (const std::string& name : reader.names()) {
    std::vector<float> values(static_cast<size_t>(reader.shape_of(name).numel()));
    reader.read(name, 0, std::ssize(values), values.data());
    CHECK(std::vector<double>(values.begin(), values.end()) ==
          saved.model->parameter(name).tensor.to_vector());
  }
  // Merged, in both forms, the same logits.
  const std::vector<double> logits = logits_of(*saved.model);
  export_to({"export", out, dir / "merged", "--merge"});
  const auto merged = dist::HfReader(dir / "merged").config().make_model();
  const dist::HfReader hf(dir / "merged");
  for (const nn::NamedParameter& p : merged->named_parameters()) {
    std::vector<float> values(static_cast<size_t>(hf.shape_of(p.name).numel()));
    hf.read(p.name, 0, std::ssize(values), values.data());
    const NoGrad no_grad;
    p.parameter->tensor.copy_(
        from_values(std::span<const float>(values), p.parameter->tensor.shape()));
  }
  testing::check_close(logits_of(*merged), logits, 1e-5);
  export_to({"export", out, dir / "plain", "--merge", "--format=tessera"});
  const SavedModel plain = load_model(dir / "plain");
  CHECK_FALSE(plain.config.lora.is_on());
  testing::check_close(logits_of(*plain.model), logits, 1e-5);
  export_to({"export", out, dir / "whole", "--format=tessera"});
  CHECK(logits_of(*load_model(dir / "whole").model) == logits);

  // Adapters beside a model that was trained without.
  const std::vector<double> without = logits_of(*plain.model);
  const SavedModel with = load_model(dir / "plain", kF32, adapter("sft"));
  CHECK(logits_of(*with.model) == without);  // B is zero there
  const SavedModel twice = load_model(dir / "plain", kF32, adapter("qwen3"));
  CHECK(logits_of(*twice.model) != without);
  {
    const nn::LoraOff off;
    CHECK(logits_of(*twice.model) == without);
  }
  CHECK(error_of([&] { load_model(out, kF32, adapter("qwen3")); }) ==
        out + "/model.safetensors: has adapters, expected a model without any beside " +
            adapter("qwen3"));
  CHECK(error_of([&] { load_model(dir / "plain", kF32, adapter("gpt2")); })
            .starts_with(adapter("gpt2") +
                         "/adapter_config.json: LoraOptions::targets: no linear layer is called "
                         "\"c_attn\", expected"));
  CHECK(error_of([&] {
          export_to({"export", dir / "plain", dir / "x", "--merge"});
        }) == dir /
                  "plain/model.safetensors: --merge of a model without adapters, expected one with "
                  "lora.targets");
}

TEST_CASE("model_from: keys of adapters that do not fit are named", "[model_from]") {
  const TempDir dir;
  const auto error = [&](const std::vector<std::string>& extra, const char* family = "qwen3") {
    return error_of([&] {
      const Config config = config_for(dir, family, extra);
      dist::run_ranks(1, [&](dist::World& world) { train(config, world); });
    });
  };
  CHECK(error({"--lora.targets=q_proj,qproj"}) ==
        "command line: lora.targets: no linear layer is called \"qproj\", expected all-linear or "
        "some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj");
  CHECK(error({"--lora.targets=q_proj", "--lora.rank=0"})
            .find("command line: lora.rank = 0, expected an integer in [1, 65536]") == 0);
  CHECK(error({"--lora.targets=q_proj", "--lora.modules_to_save=score"})
            .find("command line: lora.modules_to_save: no module is called \"score\", expected") ==
        0);
  CHECK(error({"--lora.from=" + adapter("qwen3"), "--lora.rank=8"}) ==
        "command line: lora.rank = 8, expected 3 of " + adapter("qwen3") + "/adapter_config.json");
  CHECK(error({"--lora.from=" + adapter("gpt2")}) ==
        adapter("gpt2") +
            "/adapter_config.json: lora.targets: no linear layer is called \"c_attn\", expected "
            "all-linear or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj");
  CHECK(error({"--lora.from=" + adapter("qwen3")}, "llama3")
            .find(adapter("qwen3") + ": tensors are not those of adapter_config.json") == 0);
  CHECK(error_of([&] {
          load_config("",
                      std::vector<std::string>{"--data.text=x", "--lora.from=" + adapter("qwen3")});
        }) == "command line: lora.from = " + adapter("qwen3") +
                  " without model.from, expected the model that the adapters are of");
  const Config config = config_for(dir, "qwen3", {"--lora.targets=q_proj"});
  CHECK(config.optim.schedule.peak_lr == 0.01);
  const Config plain =
      load_config("", std::vector<std::string>{"--data.text=x", "--lora.targets=q_proj"});
  CHECK(plain.optim.schedule.peak_lr == 2e-4);
  CHECK(derived_defaults(plain).find("optim.lr = 0.0002 (that of adapters, lora.targets)") == 0);
}

}  // namespace
}  // namespace tessera::apps
