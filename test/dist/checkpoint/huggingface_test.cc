// Models of transformers (test/golden/hf, made by make_hf.py) in and out.

#include "dist/checkpoint/huggingface.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/autograd.h"
#include "dist/checkpoint/save_parameters.h"
#include "dist/checkpoint/state.h"
#include "dist/comm/local.h"
#include "kernels/loss/loss.h"
#include "nn/bert/bert.h"
#include "test/golden/golden.h"
#include "test/stderr_of.h"
#include "test/temp_dir.h"
#include "test/testing.h"

namespace tessera::dist {
namespace {

using testing::check_close;
using testing::error_of;
using testing::read_file;
using testing::stderr_of;
using testing::TempDir;

namespace fs = std::filesystem;

constexpr double kTolerance = 1e-5;  // of logits, f32
const char* const kFamilies[] = {"gpt2",           "llama2", "llama3",       "mistral",
                                 "mistral_window", "qwen2",  "qwen2_window", "qwen3",
                                 "bloom",          "bert",   "roberta"};

/// Of a model that is on each rank.
FsdpOptions whole() {
  FsdpOptions options;
  options.strategy = Strategy::kNoShard;
  return options;
}

std::string folder(const std::string& family) {
  return testing::golden_dir() + "/hf/" + family;
}

struct Logits {
  Tensor ids_BT;
  std::vector<double> values;
  nn::ForwardOptions options = {};
};

Logits golden_logits(const std::string& family) {
  const auto object = nlohmann::json::parse(read_file(folder(family) + "/logits.json"));
  Logits golden{testing::rows_of(object["ids"]), object["logits"]};
  if (object.contains("token_types"))
    golden.options.token_types = testing::rows_of(object["token_types"]);
  return golden;
}

/// A model under FSDP with the values of a directory.
struct Loaded {
  Loaded(const std::string& dir, World& world, const FsdpOptions& options = {}) {
    const HfReader reader(dir);
    {
      const nn::DeferredInit deferred;
      model = reader.config().make_model();
    }
    fsdp = fully_shard(*model, world, options);
    load_parameters(reader, *fsdp, *model);
    model->reset_buffers();
  }
  std::vector<double> logits(const Logits& golden) {
    const NoGrad no_grad;
    std::vector<double> values = model->logits(golden.ids_BT, golden.options).to_vector();
    fsdp->end_forward();
    return values;
  }
  void export_to(const std::string& dir, World& world, const HfWriteOptions& write = {}) {
    save_parameters(*fsdp, world, [&] {
      return std::make_unique<HfWriter>(dir, nn::hf_config_of(*model), write);
    });
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
        check_close(loaded.logits(golden), golden.values, kTolerance, family);
      });
    }
  }
}

/// The gradients of a golden are a model of their own, whose tensors have the names of what they belong
/// to.
void check_gradients(Loaded& loaded, const std::string& dir) {
  loaded.fsdp->clip_grad_norm(0);
  const HfReader gradients(dir);
  int64_t num_checked = 0;
  loaded.fsdp->for_each_full(
      Fsdp::State::kGradient, [&](const std::string& name, const Tensor& full) {
        std::vector<float> expected(static_cast<size_t>(full.numel()));
        gradients.read(name, 0, full.numel(), expected.data());
        check_close(full.to_vector(), std::vector<double>(expected.begin(), expected.end()),
                    kTolerance, name.c_str());
        ++num_checked;
      });
  CHECK(num_checked == std::ssize(gradients.parameters()));
}

TEST_CASE("huggingface: encoders give transformers' loss and gradients of masked tokens",
          "[huggingface]") {
  for (const char* family : {"bert", "roberta"}) {
    INFO(family);
    const auto object = nlohmann::json::parse(read_file(folder(family) + "/logits.json"));
    run_ranks(1, [&](World& world) {
      const Logits golden = golden_logits(family);
      Loaded loaded(folder(family), world, whole());
      const Tensor targets_BT = testing::rows_of(object["targets"]);
      const LossSum loss = loaded.model->loss(golden.ids_BT, targets_BT, golden.options);
      const double count = loss.count.item();
      const double mine = loss.sum.item() / count, theirs = object["loss"].get<double>();
      CAPTURE(mine, theirs, count);
      CHECK(std::abs(mine - theirs) < kTolerance);
      backward(loss.sum, full({}, 1 / count));
      check_gradients(loaded, folder(family) + "/grads");
      loaded.fsdp->end_step();
    });
  }
}

/// ...ForSequenceClassification on a batch of rows of different lengths.
struct ClassGolden {
  explicit ClassGolden(const std::string& family)
      : dir(testing::golden_dir() + "/hf_classes/" + family),
        object(nlohmann::json::parse(read_file(dir + "/logits.json"))),
        ids_BT(testing::rows_of(object["ids"])),
        lengths(object["lengths"].get<std::vector<int32_t>>()) {
    const std::vector<int32_t> labels = object["labels"];
    labels_B = from_values(std::span<const int32_t>(labels), {ids_BT.dim(0)});
    std::vector<int32_t> starts;  // what fills a row up is by itself
    for (const int32_t length : lengths) {
      for (int32_t t = 0; t < ids_BT.dim(1); ++t) starts.push_back(t < length ? 0 : length);
    }
    options.document_starts = from_values(std::span<const int32_t>(starts), ids_BT.shape());
  }
  Tensor logits(Loaded& loaded) const {
    return loaded.model->class_logits(ids_BT, lengths, options);
  }

  std::string dir;
  nlohmann::json object;
  Tensor ids_BT, labels_B;
  std::vector<int32_t> lengths;
  nn::ForwardOptions options;
};

TEST_CASE("huggingface: classifiers give transformers' logits, loss and gradients on any ranks",
          "[huggingface][classify]") {
  for (const char* family : {"bert", "roberta", "gpt2", "qwen3"}) {
    for (const int ranks : {1, 3}) {
      CAPTURE(family, ranks);
      run_ranks(ranks, [&](World& world) {
        const ClassGolden golden(family);
        Loaded loaded(golden.dir, world);
        CHECK(loaded.model->classifier()->classes ==
              std::vector<std::string>{"no", "perhaps", "yes"});
        const Tensor logits_BK = golden.logits(loaded);
        check_close(logits_BK.to_vector(), golden.object["logits"].get<std::vector<double>>(),
                    kTolerance, family);
        const LossSum loss = cross_entropy(logits_BK, golden.labels_B, CrossEntropyOptions{-100});
        const double theirs = golden.object["loss"];
        CHECK(loss.count.item() == 3);
        CHECK(std::abs(loss.sum.item() / 3 - theirs) < kTolerance);
        // All ranks have the same rows, and their gradients are added.
        backward(loss.sum, full({}, 1.0 / (3 * ranks)));
        check_gradients(loaded, golden.dir + "/grads");
        loaded.fsdp->end_step();
      });
    }
  }
}

