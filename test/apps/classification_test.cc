// Classification of texts: data, training beside transformers, figures, and what comes out.

#include "apps/classification.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "apps/checkpoint_command.h"
#include "apps/options.h"
#include "apps/saved_model.h"
#include "core/autograd.h"
#include "core/runtime/context.h"
#include "dist/checkpoint/huggingface.h"
#include "nn/generate.h"
#include "test/apps/runs.h"
#include "test/golden/golden.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_of;
using tessera::testing::error_on;
using tessera::testing::read_file;
using tessera::testing::read_metrics;
using tessera::testing::TempDir;
using tessera::testing::train_on;

namespace {

/// Texts of many lengths in three classes.
std::string many_texts() {
  std::string lines;
  for (int i = 0; i < 60; ++i) {
    const char* const label = i % 3 == 0 ? "up" : i % 3 == 1 ? "down" : "flat";
    const std::string text(1 + static_cast<size_t>(i % 11), "uds"[i % 3]);
    lines += nlohmann::json{{"text", text}, {"label", label}}.dump() + "\n";
  }
  return lines;
}

Config class_config(const TempDir& dir, const std::vector<std::string>& extra = {}) {
  return testing::six_step_config(
      dir, {"--data.classify=" + dir.write("t.jsonl", many_texts()), "--model.context=24"}, extra);
}

/// A golden's model with a tokenizer of bytes, as a directory of transformers.
std::string model_dir(const TempDir& dir, const std::string& golden) {
  const std::string to = dir / "model";
  std::filesystem::remove_all(to);
  std::filesystem::create_directories(to);
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::copy_file(testing::golden_dir() + "/" + golden + "/" + name, to + "/" + name);
  }
  for (const auto& [name, content] : text::make_byte_tokenizer()->hf_files()) {
    std::ofstream(to + "/" + name) << content;
  }
  return to;
}

/// As make_hf_classes.py has it.
Config golden_config(const TempDir& dir, const std::string& family, const std::string& lines,
                     const std::string& out) {
  const std::vector<std::string> overrides = {
      "--data.classify=" + dir.write("golden.jsonl", lines),
      "--model.from=" + model_dir(dir, "hf_classes/" + family),
      "--device=cpu",
      "--output.dir=" + out,
      "--train.steps=20",
      "--train.micro_batch=1",
      "--train.global_batch=12",
      "--train.log_every=1000",
      "--train.eval_every=0",
      "--data.val_fraction=0",
      "--checkpoint.every=0",
      "--optim.lr=5e-3",
      "--optim.beta1=0.9",
      "--optim.beta2=0.95",
      "--optim.eps=1e-8",
      "--optim.weight_decay=0.1",
      "--optim.clip=1",
      "--optim.schedule=constant"};
  return load_config("", overrides);
}

void export_model(const std::string& from, const std::string& to) {
  const auto close = [](std::FILE* file) { std::fclose(file); };
  const std::unique_ptr<std::FILE, decltype(close)> out(std::fopen("/dev/null", "w"), close);
  REQUIRE(checkpoint_command({"export", from, to}, out.get()) == 0);
}

}  // namespace

TEST_CASE("classification: 20 steps are transformers' within 1e-5, on 1 to 4 ranks",
          "[classify][golden]") {
  for (const std::string family : {"bert", "qwen3"}) {
    const auto golden = nlohmann::json::parse(
        read_file(testing::golden_dir() + "/hf_classes/" + family + "/logits.json"));
    std::string lines;
    for (const auto& row : golden["texts"]) {
      // An index of the model's classes; names of them below.
      lines += nlohmann::json{{"text", row[0]}, {"label", row[1]}}.dump() + "\n";
    }
    for (const int ranks : {1, 2, 3, 4}) {
      CAPTURE(family, ranks);
      const TempDir dir;
      train_on(ranks, golden_config(dir, family, lines, dir / "out"));
      const auto steps = read_metrics(dir / "out");
      REQUIRE(steps.size() == 20);
      double worst = 0;
      for (size_t i = 0; i < steps.size(); ++i) {
        const double expected = golden["losses"][i], loss = steps[i]["loss"];
        worst = std::max(worst, std::abs(loss - expected) / expected);
      }
      CHECK(worst <= 1e-5);
      if (ranks > 1) continue;
      // What comes out is what went in, trained.
      export_model(dir / "out", dir / "hf");
      const auto config = nlohmann::json::parse(read_file(dir / "hf/config.json"));
      CHECK(config["architectures"][0] == (family == "bert" ? "BertForSequenceClassification"
                                                            : "Qwen3ForSequenceClassification"));
      CHECK(config["id2label"] == nlohmann::json{{"0", "no"}, {"1", "perhaps"}, {"2", "yes"}});
      CHECK(config["label2id"] == nlohmann::json{{"no", 0}, {"perhaps", 1}, {"yes", 2}});
      const dist::HfReader reader(dir / "hf");
      CHECK(reader.names().size() == dist::HfReader(dir / "model").names().size());
      CHECK(reader.config().classifier()->classes ==
            std::vector<std::string>{"no", "perhaps", "yes"});
    }
  }
}

