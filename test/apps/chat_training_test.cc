// Training on conversations: what the loss is of, on any number of ranks, and what goes on.

#include <cmath>
#include <filesystem>

#include "apps/checkpoint_command.h"
#include "apps/loss.h"
#include "apps/options.h"
#include "apps/packed_samples.h"
#include "test/apps/runs.h"

using namespace tessera;
using namespace tessera::apps;
using tessera::testing::error_on;
using tessera::testing::losses;
using tessera::testing::read_file;
using tessera::testing::read_metrics;
using tessera::testing::TempDir;
using tessera::testing::train_on;

namespace {

const char* const kTemplate =
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ '$' if m.role == 'assistant' }}\n"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

/// Conversations of many lengths, some of several turns.
std::string many_chats() {
  std::string lines;
  for (int i = 0; i < 90; ++i) {
    const std::string n = std::to_string(i * i);
    nlohmann::json row;
    if (i % 3 == 0) {
      row = {{"prompt", "square of " + std::to_string(i)}, {"completion", n}};
    } else {
      const auto turn = [](const std::string& role, const std::string& content) {
        return nlohmann::json{{"role", role}, {"content", content}};
      };
      row["messages"] = {turn("user", n), turn("assistant", std::string(i % 17, 'x') + "y"),
                         turn("user", "and"), turn("assistant", "no")};
    }
    lines += row.dump() + "\n";
  }
  return lines;
}

Config chat_config(const TempDir& dir, std::vector<std::string> extra = {}) {
  std::vector<std::string> overrides = {
      "--data.chat=" + dir.write("chats.jsonl", many_chats()),
      "--data.chat_template=" + dir.write("chat.jinja", kTemplate),
      "--data.restart_positions=true",
      "--data.val_fraction=0.2",
      "--output.dir=" + dir / "out",
      "--device=cpu",
      "--model.layers=2",
      "--model.heads=2",
      "--model.width=16",
      "--model.context=48",
      "--train.steps=6",
      "--train.micro_batch=2",
      "--train.global_batch=8",
      "--train.log_every=1000",
      "--train.eval_every=3",
      "--optim.lr=0.01",
      "--checkpoint.every=3",
  };
  overrides.insert(overrides.end(), extra.begin(), extra.end());
  return load_config("", overrides);
}

}  // namespace

TEST_CASE("chat training: the loss is the mean over the trained tokens of the whole batch",
          "[chat]") {
  const TempDir dir;
  const Config config = chat_config(dir);
  const Data data = load_data(config);
  const PackedSamples samples(data.sources, sample_options(config, data), config.data.val_fraction,
                              SplitPart::kTrain);
  const Batch batch = samples.batch(0, 8);
  // Rows of different numbers of targets, so that a mean of means is another number.
  std::vector<int64_t> counts;
  for (int64_t row = 0; row < 8; ++row) counts.push_back(samples.num_targets(row, 1));
  CHECK(*std::max_element(counts.begin(), counts.end()) >
        *std::min_element(counts.begin(), counts.end()));
  const auto model = make_model(config.model, data.vocab_size);
  model->initialize(static_cast<uint64_t>(config.train.seed));
  const NoGrad no_grad;
  const double expected =
      batch_loss(*model, batch).sum.item() / static_cast<double>(batch.num_valid);
  for (const int ranks : {1, 2, 4}) {
    train_on(ranks,
             chat_config(dir, {"--output.dir=" + dir / std::to_string(ranks), "--train.steps=1"}));
    const double loss = losses(dir / std::to_string(ranks)).at(0);
    CAPTURE(ranks, loss, expected);
    CHECK(std::abs(loss - expected) <= 1e-5 * expected);
  }
}

TEST_CASE(
    "chat training: in reproducible mode 1, 2 and 4 ranks give the same bits, resumed as well",
    "[chat]") {
  const TempDir dir;
  const auto run = [&](int ranks, const std::string& name, std::vector<std::string> extra = {}) {
    extra.push_back("--train.reproducible=true");
    extra.push_back("--output.dir=" + dir / name);
    train_on(ranks, chat_config(dir, extra));
    return read_metrics(dir / name);
  };
  const auto one = run(1, "1");
  REQUIRE(one.size() == 6);
  CHECK(one[2].contains("val_loss"));
  const auto check = [&](const std::vector<nlohmann::json>& other, const std::string& name) {
    CAPTURE(name);
    REQUIRE(other.size() == 6);
    for (size_t i = 0; i < 6; ++i) {
      for (const char* key : {"loss", "grad_norm", "val_loss"}) {
        CHECK(one[i].value(key, 0.0) == other[i].value(key, 0.0));
      }
    }
    CHECK(read_file(dir / name + "/model.safetensors") == read_file(dir / "1/model.safetensors"));
  };
  for (const int ranks : {2, 4}) check(run(ranks, std::to_string(ranks)), std::to_string(ranks));
  // The checkpoint of step 3, on another number of ranks.
  std::filesystem::copy(dir / "1", dir / "again", std::filesystem::copy_options::recursive);
  std::filesystem::remove_all(dir / "again/" + dist::step_directory_name(6));
  check(run(2, "again", {"--checkpoint.resume=auto"}), "again");
}