TEST_CASE("huggingface: a classifier comes back from its export, one of means cannot be exported",
          "[huggingface][classify]") {
  for (const char* family : {"bert", "roberta", "gpt2", "qwen3"}) {
    CAPTURE(family);
    const TempDir temp;
    const std::string out = temp.path() + "/out";
    run_ranks(2, [&](World& world) {
      const ClassGolden golden(family);
      Loaded loaded(golden.dir, world);
      loaded.export_to(out, world);
      const auto theirs = nlohmann::json::parse(read_file(golden.dir + "/config.json"));
      const auto ours = nlohmann::json::parse(read_file(out + "/config.json"));
      for (const char* key : {"architectures", "id2label", "label2id", "model_type"}) {
        CHECK(ours[key] == theirs[key]);
      }
      Loaded again(out, world, whole());
      CHECK(again.parameters() == loaded.parameters());
      const NoGrad no_grad;
      check_close(golden.logits(again).to_vector(),
                  golden.object["logits"].get<std::vector<double>>(), kTolerance, family);
      again.fsdp->end_forward();
    });
    // The mean of states, which no model of transformers takes, by the same parameters.
    const ClassGolden golden(family);
    const HfReader reader(golden.dir);
    nn::FamilyConfig config = reader.config();
    config.set_classifier({"no", "perhaps", "yes"}, nn::Pooling::kMean);
    CHECK_THAT(error_of([&] { nn::hf_config_json(config, kF32); }),
               Catch::Contains("mean") && Catch::Contains("export: "));
    const auto model = config.make_model();
    const NoGrad no_grad;
    for (const nn::NamedParameter& p : model->named_parameters()) {
      std::vector<float> values(static_cast<size_t>(p.parameter->tensor.numel()));
      reader.read(p.name, 0, std::ssize(values), values.data());
      p.parameter->tensor.copy_(
          from_values(std::span<const float>(values), p.parameter->tensor.shape()));
    }
    model->reset_buffers();
    model->train(false);
    check_close(model->class_logits(golden.ids_BT, golden.lengths, golden.options).to_vector(),
                golden.object["mean_logits"].get<std::vector<double>>(), kTolerance, family);
    CHECK_THAT(error_of([&] { model->logits(golden.ids_BT); }),
               Catch::Contains("the model classifies texts, expected one that predicts tokens"));
    CHECK_THAT(error_of([&] {
                 model->class_logits(golden.ids_BT, {{9, 6, 10}}, golden.options);
               }),
               Catch::Contains("class_logits: length 10, expected 1 to 9"));
  }
}

TEST_CASE("huggingface: a model that predicts tokens is read as what a classifier starts from",
          "[huggingface][classify]") {
  const nn::ClassifierConfig classes{{"a", "b"}, nn::Pooling::kCls, true};
  // A masked model without a pooler, a bare model with one, a causal one.
  const std::pair<std::string, bool> cases[] = {
      {folder("bert"), false},
      {testing::golden_dir() + "/hf_hidden/bert_model", true},
      {folder("roberta"), false},
      {folder("llama2"), false}};
  for (const auto& [dir, has_pooler] : cases) {
    CAPTURE(dir);
    const HfReader reader(dir, {}, &classes);
    const std::vector<std::string> names = reader.names();
    const auto has = [&](const std::string& name) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    CHECK(has("embed.weight"));
    CHECK(has("pooler.weight") == has_pooler);
    CHECK(has("pooler.bias") == has_pooler);
    for (const char* name : {"score.weight", "score.bias", "head.weight", "head.bias.value",
                             "transform.linear.weight"}) {
      CAPTURE(name);
      CHECK_FALSE(has(name));
    }
    // All else that the classifier has is there.
    const nn::DeferredInit deferred;
    int64_t num_new = 0;
    for (const nn::NamedParameter& p : reader.config().make_model()->named_parameters()) {
      num_new += has(p.name) ? 0 : 1;
      CHECK((has(p.name) || nn::is_of_classifier(p.name)));
    }
    const bool is_causal = reader.config().family().is_causal;
    CHECK(num_new == (is_causal ? 1 : has_pooler ? 2 : 4));
  }
}

TEST_CASE("huggingface: what a config.json says of classes", "[huggingface][classify]") {
  const TempDir temp;
  const auto with = [&](const std::string& from, const std::string& to) {
    const std::string dir = temp.path() + "/classes";
    fs::remove_all(dir);
    fs::copy(testing::golden_dir() + "/hf_classes/qwen3", dir);
    replace_in(dir + "/config.json", from, to);
    return dir;
  };
  const std::string names = R"("0": "no",
    "1": "perhaps",
    "2": "yes")";
  CHECK(
      error_of([&] { HfReader(with(names, R"("0": "no", "2": "yes")")); })
          .ends_with(
              "config.json: id2label = {\"0\":\"no\",\"2\":\"yes\"}, expected names of \"0\", \"1\", ..."));
  CHECK_THAT(error_of([&] { HfReader(with(names, R"("0": "no")")); }),
             Catch::Contains("expected names of \"0\", \"1\", ..."));
  CHECK_THAT(
      error_of([&] {
        HfReader(with("\"model_type\"", "\"problem_type\": \"regression\", \"model_type\""));
      }),
      Catch::Contains("problem_type = \"regression\", expected single_label_classification"));
  // Of another number of classes than its tensors.
  CHECK_THAT(error_of([&] { HfReader(with(names, R"("0": "no", "1": "yes")")); }),
             Catch::Contains("score.weight is f32 [3, 16], expected"));
}

TEST_CASE("huggingface: a BertModel gives transformers' hidden states and pooled ones",
          "[huggingface]") {
  const std::string dir = testing::golden_dir() + "/hf_hidden/bert_model";
  const auto object = nlohmann::json::parse(read_file(dir + "/hidden.json"));
  run_ranks(1, [&](World& world) {
    const TempDir temp;
    const std::string out = temp.path() + "/out";
    {
      Loaded loaded(dir, world);
      loaded.export_to(out, world);
    }
    const auto exported = nlohmann::json::parse(read_file(out + "/config.json"));
    CHECK(exported["architectures"] == nlohmann::json({"BertModel"}));
    for (const std::string& from : {dir, out}) {
      Loaded loaded(from, world, whole());
      const NoGrad no_grad;
      nn::ForwardOptions options;
      options.token_types = testing::rows_of(object["token_types"]);
      auto& bert = dynamic_cast<nn::Bert&>(*loaded.model);
      // One call, so that the pooler is gathered with the rest.
      std::vector<double> hidden, pooled;
      nn::run(
          bert,
          [&](nn::Bert& model, const Tensor& ids) {
            const Tensor states_BTC = model.forward(ids, options);
            hidden = states_BTC.to_vector();
            const Tensor out_BC = model.pooled(states_BTC);
            pooled = out_BC.to_vector();
            return out_BC;
          },
          testing::rows_of(object["ids"]));
      loaded.fsdp->end_forward();
      check_close(hidden, object["hidden"].get<std::vector<double>>(), kTolerance, "hidden");
      check_close(pooled, object["pooled"].get<std::vector<double>>(), kTolerance, "pooled");
    }
  });
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
      loaded.export_to(dir, world, {.max_file_nbytes = 4096});
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
    CHECK(before.size() == HfReader(dir).config().hf_parameters().size());
  }
}