TEST_CASE("classification: what the classes are, and how many texts of each, is said",
          "[classify]") {
  const TempDir dir;
  const auto load = [&](const std::string& rows, const std::vector<std::string>& extra = {}) {
    std::vector<std::string> all = {"--data.classify=" + dir.write("rows.jsonl", rows)};
    all.insert(all.end(), extra.begin(), extra.end());
    return load_data(class_config(dir, all));
  };
  const Data named = load_data(class_config(dir));
  CHECK(named.texts->classes == std::vector<std::string>{"down", "flat", "up"});
  CHECK(named.texts->count() == 60);
  CHECK(named.chats.starts_with("texts: 60 of 1 files, "));
  CHECK(named.chats.ends_with(" 3 classes: down 20, flat 20, up 20"));
  // Whole numbers count as such: 10 is behind 9.
  const std::string numbers =
      "{\"text\": \"a\", \"label\": 10}\n{\"text\": \"b\", \"label\": 9}\n"
      "{\"text\": \"c\", \"label\": -1}\n";
  CHECK(load(numbers).texts->classes == std::vector<std::string>{"-1", "9", "10"});
  CHECK(load(numbers).texts->labels == std::vector<int32_t>{2, 1, 0});
  // Of model.classes both the names and their numbers.
  const std::string mixed =
      "{\"say\": \"a\", \"of\": \"good\"}\n{\"say\": \"bcd\", \"of\": 0}\n"
      "{\"say\": \"c\", \"of\": \"1\"}\n";
  const std::vector<std::string> columns = {"--data.field=say", "--data.label_field=of",
                                            "--model.classes=bad,good"};
  const Data fields = load(mixed, columns);
  CHECK(fields.texts->labels == std::vector<int32_t>{1, 0, 1});
  CHECK(fields.texts->begins == std::vector<int64_t>{0, 1, 4, 5});
  // Longer than the context: cut, or left out.
  auto few = columns;
  few.push_back("--model.context=2");
  CHECK(load(mixed, few).texts->begins == std::vector<int64_t>{0, 1, 3, 4});
  CHECK(load(mixed, few).chats.ends_with("; 1 longer than model.context = 2 tokens: cut"));
  few.push_back("--data.long_chats=drop");
  CHECK(load(mixed, few).texts->labels == std::vector<int32_t>{1, 1});
  CHECK(load(mixed, few).chats.ends_with("; 1 longer than model.context = 2 tokens: dropped"));
}

TEST_CASE("classification: what is wrong with a row is said with file and row", "[classify]") {
  const TempDir dir;
  const auto error_of_row = [&](const std::string& row, std::vector<std::string> extra = {}) {
    const std::string path =
        dir.write("bad.jsonl", "{\"text\": \"a\", \"label\": \"good\"}\n" + row + "\n");
    extra.insert(extra.begin(), "--data.classify=" + path);
    const std::string error = error_on(2, class_config(dir, extra));
    CHECK(error.find('\n') == std::string::npos);
    const std::string begin = path + ": line 2: ";
    return error.starts_with(begin) ? error.substr(begin.size()) : error;
  };
  CHECK(error_of_row(R"({"text": "a"})") == "expected the key \"label\"");
  CHECK(error_of_row(R"({"label": "bad"})") == "expected the key \"text\"");
  CHECK(error_of_row(R"({"text": ["a"], "label": "bad"})") == "\"text\" is list, expected a text");
  CHECK(error_of_row(R"({"text": "", "label": "bad"})") == "\"text\" has no token");
  CHECK(error_of_row(R"({"text": "a", "label": 0.5})") ==
        "\"label\" is float, expected a text or a whole number");
  for (const char* label : {"\"ugly\"", "2", "-1", "\"2\""}) {
    const std::string row = fmt::format("{{\"text\": \"a\", \"label\": {}}}", label);
    CAPTURE(row);
    CHECK(error_of_row(row, {"--model.classes=bad,good"}).ends_with(", expected one of bad, good"));
  }
  CHECK_THAT(error_of_row(R"({"text": "a", "label": 99999999999999999999})"),
             Catch::Contains("the integer 99999999999999999999 has more than 64 bits"));
  CHECK(error_of_row(R"({"text": "a", "label": "ugly"})", {"--model.classes=bad,good"}) ==
        "\"label\" is ugly, expected one of bad, good");
  const std::string path = dir / "bad.jsonl";
  CHECK(
      error_of_row(R"({"text": "b", "label": "good"})") ==
      fmt::format("data.classify = {}: 2 texts of 1 files with 1 different labels, expected two or "
                  "more",
                  path));
  CHECK(error_of_row(R"({"text": "b", "label": "so, so"})") ==
        fmt::format("data.classify = {}: a class is called \"so, so\", expected names without "
                    "commas, or model.classes and labels that are indices of it",
                    path));
}