TEST_CASE("chat training: an epoch has each conversation once, apart from those of validation",
          "[chat]") {
  const TempDir dir;
  const Config config = chat_config(dir);
  const Data data = load_data(config);
  const SampleOptions options = sample_options(config, data);
  std::map<std::string, int> found;
  int64_t num_val = 0;
  for (const SplitPart part : {SplitPart::kTrain, SplitPart::kVal}) {
    const PackedSamples samples(data.sources, options, config.data.val_fraction, part);
    for (int64_t i = 0; i < samples.num_samples(); ++i) {
      const Batch batch = samples.batch(i, 1);
      std::string text;
      for (size_t t = 0; t < batch.inputs.size(); ++t) {
        if (batch.positions[t] == 0 && !text.empty()) {
          ++found[text], num_val += part == SplitPart::kVal ? 1 : 0, text.clear();
        }
        if (batch.inputs[t] != 0) text += static_cast<char>(batch.inputs[t]);
      }
      if (!text.empty()) ++found[text], num_val += part == SplitPart::kVal ? 1 : 0;
    }
  }
  CHECK(found.size() == 90);
  for (const auto& [text, count] : found) CHECK(count == 1);
  CHECK(num_val == 18);
}

TEST_CASE("chat training: other conversations, or another part of them, are not gone on with",
          "[chat]") {
  const TempDir dir;
  train_on(1, chat_config(dir, {"--train.steps=3"}));
  const auto again = [&](std::vector<std::string> extra) {
    extra.push_back("--checkpoint.resume=auto");
    return error_on(1, chat_config(dir, extra));
  };
  CHECK_THAT(again({"--data.train_on=all"}),
             Catch::Contains("data.train_on \"assistant\" there, \"all\" here"));
  CHECK_THAT(again({"--data.long_chats=drop"}),
             Catch::Contains("data.long_chats \"cut\" there, \"drop\" here"));
  // The same tokens, of which others are learned.
  const std::string marked =
      "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}"
      "{% generation %}$\n{% endgeneration %}{% else %}{{ '\n' }}{% endif %}{% endfor %}";
  CHECK_THAT(again({"--data.chat_template=" + dir.write("other.jinja", marked)}),
             Catch::Contains(": training data "));
  train_on(1, chat_config(dir, {"--checkpoint.resume=auto"}));
}

TEST_CASE("chat training: how many conversations there are is said", "[chat]") {
  const TempDir dir;
  const Config config = chat_config(dir, {"--model.context=30"});
  const Data data = load_data(config);
  CHECK(data.chats.find("chats: 90 conversations of 1 files, ") == 0);
  CHECK(data.chats.find(" longer than model.context + 1 = 31 tokens: cut") != std::string::npos);
  CHECK(data.tokenizer->name() == "byte");
}

TEST_CASE("chat training: the template goes with the model and its exports", "[chat]") {
  const TempDir dir;
  const std::map<std::string, std::string> bytes = text::make_byte_tokenizer()->hf_files();
  const std::string first = dir / "out", second = dir / "again";
  train_on(1, chat_config(dir, {"--train.steps=1"}));
  const auto run = [](const std::vector<std::string>& arguments) {
    std::FILE* const out = std::tmpfile();
    CHECK(checkpoint_command(arguments, out) == 0);
    std::fclose(out);
  };
  CHECK(read_file(first + "/chat_template.jinja") == kTemplate);
  run({"export", first, dir / "hf"});
  run({"export", first, dir / "tessera", "--format=tessera"});
  CHECK(read_file(dir / "hf/chat_template.jinja") == kTemplate);
  CHECK(read_file(dir / "tessera/chat_template.jinja") == kTemplate);
  // From there the template and the tokenizer are the model's own.
  std::ofstream(dir / "hf/tokenizer_config.json") << R"({"eos_token": "$"})";
  const std::vector<std::string> again = {"--model.from=" + dir / "hf",
                                          "--data.chat=" + dir / "chats.jsonl",
                                          "--output.dir=" + second,
                                          "--device=cpu",
                                          "--train.steps=1",
                                          "--train.micro_batch=1",
                                          "--model.context=40"};
  train_on(1, load_config("", again));
  CHECK(read_file(second + "/chat_template.jinja") == kTemplate);
  CHECK(read_file(second + "/tokenizer.json") == bytes.at("tokenizer.json"));
  run({"export", second, dir / "hf2"});
  CHECK(read_file(dir / "hf2/chat_template.jinja") == kTemplate);
  CHECK(read_file(dir / "hf2/tokenizer_config.json") == R"({"eos_token": "$"})");
  CHECK(read_file(dir / "hf2/tokenizer.json") == bytes.at("tokenizer.json"));
}