TEST_CASE("huggingface: an export has the names and keys of the original", "[huggingface]") {
  for (const char* family : kFamilies) {
    INFO(family);
    const TempDir temp;
    const HfReader original(folder(family));
    HfWriter writer(temp.path(), original.config(), {.token_ids = original.token_ids()});
    for (const nn::HfParameter& p : original.parameters()) {
      std::vector<float> values(static_cast<size_t>(p.shape.numel()));
      original.read(p.name, 0, p.shape.numel(), values.data());
      writer.write(p.name, p.shape, values.data());
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
      loaded.export_to(std::string(out) + "/" + family, world,
                       {.token_ids = HfReader(folder(family)).token_ids()});
    });
  }
  for (const char* family : {"bert", "roberta", "gpt2", "qwen3"}) {
    run_ranks(2, [&](World& world) {
      const ClassGolden golden(family);
      Loaded loaded(golden.dir, world);
      loaded.export_to(fmt::format("{}/classes-{}", out, family), world,
                       {.token_ids = HfReader(golden.dir).token_ids()});
    });
  }
}

// For check_minilm.py: TESSERA_HIDDEN has a model and ids.json, the ids of texts; hidden.json becomes
// the last hidden states of each.
TEST_CASE("huggingface: hidden states of texts into a folder", "[.hf-hidden]") {
  const char* const dir = std::getenv("TESSERA_HIDDEN");
  REQUIRE(dir != nullptr);
  const auto texts = nlohmann::json::parse(read_file(std::string(dir) + "/ids.json"));
  run_ranks(1, [&](World& world) {
    Loaded loaded(dir, world, whole());
    const NoGrad no_grad;
    nlohmann::json all = nlohmann::json::array();
    for (const auto& ids : texts) {
      all.push_back(
          nn::call(*loaded.model, testing::rows_of(nlohmann::json::array({ids}))).to_vector());
      loaded.fsdp->end_forward();
    }
    std::ofstream(std::string(dir) + "/hidden.json") << all;
  });
}

/// Takes nothing.
struct RefusingSink final : ParameterSink {
  void write(std::string_view name, const Shape& shape, const float*) override {
    throw ConfigError(fmt::format("{} {} refused", name, shape));
  }
  void finish() override { throw Error("finished after an error"); }
};

TEST_CASE("huggingface: what an export cannot begin or write ends every rank with the reason",
          "[huggingface]") {
  const TempDir temp;
  std::ofstream(temp.path() + "/notes") << "mine";
  run_ranks(2, [&](World& world) {
    Loaded loaded(folder("qwen2"), world);
    const auto expect = [](const std::string& found, const std::string& expected) {
      if (!found.starts_with(expected)) throw Error(found + ", expected " + expected);
    };
    expect(error_of([&] { loaded.export_to(temp.path(), world); }),
           temp.path() + ": has notes, which no export has written");
    bool has_opened = false;
    expect(error_of([&] {
             save_parameters(*loaded.fsdp, world, [&] {
               has_opened = true;
               return std::make_unique<RefusingSink>();
             });
           }),
           "embed.weight [40, 16] refused");
    if (has_opened != (world.rank() == 0)) throw Error("opened on another rank than 0");
  });
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
    for (const nn::HfParameter& p : writer.parameters()) {
      const std::vector<float> values(static_cast<size_t>(p.shape.numel()), 0.5f);
      writer.write(p.name, p.shape, values.data());
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
    return error_of([&] { nn::parse_hf_config("config.json", text); });
  };
  CHECK(error("[]").starts_with("config.json: "));
  CHECK(error("{}") ==
        "config.json: architecture missing, expected one of LlamaForCausalLM, MistralForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM, GPT2LMHeadModel, BloomForCausalLM, BertForMaskedLM, "
        "BertModel and 1 more");
  CHECK(error(R"({"architectures": ["GemmaForCausalLM"]})")
            .starts_with("config.json: architecture GemmaForCausalLM, expected one of"));
  const std::string gpt2 = R"("model_type": "gpt2", "vocab_size": 8, "n_positions": 4, "n_embd": 4,
                              "n_layer": 1)";
  CHECK(error("{" + gpt2 + "}") ==
        "config.json: n_head is missing, expected an integer in [1, 65536]");
  CHECK(error("{" + gpt2 + R"(, "n_head": 0})") ==
        "config.json: n_head is 0, expected an integer in [1, 65536]");
  CHECK(error("{" + gpt2 + R"(, "n_head": "2"})") ==
        "config.json: n_head is \"2\", expected an integer in [1, 65536]");
  CHECK(
      error("{" + gpt2 + R"(, "n_head": 2, "activation_function": "relu"})") ==
      "config.json: activation_function is \"relu\", expected gelu_new, gelu_pytorch_tanh or gelu");
  CHECK(error("{" + gpt2 + R"(, "n_head": 2, "scale_attn_weights": false})") ==
        "config.json: scale_attn_weights is false, expected true (nothing else is supported)");
  CHECK(error("{" + gpt2 + R"(, "n_head": 2, "logit_scale": 3})") ==
        "config.json: key logit_scale = 3 is not supported for GPT2LMHeadModel");
  CHECK(error("{" + gpt2 + R"(, "n_head": 2, "vocab_size": NaN})") ==
        "config.json has \"vocab_size\" twice, expected each name once");
  CHECK(error(R"({"model_type": "gpt2", "vocab_size": NaN})") ==
        "config.json: vocab_size is NaN, expected an integer in [1, 2147483647]");
  CHECK(error("{" + gpt2 + R"(, "n_head": 2, "layer_norm_epsilon": Infinity})") ==
        "config.json: layer_norm_epsilon is Infinity, expected a positive number");
  CHECK(error("{NaN: 1}").find("is not JSON") != std::string::npos);
  CHECK(error("{" + gpt2 + R"(, "n_head": 2, "layer_norm_epsilon": -1})") ==
        "config.json: layer_norm_epsilon is -1, expected a positive number");
  CHECK(error("{" + gpt2 + R"(, "n_head": 2, "tie_word_embeddings": 1})") ==
        "config.json: tie_word_embeddings is 1, expected true or false");
  CHECK_NOTHROW(
      nn::parse_hf_config("config.json", "{" + gpt2 + R"(, "n_head": 2, "new_thing": null})"));
  const std::string llama = R"("model_type": "llama", "vocab_size": 8, "hidden_size": 8,
      "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8)";
  CHECK(error("{" + llama + R"(, "attention_bias": true})") ==
        "config.json: attention_bias is true, expected false (nothing else is supported)");
  CHECK(error("{" + llama + R"(, "hidden_act": 5})")
            .starts_with("config.json: hidden_act is 5, expected \"silu\""));
  CHECK(error("{" + llama + R"(, "rope_scaling": {"type": "yarn", "factor": 2.0}})") ==
        "config.json: rope scaling: type is \"yarn\", expected default, linear or llama3");
  CHECK(error("{" + llama + R"(, "rope_parameters": {"rope_type": "yarn"}})") ==
        "config.json: rope scaling: rope_type is \"yarn\", expected default, linear or llama3");
}