TEST_CASE("classification: an epoch has each text once, apart from those of validation",
          "[classify]") {
  const TempDir dir;
  const Config config = class_config(dir);
  const Data data = load_data(config);
  const SampleOptions options = sample_options(config, data);
  std::map<std::pair<std::string, int32_t>, int> found;
  int64_t num_val = 0;
  for (const SplitPart part : {SplitPart::kTrain, SplitPart::kVal}) {
    const TextSamples samples(data.texts, options, config.data.val_fraction, part);
    // The last batch of validation is filled up with what does not count.
    for (int64_t first = 0; first < samples.num_samples(); first += 8) {
      const Batch batch = samples.batch(first, 8);
      CHECK(batch.T == 16);
      CHECK(batch.num_counted() == samples.num_targets(first, 8));
      for (size_t row = 0; row < 8; ++row) {
        if (batch.labels[row] == kIgnoredTarget) continue;
        std::string text;
        for (int64_t t = 0; t < batch.lengths[row]; ++t) {
          text += static_cast<char>(batch.inputs[row * 16 + static_cast<size_t>(t)]);
        }
        ++found[{text, batch.labels[row]}];
        num_val += part == SplitPart::kVal ? 1 : 0;
      }
    }
    CHECK(samples.num_samples() == (part == SplitPart::kTrain ? 48 : 12));
  }
  std::map<std::pair<std::string, int32_t>, int> expected;
  for (int64_t i = 0; i < 60; ++i) {
    const auto at = static_cast<size_t>(i);
    std::string text;
    for (int64_t t = data.texts->begins[at]; t < data.texts->begins[at + 1]; ++t) {
      text += static_cast<char>(data.texts->tokens[t]);
    }
    ++expected[{text, data.texts->labels[at]}];
  }
  CHECK(found == expected);
  CHECK(num_val == 12);
}

TEST_CASE("classification: accuracy and F1 by hand, over all ranks", "[classify]") {
  // Targets 0 0 1 2, predictions 0 1 1 1; class 3 is nowhere, and the last row does not count.
  const std::vector<float> logits = {3, 1, 0, 0, 0, 2, 1, 0, 0, 2, 1, 0, 0, 2, 1, 0, 9, 0, 0, 0};
  const std::vector<int32_t> labels = {0, 0, 1, 2, kIgnoredTarget};
  for (const int ranks : {1, 2, 5}) {
    dist::run_ranks(ranks, [&](dist::World& world) {
      ClassScores scores(4);
      for (size_t row = static_cast<size_t>(world.rank()); row < 5;
           row += static_cast<size_t>(ranks)) {
        Batch batch;
        batch.labels = {labels[row]};
        scores.add(from_values(std::span(logits).subspan(row * 4, 4), {1, 4}), batch);
      }
      const auto [accuracy, f1] = scores.finish(world);
      CHECK(accuracy == 0.5);
      // 2 * 1 / (2 + 1), 2 * 1 / (1 + 3), 0 / (1 + 0)
      CHECK(f1 == Approx((2.0 / 3 + 0.5 + 0) / 3));
    });
  }
}

TEST_CASE("classification: each pooling learns; figures are those of any number of ranks",
          "[classify]") {
  const TempDir dir;
  for (const std::string pooling : {"auto", "cls", "last", "mean"}) {
    for (const std::string kind : {"llama", "bert"}) {
      std::vector<nlohmann::json> one;
      for (const int ranks : {1, 2, 4}) {
        if (ranks > 1 && pooling == "cls") continue;
        CAPTURE(pooling, kind, ranks);
        const std::string out = dir / (pooling + kind + std::to_string(ranks));
        train_on(ranks, class_config(dir, {"--model.pooling=" + pooling, "--model.kind=" + kind,
                                           "--output.dir=" + out, "--train.reproducible=true",
                                           "--checkpoint.every=0"}));
        const auto steps = read_metrics(out);
        REQUIRE(steps.size() == 6);
        if (ranks == 1) one = steps;
        for (size_t i = 0; i < 6; ++i) {
          CHECK(steps[i].contains("val_accuracy") == (i % 3 == 2));
          for (const char* key : {"loss", "grad_norm", "val_loss", "val_accuracy", "val_f1"}) {
            CHECK(steps[i].value(key, 0.0) == one[i].value(key, 0.0));
          }
        }
        CHECK(steps[5]["val_loss"] < steps[0]["loss"].get<double>());
      }
    }
  }
}