TEST_CASE("huggingface: a rope scaling without one of its numbers is refused, not guessed",
          "[huggingface]") {
  const auto parse = [](const nlohmann::json& scaling) {
    const nlohmann::json object = {{"model_type", "llama"},    {"vocab_size", 8},
                                   {"hidden_size", 8},         {"num_hidden_layers", 1},
                                   {"num_attention_heads", 2}, {"intermediate_size", 8},
                                   {"rope_scaling", scaling}};
    return nn::parse_hf_config("config.json", object.dump()).as<nn::LlamaConfig>().rope;
  };
  const nlohmann::json linear = {{"type", "linear"}, {"factor", 4}};
  const nlohmann::json llama3 = {{"rope_type", "llama3"},
                                 {"factor", 8},
                                 {"low_freq_factor", 2},
                                 {"high_freq_factor", 5},
                                 {"original_max_position_embeddings", 64}};
  CHECK(parse(linear).factor == 4);
  CHECK(parse(llama3).original_max_position == 64);
  for (const nlohmann::json& whole : {linear, llama3}) {
    for (const auto& [key, value] : whole.items()) {
      if (key.ends_with("type")) continue;
      for (const bool is_null : {false, true}) {
        nlohmann::json scaling = whole;
        if (is_null) {
          scaling[key] = nullptr;
        } else {
          scaling.erase(key);
        }
        INFO(scaling.dump());
        const std::string found = is_null ? "null" : "missing";
        CHECK_THAT(error_of([&] { parse(scaling); }),
                   Catch::StartsWith("config.json: rope scaling: " + key + " is " + found +
                                     ", expected "));
      }
    }
  }
}

TEST_CASE("huggingface: ids of begin, end and padding are a number, several or none",
          "[huggingface]") {
  const nn::HfTokenIds ids = nn::parse_hf_token_ids("config.json", R"({"bos_token_id": 128000,
      "eos_token_id": [128001, 128008], "pad_token_id": -1})");
  CHECK(ids.bos == std::vector<int64_t>{128000});
  CHECK(ids.eos == std::vector<int64_t>{128001, 128008});
  CHECK(ids.pad.empty());
  const auto json = nlohmann::json::parse(nn::hf_config_json(nn::LlamaConfig{}, kF32, ids));
  CHECK(json["bos_token_id"] == 128000);
  CHECK(json["eos_token_id"] == std::vector<int>{128001, 128008});
  CHECK_FALSE(json.contains("pad_token_id"));
  const auto error = [](const std::string& value) {
    return error_of(
        [&] { nn::parse_hf_token_ids("config.json", R"({"eos_token_id": )" + value + "}"); });
  };
  for (const std::string bad : {"\"</s>\"", "1.5", "[1,\"2\"]", "-2", "4294967296", "{}"}) {
    CHECK(error(bad) == "config.json: eos_token_id is " + bad +
                            ", expected an integer in [0, 2147483647], or several");
  }
}

/// A config.json of 4 layers of `type` with more keys.
std::string window_config(const std::string& type, const std::string& rest) {
  return R"({"model_type": ")" + type + R"(", "vocab_size": 8, "hidden_size": 8,
      "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 8,
      "max_position_embeddings": 64, )" +
         rest + "}";
}

TEST_CASE("huggingface: a sliding window is the window of its layers, and back", "[huggingface]") {
  struct Case {
    std::string type, rest;
    int64_t window;
    std::string layers;
  };
  for (const Case& c : std::vector<Case>{
           {"mistral", R"("sliding_window": 16)", 16, "wwww"},
           {"mistral", R"("sliding_window": 4096)", 4096, "wwww"},
           {"mistral", R"("use_cache": true)", 4096, "wwww"},  // transformers' default
           {"mistral", R"("sliding_window": null)", 0, "ffff"},
           {"qwen2", R"("use_sliding_window": true, "sliding_window": 9, "max_window_layers": 1)",
            9, "fwww"},
           {"qwen3", R"("use_sliding_window": true, "sliding_window": 9, "max_window_layers": 0)",
            9, "wwww"},
           {"qwen2", R"("use_sliding_window": true, "sliding_window": 9)", 0, "ffff"},
           {"qwen2", R"("use_sliding_window": true, "sliding_window": 9, "max_window_layers": 4)",
            0, "ffff"},
           {"qwen2", R"("use_sliding_window": false, "sliding_window": 9, "max_window_layers": 1)",
            0, "ffff"},
           {"qwen3", R"("use_sliding_window": true, "sliding_window": 9, "layer_types":
               ["sliding_attention", "full_attention", "sliding_attention", "full_attention"])",
            9, "wfwf"},
           {"qwen2", R"("use_sliding_window": true, "sliding_window": 9, "layer_types":
               ["full_attention", "full_attention", "full_attention", "full_attention"])",
            0, "ffff"}}) {
    INFO(c.type << " " << c.rest);
    const auto check = [&](const std::string& text) {
      const auto config = nn::parse_hf_config("config.json", text).as<nn::LlamaConfig>();
      CHECK(config.context_length == 64);
      for (int64_t layer = 0; layer < 4; ++layer) {
        const bool has_window = c.layers[static_cast<size_t>(layer)] == 'w';
        CHECK(config.window_of(layer) == (has_window ? c.window : 0));
      }
      return config;
    };
    const nn::LlamaConfig config = check(window_config(c.type, c.rest));
    const std::string text = nn::hf_config_json(config, kF32);
    check(text);
    const auto json = nlohmann::json::parse(text);
    const bool is_mistral = c.type == "mistral";
    CHECK(json["model_type"] == (is_mistral && c.window == 0 ? "llama" : c.type));
    CHECK(json.contains("sliding_window") == (c.window > 0));
    CHECK(json.contains("layer_types") == (c.window > 0 && !is_mistral));
    if (c.layers == "fwww") CHECK(json["max_window_layers"] == 1);
    CHECK(json.contains("max_window_layers") ==
          (c.window > 0 && !is_mistral && c.layers != "wfwf"));
  }
}

TEST_CASE("huggingface: windows that are out of range are named", "[huggingface]") {
  const auto error = [](const std::string& type, const std::string& rest) {
    return error_of([&] { nn::parse_hf_config("config.json", window_config(type, rest)); });
  };
  CHECK(error("mistral", R"("sliding_window": 0)") ==
        "config.json: sliding_window is 0, expected an integer in [1, 2147483647]");
  const std::string on = R"("use_sliding_window": true, "sliding_window": 4, )";
  CHECK(error("qwen2", on + R"("max_window_layers": -1)") ==
        "config.json: max_window_layers is -1, expected an integer in [0, 2147483647]");
  CHECK(error("qwen2", on + R"("layer_types": ["sliding_attention"])") ==
        "config.json: layer_types is [\"sliding_attention\"], expected one for each of 4 layers");
  CHECK(error("qwen3", on + R"("layer_types": ["chunked_attention"])") ==
        "config.json: layer_types has \"chunked_attention\", expected full_attention or "
        "sliding_attention");
  std::string many = window_config("qwen2", on + R"("max_window_layers": 1)");
  many.replace(many.find("layers\": 4"), 10, "layers\": 2147483647");
  CHECK(error_of([&] { nn::parse_hf_config("config.json", many); }) ==
        "config.json: num_hidden_layers is 2147483647, expected at most 65536 beside a window");
  CHECK(error("qwen2", R"("layer_types": ["sliding_attention"])") ==
        "config.json: layer_types has \"sliding_attention\", expected \"full_attention\" only");
  CHECK(error("mistral", R"("sliding_window": 4, "layer_types": ["sliding_attention",
      "full_attention", "sliding_attention", "full_attention"])")
            .ends_with("expected \"sliding_attention\" for every layer beside sliding_window"));
}

TEST_CASE("huggingface: models that transformers has no name for are not exported",
          "[huggingface]") {
  nn::LlamaConfig both;
  both.qk_norm = both.qkv_bias = true;
  CHECK(error_of([&] {
          nn::hf_config_json(both, kF32);
        }).starts_with("export: qk_norm and qkv_bias together"));
  nn::LlamaConfig partial;
  partial.rope.interleaved = true;
  CHECK(error_of([&] {
          nn::hf_config_json(partial, kF32);
        }).starts_with("export: interleaved or partial rotary positions"));
  nn::LlamaConfig wide;
  wide.qkv_bias = true, wide.head_width = 7;
  CHECK(error_of([&] { nn::hf_config_json(wide, kF32); }).starts_with("export: head width 7"));
  nn::LlamaConfig alternating;
  alternating.window = 8, alternating.window_layers = "wf";
  CHECK(error_of([&] {
          nn::hf_config_json(alternating, kF32);
        }).starts_with("export: window_layers \"wf\", transformers' Mistral has the window in"));
  nn::LlamaConfig capped;
  capped.attn_softcap = 50, capped.logit_softcap = 30;
  CHECK(error_of([&] {
          nn::hf_config_json(capped, kF32);
        }).starts_with("export: soft-caps of 50 and 30, transformers' relatives of Llama have"));
  nn::Gpt2Config bare;
  bare.bias = false;
  CHECK(error_of([&] {
          nn::hf_config_json(bare, kF32);
        }).starts_with("export: transformers' GPT-2 always has biases"));
  const TempDir temp;
  CHECK(error_of([&] {
          HfWriter(temp.path(), nn::Gpt2Config{}, {.dtype = kF64});
        }).starts_with("export: dtype f64, expected f32, bf16 or f16"));
}

TEST_CASE("huggingface: an export refuses numbers that its dtype cannot hold", "[huggingface]") {
  const TempDir temp;
  nn::LlamaConfig config;
  config.vocab_size = 16, config.width = 8, config.ffn_width = 8;
  config.num_layers = 1, config.num_heads = config.num_kv_heads = 2, config.head_width = 4;
  for (const auto& [dtype, value, is_kept] : {std::tuple{kF16, 65504.0f, true},
                                              {kF16, -65520.0f, false},
                                              {kBF16, 1e38f, true},
                                              {kBF16, 3.4e38f, false},
                                              {kF32, 3.4e38f, true}}) {
    HfWriter writer(temp / fmt::format("{}{}", dtype, value), config, {.dtype = dtype});
    const nn::HfParameter& p = writer.parameters().back();
    std::vector<float> values(static_cast<size_t>(p.shape.numel()), 0.5f);
    values.back() = value;
    const auto write = [&] { writer.write(p.name, p.shape, values.data()); };
    if (is_kept) {
      CHECK_NOTHROW(write());
      continue;
    }
    CHECK(error_of(write) ==
          fmt::format("export: {} has {:g}, which {} cannot hold, expected --dtype={}", p.name,
                      value, dtype, dtype == kF16 ? "bf16 or f32" : "f32"));
  }
}

TEST_CASE("huggingface: weights that are cut while they are read are named", "[huggingface]") {
  const TempDir temp;
  const std::string dir = copy_of("qwen2", temp), path = dir + "/model.safetensors";
  const HfReader reader(dir);
  const auto nbytes = fs::file_size(path);
  fs::resize_file(path, nbytes - 100);
  for (const nn::HfParameter& p : reader.parameters()) {
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
      loaded.export_to(dir, world, {.token_ids = HfReader(folder(family)).token_ids()});
    });
    CHECK(nlohmann::json::parse(read_file(dir + "/" + kExportListName)) ==
          nlohmann::json::parse(read_file(folder(family) + "/export.json")));
  }
}

TEST_CASE("huggingface: missing and unexpected tensors and files are named", "[huggingface]") {
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

TEST_CASE("huggingface: a link to a file that is gone says so", "[huggingface]") {
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    const TempDir dir;
    fs::copy(folder("gpt2"), dir / "model");
    fs::remove(dir / "model/model.safetensors");
    fs::create_symlink("../../blobs/12ab", dir / "model" + "/" + name);
    CHECK(error_of([&] { HfReader reader(dir / "model"); }) ==
          dir / "model" + "/" + name +
              ": is a link to ../../blobs/12ab, which is not there, expected the file");
  }
}

TEST_CASE("huggingface: one file beside an index of others is read, and said", "[huggingface]") {
  const TempDir dir;
  fs::copy(folder("gpt2"), dir / "model");
  const std::string index = dir / "model/model.safetensors.index.json";
  const std::string single = dir / "model/model.safetensors";
  REQUIRE(fs::exists(single));
  const auto warning_of = [&](const std::string& text) {
    std::ofstream(index, std::ios::binary) << text;
    return stderr_of([&] { HfReader reader(dir / "model"); });
  };
  CHECK(warning_of(R"({"weight_map": {"a": "model.safetensors"}})") == "");
  CHECK(warning_of(R"({"weight_map": {"a": "model-00001-of-00002.safetensors"}})") ==
        "warning: " + dir / "model" +
            ": has model.safetensors, which is read as transformers does, and "
            "model.safetensors.index.json, whose files are not: if those are the newer ones, move "
            "the first away\n");
}

TEST_CASE("F18: an index with paths, absolute names or links out of the folder is refused",
          "[huggingface]") {
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
  CHECK(error_of([&] { HfReader reader(dir); })
            .ends_with("is a link to " + fs::canonical(temp.path()).string() +
                       "/elsewhere, expected a file in " + fs::canonical(dir).string()));
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

/// Tensors as they are in a file.
struct RawTensor {
  SafetensorsEntry entry;
  std::string bytes;
};

std::vector<RawTensor> tensors_of(const std::string& path) {
  const SafetensorsFile file(path);
  std::vector<RawTensor> tensors;
  for (const SafetensorsEntry& entry : file.entries()) {
    tensors.push_back({entry, std::string(static_cast<const char*>(file.data(entry)),
                                          static_cast<size_t>(entry.nbytes()))});
  }
  return tensors;
}

void write_tensors(const std::string& path, const std::vector<RawTensor>& tensors) {
  std::vector<SafetensorsEntry> entries;
  for (const RawTensor& t : tensors) entries.push_back(t.entry);
  SafetensorsWriter writer(path, entries);
  for (const RawTensor& t : tensors) writer.write(t.entry.name, t.bytes.data(), t.entry.nbytes());
  writer.finish();
}

/// The same file with other names.
void rename_tensors(const std::string& path,
                    const std::function<std::string(const std::string&)>& name_of) {
  std::vector<RawTensor> tensors = tensors_of(path);
  for (RawTensor& t : tensors) t.entry.name = name_of(t.entry.name);
  write_tensors(path, tensors);
}

RawTensor& find(std::vector<RawTensor>& tensors, const std::string& name) {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&](const RawTensor& t) { return t.entry.name == name; });
  REQUIRE(found != tensors.end());
  return *found;
}