TEST_CASE("classification: a run goes on as it was, and not with other classes", "[classify]") {
  const TempDir dir;
  train_on(1, class_config(dir));
  const auto whole = read_metrics(dir / "out");
  std::filesystem::copy(dir / "out", dir / "again", std::filesystem::copy_options::recursive);
  std::filesystem::remove_all(dir / "again/" + dist::step_directory_name(6));
  const auto again = [&](const std::vector<std::string>& extra) {
    std::vector<std::string> all = {"--output.dir=" + dir / "again", "--checkpoint.resume=auto"};
    all.insert(all.end(), extra.begin(), extra.end());
    return class_config(dir, all);
  };
  CHECK_THAT(error_on(1, again({"--model.classes=down,up,flat"})),
             Catch::Contains("model.classes \"down,flat,up\" there, \"down,up,flat\" here"));
  CHECK_THAT(error_on(1, again({"--model.pooling=mean"})), Catch::Contains("model.pooling"));
  train_on(1, again({}));
  const auto resumed = read_metrics(dir / "again");
  REQUIRE(resumed.size() == 6);
  for (size_t i = 0; i < 6; ++i) CHECK(resumed[i]["loss"] == whole[i]["loss"]);
  CHECK(resumed[5]["val_f1"] == whole[5]["val_f1"]);
  CHECK(read_file(dir / "again/model.safetensors") == read_file(dir / "out/model.safetensors"));
  // What it has learned predicts no tokens.
  const auto context = std::make_shared<Context>(ContextOptions{});
  const Context::Scope scope(context);
  const SavedModel saved = load_model(dir / "out");
  CHECK(saved.model->classifier()->classes == std::vector<std::string>{"down", "flat", "up"});
  CHECK_THAT(error_of([&] { nn::generate(*saved.model, std::vector<int32_t>{1}, {}); }),
             Catch::Contains("the model classifies texts, expected one that predicts tokens"));
}

TEST_CASE("classification: a model that predicts tokens goes on as a classifier", "[classify]") {
  const TempDir dir;
  const std::string from = model_dir(dir, "trl");
  const auto config = [&](const std::vector<std::string>& extra) {
    std::vector<std::string> all = {"--data.classify=" + dir.write("t.jsonl", many_texts()),
                                    "--model.from=" + from,
                                    "--model.context=24",
                                    "--device=cpu",
                                    "--train.steps=2",
                                    "--train.micro_batch=2",
                                    "--train.global_batch=4",
                                    "--train.log_every=1000",
                                    "--data.val_fraction=0"};
    all.insert(all.end(), extra.begin(), extra.end());
    return load_config("", all);
  };
  // Nothing is learned: the blocks are those that were there, the layer of the classes is new.
  train_on(2, config({"--output.dir=" + dir / "same", "--optim.lr=0", "--optim.final_lr=0"}));
  const dist::HfReader base(from);
  const SafetensorsFile after(dir / "same/model.safetensors");
  int64_t num_same = 0;
  for (const SafetensorsEntry& entry : after.entries()) {
    CAPTURE(entry.name);
    CHECK(entry.name != "head.weight");
    if (entry.name == "score.weight") {
      CHECK(entry.shape == Shape{3, 16});
      continue;
    }
    std::vector<float> there(static_cast<size_t>(entry.shape.numel())), here = there;
    base.read(entry.name, 0, entry.shape.numel(), there.data());
    after.read(entry.name, 0, entry.shape.numel(), here.data());
    CHECK(here == there);
    ++num_same;
  }
  CHECK(num_same == std::ssize(base.names()) - 1);  // all but the head
  // With adapters what classifies is trained whole, and goes with them.
  train_on(2, config({"--output.dir=" + dir / "lora", "--lora.targets=q_proj,v_proj"}));
  export_model(dir / "lora", dir / "peft");
  const auto adapters = nlohmann::json::parse(read_file(dir / "peft/adapter_config.json"));
  CHECK(adapters["task_type"] == "SEQ_CLS");
  CHECK(adapters["modules_to_save"] == nlohmann::json({"score"}));
}