std::vector<float> values_of(const HfReader& reader, const std::string& name) {
  std::vector<float> values(static_cast<size_t>(reader.shape_of(name).numel()));
  reader.read(name, 0, static_cast<int64_t>(values.size()), values.data());
  return values;
}

TEST_CASE("huggingface: configurations as popular models have them are taken without a word",
          "[huggingface]") {
  const std::string sizes = R"("vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
      "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
      "rms_norm_eps": 1e-05, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": true,
      "bos_token_id": 1, "eos_token_id": 2, )";
  const std::string gpt2 = R"("model_type": "gpt2", "vocab_size": 320, "n_positions": 64,
      "n_ctx": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 1e-05,
      "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
      "initializer_range": 0.02, "summary_activation": null, "summary_first_dropout": 0.1,
      "summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true, )";
  const std::string bloom = R"("model_type": "bloom", "architectures": ["BloomForCausalLM"],
      "apply_residual_connection_post_layernorm": false, "attention_dropout": 0.0,
      "attention_softmax_in_fp32": true, "bias_dropout_fusion": true, "bos_token_id": 1,
      "eos_token_id": 2, "pad_token_id": 3, "unk_token_id": 0, "hidden_dropout": 0.0,
      "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": true,
      "n_inner": null, "offset_alibi": 100, "skip_bias_add": true, "skip_bias_add_qkv": false,
      "slow_but_exact": false, "use_cache": true, "vocab_size": 320, )";
  const auto llama = [&](const std::string& rest) {
    return R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", )" + sizes + rest +
           "}";
  };
  const auto other = [&](const std::string& arch, const std::string& type,
                         const std::string& rest) {
    return "{\"architectures\": [\"" + arch + "\"], \"model_type\": \"" + type + "\", " + sizes +
           rest + "}";
  };
  const std::string llama3_scaling = R"({"factor": 8.0, "high_freq_factor": 4.0,
      "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"})";
  const std::vector<std::pair<const char*, std::string>> configs = {
      {"Llama 1", llama(R"("_name_or_path": "x", "pad_token_id": 0, "max_sequence_length": 2048,
          "torch_dtype": "float16", "transformers_version": "4.28.1")")},
      {"Llama 2", llama(R"("pretraining_tp": 1, "rope_scaling": null, "tie_word_embeddings": false,
          "num_key_value_heads": 4, "torch_dtype": "float16", "attention_bias": false)")},
      {"Llama 2 chat, early", llama(R"("max_length": 4096, "temperature": 0.9, "top_p": 0.6,
          "do_sample": true, "pretraining_tp": 1)")},
      {"Llama 3", llama(R"("rope_theta": 500000.0, "num_key_value_heads": 2, "mlp_bias": false,
          "attention_dropout": 0.0, "pretraining_tp": 1, "eos_token_id_list": [])")},
      {"Llama 3.1", llama(R"("rope_theta": 500000.0, "rope_scaling": )" + llama3_scaling)},
      {"Llama 3.2", llama(R"("head_dim": 16, "tie_word_embeddings": true, "rope_theta": 500000.0,
          "rope_scaling": )" +
                          llama3_scaling)},
      {"Llama, transformers 5", llama(R"("dtype": "bfloat16", "pad_token_id": null,
          "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
          "layer_types": ["full_attention", "full_attention"], "transformers_version": "5.0.0")")},
      {"Llama 3.1, transformers 5", llama(R"("dtype": "bfloat16", "rope_parameters":
          {"rope_theta": 500000.0, "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
           "original_max_position_embeddings": 8192, "rope_type": "llama3"})")},
      {"TinyLlama", llama(R"("num_key_value_heads": 2, "rope_scaling": null,
          "torch_dtype": "float32", "pretraining_tp": 1)")},
      {"SmolLM", llama(R"("is_llama_config": true, "rope_interleaved": false, "rope_theta": 10000.0,
          "tie_word_embeddings": true, "transformers.js_config": {"dtype": "q4"})")},
      {"Yi", llama(R"("num_key_value_heads": 2, "pad_token_id": 0, "rope_theta": 5000000.0)")},
      {"DeepSeek-Coder", llama(R"("rope_scaling": {"factor": 4.0, "type": "linear"},
          "rope_theta": 100000)")},
      {"CodeLlama", llama(R"("rope_theta": 1000000, "num_key_value_heads": 2, "vocab_file": "x")")},
      {"uploaded by unsloth", llama(R"("unsloth_version": "2024.9", "unsloth_fixed": true,
          "pad_token_id": 0, "_attn_implementation_autoset": true, "torch_dtype": "bfloat16")")},
      {"merged by axolotl", llama(R"("_name_or_path": "./merged",
          "num_beams": 1, "repetition_penalty": 1.0, "torchscript": false, "return_dict": true,
          "is_decoder": false, "is_encoder_decoder": false, "add_cross_attention": false,
          "tie_encoder_decoder": false, "cross_attention_hidden_size": null, "pruned_heads": {},
          "output_scores": false, "id2label": {"0": "LABEL_0"}, "prefix": null, "top_k": 50,
          "typical_p": 1.0, "bad_words_ids": null, "use_bfloat16": false, "length_penalty": 1.0)")},
      {"numbers of Python", llama(R"("max_length": Infinity, "temperature": NaN,
          "top_p": -Infinity)")},
      {"Mistral 7B v0.1", other("MistralForCausalLM", "mistral", R"("num_key_value_heads": 2,
          "sliding_window": 4096, "rope_theta": 10000.0, "attention_dropout": 0.0)")},
      {"Mistral 7B v0.3", other("MistralForCausalLM", "mistral", R"("num_key_value_heads": 2,
          "sliding_window": null, "rope_theta": 1000000.0, "head_dim": null)")},
      {"Qwen2", other("Qwen2ForCausalLM", "qwen2", R"("num_key_value_heads": 2,
          "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": false,
          "attention_dropout": 0.0, "rope_theta": 1000000.0, "tie_word_embeddings": true)")},
      {"Qwen2.5",
       other("Qwen2ForCausalLM", "qwen2", R"("num_key_value_heads": 2, "use_mrope": false,
          "max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": false)")},
      {"Qwen2, a window that hides nothing",
       other("Qwen2ForCausalLM", "qwen2",
             R"("use_sliding_window": true, "sliding_window": 128, "max_window_layers": 1)")},
      {"Qwen3", other("Qwen3ForCausalLM", "qwen3", R"("num_key_value_heads": 2, "head_dim": 16,
          "attention_bias": false, "max_window_layers": 36, "sliding_window": null,
          "use_sliding_window": false, "rope_scaling": null, "rope_theta": 1000000,
          "layer_types": ["full_attention", "full_attention"])")},
      {"GPT-2", "{" + gpt2 + R"("architectures": ["GPT2LMHeadModel"], "task_specific_params":
          {"text-generation": {"do_sample": true, "max_length": 50}}})"},
      {"GPT-2 medium", "{" + gpt2 + R"("n_special": 0, "predict_special_tokens": true})"},
      {"distilgpt2", "{" + gpt2 + R"("_num_labels": 1, "id2label": {"0": "LABEL_0"},
          "label2id": {"LABEL_0": 0}})"},
      {"DialoGPT", "{" + gpt2 + R"("finetuning_task": null, "gradient_checkpointing": false,
          "n_inner": null, "num_labels": 1, "output_attentions": false, "pruned_heads": {},
          "torchscript": false, "use_bfloat16": false})"},
      {"BLOOM-560m", "{" + bloom + R"("n_embed": 64, "n_layer": 2, "num_attention_heads": 4,
          "pretraining_tp": 1, "seq_length": 2048})"},
      {"BLOOMZ", "{" + bloom + R"("hidden_size": 64, "n_layer": 2, "n_head": 4,
          "pretraining_tp": 4, "seq_length": 2048, "torch_dtype": "float16"})"},
  };
  for (const auto& [name, text] : configs) {
    INFO(name);
    CHECK(stderr_of([&, &text = text] {
            CHECK_NOTHROW(nn::parse_hf_config("config.json", text));
          }) == "");
  }
  for (const char* arch : {"PhiForCausalLM", "GemmaForCausalLM", "Phi3ForCausalLM"}) {
    CHECK(error_of([&] {
            nn::parse_hf_config("config.json", other(arch, "phi", "\"a\": 1"));
          }).find("expected one of") != std::string::npos);
  }
}

TEST_CASE("huggingface: keys that change numbers are errors, unknown ones a single warning",
          "[huggingface]") {
  const auto config = [](const std::string& rest) {
    return R"({"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 8, )" +
           rest + "}";
  };
  for (const std::string bad :
       {R"("embedding_multiplier": 12.0)", R"("logits_scaling": 8)", R"("logit_scale": 0.06)",
        R"("final_logit_softcapping": 30.0)", R"("attn_logit_softcap": 50)", R"("my_scale": 2)",
        R"("partial_rotary_factor": 0.5)", R"("rope_interleaved": true)",
        R"("quantization_config": {"bits": 4})", R"("num_local_experts": 8)",
        R"("output_multiplier": 2)", R"("layer_types": ["sliding_attention"])",
        R"("position_embedding_type": "absolute")", R"("no_rope_layers": [1])",
        R"("rope_scaling": {"type": "linear", "factor": 2, "new": 3})",
        R"("rope_scaling": {"type": "default", "factor": 2})",
        R"("rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5})"}) {
    INFO(bad);
    CHECK(stderr_of([&] {
            CHECK_THROWS_AS(nn::parse_hf_config("config.json", config(bad)), InputError);
          }) == "");
  }
  // Off, or what it is anyway.
  for (const std::string good :
       {R"("embedding_multiplier": 1.0)", R"("final_logit_softcapping": null)", R"("new": 0)",
        R"("logit_scale": 1)", R"("new": "")", R"("new": false)", R"("new": [])",
        R"("position_embedding_type": "rope")", R"("initializer_factor": 0.5)",
        R"("rope_scaling": {"type": "default", "factor": 1.0})"}) {
    INFO(good);
    CHECK(stderr_of([&] { nn::parse_hf_config("config.json", config(good)); }) == "");
  }
  const std::string unknown = config(R"("new_thing": 3, "another\u001b": {"a": 1})");
  CHECK(stderr_of([&] {
          nn::parse_hf_config("one/config.json", unknown);
          nn::parse_hf_config("one/config.json", unknown);
        }) ==
        "warning: one/config.json: keys that nothing is known of here are ignored: another\\x1b, "
        "new_thing (no warning for those in model.ignore_keys)\n");
  CHECK(stderr_of([&] {
          nn::parse_hf_config("two/config.json", unknown, {"new_thing", "another\x1b"});
        }) == "");
  // What changes numbers cannot be ignored, inside an object neither.
  for (const char* key : {"quantization_config", "my_scale", "bits", "rope_scaling", "new"}) {
    CHECK_THROWS_AS(
        nn::parse_hf_config("config.json", config(R"("quantization_config": {"bits": 4})"), {key}),
        InputError);
    CHECK_THROWS_AS(nn::parse_hf_config("config.json", config(R"("my_scale": 2)"), {key}),
                    InputError);
    CHECK_THROWS_AS(
        nn::parse_hf_config("config.json",
                            config(R"("rope_scaling": {"type": "linear", "factor": 2, "new": 3})"),
                            {key}),
        InputError);
  }
}

TEST_CASE("huggingface: links inside the repository's folder are followed", "[huggingface]") {
  for (const char* family : {"llama3", "gpt2"}) {  // several files, and one
    INFO(family);
    const TempDir temp;
    const std::string repository = temp.path() + "/models--a--b";
    fs::create_directories(repository + "/blobs");
    fs::create_directories(repository + "/snapshots/0123");
    const std::string dir = repository + "/snapshots/0123";
    for (const auto& entry : fs::directory_iterator(folder(family))) {
      const std::string name = entry.path().filename().string();
      fs::copy(entry.path(), repository + "/blobs/of-" + name);
      fs::create_symlink("../../blobs/of-" + name, dir + "/" + name);
    }
    const HfReader reader(dir), original(folder(family));
    const std::string name = reader.parameters().back().name;
    CHECK(values_of(reader, name) == values_of(original, name));
  }
}

TEST_CASE("huggingface: norms by the names that they once had are read", "[huggingface]") {
  const TempDir temp;
  const std::string dir = copy_of("bert", temp), file = dir + "/model.safetensors";
  // Spaces keep the length of the header.
  replace_in(file, "embeddings.LayerNorm.weight\"", "embeddings.LayerNorm.gamma\" ");
  replace_in(file, "embeddings.LayerNorm.bias\"", "embeddings.LayerNorm.beta\"");
  CHECK(values_of(HfReader(dir), "embed_norm.weight") ==
        values_of(HfReader(folder("bert")), "embed_norm.weight"));
  CHECK(values_of(HfReader(dir), "embed_norm.bias") ==
        values_of(HfReader(folder("bert")), "embed_norm.bias"));
}

TEST_CASE("huggingface: whether the head is tied is decided by its values", "[huggingface]") {
  const TempDir temp;
  const std::string dir = copy_of("gpt2", temp), path = dir + "/model.safetensors";
  std::vector<RawTensor> tensors = tensors_of(path);
  std::erase_if(tensors, [](const RawTensor& t) { return t.entry.name == "lm_head.weight"; });
  RawTensor head = find(tensors, "transformer.wte.weight");
  head.entry.name = "lm_head.weight";
  tensors.push_back(head);
  write_tensors(path, tensors);
  CHECK(stderr_of([&] { CHECK(HfReader(dir).config().is_tied()); }) == "");
  CHECK(read_hf_model(dir).config.is_tied());

  const float changed = 5;
  std::memcpy(tensors.back().bytes.data(), &changed, sizeof(changed));
  write_tensors(path, tensors);
  CHECK(stderr_of([&] {
          const HfReader reader(dir);
          CHECK_FALSE(reader.config().is_tied());
          CHECK(values_of(reader, "head.weight")[0] == 5);
          CHECK_FALSE(read_hf_model(dir).config.is_tied());
        }) == "warning: " + dir +
                  ": tie_word_embeddings is true, but lm_head.weight is not "
                  "transformer.wte.weight: both are used, untied\n");

  std::erase_if(tensors, [](const RawTensor& t) { return t.entry.name.ends_with("wte.weight"); });
  write_tensors(path, tensors);
  CHECK(stderr_of([&] {
          const HfReader reader(dir);
          CHECK(reader.config().is_tied());
          CHECK(values_of(reader, "embed.weight")[0] == 5);
        }) == dir + ": has no transformer.wte.weight; tied to it, lm_head.weight is both\n");
}

TEST_CASE("huggingface: an untied model without its head is told of tying", "[huggingface]") {
  const TempDir temp;
  const std::string dir = copy_of("llama2", temp), path = dir + "/model.safetensors";
  std::vector<RawTensor> tensors = tensors_of(path);
  std::erase_if(tensors, [](const RawTensor& t) { return t.entry.name == "lm_head.weight"; });
  write_tensors(path, tensors);
  CHECK(error_of([&] {
          HfReader reader(dir);
        }).ends_with("missing lm_head.weight (tie_word_embeddings: true has none)"));
}

TEST_CASE("huggingface: names of wrapped modules are read without the wrapper", "[huggingface]") {
  const auto prefixed = [](const std::string& prefix) {
    return [prefix](const std::string& name) { return prefix + name; };
  };
  const auto inside = [](const std::string& name) {
    const size_t at = name.find("self_attn.");
    return at == std::string::npos ? name : name.substr(0, at) + "_orig_mod." + name.substr(at);
  };
  const auto headless = [](const std::string& name) {
    return name.starts_with("model.") ? name.substr(6) : name;
  };
  const std::pair<std::function<std::string(const std::string&)>, std::string> cases[] = {
      {prefixed("_orig_mod."), "_orig_mod."},
      {prefixed("module."), "module."},
      {prefixed("module._orig_mod."), "_orig_mod., module."},
      {prefixed("base_model.model."), "base_model.model."},
      {inside, "_orig_mod."},
      {headless, ""}};
  for (const auto& [name_of, wrappers] : cases) {
    INFO(name_of("model.layers.0.self_attn.q_proj.weight"));
    const TempDir temp;
    const std::string dir = copy_of("llama2", temp);
    rename_tensors(dir + "/model.safetensors", name_of);
    const HfReader original(folder("llama2"));
    const std::string line = stderr_of([&] {
      const HfReader reader(dir);
      for (const nn::HfParameter& p : original.parameters()) {
        CHECK(values_of(reader, p.name) == values_of(original, p.name));
      }
    });
    CHECK(line == (wrappers.empty() ? ""
                                    : dir + ": names of tensors are read without " + wrappers +
                                          " of a wrapped module\n"));
  }
  const TempDir temp;
  const std::string dir = copy_of("llama2", temp), path = dir + "/model.safetensors";
  rename_tensors(path, prefixed("what.is.this."));
  const std::string error = error_of([&] { HfReader reader(dir); });
  CHECK(error.find(" and ") != std::string::npos);
  CHECK(error.ends_with(" more"));
  CHECK(error.size() < 2000);
  fs::copy_file(folder("llama2") + "/model.safetensors", path,
                fs::copy_options::overwrite_existing);
  rename_tensors(path, [](const std::string& name) {
    return name == "model.norm.weight" ? "model.norm.base_layer.weight" : name;
  });
  CHECK(error_of([&] { HfReader reader(dir); })
            .ends_with("tensor model.norm.base_layer.weight is part of a PEFT adapter, expected it "
                       "merged into the model (merge_and_unload)"));
  fs::remove(path);
  std::ofstream(dir + "/adapter_model.safetensors") << "x";
  CHECK(error_of([&] { HfReader reader(dir); }).find("(it has a PEFT adapter; merge it") !=
        std::string::npos);
}

TEST_CASE("huggingface: a name that is made of wrappers without end is refused", "[huggingface]") {
  const TempDir temp;
  const std::string dir = copy_of("llama2", temp);
  std::string name;
  while (name.size() < 20'000'000) name += "_orig_mod.";
  {
    SafetensorsWriter writer(dir + "/model.safetensors", {{name, kF32, Shape{1}}});
    const float value = 1;
    writer.write(name, &value, sizeof(value));
    writer.finish();
  }
  const std::string error = error_of([&] { HfReader reader(dir); });
  CHECK_THAT(error, Catch::EndsWith(
                        fmt::format("has a name of {} bytes, expected at most 4096", name.size())));
  CHECK(error.size() < 500);
}

TEST_CASE("huggingface: a value that is not finite is named by its tensor", "[huggingface]") {
  // As it is stored, and transposed.
  for (const std::string tensor : {"transformer.ln_f.weight", "transformer.h.0.mlp.c_fc.weight"}) {
    const TempDir temp;
    const std::string dir = copy_of("gpt2", temp), path = dir + "/model.safetensors";
    std::vector<RawTensor> tensors = tensors_of(path);
    RawTensor& t = find(tensors, tensor);
    REQUIRE(t.entry.dtype == kF32);
    const float bad = -std::numeric_limits<float>::infinity();
    std::memcpy(t.bytes.data() + 4, &bad, sizeof(bad));
    write_tensors(path, tensors);
    CHECK(error_of([&] {
            const HfReader reader(dir);
            for (const nn::HfParameter& p : reader.parameters()) values_of(reader, p.name);
          }) == path + ": tensor " + tensor + " has a value that is -inf, expected finite ones");
  }
}

TEST_CASE("huggingface: no more layers than tensors, before a list of them is made",
          "[huggingface]") {
  const TempDir temp;
  const std::string dir = copy_of("llama2", temp);
  const auto num_tensors = tensors_of(dir + "/model.safetensors").size();
  replace_in(dir + "/config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 2147483647");
  CHECK(error_of([&] { HfReader reader(dir); }) ==
        dir + "/config.json: 2147483647 layers, expected no more than the " +
            std::to_string(num_tensors) + " tensors beside it");
}

}  // namespace
}  // namespace tessera::dist
